"""The front's side of worker processes on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from gemmserve_service.executor.port import Worker
from gemmserve_service.executor.protocol import (
    TO_FRONT,
    Beat,
    Compiling,
    Decoder,
    Delivered,
    Done,
    Failed,
    Forget,
    Hello,
    Kept,
    ProtocolError,
    Stop,
    encode,
)
from gemmserve_service.runtime.unix_sockets import peer_of, process_descriptor

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from gemmserve_service.executor.port import ExecutorOwner, ToOne

log = logging.getLogger(__name__)


class LocalExecutor:
    """Workers connect to `listener` (held by the supervisor, so it outlives this process) and say hello.

    `names` are the devices that the supervisor keeps workers for.
    """

    def __init__(self, listener: socket.socket, names: Sequence[str]) -> None:
        self._listener = listener
        self._workers = {name: Worker(name) for name in names}
        self._in_order = tuple(self._workers.values())
        self._links: dict[str, _Link] = {}
        self._server: asyncio.Server | None = None
        self._accepted: set[_Link] = set()
        self.owner: ExecutorOwner | None = None

    async def start(self, owner: ExecutorOwner) -> None:
        """Accepts workers."""
        self.owner = owner
        loop = asyncio.get_running_loop()
        # From Python 3.13 on a server that closes would remove the path, which the next front needs.
        keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._server = await loop.create_unix_server(lambda: _Link(self), sock=self._listener, **keep)

    async def stop(self) -> None:
        """Tells the workers to end after their task, and closes."""
        self.owner = None
        if self._server is not None:
            self._server.close()
        for link in list(self._accepted):
            link.close(Stop())
        self._links.clear()

    def workers(self) -> Sequence[Worker]:
        """One per device, ready or not."""
        return self._in_order

    def send(self, worker: Worker, message: ToOne) -> None:
        """Write the message to the worker's socket; a worker that is just being lost will not answer."""
        link = self._links.get(worker.id)
        if link is not None:
            link.write(encode(message))

    def kill(self, worker: Worker, reason: str) -> None:
        """SIGKILL. The connection is given up at once: a process that the driver holds may take its time to end."""
        log.error("worker %s is killed: %s", worker.id, reason)
        link = self._links.get(worker.id)
        if link is not None:
            link.kill()
            self.disconnected(link)

    def forget(self, message: Forget) -> None:
        """Write the message to every worker's socket."""
        frame = encode(message)
        for link in self._links.values():
            link.write(frame)

    def accepted(self, link: _Link) -> None:
        """A process connected; it is no worker before it says hello."""
        self._accepted.add(link)

    def greeted(self, link: _Link, hello: Hello) -> None:
        """A worker said hello."""
        worker = self._workers.get(hello.worker)
        if worker is None:
            raise ProtocolError(f"no worker named {hello.worker!r} is expected")
        old = self._links.pop(worker.id, None)
        if old is not None:  # its end has not been noticed yet
            old.worker = None
            old.close()
            self._lose(worker)
        self._links[worker.id] = link
        link.worker = worker
        worker.greeted(hello)
        log.info(
            "worker %s is ready (pid %d, verified product, error %.1e)", worker.id, hello.pid, hello.verified_error
        )
        if self.owner is not None:
            self.owner.worker_ready(worker)

    def disconnected(self, link: _Link) -> None:
        """A connection ended."""
        self._accepted.discard(link)
        worker, link.worker = link.worker, None
        if worker is not None:
            self._links.pop(worker.id, None)
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        worker.ready = False
        if self.owner is not None:
            log.warning("worker %s is gone", worker.id)
            self.owner.worker_lost(worker)


class _Link(asyncio.Protocol):
    """One connection of a worker."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.worker: Worker | None = None
        self._executor = executor
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._socket = -1
        """The transport's descriptor."""
        self._process: int | None = None
        """Descriptor of the process at the other end, where the system has such."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        connection = transport.get_extra_info("socket")
        # Where the system cannot say who it is the folder's mode 0700 must do, and a hung worker is only given up.
        pid, user = peer_of(connection) or (os.getpid(), os.getuid())
        if user != os.getuid():
            log.error("a process of another user connected to the control socket: closed")
            self._transport.abort()
            return
        self._process = process_descriptor(pid) if pid != os.getpid() else None
        self._socket = -1 if connection is None else connection.fileno()
        self._executor.accepted(self)

    def data_received(self, data: bytes) -> None:
        if self.worker is not None:
            self.worker.heard = time.monotonic()
        ended = False
        try:
            for body in self._decoder.feed(data):
                message = TO_FRONT.validate_json(body)
                if isinstance(message, Hello):
                    self._executor.greeted(self, message)
                elif self.worker is None:
                    log.error("a worker answered before it said hello: closing its connection")
                    self.close()
                elif isinstance(message, Done | Failed):  # before all others, of which there are few
                    if self._executor.owner is not None:
                        ended = True
                        self._executor.owner.task_ended(self.worker, message, more=True)
                elif isinstance(message, Beat):
                    self.worker.beat(message.task, message.progress)
                    self.worker.registered_bytes = message.registered
                    self.worker.prepares = message.prepares
                    if message.task is not None and message.share > 0 and self._executor.owner is not None:
                        self._executor.owner.task_progressed(self.worker, message.task, message.share)
                    if message.health is not None:
                        self.worker.health = message.health
                elif isinstance(message, Compiling):
                    if self._executor.owner is not None:
                        self._executor.owner.task_compiles(self.worker, message)
                elif isinstance(message, Kept):
                    self.worker.keeps(message)
                    if self._executor.owner is not None:
                        self._executor.owner.copies_changed(self.worker, message)
                elif isinstance(message, Delivered):
                    if self._executor.owner is not None:
                        self._executor.owner.arrays_delivered(self.worker, message)
                elif self._executor.owner is not None:
                    self._executor.owner.results_written(self.worker, message)
        except (ProtocolError, ValidationError):
            log.exception("a worker speaks nonsense: closing its connection")
            self.close()
        finally:
            if ended and self._executor.owner is not None:
                self._executor.owner.answers_over()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._socket = -1
        self._executor.disconnected(self)
        self._forget_process()

    def write(self, frame: bytes) -> None:
        """Sends one frame. At once, where it can be: uvloop's transports begin to write at the end of a turn of the
        loop, when whoever sent a task has put all of its own affairs in order.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        sent = 0
        if self._socket >= 0 and not transport.get_write_buffer_size():
            try:  # not contextlib's `suppress`, which takes three calls of each task
                sent = os.write(self._socket, frame)
            except OSError:  # full, or broken, which the transport finds out
                sent = 0
        if sent < len(frame):
            transport.write(memoryview(frame)[sent:] if sent else frame)

    def kill(self) -> None:
        """Ends the process, and the connection without waiting for it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self._forget_process()
        if self._transport is not None:
            self._transport.abort()

    def _forget_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.close(process)

    def close(self, last: Stop | None = None) -> None:
        """Closes after what was written, and after `last`."""
        if last is not None:
            self.write(encode(last))
        if self._transport is not None:
            self._transport.close()
