"""Jobs as their owners see them, with a worker that answers when the test says so and with the real CPU backend."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest
from inline_executor import InlineExecutor

from gemmserve_kernels.problem.errors import ShapeMismatch
from gemmserve_service.errors import (
    NotFound,
    QueueFull,
    StoreFull,
)
from gemmserve_service.executor.protocol import Compiling
from gemmserve_service.jobs.core import Core
from gemmserve_service.jobs.live_jobs import LiveJob
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import GemmParams, GemmReduceJob, JobState

A = np.ones((8, 8), "c8")


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


async def test_a_product_of_stored_arrays(real, put, gemm, fetch, held):
    rng = np.random.default_rng(1)
    left = (rng.standard_normal((5, 7)) + 1j * rng.standard_normal((5, 7))).astype("c16")
    right = rng.standard_normal((7, 3))
    ids = [await put(real.store, array) for array in (left, right)]
    info, created = await real.jobs.submit(gemm(*ids, alpha=2, verify=True))
    assert created
    done = await real.jobs.wait(info.id, 60)
    assert (done.state, done.attempt, done.error) == (JobState.SUCCEEDED, 1, None)
    assert done.created_at <= done.started_at <= done.finished_at
    np.testing.assert_allclose(fetch(real.store, done.result["d"]), 2 * left @ right, rtol=1e-13)
    assert done.residual < 1e-12
    assert held(real.store) == (0, 0, 0)


async def test_several_reductions_in_one_job(real, put, fetch):
    a = await put(real.store, np.arange(12.0).reshape(3, 4))
    request = GemmReduceJob(op="gemm_reduce", a=a.id, b=a.id, trans_b="T", reduce=["sum", "argmax"], return_c=True)
    info, _ = await real.jobs.submit(request)
    done = await real.jobs.wait(info.id, 60)
    product = np.arange(12.0).reshape(3, 4) @ np.arange(12.0).reshape(3, 4).T
    assert set(done.result) == {"sum", "argmax", "c"}
    np.testing.assert_array_equal(fetch(real.store, done.result["sum"]), product.sum(0))
    np.testing.assert_array_equal(fetch(real.store, done.result["argmax"]), product.argmax(0))
    np.testing.assert_array_equal(fetch(real.store, done.result["c"]), product)


async def test_states_as_they_are_and_as_they_are_told(core, fake, gemm, a, idle):
    info, _ = await core.jobs.submit(gemm(a, a))
    seen = []

    async def watch():
        seen.extend([(info.state, info.attempt) async for info in core.jobs.events(info.id)])

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)  # it has seen the first
    fake.lose()
    fake.hello()
    fake.done()
    await asyncio.wait_for(watcher, 60)
    assert seen[0][0] in {JobState.QUEUED, JobState.RUNNING}
    assert seen[-3:] == [(JobState.QUEUED, 1), (JobState.RUNNING, 2), (JobState.SUCCEEDED, 2)]
    assert [job.state for job in await anext_all(core.jobs.events(info.id))] == [JobState.SUCCEEDED]
    await idle()


async def test_a_job_that_ends_while_somebody_takes_a_change_is_told_to_have_ended(core, fake, gemm, a, eventually):
    info, _ = await core.jobs.submit(gemm(a, a))
    events = core.jobs.events(info.id)
    seen = [(await anext(events)).state]
    fake.done()
    await eventually(lambda: not core.jobs._live)
    seen += [each.state async for each in events]
    assert seen[-1] == JobState.SUCCEEDED
    assert seen == sorted(set(seen), key=seen.index), "none of them twice"


async def test_a_job_says_that_it_waits_for_the_compiler(core, fake, gemm, a, idle):
    info, _ = await core.jobs.submit(gemm(a, a))
    seen = []

    async def watch():
        seen.extend([(info.state, info.compiling) async for info in core.jobs.events(info_id)])

    info_id = info.id
    watcher = asyncio.create_task(watch())

    async def tell(compiling):
        core.scheduler.task_compiles(fake.fleet["cpu"], Compiling(task=info_id, compiling=compiling))
        for _ in range(5):
            await asyncio.sleep(0)  # the watcher has seen it

    await tell(compiling=True)
    await tell(compiling=False)
    await tell(compiling=True)
    assert (await core.jobs.get(info_id)).compiling
    fake.lose()
    assert not (await core.jobs.get(info_id)).compiling
    fake.hello()
    await tell(compiling=True)
    fake.done()
    await asyncio.wait_for(watcher, 60)
    running = [compiling for state, compiling in seen if state == JobState.RUNNING]
    assert [True, False, True] in [running[at : at + 3] for at in range(len(running))]
    assert seen[-1] == (JobState.SUCCEEDED, False)
    core.scheduler.task_compiles(fake.fleet["cpu"], Compiling(task=info_id, compiling=True))  # too late
    assert not (await core.jobs.get(info_id)).compiling
    await idle()


async def test_a_job_says_how_far_it_is(core, fake, gemm, a, idle):
    info, _ = await core.jobs.submit(gemm(a, a))
    seen = []

    async def watch():
        seen.extend([(info.state, info.progress) async for info in core.jobs.events(info_id)])

    info_id = info.id
    watcher = asyncio.create_task(watch())

    def tell(share):
        core.scheduler.task_progressed(fake.fleet["cpu"], info_id, share)

    await asyncio.sleep(0)
    for share in (0.25, 0.251, 0.2, 0.5):  # a change too small to be told, and one that goes back
        tell(share)
    assert (await core.jobs.get(info_id)).progress == 0.5
    fake.lose()
    assert (await core.jobs.get(info_id)).progress == 0
    fake.hello()
    tell(0.75)
    fake.done()
    await asyncio.wait_for(watcher, 60)
    shares = [share for _, share in seen]
    assert [share for state, share in seen if state == JobState.RUNNING][-4:] == [0.25, 0.5, 0, 0.75]
    assert shares[-1] == 1
    tell(0.9)  # too late
    assert (await core.jobs.get(info_id)).progress == 1
    await idle()


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_job_that_ends_otherwise_has_no_progress(core, fake, gemm, a, idle, cancel):
    info, _ = await core.jobs.submit(gemm(a, a))
    core.scheduler.task_progressed(fake.fleet["cpu"], info.id, 0.5)
    if cancel:
        await core.jobs.cancel(info.id)
    fake.fail()
    ended = await core.jobs.wait(info.id, 60)
    assert ended.state == (JobState.CANCELLED if cancel else JobState.FAILED)
    assert (ended.progress, ended.share) == (None, 0)
    core.jobs._recent.clear()
    assert (await core.jobs.get(info.id)).progress is None, "on record likewise"
    await idle()


async def test_what_cannot_be_multiplied_is_refused_and_nothing_stays(core, gemm, a, put, idle):
    other = await put(core.store, np.ones((3, 8), "c8"))
    for request, error in (
        (gemm(a, other), ShapeMismatch),
        (gemm(a, new_id("arr")), NotFound),
        (gemm(new_id("arr"), a), NotFound),
    ):
        with pytest.raises(error):
            await core.jobs.submit(request)
    assert (await core.jobs.list(state=None, limit=9, cursor=None))[0] == []
    await idle()


async def test_no_room_for_the_result_is_refused_and_nothing_stays(make_core, make_settings, fake, gemm, put, held):
    core = await make_core(make_settings(max_store_bytes=A.nbytes * 2 - 1), fake)
    a = await put(core.store, A)
    with pytest.raises(StoreFull):
        await core.jobs.submit(gemm(a, a))
    assert held(core.store) == (0, 0, 0)


async def test_a_submission_that_cannot_be_recorded_leaves_nothing(core, fake, gemm, a, idle):
    await core.database.write(lambda db: db.execute("ALTER TABLE jobs RENAME TO away"))
    with pytest.raises(Exception, match="no such table"):
        await core.jobs.submit(gemm(a, a), idempotency_key="k")
    await core.database.write(lambda db: db.execute("ALTER TABLE away RENAME TO jobs"))
    assert [task for _, task in fake.cancelled] == fake.running()  # a worker has it already, and stops
    fake.done()
    await idle()
    assert not core.jobs._keys._arriving


async def test_an_end_is_told_when_it_is_on_record_however_long_that_takes(
    core, fake, gemm, a, idle, fetch, eventually
):
    info, _ = await core.jobs.submit(gemm(a, a))
    await core.database.write(lambda db: db.execute("ALTER TABLE arrays RENAME TO away"))
    fake.done()
    await eventually(lambda: not core.ready()[0])
    assert "database" in core.ready()[1][0]
    assert (await core.jobs.wait(info.id, 0.01)).state == JobState.RUNNING
    await core.database.write(lambda db: db.execute("ALTER TABLE away RENAME TO arrays"))
    done = await core.jobs.wait(info.id, 60)
    assert done.state == JobState.SUCCEEDED
    assert fetch(core.store, done.result["d"]).shape == (8, 8)
    assert core.ready()[0]
    await idle()


async def test_an_end_that_could_not_be_recorded_before_the_server_stopped_comes_again(
    core, fake, gemm, a, settings, eventually
):
    info, _ = await core.jobs.submit(gemm(a, a))
    await core.database.write(lambda db: db.execute("PRAGMA query_only = ON"))
    fake.done()
    await eventually(lambda: not core.ready()[0])
    assert (await core.jobs.wait(info.id, 0.01)).state == JobState.RUNNING
    await core.stop()
    second = Core(settings, InlineExecutor())
    await second.start()
    try:
        assert (await second.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    finally:
        await second.stop()


async def test_an_end_that_nothing_will_ever_record_is_a_failure(core, fake, gemm, a, idle, monkeypatch):
    info, _ = await core.jobs.submit(gemm(a, a))

    async def refuse(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr(core.jobs.queue, "finish", refuse)
    monkeypatch.setattr(core.jobs.queue, "end", lambda _, __, told, **___: told(ValueError("no such thing")))
    fake.done()
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.result) == (JobState.FAILED, None)
    await idle()


async def test_a_client_that_hangs_up_during_submission_has_submitted(core, fake, gemm, a, idle):
    task = asyncio.create_task(core.jobs.submit(gemm(a, a), idempotency_key="k"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await core.database.write(lambda _: None)
    (info,), _ = await core.jobs.list(state=None, limit=9, cursor=None)
    again, created = await core.jobs.submit(gemm(a, a), idempotency_key="k")
    assert (again.id, created) == (info.id, False)
    fake.done()
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    await idle()


async def test_operands_deleted_meanwhile_are_used_all_the_same(core, fake, gemm, a, idle):
    info, _ = await core.jobs.submit(gemm(a, a))
    await core.store.delete(a.id)
    assert core.store.used_bytes >= a.nbytes
    with pytest.raises(NotFound):
        await core.jobs.submit(gemm(a, a))
    fake.done()
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    await idle()


async def test_operands_stay_until_the_end_is_on_record(core, gemm, a, monkeypatch, idle):
    info, _ = await core.jobs.submit(gemm(a, a))
    await core.store.delete(a.id)
    end, at_the_end = core.jobs.queue.end, []

    def note(*args, **options):
        at_the_end.append(core.store._catalog.get(a.id).pins)
        return end(*args, **options)

    monkeypatch.setattr(core.jobs.queue, "end", note)
    core.executor.fail()
    await core.jobs.wait(info.id, 60)
    assert at_the_end[0] > 0
    await idle()


@pytest.mark.parametrize("when", ["queued", "running", "done"])
async def test_cancel(core, fake, gemm, a, idle, when):
    if when == "queued":
        first, _ = await core.jobs.submit(gemm(a, a))
    info, _ = await core.jobs.submit(gemm(a, a))
    if when == "done":
        fake.done()
    answer = await core.jobs.cancel(info.id)
    assert answer.state == (JobState.SUCCEEDED if when == "done" else JobState.CANCELLED)
    assert await core.jobs.cancel(info.id) == answer
    while fake.running():
        fake.done()
    if when == "queued":
        assert (await core.jobs.wait(first.id, 60)).state == JobState.SUCCEEDED
    await idle()
    with pytest.raises(NotFound):
        await core.jobs.cancel(new_id("job"))


async def test_cancel_while_draining(core, gemm, a, fake):
    info, _ = await core.jobs.submit(gemm(a, a))
    waiting, _ = await core.jobs.submit(gemm(a, a))
    await core.drain(0)
    for job in (info, waiting):
        answer = await asyncio.wait_for(core.jobs.cancel(job.id), 60)
        assert answer.state == JobState.CANCELLED


async def test_deadline(core, fake, gemm, a, idle):
    info, _ = await core.jobs.submit(gemm(a, a, timeout_s=0.03))
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.error.type) == (JobState.EXPIRED, "/problems/timeout")
    fake.done()
    await idle()


async def test_failures_carry_the_workers_problem(core, fake, gemm, a, idle):
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.fail(slug="out-of-device-memory")
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.error.type) == (JobState.FAILED, "/problems/out-of-device-memory")
    await idle()


async def test_a_poisonous_job(core, fake, gemm, a, idle):
    info, _ = await core.jobs.submit(gemm(a, a))
    for _ in range(3):
        fake.lose()
        fake.hello()
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.error.type, done.attempt) == (JobState.FAILED, "/problems/worker-crashed", 3)
    await idle()


async def test_wait_gives_up_in_time_and_when_the_server_drains(core, gemm, a):
    info, _ = await core.jobs.submit(gemm(a, a))
    assert (await core.jobs.wait(info.id, 0.01)).state == JobState.RUNNING
    waiting = asyncio.create_task(core.jobs.wait(info.id, 3600))
    events = asyncio.create_task(anext_all(core.jobs.events(info.id)))
    await asyncio.sleep(0)  # both wait
    await core.drain(0)
    assert (await asyncio.wait_for(waiting, 60)).state == JobState.RUNNING
    assert (await asyncio.wait_for(events, 60))[-1].state == JobState.RUNNING
    with pytest.raises(NotFound):
        await core.jobs.wait(new_id("job"), 1)


async def test_a_callback_waits_as_a_coroutine_does(core, fake, gemm, a, eventually):
    told = []
    lives = [(await core.jobs.accept([gemm(a, a)], None, "", waits=False, several=False))[0][0] for _ in range(2)]
    core.jobs.when_over(lives[0], 0.01, lambda: told.append("gave up"))
    core.jobs.when_over(lives[0], 3600, lambda: told.append(lives[0].info.state))
    core.jobs.when_over(lives[1], 3600, lambda: told.append("released"))
    await eventually(lambda: told)
    assert told == ["gave up"]
    lives[0].wake()  # for some other change
    assert told == ["gave up"]
    fake.done()
    await eventually(lambda: len(told) > 1)
    core.jobs.when_over(lives[0], 3600, lambda: told.append("at once"))
    assert told == ["gave up", JobState.SUCCEEDED, "at once"]
    await core.drain(0)
    assert told[3:] == ["released"]


async def test_who_has_waited_long_enough_is_not_held_until_the_job_changes(core, gemm, a, eventually):
    class Request:
        told = False

        def tell(self):
            self.told = True

    ((live,), _) = await core.jobs.accept([gemm(a, a)], None, "", waits=False, several=False)
    for _ in range(3):
        request = Request()
        core.jobs.when_over(live, 0.001, request.tell)
        await eventually(lambda request=request: request.told)
        gone = weakref.ref(request)
        del request
        await eventually(lambda gone=gone: gone() is None)
    assert not live.over


async def anext_all(iterator):
    return [item async for item in iterator]


async def test_jobs_that_were_waited_for_are_not_left_to_the_garbage_collector(core, fake, gemm, a):
    ids = set()  # other tests' servers have jobs, too
    gc.disable()
    try:
        for _ in range(3):
            told = asyncio.Event()
            ((live,), _) = await core.jobs.accept([gemm(a, a)], None, "", waits=True, several=False)
            core.jobs.when_over(live, 3600, told.set)
            ids.add(live.first.id)
            fake.done()
            await told.wait()
            del live
        left = sum(isinstance(each, LiveJob) and each.first.id in ids for each in gc.get_objects())
        assert left <= 1, "the queue has the last one"
    finally:
        gc.enable()


async def test_listing(core, fake, gemm, a):
    ids = [(await core.jobs.submit(gemm(a, a)))[0].id for _ in range(3)]
    fake.done()
    await core.jobs.wait(ids[0], 60)
    page, cursor = await core.jobs.list(state=None, limit=2, cursor=None)
    rest, end = await core.jobs.list(state=None, limit=2, cursor=cursor)
    assert sorted(job.id for job in page + rest) == sorted(ids)
    assert end is None
    succeeded, _ = await core.jobs.list(state=JobState.SUCCEEDED, limit=9, cursor=None)
    assert [job.id for job in succeeded] == [ids[0]]
    core.jobs._recent.clear()
    assert (await core.jobs.get(ids[0])).state == JobState.SUCCEEDED  # from the record


async def test_a_burst_does_not_pass_the_bound(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(max_queued_jobs=5), fake)
    a = await put(core.store, A)
    outcomes = await asyncio.gather(*(core.jobs.submit(gemm(a, a)) for _ in range(20)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
    assert len(refused) >= 14
    assert core.scheduler.queued <= 5


async def test_observers_hear_of_every_job(core, fake, scratch, gemm, a, eventually):
    class Observer:
        def __init__(self):
            self.heard = []

        def job_entered(self, job_id, op, state):
            self.heard.append((job_id, op, state))

        def job_ended(self, job, nbytes, flops):
            self.heard.append((job.state, nbytes, flops))

    observer = Observer()
    core.observers.append(observer)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done()
    await core.jobs.wait(info.id, 60)
    size = (3 * A.nbytes, 8 * 8**3)
    begun = [(info.id, "gemm", state) for state in (JobState.QUEUED, JobState.RUNNING)]
    assert observer.heard == [*begun, (JobState.SUCCEEDED, *size)]
    observer.heard.clear()
    running = asyncio.create_task(core.jobs.run(GemmParams(), await scratch(core.store, a=A, b=A)))
    await eventually(fake.running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert observer.heard == [(JobState.CANCELLED, *size)]


async def test_results_are_flushed_before_the_end_where_power_may_fail(
    make_core, make_settings, fake, gemm, put, monkeypatch
):
    core = await make_core(make_settings(durability="power"), fake)
    a = await put(core.store, A)
    order = []
    finish = core.jobs.queue.finish
    monkeypatch.setattr(
        "gemmserve_service.store.extents.extents.Extent.flush", lambda extent: order.append(("flush", extent.name))
    )

    def note(info, rows, **options):
        order.append(("finish", rows[0]["extent"]))
        return finish(info, rows, **options)

    monkeypatch.setattr(core.jobs.queue, "finish", note)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done()
    await core.jobs.wait(info.id, 60)
    assert [what for what, _ in order] == ["flush", "finish"]
    assert order[0][1] == order[1][1]


async def test_an_unknown_job_is_not_found(core):
    for call in (core.jobs.get, core.jobs.cancel):
        with pytest.raises(NotFound):
            await call(new_id("job"))
