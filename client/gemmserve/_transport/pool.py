"""A client's connections to its server: wires of our own, or httpx clients of one connection each, taken from the top
of a stack.

httpx's own pool goes through all connections and all requests that wait whenever a request begins or ends (httpcore
1.0.9, `_assign_requests_to_connections`), which makes many at once superlinear; and beyond twenty connections it closes
each one as it becomes idle. Here a request waits before it has a connection, in a queue that costs nothing, and a new
connection is made only when all others are in use.

A pool belongs to one process. A child that was forked gives its copies of the sockets up (`leave`) without a word on
them: the connections go on being the parent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from gemmserve import _errors
from gemmserve._transport.direct import IDLE_S
from gemmserve._transport.library import httpx

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterator

    from gemmserve._transport.direct import Wire

H = TypeVar("H", bound="httpx.Client | httpx.AsyncClient | Wire")

IN_FLIGHT: Final = 64
"""Requests at one time. More do not make a server faster, and each costs both sides a connection."""

CLOSED: Final = "this client is closed: make another one (arrays and jobs are still on the server)"

_inherited: Final[list[object]] = []
"""Pools of parent processes. They are kept: what their finalizers would do could reach what the parent still uses."""


class _Pool(Generic[H]):
    """The stack. `shared`: one client for all requests, whose transport is the caller's own."""

    def __init__(self, make: Callable[[], H], shared: H | None) -> None:
        self._make = make
        self._shared = shared
        self._free: deque[tuple[H, float]] = deque()  # its ends are taken and added to by several threads
        self._sockets: dict[H, tuple[int, int, int]] = {}
        self.closed = False

    def _take(self) -> H:
        """A client that nobody uses. Raises ClientClosed when the pool is closed."""
        if self.closed:
            raise _errors.ClientClosed(CLOSED)
        if self._shared is not None:
            return self._shared
        try:
            return self._free.pop()[0]
        except IndexError:
            return self._make()

    def _give(self, http: H) -> list[H]:
        """Takes a client back; returns those that are to be closed."""
        if http is self._shared:
            return []
        if self.closed:
            self._sockets.pop(http, None)
            return [http]
        now = time.monotonic()
        self._free.append((http, now))
        return self._drain(float("inf") if self.closed else now - IDLE_S)

    def _drain(self, before: float) -> list[H]:
        """Takes out those that were not used since then."""
        drained: list[H] = []
        with contextlib.suppress(IndexError):
            while self._free[0][1] < before:
                http, since = self._free.popleft()
                if since >= before:  # another thread was faster
                    self._free.append((http, since))
                    break
                self._sockets.pop(http, None)
                drained.append(http)
        return drained

    def _end(self) -> list[H]:
        self.closed = True
        shared = [] if self._shared is None else [self._shared]
        return shared + self._drain(float("inf"))

    def note(self, http: H, response: httpx.Response) -> None:
        """Remembers which socket an answer comes by."""
        stream = response.extensions.get("network_stream")
        found = None if stream is None else stream.get_extra_info("socket")
        if found is not None:
            self.note_socket(http, found)

    def note_socket(self, http: H, found: socket.socket) -> None:
        """Remembers the socket of a connection."""
        if not hasattr(os, "fork"):
            return
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(found.fileno())
            self._sockets[http] = (found.fileno(), status.st_dev, status.st_ino)

    def leave(self) -> None:
        """Give up, in a child process, its copies of the sockets. Their numbers stay taken, for there are objects that
        know them.
        """
        _inherited.append(self)
        with contextlib.suppress(OSError):  # no descriptor left: then they stay, unused
            null = os.open(os.devnull, os.O_RDWR)
            try:
                for fd, device, inode in self._sockets.values():
                    with contextlib.suppress(OSError):
                        status = os.fstat(fd)
                        if (status.st_dev, status.st_ino) == (device, inode):
                            os.dup2(null, fd, inheritable=False)
            finally:
                os.close(null)


S = TypeVar("S", bound="httpx.Client | Wire")


class SyncPool(_Pool[S]):
    """Pool of connections for threads."""

    def __init__(self, make: Callable[[], S], shared: S | None = None) -> None:
        super().__init__(make, shared)
        self._places = threading.BoundedSemaphore(IN_FLIGHT)

    @contextlib.contextmanager
    def connection(self, *, idle: bool = False) -> Iterator[S]:
        """A client for one exchange. `idle`: one that the server is rightly silent in for long, which does not count.

        Raises ClientClosed when the pool is closed.
        """
        with contextlib.nullcontext() if idle else self._places:
            http = self._take()
            try:
                yield http
            finally:
                for old in self._give(http):
                    old.close()

    def close(self) -> None:
        """Closes every connection: those in use when they are given back."""
        for http in self._end():
            http.close()


class AsyncPool(_Pool[httpx.AsyncClient]):
    """Pool of connections for the tasks of one event loop."""

    def __init__(self, make: Callable[[], httpx.AsyncClient], shared: httpx.AsyncClient | None = None) -> None:
        super().__init__(make, shared)
        self._places = asyncio.Semaphore(IN_FLIGHT)

    @contextlib.asynccontextmanager
    async def connection(self, *, idle: bool = False) -> AsyncIterator[httpx.AsyncClient]:
        """Take a client, as `SyncPool.connection` does."""
        async with contextlib.nullcontext() if idle else self._places:
            http = self._take()
            try:
                yield http
            except GeneratorExit:  # the event loop is gone: nothing can be awaited any more
                raise
            except BaseException:
                await _close(self._give(http))
                raise
            await _close(self._give(http))

    async def close(self) -> None:
        """Close every connection, as `SyncPool.close` does."""
        await _close(self._end())


async def _close(clients: list[httpx.AsyncClient]) -> None:
    for http in clients:
        await http.aclose()
