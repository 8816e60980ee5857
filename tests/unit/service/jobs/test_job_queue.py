"""What every queue must keep. An adapter is one more entry in ADAPTERS."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from datetime import UTC, datetime

import pytest
from memory_queue import MemoryQueue

from gemmserve_service.jobs.idempotency import RememberedKey
from gemmserve_service.jobs.job_queue import NewJob, NotOnRecord, SqliteQueue
from gemmserve_service.runtime import clock
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import ArrayInfo, GemmJob, JobInfo, JobState, Problem, ProgramJob, StepInfo, Timings
from gemmserve_service.store.catalog import to_row
from gemmserve_service.store.database.database import load_sql

ADAPTERS = {"sqlite": SqliteQueue, "memory": MemoryQueue}
MOMENT = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


@pytest.fixture(params=ADAPTERS)
def queue(request, database, store):
    return ADAPTERS[request.param](database, store)


@pytest.fixture
def add(queue):
    async def insert(*, key=None, deadline_at=None, owner=""):
        request = GemmJob(op="gemm", a=new_id("arr"), b=new_id("arr"), alpha=1.5 - 0.1j, timeout_s=9)
        info = JobInfo(
            id=new_id("job"),
            state=JobState.QUEUED,
            op="gemm",
            created_at=MOMENT,
            request=request.model_dump(mode="json"),
            owner=owner,
        )
        remembered = None if key is None else RememberedKey(owner, key, "digest", info.id, MOMENT.timestamp())
        await queue.insert([NewJob(info, request.model_dump_json(), deadline_at)], remembered)
        return info, request

    return insert


def moved(info, state, **fields):
    return info.model_copy(update={"state": state, **fields})


async def test_what_was_inserted_is_found(queue, add):
    info, _ = await add()
    assert await queue.get(info.id) == info
    assert await queue.get(new_id("job")) is None


async def test_every_field_of_an_end_is_kept(queue, add):
    info, _ = await add()
    end = moved(
        info,
        JobState.SUCCEEDED,
        attempt=2,
        started_at=MOMENT,
        finished_at=MOMENT,
        result={"d": new_id("arr")},
        timings=Timings(queue_s=0.1, kernel_s=1 / 3),
        algorithm="simt",
        residual=1.5e-7,
    )
    await queue.finish(end, [])
    assert await queue.get(info.id) == end
    info, _ = await add()
    problem = Problem(type="/problems/x", title="X", status=422, detail="é", available=["fp32"])
    end = moved(info, JobState.FAILED, finished_at=MOMENT, error=problem)
    await queue.finish(end, [])
    assert await queue.get(info.id) == end


async def test_a_programs_steps_are_kept_and_left_out_of_listings(queue):
    steps = [{"id": "x", "op": "gemm", "a": new_id("arr"), "b": new_id("arr")}]
    request = ProgramJob.model_validate({"op": "program", "steps": steps})
    given = request.model_dump(mode="json", exclude_unset=True)
    info = JobInfo(id=new_id("job"), state=JobState.QUEUED, op="program", created_at=MOMENT, request=given)
    await queue.insert([NewJob(info, request.model_dump_json(exclude_unset=True))], None)
    (unfinished,), _ = await queue.recover()
    assert unfinished.request == request
    done = [StepInfo(id="x", algorithm="numpy", kernel_s=0.5, residual=1e-7)]
    end = moved(info, JobState.SUCCEEDED, finished_at=MOMENT, result={"x": new_id("arr")}, steps=done)
    await queue.finish(end, [])
    found = await queue.get(info.id)
    assert (found.steps, found.request["steps"]) == (done, steps)
    for state in (None, JobState.SUCCEEDED):
        (listed,) = await queue.page(state=state, limit=9, before=None)
        assert (listed.steps, listed.request, listed.result) == (None, None, end.result)
    assert await queue.page(state=None, limit=9, before=None, owner="somebody") == []


async def test_no_transition_leaves_a_final_state(queue, add):
    info, _ = await add()
    end = moved(info, JobState.CANCELLED, finished_at=MOMENT)
    await queue.finish(end, [])
    queue.started(info.id, 1, MOMENT)
    await queue.requeued(info, 0)
    await queue.finish(moved(info, JobState.FAILED, finished_at=MOMENT), [])
    assert (await queue.get(info.id)).state == JobState.CANCELLED


async def test_results_and_end_come_together_or_not_at_all(queue, add, store, database):
    info, _ = await add()
    array = ArrayInfo(id=new_id("arr"), dtype="float32", shape=(0,), nbytes=0, created_at=MOMENT)
    end = moved(info, JobState.SUCCEEDED, finished_at=MOMENT, result={"d": array.id})
    with pytest.raises(Exception, match="UNIQUE"):
        await queue.finish(end, [to_row(array, None), to_row(array, None)])
    assert (await queue.get(info.id)).state == JobState.QUEUED
    assert await database.read(lambda db: db.execute("SELECT count(*) FROM arrays").fetchone()[0]) == 0
    await queue.finish(end, [to_row(array, None)])
    assert (await queue.get(info.id)).result == {"d": array.id}
    assert await database.read(lambda db: db.execute("SELECT count(*) FROM arrays").fetchone()[0]) == 1


async def test_recovery_gives_back_what_is_unfinished(queue, add):
    (running, request), (waiting, _), (done, _) = await add(deadline_at=5.0), await add(key="k"), await add()
    queue.started(running.id, 2, MOMENT)
    await queue.finish(moved(done, JobState.FAILED, finished_at=MOMENT), [])
    unfinished, keys = await queue.recover()
    assert {job.info.id for job in unfinished} == {running.id, waiting.id}
    first = next(job for job in unfinished if job.info.id == running.id)
    assert (first.info.state, first.info.attempt, first.info.started_at) == (JobState.QUEUED, 2, None)
    assert (first.request, first.deadline_at) == (request, 5.0)
    assert keys == [RememberedKey("", "k", "digest", waiting.id, MOMENT.timestamp())]


async def test_requeued_waits_again(queue, add):
    info, _ = await add()
    queue.started(info.id, 1, MOMENT)
    assert (await queue.get(info.id)).state == JobState.RUNNING
    await queue.requeued(moved(info, JobState.QUEUED, attempt=1), 1)
    found = await queue.get(info.id)
    assert (found.state, found.attempt, found.started_at) == (JobState.QUEUED, 1, None)


async def test_pages_newest_first(queue, add):
    ids = sorted([(await add())[0].id for _ in range(5)], reverse=True)
    assert [job.id for job in await queue.page(state=None, limit=3, before=None)] == ids[:3]
    assert [job.id for job in await queue.page(state=None, limit=3, before=ids[2])] == ids[3:]
    await queue.finish(moved(await queue.get(ids[1]), JobState.EXPIRED, finished_at=MOMENT), [])
    assert [job.id for job in await queue.page(state=JobState.EXPIRED, limit=9, before=None)] == [ids[1]]
    assert [job.id for job in await queue.page(state=JobState.QUEUED, limit=9, before=None)] == [ids[0], *ids[2:]]


async def test_a_key_and_its_job_are_inserted_together(queue, add):
    await add(key="k")
    info, _ = await add(key="k")  # the first has expired, its row is still there
    _, keys = await queue.recover()
    assert [key.job_id for key in keys] == [info.id]


async def test_purge_forgets_what_is_old_and_final(queue, add):
    (old, _), (waiting, _) = await add(key="old"), await add()
    await queue.finish(moved(old, JobState.SUCCEEDED, finished_at=MOMENT), [])
    await queue.purge(jobs_before=MOMENT.timestamp(), keys_before=MOMENT.timestamp())
    assert await queue.get(old.id) is not None
    await queue.purge(jobs_before=MOMENT.timestamp() + 1, keys_before=MOMENT.timestamp() + 1)
    assert await queue.get(old.id) is None
    assert await queue.get(waiting.id) is not None
    assert (await queue.recover())[1] == []


async def test_owners_see_their_own_pages(queue, add):
    ids = {owner: sorted([(await add(owner=owner))[0].id for _ in range(3)], reverse=True) for owner in ("a", "b")}
    for owner, own in ids.items():
        assert [job.id for job in await queue.page(state=None, limit=2, before=None, owner=owner)] == own[:2]
        assert [job.id for job in await queue.page(state=None, limit=2, before=own[1], owner=owner)] == own[2:]
        assert [job.owner for job in await queue.page(state=JobState.QUEUED, limit=9, before=None, owner=owner)] == (
            [owner] * 3
        )
    await queue.finish(moved(await queue.get(ids["a"][0]), JobState.FAILED, finished_at=MOMENT), [])
    assert [job.id for job in await queue.page(state=JobState.FAILED, limit=9, before=None, owner="a")] == ids["a"][:1]
    assert await queue.page(state=JobState.FAILED, limit=9, before=None, owner="b") == []
    assert len(await queue.page(state=None, limit=9, before=None)) == 6


async def test_owners_may_use_the_same_key(queue, add):
    first, second = (await add(key="k", owner="a"))[0], (await add(key="k", owner="b"))[0]
    _, keys = await queue.recover()
    assert {(key.owner, key.job_id) for key in keys} == {("a", first.id), ("b", second.id)}


async def test_lost_workers_are_counted_apart_from_attempts(queue, add):
    info, _ = await add()
    queue.started(info.id, 1, MOMENT)
    await queue.requeued(moved(info, JobState.QUEUED, attempt=1), 1)
    queue.started(info.id, 2, MOMENT)
    (job,), _ = await queue.recover()  # the server itself went down
    assert (job.info.attempt, job.crashes) == (2, 1)


async def test_a_clock_that_was_set_takes_moments_along(queue, add):
    (waits, _), (done, _) = await add(deadline_at=MOMENT.timestamp() + 60, key="k"), await add()
    await queue.finish(moved(done, JobState.SUCCEEDED, finished_at=MOMENT), [])
    await queue.shift(3600)
    (job,), (key,) = await queue.recover()
    assert (job.info.id, job.deadline_at) == (waits.id, MOMENT.timestamp() + 3660)
    assert key.created_at == MOMENT.timestamp() + 3600
    await queue.purge(jobs_before=MOMENT.timestamp() + 3599, keys_before=MOMENT.timestamp() + 3599)
    assert (await queue.recover())[1]
    assert (await queue.get(done.id)).finished_at.timestamp() == MOMENT.timestamp() + 3600
    assert (await queue.get(waits.id)).finished_at is None


async def test_a_start_behind_which_its_job_is_put_on_record(queue, add):
    """The write that is to record starts was begun before the second job came."""
    first, _ = await add()
    queue.started(first.id, 1, MOMENT)
    request = GemmJob(op="gemm", a=new_id("arr"), b=new_id("arr"))
    second = JobInfo(id=new_id("job"), state=JobState.QUEUED, op="gemm", created_at=MOMENT, request={})
    insert = queue.insert([NewJob(second, request.model_dump_json())], None, within_s=0.01)
    queue.started(second.id, 1, MOMENT)
    await insert
    async with asyncio.timeout(60):
        while len(await queue.page(state=JobState.RUNNING, limit=9, before=None)) < 2:  # noqa: ASYNC110 (a table)
            await asyncio.sleep(0.01)


async def test_what_waits_for_company_is_begun_when_asked(queue, add):
    info, _ = await add()
    end = queue.finish(moved(info, JobState.CANCELLED, finished_at=MOMENT), [], within_s=3600)
    queue.begin()
    await end
    assert (await queue.get(info.id)).state == JobState.CANCELLED


def array_row(array_id=None):
    array = ArrayInfo(
        id=array_id or new_id("arr"), dtype="float32", shape=(0, 3), order="C", nbytes=0, created_at=MOMENT,
        expires_at=None, owner="",
    )  # fmt: skip
    return to_row(array, None)


async def test_ends_that_are_recorded_together_fail_alone(queue, add, database):
    """One job was never put on record, and the result of another has the id of an array that there is."""
    infos = [(await add())[0] for _ in range(4)]
    taken = array_row()
    await queue.finish(moved(infos.pop(), JobState.SUCCEEDED, finished_at=MOMENT), [taken])
    unknown = infos[0].model_copy(update={"id": new_id("job")})
    rows = {info.id: array_row() for info in (*infos, unknown)}
    rows[infos[1].id] = taken
    asked = [infos[0], unknown, infos[1], infos[2]]
    ends = [
        queue.finish(moved(info, JobState.SUCCEEDED, finished_at=MOMENT), [rows[info.id]], within_s=3600)
        for info in asked
    ]
    queue.begin()
    outcomes = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), NotOnRecord, sqlite3.IntegrityError, type(None)]
    states = [(await queue.get(info.id)).state for info in infos]
    assert states == [JobState.SUCCEEDED, JobState.QUEUED, JobState.SUCCEEDED]
    stored = await database.read(lambda db: {row["id"] for row in db.execute("SELECT id FROM arrays")})
    assert stored == {taken["id"], rows[infos[0].id]["id"], rows[infos[2].id]["id"]}


async def test_an_end_does_not_overtake_its_job(queue, add):
    """An end that could join those that wait is behind what was asked for after them."""
    first, _ = await add()
    ends = [queue.finish(moved(first, JobState.CANCELLED, finished_at=MOMENT), [], within_s=3600)]
    second = JobInfo(id=new_id("job"), state=JobState.QUEUED, op="gemm", created_at=MOMENT, request={})
    request = GemmJob(op="gemm", a=new_id("arr"), b=new_id("arr"))
    queue.insert([NewJob(second, request.model_dump_json())], None, within_s=3600)
    ends.append(queue.finish(moved(second, JobState.CANCELLED, finished_at=MOMENT), [], within_s=0))
    await asyncio.gather(*ends)
    assert (await queue.get(second.id)).state == JobState.CANCELLED


@pytest.fixture
def statements(database):
    """What is executed by whom writes, once it is called."""
    seen = []

    async def trace():
        await database.write(lambda db: db.set_trace_callback(seen.append))
        seen.clear()
        return seen

    return trace


def new_job(**fields):
    request = GemmJob(op="gemm", a=new_id("arr"), b=new_id("arr"))
    info = JobInfo(id=new_id("job"), state=JobState.QUEUED, op="gemm", created_at=MOMENT, request={}, **fields)
    return info, NewJob(info, request.model_dump_json())


async def test_a_job_that_ends_before_it_is_on_record_is_written_once(database, store, statements):
    queue, seen = SqliteQueue(database, store), await statements()
    (ended, first), (waits, second) = new_job(), new_job()
    insert = queue.insert([first, second], None, within_s=3600)
    end = moved(ended, JobState.FAILED, finished_at=MOMENT, error=Problem(type="/x", title="X", status=422, detail="y"))
    await queue.finish(end, [array_row()])
    await insert
    assert [statement.split()[0] for statement in seen] == ["BEGIN", "INSERT", "INSERT", "INSERT", "COMMIT"]
    found = await queue.get(ended.id)
    assert found.model_copy(update={"request": {}}) == end
    assert (await queue.get(waits.id)).state == JobState.QUEUED
    await queue.finish(moved(waits, JobState.CANCELLED, finished_at=MOMENT), [])
    assert (await queue.get(waits.id)).state == JobState.CANCELLED


async def test_a_job_is_on_record_though_its_end_could_not_be_written_with_it(database, store):
    """The result has the id of an array that there is."""
    queue, taken = SqliteQueue(database, store), array_row()
    await database.write(lambda db: store.insert_rows(db, [taken]))
    info, row = new_job()
    insert = queue.insert([row], None, within_s=3600)
    end = queue.finish(moved(info, JobState.SUCCEEDED, finished_at=MOMENT), [taken])
    outcomes = await asyncio.gather(insert, end, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), sqlite3.IntegrityError]
    assert (await queue.get(info.id)).state == JobState.QUEUED
    await queue.finish(moved(info, JobState.SUCCEEDED, finished_at=MOMENT), [])
    assert (await queue.get(info.id)).state == JobState.SUCCEEDED


async def test_an_end_whose_job_cannot_be_put_on_record_is_told_so(database, store):
    queue = SqliteQueue(database, store)
    info, row = new_job()
    await queue.insert([row], None)
    insert = queue.insert([row], None, within_s=3600)  # that id is taken
    unknown, other = new_job()
    with_it = queue.insert([other, row], None, within_s=3600)
    ends = [queue.finish(moved(each, JobState.CANCELLED, finished_at=MOMENT), []) for each in (unknown, info)]
    outcomes = await asyncio.gather(insert, with_it, *ends, return_exceptions=True)
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [sqlite3.IntegrityError, sqlite3.IntegrityError, NotOnRecord, type(None)]
    assert await queue.get(unknown.id) is None
    assert (await queue.get(info.id)).state == JobState.CANCELLED


@pytest.mark.parametrize("owner", ["", "somebody"])
@pytest.mark.parametrize("state", [None, JobState.SUCCEEDED, JobState.FAILED])
async def test_pages_are_read_by_an_index_and_in_its_order(database, store, statements, state, owner):
    queue, plans = SqliteQueue(database, store), []
    read = database.read

    async def explained(fn):
        def explain(db):
            db.set_trace_callback(seen.append)
            rows = fn(db)
            db.set_trace_callback(None)
            plans.extend(row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {seen[0]}"))
            return rows

        seen = []
        return await read(explain)

    database.read = explained
    await queue.page(state=state, limit=9, before=None, owner=owner)
    (plan,) = plans
    if state is JobState.FAILED:
        assert "USING INDEX jobs_not_succeeded (state=? AND id<?)" in plan
    elif owner:
        assert "USING INDEX jobs_of_owners (owner=? AND id<?)" in plan
    else:
        assert "USING PRIMARY KEY (id<?)" in plan


async def test_what_is_looked_for_at_a_start_and_to_be_forgotten_is_found_by_an_index(database):
    for name, found in {
        "recover": "USING COVERING INDEX jobs_not_succeeded (state=?)",
        "unfinished": "USING INDEX jobs_not_succeeded (state=?)",
        "purge": "USING PRIMARY KEY (id>? AND id<?)",
    }.items():

        def plan(db, name=name):
            fields = {"after": "", "until": "", "before": 0.0}
            return [row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {load_sql('jobs')[name]}", fields)]

        assert found in (await database.read(plan))[0]


async def test_jobs_of_a_time_that_is_still_to_come_are_forgotten(database, store, monkeypatch):
    """The clock was set back when they had been made, and the moments on record went along."""
    queue, (info, row) = SqliteQueue(database, store), new_job()
    await queue.insert([row], None)
    await queue.finish(moved(info, JobState.SUCCEEDED, finished_at=datetime.now(UTC)), [])
    year_s = 365 * 86_400.0
    await queue.shift(-year_s)
    monkeypatch.setattr(clock, "time", lambda: time.time() - year_s)
    await queue.purge(jobs_before=clock.time() - 60, keys_before=0)
    assert await queue.get(info.id) is not None
    await queue.purge(jobs_before=clock.time() + 60, keys_before=0)
    assert await queue.get(info.id) is None


async def test_an_end_is_told_to_whoever_wants_no_future(queue, add):
    info, _ = await add()
    heard = asyncio.Queue()
    queue.end(moved(info, JobState.CANCELLED, finished_at=MOMENT), [], heard.put_nowait)
    unknown = info.model_copy(update={"id": new_id("job")})
    queue.end(moved(unknown, JobState.CANCELLED, finished_at=MOMENT), [], heard.put_nowait)
    assert {type(await heard.get()), type(await heard.get())} == {type(None), NotOnRecord}
    assert (await queue.get(info.id)).state == JobState.CANCELLED


@pytest.mark.parametrize(("count", "recorded"), [(8, 8), (9, 0)])
async def test_starts_of_many_jobs_that_end_at_once_are_not_recorded(database, store, count, recorded):
    queue, statements = SqliteQueue(database, store), []
    await database.write(lambda db: db.set_trace_callback(statements.append))
    infos = [
        JobInfo(id=new_id("job"), state=JobState.QUEUED, op="gemm", created_at=MOMENT, request={}) for _ in range(count)
    ]
    request = GemmJob(op="gemm", a=new_id("arr"), b=new_id("arr")).model_dump_json()
    await queue.insert([NewJob(info, request) for info in infos], None)
    for info in infos:
        queue.started(info.id, 1, MOMENT)
    await database.write(lambda _: None)
    ended = [moved(info, JobState.SUCCEEDED, finished_at=MOMENT, started_at=MOMENT) for info in infos]
    await asyncio.gather(*(queue.finish(info, []) for info in ended))
    assert len([statement for statement in statements if "state = 'running'" in statement]) == recorded
    found = await queue.get(infos[0].id)
    assert (found.state, found.started_at.timestamp()) == (JobState.SUCCEEDED, MOMENT.timestamp())


async def test_a_job_that_starts_before_its_row_is_written_is_inserted_as_running(database, store):
    queue, statements = SqliteQueue(database, store), []
    await database.write(lambda db: db.set_trace_callback(statements.append))
    jobs = [new_job() for _ in range(3)]
    insert = queue.insert([row for _, row in jobs], None)
    (waits, _), (runs, _), (again, _) = jobs
    queue.started(runs.id, 1, MOMENT)
    queue.started(again.id, 1, MOMENT)
    requeued = queue.requeued(moved(again, JobState.QUEUED, attempt=1), 1)
    queue.started(again.id, 2, MOMENT)
    await asyncio.gather(insert, requeued)
    await database.write(lambda _: None)  # the start behind what put it into the queue again
    found = [await queue.get(info.id) for info in (waits, runs, again)]
    assert [(job.state, job.attempt) for job in found] == [
        (JobState.QUEUED, 0),
        (JobState.RUNNING, 1),
        (JobState.RUNNING, 2),
    ]
    assert [job.started_at for job in found] == [None, MOMENT, MOMENT]
    assert len([statement for statement in statements if "state = 'running'" in statement]) == 1
    (unfinished, _) = await queue.recover()
    assert {(job.info.id, job.info.attempt, job.crashes) for job in unfinished} == {
        (waits.id, 0, 0),
        (runs.id, 1, 0),
        (again.id, 2, 1),
    }


async def test_starts_of_many_jobs_are_recorded_where_they_run_on(database, store):
    queue = SqliteQueue(database, store)
    infos = [
        JobInfo(id=new_id("job"), state=JobState.QUEUED, op="gemm", created_at=MOMENT, request={}) for _ in range(20)
    ]
    request = GemmJob(op="gemm", a=new_id("arr"), b=new_id("arr")).model_dump_json()
    await queue.insert([NewJob(info, request) for info in infos], None)
    for info in infos:
        queue.started(info.id, 1, MOMENT)

    def running(db):
        return db.execute("SELECT count(*) FROM jobs WHERE state = 'running'").fetchone()[0]

    async with asyncio.timeout(60):
        while await database.read(running) < len(infos):  # noqa: ASYNC110 (a table)
            await asyncio.sleep(0.01)
    for info in infos:
        queue.started(info.id, 2, MOMENT)
    queue.stop()
    await database.stop()
    with sqlite3.connect(database.path) as other:
        assert other.execute("SELECT DISTINCT attempt FROM jobs").fetchall() == [(2,)]
