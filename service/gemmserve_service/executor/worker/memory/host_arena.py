"""A worker's side of the arena: its mapping, and a thread that registers its pages with the device's driver.

Copies from a device go straight to pages that are registered, at the rate of the link; to others they go through the
ring of pinned memory. To touch and to register pages takes longer than to copy to them, so it is done once, ahead of
the results, from the lowest address on, which is where the front allocates first: a part as the worker starts, and then
as far as twice of what was in use. The first part gives way to tasks, which would feel it: the driver's locks and those
of the process's memory map are held for milliseconds. What results are about to need does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.runtime.mapping import Mapping
from gemmserve_service.store.extents.prefault import populate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

SEGMENT_BYTES: Final = 64 << 20
"""Bytes registered by one call, during which other calls of the driver may wait."""
_AHEAD: Final = 2  # times what was in use
_THREADS: Final = 4  # that touch pages, each at 1.5 GB/s or so
_PIECE: Final = 2 << 20  # bytes that one of them touches before tasks are looked for again: 1.4 ms
_NICE: Final = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArenaFile:
    """The arena as another process finds it."""

    path: str
    nbytes: int
    ahead_bytes: int
    """Bytes of it that are touched and registered before any is used."""


class HostArena:
    """The arena's mapping in this process, which lasts as long as the process does. Callable from any thread."""

    def __init__(
        self,
        file: ArenaFile,
        register: Callable[[int, int], None],
        enter: Callable[[], None],
        give_way: Callable[[Callable[[], bool]], None] = lambda _: None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`register(address, nbytes)` makes pages known to the driver, in a thread that called `enter` first; what it
        raises ends that for good. `give_way(unless)`, called there before every step, returns once no task would feel
        the step, or `unless` is true. Raises OSError if the arena cannot be mapped.
        """
        self.path = file.path
        fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory: Bytes = Mapping(fd, file.nbytes).array()
        finally:
            os.close(fd)
        self.registered_bytes = 0
        """Bytes from the first on to which a device copies straight."""
        self._address: int = self.memory.ctypes.data
        self._limit = file.nbytes
        self._segment = segment_bytes
        self._first = file.ahead_bytes
        self._used = 0
        """End of the highest place that was asked about."""
        self._register = register
        self._enter = enter
        self._give_way = give_way
        self._grown = threading.Condition()
        threading.Thread(target=self._run, name="gemmserve-arena", daemon=True).start()

    def registered(self, target: Bytes) -> bool:
        """Whether a device can copy straight to those bytes, wherever they are. If they are the arena's, more of it may
        be registered for them.
        """
        end = target.ctypes.data - self._address + target.size
        if not target.size <= end <= self.memory.size:
            return False
        if end > self._used:
            with self._grown:
                self._used = max(self._used, end)
                self._grown.notify()
        return end <= self.registered_bytes

    def pieces(self, target: Bytes) -> Iterator[tuple[int, Bytes]]:
        """Yield offset and bytes of the parts of `target` that were registered by one call each: a copy across two of
        them may be refused.
        """
        for position, count in self.cut(target.ctypes.data, target.size):
            yield position, target[position : position + count]

    def cut(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield offset and number of the bytes of such parts of memory at that address; of memory elsewhere all."""
        start, position = address - self._address, 0
        if not 0 <= start < self.memory.size:
            yield 0, nbytes
            return
        while position < nbytes:
            count = min(self._segment - (start + position) % self._segment, nbytes - position)
            yield position, count
            position += count

    def _run(self) -> None:
        self._enter()
        _be_nice()
        with ThreadPoolExecutor(_THREADS, "gemmserve-touch", _be_nice) as pool:
            while self.registered_bytes < self._limit:
                with self._grown:
                    while self.registered_bytes >= max(self._first, _AHEAD * self._used):
                        self._grown.wait()
                low = self.registered_bytes
                high = min(low + self._segment, self._limit)
                try:
                    self._touch(pool, low, high)
                    self._give_way(self._wanted)
                    self._register(self._address + low, high - low)
                except Exception as error:
                    log.warning("%d bytes of the arena are registered, and no more can be: %s", low, error)
                    return
                self.registered_bytes = high
        log.info("all %d bytes of the arena are registered", self._limit)

    def _wanted(self) -> bool:
        """Whether results lie, or will soon, in what is not registered."""
        return self.registered_bytes < _AHEAD * self._used

    def _touch(self, pool: ThreadPoolExecutor, low: int, high: int) -> None:
        for begin in range(low, high, _THREADS * _PIECE):
            self._give_way(self._wanted)
            end = min(begin + _THREADS * _PIECE, high)
            step = -(-(end - begin) // _THREADS // _PAGE) * _PAGE or _PAGE
            for number in pool.map(
                lambda start, step=step, end=end: populate(self._address + start, min(step, end - start)),
                range(begin, end, step),
            ):
                if number:
                    raise OSError(number, os.strerror(number))


_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def _be_nice() -> None:
    """Leave the processors to other threads, where a thread has a priority of its own (Linux)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
