"""A small service of the same protocol, in memory, for tests of the client: NumPy products, scripted failures.

`FakeService` is an httpx handler (`httpx.MockTransport(service)`), and `serving(service)` puts it behind a real socket.
It says what the protocol says and nothing more: ids, problems, pages, Prefer, idempotency, long polls, events.
"""

from __future__ import annotations

import base64
import contextlib
import email
import hashlib
import io
import itertools
import json
import re
import socket
import threading
from collections import defaultdict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPS = {"N": lambda x: x, "T": lambda x: x.swapaxes(-1, -2), "C": lambda x: x.conj().swapaxes(-1, -2), "R": np.conj}
NPY = "application/x-npy"


def problem(status: int, slug: str, detail: str = "because", headers: Any = None, **more: Any) -> httpx.Response:
    document = {"type": f"/problems/{slug}", "title": slug, "status": status, "detail": detail, **more}
    sent = {"content-type": "application/problem+json", "x-request-id": "req-1", **(headers or {})}
    return httpx.Response(status, headers=sent, content=json.dumps(document).encode())


def echoing(request: httpx.Request, response: httpx.Response) -> httpx.Response:
    """The answer with what it has to repeat of its request."""
    name = "gemmserve-exchange"
    response.headers.pop(name, None)
    if name in request.headers:
        response.headers[name] = request.headers[name]
    return response


def npy(array: np.ndarray) -> httpx.Response:
    data = io.BytesIO()
    np.save(data, array)
    return httpx.Response(200, headers={"content-type": NPY}, content=data.getvalue())


