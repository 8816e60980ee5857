"""SHA-256 of a buffer while it fills, in threads of low priority: hashing never slows the socket."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

_STEP: Final = 4 << 20  # bytes that gather before a thread is woken
_SLICE: Final = 4 << 20  # bytes between two looks at whether anybody still wants the result, and holds of the GIL
_NICE: Final = 10


def hash_pool() -> ThreadPoolExecutor:
    """Two threads that yield to everything else of the process where the system allows it (Linux: nice per thread)."""
    return ThreadPoolExecutor(2, thread_name_prefix="gemmserve-hash", initializer=_be_nice)


def _be_nice() -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class RunningHash:
    """Hashes `view` up to where it is filled, and with `prefix` also prefix + view (the body as it was sent)."""

    def __init__(self, pool: ThreadPoolExecutor, view: memoryview, prefix: bytes = b"") -> None:
        self.prefix = prefix
        self._pool = pool
        self._view = view
        self._data = hashlib.sha256()
        self._body = hashlib.sha256(prefix) if prefix else self._data
        self._done = 0
        self._filled = 0
        self._future: Future[None] | None = None
        self._cancelled = False

    def advance(self, filled: int) -> None:
        """Bytes up to `filled` are final; they are hashed as soon as there are enough."""
        self.reach(filled)
        if filled - self._done >= _STEP and (self._future is None or self._future.done()):
            self._future = self._pool.submit(self._pump, _never)

    def reach(self, filled: int) -> None:
        """Bytes up to `filled` are final; nothing is begun."""
        self._filled = filled

    async def finish(self) -> None:
        """Waits until everything that was filled is hashed."""
        while not self.over:
            await self.work(_never)

    async def work(self, enough: Callable[[], bool]) -> None:
        """Hashes a slice, and goes on while `enough()`, which a thread asks, does not hold."""
        if self._future is None or self._future.done():
            self._future = self._pool.submit(self._pump, enough)
        await asyncio.wrap_future(self._future)

    @property
    def done(self) -> int:
        """Bytes of the view that are hashed."""
        return self._done

    @property
    def over(self) -> bool:
        """Whether everything that was filled is hashed, or nobody wants it."""
        return self._done >= self._filled or self._cancelled

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it."""
        return self._cancelled

    def cancel(self) -> None:
        """Stops within one slice."""
        self._cancelled = True

    def data_digest(self) -> bytes:
        """Digest of the view alone."""
        return self._data.digest()

    def body_digest(self) -> bytes:
        """Digest of prefix and view."""
        return self._body.digest()

    def _pump(self, enough: Callable[[], bool]) -> None:
        while not self.over:
            piece = self._view[self._done : min(self._filled, self._done + _SLICE)]
            self._data.update(piece)
            if self._body is not self._data:
                self._body.update(piece)
            self._done += len(piece)
            if enough():
                return


def _never() -> bool:
    return False
