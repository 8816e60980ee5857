"""The Idempotency-Key of a job: whoever repeats a request has the job that was made of it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from gemmserve_kernels.problem.errors import ShapeMismatch
from gemmserve_service.errors import IdempotencyConflict, IdempotencyMismatch
from gemmserve_service.jobs import jobs as module
from gemmserve_service.schemas import GemmJob, JobState, ProgramJob

A = np.ones((8, 8), "c8")


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


async def test_the_same_key_answers_the_same_job(core, fake, gemm, a):
    request = gemm(a, a)
    first, created = await core.jobs.submit(request, idempotency_key="k")
    assert created
    again, created = await core.jobs.submit(request, idempotency_key="k")
    assert (again.id, created) == (first.id, False)
    fake.done()
    await core.jobs.wait(first.id, 60)
    again, created = await core.jobs.submit(request, idempotency_key="k")
    assert (again.state, created) == (JobState.SUCCEEDED, False)
    with pytest.raises(IdempotencyMismatch):
        await core.jobs.submit(gemm(a, a, alpha=2), idempotency_key="k")


async def test_a_request_that_an_earlier_version_wrote_in_another_way_is_the_same(make_core, make_settings, fake, put):
    settings = make_settings()
    core = await make_core(settings, fake)
    a = await put(core.store, A)
    texts = [{"op": "gemm", "a": a.id, "b": a.id}, {"op": "gemm", "a": a.id, "b": a.id, "alpha": 2}]
    first, _ = await core.jobs.submit(GemmJob(**texts[0]), idempotency_key="k")
    several, _ = await core.jobs.submit_many([GemmJob(**text) for text in texts], idempotency_key="several")
    gone, _ = await core.jobs.submit(GemmJob(**texts[0]), idempotency_key="gone")
    await core.stop()

    def as_before(db):  # the same fields the other way round, and one fewer
        for row in db.execute("SELECT id, request FROM jobs").fetchall():
            fields = dict(reversed(json.loads(row["request"]).items()))
            del fields["config"]
            db.execute("UPDATE jobs SET request = ? WHERE id = ?", (json.dumps(fields), row["id"]))
        db.execute("UPDATE idempotency SET digest = 'of that text'")
        db.execute("DELETE FROM jobs WHERE id = ?", (gone.id,))

    with closing(sqlite3.connect(settings.data_dir / "gemmserve.sqlite")) as db, db:
        db.row_factory = sqlite3.Row
        as_before(db)
    core = await make_core(settings, fake)
    again, created = await core.jobs.submit(GemmJob(**texts[0]), idempotency_key="k")
    assert (again.id, created) == (first.id, False)
    found, created = await core.jobs.submit_many([GemmJob(**text) for text in texts], idempotency_key="several")
    assert ([info.id for info in found], created) == ([info.id for info in several], False)
    for other in ([GemmJob(**texts[1])], [GemmJob(**text) for text in texts[::-1]], [GemmJob(**texts[0])] * 3):
        for key in ("k", "several"):
            with pytest.raises(IdempotencyMismatch):
                await core.jobs.submit_many(other, idempotency_key=key)
    with pytest.raises(IdempotencyMismatch):  # the job is forgotten: nobody knows what it was
        await core.jobs.submit(GemmJob(**texts[0]), idempotency_key="gone")


async def test_a_short_request_has_no_long_one_read_again(core, gemm, a, monkeypatch):
    """Which takes the loop's time: a key of a thousand jobs could be named by a thousand requests of one."""
    await core.jobs.submit_many([gemm(a, a)] * 3, idempotency_key="several")
    steps = [{"id": f"x{n}", "op": "gemm", "a": a.id, "b": a.id} for n in range(3)]
    await core.jobs.submit(ProgramJob(op="program", steps=steps), idempotency_key="program")
    read = []
    monkeypatch.setattr(module, "request_of", read.append)
    for key in ("several", "program"):
        for other in (gemm(a, a), ProgramJob(op="program", steps=steps[:1])):
            with pytest.raises(IdempotencyMismatch):
                await core.jobs.submit(other, idempotency_key=key)
    assert read == []


async def test_the_same_key_at_the_same_time(core, gemm, a):
    first = asyncio.create_task(core.jobs.submit(gemm(a, a), idempotency_key="k"))
    await asyncio.sleep(0)
    with pytest.raises(IdempotencyConflict):
        await core.jobs.submit(gemm(a, a), idempotency_key="k")
    with pytest.raises(IdempotencyMismatch):
        await core.jobs.submit(gemm(a, a, alpha=2), idempotency_key="k")
    assert (await first)[1]


async def test_a_key_that_has_expired_can_be_used_again(make_core, make_settings, fake, gemm, put):
    core = await make_core(make_settings(idempotency_ttl_s=0.05), fake)
    a = await put(core.store, A)
    first, _ = await core.jobs.submit(gemm(a, a), idempotency_key="k")
    await asyncio.sleep(0.06)
    second, created = await core.jobs.submit(gemm(a, a, alpha=2), idempotency_key="k")
    assert created
    assert second.id != first.id


async def test_a_refused_request_does_not_use_its_key_up(core, fake, gemm, a, put):
    other = await put(core.store, np.ones((3, 8), "c8"))
    with pytest.raises(ShapeMismatch):
        await core.jobs.submit(gemm(a, other), idempotency_key="k")
    assert (await core.jobs.submit(gemm(a, a), idempotency_key="k"))[1]