def load(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


def seen(operand: Any, values: dict[str, np.ndarray]) -> np.ndarray:
    """What an operand of a request shows of the values by name: all of one, or a view of it."""
    if isinstance(operand, str):
        return values[operand]
    base = values[operand["id"]]
    shown = base
    if "shape" in operand:
        memory = base.reshape(-1, order="F" if fortran(base) else "C")
        step = base.itemsize
        shown = np.ndarray(
            operand["shape"], base.dtype, memory, operand.get("offset", 0) * step,
            [stride * step for stride in operand["strides"]],
        )  # fmt: skip
    if operand.get("part"):
        assert base.dtype.kind == "c"
        return getattr(shown, operand["part"])
    return shown.conj() if operand.get("conj") else shown


def fortran(array: np.ndarray) -> bool:
    """Whether its elements lie in Fortran order, and not also in C order."""
    return array.flags.f_contiguous and not array.flags.c_contiguous


def scalar(value: Any) -> Any:
    """A scalar of a request: a number, or a list of real and imaginary part."""
    return complex(*value) if isinstance(value, list) else value


def reductions(c: np.ndarray, params: dict[str, Any]) -> dict[str, np.ndarray]:
    axis = {"m": -2, "n": -1}[params.get("axis", "m")]
    size = np.abs(c)
    known = {
        "sum": lambda: c.sum(axis),
        "sumsq": lambda: (size**2).sum(axis),
        "absmax": lambda: size.max(axis),
        "argmax": lambda: size.argmax(axis),
    }
    names = params.get("reduce", "sum")
    results = {name: known[name]() for name in ([names] if isinstance(names, str) else names)}
    return {**results, "c": c} if params.get("return_c") else results


def _tags(request: httpx.Request) -> tuple[str | None, dict[str, str]]:
    labels = dict(each.split("=", 1) for each in request.url.params.get_list("label"))
    return request.url.params.get("name"), labels


class FakeService:
    """`script` holds answers, exceptions or functions of the request that replace what would be answered next."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.tags: dict[str, tuple[str | None, dict[str, str]]] = defaultdict(lambda: (None, {}))
        """Name and labels of arrays."""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.requests: list[httpx.Request] = []
        self.script: deque[httpx.Response | Exception | Callable[[httpx.Request], Any] | None] = deque()
        self.polls_until_done = 0
        self.deleted_at_once = 1000
        self.on_device = False
        """Whether all arrays are on a device alone: there are no samples of them."""
        self.ready = True
        self._ids = itertools.count()

    @property
    def calls(self) -> list[str]:
        """What was asked, as "POST /v1/jobs"; ids are left out."""
        return [re.sub(r"/(arr|job)_\w+", r"/\1", f"{r.method} {r.url.path}") for r in self.requests]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """The answer, which says which request it belongs to."""
        return echoing(request, self._answer(request))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        self.requests.append(request)
        scripted = self.script.popleft() if self.script else None
        if isinstance(scripted, BaseException):
            raise scripted
        if callable(scripted):
            scripted = scripted(request)
        if scripted is not None:
            return scripted
        parts = request.url.path.strip("/").split("/")
        handler = getattr(
            self, f"_{request.method.lower()}_{parts[0]}_{'_'.join(parts[1:2])}".replace("-", "_").rstrip("_"), None
        )
        return handler(request, body, *parts[2:]) if handler else problem(404, "not-found", "no such route")

    def _id(self, kind: str) -> str:
        return f"{kind}_{next(self._ids):026d}"

    def _store(self, array: np.ndarray, name: str | None = None, labels: dict[str, str] | None = None) -> str:
        array_id = self._id("arr")
        self.arrays[array_id] = array
        self.tags[array_id] = name, labels or {}
        return array_id

    def _tagged(self, name: str | None, labels: dict[str, str]) -> list[str]:
        """Ids of the arrays with that name and those labels, oldest first."""
        return [
            array_id
            for array_id in self.arrays
            if name in {None, self.tags[array_id][0]} and labels.items() <= self.tags[array_id][1].items()
        ]

    def _info(self, array_id: str) -> dict[str, Any]:
        array = self.arrays[array_id]
        return {
            "id": array_id, "dtype": array.dtype.name, "shape": list(array.shape), "nbytes": array.nbytes,
            "order": "F" if fortran(array) else "C", "sha256": None, "created_at": "2025-01-02T03:04:05Z",
            "expires_at": None, "name": self.tags[array_id][0], "labels": self.tags[array_id][1],
        }  # fmt: skip

    def _page(self, request: httpx.Request, items: list[Any]) -> httpx.Response:
        start = int(request.url.params.get("cursor", 0))
        stop = start + int(request.url.params["limit"])
        cursor = str(stop) if stop < len(items) else None
        return httpx.Response(200, json={"items": items[start:stop], "next_cursor": cursor})

    def _post_v1_arrays(self, request: httpx.Request, body: bytes) -> httpx.Response:
        assert request.headers["content-type"] == NPY
        assert int(request.headers["content-length"]) == len(body)
        digest = f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"
        given = request.headers.get("content-digest")
        if given not in {None, digest}:
            return problem(400, "digest-mismatch")
        checked = {} if given is None else {"Gemmserve-Checked-Digest": given}
        return httpx.Response(201, json=self._info(self._store(load(body), *_tags(request))), headers=checked)

    def _post_v1_deletions(self, _: httpx.Request, body: bytes) -> httpx.Response:
        choice = json.loads(body)
        found = choice.get("ids") or self._tagged(choice.get("name"), choice.get("labels", {}))
        there = [array_id for array_id in dict.fromkeys(found) if array_id in self.arrays]
        if not choice.get("dry_run"):
            for array_id in there[: self.deleted_at_once]:
                del self.arrays[array_id]
        more = "ids" not in choice and not choice.get("dry_run") and len(there) > self.deleted_at_once
        count = len(there) if choice.get("dry_run") else min(len(there), self.deleted_at_once)
        missing = [array_id for array_id in choice.get("ids", ()) if array_id not in there]
        told = {"count": count, "nbytes": 0, "missing": missing, "elsewhere": [], "more": more}
        return httpx.Response(200, json=told)

    def _get_v1_arrays(self, request: httpx.Request, _: bytes, array_id: str = "", data: str = "") -> httpx.Response:
        if not array_id:
            return self._page(request, [self._info(each) for each in reversed(self._tagged(*_tags(request)))])
        if array_id not in self.arrays:
            return problem(404, "not-found", f"there is no array {array_id}")
        if data == "sample":
            return httpx.Response(204) if self.on_device else npy(np.atleast_2d(self.arrays[array_id])[:64, :64])
        if not data:
            return httpx.Response(200, json=self._info(array_id))
        if request.headers["accept"] == NPY:
            return npy(self.arrays[array_id])
        bare = self.arrays[array_id].tobytes(order="A")
        low, high = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"]).groups())
        assert 0 <= low <= high < len(bare)
        told = {"content-type": "application/octet-stream", "content-range": f"bytes {low}-{high}/{len(bare)}"}
        return httpx.Response(206, headers=told, content=bare[low : high + 1])

    def _delete_v1_arrays(self, _: httpx.Request, __: bytes, array_id: str) -> httpx.Response:
        if self.arrays.pop(array_id, None) is None:
            return problem(404, "not-found", f"there is no array {array_id}")
        return httpx.Response(204)

    def _post_v1_jobs(self, request: httpx.Request, body: bytes) -> httpx.Response:
        key = request.headers["idempotency-key"]
        if key not in self.keys:
            asked = json.loads(body)
            several = "jobs" in asked
            for item, each in enumerate(asked["jobs"] if several else [asked]):
                if named := set(re.findall(r"arr_\d+", json.dumps(each))) - {*self.arrays}:
                    prefix, more = (
                        (f"job {item}: ", {"item": item, "pointer": f"/jobs/{item}"}) if several else ("", {})
                    )
                    return problem(404, "not-found", f"{prefix}there is no array {named.pop()}", **more)
            self.keys[key] = [self._add(each) for each in asked.get("jobs", [asked])]
        jobs = [self.jobs[job_id] for job_id in self.keys[key]]
        if "prefer" in request.headers:
            for job in jobs:
                self._advance(job)
        status = 200 if all(job["state"] != "queued" for job in jobs) else 202
        if "jobs" not in json.loads(body):
            return httpx.Response(status, json=self._job(jobs[0]))
        told = [{name: value for name, value in self._job(job).items() if name != "request"} for job in jobs]
        return httpx.Response(status, json={"jobs": told})

    def _add(self, asked: dict[str, Any]) -> str:
        job_id = self._id("job")
        operands = {name: seen(asked[name], self.arrays) for name in "abc" if name in asked}
        if asked["op"] == "program":
            operands = dict(self.arrays)  # pinned: whatever is deleted from now on
        self.jobs[job_id] = {
            "id": job_id, "op": asked["op"], "state": "queued", "attempt": 0, "request": asked, "result": None,
            "created_at": "2025-01-02T03:04:05Z", "error": None, "algorithm": None, "timings": None,
            "polls": self.polls_until_done, "operands": operands,
        }  # fmt: skip
        return job_id

    def _get_v1_jobs(self, request: httpx.Request, _: bytes, job_id: str = "", events: str = "") -> httpx.Response:
        if not job_id:
            return self._page(request, [self._job(job) for job in reversed(self.jobs.values())])
        if job_id not in self.jobs:
            return problem(404, "not-found", f"there is no job {job_id}")
        job = self.jobs[job_id]
        if events:
            states = [self._job(job)]
            while job["state"] == "queued":
                self._advance(job)
                states.append(self._job(job))
            text = ": still here\n\n" + "".join(f"event: job\ndata: {json.dumps(state)}\n\n" for state in states)
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=text.encode())
        if "wait" in request.url.params:
            self._advance(job)
        return httpx.Response(200, json=self._job(job))

    def _post_v1_job_states(self, request: httpx.Request, body: bytes) -> httpx.Response:
        asked = json.loads(body)
        known = [self.jobs[job_id] for job_id in asked["ids"] if job_id in self.jobs]
        if "wait" in asked:
            for job in known:
                self._advance(job)
        if asked.get("final"):
            known = [job for job in known if job["id"] == asked["ids"][0] or job["state"] not in {"queued", "running"}]
        told = [{name: value for name, value in self._job(job).items() if name != "request"} for job in known]
        missing = [job_id for job_id in asked["ids"] if job_id not in self.jobs]
        return httpx.Response(200, json={"jobs": told, "missing": missing, "elsewhere": []})

    def _delete_v1_jobs(self, _: httpx.Request, __: bytes, job_id: str) -> httpx.Response:
        job = self.jobs[job_id]
        if job["state"] == "queued":
            job["state"] = "cancelled"
        return httpx.Response(200, json=self._job(job))

    def _job(self, job: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in job.items() if name not in {"polls", "operands"}}

    def _advance(self, job: dict[str, Any]) -> None:
        if job["state"] != "queued":
            return
        job["polls"] -= 1
        if job["polls"] < 0:
            results = self._compute(job["op"], job["request"], job["operands"])
            job["result"] = {name: self._store(array) for name, array in results.items()}
            job |= {"state": "succeeded", "algorithm": "numpy", "attempt": 1, "timings": {"kernel_s": 0.5}}
            job |= {"started_at": "2025-01-02T03:04:06Z", "finished_at": "2025-01-02T03:04:06.500Z"}

    def _compute(self, op: str, params: dict[str, Any], operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if op == "program":
            return self._run_program(params, operands)

        if op in {"add", "multiply"}:
            d = scalar(params.get("alpha", 1)) * operands["a"]
            if op == "multiply":
                d = d * operands["b"]
            elif "b" in operands:
                d = d + scalar(params.get("beta", 1)) * operands["b"]
            d = d + scalar(params.get("gamma", 0))
            return {"d": np.array(d, dtype=params.get("dtype") or d.dtype, order=params.get("order", "C"))}
        a = OPS[params.get("trans_a", "N")](operands["a"])
        b = OPS[params.get("trans_b", "N")](operands["b"])
        d = scalar(params.get("alpha", 1)) * (a @ b)
        if op == "gemm_reduce":
            return reductions(d, params)
        if "c" in operands:
            d = d + scalar(params.get("beta", 1)) * operands["c"]
        return {"d": np.asarray(d, order=params.get("order", "C"))}

    def _run_program(self, job: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values, used = dict(arrays), set()
        for step in job["steps"]:
            operands = {name: seen(step[name], values) for name in "abc" if name in step}
            named = [step[name] for name in "abc" if name in step]
            used |= {operand if isinstance(operand, str) else operand["id"] for operand in named}
            for name, array in self._compute(step["op"], step, operands).items():
                values[f"${step['id']}" + (f".{name}" if step["op"] == "gemm_reduce" else "")] = array
        made = [name for name in values if name.startswith("$")]
        keep = [f"${name}" for name in job["keep"]] if "keep" in job else [name for name in made if name not in used]
        return {name[1:]: values[name] for name in keep}

    def _one_shot(self, op: str, request: httpx.Request, body: bytes) -> httpx.Response:
        head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
        message: Any = email.message_from_bytes(head + body)
        parts = [
            (part.get_param("name", header="content-disposition"), part.get_payload(decode=True))
            for part in message.get_payload()
        ]
        assert parts[0][0] == "params"
        operands = {name: load(data) for name, data in parts[1:]}
        results = self._compute(op, json.loads(parts[0][1]), operands)
        if len(results) == 1:
            return npy(*results.values())
        data = io.BytesIO()
        np.savez(data, **results)
        return httpx.Response(200, headers={"content-type": "application/x-npz"}, content=data.getvalue())

    def _post_v1_gemm(self, request: httpx.Request, body: bytes) -> httpx.Response:
        return self._one_shot("gemm", request, body)

    def _post_v1_gemm_reduce(self, request: httpx.Request, body: bytes) -> httpx.Response:
        return self._one_shot("gemm_reduce", request, body)

    def _get_v1_devices(self, _: httpx.Request, __: bytes) -> httpx.Response:
        return httpx.Response(200, json={"devices": [{"id": "cpu", "compute_modes": ["auto", "fp32"]}]})

    def _get_v1_usage(self, _: httpx.Request, __: bytes) -> httpx.Response:
        return httpx.Response(200, json={"arrays": len(self.arrays)})

    def _get_healthz(self, _: httpx.Request, __: bytes) -> httpx.Response:
        return httpx.Response(200, json={"status": "ok"})

    def _get_readyz(self, _: httpx.Request, __: bytes) -> httpx.Response:
        return httpx.Response(200, json={"status": "ok"}) if self.ready else problem(503, "not-ready")


@contextlib.contextmanager
def nobody_s_address() -> Iterator[str]:
    """A URL at which nobody listens, nor will meanwhile: the port is taken."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextlib.contextmanager
def serving(service: FakeService) -> Iterator[str]:
    """The service on a socket of its own; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            url = f"http://{self.headers['host']}{self.path}"
            response = service(httpx.Request(self.command, url, headers=dict(self.headers), content=body))
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                if name != "content-length":
                    self.send_header(name, value)
            self.send_header("content-length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 (http.server's names)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
