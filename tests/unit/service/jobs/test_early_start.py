"""A job that a worker has before it is on record: what becomes of it, whatever comes in between.

The writer's thread is held back by a write of the test's own, so that nothing is committed before the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import threading

import numpy as np
import pytest
from inline_executor import InlineExecutor

from gemmserve_service.errors import IdempotencyConflict, IdempotencyMismatch, NotFound, StoreFull
from gemmserve_service.jobs import jobs
from gemmserve_service.jobs.core import Core
from gemmserve_service.schemas import JobState
from gemmserve_service.store.database import database
from gemmserve_service.store.database.migrations import DatabaseError

A = np.ones((8, 8), "c8")


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


@pytest.fixture
async def writer(core):
    """Holds the writer's thread, once it is called, until `go_on`."""

    class Writer:
        def __init__(self):
            self._go_on = threading.Event()

        async def hold(self):
            there = threading.Event()
            core.database.write_soon(lambda _: (there.set(), self._go_on.wait(120)))
            assert await asyncio.to_thread(there.wait, 60)

        def go_on(self):
            self._go_on.set()

    writer = Writer()
    yield writer
    writer.go_on()


@pytest.fixture
def begun(core, gemm, a, fake, writer, eventually):
    """A submission whose job a worker has, and of which nothing is on record."""

    async def begin(**fields):
        key = fields.pop("key", None)
        await writer.hold()
        submission = asyncio.create_task(core.jobs.submit(gemm(a, a, **fields), idempotency_key=key))
        (job_id,) = await eventually(fake.running)
        assert not submission.done()
        assert rows(core, "jobs") == []
        return submission, job_id

    return begin


@pytest.fixture
def idle(core, fake, held, eventually):
    """Nothing is held any more, once the worker has answered what it was told to stop."""

    async def check():
        while fake.running():
            fake.done()
        await eventually(lambda: not core.jobs._live)
        await core.database.write(lambda _: None)
        assert held(core.store) == (0, 0, 0)
        assert (core.scheduler.queued, core.scheduler.running) == (0, 0)
        assert not core.jobs._keys._arriving
        assert core.ready() == (True, [])

    return check


def rows(core, table):
    """What another process would find."""
    with contextlib.closing(sqlite3.connect(core.database.path)) as other:
        return [row[0] for row in other.execute(f"SELECT id FROM {table}")]


async def test_the_answer_waits_for_the_record(core, fake, begun, writer, idle):
    submission, job_id = await begun()
    writer.go_on()
    info, created = await submission
    assert (info.id, info.state, created) == (job_id, JobState.RUNNING, True)
    assert rows(core, "jobs") == [job_id]
    fake.done()
    assert (await core.jobs.wait(job_id, 60)).state == JobState.SUCCEEDED
    await idle()


async def test_an_end_that_comes_first_is_recorded_after_the_job_and_told_after_both(core, fake, begun, writer, idle):
    submission, job_id = await begun()
    fake.done()
    waiting = asyncio.create_task(core.jobs.wait(job_id, 60))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not submission.done()
    assert not waiting.done()
    writer.go_on()
    assert (await submission)[0].id == job_id
    done = await waiting
    assert done.state == JobState.SUCCEEDED
    core.jobs._recent.clear()
    assert (await core.jobs.get(job_id)).model_dump() == done.model_dump()
    assert set(rows(core, "arrays")) > {done.result["d"]}
    await idle()


async def test_a_short_job_that_is_waited_for_is_one_commit(core, fake, gemm, a, monkeypatch, idle, eventually):
    monkeypatch.setattr(jobs, "_WAITS_WITHIN_S", 3600.0)  # however slow this machine is
    statements = []
    await core.database.write(lambda db: db.set_trace_callback(statements.append))
    statements.clear()
    submission = asyncio.create_task(core.jobs.submit(gemm(a, a), waits=True))
    await eventually(fake.running)
    assert statements == []
    fake.done()
    info, _ = await submission
    done = await core.jobs.wait(info.id, 60)
    assert done.state == JobState.SUCCEEDED
    assert [each.split()[0] for each in statements] == ["BEGIN", "INSERT", "INSERT", "COMMIT"]  # the job, its result
    core.jobs._recent.clear()
    assert (await core.jobs.get(info.id)).model_dump() == done.model_dump()
    await idle()


