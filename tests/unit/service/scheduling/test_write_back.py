"""Results that a device has and the store has not: used, waited for, lost, computed again, never written."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest

from gemmserve_service.errors import ArrayLost, Draining, JobTimeout, StoreFull
from gemmserve_service.executor.protocol import WriteOrder
from gemmserve_service.schemas import GemmReduceJob, JobState

A = np.arange(16.0).reshape(4, 4)


@pytest.fixture
def fake(make_fake):
    fake = make_fake()
    fake.defers = True
    return fake


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


def sent(fake):
    """The task that a worker was sent last."""
    return fake.sent[-1][1][-1]


def fill(core, array_id, array):
    """What a worker does when it writes."""
    record = core.store._catalog.get(array_id)
    record.extent.view(record.info.nbytes)[:] = array.tobytes()


def lies_at(ref, extent):
    return (ref.extent, ref.capacity, ref.offset) == (*extent.file, extent.start)


def wishes(fake, wish):
    return [task for _, message in fake.told if isinstance(message, WriteOrder) for task in getattr(message, wish)]


@pytest.fixture
def unwritten(core, fake, gemm):
    """Job and array of a product whose result is on the device alone."""

    async def make(left, right, **fields):
        info, _ = await core.jobs.submit(gemm(left, right, **fields))
        fake.done(task=info.id, written=False)
        info = await core.jobs.wait(info.id, 60)
        assert info.state == JobState.SUCCEEDED
        return info, info.result["d"]

    return make


async def on_record(core, array_id):
    def read(db):
        return db.execute("SELECT written FROM arrays WHERE id = ?", (array_id,)).fetchone()

    await asyncio.gather(*core.scheduler.writes._background._tasks)
    await core.database.write(lambda _: None)
    row = await core.database.read(read)
    return None if row is None else row["written"]


async def test_who_may_end_before_the_result_is_written(core, fake, gemm, a):
    await core.jobs.submit(gemm(a, a))
    assert sent(fake).defer
    assert sent(fake).results["d"].cache_id is not None
    fake.done()
    await core.jobs.submit(gemm(a, a, verify=True))
    assert sent(fake).defer, "a check is made where the result is"
    fake.done()
    for reproducible in (True, False):
        job = GemmReduceJob(op="gemm_reduce", a=a.id, b=a.id, reproducible=reproducible)
        await core.jobs.submit(job)
        assert sent(fake).defer is reproducible
        fake.done()


async def test_a_job_has_succeeded_before_its_result_is_written(core, fake, unwritten, a, fetch, held):
    info, array = await unwritten(a, a)
    assert await on_record(core, array) == 0
    with core.store.pin(array) as pinned, pytest.raises(ValueError, match="not in the store"):
        _ = pinned.view
    assert core.store._catalog.get(a.id).pins == 2, "what it was made of stays"
    fill(core, array, A @ A)
    fake.written(info.id)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    await core.scheduler.writes.stop()
    assert await on_record(core, array) == 1
    assert held(core.store) == (0, 0, 0)


async def test_a_download_has_it_written_and_waits(core, fake, unwritten, a):
    info, array = await unwritten(a, a)
    with core.store.pin(array) as pinned:
        with pytest.raises(JobTimeout):
            await core.scheduler.writes.wait_stored(pinned, 0.01)
        assert wishes(fake, "first") == [info.id]
        download = asyncio.ensure_future(core.scheduler.writes.wait_stored(pinned, 60))
        await asyncio.sleep(0)
        assert not download.done()
        fake.written(info.id)
        await download
        assert len(pinned.view) == A.nbytes
        await core.scheduler.writes.wait_stored(pinned, 0)


async def test_a_download_that_waits_when_the_server_stops_is_told_so(core, unwritten, a):
    _, array = await unwritten(a, a)
    with core.store.pin(array) as pinned:
        download = asyncio.ensure_future(core.scheduler.writes.wait_stored(pinned, None))
        await asyncio.sleep(0)
        await core.scheduler.writes.stop()
        with pytest.raises(Draining):
            await download


async def test_what_is_deleted_before_it_was_written_never_is(core, fake, unwritten, a, held):
    info, array = await unwritten(a, a)
    await core.store.delete(array)
    assert wishes(fake, "drop") == [info.id]
    assert core.store._catalog.get(array).extent.name not in core.store._files._free, "the worker may be writing"
    fake.written(info.id)
    assert await on_record(core, array) is None
    assert held(core.store) == (0, 0, 0)
    assert core.scheduler.writes.spared == 1


async def test_of_a_chain_only_what_is_kept_is_written(core, fake, unwritten, a, held, eventually):
    first, square = await unwritten(a, a)
    second, fourth = await unwritten(square, square)
    third, eighth = await unwritten(fourth, fourth)
    await core.store.delete(square)
    await core.store.delete(fourth)
    assert wishes(fake, "last") == [first.id, second.id], "the third was made of them"
    assert wishes(fake, "drop") == []
    fake.written(third.id)
    await eventually(lambda: wishes(fake, "drop") == [second.id])
    fake.written(second.id)
    assert wishes(fake, "drop") == [second.id, first.id]
    fake.written(first.id)
    assert await on_record(core, eighth) == 1
    await eventually(lambda: held(core.store) == (0, 0, 0))


async def test_a_lost_device_s_results_are_computed_again_in_their_order(core, fake, unwritten, a, held, eventually):
    _, square = await unwritten(a, a, verify=True)
    _, fourth = await unwritten(square, a, alpha=2)
    await core.store.delete(a.id)
    fake.lose()
    fake.hello()
    again = sent(fake)
    assert (again.defer, again.algorithm, again.verify) == (False, "numpy", True)
    assert lies_at(again.results["d"], core.store._catalog.get(square).extent)
    assert len(fake.running()) == 1, "the second needs the first"
    fake.done()
    last = sent(fake)
    assert not last.verify
    assert lies_at(last.results["d"], core.store._catalog.get(fourth).extent)
    assert last.operands["a"].cache_id == square
    fake.done()
    assert [await on_record(core, each) for each in (square, fourth)] == [1, 1]
    assert core.scheduler.writes.recomputed == 2
    places = {core.store._catalog.get(each).extent.name for each in (square, fourth)}
    for array in (square, fourth):
        await core.store.delete(array)
    assert not places & set(core.store._files._free), "the process that was lost may still write to them"
    await eventually(lambda: held(core.store) == (0, 0, 0))


async def test_jobs_wait_for_an_operand_that_is_computed_again(core, fake, unwritten, a, gemm):
    _, square = await unwritten(a, a)
    running, _ = await core.jobs.submit(gemm(square, square))
    assert fake.running() == [running.id], "its device has it"
    fake.lose()
    waiting, _ = await core.jobs.submit(gemm(square, a))
    fake.hello()
    assert len(fake.running()) == 1
    assert sent(fake).task not in {running.id, waiting.id}
    fake.done()
    await asyncio.sleep(0)
    assert set(fake.running()) == {running.id, waiting.id} or fake.running() == [running.id]


async def test_one_that_kills_every_worker_is_lost_and_says_so(make_core, make_settings, fake, put, gemm):
    core = await make_core(make_settings(max_attempts=2), fake)
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    array = (await core.jobs.wait(info.id, 60)).result["d"]
    pinned = core.store.pin(array)
    download = asyncio.ensure_future(core.scheduler.writes.wait_stored(pinned, 60))
    fake.lose()
    needs, _ = await core.jobs.submit(gemm(array, a))
    for _ in range(2):
        fake.hello()
        assert len(fake.running()) == 1
        fake.lose()
    with pytest.raises(ArrayLost, match="2 workers died"):
        await download
    pinned.release()
    fake.hello()
    failed = await core.jobs.wait(needs.id, 60)
    assert (failed.state, failed.error.type) == (JobState.FAILED, "/problems/array-lost")
    with pytest.raises(ArrayLost):
        core.store.pin(array)
    said = await core.jobs.get(info.id)
    assert (said.state, said.error.type) == (JobState.SUCCEEDED, "/problems/array-lost")
    assert await on_record(core, array) == -1
    await core.stop()

    second = await make_core(make_settings(max_attempts=2), fake)
    assert fake.running() == [], "it is not tried again"
    with pytest.raises(ArrayLost):
        second.store.pin(array)
    assert (await second.jobs.get(info.id)).error.type == "/problems/array-lost"
    await second.store.delete(array)
    assert await on_record(second, array) is None


async def test_a_result_of_a_cancelled_job_keeps_its_place_until_nobody_writes(core, fake, a, gemm, held):
    info, _ = await core.jobs.submit(gemm(a, a))
    await core.jobs.cancel(info.id)
    before = set(core.store._files._free)
    fake.done(task=info.id, written=False)
    assert wishes(fake, "drop") == [info.id]
    assert set(core.store._files._free) == before
    fake.written(info.id)
    assert held(core.store) == (0, 0, 0)


async def test_and_of_one_whose_device_is_lost_serves_nobody_else(core, fake, a, gemm, held):
    info, _ = await core.jobs.submit(gemm(a, a))
    await core.jobs.cancel(info.id)
    fake.done(task=info.id, written=False)
    fake.lose()
    assert held(core.store) == (0, 0, 0)
    assert core.store.recycled_bytes == 0


async def test_what_cannot_be_written_is_computed_again(core, fake, unwritten, a):
    info, array = await unwritten(a, a)
    fake.written(info.id, lost=True)
    assert len(fake.running()) == 1
    fake.done()
    assert await on_record(core, array) == 1


async def test_a_full_disk_delays_what_is_put_on_record_and_nothing_else(
    core, fake, unwritten, a, fetch, monkeypatch, eventually
):
    info, array = await unwritten(a, a)
    real, tries = core.store.set_written, []

    def full(records, written):
        tries.append(written)
        if len(tries) > 1:
            return real(records, written)
        future = asyncio.get_running_loop().create_future()
        future.set_exception(StoreFull("no room"))
        return future

    monkeypatch.setattr(core.store, "set_written", full)
    fill(core, array, A @ A)
    fake.written(info.id)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    await asyncio.sleep(0)
    assert core.store._catalog.get(a.id).pins == 2, "a crash now would have it computed again"
    await eventually(lambda: not core.scheduler.writes._background._tasks)
    assert tries == [1, 1]
    assert await on_record(core, array) == 1
    assert core.store._catalog.get(a.id).pins == 0


@pytest.mark.parametrize("when", ["written", "lost"])
async def test_what_happens_before_the_job_s_end_is_on_record(core, fake, a, gemm, when):
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    if when == "written":
        fake.written(info.id)
    else:
        fake.lose()
        fake.hello()
    info = await core.jobs.wait(info.id, 60)
    assert info.state == JobState.SUCCEEDED
    if when == "lost":
        assert len(fake.running()) == 1
        fake.done()
    assert core.store._catalog.get(info.result["d"]).tainted is (when == "lost")
    assert await on_record(core, info.result["d"]) == 1


async def test_an_end_that_cannot_be_recorded_gives_the_space_back_when_nobody_writes(
    core, fake, a, gemm, held, monkeypatch
):
    async def broken(*_):
        raise ValueError("drop")

    info, _ = await core.jobs.submit(gemm(a, a))
    monkeypatch.setattr(core.jobs.recorder, "record", broken)
    fake.done(written=False)
    assert (await core.jobs.wait(info.id, 60)).state == JobState.FAILED
    assert wishes(fake, "drop") == [info.id]
    fake.written(info.id)
    assert held(core.store) == (0, 0, 0)


async def test_operands_on_two_devices_are_written_so_that_one_can_take_the_job(
    make_core, settings, make_fake, put, gemm
):
    fake = make_fake("cuda:0", "cuda:1")
    fake.defers = True
    core = await make_core(settings, fake)
    a = await put(core.store, A)
    jobs = [(await core.jobs.submit(gemm(a, a, alpha=alpha)))[0] for alpha in (1, 2)]
    arrays = []
    for job, name in zip(jobs, ("cuda:0", "cuda:1"), strict=True):
        fake.done(name, written=False)
        arrays.append((await core.jobs.wait(job.id, 60)).result["d"])
    both, _ = await core.jobs.submit(gemm(*arrays))
    assert not fake.running("cuda:0")
    assert not fake.running("cuda:1")
    assert set(wishes(fake, "first")) == {job.id for job in jobs}
    fake.written(jobs[0].id, "cuda:0")
    assert fake.running("cuda:1") == [both.id]
    one, _ = await core.jobs.submit(gemm(arrays[1], a))
    assert not fake.running("cuda:0"), "the other device has its operand"
    fake.done("cuda:1")
    assert fake.running("cuda:1") == [one.id]


async def test_a_worker_that_does_not_write_what_is_waited_for_is_killed(core, fake, unwritten, a):
    first, array = await unwritten(a, a)
    second, other = await unwritten(a, a, alpha=2)
    watchdog, now = core.scheduler.watchdog, time.monotonic()
    fake.fleet["cpu"].heard = now + 1e6
    watchdog.look(now + 1000)
    watchdog._excused = -math.inf
    assert not fake.killed, "nobody waits"
    with core.store.pin(array) as pinned, core.store.pin(other) as another:
        downloads = [asyncio.ensure_future(core.scheduler.writes.wait_stored(each, 60)) for each in (pinned, another)]
        await asyncio.sleep(0)
        fake.fleet["cpu"].asked -= 1e6
        fake.written(second.id)
        watchdog._last_look = None
        watchdog.look(time.monotonic())
        assert not fake.killed, "it gets on"
        fake.fleet["cpu"].asked -= 1e6
        watchdog.look(time.monotonic())
        assert [name for name, _ in fake.killed] == ["cpu"]
        fake.hello()
        fake.done()
        await asyncio.gather(*downloads)
    assert first.id not in core.scheduler.writes._held


async def test_a_job_is_remembered_as_long_as_its_result_is_not_written(core, fake, unwritten, a):
    info, array = await unwritten(a, a)
    for found in ([info.id], []):
        await core.jobs.queue.purge(jobs_before=time.time() + 1e6, keys_before=0)
        assert [job.id for job, _ in await core.jobs.queue.succeeded([info.id])] == found
        if found:
            fake.written(info.id)
            assert await on_record(core, array) == 1


async def test_draining_writes_what_a_device_has(core, fake, unwritten, a, eventually):
    info, array = await unwritten(a, a)
    drained = asyncio.ensure_future(core.drain(3600))
    await eventually(lambda: wishes(fake, "first"))
    assert not drained.done()
    fake.written(info.id)
    assert await drained
    await core.scheduler.writes.stop()
    assert await on_record(core, array) == 1
