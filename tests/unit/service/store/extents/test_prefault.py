"""Pages are there before they are needed, whatever part of a mapping is filled; and nobody notices otherwise."""

from __future__ import annotations

import asyncio
import mmap
import sys
from itertools import pairwise

import pytest

from gemmserve_service.store.extents import prefault
from gemmserve_service.store.extents.extents import ExtentPool
from gemmserve_service.store.extents.memfd import memory_extents_supported
from gemmserve_service.store.extents.prefault import STRIDE, Prefault
from gemmserve_service.store.resumable.byte_ranges import Spans

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not prefault._supported(), reason="needs MADV_POPULATE_WRITE (Linux 5.14)"
)


@pytest.fixture
def populated(monkeypatch):
    """The spans that a thread was asked for."""
    spans = []
    original = prefault._populate

    def populate(memory, low, high):
        original(memory, low, high)
        spans.append((low, high))

    monkeypatch.setattr(prefault, "_populate", populate)
    return spans


async def fill(view, look=lambda position, end: None):
    """Writes every page; returns how many steps it took. `look` is called before each."""
    ahead, position, steps = Prefault(view), 0, 0
    while position < len(view):
        end = await ahead.next(position)
        assert position < end <= len(view)
        look(position, end)
        for page in range(position, end, mmap.PAGESIZE):
            view[page : page + 1] = b"x"
        position, steps = end, steps + 1
    return steps


@pytest.mark.parametrize("offset", [0, 5000, mmap.PAGESIZE])
async def test_fresh_pages_are_brought_by_a_thread(populated, offset):
    memory = mmap.mmap(-1, 40 * MIB, flags=mmap.MAP_SHARED)
    view = memoryview(memory)[offset:]

    def look(position, end):
        """Whatever is filled now is there already; but the first bytes, by which it is known that it is needed."""
        there = Spans(populated)
        assert position == 0 or not set(there.missing(end)) - set(Spans([(2 * MIB, end)]).missing(end))

    await fill(view, look)
    spans = sorted(populated)  # two threads end in any order
    assert (spans[0][0], spans[-1][1]) == (2 * MIB, len(view))
    assert all(one[1] == other[0] for one, other in pairwise(spans))


async def test_pages_that_are_there_cost_nothing(populated):
    memory = mmap.mmap(-1, 40 * MIB, flags=mmap.MAP_SHARED)
    await fill(memoryview(memory))
    populated.clear()
    steps = await fill(memoryview(memory))
    assert populated == []
    assert steps == 1 + -(-38 * MIB // STRIDE)


async def test_an_extent_comes_back_when_the_threads_are_done(tmp_path):
    pool = ExtentPool(None if memory_extents_supported() else tmp_path, keep_bytes=1 << 30)
    extent = pool.take(40 * MIB)
    await fill(extent.view(40 * MIB))
    async with asyncio.timeout(60):
        while not extent.quiescent:  # noqa: ASYNC110 (a thread has yet to forget what it did last)
            await asyncio.sleep(0.001)
    pool.give(extent)
    assert pool.take(40 * MIB) is extent


async def test_without_the_system_s_help(monkeypatch, populated):
    monkeypatch.setattr(prefault, "_supported", lambda: False)
    memory = mmap.mmap(-1, 20 * MIB, flags=mmap.MAP_SHARED)
    await fill(memoryview(memory))
    assert populated == []
    assert bytes(memory[:: mmap.PAGESIZE]) == b"x" * (20 * MIB // mmap.PAGESIZE)
