"""Rates of the host's memory and disk: copies by several threads, memory touched for the first time, a file."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_REPEATS: Final = 3
"""Times that a copy is made; the fastest counts, for others are this host's other work."""
_PIECE: Final = 8 << 20
"""Bytes of one write or read of a file."""


def copy_rates(nbytes: int, threads: Iterable[int]) -> dict[str, float]:
    """Return bytes a second of copies from touched memory to touched memory, by number of threads."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return {
        str(count): _fastest(nbytes, count, lambda part: np.copyto(target[part], source[part])) for count in threads
    }


def first_touch_rates(nbytes: int, threads: Iterable[int]) -> dict[str, float]:
    """Return bytes a second of memory of a fresh mapping that is written to, by number of threads."""
    found = {}
    for count in threads:
        with mmap.mmap(-1, nbytes) as fresh:
            memory = np.frombuffer(fresh, np.uint8)
            found[str(count)] = _once(nbytes, count, lambda part, memory=memory: memory[part].fill(1))  # type: ignore[misc]
            del memory
    return found


def disk_rates(folder: Path, nbytes: int) -> dict[str, float]:
    """Return bytes a second of a file that is written and forced to the disk, and of one that is read from it, not from
    the page cache where the system drops that when asked. Raises OSError.
    """
    piece = np.random.default_rng(0).bytes(min(_PIECE, nbytes))
    with tempfile.NamedTemporaryFile(prefix="gemmserve-probe-", dir=folder) as file:
        number = file.fileno()
        begun = time.perf_counter()
        written = 0
        while written < nbytes:
            written += os.write(number, piece[: nbytes - written])
        os.fsync(number)
        write_s = time.perf_counter() - begun
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(number, 0, os.SEEK_SET)
        into = bytearray(min(_PIECE, nbytes))
        begun = time.perf_counter()
        read = 0
        while count := os.readv(number, [into]):
            read += count
        read_s = time.perf_counter() - begun
    return {"write": written / write_s, "read": read / read_s}


def _fastest(nbytes: int, threads: int, move: Callable[[slice], Any]) -> float:
    return max(_once(nbytes, threads, move) for _ in range(_REPEATS))


def _once(nbytes: int, threads: int, move: Callable[[slice], Any]) -> float:
    """Bytes a second of `move` over equal parts, one a thread."""
    step = -(-nbytes // threads)
    parts = [slice(low, min(low + step, nbytes)) for low in range(0, nbytes, step)]
    with ThreadPoolExecutor(threads) as pool:
        wait([pool.submit(int) for _ in parts])  # threads are there before the time counts
        begun = time.perf_counter()
        for future in [pool.submit(move, part) for part in parts]:
            future.result()
        return nbytes / (time.perf_counter() - begun)
