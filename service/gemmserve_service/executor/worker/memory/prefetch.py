"""Copies of arrays that no task has asked for yet, taken while a device has nothing to do and where it has room."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np

    from gemmserve_service.executor.protocol import ArrayRef
    from gemmserve_service.executor.worker.memory.residency import Residency

_PIECE: Final = 64 << 20
"""Bytes between two looks whether a task waits: a few milliseconds of a link."""

log = logging.getLogger(__name__)


class Copies(Protocol):
    """Copies on a device (`DeviceCopies`), as far as prefetches use them."""

    resident: Residency

    def begin(self, data: np.ndarray[Any, Any]) -> Any:
        """Room for a copy."""

    def extend(self, copy: Any, data: np.ndarray[Any, Any], start: int, stop: int) -> None:
        """Copies those bytes; returns when they are there."""


class ArrayPrefetch:
    """Copy of one array, made piece by piece."""

    def __init__(self, ref: ArrayRef, data: Callable[[], np.ndarray[Any, Any]], copies: Copies) -> None:
        """`data` maps the array. Raises OSError if its extent is gone."""
        assert ref.cache_id is not None
        self.array = ref.cache_id
        self.unwanted = False
        """Gone, or asked for by a task that brings it itself."""
        self._ref = ref
        self._data = data
        self._copies = copies
        self._copy: Any = None
        self._done = 0

    def go_on(self, waits: Callable[[], bool]) -> bool:
        """Brings pieces until all are here (True: so it is, or it never will be) or somebody waits."""
        resident, nbytes = self._copies.resident, self._ref.nbytes
        data = self._data()
        if self._copy is None and (resident.holds(self.array) or resident.room < nbytes):
            return True
        if self._copy is None:
            self._copy = self._copies.begin(data)
        while self._done < nbytes and not self.unwanted:
            if waits():
                return False
            stop = min(self._done + _PIECE, nbytes)
            self._copies.extend(self._copy, data, self._done, stop)
            self._done = stop
        if not self.unwanted:
            resident.put(self.array, self._copy, nbytes, evict=False)
        self._copy = None
        return True


class Prefetches:
    """Queue of prefetches, in the order in which they were requested. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[ArrayPrefetch] = deque()
        self._under_way: ArrayPrefetch | None = None

    def __bool__(self) -> bool:
        """Whether there is anything that nobody has taken."""
        return bool(self._waiting)

    def add(self, prefetch: ArrayPrefetch) -> None:
        """Add one."""
        with self._lock:
            self._waiting.append(prefetch)

    def take(self) -> ArrayPrefetch | None:
        """The next one, if none is under way."""
        with self._lock:
            if self._under_way is None and self._waiting:
                self._under_way = self._waiting.popleft()
                return self._under_way
            return None

    def stopped(self, prefetch: ArrayPrefetch, *, finished: bool) -> None:
        """Put what was taken back, unless it is finished."""
        with self._lock:
            self._under_way = None
            if not finished and not prefetch.unwanted:
                self._waiting.appendleft(prefetch)

    def drop(self, arrays: Iterable[str | None]) -> None:
        """Drop those arrays: they are gone, or a task brings them."""
        gone = set(arrays)
        with self._lock:
            for prefetch in (*self._waiting, *([] if self._under_way is None else [self._under_way])):
                if prefetch.array in gone:
                    prefetch.unwanted = True
            self._waiting = deque(prefetch for prefetch in self._waiting if not prefetch.unwanted)

    def clear(self) -> None:
        """Drop all: the front is gone."""
        with self._lock:
            self._waiting.clear()
            if self._under_way is not None:
                self._under_way.unwanted = True
