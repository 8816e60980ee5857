"""Results in the host arena: everybody reads them there, they go to files in their time, never if they are deleted."""

from __future__ import annotations

import asyncio
import errno
import os
import threading

import numpy as np
import pytest

from gemmserve_service.errors import Gone, JobTimeout, QuotaExceeded, StoreFull
from gemmserve_service.jobs.core import Core
from gemmserve_service.schemas import GemmReduceJob, JobState
from gemmserve_service.store import spill as module
from gemmserve_service.store.extents import extents
from gemmserve_service.store.extents.extents import MappedFile
from gemmserve_service.tenancy.api_keys import Quota

A = np.arange(16.0).reshape(4, 4)
PAGE = 1 << 12
ROOM = 8
"""Results that the arena has room for, each of which takes a page."""

pytestmark = pytest.mark.usefixtures("small_results_stay", "own_files")


@pytest.fixture
def settings(make_settings):
    return make_settings(write_back_delay_s=60.0)


@pytest.fixture
def new_arena(make_arena):
    return make_arena(ROOM * PAGE)


@pytest.fixture
def arena(new_arena):
    return new_arena()


@pytest.fixture
def fake(make_fake):
    fake = make_fake()
    fake.result_bytes = 1 << 20
    return fake


@pytest.fixture
async def core(make_core, settings, fake, arena):
    return await make_core(settings, fake, arena)


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


@pytest.fixture
def compute(core, fake, gemm):
    """Id of the job and of the array of a product whose result is on the device alone."""

    async def run(left, right, **fields):
        info, _ = await core.jobs.submit(gemm(left, right, **fields))
        fake.done(task=info.id, written=False)
        info = await core.jobs.wait(info.id, 60)
        assert info.state == JobState.SUCCEEDED
        return info.id, info.result["d"]

    return run


async def ask(core, array):
    """Somebody asks for an array, and does not wait."""
    with core.store.pin(array) as pinned, pytest.raises(JobTimeout):
        await core.scheduler.writes.wait_readable(pinned, 0)


@pytest.fixture
def bring(core, fake, compute):
    """One whose result is in the host arena."""

    async def run(left, right, data, **fields):
        job, array = await compute(left, right, **fields)
        await ask(core, array)
        fake.write(job, data)
        assert core.store.arena.owns(core.store._catalog.get(array).extent)
        return job, array

    return run


@pytest.fixture
def spilled(core, eventually):
    """Has everything go to files, and waits until that is on record."""

    async def run():
        core.scheduler.writes._spill.hurry()
        await eventually(lambda: not core.scheduler.writes.unwritten[0])

    return run


def is_free(arena):
    """Whether all of it is; freed blocks that somebody looked at are looked for when something is allocated."""
    block = arena.allocate(ROOM * PAGE)
    if block is not None:
        arena.free(block)
    return block is not None


def files(settings):
    return len(list((settings.data_dir / "extents").iterdir()))


async def row(core, array):
    def read(db):
        return db.execute("SELECT written, extent FROM arrays WHERE id = ?", (array,)).fetchone()

    return tuple(await core.database.read(read))


async def test_everybody_reads_it_in_the_arena_and_then_in_its_file(
    core, settings, bring, a, fetch, spilled, held, eventually
):
    _, array = await bring(a, a, A @ A)
    before = files(settings)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    assert await row(core, array) == (0, None)
    assert core.store._catalog.get(a.id).pins > 0, "after a crash it would be computed again"
    await spilled()
    record = core.store._catalog.get(array)
    assert not core.store.arena.owns(record.extent)
    assert await row(core, array) == (1, record.extent.name)
    assert files(settings) == before + 1
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    await eventually(lambda: is_free(core.store.arena))
    assert held(core.store) == (0, 0, 0)


async def test_what_is_deleted_there_never_goes_to_the_disk(core, settings, bring, a, held):
    before = files(settings)
    _, array = await bring(a, a, A @ A)
    await core.store.delete(array)
    await core.database.write(lambda _: None)
    core.scheduler.writes._spill.hurry()
    await asyncio.sleep(0)
    assert files(settings) == before
    assert core.scheduler.writes.spared == 1
    assert core.store.arena.used_bytes == 0
    assert core.store._space.unplaced_bytes == 0
    assert held(core.store) == (0, 0, 0)