async def test_an_end_that_is_waited_for_shares_the_commit_of_what_comes_in_the_same_turn(
    core, fake, gemm, a, monkeypatch, idle
):
    monkeypatch.setattr(jobs, "_ENDS_WITHIN_S", 3600.0)
    info, _ = await core.jobs.submit(gemm(a, a))
    statements = []
    await core.database.write(lambda db: db.set_trace_callback(statements.append))
    statements.clear()
    fake.done()
    assert statements == []
    done, _ = await asyncio.gather(core.jobs.wait(info.id, 60), core.jobs.submit(gemm(a, a)))
    assert done.state == JobState.SUCCEEDED
    assert statements.count("COMMIT") == 1
    await idle()


async def test_a_long_job_that_is_waited_for_is_on_record_soon(core, fake, gemm, a, idle):
    info, _ = await asyncio.wait_for(core.jobs.submit(gemm(a, a), waits=True), 60)
    assert (info.state, rows(core, "jobs")) == (JobState.RUNNING, [info.id])
    fake.done()
    await idle()


@pytest.mark.parametrize("written", [True, False], ids=["stored", "on the device"])
@pytest.mark.parametrize("when", ["running", "over before", "over after", "failed", "lost"])
@pytest.mark.parametrize("how", ["the row", "the commit"])
async def test_what_cannot_be_put_on_record_was_not_accepted(
    core, fake, begun, writer, idle, eventually, monkeypatch, caplog, how, when, written
):
    if how == "the row":  # its own could be written; that of its key cannot, and takes it along
        trigger = "CREATE TRIGGER refuse BEFORE INSERT ON idempotency BEGIN SELECT RAISE(ABORT, 'no room'); END"
        await core.database.write(lambda db: db.execute(trigger))
    submission, job_id = await begun(key="k")
    commit = database._commit

    def fail(connection, batch):
        outcomes = commit(connection, [(lambda _: None, future) for _, future in batch])
        return [(future, None, StoreFull("no room")) for future, *_ in outcomes]

    if how == "the commit":
        monkeypatch.setattr(database, "_commit", fail)
    if when == "over before":
        fake.done(written=written)
    elif when == "failed":
        fake.fail()
    elif when == "lost":
        fake.lose()
        fake.hello()
    writer.go_on()
    with pytest.raises((StoreFull, sqlite3.Error), match="no room"):
        await submission
    monkeypatch.undo()
    if when == "over after":
        fake.done(written=written)
    while fake.running():
        fake.done(written=written)
    await eventually(lambda: not core.jobs._live)
    await asyncio.sleep(0)  # the worker is told at the end of the turn
    for _, message in fake.told:
        for task in message.tasks:  # a Drop: nobody needs those results
            fake.written(task)
    await idle()
    with pytest.raises(NotFound):
        await core.jobs.get(job_id)
    assert rows(core, "jobs") == []
    assert len(rows(core, "arrays")) == 1
    assert not core.jobs._recent
    assert "KeyError" not in caplog.text  # ended once, not twice
    await core.database.write(lambda db: db.execute("DROP TRIGGER IF EXISTS refuse"))
    assert core.jobs._keys.jobs_of("", "k", "another") is None  # the key stands for nothing


async def test_nothing_is_sent_when_the_database_is_closed(core, fake, gemm, a, held):
    await core.database.stop()
    with pytest.raises(DatabaseError):
        await core.jobs.submit(gemm(a, a))
    assert not fake.sent
    assert held(core.store) == (0, 0, 0)


async def test_a_crash_in_between_leaves_nothing_and_nobody_was_told(core, fake, begun, settings, tmp_path):
    submission, _ = await begun(key="k")
    fake.done()
    await asyncio.sleep(0)
    # What kill -9 would leave: the files as they are.
    shutil.copytree(settings.data_dir, tmp_path / "after")
    assert not submission.done()
    second = Core(settings.model_copy(update={"data_dir": tmp_path / "after"}), InlineExecutor())
    await second.start()
    try:
        assert (await second.jobs.list(state=None, limit=9, cursor=None))[0] == []
        assert second.store.count == 1
        extents = list((tmp_path / "after" / "extents").iterdir())
        assert len(extents) == 1
        assert second.jobs._keys.jobs_of("", "k", "any") is None
    finally:
        await second.stop()


async def test_a_job_cancelled_in_between(core, fake, begun, writer, idle):
    submission, job_id = await begun()
    cancelling = asyncio.create_task(core.jobs.cancel(job_id))
    for _ in range(10):
        await asyncio.sleep(0)
    assert fake.cancelled == [("cpu", job_id)]
    assert not cancelling.done()
    writer.go_on()
    assert (await cancelling).state == JobState.CANCELLED
    assert (await submission)[0].id == job_id
    await idle()
    core.jobs._recent.clear()
    assert (await core.jobs.get(job_id)).state == JobState.CANCELLED


