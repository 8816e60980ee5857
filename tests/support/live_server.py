"""The real `gemmserve serve` for tests: one BLAS thread, a log to look at, and nothing left behind afterwards."""

from __future__ import annotations

import signal
import time
import uuid
from typing import TYPE_CHECKING, Self

import httpx
import psutil
from local_server import LocalServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MARK = "GEMMSERVE_TEST_MARK"


class LiveServer(LocalServer):
    """A `LocalServer` on the CPU that can be inspected. As a context manager it demands a clean end by SIGTERM.

    Its processes carry a mark in their environment, so that every descendant is found, whatever its parent is by then.
    """

    def __init__(self, *arguments: str, data_dir: Path | None = None, environment: Mapping[str, str] = {}) -> None:
        self.mark = uuid.uuid4().hex
        marked = {
            "GEMMSERVE_DEVICE": "cpu",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: self.mark,
            **environment,
        }
        super().__init__(*arguments, data_dir=data_dir, environment=marked)

    def __enter__(self) -> Self:
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
        """Everything that it printed; kept after its end."""
        return self._text if self.returncode is not None else self.log.read_text(errors="replace")

    def terminate(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Ends it and asserts that within thirty seconds no process of it is left."""
        processes = self.processes()
        self.process.send_signal(with_signal)
        self.process.wait(self._stop_within_s)
        self._text = self.log.read_text(errors="replace")
        self.stop()
        _, left = psutil.wait_procs(processes, timeout=30)
        left = [*left, *self.processes()]
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}\n{self._text}"

    def processes(self) -> list[psutil.Process]:
        """Every living process of this server, the supervisor included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # another user's process, or one that ended meanwhile
        return found

    def workers(self) -> list[psutil.Process]:
        """The processes that own a device."""
        return [process for process in self.processes() if "gemmserve_service.worker" in process.cmdline()]

    def http(self) -> httpx.Client:
        """A plain HTTP client of it."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def wait_ready(self, within_s: float = 30) -> None:
        """Waits until /readyz is 200 (after a worker was lost)."""
        deadline = time.monotonic() + within_s
        with self.http() as http:
            while (answer := http.get("/readyz")).status_code != 200:
                assert time.monotonic() < deadline, f"not ready after {within_s} s: {answer.text}\n{self.text}"
                time.sleep(0.05)
