"""Extents: space that is really there, recycled only when nobody can see or change what it holds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_service.errors import StoreFull
from gemmserve_service.store.extents import extents
from gemmserve_service.store.extents.extents import ExtentPool, size_class
from gemmserve_service.store.extents.memfd import memory_extents_supported

MIB = 1 << 20


@pytest.fixture
def gone():
    return []


@pytest.fixture(params=["files", "memory"])
def pool(request, tmp_path, gone):
    if request.param == "memory" and not memory_extents_supported():
        pytest.skip("this system has no memfd")
    return ExtentPool(
        tmp_path if request.param == "files" else None, keep_bytes=4 * MIB, limit=16 * MIB, on_destroy=gone.append
    )


@given(st.integers(1, 1 << 50))
def test_a_size_class_is_whole_pages_and_wastes_at_most_an_eighth(nbytes):
    capacity = size_class(nbytes)
    assert capacity >= nbytes
    assert capacity % mmap.PAGESIZE == 0
    assert capacity - nbytes < max(mmap.PAGESIZE, nbytes / 8)
    assert size_class(capacity) == capacity


def test_an_extent_serves_again_with_its_pages(pool):
    first = pool.take(MIB)
    first.view(MIB)[:4] = b"abcd"
    pool.give(first)
    assert (pool.live_bytes, pool.free_bytes) == (0, MIB)
    again = pool.take(MIB - 100)
    assert again is first
    assert again.mapped
    assert (pool.live_bytes, pool.free_bytes) == (MIB, 0)


def test_an_extent_that_somebody_still_looks_at_is_not_handed_out(pool):
    first = pool.take(MIB)
    piece = first.view(MIB)[10:20].toreadonly()  # what a transport holds of a download
    pool.give(first)
    assert pool.take(MIB) is not first
    del piece
    assert pool.take(MIB) is first


def test_one_that_a_lost_process_may_write_to_is_never_handed_out(pool, gone):
    extent = pool.take(MIB)
    view = extent.view(MIB)
    pool.give(extent, reusable=False)
    assert gone == [extent.name]
    assert (pool.live_bytes, pool.free_bytes) == (0, 0)
    view[:1] = b"x"  # the pages are the old owner's own
    assert pool.take(MIB) is not extent


def test_free_extents_are_bounded_and_trim_gives_all_back(pool, gone):
    taken = [pool.take(MIB) for _ in range(6)]
    for extent in taken:
        pool.give(extent)
    assert pool.free_bytes == 4 * MIB
    assert gone == [taken[0].name, taken[1].name]
    pool.trim()
    assert pool.free_bytes == 0
    assert gone == [extent.name for extent in taken]
    assert not any(Path(extent.path).exists() for extent in taken if extent.fd is None)


def test_one_larger_than_what_is_kept_goes_at_once(pool, gone):
    extent = pool.take(8 * MIB)
    pool.give(extent)
    assert gone == [extent.name]


def test_the_limit_counts_what_is_live_and_drops_what_is_free(pool):
    kept = [pool.take(MIB) for _ in range(3)]
    for extent in kept:
        pool.give(extent)
    pool.take(14 * MIB)  # fits only without the free ones
    assert pool.free_bytes == 0
    with pytest.raises(StoreFull):
        pool.take(4 * MIB)
    assert pool.live_bytes == 14 * MIB


def test_a_file_has_its_space_before_anything_is_written(tmp_path, monkeypatch):
    """Asked of the system, which is as much as one can know: some file systems count blocks later, or not at all."""
    allocate, asked = os.posix_fallocate, []

    def note(fd, offset, length):
        allocate(fd, offset, length)
        asked.append((offset, length, os.fstat(fd).st_size))

    monkeypatch.setattr(os, "posix_fallocate", note)
    extent = ExtentPool(tmp_path, keep_bytes=0).take(MIB)
    assert asked == [(0, extent.capacity, extent.capacity)]
    assert extent.capacity >= MIB


def test_a_full_disk_is_store_full_and_leaves_no_file(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    pool = ExtentPool(tmp_path, keep_bytes=MIB)
    pool.give(pool.take(MIB))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreFull):
        pool.take(2 * MIB)
    assert list(tmp_path.iterdir()) == []  # the recycled one went to make room
    assert pool.live_bytes == pool.free_bytes == 0


def test_descriptors_do_not_leak(pool, tmp_path, monkeypatch):
    """Descriptors of this pool's own: other threads of the process may open and close what they like meanwhile."""
    made = set()

    def noting(function):
        def call(*args, **kwargs):
            fd = function(*args, **kwargs)
            status = os.fstat(fd)
            if str(args[0]).startswith(("gemmserve", str(tmp_path))):
                made.add((status.st_dev, status.st_ino))
            return fd

        return call

    monkeypatch.setattr(os, "open", noting(os.open))
    monkeypatch.setattr(os, "memfd_create", noting(os.memfd_create))
    for _ in range(50):
        extent = pool.take(MIB)
        extent.view(MIB)
        pool.give(extent, reusable=False)
    pool.trim()
    assert made
    left = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            left.append(path.stat())
    assert not [status for status in left if status.st_nlink == 0 and (status.st_dev, status.st_ino) in made]


