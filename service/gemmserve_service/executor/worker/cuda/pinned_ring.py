"""Host to device and back through a ring of pinned memory, filled and emptied by several threads.

A copy from pageable memory waits for the driver, which stages it itself, one piece after the other and one thread for
all: 5 to 10 GB/s where a link takes 25 to 55. The store's arrays are mappings of files and cannot be pinned where they
are: the kernel refuses long-term pins of pages that a file system writes back (mm/gup.c, since Linux 6.5), and
pinning costs more than a copy. So pieces go through slots of pinned memory, two for each thread: while one is on the
link, the other is filled.

What all threads share is the interpreter. One that gives it up for a call and wants it back waits for the others, and
to be woken takes tens of microseconds on a virtual machine: with every call of a piece doing so eight threads moved
35 GB/s up, and 20 GB/s each way. So a thread gives it up to copy, and where it has to wait; the driver's calls keep it
(`driver.QuickCalls`): 46 GB/s, and 23. That was on an H100's host. Twice as many threads, where both directions are
under way, are too many for one interpreter: on an H200's host of 32 processors eight and eight moved 20 GB/s each way,
six and six 24, while eight in one direction moved 47, and six 38.
"""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from gemmserve_kernels.device import driver
from gemmserve_kernels.device.interruption import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
    Span = tuple[int, int]

SLOT_BYTES: Final = 4 << 20
"""Long enough that a link's start-up (some 10 us) does not count, and short enough for a processor's caches."""
_SLOTS: Final = 2
_LOOK_S: Final = 0.05  # between two moments at which a copy can be interrupted
_MAX_THREADS: Final = 8  # of about 10 GB/s each, more than a link takes
_SHARE_OF_BOTH: Final = 0.75  # of its threads for a copy that begins while one in the other direction is under way


class Link(Protocol):
    """Driver of a device, as far as the ring uses it. Callable from every thread."""

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked memory."""

    def upload(self, target: int, source: Bytes, stream: Any) -> None:
        """Starts a copy from pinned memory to the device's address `target`."""

    def download(self, target: Bytes, source: int, stream: Any) -> None:
        """Starts a copy from the device's address `source` to pinned memory."""

    def event(self) -> Any:
        """Return an event with `record(stream)`, `done`, and `synchronize()`."""

    def enter(self) -> None:
        """Called once in each of the ring's threads before anything else; its callers have done that themselves."""


class CupyLink:
    """`Link` of one device, by CuPy's runtime interface."""

    def __init__(self, cupy: Any, ordinal: int) -> None:
        self._cuda = cupy.cuda
        self._ordinal = ordinal
        self._quick = None if cupy.cuda.runtime.is_hip else driver.quick_calls()

    def pinned(self, nbytes: int) -> Bytes:
        memory = self._cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    def upload(self, target: int, source: Bytes, stream: Any) -> None:
        if self._quick is not None:
            driver.check(
                self._quick.to_device(target, source.ctypes.data, source.size, stream.ptr), "copy to the device"
            )
            return
        runtime = self._cuda.runtime
        runtime.memcpyAsync(target, source.ctypes.data, source.size, runtime.memcpyHostToDevice, stream.ptr)

    def download(self, target: Bytes, source: int, stream: Any) -> None:
        if self._quick is not None:
            code = self._quick.to_host(target.ctypes.data, source, target.size, stream.ptr)
            driver.check(code, "copy to the host")
            return
        runtime = self._cuda.runtime
        runtime.memcpyAsync(target.ctypes.data, source, target.size, runtime.memcpyDeviceToHost, stream.ptr)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory that is mapped already, for this device."""
        self._cuda.runtime.hostRegister(address, nbytes, 0)

    def unregister(self, address: int) -> None:
        """End that."""
        self._cuda.runtime.hostUnregister(address)

    def event(self) -> Any:
        event = self._cuda.Event(block=True, disable_timing=True)
        return event if self._quick is None else QuickEvent(event, self._quick)

    def enter(self) -> None:
        self._cuda.Device(self._ordinal).use()


class QuickEvent:
    """An event of CuPy's, recorded and looked at by calls that keep the interpreter."""

    def __init__(self, event: Any, calls: driver.QuickCalls) -> None:
        self._event = event
        self._calls = calls

    def record(self, stream: Any) -> None:
        """Record it behind what `stream` was given so far. Raises DeviceError."""
        driver.check(self._calls.record(self._event.ptr, stream.ptr), "record an event")

    @property
    def done(self) -> bool:
        """Whether all of that is over. Raises DeviceError."""
        found = self._calls.query(self._event.ptr)
        if found == driver.NOT_READY:
            return False
        driver.check(found, "look at an event")
        return True

    def synchronize(self) -> None:
        """Wait until it is."""
        self._event.synchronize()


