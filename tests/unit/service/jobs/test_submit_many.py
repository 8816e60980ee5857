"""Several jobs at once: accepted together, by one transaction, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3

import numpy as np
import pytest

from gemmserve_service.errors import (
    IdempotencyConflict,
    IdempotencyMismatch,
    ItemInvalid,
    QueueFull,
    QuotaExceeded,
    describe,
)
from gemmserve_service.schemas import JobState, ProgramJob
from gemmserve_service.tenancy.api_keys import Quota

A = np.ones((8, 8), "c8")


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


def rows(core):
    with sqlite3.connect(core.database.path) as db:
        return db.execute("SELECT id FROM jobs ORDER BY id").fetchall()


def unused(core):
    """Whether nothing is held: no job, no place in the queue, no pin, no reservation."""
    assert not core.jobs._live
    assert not core.scheduler.queued
    assert not core.scheduler.admissions._arriving
    assert not core.scheduler.admissions.steps
    assert [record.pins for record in core.store._catalog] == [0] * core.store.count
    return core.store.used_bytes


async def test_all_are_on_record_and_run(core, fake, gemm, a):
    infos, created = await core.jobs.submit_many([gemm(a, a, alpha=n) for n in range(1, 6)])
    assert created
    assert sorted((info.id,) for info in infos) == rows(core)
    assert [info.request["alpha"] for info in infos] == [1, 2, 3, 4, 5]
    while fake.running():
        fake.done()
    done = await core.jobs.wait_all([info.id for info in infos], 60)
    assert [info.id for info in done] == [info.id for info in infos]
    assert {info.state for info in done} == {JobState.SUCCEEDED}
    assert len({info.result["d"] for info in done}) == 5


async def test_they_go_to_the_worker_in_company(core, fake, gemm, a):
    await core.jobs.submit_many([gemm(a, a)] * 5)
    assert [len(tasks) for _, tasks in fake.sent] == [5]


async def test_one_that_is_wrong_refuses_all(core, fake, gemm, put, a):
    other = await put(core.store, np.ones((3, 8), "c8"))
    before = unused(core)
    program = ProgramJob.model_validate(
        {"op": "program", "steps": [{"id": "x", "op": "gemm", "a": a.id, "b": a.id}], "keep": ["nothing"]}
    )
    for wrong, slug, pointer in (
        (gemm(a, other), "shape-mismatch", "/jobs/2"),
        (program, "parameter-invalid", "/jobs/2"),
    ):
        with pytest.raises(ItemInvalid) as refused:
            await core.jobs.submit_many([gemm(a, a), gemm(a, a), wrong, gemm(a, a)])
        description = describe(refused.value)
        assert (description.slug, description.status) == (slug, 422)
        assert (description.extra["item"], description.extra["pointer"]) == (2, pointer)
        assert description.detail.startswith("job 2: ")
        assert unused(core) == before
    assert (rows(core), fake.sent) == ([], [])


async def test_a_full_queue_takes_none_of_too_many(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(max_queued_jobs=4), fake)
    a = await put(core.store, A)
    before = unused(core)
    with pytest.raises(QueueFull):
        await core.jobs.submit_many([gemm(a, a)] * 5)
    assert (unused(core), rows(core)) == (before, [])
    assert len((await core.jobs.submit_many([gemm(a, a)] * 4))[0]) == 4


async def test_a_quota_of_jobs_counts_them_all(core, gemm, a, monkeypatch):
    monkeypatch.setattr(core.quotas, "_quota_of", lambda _: Quota(queued_jobs=3))
    with pytest.raises(QuotaExceeded):
        await core.jobs.submit_many([gemm(a, a)] * 4)
    assert len((await core.jobs.submit_many([gemm(a, a)] * 3))[0]) == 3


async def test_the_bytes_of_all_count(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(max_queued_bytes=4 * 3 * A.nbytes), fake)
    a = await put(core.store, A)
    with pytest.raises(ItemInvalid) as refused:
        await core.jobs.submit_many([gemm(a, a)] * 6)
    description = describe(refused.value)
    assert (description.slug, description.status, description.extra["item"]) == ("queue-full", 429, 4)
    assert description.retry_after_s
    assert rows(core) == []


async def test_the_key_is_that_of_all(core, fake, gemm, a):
    asked = [gemm(a, a), gemm(a, a, alpha=2)]
    first, _ = await core.jobs.submit_many(asked, idempotency_key="k")
    again, created = await core.jobs.submit_many(asked, idempotency_key="k")
    assert ([info.id for info in again], created) == ([info.id for info in first], False)
    for other in (asked[:1], [*asked, gemm(a, a)], asked[::-1]):
        with pytest.raises(IdempotencyMismatch):
            await core.jobs.submit_many(other, idempotency_key="k")
    assert len(rows(core)) == 2


async def test_the_key_outlives_the_process(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(), fake)
    a = await put(core.store, A)
    first, _ = await core.jobs.submit_many([gemm(a, a)] * 3, idempotency_key="k")
    await core.stop()
    core = await make_core(make_settings(), type(fake)())
    again, created = await core.jobs.submit_many([gemm(a, a)] * 3, idempotency_key="k")
    assert ([info.id for info in again], created) == ([info.id for info in first], False)


async def test_the_same_key_at_the_same_time(core, gemm, a):
    first = asyncio.create_task(core.jobs.submit_many([gemm(a, a)] * 2, idempotency_key="k"))
    await asyncio.sleep(0)
    with pytest.raises(IdempotencyConflict):
        await core.jobs.submit_many([gemm(a, a)] * 2, idempotency_key="k")
    assert (await first)[1]


async def test_who_hangs_up_changes_nothing(core, gemm, a, eventually):
    submission = asyncio.create_task(core.jobs.submit_many([gemm(a, a)] * 3, idempotency_key="k"))
    while not core.jobs._live:  # noqa: ASYNC110 (before it is on record, which takes longer than a turn)
        await asyncio.sleep(0)
    submission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submission
    await eventually(lambda: not core.jobs._keys._arriving)  # it is on record
    infos, created = await core.jobs.submit_many([gemm(a, a)] * 3, idempotency_key="k")
    assert (len(infos), created) == (3, False)
    assert len(rows(core)) == 3


async def test_what_cannot_be_put_on_record_leaves_nothing(core, fake, gemm, a, idle):
    await core.database.write(
        lambda db: db.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON jobs WHEN new.request LIKE '%777%' "
            "BEGIN SELECT RAISE(ABORT, 'no room'); END"
        )
    )
    with pytest.raises(sqlite3.Error, match="no room"):
        await core.jobs.submit_many([gemm(a, a), gemm(a, a, alpha=777)], idempotency_key="k")
    while fake.running():
        fake.done()
    await idle()
    assert rows(core) == []
    assert not core.jobs._live
    assert core.jobs._keys.jobs_of("", "k", "any") is None


async def test_unfinished_ones_run_after_a_restart(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(), fake)
    a = await put(core.store, A)
    infos, _ = await core.jobs.submit_many([gemm(a, a)] * 70)
    await core.stop()
    fake = type(fake)()
    core = await make_core(make_settings(), fake)
    while fake.running():
        fake.done()
    done = await core.jobs.wait_all([info.id for info in infos], 60)
    assert {info.state for info in done} == {JobState.SUCCEEDED}


async def test_who_waits_for_all_waits_for_the_last_and_the_other_ends_are_recorded_together(
    core, fake, gemm, a, monkeypatch
):
    end, within = core.jobs.queue.end, []

    def note(*args, within_s):
        within.append(within_s > 0)
        end(*args, within_s=within_s)

    monkeypatch.setattr(core.jobs.queue, "end", note)
    infos, _ = await core.jobs.submit_many([gemm(a, a)] * 4, waits=True)
    waits = asyncio.ensure_future(core.jobs.wait_all([info.id for info in infos], 60))
    await asyncio.sleep(0)
    while fake.running():
        fake.done()
    assert {info.state for info in await waits} == {JobState.SUCCEEDED}
    assert within == [True, True, True, False]
