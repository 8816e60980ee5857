"""The Idempotency-Key of a job: whoever repeats a request has the job that was made of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gemmserve_kernels.problem.errors import ShapeMismatch
from gemmserve_service.errors import IdempotencyConflict, IdempotencyMismatch
from gemmserve_service.schemas import JobState

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
