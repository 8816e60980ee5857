"""Rates of devices' links: pinned memory, and the ring of pinned slots; of one device, and of all at once."""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from gemmserve_service.executor.worker.cuda.pinned_ring import CupyLink, Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_REPEATS: Final = 3
_WIDTH: Final = 32 << 10
"""Bytes of a row of a block's window: 4096 complex64."""
N = TypeVar("N", int, float)


class LinkedDevice:
    """One device with memory on both sides of its link: `nbytes` on the device, as much pinned and pageable."""

    def __init__(self, cupy: Any, ordinal: int, nbytes: int) -> None:
        self._cupy = cupy
        self._ordinal = ordinal
        self.nbytes = nbytes
        with cupy.cuda.Device(ordinal):
            self.link = CupyLink(cupy, ordinal)
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._other = cupy.cuda.Stream(non_blocking=True)
            self._memory = cupy.empty(nbytes, np.uint8)
            self._back = cupy.empty(nbytes, np.uint8)
            self._pinned = self.link.pinned(nbytes)
            self._landing = self.link.pinned(nbytes)
        self._pageable = np.ones(nbytes, np.uint8)
        self._pinned.fill(1)
        self._landing.fill(1)

    def pinned_up(self) -> int:
        """Copies from pinned memory and waits. Returns bytes."""
        self._use()
        self.link.upload(self._memory.data.ptr, self._pinned, self._stream)
        self._stream.synchronize()
        return self.nbytes

    def pinned_down(self) -> int:
        """Copies to pinned memory and waits."""
        self._use()
        self.link.download(self._pinned, self._memory.data.ptr, self._stream)
        self._stream.synchronize()
        return self.nbytes

    def pinned_both(self) -> int:
        """Copies up and down at once and waits; bytes of both."""
        self._use()
        self.link.upload(self._memory.data.ptr, self._pinned, self._stream)
        self.link.download(self._landing, self._back.data.ptr, self._other)
        self._stream.synchronize()
        self._other.synchronize()
        return 2 * self.nbytes

    def ring(self, threads: int) -> tuple[Callable[[], int], Callable[[], int], Callable[[], None]]:
        """Return copies up and down through a ring of so many threads, and what ends it."""
        with self._cupy.cuda.Device(self._ordinal):
            staging = Staging(self.link, threads=threads)

        def up() -> int:
            self._use()
            staging.to_device(self._memory.data.ptr, self._pageable, self._stream)
            self._stream.synchronize()
            return self.nbytes

        def down() -> int:
            self._use()
            staging.to_host(self._pageable, self._memory.data.ptr, self._stream)
            return self.nbytes

        return up, down, staging.close

    def stored(self, folder: Path, seconds: float) -> dict[str, float]:
        """Return bytes a second `up` and `down` at once, for so long, through a worker's ring from and to columns of
        matrices in mapped files of `folder`: as panels of large products come while parts of results go.
        """
        self._use()
        staging = Staging(self.link)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            source, target = (_columns(Path(place) / name, self.nbytes) for name in ("source", "target"))

            def up() -> int:
                self._use()
                staging.lines_to_device(self._memory.data.ptr, source, self._stream)
                self._stream.synchronize()
                return source.nbytes

            def down() -> int:
                self._use()
                staging.lines_to_host(target, self._back.data.ptr, self._other)
                return target.nbytes

            try:
                rates = rates_for((up, down), seconds)
            finally:
                staging.close()
        return dict(zip(("up", "down"), rates, strict=True))

    def _use(self) -> None:
        self.link.enter()


def link_rates(devices: Sequence[LinkedDevice], threads: Iterable[int]) -> dict[str, Any]:
    """Return bytes a second, by kind of copy: of the slowest device `alone`, of all of them `together`."""
    pinned = {
        name: _alone_and_together([getattr(device, name) for device in devices])
        for name in ("pinned_up", "pinned_down", "pinned_both")
    }
    ring_up, ring_down = {}, {}
    for count in threads:
        rings = [device.ring(count) for device in devices]
        try:
            ring_up[str(count)] = _alone_and_together([up for up, _, _ in rings])
            ring_down[str(count)] = _alone_and_together([down for _, down, _ in rings])
        finally:
            for _, _, close in rings:
                close()
    return {**pinned, "ring_up": ring_up, "ring_down": ring_down}


def _alone_and_together(copies: Sequence[Callable[[], int]]) -> dict[str, float]:
    alone = [rate_of([copy]) for copy in copies]
    return {"alone": min(alone), "together": rate_of(copies) if len(copies) > 1 else alone[0]}


def rate_of(copies: Sequence[Callable[[], int]]) -> float:
    """Return bytes a second of copies that begin at once, each in a thread of its own, repeated; the first run of each
    does not count.
    """
    start = threading.Barrier(len(copies) + 1)

    def repeated(copy: Callable[[], int]) -> int:
        copy()
        start.wait()
        return sum(copy() for _ in range(_REPEATS))

    with ThreadPoolExecutor(len(copies)) as pool:
        futures = [pool.submit(_breaking, start, repeated, copy) for copy in copies]
        try:
            start.wait()
        except threading.BrokenBarrierError:
            for future in futures:
                future.result()  # whose error broke it
            raise
        begun = time.perf_counter()
        nbytes = sum(future.result() for future in futures)
        return nbytes / (time.perf_counter() - begun)


def rates_for(copies: Sequence[Callable[[], int]], seconds: float) -> list[float]:
    """Return bytes a second of each of several copies that are repeated for so long, all at once; the first run of each
    does not count.
    """
    start = threading.Barrier(len(copies))

    def repeated(copy: Callable[[], int]) -> float:
        copy()
        start.wait()
        begun = now = time.perf_counter()
        nbytes = 0
        while not nbytes or now < begun + seconds:
            nbytes += copy()
            now = time.perf_counter()
        return nbytes / (now - begun)

    with ThreadPoolExecutor(len(copies)) as pool:
        futures = [pool.submit(_breaking, start, repeated, copy) for copy in copies]
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _columns(path: Path, nbytes: int) -> np.ndarray[Any, Any]:
    """Return the first half of the columns of a matrix in a new file of so many bytes, all of which are there."""
    width = min(_WIDTH, nbytes // 2)
    matrix = np.memmap(path, np.uint8, "w+", shape=(nbytes // (2 * width), 2 * width))
    matrix.fill(1)
    return matrix[:, :width]


def _breaking(start: threading.Barrier, work: Callable[[Callable[[], int]], N], copy: Callable[[], int]) -> N | int:
    """Do `work`; where it fails nobody waits for it."""
    try:
        return work(copy)
    except threading.BrokenBarrierError:
        return 0  # another one's failure, which is raised
    except BaseException:
        start.abort()
        raise
