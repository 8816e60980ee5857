"""What the machine's memory allows, MiB/s: copies into warm and into fresh pages, and into files."""

from __future__ import annotations

import mmap
import os
import tempfile
import time

import numpy as np

MIB = 1 << 20


def measured(nbytes=64 * MIB, times=5, folder=None):
    """The best of a few, by name. "fresh" is memory, or space in a file, that nobody has touched before."""
    source = np.full(nbytes, 7, np.uint8)
    warm = np.zeros(nbytes, np.uint8)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(nbytes)
        with mmap.mmap(file.fileno(), nbytes) as mapping:
            copy_to(mapping, source)
            found = {
                "memcpy warm": best(lambda: np.copyto(warm, source), times),
                "memcpy fresh": best(lambda: fresh(source), times),
                "mapped file warm": best(lambda: copy_to(mapping, source), times),
                "mapped file fresh": best(lambda: new_file(source, folder, mapped=True), times),
                "written file fresh": best(lambda: new_file(source, folder, mapped=False), times),
            }
    return {name: nbytes / MIB / seconds for name, seconds in found.items()}


def new_file(source, folder, *, mapped):
    """Into a file whose space is reserved and holds nothing yet."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, len(source))
        if mapped:
            with mmap.mmap(file.fileno(), len(source)) as mapping:
                copy_to(mapping, source)
        else:
            view = memoryview(source)
            for start in range(0, len(view), MIB):
                file.write(view[start : start + MIB])


def copy_to(mapping, source):
    """Leaves no view of the mapping behind."""
    np.copyto(np.frombuffer(mapping, np.uint8), source)


def fresh(source):
    """Into pages that the kernel has yet to give."""
    with mmap.mmap(-1, len(source)) as mapping:
        copy_to(mapping, source)


def best(call, times):
    """Seconds."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
