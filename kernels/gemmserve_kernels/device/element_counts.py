"""Counters on the device of elements that their data kept from the planned way of computing them.

Products from float16 planes, residues or Gram matrices have another way for what those are not proved accurate for
(`common.verdict`, `ozaki.bound`): three bfloat16 parts of every element, or plain arithmetic. The kernels of that other
way add the elements that they compute to two words of device memory, once for each tile; those of the planned way touch
them not at all. How many elements such products have at all is counted on the host.

Each thread has counters of its own, so that products beside each other on several streams are told apart. They only
ever grow. A reading is a kernel that writes 16 bytes to page-locked memory, on the current stream, and none where
nothing was counted since the last one; nobody waits before its values are asked for. It is no copy, since those wait
for each other in the device's copy engine, whatever stream they are on: products would wait for results of others that
leave for the host.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Ready
    from gemmserve_kernels.device.replay import LaunchRecorder

_WORD: Final = np.dtype(np.int64)
"""The kernels' words are unsigned and wrap around: what one takes away before another has added it is negative."""
WORDS: Final = 2
"""Words of the counters on the device: struct ElementCounters in cuda/common/judging/counters.cuh."""
READ_COUNTERS: Final = KernelSource("read_counters", ())
"""Kernel of a reading."""


@device_struct("common/read_counters.cu")
class ReadCountersParams(ctypes.Structure):
    """Arguments of read_counters."""


@dataclass(frozen=True, slots=True)
class ElementCounts:
    """Elements of results of products that have a planned and another way.

    `planned`: computed as planned; `wide`: from three bfloat16 parts; `plain`: in plain arithmetic of the data's
    width, or a larger one.
    """

    planned: int = 0
    wide: int = 0
    plain: int = 0

    @classmethod
    def of(cls, total: int, wide: int, plain: int) -> ElementCounts:
        """Return the counts of `total` elements of which `wide` and `plain` did not go the planned way."""
        return cls(total - wide - plain, wide, plain)

    @property
    def total(self) -> int:
        """All of them."""
        return self.planned + self.wide + self.plain

    @property
    def wide_share(self) -> float | None:
        """Share of `total`, 0 to 1; None where there are no elements."""
        return self.wide / self.total if self.total else None

    @property
    def fallback_share(self) -> float | None:
        """The share of plain arithmetic, likewise."""
        return self.plain / self.total if self.total else None

    def __sub__(self, earlier: ElementCounts) -> ElementCounts:
        """Return what was counted between two readings."""
        return ElementCounts(self.planned - earlier.planned, self.wide - earlier.wide, self.plain - earlier.plain)


class Reading:
    """Counts of a device once all that was enqueued on the stream before has ended."""

    def __init__(self, total: int, memory: Any = None, event: Any = None) -> None:
        """`memory`: page-locked, which holds the words when `event` has passed; None: they are 0."""
        self._total = total
        self._memory = memory
        self._event = event
        self._counts = ElementCounts.of(total, 0, 0) if memory is None else None
        """Its counts, once somebody asked for them."""

    @property
    def done(self) -> bool:
        """Whether `counts` need not wait."""
        return self._counts is not None or bool(self._event.done)

    def counts(self) -> ElementCounts:
        """Return what was counted up to the reading. Waits for the device where it must."""
        found = self._counts
        if found is None:
            self._event.synchronize()
            wide, plain = np.frombuffer(self._memory, _WORD, WORDS)
            found = self._counts = ElementCounts.of(self._total, int(wide), int(plain))
        return found


_NOTHING: Final = Reading(0)


class DeviceCounters:
    """Counters of one thread on one device, which uses them alone. The methods want it to be the current device."""

    def __init__(self) -> None:
        import cupy

        self._words = cupy.zeros(WORDS, _WORD)
        self._address = int(self._words.data.ptr)
        cupy.cuda.get_current_stream().synchronize()  # other streams will add to them
        self._total = 0
        self._last = _NOTHING
        self._last_total = 0
        self._under_way: deque[Reading] = deque()

    def add(self, elements: int) -> int:
        """The address of the counters, for kernels that compute so many elements of results or some of them."""
        self._total += elements
        return self._address

    def read(self) -> Reading:
        """A reading behind what is on the current stream: the last one where nothing was counted since."""
        import cupy

        if self._total == self._last_total:
            return self._last
        memory, event = cupy.cuda.alloc_pinned_memory(self._words.nbytes), cupy.cuda.Event(disable_timing=True)
        stream = cupy.cuda.get_current_stream()
        write_words(self._address, int(memory.ptr))
        event.record(stream)
        self._last, self._last_total = Reading(self._total, memory, event), self._total
        # Whoever drops a reading must not free memory that is yet to be written.
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()
        self._under_way.append(self._last)
        return self._last


def write_words(source: int, target: int) -> None:
    """Enqueue a kernel on the current CuPy stream that writes the counters at `source`, an address of the device, to
    page-locked memory of the host, whose address the device knows, too (CUDA programming guide, unified virtual
    addressing).
    """
    import cupy

    _reader(cupy.cuda.runtime.getDevice()).run((source, target))


@lru_cache
def _reader(ordinal: int) -> Ready:
    """The kernel of a reading, ready for the device of that number, the current one."""
    from gemmserve_kernels.device.launch import CupyLauncher
    from gemmserve_kernels.device.replay import record

    del ordinal  # the launcher asks for it
    launcher = CupyLauncher.current()

    def run(recorder: LaunchRecorder) -> int:
        source, target = (recorder.argument((WORDS,), _WORD, (_WORD.itemsize,)) for _ in range(2))
        params = ReadCountersParams(source.address, target.address)
        recorder.launch(READ_COUNTERS, "read_counters", grid=1, block=32, shared=0, params=params)
        return 2

    return launcher.ready(record(launcher.spec, launcher.max_grid, run))


class _Thread(threading.local):
    """Counters of the calling thread, by device; None where a reading was asked for before there were any."""

    def __init__(self) -> None:
        self.counters: dict[int, DeviceCounters | None] = {}


_thread: Final = _Thread()
_idle: Final[dict[int, list[DeviceCounters]]] = {}
"""Counters of threads that have ended, by device: kernels may still add to them, so their memory is never freed."""


def counters_of(ordinal: int) -> DeviceCounters:
    """Return the calling thread's counters on the device of that number, the current one; made when first asked for."""
    mine = _thread.counters
    found = mine.get(ordinal)
    if found is None:
        # A reading of none says 0, which those of another thread are past.
        found = DeviceCounters() if ordinal in mine else _adopt(ordinal) or DeviceCounters()
        mine[ordinal] = found
        weakref.finalize(threading.current_thread(), _idle.setdefault(ordinal, []).append, found).atexit = False
    return found


def _adopt(ordinal: int) -> DeviceCounters | None:
    try:
        return _idle.get(ordinal, []).pop()
    except IndexError:
        return None


def read_element_counts() -> Reading:
    """Return what the calling thread's products have counted on the current CuPy device, behind what is on its current
    stream.

    The difference of two readings is what the products between them left the planned way for; exact where the thread
    has enqueued them all on this stream, or has waited for the others.

        before = read_element_counts()
        d = gemm(a, b)
        after = read_element_counts()  # neither waits
        share = (after.counts() - before.counts()).wide_share

    Raises what CuPy raises where the device fails.
    """
    import cupy

    ordinal = cupy.cuda.runtime.getDevice()
    found = _thread.counters.setdefault(ordinal, None)
    return _NOTHING if found is None else found.read()
