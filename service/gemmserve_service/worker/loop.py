"""A worker's conversation with the front: blocking reads, one task at a time."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.protocol import TO_WORKER, Decoder, Forget, Hello, Run, encode

if TYPE_CHECKING:
    from pathlib import Path

    from gemmserve_service.worker.device import DeviceBackend
    from gemmserve_service.worker.runner import Runner

_RETRY_S: Final = 0.05
_PIECE: Final = 1 << 16
BROKEN_CONTEXT: Final = 70
"""Exit status (EX_SOFTWARE) of a worker whose device context cannot be used any more."""

log = logging.getLogger(__name__)


def serve(path: Path, name: str, runner: Runner, verified_error: float) -> None:
    """Serves front after front: when one dies the worker keeps its context and connects to the next.

    Ends only by the supervisor's pipe or by a broken device context.
    """
    backend = runner.backend
    while True:
        with _connect(path) as connection:
            hello = Hello(
                worker=name,
                pid=os.getpid(),
                spec=backend.spec_fields(),
                verified_error=verified_error,
                memory_used=backend.memory_used(),
            )
            try:
                connection.sendall(encode(hello))
                _converse(connection, runner)
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


def _converse(connection: socket.socket, runner: Runner) -> None:
    decoder = Decoder()
    runner.forget_all()  # an earlier front's memory went with it
    while data := connection.recv(_PIECE):
        for body in decoder.feed(data):
            message = TO_WORKER.validate_json(body)
            if isinstance(message, Run):
                answer = runner.run(message)
                if answer.kind == "failed" and answer.status >= 500 and not _usable(runner.backend):
                    # Unanswered, so that the task is tried again by the process that follows this one.
                    log.error("the device context is broken: starting anew")
                    os._exit(BROKEN_CONTEXT)
                connection.sendall(encode(answer))
            elif isinstance(message, Forget):
                runner.forget(message.extents)
            else:
                return


def _usable(backend: DeviceBackend) -> bool:
    check = getattr(backend, "usable", None)
    return check is None or bool(check())