def test_mappings_of_live_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(extents, "_MAX_MAPPED", 2)
    pool = ExtentPool(tmp_path, keep_bytes=0)
    taken = [pool.take(4096) for _ in range(3)]
    for extent in taken:
        extent.view(4)[:] = b"data"
        pool.touch(extent)
    assert [extent.mapped for extent in taken] == [False, True, True]
    assert bytes(taken[0].view(4)) == b"data"


def test_sweep_deletes_what_no_row_names(tmp_path):
    pool = ExtentPool(tmp_path, keep_bytes=0)
    kept, orphan = pool.take(MIB), pool.take(MIB)
    after_restart = ExtentPool(tmp_path, keep_bytes=0)
    assert after_restart.sweep([kept.name]) == 1
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    adopted = after_restart.adopt(kept.name, kept.capacity)
    assert after_restart.live_bytes == kept.capacity
    assert len(adopted.view(100)) == 100
    assert orphan.name != kept.name


# -- small ones -----------------------------------------------------------------------------------------------------


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_small_ones_share_files(tmp_path):
    pool = ExtentPool(tmp_path, keep_bytes=0)
    taken = [pool.take(8) for _ in range(1000)]
    assert len(files(tmp_path)) == 4
    assert len({extent.name for extent in taken}) == 1000
    assert len({(extent.path, extent.start) for extent in taken}) == 1000
    assert pool.live_bytes == 1000 * 4096
    for index, extent in enumerate(taken):
        extent.view(8)[:] = index.to_bytes(8, "little")
    for index, extent in enumerate(taken):
        name, nbytes = extent.file
        data = (tmp_path / name).read_bytes()
        assert len(data) == nbytes
        assert data[extent.start : extent.start + 8] == index.to_bytes(8, "little")
    other = pool.take(5000)
    assert other.file not in {extent.file for extent in taken}, "another size"
    assert pool.take(1 << 16).shared is not None
    assert pool.take((1 << 16) + 1).shared is None


def test_a_shared_file_goes_with_its_last_extent(tmp_path, gone):
    pool = ExtentPool(tmp_path, keep_bytes=0, on_destroy=gone.append)
    taken = [pool.take(8) for _ in range(300)]
    first, second = taken[0].file[0], taken[-1].file[0]
    for extent in taken[1:256]:
        pool.give(extent)
    assert gone == []
    assert pool.take(8).file[0] == first, "where there is room"
    pool.give(taken[0])
    assert gone == []
    for extent in taken[256:]:
        pool.give(extent)
    assert gone == [second]
    assert files(tmp_path) == {first}


@pytest.mark.parametrize("reusable", [True, False])
def test_what_is_looked_at_or_written_to_is_nobody_else_s(tmp_path, reusable):
    pool = ExtentPool(tmp_path, keep_bytes=0)
    stays = pool.take(8)
    extent = pool.take(8)
    view = extent.view(8)
    if not reusable:
        del view  # of this process, but a lost one may have another
    pool.give(extent, reusable=reusable)
    place = extent.path, extent.start
    others = [pool.take(8) for _ in range(300)]
    assert place not in {(other.path, other.start) for other in others}
    for other in (*others, stays):
        pool.give(other)
    assert files(tmp_path) == set()


def test_a_recycled_small_one_waits_for_who_looks_at_it(tmp_path):
    pool = ExtentPool(tmp_path, keep_bytes=MIB)
    extent, neighbour = pool.take(8), pool.take(8)
    piece = extent.view(8)[2:].toreadonly()
    neighbour.view(8)[:] = bytes(8)
    pool.give(extent)
    pool.give(neighbour)
    assert pool.take(8) is neighbour
    assert pool.take(8) is not extent
    del piece
    assert pool.take(8) is extent


