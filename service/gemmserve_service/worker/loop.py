"""A worker's conversation with the front: one task at a time, a look at the socket between panels, a heartbeat."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.protocol import TO_WORKER, Beat, Cancel, Decoder, Forget, Hello, Run, Stop, encode

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

    from gemmserve_service.worker.device import DeviceBackend
    from gemmserve_service.worker.runner import Runner

_RETRY_S: Final = 0.05
_PIECE: Final = 1 << 16
_BEATS: Final = 6  # in the time after which a silent worker is taken for hung
_LONGEST_BEAT_S: Final = 5.0
BROKEN_CONTEXT: Final = 70
"""Exit status (EX_SOFTWARE) of a worker whose device context cannot be used any more."""

log = logging.getLogger(__name__)


def serve(path: Path, name: str, runner: Runner, verified_error: float, heartbeat_timeout_s: float) -> None:
    """Serves front after front: when one dies the worker keeps its context and connects to the next.

    Ends only by the supervisor's pipe or by a broken device context.
    """
    backend = runner.backend
    beat_s = min(heartbeat_timeout_s / _BEATS, _LONGEST_BEAT_S)
    while True:
        with _connect(path) as connection:
            hello = Hello(
                worker=name,
                pid=os.getpid(),
                spec=backend.spec_fields(),
                verified_error=verified_error,
                memory_used=backend.memory_used(),
                interleaves=backend.cuts,
            )
            try:
                connection.sendall(encode(hello))
                _converse(connection, runner, beat_s)
            except OSError as error:
                log.info("the connection to the front broke: %s", error)
        time.sleep(_RETRY_S)


def _connect(path: Path) -> socket.socket:
    """Waits for a front; the listening socket belongs to the supervisor, so this blocks only while none accepts."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            time.sleep(_RETRY_S)
        else:
            return connection


class _Line:
    """The connection, read by the task's own thread and written by the heartbeat's too."""

    def __init__(self, connection: socket.socket, runner: Runner) -> None:
        self._connection = connection
        self._runner = runner
        self._decoder = Decoder()
        self._pending: deque[Run | Forget | Stop] = deque()
        self._sending = threading.Lock()
        self._passing = False

    def send(self, message: BaseModel) -> None:
        """One whole frame."""
        with self._sending:
            self._connection.sendall(encode(message))

    def receive(self) -> Run | Forget | Stop | None:
        """The next message; None once the front is gone."""
        while not self._pending:
            if not self._take():
                return None
        return self._pending.popleft()

    def look(self) -> None:
        """Takes in what has come meanwhile, and lets short tasks pass. Raises ConnectionError if the front is gone."""
        self._poll()
        while self._pending and not self._passing and not isinstance(self._pending[0], Stop):
            self._passing = True  # one of them lets no other pass
            try:
                self.handle(self._pending.popleft())
            finally:
                self._passing = False
            self._poll()

    def handle(self, message: Run | Forget | Stop) -> bool:
        """Does what a message says; False: stop."""
        runner = self._runner
        if isinstance(message, Run):
            answer = runner.run(message)
            if answer.kind == "failed" and answer.status >= 500 and not _usable(runner.backend):
                # Unanswered, so that the task is tried again by the process that follows this one.
                log.error("the device context is broken: starting anew")
                os._exit(BROKEN_CONTEXT)
            self.send(answer)
        elif isinstance(message, Forget):
            runner.forget(message.extents)
        return not isinstance(message, Stop)

    def _poll(self) -> None:
        try:
            while self._take(socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return
        raise ConnectionResetError("the front is gone, and with it everybody who wanted the result")

    def _take(self, flags: int = 0) -> bool:
        data = self._connection.recv(_PIECE, flags)
        for body in self._decoder.feed(data):
            message = TO_WORKER.validate_json(body)
            if isinstance(message, Cancel):
                self._runner.cancel(message.task)
            else:
                self._pending.append(message)
        return bool(data)


def _converse(connection: socket.socket, runner: Runner, beat_s: float) -> None:
    runner.forget_all()  # an earlier front's memory went with it
    line = _Line(connection, runner)
    runner.look = line.look
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(line, runner, beat_s, over), name="gemmserve-heart", daemon=True)
    heart.start()
    try:
        while (message := line.receive()) is not None and line.handle(message):
            pass
    finally:
        over.set()
        heart.join()


def _beat(line: _Line, runner: Runner, beat_s: float, over: threading.Event) -> None:
    """Says every `beat_s` that this process lives. In a thread: BLAS and drivers hold no lock while they compute."""
    while not over.wait(beat_s):
        try:
            line.send(Beat(task=runner.task, progress=runner.progress))
        except OSError:
            return  # the other thread notices too


def _usable(backend: DeviceBackend) -> bool:
    check = getattr(backend, "usable", None)
    return check is None or bool(check())
