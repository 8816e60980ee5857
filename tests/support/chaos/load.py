"""Jobs submitted through whatever happens, and the account of them afterwards."""

from __future__ import annotations

import random
import threading
import time
import uuid
from dataclasses import dataclass, field

import httpx
import numpy as np

AGAIN = {409, 429, 502, 503, 504, 507}
"""409: what was sent before with the same key is still being taken in."""
_PROGRAMS = 0.2  # of all jobs
_TOGETHER = 0.2  # of all submissions; of so many jobs:
_SEVERAL = 4


@dataclass
class Account:
    """What became of the jobs that were answered 202."""

    accepted: int = 0
    succeeded: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    most_attempts: int = 0

    def fields(self) -> dict:
        return {
            "accepted": self.accepted,
            "succeeded": self.succeeded,
            "lost": len(self.lost),
            "wrong": len(self.wrong),
            "failed": self.failed,
            "most_attempts": self.most_attempts,
        }


class Client:
    """Repeats a request until it is answered: connections break, processes come and go."""

    def __init__(self, url: str, *, key: str | None = None, give_up_s: float = 120) -> None:
        self.http = httpx.Client(
            base_url=url, timeout=30, trust_env=False, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        self.give_up_s = give_up_s

    def send(self, method: str, path: str, **fields) -> httpx.Response:
        deadline = time.monotonic() + self.give_up_s
        while True:
            try:
                answer = self.http.request(method, path, **fields)
                if answer.status_code not in AGAIN or time.monotonic() > deadline:
                    return answer
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.02, 0.1))

    def put(self, array: np.ndarray, **parameters) -> str:
        answer = self.send(
            "POST",
            "/v1/arrays",
            params={"dtype": array.dtype.name, "shape": ",".join(map(str, array.shape)), **parameters},
            content=array.tobytes(),
            headers={"Content-Type": "application/octet-stream"},
        )
        answer.raise_for_status()
        return answer.json()["id"]

    def submit(self, **job) -> str:
        return self._submit(job)["id"]

    def submit_together(self, jobs: list[dict]) -> list[str]:
        return [job["id"] for job in self._submit({"jobs": jobs})["jobs"]]

    def _submit(self, asked: dict) -> dict:
        answer = self.send("POST", "/v1/jobs", json=asked, headers={"Idempotency-Key": uuid.uuid4().hex})
        answer.raise_for_status()
        return answer.json()

    def wait(self, job_id: str, within_s: float = 120) -> dict | None:
        """The job once it is final; None: nobody knows it."""
        deadline = time.monotonic() + within_s
        while True:
            answer = self.send("GET", f"/v1/jobs/{job_id}", params={"wait": 5})
            if answer.status_code == 404:
                return None
            answer.raise_for_status()
            info = answer.json()
            if info["state"] not in {"queued", "running"} or time.monotonic() > deadline:
                return info

    def fetch(self, array_id: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray | None:
        answer = self.send("GET", f"/v1/arrays/{array_id}/data", headers={"Accept": "application/octet-stream"})
        if answer.status_code != 200:
            return None
        return np.frombuffer(answer.content, dtype).reshape(shape)


class Load:
    """Products of a few operands, submitted by several threads at a steady pace, `count` of them in `over_s` seconds,
    and on until `enough` is called; a share of them is the first step of a program, and a share submitted together.
    """

    def __init__(
        self, url: str, *, count: int, over_s: float, threads: int = 4, size: int = 512, key: str | None = None
    ) -> None:
        self.key = key
        self.url, self.count, self.pause_s, self.size = url, count, over_s * threads / max(count, 1), size
        rng = np.random.default_rng(1)
        self.arrays = [
            (rng.standard_normal((size, size)) + 1j * rng.standard_normal((size, size))).astype("complex64")
            for _ in range(4)
        ]
        client = Client(url, key=key)
        self.ids = [client.put(array) for array in self.arrays]
        self.jobs: list[tuple[str, int, int, float]] = []
        self.errors: list[str] = []
        self._begun = 0
        self._enough = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._submit, args=(seed,), daemon=True) for seed in range(threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def enough(self) -> None:
        """Nothing more is submitted past `count`."""
        self._enough = True

    @property
    def begun(self) -> int:
        """Jobs whose submission has begun; each is accepted in the end, or there is an entry in `errors`."""
        return self._begun

    def _submit(self, seed: int) -> None:
        client, rng = Client(self.url, key=self.key), random.Random(seed)
        while True:
            number = _SEVERAL if rng.random() < _TOGETHER else 1
            with self._lock:
                if self._enough and self._begun >= self.count:
                    return
                self._begun += number
            products = [(rng.randrange(4), rng.randrange(4), float(rng.randrange(1, 9))) for _ in range(number)]
            try:
                jobs = [self._job(*product, program=rng.random() < _PROGRAMS) for product in products]
                ids = [client.submit(**jobs[0])] if number == 1 else client.submit_together(jobs)
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
                continue
            with self._lock:
                self.jobs += [(job_id, *product) for job_id, product in zip(ids, products, strict=True)]
            time.sleep(rng.uniform(0.5, 1.5) * self.pause_s * number)

    def _job(self, a: int, b: int, alpha: float, *, program: bool) -> dict:
        """The product, alone or as the first of three steps."""
        product = {"op": "gemm", "a": self.ids[a], "b": self.ids[b], "alpha": alpha}
        if not program:
            return product
        steps = [
            {"id": "d", **product},
            {"id": "e", "op": "gemm", "a": "$d", "b": self.ids[b], "trans_b": "C"},
            {"id": "f", "op": "gemm_reduce", "a": "$e", "b": "$d", "reduce": "absmax"},
        ]
        return {"op": "program", "steps": steps, "keep": ["d", "f"]}

    def settle(self) -> Account:
        """Waits for every job that was accepted and holds its result against NumPy's."""
        for thread in self._threads:
            thread.join()
        client, account = Client(self.url, key=self.key), Account(accepted=len(self.jobs))
        products: dict[tuple[int, int], np.ndarray] = {}
        for job_id, a, b, alpha in self.jobs:
            info = client.wait(job_id)
            if info is None:
                account.lost.append(job_id)
                continue
            account.most_attempts = max(account.most_attempts, info["attempt"])
            if info["state"] != "succeeded":
                account.failed.append(f"{job_id}: {info['state']} {(info.get('error') or {}).get('type')}")
                continue
            if (a, b) not in products:
                products[a, b] = self.arrays[a].astype("complex128") @ self.arrays[b].astype("complex128")
            expected = alpha * products[a, b]
            found = client.fetch(info["result"]["d"], "complex64", expected.shape)
            # FP32 over k = 512: n u is 3e-5 (Higham, Accuracy and Stability, 3.5).
            if found is None or np.linalg.norm(found - expected) > 1e-5 * np.linalg.norm(expected):
                account.wrong.append(job_id)
            else:
                account.succeeded += 1
        return account