def test_after_a_restart_nothing_of_a_shared_file_is_given_away_but_what_was_adopted(tmp_path, gone):
    """A worker that outlived the front may still write to what it had for a result."""
    pool = ExtentPool(tmp_path, keep_bytes=0)
    kept, result, also = (pool.take(8) for _ in range(3))
    lone = pool.take(5000)
    kept.view(8)[:] = b"the data"
    after = ExtentPool(tmp_path, keep_bytes=0, on_destroy=gone.append)
    adopted, other = after.adopt(kept.name, 8), after.adopt(also.name, 8)
    assert after.sweep([kept.name, also.name]) == 1
    assert files(tmp_path) == {kept.file[0]}
    assert bytes(adopted.view(8)) == b"the data"
    assert after.live_bytes == 2 * 4096
    taken = [after.take(8) for _ in range(300)]
    assert kept.file[0] not in {extent.file[0] for extent in taken}
    after.give(other)
    assert after.take(8).start == also.start
    assert (result.start, lone.path) not in {(extent.start, extent.path) for extent in taken}


def test_what_is_missing_or_short_is_not_adopted(tmp_path):
    pool = ExtentPool(tmp_path, keep_bytes=0)
    small, large = pool.take(8), pool.take(MIB)
    assert pool.adopt(small.name, 4097) is None
    assert pool.adopt(large.name, large.capacity + 1) is None
    assert pool.adopt(f"{small.file[0]}.4096.256", 8) is None, "behind its end"
    assert pool.adopt("0" * 32, 8) is None
    assert pool.adopt("0" * 32 + ".4096.0", 8) is None
    assert pool.adopt(large.name, MIB).capacity == large.capacity


def test_where_the_disk_has_little_room_a_small_one_takes_little(tmp_path, monkeypatch):
    allocate = os.posix_fallocate

    def full(fd, offset, length):
        if length > room:
            raise OSError(errno.ENOSPC, "full")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    pool = ExtentPool(tmp_path, keep_bytes=0)
    room = 4096
    first, second = pool.take(8), pool.take(8)
    assert [extent.file[1] for extent in (first, second)] == [4096, 4096]
    assert first.path != second.path
    room = 0
    with pytest.raises(StoreFull):
        pool.take(8)
    room = 2 * MIB
    assert pool.take(8).file[1] == MIB


@pytest.mark.parametrize("nbytes", [8, MIB])
def test_new_files_leave_the_database_its_part_of_the_disk(tmp_path, monkeypatch, nbytes):
    """Small extents share a file of a MiB, which takes from that part as little as files of one do."""

    class Disk:
        f_frsize, f_blocks = 4096, 1 << 24

    monkeypatch.setattr(extents.os, "statvfs", lambda _: Disk)
    left, capacity = (64 * MIB) // 4096, size_class(nbytes)
    pool = ExtentPool(tmp_path, keep_bytes=0)
    Disk.f_bavail = left + capacity // 4096
    assert pool.take(nbytes).file[1] == capacity
    Disk.f_bavail -= 1
    with pytest.raises(StoreFull):
        pool.take(nbytes)


def test_flush_waits_for_the_file_and_its_folder_even_when_nothing_is_mapped(tmp_path, monkeypatch):
    extent = ExtentPool(tmp_path, keep_bytes=0).take(4096)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    extent.flush()
    assert synced == [extent.path, str(tmp_path)]


def test_whoever_waits_for_a_file_that_is_being_synced_shares_the_next_sync(tmp_path, monkeypatch):
    pool = ExtentPool(tmp_path, keep_bytes=0)
    small = [pool.take(4096) for _ in range(9)]
    synced, entered, go_on, fsync = [], threading.Event(), threading.Event(), os.fsync

    def slow(fd):
        synced.append(fd)
        entered.set()
        assert go_on.wait(60)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    threads = [threading.Thread(target=extent.flush) for extent in small]
    threads[0].start()
    assert entered.wait(60)
    asked, monotonic = [], time.monotonic
    monkeypatch.setattr(extents.time, "monotonic", lambda: (asked.append(None), monotonic())[1])
    for thread in threads[1:]:
        thread.start()
    while len(asked) < len(threads) - 1:
        time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(synced) == 2 * 2, "the file and its folder, by the first and by one for all others"
    small[0].flush()
    assert len(synced) == 3 * 2, "what was written since then is not there yet"


