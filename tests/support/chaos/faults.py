"""Faults of processes, disks and clocks. Each scenario returns what it found, for the report; `ok` says the verdict."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
from python_path import python_path

from chaos.load import Client, Load
from chaos.victim import Victim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KINDS = ("worker", "front", "supervisor", "all")


SUPPORT = Path(__file__).parents[1]
DEVICE = {
    "PYTHONPATH": python_path(SUPPORT / "device_on_host", SUPPORT / "cupy_on_numpy"),
    "GEMMSERVE_DEVICE": "cuda:0",
    "GEMMSERVE_ARENA_AHEAD_BYTES": "16777216",
    "GEMMSERVE_WRITE_BACK_DELAY_S": "2",
}
"""Environment of a server whose device is the stand-in for one: jobs succeed before their results are written."""


def kills(
    folder: Path,
    *,
    jobs: int,
    over_s: float,
    pause_s: tuple[float, float],
    seed: int = 1,
    kinds: Sequence[str] = KINDS,
    environment: Mapping[str, str] = {},
) -> dict:
    """SIGKILL of a random process of `kinds`, or of all, again and again while jobs come in, of each kind once or more;
    then each accepted job is checked.
    """
    rng = random.Random(seed)
    ready: dict[str, list[float]] = {kind: [] for kind in kinds}
    # A worker is killed so often here that a job may meet several of them by no fault of its own.
    with Victim(folder, GEMMSERVE_MAX_ATTEMPTS="20", **environment) as victim:
        load = Load(victim.url, count=jobs, over_s=over_s)
        began = time.monotonic()
        load.start()
        order: list[str] = []
        while load.running:
            time.sleep(rng.uniform(*pause_s))
            order = order or rng.sample(kinds, len(kinds))  # each kind as often as the others
            kind = order.pop()
            ready[kind].append(victim.kill_and_recover(kind))
            if sum(map(len, ready.values())) >= len(kinds):
                load.enough()
        account = load.settle()
        seconds = time.monotonic() - began
        status = victim.stop()
    fields = account.fields()
    return {
        "ok": not (account.lost or account.wrong or account.failed or load.errors)
        and account.accepted == load.begun >= jobs,
        "faults": {kind: len(times) for kind, times in ready.items()},
        "jobs": fields | {"not_accepted": load.errors},
        "seconds": round(seconds, 1),
        "time_to_ready_s": {
            kind: {"median": round(statistics.median(times), 2), "worst": round(max(times), 2)}
            for kind, times in ready.items()
            if times
        },
        "exit_status": status,
    }


@contextlib.contextmanager
def small_disk(mebibytes: int):
    """A full disk needs a small one: a tmpfs of its own, where this user may mount one; else None."""
    folder = Path(tempfile.mkdtemp(prefix="gemmserve-chaos-"))
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        folder.rmdir()


def wait_for(condition: Callable[[], object], what: str, *, within_s: float = 60) -> None:
    """Raises RuntimeError if it does not come true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {within_s} s: {what}")
        time.sleep(0.02)


class Counted:
    """How often a log says something, from now on."""

    def __init__(self, log: Path, text: str) -> None:
        self._log, self._text = log, text
        self._before = self._count()

    def more(self) -> bool:
        return self._count() > self._before

    def _count(self) -> int:
        return self._log.read_text(errors="replace").count(self._text)


def device_s(client: Client) -> float:
    """Seconds of devices' time that the server has heard of."""
    return client.http.get("/v1/usage").json()["quotas"]["device_seconds_per_day"]["used"]