class Staging:
    """The ring of one device. One copy at a time and direction; both directions may run at once."""

    def __init__(self, link: Link, *, threads: int | None = None, slot_bytes: int = SLOT_BYTES) -> None:
        self.link = link
        self.slot_bytes = slot_bytes
        self.threads = threads or max(min((os.cpu_count() or 1) // 2, _MAX_THREADS), 1)
        self._up = _Lanes(link, "up", self.threads, slot_bytes)
        self._down = _Lanes(link, "down", self.threads, slot_bytes)
        self._up.other, self._down.other = self._down, self._up

    def to_device(self, target: int, source: Bytes, stream: Any) -> None:
        """Copies to the device's address `target`, in `stream`'s order.

        Returns when every byte of `source` has been read: the copies may still be under way.
        """

        def fill(piece: Bytes, start: int) -> None:
            np.copyto(piece, source[start : start + piece.size])

        self._upload(target, _even(source.size, self.slot_bytes), fill, stream)

    def lines_to_device(self, target: int, source: np.ndarray[Any, Any], stream: Any) -> None:
        """`to_device` of an array in any strides: its elements in C order."""
        lines = Lines(source, self.slot_bytes)
        self._upload(target, lines.spans, lines.read, stream)

    def _upload(self, target: int, spans: Sequence[Span], fill: Callable[[Bytes, int], None], stream: Any) -> None:
        link = self.link

        def upload(slot: _Slot, start: int, count: int) -> None:
            slot.empty()
            piece = slot.memory[:count]
            fill(piece, start)
            link.upload(target + start, piece, stream)
            slot.record(stream)

        self._up.run(spans, upload)

    def to_host(self, target: Bytes, source: int, stream: Any) -> None:
        """Copies from the device's address `source`, after what `stream` was given before; returns when it is there."""

        def take(piece: Bytes, start: int) -> None:
            np.copyto(target[start : start + piece.size], piece)

        self._download(take, _even(target.size, self.slot_bytes), source, stream)

    def lines_to_host(self, target: np.ndarray[Any, Any], source: int, stream: Any) -> None:
        """`to_host` of elements that lie on the device in C order, into an array of any strides."""
        lines = Lines(target, self.slot_bytes)
        self._download(lines.write, lines.spans, source, stream)

    def _download(self, take: Callable[[Bytes, int], None], spans: Sequence[Span], source: int, stream: Any) -> None:
        link = self.link

        def download(slot: _Slot, start: int, count: int) -> None:
            slot.empty()
            piece = slot.memory[:count]
            link.download(piece, source + start, stream)
            slot.record(stream)
            slot.full = take, piece, start

        self._down.run(spans, download)

    def close(self) -> None:
        """Ends the threads; nothing may be under way."""
        self._up.close()
        self._down.close()


def flat(array: np.ndarray[Any, Any]) -> Bytes | None:
    """An array's memory, in its own order; None where that is not one piece."""
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8)
    if array.flags.f_contiguous:
        return array.T.reshape(-1).view(np.uint8)
    return None


def _even(nbytes: int, step: int) -> list[Span]:
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


class Lines:
    """Pieces of an array of any strides, of at most so many bytes, in C order of its elements: whole rows, as many as
    fit, or parts of a row that is longer.
    """

    def __init__(self, array: np.ndarray[Any, Any], nbytes: int) -> None:
        self.spans: list[Span] = []
        """Pieces: first byte, and bytes, where the elements lie one after the other."""
        self._parts: dict[int, np.ndarray[Any, Any]] = {}
        columns = array.shape[-1]
        item = array.dtype.itemsize
        rows, width = max(1, nbytes // max(1, columns * item)), max(1, nbytes // item)
        start = 0
        for where in np.ndindex(array.shape[:-2]):
            matrix = array[where]
            for low in range(0, matrix.shape[0], rows):
                for left in range(0, columns, width):
                    part = matrix[low : low + rows, left : left + width]
                    self.spans.append((start, part.nbytes))
                    self._parts[start] = part
                    start += part.nbytes

    def read(self, piece: Bytes, start: int) -> None:
        """Copy the elements of the piece that begins there to memory."""
        part = self._parts[start]
        np.copyto(piece.view(part.dtype).reshape(part.shape), part)

    def write(self, piece: Bytes, start: int) -> None:
        """Copy memory to the elements of the piece that begins there."""
        part = self._parts[start]
        np.copyto(part, piece.view(part.dtype).reshape(part.shape))


class _Slot:
    """Pinned memory of one piece."""

    def __init__(self, link: Link, nbytes: int) -> None:
        self.memory = link.pinned(nbytes)
        self.event = link.event()
        self.used = False
        self.full: tuple[Callable[[Bytes, int], None], Bytes, int] | None = None
        """A piece that has come from the device, or will have when `event` is over: what takes it, the piece, and its
        first byte there."""

    def empty(self) -> None:
        """Waits until no copy is at the slot; takes what one has fetched to its place."""
        full, self.full = self.full, None
        if self.used and not self.event.done:
            self.event.synchronize()
        if full is not None:
            take, piece, start = full
            take(piece, start)

    def record(self, stream: Any) -> None:
        """Its copy is over when what `stream` was given so far is."""
        self.event.record(stream)
        self.used = True


class _Lanes:
    """Threads of one direction, each with its slots; made when the first copy needs them."""

    def __init__(self, link: Link, name: str, threads: int, slot_bytes: int) -> None:
        self._link = link
        self._slot_bytes = slot_bytes
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, f"gemmserve-{name}", link.enter)
        self._slots: list[list[_Slot]] = []
        self._lock = threading.Lock()
        self.other: _Lanes | None = None
        """The other direction's, where there is one."""

    @property
    def busy(self) -> bool:
        """Whether a copy is under way."""
        return self._lock.locked()

    def run(self, spans: Sequence[Span], move: Callable[[_Slot, int, int], None]) -> None:
        """`move(slot, start, count)` for every piece, by as many threads as there are pieces for.

        Raises what `move` raises, and what its `checkpoint` does, once no thread is at it any more.
        """
        with self._lock:
            pieces = len(spans)
            shared = self.other is not None and self.other.busy
            threads = min(pieces, max(int(self._threads * _SHARE_OF_BOTH), 1) if shared else self._threads)
            while len(self._slots) < threads:
                self._slots.append([_Slot(self._link, self._slot_bytes) for _ in range(_SLOTS)])
            taken = itertools.count()
            stop = threading.Event()

            def lane(slots: list[_Slot]) -> None:
                try:
                    for slot in itertools.cycle(slots):
                        piece = next(taken)
                        if piece >= pieces or stop.is_set():
                            break
                        checkpoint()  # asks nobody in the ring's own threads
                        move(slot, *spans[piece])
                    for slot in slots:
                        if slot.full is not None:
                            slot.empty()
                except BaseException:
                    stop.set()
                    raise
                finally:
                    for slot in slots:
                        slot.full = None

            if threads == 1:  # to wake another one takes longer than a small copy
                lane(self._slots[0])
                return
            futures = [self._pool.submit(lane, slots) for slots in self._slots[:threads]]
            try:
                while wait(futures, timeout=_LOOK_S).not_done:
                    checkpoint()
            except BaseException:
                stop.set()
                wait(futures)
                raise
            errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._pool.shutdown()
