"""Bytes of large arrays from clients' memory and into it, by several threads. What is trusted is tested by requests."""

from __future__ import annotations

import os

import numpy as np
import pytest
from memory_peer import NEEDS_MEMFD, memory

from gemmserve_service.errors import DescriptorRefused
from gemmserve_service.store.extents import shared_memory
from gemmserve_service.store.extents.shared_memory import Memory

pytestmark = NEEDS_MEMFD

SHARE = 1000
SIZES = [0, 1, SHARE, 2 * SHARE - 1, 2 * SHARE, 2 * SHARE + 1, 4 * SHARE - 1, 5 * SHARE + 3, 40 * SHARE + 7]


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Numbers of threads of which several worked on an array."""
    monkeypatch.setattr(shared_memory, "_SHARE", SHARE)
    monkeypatch.setattr(shared_memory, "_STEP", 3 * SHARE)
    asked = []
    inner = shared_memory.ThreadPoolExecutor

    def pool(count, *rest):
        asked.append(count)
        return inner(count, *rest)

    monkeypatch.setattr(shared_memory, "ThreadPoolExecutor", pool)
    return asked


def content(nbytes):
    return np.random.default_rng(nbytes).integers(1, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 17])
async def test_reads(nbytes, offset, threads):
    data = content(nbytes)
    out = np.zeros(nbytes, np.uint8)
    await Memory.examine(memory(np.concatenate([np.zeros(offset, np.uint8), data])), offset).read(memoryview(out))
    assert np.array_equal(out, data)
    assert threads == ([min(nbytes // SHARE, 4)] if nbytes >= 2 * SHARE else [])


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("whole", [False, True])
async def test_writes(nbytes, whole, threads):
    data, fd = content(nbytes), memory(nbytes=nbytes + 5)
    kept = os.dup(fd)
    await Memory.examine(fd, 0).write(memoryview(data), whole=whole)
    assert os.pread(kept, nbytes + 5, 0) == data.tobytes() + bytes(5)
    assert threads == ([min(nbytes // SHARE, 4)] if nbytes >= 2 * SHARE else [])
    os.close(kept)


@pytest.mark.parametrize("missing", [1, SHARE, 2 * SHARE, 9 * SHARE])
async def test_memory_that_ends_too_early(missing):
    out = np.zeros(10 * SHARE, np.uint8)
    with pytest.raises(DescriptorRefused, match="ended after"):
        await Memory.examine(memory(content(10 * SHARE - missing)), 0).read(memoryview(out))


async def test_what_cannot_be_written():
    fd = memory(nbytes=10 * SHARE)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file"):
        await Memory.examine(reader, 0).write(memoryview(content(10 * SHARE)))
