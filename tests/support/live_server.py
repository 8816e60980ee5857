"""The real `gemmserve serve` for tests: one BLAS thread, a log to look at, and nothing left behind afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import httpx
import psutil
from joined_workers import JoinedWorkers, all_joined, take_device
from local_server import LocalServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")

MARK = "GEMMSERVE_TEST_MARK"

_LONG_S = 120.0
"""Longer than any start or end takes on a machine that is busy with something else; nobody waits for it in vain."""

PATIENCE = {
    "GEMMSERVE_HEAD_TIMEOUT_S": "600",
    "GEMMSERVE_MIN_BODY_RATE": "0",
    "GEMMSERVE_KEEP_ALIVE_S": "600",
    "GEMMSERVE_HEARTBEAT_TIMEOUT_S": "600",
    "GEMMSERVE_JOIN_SILENCE_S": "600",
    "GEMMSERVE_HANG_S": "600",
}
"""Settings of a server that takes no client or worker for dead because a busy machine let them stand still."""

DETERMINISM = {"GEMMSERVE_VERIFY_SHARE": "0", "GEMMSERVE_TRANSFER_PROCESSES": "0"}
"""Settings of a server that does nothing by chance, and the same on every machine."""


class LiveServer(LocalServer):
    """A `LocalServer` on the CPU that can be inspected. As a context manager it demands a clean end by SIGTERM.

    Its processes carry a mark in their environment, so that every descendant is found, whatever its parent is by then.
    `joins`: names of nodes of one processor each that join it (`joined`), and it has no workers of its own.
    """

    def __init__(
        self,
        *arguments: str,
        data_dir: Path | None = None,
        environment: Mapping[str, str] = {},
        joins: Sequence[str] | None = None,
        join_host: str = "127.0.0.1",
    ) -> None:
        self.mark = uuid.uuid4().hex
        marked = {
            "GEMMSERVE_DEVICE": "cpu",
            "GEMMSERVE_ARENA_AHEAD_BYTES": "16777216",  # memory of this machine, on devices that are none
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: self.mark,
            **PATIENCE,
            **DETERMINISM,
            **environment,
        }
        self.joined: JoinedWorkers | None = None
        """Its workers, where they have joined: see `joined_workers`."""
        self._folder = tempfile.TemporaryDirectory(prefix="gemmserve-joined-")
        self.agents_log = Path(self._folder.name) / "agents.log"
        left = list(arguments)
        if joins is not None or all_joined():
            left, devices = take_device(left, marked)
            self.joined = JoinedWorkers(environment=os.environ | marked, log=self.agents_log, host=join_host)
            for name, device in (
                [("node", each) for each in devices.split(",")] if joins is None else [(name, "cpu") for name in joins]
            ):
                self.joined.add(device, name)
            marked |= self.joined.settings
        super().__init__(*left, data_dir=data_dir, environment=marked, start_within_s=_LONG_S, stop_within_s=_LONG_S)

    def __enter__(self) -> Self:
        if self.joined is not None:
            self.joined.start()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.returncode is not None:  # the test has ended it
            return
        self.terminate()
        if kind is None:
            assert self.returncode == 0, f"SIGTERM ended the server with status {self.returncode}\n{self.text}"

    @property
    def text(self) -> str:
        """Everything that it printed, and then what its agents did; kept after its end."""
        return self._text if self.returncode is not None else self._said()

    def _said(self) -> str:
        logs = [path for path in (self.log, self.agents_log) if path.exists()]
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def terminate(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Ends it and asserts that no process of it is left."""
        self.process.send_signal(with_signal)
        self.wait_end()

    def wait_end(self) -> None:
        """Waits for the end that it was told of, and asserts that no process of it is left."""
        self.process.wait(self._stop_within_s)
        statuses = self._end_agents()
        self._text = self._said()
        self.stop()
        assert not any(statuses), f"agents ended with {statuses}\n{self._text}"
        deadline = time.monotonic() + _LONG_S
        while left := self.processes():  # looked for anew: some are started while one looks
            if time.monotonic() > deadline:
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                raise AssertionError(f"left behind: {left}\n{self._text}")
            time.sleep(0.01)

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        try:
            super().stop(with_signal)
        finally:
            self._end_agents()
            self._folder.cleanup()

    def _end_agents(self) -> list[int]:
        joined, self.joined = self.joined, None
        return [] if joined is None else joined.stop()

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Every living process of this server, the supervisor included; those alone that run `module`, if one is
        named."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) != self.mark or (module and module not in process.cmdline()):
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # another user's process, or one that ended meanwhile
        return found

    def workers(self) -> list[psutil.Process]:
        """The processes that own a device."""
        return self.processes("gemmserve_service.executor.worker")

    def front(self) -> psutil.Process:
        """The process that answers."""
        (process,) = self.processes("gemmserve_service.processes.front")
        return process

    def http(self) -> httpx.Client:
        """A plain HTTP client of it."""
        return httpx.Client(base_url=self.url, timeout=_LONG_S, trust_env=False, verify=False)

    def wait_ready(self, within_s: float = _LONG_S) -> None:
        """Waits until /readyz is 200 (after a process was lost)."""
        deadline = time.monotonic() + within_s
        with self.http() as http:
            while True:
                try:
                    answer = http.get("/readyz")
                    if answer.status_code == 200:
                        return
                    said = answer.text
                except httpx.TransportError as error:  # of a front that was killed
                    said = repr(error)
                assert time.monotonic() < deadline, f"not ready after {within_s} s: {said}\n{self.text}"
                time.sleep(0.02)

    def wait_quiet(self, within_s: float = _LONG_S) -> None:
        """Waits until nothing is under way that others asked for: bodies, jobs, operands and results of one-shots."""
        gauges = ("gemmserve_jobs_running", "gemmserve_queue_depth", "gemmserve_scratch_bytes")
        with self.http() as http:

            def quiet() -> bool:
                lines = http.get("/metrics").text.splitlines()
                said = {
                    name: float(line.split()[1]) for name in gauges for line in lines if line.startswith(f"{name} ")
                }
                assert len(said) == len(gauges), "a metric has another name now"
                return not any(said.values()) and not http.get("/v1/usage").json()["quotas"]["inflight_bytes"]["used"]

            until(quiet, within_s)


def until(condition: Callable[[], T], within_s: float = 60.0, *, every_s: float = 0.02) -> T:
    """Waits until it is true; returns what it gave then."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(every_s)
    return value
