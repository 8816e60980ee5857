"""The front's side of the transfer processes: who is there, who moves what, and when one is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pydantic import ValidationError

from gemmserve_service.http.transfer.protocol import (
    MAX_PACKET,
    TO_FRONT,
    End,
    Forget,
    Hello,
    Stop,
    Transfer,
    Transferred,
)
from gemmserve_service.runtime.acceptor import Acceptor
from gemmserve_service.runtime.unix_sockets import peer_of, process_descriptor

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.store.extents.extents import Extent, Place

_MAX_EACH: Final = 64  # transfers under way of one process; beyond them the front moves bytes itself
_GRACE_S: Final = 1.0  # for an answer that is there, where it was this process that stood still

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    order: Transfer
    done: asyncio.Future[Transferred | None]
    """Result; None: the process is gone, and the count of bytes unknown, so the connection cannot be used on."""
    hold: memoryview
    """View of the extent: as long as the process may touch it, no other array gets it (`Extent.quiescent`)."""


class TransferPool:
    """Every transfer process of one front; belongs to the event loop's thread."""

    def __init__(self, listener: socket.socket, *, silence_s: float) -> None:
        """`listener` is the supervisor's. A process that is `silence_s` late with an answer is killed."""
        self.transferred_bytes: Counter[str] = Counter()
        """Bytes moved by direction, "in" and "out"."""
        self.restarts = 0
        self.killed = 0
        self._silence_s = silence_s
        self._listener = listener
        self._acceptor: Acceptor | None = None
        self._links: list[_Link] = []
        self._names: set[str] = set()
        self._next_id = 0

    @property
    def ready(self) -> int:
        """Processes that are there."""
        return sum(bool(link.name) for link in self._links)

    @property
    def under_way(self) -> int:
        """Transfers that a process is at."""
        return sum(len(link.jobs) for link in self._links)

    def start(self) -> None:
        """Takes processes from now on."""
        self._acceptor = Acceptor(self._listener, self._take, "transfer processes")

    def stop(self) -> None:
        """Lets every process go, and waits for none; the listener stays open, for it is the supervisor's."""
        if self._acceptor is not None:
            self._acceptor.stop()
            self._acceptor = None
        for link in list(self._links):
            link.close()

    def forget(self, extent: str) -> None:
        """Tells every process that an extent is gone."""
        for link in self._links:
            link.forget(extent)

    def free(self) -> bool:
        """Whether a process could take one more transfer."""
        return any(link.name and len(link.jobs) < _MAX_EACH for link in self._links)

    async def transfer(
        self,
        direction: Literal["in", "out"],
        connection: int,
        place: Place,
        count: int,
        patience_s: float,
        over: Callable[[Transferred | None], None],
    ) -> bool:
        """Have `count` bytes moved between the socket `connection` and `place`. False: no process took that on.

        Else `over` hears what came of it, None if the process died, which leaves the connection in an unknown state.
        When it is called nothing touches connection and extent any more: a caller that is cancelled meanwhile is held
        until the process has let go, or is dead.
        """
        link = min(
            (one for one in self._links if one.name and len(one.jobs) < _MAX_EACH),
            key=lambda one: len(one.jobs),
            default=None,
        )
        if link is None or place.extent.sealed:
            return False
        loop = asyncio.get_running_loop()
        self._next_id += 1
        extent = place.extent
        order = Transfer(
            id=self._next_id,
            direction=direction,
            extent=extent.file[0],
            offset=extent.start + place.offset,
            count=count,
            patience_s=patience_s,
        )
        job = _Job(order, loop.create_future(), extent.view(extent.capacity))
        try:
            link.begin(job, connection, extent)
        except OSError as error:  # no descriptors left
            log.warning("a body is moved by the front itself: %s", error)
            return False
        timers: list[asyncio.TimerHandle] = []

        def late() -> None:
            timers.append(loop.call_later(_GRACE_S, link.kill, "it does not answer"))

        timers.append(loop.call_later(patience_s + self._silence_s, late))
        cancelled = None
        try:
            while not job.done.done():
                try:
                    await asyncio.wait([job.done])
                except asyncio.CancelledError as error:
                    cancelled = error
                    link.stop(order)
        finally:
            for timer in timers:
                timer.cancel()
            job.hold.release()
        moved = job.done.result()
        if moved is not None:
            self.transferred_bytes[direction] += moved.count
            if moved.end is End.FAILED:
                log.error("a transfer process could not move %d bytes: %s", count, moved.detail)
        over(moved)
        if cancelled is not None:
            raise cancelled
        return True

    # -- for links --------------------------------------------------------------------------------------------------

    def greeted(self, name: str) -> None:
        """A process is there."""
        self.restarts += name in self._names
        self._names.add(name)
        log.info("transfer process %s is ready", name)

    def lost(self, link: _Link) -> None:
        """A process is gone, or was never one."""
        if link in self._links:
            self._links.remove(link)
        if link.name and self._acceptor is not None:
            log.warning("transfer process %s is gone; %d connections break with it", link.name, len(link.jobs))

    def _take(self, connection: socket.socket) -> None:
        found = peer_of(connection)
        if found is None or found[1] != os.getuid():
            log.error("a process of another user connected to the transfer processes' socket: closed")
            connection.close()
            return
        self._links.append(_Link(self, connection, found[0]))


