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
    """What is asked of `DeviceCopies`."""

    resident: Residency

    def begin(self, data: np.ndarray[Any, Any]) -> Any:
        """Room for a copy."""

    def extend(self, copy: Any, data: np.ndarray[Any, Any], start: int, stop: int) -> None:
        """Copies those bytes; returns when they are there."""


class Coming:
    """One array on its way, piece by piece."""

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
    """What is to come, in the order in which it was asked for. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: deque[Coming] = deque()
        self._under_way: Coming | None = None

    def __bool__(self) -> bool:
        """Whether there is anything that nobody has taken."""
        return bool(self._coming)

    def add(self, coming: Coming) -> None:
        """One more."""
        with self._lock:
            self._coming.append(coming)

    def take(self) -> Coming | None:
        """The next one, if none is under way."""
        with self._lock:
            if self._under_way is None and self._coming:
                self._under_way = self._coming.popleft()
                return self._under_way
            return None

    def stopped(self, coming: Coming, *, finished: bool) -> None:
        """What was taken is here, or has to go on later."""
        with self._lock:
            self._under_way = None
            if not finished and not coming.unwanted:
                self._coming.appendleft(coming)

    def drop(self, arrays: Iterable[str | None]) -> None:
        """Those arrays are gone, or come otherwise."""
        gone = set(arrays)
        with self._lock:
            for coming in (*self._coming, *([] if self._under_way is None else [self._under_way])):
                if coming.array in gone:
                    coming.unwanted = True
            self._coming = deque(coming for coming in self._coming if not coming.unwanted)

    def clear(self) -> None:
        """The front is gone."""
        with self._lock:
            self._coming.clear()
            if self._under_way is not None:
                self._under_way.unwanted = True
