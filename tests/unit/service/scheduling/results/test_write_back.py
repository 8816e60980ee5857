"""Results that a device has and the store has not: used, waited for, lost, computed again, never written."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest

from gemmserve_service.errors import ArrayLost, Draining, JobTimeout, StoreFull
from gemmserve_service.executor.protocol import Drop
from gemmserve_service.scheduling.results import write_back, write_orders
from gemmserve_service.schemas import GemmReduceJob, JobState

A = np.arange(16.0).reshape(4, 4)


ROOM = 1 << 20
"""Bytes of results that a device may keep: of such small ones thousands."""

pytestmark = pytest.mark.usefixtures("small_results_stay")


@pytest.fixture
def settings(make_settings):
    return make_settings(write_back_delay_s=60.0)


@pytest.fixture
def fake(make_fake):
    fake = make_fake()
    fake.result_bytes = ROOM
    return fake


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


def sent(fake):
    """The task that a worker was sent last."""
    return fake.sent[-1][1][-1]


def lies_at(ref, extent):
    return (ref.extent, ref.capacity, ref.offset) == (*extent.file, extent.start)


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


@pytest.fixture
def download(core, fake):
    """Has a result written by asking for it."""

    async def read(info, array):
        with core.store.pin(info.result["d"]) as pinned:
            waiting = asyncio.ensure_future(core.scheduler.writes.wait_readable(pinned, 60))
            await asyncio.sleep(0)
            fake.write(info.id, array)
            await waiting
            np.testing.assert_array_equal(np.frombuffer(pinned.view).reshape(array.shape), array)

    return read


async def on_record(core, array_id):
    def read(db):
        return db.execute("SELECT written, extent FROM arrays WHERE id = ?", (array_id,)).fetchone()

    await asyncio.gather(*core.scheduler.writes._background._tasks)
    await core.database.write(lambda _: None)
    row = await core.database.read(read)
    assert row is None or (row["extent"] is None) == (row["written"] != 1), "a row names what is there"
    return None if row is None else row["written"]


async def test_who_may_end_before_the_result_is_written(core, fake, gemm, a):
    await core.jobs.submit(gemm(a, a))
    assert sent(fake).defer
    assert sent(fake).results["d"].cache_id is not None
    assert sent(fake).results["d"].extent is None, "its place is chosen when it is written"
    fake.done(written=False)
    await core.jobs.submit(gemm(a, a, verify=True))
    assert sent(fake).defer, "a check is made where the result is"
    assert sent(fake).results["d"].extent is not None, "and may put another there, which would not come out again"
    fake.done()
    for reproducible in (True, False):
        job = GemmReduceJob(op="gemm_reduce", a=a.id, b=a.id, reproducible=reproducible)
        await core.jobs.submit(job)
        assert sent(fake).defer is reproducible
        fake.done()


async def test_a_job_has_succeeded_before_its_result_is_written(core, fake, unwritten, download, a, fetch, held):
    info, array = await unwritten(a, a)
    assert core.store._catalog.get(array).extent is None
    assert core.store.used_bytes == 2 * A.nbytes, "it counts all the same"
    assert await on_record(core, array) == 0
    with core.store.pin(array) as pinned, pytest.raises(ValueError, match="not in the store"):
        _ = pinned.view
    assert core.store._catalog.get(a.id).pins == 2, "what it was made of stays"
    assert not fake.writes(), "nobody asked"
    await download(info, A @ A)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    await core.scheduler.writes.stop()
    assert await on_record(core, array) == 1
    assert held(core.store) == (0, 0, 0)


async def test_a_download_has_it_written_and_waits(core, fake, unwritten, a):
    info, array = await unwritten(a, a)
    with core.store.pin(array) as pinned:
        with pytest.raises(JobTimeout):
            await core.scheduler.writes.wait_readable(pinned, 0.01)
        assert fake.writes()[info.id].urgent
        download = asyncio.ensure_future(core.scheduler.writes.wait_readable(pinned, 60))
        await asyncio.sleep(0)
        assert not download.done()
        fake.written(info.id)
        await download
        assert len(pinned.view) == A.nbytes
        await core.scheduler.writes.wait_readable(pinned, 0)


async def test_a_download_that_waits_when_the_server_stops_is_told_so(core, unwritten, a):
    _, array = await unwritten(a, a)
    with core.store.pin(array) as pinned:
        download = asyncio.ensure_future(core.scheduler.writes.wait_readable(pinned, None))
        await asyncio.sleep(0)
        await core.scheduler.writes.stop()
        with pytest.raises(Draining):
            await download


async def test_what_is_deleted_before_it_was_written_never_is(core, fake, unwritten, a, held):
    info, array = await unwritten(a, a)
    await core.store.delete(array)
    assert fake.drops() == [info.id]
    assert core.store.used_bytes == 2 * A.nbytes, "the worker has it yet"
    fake.written(info.id)
    assert await on_record(core, array) is None
    assert held(core.store) == (0, 0, 0)
    assert core.scheduler.writes.spared == 1
    assert not fake.writes()


async def test_what_is_deleted_while_it_is_written_keeps_its_place_until_the_worker_is_through(
    core, fake, unwritten, a, held
):
    info, array = await unwritten(a, a)
    with core.store.pin(array) as pinned, pytest.raises(JobTimeout):
        await core.scheduler.writes.wait_readable(pinned, 0.01)
    place = core.store._catalog.get(array).extent.name
    await core.store.delete(array)
    assert fake.drops() == [info.id]
    assert place not in core.store._files._free, "the worker may be writing"
    fake.written(info.id)
    assert place in core.store._files._free
    assert held(core.store) == (0, 0, 0)


async def test_of_a_chain_only_what_is_kept_is_written(core, fake, unwritten, a, held, eventually):
    first, square = await unwritten(a, a)
    second, fourth = await unwritten(square, square)
    third, eighth = await unwritten(fourth, fourth)
    await core.store.delete(square)
    await core.store.delete(fourth)
    assert fake.drops() == [], "the third was made of them"
    fake.fleet["cpu"].result_bytes = 0  # there is no room for any of them
    core.scheduler.writes._order_writes()
    assert next(iter(fake.writes())) == third.id, "what nobody can see is written last"
    fake.write(third.id, A)
    await eventually(lambda: fake.drops() == [second.id])
    fake.written(second.id)
    await asyncio.sleep(0)
    assert fake.drops() == [second.id, first.id]
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
    placed, place = (core.store._catalog.get(each).extent.name for each in (square, fourth))
    for array in (square, fourth):
        await core.store.delete(array)
    assert placed not in core.store._files._free, "the process that was lost may still write to it"
    assert place in core.store._files._free, "this place was taken later"
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


async def test_one_that_kills_every_worker_is_lost_and_says_so(make_core, make_settings, fake, put, gemm, held):
    core = await make_core(make_settings(max_attempts=2), fake)
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done(written=False)
    array = (await core.jobs.wait(info.id, 60)).result["d"]
    pinned = core.store.pin(array)
    download = asyncio.ensure_future(core.scheduler.writes.wait_readable(pinned, 60))
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
    assert (core.store.used_bytes, core.store._space.unplaced_bytes) == (A.nbytes, 0), "it takes no space any more"
    assert core.quotas.stored_bytes("") == A.nbytes
    await core.stop()

    second = await make_core(make_settings(max_attempts=2), fake)
    assert fake.running() == [], "it is not tried again"
    with pytest.raises(ArrayLost):
        second.store.pin(array)
    assert (await second.jobs.get(info.id)).error.type == "/problems/array-lost"
    assert (second.store.used_bytes, second.store._space.unplaced_bytes) == (A.nbytes, 0)
    await second.store.delete(array)
    assert await on_record(second, array) is None
    assert (second.store.used_bytes, second.store._space.unplaced_bytes) == (A.nbytes, 0)
    assert held(second.store) == (0, 0, 0)


async def test_a_long_chain_whose_beginning_is_lost_fails_to_its_end(make_core, make_settings, fake, put, gemm):
    """Each link's failure is the next one's: neither by recursion, nor only when something else happens."""
    core = await make_core(make_settings(max_attempts=1), fake)
    array = (await put(core.store, A)).id
    for _ in range(200):
        info, _ = await core.jobs.submit(gemm(array, array))
        fake.done(written=False)
        array = (await core.jobs.wait(info.id, 60)).result["d"]
    pinned = core.store.pin(array)
    last = asyncio.ensure_future(core.scheduler.writes.wait_readable(pinned, 60))
    fake.lose()
    fake.hello()
    assert len(fake.running()) == 1, "the first one is computed again"
    fake.lose()
    fake.hello()
    with pytest.raises(ArrayLost):
        await last
    pinned.release()
    assert core.scheduler.writes.lost == 200
    assert (core.scheduler.queued, core.scheduler.running) == (0, 0)


async def test_a_worker_is_told_once_of_results_that_are_deleted_together(core, fake, unwritten, a, held):
    found = [await unwritten(a, a) for _ in range(3)]
    await core.store.delete_all([array for _, array in found])
    assert [message.tasks for _, message in fake.told if isinstance(message, Drop)] == [[info.id for info, _ in found]]
    for info, _ in found:
        fake.written(info.id)
    assert held(core.store) == (0, 0, 0)


async def test_a_new_process_is_not_told_to_drop_what_the_one_before_has_lost(core, fake, unwritten, a):
    _, array = await unwritten(a, a)
    record = core.store._catalog.get(array)
    record.hidden = True
    core.store.settle(record)
    fake.lose()
    fake.hello()
    await asyncio.sleep(0)
    assert fake.drops() == []


@pytest.mark.parametrize("together", [True, False])
async def test_rows_of_results_go_with_the_last_of_their_job(core, fake, a, together):
    def rows():
        return core.database.read(lambda db: {row["id"]: row["state"] for row in db.execute("SELECT * FROM arrays")})

    info, _ = await core.jobs.submit(GemmReduceJob(op="gemm_reduce", a=a.id, b=a.id, reduce=["sum", "max"]))
    fake.done(task=info.id, written=False)
    first, second = (await core.jobs.wait(info.id, 60)).result.values()
    statements = []
    await core.database.write(lambda db: db.set_trace_callback(statements.append))
    statements.clear()
    if together:
        await core.store.delete_all([first, second])
    else:
        await core.store.delete(first)
        assert await rows() == {a.id: "live", first: "deleted", second: "live"}, "after a crash both are computed again"
        await core.store.delete(second)
    assert second not in await rows()
    assert fake.drops() == [info.id]
    fake.written(info.id)
    assert await rows() == {a.id: "live"}
    deletions = [each for each in statements if each.startswith("DELETE")]
    assert len(deletions) == 2, "each row once"


async def test_a_row_of_a_result_that_is_in_use_stays_until_that_is_over(core, fake, unwritten, a):
    info, array = await unwritten(a, a)
    pinned = core.store.pin(array)
    await core.store.delete(array)
    assert await on_record(core, array) == 0
    pinned.release()
    fake.written(info.id)
    assert await on_record(core, array) is None


async def test_a_result_of_a_cancelled_job_keeps_its_place_until_nobody_writes(core, fake, a, gemm, held):
    info, _ = await core.jobs.submit(gemm(a, a))
    await core.jobs.cancel(info.id)
    before = set(core.store._files._free)
    fake.done(task=info.id, written=False)
    await asyncio.sleep(0)
    assert fake.drops() == [info.id]
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


@pytest.mark.parametrize(("large", "wait_s"), [(A.nbytes, 30), (A.nbytes + 1, 60)])
async def test_large_results_wait_half_as_long(core, a, unwritten, monkeypatch, large, wait_s):
    for module in (write_back, write_orders):
        monkeypatch.setattr(module, "LARGE_BYTES", large)
    await unwritten(a, a)
    (orders,) = core.scheduler.writes._orders.values()
    assert orders.due - time.monotonic() == pytest.approx(wait_s, abs=5)


async def test_small_results_wait_while_their_device_computes(
    make_core, make_settings, fake, put, gemm, eventually, monkeypatch
):
    """Those of a stream of products: until it has ended, which nothing but the end of its last task says."""
    delay_s = 0.02
    monkeypatch.setattr(write_back, "_BUSY_TIMES", 1e6)
    core = await make_core(make_settings(write_back_delay_s=delay_s), fake)
    a = await put(core.store, A)
    first, _ = await core.jobs.submit(gemm(a, a))
    beside, _ = await core.jobs.submit(gemm(a, a, alpha=2))
    fake.done(task=first.id, written=False)
    await core.jobs.wait(first.id, 60)
    (orders,) = core.scheduler.writes._orders.values()
    await eventually(lambda: orders.offers and fake.running() == [beside.id])
    await asyncio.sleep(4 * delay_s)
    assert orders.ordered_bytes == 0
    fake.fail(task=beside.id)
    await eventually(lambda: orders.ordered_bytes == A.nbytes)


async def test_a_full_disk_delays_what_is_put_on_record_and_nothing_else(
    core, unwritten, download, a, fetch, monkeypatch, eventually
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
    await download(info, A @ A)
    np.testing.assert_array_equal(fetch(core.store, array), A @ A)
    await asyncio.sleep(0)
    assert core.store._catalog.get(a.id).pins == 2, "a crash now would have it computed again"
    await eventually(lambda: not core.scheduler.writes._background._tasks)
    assert tries == [1, 1]
    assert await on_record(core, array) == 1
    assert core.store._catalog.get(a.id).pins == 0


@pytest.mark.parametrize("made", [True, False], ids=["made", "a full disk"])
async def test_a_file_that_takes_long_to_make_is_made_before_the_worker_is_told(
    core, fake, unwritten, a, monkeypatch, eventually, made
):
    """By a thread, one after the other, while the event loop goes on; and where it cannot be made, once."""
    store, making = core.store, asyncio.Event()
    asked, brief = [], False

    async def stock(nbytes):
        nonlocal brief
        asked.append(nbytes)
        await making.wait()
        brief = made

    monkeypatch.setattr(store, "brief", lambda nbytes: brief)
    monkeypatch.setattr(store, "stock", stock)
    info, array = await unwritten(a, a)
    with store.pin(array) as pinned:
        waiting = asyncio.ensure_future(core.scheduler.writes.wait_readable(pinned, 60))
        await eventually(lambda: asked, 5)
        core.scheduler.writes._order_writes()
        seen = (list(asked), fake.writes())
        making.set()
        assert seen == ([(A @ A).nbytes], {})
        await eventually(lambda: store._catalog.get(array).extent is not None, 5)
        fake.write(info.id, A @ A)
        await waiting
    assert len(asked) == 1


async def test_a_full_disk_is_asked_more_and_more_rarely_where_files_take_long_to_make(core, unwritten, a, monkeypatch):
    """A file that a thread could not make either is no sign of room."""
    info, _ = await unwritten(a, a)
    writes = core.scheduler.writes
    pending, worker = writes._held[info.id]
    delays = []

    async def stock(nbytes):
        del nbytes

    def full(nbytes):
        raise StoreFull(f"no room for {nbytes} bytes")

    monkeypatch.setattr(core.store, "brief", lambda nbytes: False)
    monkeypatch.setattr(core.store, "stock", stock)
    monkeypatch.setattr(core.store, "place", full)
    monkeypatch.setattr(writes, "_order_writes", lambda: None)
    for _ in range(3):
        writes._order(worker, pending)  # has a thread make it
        await writes._background.wait()
        writes._order(worker, pending)  # and finds the disk full
        delays.append(writes._room_delay_s)
    assert delays == sorted(set(delays)), "each longer than the one before"
    assert not pending.ordered


async def test_a_worker_that_claims_to_have_written_what_has_no_place_is_not_believed(core, fake, a, gemm, held):
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done()
    info = await core.jobs.wait(info.id, 60)
    assert info.state == JobState.SUCCEEDED
    array = info.result["d"]
    assert await on_record(core, array) == 0
    (task,) = fake.running()
    assert task != info.id, "it is computed again"
    fake.done()
    assert await on_record(core, array) == 1
    assert core.store._catalog.get(array).extent is not None
    await core.store.delete(array)
    cancelled, _ = await core.jobs.submit(gemm(a, a))
    await core.jobs.cancel(cancelled.id)
    fake.done()
    assert not fake.running()
    assert held(core.store) == (0, 0, 0)


@pytest.mark.parametrize("verify", [False, True], ids=["without a place", "with a place"])
async def test_a_device_that_is_lost_before_the_job_s_end_is_on_record(core, fake, a, gemm, verify):
    info, _ = await core.jobs.submit(gemm(a, a, verify=verify))
    fake.done(written=False)
    fake.lose()
    fake.hello()
    info = await core.jobs.wait(info.id, 60)
    assert info.state == JobState.SUCCEEDED
    assert len(fake.running()) == 1
    fake.done()
    assert core.store._catalog.get(info.result["d"]).tainted is verify
    assert await on_record(core, info.result["d"]) == 1


async def test_an_end_that_cannot_be_recorded_gives_the_space_back_when_nobody_writes(
    core, fake, a, gemm, held, monkeypatch
):
    def broken(*_, **__):
        raise ValueError("drop")

    info, _ = await core.jobs.submit(gemm(a, a))
    monkeypatch.setattr(core.jobs.queue, "finish", broken)
    monkeypatch.setattr(core.jobs.queue, "end", broken)
    fake.done(written=False)
    assert (await core.jobs.wait(info.id, 60)).state == JobState.FAILED
    assert fake.drops() == [info.id]
    fake.written(info.id)
    assert held(core.store) == (0, 0, 0)


async def test_operands_on_two_devices_are_written_so_that_one_can_take_the_job(
    make_core, settings, make_fake, put, gemm
):
    fake = make_fake("cuda:0", "cuda:1")
    fake.result_bytes = ROOM
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
    assert [*fake.writes("cuda:0"), *fake.writes("cuda:1")] == [job.id for job in jobs]
    fake.write(jobs[0].id, A, "cuda:0")
    await asyncio.sleep(0)
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
        downloads = [asyncio.ensure_future(core.scheduler.writes.wait_readable(each, 60)) for each in (pinned, another)]
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


async def test_a_job_is_remembered_as_long_as_its_result_is_not_written(core, unwritten, download, a):
    info, array = await unwritten(a, a)
    for found in ([info.id], []):
        await core.jobs.queue.purge(jobs_before=time.time() + 1e6, keys_before=0)
        assert [job.id for job, _ in await core.jobs.queue.succeeded([info.id])] == found
        if found:
            await download(info, A)
            assert await on_record(core, array) == 1


async def test_draining_writes_what_a_device_has(core, fake, unwritten, a, eventually):
    info, array = await unwritten(a, a)
    drained = asyncio.ensure_future(core.drain(3600))
    await eventually(fake.writes)
    assert not drained.done()
    said = core.ready()[1][0]
    assert said.startswith(
        f"draining: {A.nbytes} bytes of results of 1 jobs are not on disk yet, which takes about 0 s"
    )
    assert "what is not in 3600 s is computed again" in said or "in 3599 s" in said
    fake.write(info.id, A)
    assert await drained
    await core.scheduler.writes.stop()
    assert await on_record(core, array) == 1


async def test_a_drain_says_how_far_it_is_and_how_long_the_rest_takes_at_its_own_rate(
    core, fake, unwritten, a, eventually, monkeypatch, caplog
):
    caplog.set_level("INFO")
    jobs = [(await unwritten(a, a))[0].id for _ in range(4)]
    assert core.scheduler.writes.unwritten == (4, 4 * A.nbytes)
    monkeypatch.setattr("gemmserve_service.scheduling.results.write_back._REPORT_S", 0.01)
    drained = asyncio.ensure_future(core.drain(3600))
    await eventually(lambda: len(fake.writes()) == 4)
    fake.write(jobs[0], A)
    await eventually(lambda: f"results of 3 jobs, {3 * A.nbytes} bytes, are being written" in caplog.text)
    began, _ = core.scheduler.writes._flush_began
    core.scheduler.writes._flush_began = began - 1000, 4 * A.nbytes  # a quarter has taken so long
    assert core.scheduler.writes.write_s == pytest.approx(3000, rel=0.1)
    for job in jobs[1:]:
        fake.write(job, A)
    assert await drained
    assert core.scheduler.writes.unwritten == (0, 0)


async def test_a_drain_does_not_wait_for_what_a_lost_device_took_with_it(
    core, fake, unwritten, a, eventually, monkeypatch
):
    monkeypatch.setattr("gemmserve_service.scheduling.results.write_back._REPORT_S", 3600.0)
    info, _ = await unwritten(a, a)
    drained = asyncio.ensure_future(core.drain(3600))
    await eventually(lambda: info.id in fake.writes())
    fake.lose()
    async with asyncio.timeout(60):
        assert await drained


@pytest.fixture
async def safe(make_core, make_settings, fake, own_files):
    """One whose arrays survive a loss of power."""
    return await make_core(make_settings(write_back_delay_s=60.0, durability="power"), fake)


async def test_what_the_disk_does_not_take_is_computed_again_and_nobody_reads_it_before(
    safe, fake, put, gemm, fetch, lossy_disk, eventually, held
):
    a = await put(safe.store, A)
    info, _ = await safe.jobs.submit(gemm(a, a))
    fake.done(written=False)
    array = (await safe.jobs.wait(info.id, 60)).result["d"]
    lossy_disk(2)
    with safe.store.pin(array) as pinned:
        waiting = asyncio.ensure_future(safe.scheduler.writes.wait_readable(pinned, 60))
        await asyncio.sleep(0)
        fake.write(info.id, A @ A)
        user, _ = await safe.jobs.submit(gemm(array, a, verify=True))
        places = [fake.writes()[info.id].places[array][1]]
        for _ in range(2):
            await eventually(fake.running)
            (task,) = fake.running()
            assert task != user.id
            assert not waiting.done()
            place = sent(fake).results["d"]
            places.append(place.path)
            with open(place.path, "r+b") as file:  # noqa: PTH123, ASYNC230
                file.seek(place.offset)
                file.write((A @ A).tobytes())
            fake.done()
        await waiting
    assert len(set(places)) == 3, "each in another file"
    await eventually(lambda: fake.running() == [user.id])
    fake.done()
    await safe.jobs.wait(user.id, 60)
    await eventually(lambda: not safe.scheduler.writes.unwritten[0])
    assert await on_record(safe, array) == 1
    np.testing.assert_array_equal(fetch(safe.store, array), A @ A)
    assert safe.scheduler.writes.recomputed == 2
    assert safe.store._space.unplaced_bytes == 0
    assert held(safe.store) == (0, 0, 0)


async def test_what_the_disk_does_not_take_and_nobody_needs_is_not_computed_again(
    safe, fake, put, gemm, lossy_disk, eventually, held
):
    a = await put(safe.store, A)
    info, _ = await safe.jobs.submit(gemm(a, a))
    fake.done(written=False)
    array = (await safe.jobs.wait(info.id, 60)).result["d"]
    lossy_disk(1)
    with safe.store.pin(array) as pinned, pytest.raises(JobTimeout):
        await safe.scheduler.writes.wait_readable(pinned, 0)
    fake.write(info.id, A @ A)
    await safe.store.delete(array)
    await eventually(lambda: not safe.scheduler.writes.unwritten[0])
    for task in fake.running():
        fake.done(task=task)
    await eventually(lambda: safe.store._catalog.get(array) is None)
    assert safe.store._space.unplaced_bytes == 0
    assert held(safe.store) == (0, 0, 0)