@pytest.mark.parametrize("nbytes", [4096, MIB])
def test_what_the_disk_did_not_take_once_is_never_called_synced_and_serves_nobody_else(tmp_path, monkeypatch, nbytes):
    """The second fsync would say nothing of what the first had to write, nor that of another extent in the file."""
    pool = ExtentPool(tmp_path, keep_bytes=64 * MIB)
    freed, extent, neighbour = pool.take(nbytes), pool.take(nbytes), pool.take(nbytes)
    failures, real = [OSError(errno.EIO, "the disk fails")], os.fsync

    def fsync(fd):
        if failures:
            raise failures.pop()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            extent.flush()
    assert extent.failed
    if extent.shared is None:
        neighbour.flush()
    else:
        assert neighbour.shared is extent.shared
        with pytest.raises(OSError, match="did not take"):
            neighbour.flush()
    pool.give(freed)
    pool.give(extent)
    for _ in range(3):
        pool.take(nbytes).flush()


def test_a_mapping_that_somebody_still_looks_at_is_not_dropped_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(extents, "_MAX_MAPPED", 2)
    pool = ExtentPool(tmp_path, keep_bytes=64 * MIB)
    first = pool.take(MIB)
    piece = first.view(MIB)[10:20].toreadonly()  # what a transport holds of a download
    others = [pool.take(MIB) for _ in range(8)]
    for other in others:
        other.view(MIB)
        pool.touch(other)
    assert sum(other.mapped for other in others) <= 2
    pool.give(first)
    assert pool.take(MIB) is not first
    del piece
    assert pool.take(MIB) is first


# ---- files that take long to make


@pytest.fixture
def slow(monkeypatch):
    """What reserves room, as it takes its time in memory; the threads that it was called in."""
    allocate, threads = os.posix_fallocate, []
    monkeypatch.setattr(extents, "_LARGE", MIB)

    def late(fd, offset, length):
        threads.append(threading.current_thread())
        if length >= MIB:
            time.sleep(0.2)
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", late)
    return threads


async def test_a_file_that_takes_long_is_made_by_a_thread(tmp_path, slow, gone):
    pool = ExtentPool(tmp_path, keep_bytes=0, on_destroy=gone.append)
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    beside = asyncio.create_task(others())
    assert not pool.brief(2 * MIB)
    await pool.stock(2 * MIB)
    assert turns >= 5
    assert pool.brief(2 * MIB)
    extent = pool.take(2 * MIB)
    beside.cancel()
    assert [thread is threading.current_thread() for thread in slow] == [False]
    assert len(extent.view(2 * MIB)) == 2 * MIB
    assert (pool.free_bytes, pool.live_bytes) == (0, extent.capacity)
    assert not pool.brief(2 * MIB)
    pool.give(extent)
    assert not files(tmp_path)


async def test_one_that_is_made_quickly_is_made_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(extents, "_LARGE", MIB)
    pool = ExtentPool(tmp_path, keep_bytes=0)
    assert pool.brief(MIB // 2)
    assert not pool.brief(MIB), "nothing is known"
    await pool.stock(MIB)
    pool._rate = 1e12
    assert pool.brief(100 * MIB)
    assert not pool.brief(1 << 40)


async def test_a_file_that_nobody_takes_goes(tmp_path, slow, monkeypatch):
    monkeypatch.setattr(extents, "_UNUSED_S", 0.05)
    pool = ExtentPool(tmp_path, keep_bytes=2 * MIB)
    await pool.stock(2 * MIB)
    await pool.stock(MIB)
    await asyncio.sleep(0.3)
    assert (len(files(tmp_path)), pool.free_bytes) == (1, 2 * MIB), "what may be kept is"
    assert pool.take(2 * MIB).capacity == 2 * MIB


async def test_who_goes_away_meanwhile_leaves_no_file(tmp_path, slow):
    pool = ExtentPool(tmp_path, keep_bytes=0)
    asking = asyncio.create_task(pool.stock(2 * MIB))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(files(tmp_path)) == 1
    for _ in range(100):
        await asyncio.sleep(0.02)
        if not files(tmp_path):
            break
    assert not files(tmp_path)


async def test_a_disk_that_is_full_is_told_by_who_takes(tmp_path, slow, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    pool = ExtentPool(tmp_path, keep_bytes=0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    await pool.stock(2 * MIB)
    assert not files(tmp_path)
    with pytest.raises(StoreFull):
        pool.take(2 * MIB)