async def test_it_goes_to_a_file_after_a_while(make_core, make_settings, fake, new_arena, put, gemm, eventually):
    core = await make_core(make_settings(write_back_delay_s=0.01), fake, new_arena())
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    await eventually(fake.writes)  # though nobody asked
    assert not fake.writes()[info.id].urgent
    fake.write(info.id, A @ A)
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    await eventually(lambda: is_free(core.store.arena))


@pytest.fixture
def copies(monkeypatch):
    """Holds the copy of each result before its first byte until its event is set; events by the result's bytes."""
    go_on, write = {}, module._write

    def held_back(views, *given):
        assert go_on.setdefault(bytes(views[0]), threading.Event()).wait(60)
        return write(views, *given)

    monkeypatch.setattr(module, "_write", held_back)
    yield go_on
    for event in go_on.values():
        event.set()


async def test_it_goes_when_half_of_the_arena_is_taken_and_what_nobody_can_see_goes_last(
    core, bring, a, copies, eventually
):
    _, hidden = await bring(a, a, A)
    kept = [(await bring(hidden, a, A + number))[1] for number in range(1, ROOM // 2)]
    await core.store.delete(hidden)
    await asyncio.sleep(0)
    assert core.scheduler.writes.unwritten[0] == ROOM // 2, "there is no hurry"
    assert not copies
    _, last = await bring(a, a, A + ROOM)
    begun = [(A + number).tobytes() for number in range(1, 1 + module._THREADS)]
    await eventually(lambda: set(copies) == set(begun))
    copies[begun[0]].set()  # the other one holds its thread, and whatever comes next this one's
    await eventually(lambda: core.scheduler.writes.unwritten[0] == ROOM // 2)
    assert await row(core, kept[0]) == (1, core.store._catalog.get(kept[0]).extent.name)
    for array in (*kept[1:], last, hidden):
        assert core.store._catalog.get(array).pending is not None
    assert not {A.tobytes(), (A + ROOM).tobytes()} & set(copies)


async def test_a_block_that_somebody_reads_stays_his_until_he_is_through(core, bring, a, spilled):
    _, array = await bring(a, a, A @ A)
    with core.store.pin(array) as pinned:
        view = pinned.view
        await spilled()
        assert core.store.arena.used_bytes == PAGE
        await bring(a, a, A)  # which comes to lie elsewhere
        np.testing.assert_array_equal(np.frombuffer(view).reshape(4, 4), A @ A)
        del view
    assert core.store.arena.allocate(2 * PAGE).start == 2 * PAGE, "freed blocks are looked for then"
    assert core.store.arena.allocate(PAGE).start == 0


@pytest.mark.parametrize("sent", ["on the device", "while it is written", "in the arena"])
async def test_a_block_that_a_task_reads_stays_until_that_has_ended(
    core, fake, compute, a, gemm, spilled, eventually, sent
):
    job, array = await compute(a, a)
    if sent == "on the device":
        task, _ = await core.jobs.submit(gemm(array, a))
    await ask(core, array)
    if sent == "while it is written":
        task, _ = await core.jobs.submit(gemm(array, a))
    fake.write(job, A @ A)
    if sent == "in the arena":
        task, _ = await core.jobs.submit(gemm(array, a))
    (operand,) = [ref for ref in fake.sent[-1][1][-1].operands.values() if ref.cache_id == array]
    assert (operand.extent is None) == (sent == "on the device")
    core.scheduler.writes._spill.hurry()
    await spilled()
    assert core.store.arena.used_bytes == PAGE, "the worker looks for it there"
    fake.done(task=task.id)
    await core.jobs.wait(task.id, 60)
    await eventually(lambda: is_free(core.store.arena))  # the thread that copied it may look at it for a moment


async def test_what_finds_no_room_there_goes_to_a_file(core, fake, compute, a, fetch, eventually):
    block = core.store.arena.allocate(ROOM * PAGE)
    job, array = await compute(a, a)
    await ask(core, array)
    fake.write(job, A @ A)
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert await row(core, array) == (1, core.store._catalog.get(array).extent.name)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    core.store.arena.free(block)


async def test_where_the_front_cannot_map_the_arena_results_go_to_files(
    core, fake, compute, a, fetch, eventually, monkeypatch, caplog
):
    mapping, failing = MappedFile.mapping, [True]

    def map_it(file):
        if failing[0] and file.path == core.store.arena._file.path:
            raise OSError(errno.ENOMEM, "cannot allocate memory")
        return mapping(file)

    monkeypatch.setattr(MappedFile, "mapping", map_it)
    for _ in range(2):
        job, array = await compute(a, a)
        await ask(core, array)
        assert not core.store.arena.used_bytes
        fake.write(job, A @ A)
        await eventually(lambda: not core.scheduler.writes.unwritten[0])
        np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    assert caplog.text.count("cannot be mapped") == 1
    failing[0] = False
    job, array = await compute(a, a)
    await ask(core, array)
    assert core.store.arena.used_bytes, "it is tried again"
    fake.write(job, A @ A)


async def test_with_disk_and_arena_full_it_stays_on_the_device_until_there_is_room(
    core, fake, compute, a, full_disk, eventually, fetch
):
    core.store._files.trim()
    block = core.store.arena.allocate(ROOM * PAGE)
    job, array = await compute(a, a)
    full_disk(True)
    await ask(core, array)
    await asyncio.sleep(0.05)
    assert not fake.writes()
    full_disk(False)
    await eventually(fake.writes)
    assert fake.writes()[job].urgent
    fake.write(job, A @ A)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    core.store.arena.free(block)


async def test_the_arena_is_asked_again_when_a_block_of_it_is_free(core, fake, compute, a, full_disk, eventually):
    core.store._files.trim()
    block = core.store.arena.allocate(ROOM * PAGE)
    job, array = await compute(a, a)
    full_disk(True)
    await ask(core, array)
    core.store.arena.free(block)
    await eventually(fake.writes)
    fake.write(job, A @ A)
    assert core.store.arena.owns(core.store._catalog.get(array).extent)


async def test_what_cannot_go_to_the_disk_stays_readable_and_goes_later(
    core, bring, a, full_disk, spilled, fetch, eventually, caplog
):
    _, array = await bring(a, a, A @ A)
    core.store._files.trim()
    full_disk(True)
    core.scheduler.writes._spill.hurry()
    await eventually(lambda: "stay in memory" in caplog.text)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    full_disk(False)
    await spilled()
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    await eventually(lambda: is_free(core.store.arena))


async def test_results_whose_files_fail_hold_up_no_others_and_are_tried_in_other_files(
    core, bring, a, fetch, eventually, monkeypatch
):
    bad, write, tried = np.full((4, 4), 7.0), module._write, []

    def failing(views, places, *given):
        if bytes(views[0]) == bad.tobytes():
            tried.append(places[0].name)
            raise OSError(errno.EIO, "the disk fails there")
        return write(views, places, *given)

    monkeypatch.setattr(module, "_write", failing)
    failed = [(await bring(a, a, bad))[1] for _ in range(module._THREADS)]
    _, array = await bring(a, a, A)
    core.scheduler.writes._spill.hurry()
    record = core.store._catalog.get(array)
    await eventually(lambda: not core.store.arena.owns(record.extent))
    await eventually(lambda: len(tried) > 2 * len(failed))
    assert len(set(tried)) == len(tried), "what failed serves nobody"
    np.testing.assert_array_equal(fetch(core.store, failed[0]), bad)
    await core.store.delete(failed[0])
    monkeypatch.setattr(module, "_write", write)
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    np.testing.assert_array_equal(fetch(core.store, failed[1]), bad)
    assert core.store._space.unplaced_bytes == 0


async def test_where_many_files_fail_nothing_more_is_begun(core, bring, a, eventually, monkeypatch):
    tried = []

    def failing(views, places, *given):
        tried.append(places[0].name)
        raise OSError(errno.EIO, "the disk fails everywhere")

    write = module._write
    monkeypatch.setattr(module, "_write", failing)
    monkeypatch.setattr(module, "_MAX_FAILING", 1)
    monkeypatch.setattr(module, "_MIN_RETRY_S", 3600.0)
    monkeypatch.setattr(module, "_MAX_RETRY_S", 3600.0)
    arrays = [(await bring(a, a, A))[1] for _ in range(6)]
    spill = core.scheduler.writes._spill
    spill.hurry()
    await eventually(lambda: tried and not spill._copying)
    assert len(tried) <= module._THREADS
    monkeypatch.setattr(module, "_write", write)
    for pending in list(spill._failing):
        await core.store.delete(pending.records[0].info.id)
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert len(arrays) - len(tried) == len([x for x in arrays if core.store._catalog.get(x) is not None])


async def test_nothing_is_accepted_that_the_disk_could_not_hold(core, fake, compute, a, gemm, monkeypatch, put):
    class Disk:
        f_frsize, f_bavail, f_blocks = PAGE, 3, 0

    monkeypatch.setattr(extents.os, "statvfs", lambda _: Disk)
    core.store._files.trim()
    made = [await compute(a, a) for _ in range(3)]
    with pytest.raises(StoreFull, match="beside results that are not written"):
        await core.jobs.submit(gemm(a, a))
    with pytest.raises(StoreFull):
        await put(core.store, A)
    await core.store.delete(made[0][1])
    fake.written(made[0][0])
    await core.jobs.submit(gemm(a, a))


async def test_a_quota_counts_results_that_have_no_file(core, fake, put, gemm, monkeypatch):
    quota = Quota(stored_bytes=3 * A.nbytes)
    monkeypatch.setattr(core.quotas, "_quota_of", lambda owner: quota if owner == "alice" else Quota())
    upload = core.store.allocate(A.dtype, A.shape, "C", ttl_s=None, owner="alice")
    upload.write(A.tobytes())
    a = await upload.commit()
    jobs = [(await core.jobs.submit(gemm(a, a), owner="alice"))[0] for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        await core.jobs.submit(gemm(a, a), owner="alice")
    for job in jobs:
        fake.done(task=job.id, written=False)
        await core.jobs.wait(job.id, 60)
    with pytest.raises(QuotaExceeded):
        await core.jobs.submit(gemm(a, a), owner="alice")
    array = (await core.jobs.get(jobs[0].id)).result["d"]
    await core.store.delete(array, owner="alice")
    fake.written(jobs[0].id)
    assert core.quotas.stored_bytes("alice") == 2 * A.nbytes
    await core.jobs.submit(gemm(a, a), owner="alice")


async def test_a_lost_worker_may_write_on_and_disturbs_nobody(core, fake, compute, a, fetch):
    job, array = await compute(a, a)
    await ask(core, array)
    (place,) = fake.writes()[job].places.values()
    fake.lose()
    assert core.store.arena.quarantined_bytes == PAGE
    assert core.store.arena.allocate(PAGE).start == place[3] + PAGE
    fake.hello()
    assert core.store.arena.quarantined_bytes == 0
    assert core.store.arena.allocate(PAGE).start == place[3]
    fake.done()
    assert core.store._catalog.get(array).tainted is False, "its file is its own"


async def test_a_thousand_results_that_are_lost_with_their_device_are_computed_again(
    make_core, make_settings, fake, new_arena, put, gemm, eventually
):
    core = await make_core(make_settings(write_back_delay_s=60.0, max_queued_jobs=2000), fake, new_arena())
    a = await put(core.store, A)
    jobs = []
    for _ in range(1000):
        info, _ = await core.jobs.submit(gemm(a, a))
        fake.done(task=info.id, written=False)
        jobs.append(info.id)
    await eventually(lambda: not core.jobs._live)
    assert core.scheduler.writes.unwritten == (1000, 1000 * A.nbytes)
    fake.lose()
    fake.hello()
    assert core.scheduler.queued + core.scheduler.running == 1000
    while fake.running():
        fake.done()
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert core.scheduler.writes.recomputed == 1000
    assert not core.scheduler.writes._lineages
    assert core.store._catalog.get(a.id).pins == 0


@pytest.fixture
def gate(monkeypatch):
    """Holds what copies a result to its file."""
    entered, go_on, real = threading.Event(), threading.Event(), os.pwrite

    def pwrite(fd, data, offset):
        entered.set()
        assert go_on.wait(60)
        return real(fd, data, offset)

    monkeypatch.setattr(module.os, "pwrite", pwrite)
    yield entered, go_on
    go_on.set()


async def test_it_is_read_while_it_is_copied(core, bring, a, gate, eventually, fetch, spilled):
    entered, go_on = gate
    _, array = await bring(a, a, A @ A)
    core.scheduler.writes._spill.hurry()
    await eventually(entered.is_set)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    go_on.set()
    await spilled()
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)


async def test_long_ones_go_one_at_a_time_and_others_pass_them(core, bring, a, put, eventually, monkeypatch, spilled):
    monkeypatch.setattr(module, "_LONG", A.nbytes)
    large = np.arange(64.0).reshape(8, 8)
    b = await put(core.store, large)
    go_on, begun, real = threading.Event(), [], os.pwrite

    def pwrite(fd, data, offset):
        if len(data) > A.nbytes:
            begun.append(len(data))
            go_on.wait()
        return real(fd, data, offset)

    monkeypatch.setattr(module.os, "pwrite", pwrite)
    try:
        long = [(await bring(b, b, large @ large))[1] for _ in range(3)]
        core.scheduler.writes._spill.hurry()
        await eventually(lambda: begun)
        await bring(long[2], b, large @ large @ large)
        await core.store.delete(long[2])  # the last to go, for something was made of it
        for _ in range(3):
            _, short = await bring(a, a, A @ A)
            await eventually(lambda short=short: not core.store.arena.owns(core.store._catalog.get(short).extent))
        assert len(begun) == 1
        assert all(core.store.arena.owns(core.store._catalog.get(array).extent) for array in long)
    finally:
        go_on.set()
    await spilled()
    assert 3 <= len(begun) <= 4, "the hidden one is spared where what was made of it is on record first"


async def test_a_file_is_on_the_disk_before_its_row_says_so(
    make_core, make_settings, fake, new_arena, put, gemm, eventually, monkeypatch
):
    core = await make_core(make_settings(write_back_delay_s=60.0, durability="power"), fake, new_arena())
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    array = (await core.jobs.wait(info.id, 60)).result["d"]
    await ask(core, array)
    done, flush, set_written = [], extents.Extent.flush, core.store.set_written
    monkeypatch.setattr(extents.Extent, "flush", lambda self: (done.append(self.path), flush(self)))
    monkeypatch.setattr(core.store, "set_written", lambda *given: (done.append("row"), set_written(*given))[1])
    fake.write(info.id, A @ A)
    core.scheduler.writes._spill.hurry()
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert done == [core.store._catalog.get(array).extent.path, "row"]


async def test_of_a_long_one_the_disk_is_waited_for_by_parts(
    make_core, make_settings, fake, new_arena, put, gemm, eventually, monkeypatch
):
    """What is deleted meanwhile, and a server that stops, wait for one of them at most."""
    monkeypatch.setattr(module, "_STEP", 16)
    monkeypatch.setattr(module, "_FLUSH", 48)
    core = await make_core(make_settings(write_back_delay_s=60.0, durability="power"), fake, new_arena())
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    await ask(core, (await core.jobs.wait(info.id, 60)).result["d"])
    done, flush, pwrite = [], extents.Extent.flush, os.pwrite
    monkeypatch.setattr(extents.Extent, "flush", lambda self: (done.append("flush"), flush(self)))
    monkeypatch.setattr(module.os, "pwrite", lambda *given: (done.append(given[2] // 16), pwrite(*given))[1])
    fake.write(info.id, A @ A)
    core.scheduler.writes._spill.hurry()
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert done == [0, 1, 2, "flush", 3, 4, 5, "flush", 6, 7, "flush"]


async def test_a_file_that_the_disk_did_not_take_is_written_anew(
    make_core, make_settings, fake, new_arena, put, gemm, eventually, monkeypatch
):
    """After an fsync that failed the pages count as clean: the next one would succeed."""
    core = await make_core(make_settings(write_back_delay_s=60.0, durability="power"), fake, new_arena())
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    array = (await core.jobs.wait(info.id, 60)).result["d"]
    await ask(core, array)
    fake.write(info.id, A @ A)
    files, failures, place, fsync = [], [OSError(errno.EIO, "the disk fails")], core.store.place, os.fsync

    def fails_once(fd):
        if failures:
            raise failures.pop()
        fsync(fd)

    monkeypatch.setattr(core.store, "place", lambda nbytes: (files.append(place(nbytes)), files[-1])[1])
    monkeypatch.setattr(os, "fsync", fails_once)
    core.scheduler.writes._spill.hurry()
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    assert len(files) == 2
    assert core.store._catalog.get(array).extent is files[1]
    assert await row(core, array) == (1, files[1].name)


async def test_what_is_deleted_while_it_is_copied_gives_both_places_back(core, bring, a, gate, eventually, held):
    entered, go_on = gate
    _, array = await bring(a, a, A @ A)
    core.scheduler.writes._spill.hurry()
    await eventually(entered.is_set)
    await core.store.delete(array)
    await core.database.write(lambda _: None)
    assert core.store.arena.used_bytes == PAGE, "the thread reads it"
    go_on.set()
    await eventually(lambda: not core.scheduler.writes._spill._copying)
    assert core.store.arena.allocate(ROOM * PAGE) is not None
    assert core.store._space.unplaced_bytes == 0
    assert held(core.store) == (0, 0, 0)


@pytest.mark.parametrize("jump", [24 * 3600.0, -24 * 3600.0])
@pytest.mark.parametrize("where", ["on the device", "in the arena", "not on record"])
async def test_a_result_that_is_not_on_disk_outlives_a_clock_that_is_set_and_expires_in_its_time(
    wall, make_core, settings, make_fake, new_arena, put, gemm, fetch, die, eventually, monkeypatch, held, jump, where
):
    fake = make_fake()
    fake.result_bytes = 1 << 20
    first = await make_core(settings, fake, new_arena())
    a = await put(first.store, A)
    info, _ = await first.jobs.submit(gemm(a, a, ttl_s=60.0))
    fake.done(written=False)
    array = (await first.jobs.wait(info.id, 60)).result["d"]
    await first.store.delete(a.id)
    if where != "on the device":
        await ask(first, array)
        fake.write(info.id, A @ A)
    if where == "not on record":
        monkeypatch.setattr(first.store, "set_written", lambda *_: asyncio.get_running_loop().create_future())
        first.scheduler.writes._spill.hurry()
        await eventually(lambda: not first.store.arena.owns(first.store._catalog.get(array).extent))
    wall(jump)
    await first.store.expiry.expire_due()  # before anybody has noticed
    await first.store.expiry.follow_clock()
    await first.store.expiry.expire_due()
    await first.store.info(array)
    await die(first)
    second = await make_core(settings, None, new_arena("cpu"))
    with second.store.pin(array) as pinned:
        await second.scheduler.writes.wait_readable(pinned, 60)
    np.testing.assert_array_equal(fetch(second.store, array), A @ A)
    wall.wait(59)
    await second.store.expiry.expire_due()
    await second.store.info(array)
    wall.wait(2)
    await second.store.expiry.expire_due()
    with pytest.raises(Gone):
        await second.store.info(array)
    await eventually(lambda: not len(list(second.store._catalog)))
    await eventually(lambda: not second.scheduler.writes.unwritten[0])
    assert held(second.store) == (0, 0, 0)
    assert (second.store.used_bytes, second.store._space.unplaced_bytes) == (0, 0)


async def test_a_result_that_expires_in_the_arena_is_gone(core, bring, a, later, eventually, held):
    _, array = await bring(a, a, A, ttl_s=1000.0)
    later(2000)
    await core.store.expiry.expire_due()
    await eventually(lambda: core.store.arena.used_bytes == 0)
    assert held(core.store) == (0, 0, 0)
    await core.database.write(lambda _: None)
    assert await row(core, array) == (1, None), "a row that remembers the id, and waits for nothing"


@pytest.fixture
def unrecorded(core, eventually, monkeypatch):
    """Has everything go to files, which is put on record when the event that it returns is set."""

    async def run(array):
        set_written, go_on = core.store.set_written, asyncio.Event()

        async def slow(records, written):
            await go_on.wait()
            await set_written(records, written)

        monkeypatch.setattr(core.store, "set_written", slow)
        core.scheduler.writes._spill.hurry()
        await eventually(lambda: not core.store.arena.owns(core.store._catalog.get(array).extent))
        return go_on

    return run


async def test_a_row_that_expires_before_it_names_its_file_does_not_name_another_array_s(
    core, bring, a, later, unrecorded, eventually, held
):
    _, array = await bring(a, a, A, ttl_s=1000.0)
    go_on = await unrecorded(array)
    later(2000)
    await core.store.expiry.expire_due()
    go_on.set()
    await eventually(lambda: not core.scheduler.writes.unwritten[0])
    await core.database.write(lambda _: None)
    assert await row(core, array) == (1, None)
    assert held(core.store) == (0, 0, 0)


async def test_what_is_deleted_before_it_is_on_record_takes_no_other_result_of_its_job_along(
    core, fake, settings, make_core, new_arena, a, unrecorded, fetch, die
):
    info, _ = await core.jobs.submit(GemmReduceJob(op="gemm_reduce", a=a.id, b=a.id, reduce=["sum", "absmax"]))
    fake.done(written=False)
    info = await core.jobs.wait(info.id, 60)
    kept, gone = info.result.values()
    await ask(core, kept)
    places = fake.writes()[info.id].places
    fake.write(info.id, {array: np.zeros(core.store._catalog.get(array).info.shape) for array in places})
    await unrecorded(kept)
    await core.store.delete(gone)
    await core.database.write(lambda _: None)
    await die(core)
    second = await make_core(settings, None, new_arena("cpu"))
    with second.store.pin(kept) as pinned:
        await second.scheduler.writes.wait_readable(pinned, 60)
    np.testing.assert_allclose(fetch(second.store, kept), (A @ A).sum(axis=0))


WAYS = ["on the device", "being written", "in the arena", "being copied", "not on record", "on disk"]


@pytest.mark.parametrize("how", ["die", "stop"])
@pytest.mark.parametrize("where", WAYS)
async def test_a_front_that_ends_loses_nothing_wherever_the_result_is(
    settings, make_fake, make_core, new_arena, put, gemm, fetch, die, gate, eventually, monkeypatch, where, how
):
    entered, go_on = gate
    fake = make_fake()
    fake.result_bytes = 1 << 20
    first = Core(settings, fake, new_arena())
    await first.start()
    a = await put(first.store, A)
    info, _ = await first.jobs.submit(gemm(a, a))
    fake.done(written=False)
    array = (await first.jobs.wait(info.id, 60)).result["d"]
    await first.store.delete(a.id)
    if where != "on the device":
        await ask(first, array)
    if where == "not on record":
        monkeypatch.setattr(first.store, "set_written", lambda *_: asyncio.get_running_loop().create_future())
    if where not in {"on the device", "being written"}:
        fake.write(info.id, A @ A)
    if where not in {"on the device", "being written", "in the arena"}:
        first.scheduler.writes._spill.hurry()
        await eventually(entered.is_set)
    if where in {"not on record", "on disk"}:
        go_on.set()
        await eventually(lambda: not first.store.arena.owns(first.store._catalog.get(array).extent))
    if where == "on disk":
        await eventually(lambda: not first.scheduler.writes.unwritten[0])
    await first.database.write(lambda _: None)
    if how == "die" or where == "not on record":  # which would never end
        await die(first)
        go_on.set()
    else:
        go_on.set()
        await first.stop()
    second = await make_core(settings, None, new_arena("cpu"))
    with second.store.pin(array) as pinned:
        await second.scheduler.writes.wait_readable(pinned, 60)
    np.testing.assert_array_equal(fetch(second.store, array), A @ A)
    await eventually(lambda: not second.scheduler.writes.unwritten[0])
    if (where, how) != ("being copied", "stop"):  # a copy that has begun may be the last
        assert second.scheduler.writes.recomputed == (where != "on disk")
    assert files(settings) <= 2, "what was begun is no file any more"


async def test_a_new_front_s_arena_serves_when_every_worker_has_ended_what_an_earlier_one_asked(
    make_core, settings, make_fake, new_arena, put, gemm
):
    fake = make_fake("cuda:0", "cuda:1")
    fake.result_bytes = 1 << 20
    core = await make_core(settings, fake, new_arena("cuda:0", "cuda:1", "cuda:2"))
    assert core.store.arena.allocate(PAGE) is None
    core.store.arena.worker_ready("cuda:2")
    assert core.store.arena.allocate(PAGE) is not None


async def test_a_drain_says_what_is_left_and_the_next_start_computes_it(
    core, make_core, settings, fake, compute, bring, new_arena, a, caplog, fetch
):
    caplog.set_level("INFO")
    _, on_device = await compute(a, a)
    _, in_arena = await bring(a, a, A @ A)
    assert not await core.scheduler.writes.flush(0.0)
    assert f"results of 2 jobs, {2 * A.nbytes} bytes, are being written" in caplog.text
    assert f"results of 2 jobs, {2 * A.nbytes} bytes, are not written" in caplog.text
    await core.stop()
    second = await make_core(settings, None, new_arena())
    for array in (on_device, in_arena):
        with second.store.pin(array) as pinned:
            await second.scheduler.writes.wait_readable(pinned, 60)
        np.testing.assert_array_equal(fetch(second.store, array), A @ A)
