"""Arrays that are deleted when the last handle on them is gone: what `Client(auto_delete=True)` does.

All handles on one array (views, copies) share a `Lifetime`; when the interpreter has collected it, the array's id goes
into a queue, from which a thread deletes many by one exchange. Nothing here waits for the server but that thread, and
`end`, for a bounded time. A process that was forked deletes nothing of its parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Delete: TypeAlias = Callable[[Sequence[str]], object]
    """Deletes arrays by their ids; called in a thread of its own, one exchange at a time. What it raises is ignored."""
    OpenDelete: TypeAlias = Callable[[], tuple[Delete, Callable[[], None]]]
    """Gives such a function, and what is called when it is needed no more."""

_TOGETHER_S: Final = 0.05
"""Seconds for which others may join the first array of an exchange; no measurement behind the figure."""
_AT_EXIT_S: Final = 1.0
"""Seconds for which the interpreter's end waits for what is left to be deleted, by all clients."""

_Ids: TypeAlias = "queue.SimpleQueue[str | None]"


class Lifetime:
    """Time for which an array is needed by handles: what all of them share. `deleted`: by one of them."""

    __slots__ = ("__weakref__", "_finalizer", "deleted")

    def __init__(self) -> None:
        self.deleted = False
        self._finalizer: weakref.finalize[[str | None], Lifetime] | None = None

    def keep(self) -> None:
        """Leave the array on the server when the last handle goes."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def end(self) -> None:
        """Note that the array is deleted."""
        self.deleted = True
        self.keep()

    @property
    def kept(self) -> bool:
        """Whether the array outlives its handles."""
        return self._finalizer is None or not self._finalizer.alive

    def _until(self, gone: Callable[[str | None], None], array_id: str) -> None:
        self._finalizer = weakref.finalize(self, gone, array_id)
        self._finalizer.atexit = False  # `_exit` sees to what is left


class AutoDelete:
    """Deletes the arrays of one client when the last handles on them go. Safe to share between threads.

    `open_delete` is called in each process that has such arrays, when it gets the first one.
    """

    def __init__(self, open_delete: OpenDelete) -> None:
        self._open_delete = open_delete
        self._lock = threading.Lock()
        self._begin()
        _instances.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lifetimes: weakref.WeakValueDictionary[str, Lifetime] = weakref.WeakValueDictionary()
        self._ids: _Ids = queue.SimpleQueue()  # whose put may come from any code that the collector interrupts
        self._thread: threading.Thread | None = None

    def forked(self) -> None:
        """Leave the parent's arrays to it, in a child process."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._begin()

    def lifetime(self, array_id: str, *, made: bool) -> Lifetime:
        """The lifetime that handles on an array share. `made`: the client has made the array, which goes with it then;
        others stay, unless it is one that the client made.
        """
        with self._lock:
            found = self._lifetimes.get(array_id)
            if found is None:
                found = Lifetime()
                if made and self._started():
                    found._until(self._ids.put, array_id)
                    self._lifetimes[array_id] = found
            return found

    def _started(self) -> bool:
        """Whether there is a thread that deletes."""
        if self._thread is None:
            thread = threading.Thread(
                target=_run, args=(self._ids, *self._open_delete()), name="gemmserve-delete", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or the system has no more: arrays stay, as without this
                return False
            self._thread = thread
            # Of a client that nobody closes: what is in the queue by then is still deleted.
            weakref.finalize(self, self._ids.put, None).atexit = False
        return True

    def deleted(self, array_id: str) -> None:
        """Note that an array was deleted by its id."""
        lifetime = self._lifetimes.get(array_id)
        if lifetime is not None:
            lifetime.end()

    def end(self, wait_s: float) -> None:
        """Delete what handles still hold, for they are of no more use: the client is closed. Returns when that is done,
        or after so many seconds.
        """
        with self._lock:
            if self._pid != os.getpid():  # a fork past os.fork
                return
            thread, self._thread = self._thread, None
            for array_id, lifetime in list(self._lifetimes.items()):
                if not lifetime.kept:
                    lifetime.end()
                    self._ids.put(array_id)
            if thread is not None:
                self._ids.put(None)
        if thread is not None:
            thread.join(max(wait_s, 0.0))


def _run(ids: _Ids, delete: Delete, close: Callable[[], None]) -> None:
    """Delete what comes, some together, until a None comes; in a thread of its own."""
    more = True
    while more:
        some = [ids.get()]
        until = time.monotonic() + _TOGETHER_S
        with contextlib.suppress(queue.Empty):
            while some[-1] is not None:
                some.append(ids.get(timeout=max(until - time.monotonic(), 0.0)))
        more = some[-1] is not None
        found = [each for each in some if each is not None]
        if found:
            with contextlib.suppress(Exception):  # nobody could be told: such arrays stay until their time has passed
                delete(found)
    close()


_instances: weakref.WeakSet[AutoDelete] = weakref.WeakSet()


def _exit() -> None:
    """Delete what is left, at the interpreter's end."""
    until = time.monotonic() + _AT_EXIT_S
    for each in list(_instances):
        each.end(until - time.monotonic())


def _forked() -> None:
    for each in list(_instances):
        each.forked()


atexit.register(_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