def fill(path: Path) -> int:
    """Takes every free byte of a file system."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return path.stat().st_size


def head_only(victim: Victim, dtype: str, shape: str, nbytes: int) -> int:
    """The status that the head of an upload alone is answered with: a refusal does not wait for the body."""
    with socket.create_connection(("127.0.0.1", victim.port), timeout=120) as connection:
        connection.sendall(
            f"POST /v1/arrays?dtype={dtype}&shape={shape} HTTP/1.1\r\nHost: 127.0.0.1:{victim.port}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {nbytes}\r\n\r\n".encode()
        )
        return int(connection.recv(4096).split()[1])


def disk_full(folder: Path) -> dict:
    """No room for an upload, for a result, for the database's end of a job; then room again."""
    with small_disk(48) as disk:
        if disk is None:
            return {"ok": True, "skipped": "this user may not mount a tmpfs"}
        environment = {"GEMMSERVE_RECYCLE_BYTES": "0"}
        with Victim(disk, **environment) as victim:  # its log is on that disk too
            client = Client(victim.url)
            array = np.random.default_rng(2).standard_normal((512, 512))
            operand = client.put(array)
            first = client.wait(client.submit(op="gemm", a=operand, b=operand))
            (worker,) = victim.processes("worker")
            worker.suspend()
            held = [client.submit(op="gemm", a=operand, b=operand, alpha=alpha) for alpha in (2.0, 3.0)]
            once = Client(victim.url, give_up_s=0)
            refused_upload = head_only(victim, "float64", "4096,4096", 1 << 27)
            fill(disk / "filler")
            refused = [once.http.post("/v1/jobs", json={"op": "gemm", "a": operand, "b": operand}) for _ in range(3)]
            used_s = device_s(once)
            worker.resume()  # results have had their space since the submission; their rows have not
            wait_for(lambda: device_s(once) > used_s, "a product while the disk is full")
            alive = once.http.get("/livez").status_code
            during = [once.http.get(f"/v1/jobs/{job_id}").json()["state"] for job_id in held]
            (disk / "filler").unlink()
            recovered_s = victim.wait_ready(time.monotonic())
            ends = [client.wait(job_id) for job_id in held]
            right = [
                end["state"] == "succeeded"
                and np.allclose(client.fetch(end["result"]["d"], "float64", array.shape), alpha * (array @ array))
                for end, alpha in zip(ends, (2.0, 3.0), strict=True)
            ]
            victim.kill("all")
            victim.start()
            kept = [client.wait(job_id)["state"] for job_id in (first["id"], *held)]
            after = client.wait(client.submit(op="gemm", a=operand, b=operand))
            shutil.copy(victim.log, folder)
    return {
        "ok": refused_upload == 507
        and {answer.status_code for answer in refused} <= {507, 202}
        and alive == 200
        and all(right)
        and kept == ["succeeded"] * 3
        and after["state"] == "succeeded",
        "upload_refused_with": refused_upload,
        "submissions_answered": [answer.status_code for answer in refused],
        "states_while_full": during,
        "ready_again_after_s": round(recovered_s, 2),
        "ends": [end["state"] for end in ends],
        "after_kill_of_all": kept,
    }


def wait_until_gone(client: Client, array_id: str) -> None:
    """Waits until that array has expired."""
    wait_for(lambda: client.send("GET", f"/v1/arrays/{array_id}").status_code in {404, 410}, "an array expires")


SHIFTED_CLOCK = """
import os, time
_path, _time, _time_ns = os.environ["GEMMSERVE_CHAOS_CLOCK"], time.time, time.time_ns
def _shift():
    try:
        with open(_path) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0
time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
"""
DAY = 86_400.0


def clock_jumps(folder: Path) -> dict:
    """A day forward, two days back, with restarts in between: nothing expires that has time left."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    shift = folder / "shift"
    found: dict[str, object] = {}
    # The server cannot tell a clock that was set while it was down from time that passed.
    environment = {"PYTHONPATH": python_path(folder / "site"), "GEMMSERVE_CHAOS_CLOCK": str(shift)}
    with Victim(folder, **environment) as victim:
        client = Client(victim.url)
        array = np.eye(16)
        kept = client.put(array, ttl_s=3600)
        (worker,) = victim.processes("worker")
        worker.suspend()
        job = client.submit(op="gemm", a=kept, b=kept, timeout_s=3600)
        for name, jump in (("a day forward", DAY), ("two days back", -DAY)):
            jumps = Counted(victim.log, "clock jumped")
            (folder / "new").write_text(str(jump))
            (folder / "new").replace(shift)
            soon = client.put(array, ttl_s=0.2)  # an array that may expire makes the server look at the clock
            wait_for(jumps.more, "the server notices the jump")
            # It expires when its time has passed, and whatever expires with it has done so then.
            wait_until_gone(client, soon)
            array_there = client.send("GET", f"/v1/arrays/{kept}").status_code
            victim.kill("all")
            victim.start()
            again = client.send("GET", f"/v1/arrays/{kept}").status_code
            found[name] = {"array": array_there, "after_restart": again}
        end = client.wait(job)
        page = client.send("GET", "/v1/jobs").json()["items"]
        status = victim.stop()
    found["job"] = end["state"]
    found["ok"] = (
        all(each == {"array": 200, "after_restart": 200} for name, each in found.items() if name != "job")
        and end["state"] == "succeeded"
        and [each["id"] for each in page] == [job]
        and status == 0
    )
    return found


def second_server(folder: Path) -> dict:
    """On the same data directory: refused clearly and at once, and the first one does not notice."""
    with Victim(folder) as victim:
        began = time.monotonic()
        second = subprocess.run(
            [sys.executable, "-m", "gemmserve.cli", "serve", "--port", "0"],
            env=victim.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        seconds = time.monotonic() - began
        ready = httpx.get(f"{victim.url}/readyz", trust_env=False).status_code
        named = f"pid {victim.supervisor.pid}" in second.stderr and str(victim.data_dir) in second.stderr
    return {
        "ok": second.returncode == 1 and named and ready == 200,
        "status": second.returncode,
        "says": second.stderr.strip().splitlines()[-1] if second.stderr.strip() else "",
        "seconds": round(seconds, 2),
    }