async def test_a_deadline_in_between(core, begun, writer, idle, eventually):
    submission, job_id = await begun(timeout_s=0.01)
    await eventually(lambda: core.jobs._live[job_id].task.over)
    writer.go_on()
    await submission
    assert (await core.jobs.wait(job_id, 60)).state == JobState.EXPIRED
    await idle()


async def test_a_worker_lost_in_between(core, fake, begun, writer, idle):
    submission, job_id = await begun()
    fake.lose()
    fake.hello()
    assert fake.running() == [job_id]
    writer.go_on()
    info, _ = await submission
    assert (info.state, info.attempt) == (JobState.RUNNING, 2)
    fake.done()
    done = await core.jobs.wait(job_id, 60)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 2)
    await idle()


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_the_key_repeated_in_between(core, fake, gemm, a, begun, writer, idle, hangs_up):
    submission, job_id = await begun(key="k")
    if hangs_up:
        submission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submission
    with pytest.raises(IdempotencyConflict):
        await core.jobs.submit(gemm(a, a), idempotency_key="k")
    with pytest.raises(IdempotencyMismatch):
        await core.jobs.submit(gemm(a, a, alpha=2), idempotency_key="k")
    writer.go_on()
    await core.database.write(lambda _: None)
    again, created = await core.jobs.submit(gemm(a, a), idempotency_key="k")
    assert (again.id, created) == (job_id, False)
    assert len(fake.sent) == 1
    await idle()


async def test_a_drain_in_between_keeps_the_job(core, begun, writer, settings):
    submission, job_id = await begun()
    assert not await core.drain(0)
    assert not submission.done()
    writer.go_on()
    assert (await submission)[0].id == job_id
    await core.stop()
    second = Core(settings, InlineExecutor())
    await second.start()
    try:
        assert (await second.jobs.wait(job_id, 60)).state == JobState.SUCCEEDED
    finally:
        await second.stop()


async def test_places_are_not_taken_twice(make_core, make_settings, fake, gemm, put, eventually):
    """A job that waits for its record and in the queue is one job."""
    core = await make_core(make_settings(max_queued_jobs=5), fake)
    a = await put(core.store, A)
    go_on = threading.Event()
    core.database.write_soon(lambda _: go_on.wait(120))
    first = asyncio.create_task(core.jobs.submit(gemm(a, a)))
    await eventually(fake.running)
    others = [asyncio.create_task(core.jobs.submit(gemm(a, a))) for _ in range(5)]
    await eventually(lambda: core.scheduler.queued == 5)
    go_on.set()
    assert all(created for _, created in await asyncio.gather(first, *others))


async def test_a_worker_has_a_job_before_its_row_is_made(core, fake, gemm, a, monkeypatch, idle):
    insert, running = core.jobs.queue.insert, []

    def look(*args, **options):
        running.append(len(fake.running()))
        return insert(*args, **options)

    monkeypatch.setattr(core.jobs.queue, "insert", look)
    await core.jobs.submit(gemm(a, a))
    assert running == [1]
    fake.done()
    await idle()


async def test_an_end_that_comes_before_its_job_is_recorded_behind_it(core, fake, gemm, a, monkeypatch, idle):
    submit = core.scheduler.submit

    def answered(task, *, soon=False):
        submit(task, soon=soon)
        fake.done()

    monkeypatch.setattr(core.scheduler, "submit", answered)
    info, _ = await core.jobs.submit(gemm(a, a))
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    assert (await core.jobs.queue.get(info.id)).state == JobState.SUCCEEDED
    await idle()


@pytest.mark.parametrize("ends", [False, True])
async def test_a_job_whose_row_cannot_be_made_leaves_nothing(core, fake, gemm, a, monkeypatch, idle, ends):
    def refuse(*_, **__):
        if ends:
            fake.done()
        raise DatabaseError("the database is not open")

    with monkeypatch.context() as patch:
        patch.setattr(core.jobs.queue, "insert", refuse)
        with pytest.raises(DatabaseError):
            await core.jobs.submit(gemm(a, a), idempotency_key="k")
    assert [task for _, task in fake.cancelled] == fake.running()
    await idle()
    assert not core.jobs._keys._arriving
    assert rows(core, "jobs") == []
