"""Extents of a node: copies of the front's immutable arrays, the least recently used dropped first, and the memory of
tasks that are here now; all within one budget.

Pages that were touched serve the next extent of their size: fresh ones cost three times what copying into them does.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmserve_service.errors import StoreFull
from gemmserve_service.store.extents.extents import Extent, ExtentPool, size_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Copy:
    """Copy of an immutable array's first `nbytes`."""

    array: str
    extent: Extent
    nbytes: int
    whole: bool = False
    """Whether all the bytes are there."""
    users: int = 0
    """Tasks that it is held for."""
    doomed: bool = False
    """Whether it goes with its last user: the array is gone, or there is a longer copy."""
    made_here: bool = False
    """Whether the node computed it, rather than fetched it."""


class NodeMemory:
    """Memory of `budget` bytes, in at most `most` pieces. `on_destroy` hears the names of extents that are gone."""

    def __init__(self, budget: int, most: int, on_destroy: Callable[[str], None]) -> None:
        self.budget = budget
        self._most = most
        self._pool = ExtentPool(None, keep_bytes=budget, limit=budget, most=most, on_destroy=on_destroy)
        self._copies: OrderedDict[str, Copy] = OrderedDict()
        """Copies by array, the least recently used first."""
        self._read: Counter[str] = Counter()
        """Tasks that may read an array's copy without holding it, by array."""
        self._held = 0
        """Extents that are not copies nobody holds."""
        self._held_bytes = 0
        self.hits = 0
        self.misses = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of extents in use, copies included."""
        return self._pool.live_bytes

    @property
    def copies(self) -> int:
        """Number of arrays that there is a copy of."""
        return len(self._copies)

    def room_for(self, sizes: Iterable[int]) -> bool:
        """Whether extents of these sizes, each > 0, can be had now, without a copy that somebody holds; when nobody
        holds anything they can be in any case, within the budget or not.
        """
        if not self._held:
            return True
        wanted = [size_class(nbytes) for nbytes in sizes]
        return self._held_bytes + sum(wanted) <= self.budget and self._held + len(wanted) <= self._most

    def take(self, nbytes: int) -> Extent:
        """Return an extent of at least `nbytes` > 0. Copies that nobody holds go for it; past the budget, where those
        do not suffice. Raises OSError where the system has no memory or descriptor.
        """
        capacity = size_class(nbytes)
        while self._pool.live_bytes + capacity > self.budget or self._pool.live >= self._most:
            oldest = next((copy for copy in self._copies.values() if self._idle(copy)), None)
            if oldest is None:
                break
            self._drop(oldest)
        try:
            extent = self._pool.take(nbytes)
        except StoreFull:
            extent = self._beyond(nbytes)
        self._count(extent, 1)
        return extent

    def give(self, extent: Extent, *, reusable: bool = True) -> None:
        """Take an extent back. Not `reusable`: a process may still write to it."""
        self._count(extent, -1)
        self._pool.give(extent, reusable=reusable)

    def find(self, array: str, nbytes: int) -> Copy | None:
        """Return the copy of an array's first `nbytes`, which may still be on its way; None: there is none so long."""
        copy = self._copies.get(array)
        return copy if copy is not None and copy.nbytes >= nbytes else None

    def hold(self, array: str, nbytes: int) -> tuple[Copy, bool]:
        """Return the copy of an array's first `nbytes`, held until `release`; whether it is new, and its bytes have to
        be brought. Raises what `take` raises.
        """
        copy = self.find(array, nbytes)
        if copy is not None:
            self.hits += 1
            self._hold(copy)
            return copy, False
        self.misses += 1
        copy = Copy(array, self.take(nbytes), nbytes, users=1)
        self._put(copy)
        return copy, True

    def _hold(self, copy: Copy) -> None:
        if not copy.users:
            self._count(copy.extent, 1)
        copy.users += 1
        self._copies.move_to_end(copy.array)

    def keep(self, array: str, extent: Extent, nbytes: int) -> None:
        """Make an extent that holds an array, and that was taken here, a copy of it that nobody holds."""
        self._count(extent, -1)
        self._put(Copy(array, extent, nbytes, whole=True, made_here=True))

    def _put(self, copy: Copy) -> None:
        before = self._copies.pop(copy.array, None)
        self._copies[copy.array] = copy
        if before is not None:
            self._doom(before)

    def release(self, copy: Copy) -> None:
        """Let go of a copy. One whose bytes did not all come goes with its last user."""
        copy.users -= 1
        if copy.users:
            return
        if copy.whole and not copy.doomed:
            self._count(copy.extent, -1)
            return
        if self._copies.get(copy.array) is copy:
            del self._copies[copy.array]
        self.give(copy.extent)

    def reads(self, arrays: Iterable[str]) -> None:
        """Note a task whose operands are on the device alone as it comes: copies that are made of them stay until
        `read`.
        """
        self._read.update(arrays)

    def read(self, arrays: Iterable[str]) -> None:
        """Note that such a task is over."""
        self._read.subtract(arrays)
        for array in arrays:
            if self._read[array] <= 0:
                del self._read[array]

    def forget(self, arrays: Iterable[str]) -> None:
        """Drop the copies of arrays that are gone."""
        for array in arrays:
            copy = self._copies.pop(array, None)
            if copy is not None:
                self._doom(copy)

    def forget_made(self) -> None:
        """Drop what was computed here: whether the front took it is not known."""
        self.forget([array for array, copy in self._copies.items() if copy.made_here])

    def clear(self) -> None:
        """Drop every copy, and give all free pages back to the system: the arrays of another front have other bytes."""
        self.forget(list(self._copies))
        self._pool.trim()

    def _idle(self, copy: Copy) -> bool:
        return not copy.users and copy.array not in self._read

    def _doom(self, copy: Copy) -> None:
        """Have a copy, which is no longer found, go as soon as nobody holds it."""
        if copy.users:
            copy.doomed = True
        else:
            self._pool.give(copy.extent)

    def _drop(self, copy: Copy) -> None:
        del self._copies[copy.array]
        self._pool.give(copy.extent)

    def _beyond(self, nbytes: int) -> Extent:
        """Return an extent past the budget: for a task that is larger, or for results that must leave a device."""
        log.warning("%d bytes are taken past the memory of %d bytes", nbytes, self.budget)
        pool = self._pool
        pool.limit, pool.most = None, None
        try:
            return pool.take(nbytes)
        finally:
            pool.limit, pool.most = self.budget, self._most

    def _count(self, extent: Extent, number: int) -> None:
        """Note that so many extents more are held; a negative number: fewer."""
        self._held += number
        self._held_bytes += number * extent.capacity
