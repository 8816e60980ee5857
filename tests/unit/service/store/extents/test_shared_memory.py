"""Bytes of large arrays from clients' memory and into it, by several threads. What is trusted is tested by requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import weakref

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
def counts(monkeypatch):
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
async def test_reads(nbytes, offset, counts):
    data = content(nbytes)
    out = np.zeros(nbytes, np.uint8)
    await Memory.examine(memory(np.concatenate([np.zeros(offset, np.uint8), data])), offset).read(memoryview(out))
    assert np.array_equal(out, data)
    assert counts == ([min(nbytes // SHARE, 4)] if nbytes >= 2 * SHARE else [])


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("whole", [False, True])
async def test_writes(nbytes, whole, counts):
    data, fd = content(nbytes), memory(nbytes=nbytes + 5)
    kept = os.dup(fd)
    await Memory.examine(fd, 0).write(memoryview(data), whole=whole)
    assert os.pread(kept, nbytes + 5, 0) == data.tobytes() + bytes(5)
    assert counts == ([min(nbytes // SHARE, 4)] if nbytes >= 2 * SHARE else [])
    os.close(kept)


@pytest.mark.parametrize("missing", [1, SHARE, 2 * SHARE, 9 * SHARE])
async def test_memory_that_ends_too_early(missing):
    out = np.zeros(10 * SHARE, np.uint8)
    with pytest.raises(DescriptorRefused, match="ended within the array"):
        await Memory.examine(memory(content(10 * SHARE - missing)), 0).read(memoryview(out))


@pytest.fixture
def work():
    """What `_in_parts` is given, and what it was asked for."""
    asked = []

    def work(fd, view, offset):
        asked.append((threading.current_thread(), os.fstat(fd).st_ino, offset, len(view)))

    work.asked = asked
    return work


async def test_the_descriptor_is_open_until_all_threads_are_done(monkeypatch):
    """One fails at once, the others go on: another file could have its number."""
    seen, failed, goes = [], threading.Event(), threading.Event()

    def part(fd, view, offset):
        if not offset:
            failed.set()
            raise OSError("the first part")
        assert goes.wait(60)
        seen.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(shared_memory, "_write_part", part)
    fd = memory(nbytes=8 * SHARE)
    inode = os.fstat(fd).st_ino
    writing = asyncio.ensure_future(Memory.examine(fd, 0).write(memoryview(bytes(8 * SHARE))))
    await asyncio.to_thread(failed.wait, 60)
    await asyncio.sleep(0.01)
    assert not writing.done()
    goes.set()
    with pytest.raises(OSError, match="the first part"):
        await writing
    assert seen == [inode] * 3
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_an_error_does_not_hold_what_was_to_be_written(monkeypatch):
    """Its extent could serve nobody until a collection of cycles."""

    def part(fd, view, offset):
        raise OSError("no")

    gc.disable()
    try:
        array = np.zeros(8 * SHARE, np.uint8)
        gone = weakref.ref(array)
        with contextlib.suppress(OSError):
            shared_memory._in_parts(part, 0, memoryview(array), 0)
        del array
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_where_there_are_no_more_threads_fewer_do_it(monkeypatch, work, most):
    start, started = threading.Thread.start, []

    def begin(thread):
        if len(started) >= most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    fd = memory(nbytes=8 * SHARE)
    monkeypatch.setattr(threading.Thread, "start", begin)
    shared_memory._in_parts(work, fd, memoryview(bytes(8 * SHARE)), 7)
    assert {entry[1:] for entry in work.asked} == {
        (os.fstat(fd).st_ino, 7 + start, 2 * SHARE) for start in range(0, 8 * SHARE, 2 * SHARE)
    }
    os.close(fd)


async def test_what_cannot_be_written():
    fd = memory(nbytes=10 * SHARE)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file"):
        await Memory.examine(reader, 0).write(memoryview(content(10 * SHARE)))
