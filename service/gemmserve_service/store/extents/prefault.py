"""Pages of an extent at hand before bytes are written to them, so that no fault holds the event loop up.

The first write to a page of a mapped file waits for the page, and where more was written than the disk takes, for the
disk: a tenth of a second at a time. Where a buffer turns out to have such pages, a thread takes that wait, a stride
ahead of the bytes (Linux 5.14 on). Recycled extents mostly have none, and then this costs nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

STRIDE: Final = 8 << 20
_PROBE: Final = 2 << 20  # bytes after which it is known whether there are faults
_MANY: Final = 8  # faults; a mapped file's come for some 20 pages each, if the system has large folios
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE
_PAGE: Final = mmap.PAGESIZE


class Prefault:
    """Walks a writable view ahead of who fills it."""

    def __init__(self, view: memoryview) -> None:
        self._end = len(view)
        self._possible = len(view) > _PROBE and _supported()
        self._cold = False
        self._faults = _faults() if self._possible else 0
        self._begun = 0
        self._under_way: list[tuple[int, asyncio.Future[None]]] = []
        # Holds the mapping, too, for as long as a thread looks at it.
        self._memory = (ctypes.c_char * len(view)).from_buffer(view)

    async def next(self, position: int) -> int:
        """Up to where to fill now, from `position` on; its pages are there, unless there is no need to care."""
        if not self._possible:
            return min(position + STRIDE, self._end)
        if not self._cold:
            faults = _faults()
            self._cold = position > 0 and faults - self._faults >= _MANY
            self._faults = faults
            self._begun = position
        if not self._cold:
            return min(position + (STRIDE if position else _PROBE), self._end)
        end = min(position + STRIDE, self._end)
        self._begun = max(self._begun, position)  # a transfer process may have filled what lies between
        while self._begun < min(end + STRIDE, self._end):
            low, self._begun = self._begun, min(self._begun + STRIDE, self._end)
            work = asyncio.get_running_loop().run_in_executor(_pool(), _populate, self._memory, low, self._begun)
            self._under_way.append((low, work))
        while self._under_way and self._under_way[0][0] < end:
            await asyncio.shield(self._under_way.pop(0)[1])
        return end


def _faults() -> int:
    """Page faults of this thread so far."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_minflt + used.ru_majflt


@cache
def _supported() -> bool:
    if sys.platform != "linux":
        return False
    probe = mmap.mmap(-1, _PAGE)
    try:
        probe.madvise(_POPULATE_WRITE)
    except OSError:
        return False
    finally:
        probe.close()
    return True


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="gemmserve-prefault")


def populate(address: int, nbytes: int) -> int:
    """Touch pages of a writable mapping, from a page's address on, as if they were written. Return 0, or the number of
    the error. Does nothing where the system does not know how.
    """
    if not _supported() or not _madvise()(address, -(-nbytes // _PAGE) * _PAGE, _POPULATE_WRITE):
        return 0
    return ctypes.get_errno() or errno.ENOMEM


@cache
def _madvise() -> Callable[[int, int, int], Any]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _populate(memory: ctypes.Array[ctypes.c_char], low: int, high: int) -> None:
    """Whatever it cannot do, the write itself will meet."""
    start, stop = ctypes.addressof(memory) + low, ctypes.addressof(memory) + high
    aligned = start // _PAGE * _PAGE
    populate(aligned, stop - aligned)
