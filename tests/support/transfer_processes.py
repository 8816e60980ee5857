"""Real transfer processes for an app that a test serves in this process: what the supervisor does for the front."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

from raw_connection import until

from gemmserve_service.http.transfer.pool import TransferPool
from gemmserve_service.http.transfer.process import TransferProcess
from gemmserve_service.runtime.handoff import TransferHandoff
from gemmserve_service.settings import Settings


class TransferProcesses:
    """Transfer processes of a `LiveApp`, as a context manager.

    `transfers` is the front's side; `pids` are in the order of their names.
    """

    def __init__(self, live, count: int = 1, *, silence_s: float = 600.0) -> None:
        self.live = live
        self._count = count
        self._silence_s = silence_s
        self._processes: list[subprocess.Popen] = []
        self._threads: list[threading.Thread] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def ready(self) -> int:
        return self.transfers.ready

    def start(self, name: str) -> None:
        settings = Settings(data_dir=self._folder.name)
        handoff = TransferHandoff(settings=settings, pipe_fd=self._pipe[0], name=name, control_path=self._path)
        process = subprocess.Popen(
            [sys.executable, "-m", "gemmserve_service.http.transfer"], stdin=subprocess.PIPE, pass_fds=(self._pipe[0],)
        )
        process.stdin.write(handoff.model_dump_json().encode())
        process.stdin.close()
        self._processes.append(process)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._path = str(Path(self._folder.name) / "m")
        self._pipe = os.pipe()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._path)
        self._listener.listen()
        self.transfers = TransferPool(self._listener, silence_s=self._silence_s)

        def begin() -> None:
            self.transfers.start()
            self.live.core.store.on_extent_destroyed(self.transfers.forget)
            self.live.app.state.metrics.watch(self.transfers)
            self.live.connection_class.transfers = self.transfers

        self.live.call(begin)
        for number in range(self._count):
            self.start(str(number))
        until(lambda: self.ready == self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self.live.call(self.transfers.stop)
        self._end()
        self._listener.close()
        for fd in self._pipe:
            os.close(fd)
        self._folder.cleanup()


class TransferThreads(TransferProcesses):
    """The same in threads of this process, for tests that kill none: they begin at once."""

    def start(self, name: str) -> None:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.connect(self._path)

        def run() -> None:
            with contextlib.closing(TransferProcess(control, name)) as transfer:
                transfer.run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _end(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a transfer process does not end with its front"
