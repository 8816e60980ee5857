"""Arena: host memory that results come to from the devices, before they go to files or are deleted.

One memfd of the supervisor's, so that it outlives fronts and workers, mapped once by each of them: a worker registers
its pages with the driver, which costs more than a copy, and copies go straight to them from then on. Blocks are handed
out from the lowest address that has room (first fit: Knuth, The Art of Computer Programming, vol. 1, sec. 2.5), so that
the same pages, touched and registered, serve again and again; neighbours that are free are one.

A worker is a process that may be lost while it writes. What it may still write to is set apart until a process for the
same device has said hello: the supervisor starts that one when the one before is gone. Where others write the rest of
the same extent, that is remembered until the extent is freed.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import mmap
from typing import TYPE_CHECKING, Final

from gemmserve_service.store.extents.extents import Extent, MappedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gemmserve_service.runtime.mapping import Mapping

_PAGE: Final = mmap.PAGESIZE
_LARGE: Final = 16 << 20
"""Bytes of a block from which on it is a multiple of 2 MiB: an eighth of it is wasted at most."""
_LARGE_PAGE: Final = 2 << 20
_SHARE: Final = 2  # of the arena, half is for results that large ones are not to displace

log = logging.getLogger(__name__)


class Arena:
    """Blocks of `nbytes` of shared memory at `path`, allocated by the front alone, in the event loop's thread."""

    def __init__(self, path: str, nbytes: int, *, writers: Iterable[str] = ()) -> None:
        """`writers`: ids of workers that an earlier front may have told to write here. Until each has said hello, which
        it does when it has ended all that, nothing is allocated.
        """
        self.path = path
        self.nbytes = nbytes
        self._taken = 0  # bytes of blocks that are not free
        self._file = MappedFile(path, path, nbytes)  # the descriptor's path serves no other file of this server
        self._mapping: Mapping | None = None
        """Mapping of all of it: to make and to end one costs as much as its pages are many."""
        self._refused = False
        """Whether it could not be mapped, once."""
        self._writers = set(writers)
        self._starts: list[int] = [0] if nbytes else []
        """Addresses of free blocks, ascending."""
        self._sizes: dict[int, int] = {0: nbytes} if nbytes else {}
        """Bytes of free blocks, by address."""
        self._live: set[str] = set()
        """Names of extents that somebody has."""
        self._looked_at: list[Extent] = []
        """Freed extents that something refers to yet."""
        self._suspected: dict[str, set[str]] = {}
        """Ids of lost workers that may still write to an extent, by its name."""
        self._quarantined: list[Extent] = []
        """Freed extents to which one of those may."""
        self._numbers = itertools.count()

    def allocate(self, nbytes: int) -> Extent | None:
        """Return an extent of at least `nbytes` > 0; None: there is no room for it, or the memory cannot be mapped."""
        if self._writers:
            return None
        if self._looked_at:
            self._retry()
        capacity = _capacity(nbytes)
        start = next((start for start in self._starts if self._sizes[start] >= capacity), None)
        if start is None:
            return None
        if self._mapping is None and not self._map():
            return None
        left = self._sizes.pop(start) - capacity
        position = bisect.bisect_left(self._starts, start)
        if left:
            self._starts[position] = start + capacity
            self._sizes[start + capacity] = left
        else:
            del self._starts[position]
        self._taken += capacity
        name = f"{self._file.name}#{next(self._numbers)}"
        self._live.add(name)
        return Extent(name, self._file.path, capacity, shared=self._file, start=start)

    def allocate_share(self, sizes: Sequence[int]) -> list[Extent] | None:
        """Return extents for one large result or several that belong together, all of them; None: they would take more
        than half of the arena with all that is in it, for the other half is for results that are small, or not found
        room for in one place.
        """
        if self.used_bytes + sum(map(_capacity, sizes)) > self.share_bytes:
            return None
        extents: list[Extent] = []
        for nbytes in sizes:
            extent = self.allocate(nbytes)
            if extent is None:
                for each in extents:
                    self.free(each)
                return None
            extents.append(extent)
        return extents

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that are not free: live, freed and still looked at, or set apart."""
        if self._looked_at:
            self._retry()
        return self._taken

    @property
    def share_bytes(self) -> int:
        """Bytes of which `allocate_share` takes some."""
        return self.nbytes // _SHARE

    def owns(self, extent: Extent) -> bool:
        """Whether the extent is one of these, and live."""
        return extent.name in self._live

    def free(self, extent: Extent) -> None:
        """Take an extent back that nobody writes to, but lost workers of which `suspect` was told: it serves again when
        these have said hello, and nothing refers to it any more. Raises ValueError if it is not live.
        """
        self._end(extent)
        if extent.name in self._suspected:
            self._quarantined.append(extent)
        elif extent.quiescent:
            self._release(extent)
        else:
            self._looked_at.append(extent)

    def suspect(self, extent: Extent, worker: str) -> None:
        """Note that a lost worker may still write to an extent, which others use on, until a worker of that id has said
        hello. Raises ValueError if it is not live.
        """
        self._check_live(extent)
        self._suspected.setdefault(extent.name, set()).add(worker)

    def quarantine(self, extent: Extent, worker: str) -> None:
        """Take an extent back that a lost worker may still write to: it serves again when a worker of that id has said
        hello. Raises ValueError if it is not live.
        """
        self.suspect(extent, worker)
        self.free(extent)

    def worker_ready(self, worker: str) -> None:
        """Note that a worker said hello: what it, or the process before it, was told to write is over."""
        self._writers.discard(worker)
        for name, workers in list(self._suspected.items()):
            workers.discard(worker)
            if not workers:
                del self._suspected[name]
        held, self._quarantined = self._quarantined, []
        for extent in held:
            (self._quarantined if extent.name in self._suspected else self._looked_at).append(extent)
        self._retry()

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of what is set apart."""
        return sum(extent.capacity for extent in self._quarantined)

    def _map(self) -> bool:
        """Map all of it, if that can be done now: limits on a process's memory may keep it from that for a while."""
        try:
            self._mapping = self._file.mapping()
        except OSError as error:
            if not self._refused:
                log.warning("the memory for results cannot be mapped, they go to files: %s", error)
            self._refused = True
        return self._mapping is not None

    def _check_live(self, extent: Extent) -> None:
        if extent.name not in self._live:
            raise ValueError(f"the extent {extent.name} is not live")

    def _end(self, extent: Extent) -> None:
        self._check_live(extent)
        self._live.remove(extent.name)

    def _retry(self) -> None:
        looked_at, self._looked_at = self._looked_at, []
        for extent in looked_at:
            if extent.quiescent:
                self._release(extent)
            else:
                self._looked_at.append(extent)

    def _release(self, extent: Extent) -> None:
        extent.unmap()
        start, size = extent.start, extent.capacity
        self._taken -= size
        position = bisect.bisect_left(self._starts, start)
        if position < len(self._starts) and self._starts[position] == start + size:
            size += self._sizes.pop(self._starts.pop(position))
        if position:
            before = self._starts[position - 1]
            if before + self._sizes[before] == start:
                self._sizes[before] += size
                return
        self._starts.insert(position, start)
        self._sizes[start] = size


def _capacity(nbytes: int) -> int:
    step = _LARGE_PAGE if nbytes >= _LARGE else _PAGE
    return -(-nbytes // step) * step
