"""Several jobs at once: accepted together, by one transaction, or not at all."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import sys

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
from gemmserve_service.jobs.forms.form import PLACES, Asked, Form, plain
from gemmserve_service.runtime import yielding
from gemmserve_service.schemas import JobState, ProgramJob
from gemmserve_service.store.extents import extents
from gemmserve_service.tenancy.api_keys import Quota

A = np.ones((8, 8), "c8")


@pytest.fixture(params=[False, True], ids=["one by one", "by their form"])
def gemm(gemm, request):
    """Jobs as pydantic made them; or as jobs of a form that is known, which are prepared together."""
    forms = {}

    def job(a, b, **fields):
        made = gemm(a, b, **fields)
        if not request.param:
            return made
        form = Form(made)
        return Asked(forms.setdefault(form.text(PLACES[: len(form.operands)]), form), (made.a, made.b))

    return job


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


@pytest.fixture
def short_turns(monkeypatch):
    """Others have their turns whenever they may."""
    monkeypatch.setattr(yielding, "_SPAN_S", 0.0)
    monkeypatch.setattr(yielding, "_BRIEF_S", 0.0)


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
    done = [await core.jobs.wait(info.id, 60) for info in infos]
    assert [info.id for info in done] == [info.id for info in infos]
    assert {info.state for info in done} == {JobState.SUCCEEDED}
    assert len({info.result["d"] for info in done}) == 5


async def test_they_go_to_the_worker_in_company(core, fake, gemm, a):
    await core.jobs.submit_many([gemm(a, a)] * 5)
    assert [len(tasks) for _, tasks in fake.sent] == [5]


async def test_one_that_is_waited_for_overtakes_them(make_core, make_settings, fake, gemm, put):
    """Two go before one of several: those that are waited for, as the last of them is, do not hurry."""
    core = await make_core(make_settings(max_grouped_jobs=1), fake)
    a = await put(core.store, A)
    running, _ = await core.jobs.submit(gemm(a, a))
    many, _ = await core.jobs.submit_many([gemm(a, a, alpha=n) for n in range(2, 7)], waits=True)
    alone, _ = await core.jobs.submit(gemm(a, a, alpha=8))
    waited = [(await core.jobs.submit(gemm(a, a, alpha=n), waits=True))[0].id for n in range(9, 12)]
    order = []
    while core.scheduler.running:
        order += fake.running()
        fake.done()
    several = [info.id for info in many]
    assert order == [running.id, *waited[:2], several[0], waited[2], *several[1:], alone.id]


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


async def test_a_quota_of_jobs_counts_them_all(core, gemm, put, monkeypatch):
    a = await put(core.store, A, owner="me")
    monkeypatch.setattr(core.quotas, "_quota_of", lambda _: Quota(queued_jobs=3))
    with pytest.raises(QuotaExceeded):
        await core.jobs.submit_many([gemm(a, a)] * 4, owner="me")
    assert len((await core.jobs.submit_many([gemm(a, a)] * 3, owner="me"))[0]) == 3


async def test_the_bytes_of_all_results_count(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(max_queued_bytes=4 * A.nbytes), fake)
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
    done = [await core.jobs.wait(info.id, 60) for info in infos]
    assert {info.state for info in done} == {JobState.SUCCEEDED}


async def test_who_waits_for_all_waits_for_the_last_and_the_other_ends_are_recorded_together(
    core, fake, gemm, a, monkeypatch
):
    end, within = core.jobs.queue.end, []

    def note(*args, within_s):
        within.append(within_s > 0)
        end(*args, within_s=within_s)

    monkeypatch.setattr(core.jobs.queue, "end", note)
    lives, _ = await core.jobs.accept([gemm(a, a)] * 4, None, "", waits=True, several=True)
    waits = asyncio.ensure_future(core.jobs.wait_all(lives, 60))
    await asyncio.sleep(0)
    while fake.running():
        fake.done()
    await waits
    assert {live.shown.state for live in lives} == {JobState.SUCCEEDED}
    assert within == [True, True, True, False]


MANY = 500


async def refusal(core, jobs, **options):
    """Submits jobs that are refused, and looks whether anything is left of them; returns the problem."""
    before, recorded = unused(core), rows(core)
    with pytest.raises(ItemInvalid) as refused:
        await core.jobs.submit_many(jobs, **options)
    assert (unused(core), rows(core)) == (before, recorded)
    return describe(refused.value)


@pytest.mark.parametrize("item", [0, 63, 64, 321, MANY - 1])
async def test_one_of_many_that_is_wrong_is_named(core, fake, gemm, put, a, item):
    b, other = await put(core.store, A), await put(core.store, np.ones((3, 8), "c8"))
    gone = await put(core.store, A)
    await core.store.delete(gone.id)
    good = [gemm(a, b), gemm(b, a)] * (MANY // 2)
    for wrong, slug in (
        (gemm(a, "arr_" + "0" * 26), "not-found"),
        (gemm(gone, a), "not-found"),
        (gemm(a, other), "shape-mismatch"),
    ):
        problem = await refusal(core, [*good[:item], wrong, *good[item + 1 :]], idempotency_key="k")
        assert (problem.slug, problem.extra["item"], problem.extra["pointer"]) == (slug, item, f"/jobs/{item}")
    assert fake.sent == []
    infos, created = await core.jobs.submit_many(good, idempotency_key="k")
    assert (len(infos), created) == (MANY, True), "the key is free again"


async def test_another_owners_array_is_named(core, gemm, put, a):
    mine, theirs = await put(core.store, A, owner="me"), await put(core.store, A, owner="you")
    problem = await refusal(core, [gemm(mine, mine)] * 70 + [gemm(mine, theirs)] + [gemm(mine, mine)] * 9, owner="me")
    assert (problem.slug, problem.extra["item"]) == ("not-found", 70)


async def test_a_quota_of_bytes_is_hit_in_the_middle(core, gemm, put, monkeypatch):
    a = await put(core.store, A, owner="me")
    quota = Quota(stored_bytes=A.nbytes * (1 + 100))
    monkeypatch.setattr(core.quotas, "_quota_of", lambda owner: quota if owner else Quota())
    problem = await refusal(core, [gemm(a, a)] * MANY, owner="me")
    assert (problem.slug, problem.extra["item"], problem.extra["quota"]) == ("quota-exceeded", 100, "stored_bytes")
    assert core.quotas.stored_bytes("me") == A.nbytes
    await core.jobs.submit_many([gemm(a, a)] * 100, owner="me")
    assert core.quotas.stored_bytes("me") == 101 * A.nbytes


async def test_the_store_is_full_in_the_middle(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(max_store_bytes=A.nbytes * 91), fake)
    a = await put(core.store, A)
    problem = await refusal(core, [gemm(a, a)] * MANY)
    assert (problem.slug, problem.extra["item"]) == ("store-full", 90)


@pytest.mark.usefixtures("own_files")
async def test_the_disk_is_full_in_the_middle(core, gemm, a, monkeypatch):
    real, left = extents._allocate, [100]

    def allocate(fd, capacity):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "no space left")
        real(fd, capacity)

    monkeypatch.setattr(extents, "_allocate", allocate)
    problem = await refusal(core, [gemm(a, a)] * MANY)
    assert problem.slug == "store-full"
    assert 90 < problem.extra["item"] < 110, "files that were made are used again"


async def test_the_disk_has_no_room_for_results_that_may_wait(
    make_core, make_settings, fake, gemm, put, small_results_stay, monkeypatch
):
    fake.result_bytes = 1 << 20
    core = await make_core(make_settings(), fake)
    a = await put(core.store, A)

    class Disk:
        f_bavail, f_frsize, f_blocks = 80, 4096, 0

    monkeypatch.setattr(extents.os, "statvfs", lambda _: Disk)
    problem = await refusal(core, [gemm(a, a)] * MANY)
    assert (problem.slug, problem.extra["item"]) == ("store-full", 80)
    assert core.store._space.unplaced_bytes == 0
    await core.jobs.submit_many([gemm(a, a)] * 80)
    assert core.store._space.unplaced_bytes == 80 * 4096


async def test_an_owners_share_of_the_queue_is_asked_for_each(make_core, make_settings, fake, gemm, put):
    """One alone may have four fifths, and so much in one request."""
    most = 100 * A.nbytes
    core = await make_core(make_settings(max_queued_bytes=most), fake)
    a = await put(core.store, A, owner="me")
    problem = await refusal(core, [gemm(a, a)] * 99, owner="me")
    assert (problem.slug, problem.extra["item"]) == ("queue-full", 80)
    await core.jobs.submit_many([gemm(a, a)] * 80, owner="me")


async def test_mixed_kinds_and_forms(core, fake, gemm, put, a):
    wide, deep = await put(core.store, np.ones((8, 4), "c8")), await put(core.store, np.ones((8, 8), "c16"))
    asked = [gemm(a, a), gemm(a, wide), gemm(deep, deep), gemm(a, a, trans_a="C"), gemm(a, wide)] * 30
    infos, _ = await core.jobs.submit_many(asked)
    requests = [plain(each) for each in asked]
    assert [(info.request["a"], info.request["b"], info.request["trans_a"]) for info in infos] == [
        (each.a, each.b, each.trans_a) for each in requests
    ]
    while fake.running():
        fake.done()
    done = [await core.jobs.wait(info.id, 60) for info in infos]
    found = [await core.store.info(info.result["d"]) for info in done]
    assert [(each.shape, each.dtype) for each in found] == [
        ((8, 4) if each.b == wide.id else (8, 8), "complex128" if each.a == deep.id else "complex64")
        for each in requests
    ]


async def test_who_hangs_up_while_they_are_prepared_leaves_nothing(core, gemm, a, short_turns):
    before = unused(core)
    for turns in range(1, 12):
        submission = asyncio.create_task(core.jobs.submit_many([gemm(a, a)] * MANY, idempotency_key="k"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if core.jobs._live:
            break
        submission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submission
        assert unused(core) == before
        assert not core.jobs._keys._arriving
    assert turns > 3


async def test_an_operand_that_goes_while_they_are_prepared_is_missed(core, gemm, put, a, short_turns):
    other = await put(core.store, A)
    submission = asyncio.create_task(core.jobs.submit_many([gemm(a, other)] * MANY))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not core.jobs._live
    await core.store.delete(other.id)
    with pytest.raises(ItemInvalid, match="no array"):
        await submission
    assert core.store.count == 1
    assert not core.jobs._live


async def test_those_of_a_form_take_few_calls(core, gemm, a):
    """Function calls, which no noise touches."""
    counted = {}
    one = plain(gemm(a, a))
    for kind, job in (("one by one", one), ("by their form", Asked(Form(one), (a.id, a.id)))):
        for count in (64, 320):
            number = 0

            def count_call(_, event, __):
                nonlocal number
                number += event == "call"

            sys.setprofile(count_call)
            try:
                await core.jobs.accept([job] * count, None, "", waits=False, several=True)
            finally:
                sys.setprofile(None)
            counted[kind, count] = number
    calls = {kind: (counted[kind, 320] - counted[kind, 64]) / 256 for kind in ("one by one", "by their form")}
    assert calls["one by one"] > 40
    assert calls["by their form"] < 0.7 * calls["one by one"]