class _Link:
    """One transfer process."""

    def __init__(self, transfers: TransferPool, connection: socket.socket, pid: int) -> None:
        self.name = ""
        self.jobs: dict[int, _Job] = {}
        self._known: set[str] = set()  # extents that it may have mapped
        self._transfers = transfers
        self._connection: socket.socket | None = connection
        self._pid = pid
        self._process = process_descriptor(pid)
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        connection.setblocking(False)
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    def begin(self, job: _Job, connection: int, extent: Extent) -> None:
        """Hands a transfer over. Raises OSError when a descriptor cannot be had."""
        fds: list[int] = []
        try:
            fds.append(os.dup(connection))
            fds.append(os.open(extent.path, os.O_RDWR | os.O_CLOEXEC) if extent.fd is None else os.dup(extent.fd))
        except OSError:
            _close_all(fds)
            raise
        self.jobs[job.order.id] = job
        self._known.add(extent.file[0])
        self._put(job.order.model_dump_json().encode(), fds)

    def stop(self, order: Transfer) -> None:
        """Tells the process to end a transfer."""
        self._put(Stop(id=order.id).model_dump_json().encode(), [])

    def forget(self, extent: str) -> None:
        """Tells the process that an extent is gone, if it ever had it."""
        if extent in self._known:
            self._known.remove(extent)
            self._put(Forget(extent=extent).model_dump_json().encode(), [])

    def kill(self, reason: str) -> None:
        """SIGKILL. Its transfers are over when its end of the connection closes: when it is dead, not before."""
        if self._connection is not None:
            log.error("transfer process %s is killed: %s", self.name or "without a name", reason)
            self._transfers.killed += 1
            with contextlib.suppress(ProcessLookupError):
                if self._process is not None:
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
                else:
                    os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """The process is gone, or shall go."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection.fileno())
        loop.remove_writer(connection.fileno())
        connection.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._transfers.lost(self)
        jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            job.done.set_result(None)

    def _put(self, packet: bytes, fds: list[int]) -> None:
        if self._connection is None:
            _close_all(fds)
            return
        self._unsent.append((packet, fds))
        if len(self._unsent) == 1:
            self._write()

    def _write(self) -> None:
        """Sends what can be sent. A broken connection is found by reading: what is sent then is lost with it."""
        connection = self._connection
        assert connection is not None
        loop = asyncio.get_running_loop()
        while self._unsent:
            packet, fds = self._unsent[0]
            try:
                socket.send_fds(connection, [packet], fds)
            except BlockingIOError:
                loop.add_writer(connection.fileno(), self._write)
                return
            except ConnectionError:
                pass
            except OSError as error:  # too many descriptors are on their way
                log.warning("a transfer process cannot be told: %s", error)
                self.kill("it cannot be told")
            self._unsent.popleft()
            _close_all(fds)
        loop.remove_writer(connection.fileno())

    def _read(self) -> None:
        while self._connection is not None:
            try:
                data = self._connection.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.close()
                return
            try:
                message = TO_FRONT.validate_json(data)
            except ValidationError:
                self.kill("it speaks nonsense")
                return
            if isinstance(message, Hello):
                self.name = message.name
                self._transfers.greeted(message.name)
            elif (job := self.jobs.pop(message.id, None)) is not None and not job.done.done():
                job.done.set_result(message)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
