"""Clock jumps: what lives for an hour lives for an hour, whatever the wall says."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gemmserve_service.errors import Gone
from gemmserve_service.jobs.core import Core
from gemmserve_service.runtime import clock
from gemmserve_service.schemas import JobState

HOUR = 3600.0
A = np.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_the_clock_runs_on_and_follows_when_it_is_told(wall, jump):
    before = clock.time()
    wall(jump)
    assert clock.time() == pytest.approx(before, abs=1e-3)
    wall.wait(5)
    assert clock.time() == pytest.approx(before + 5, abs=1e-3)
    assert clock.CLOCK.adjust() == pytest.approx(jump, abs=1e-3)
    assert clock.time() == pytest.approx(wall.shown, abs=1e-3)
    assert clock.CLOCK.adjust() == 0


def test_slewing_is_no_jump(wall):
    wall(1.0)
    assert clock.CLOCK.adjust() == 0
    wall(4.5)
    assert clock.CLOCK.adjust() == pytest.approx(5.5, abs=1e-3)


@pytest.mark.parametrize("jump", [24 * HOUR, -24 * HOUR])
async def test_unexpired_arrays_outlive_a_jump_and_a_restart_after_it(wall, store, put, jump, reopen_store):
    long, short = await put(store, A, ttl_s=HOUR), await put(store, A, ttl_s=60)
    wall(jump)
    await store.expiry.expire_due()  # before anybody has noticed
    await store.info(long.id)
    await store.expiry.follow_clock()
    await store.expiry.expire_due()
    left = (await store.info(long.id)).expires_at.timestamp() - wall.shown
    assert left == pytest.approx(HOUR, abs=1e-3)
    await store.info(short.id)
    wall.wait(60)
    with pytest.raises(Gone):
        await store.info(short.id)
    reopened = await reopen_store()
    assert (await reopened.info(long.id)).expires_at.timestamp() - wall.shown == pytest.approx(HOUR - 60, abs=1e-3)


@pytest.mark.parametrize("jump", [24 * HOUR, -24 * HOUR])
@pytest.mark.parametrize("before", [True, False], ids=["before its row", "after its row"])
async def test_an_array_outlives_a_jump_while_it_is_put_on_record(
    wall, store, put, jump, before, reopen_store, monkeypatch
):
    followed = []

    def jumping(write, **options):
        monkeypatch.setattr(store.database, "write_soon", write_soon)
        if before:
            wall(jump)
            followed.append(asyncio.ensure_future(store.expiry.follow_clock()))
            return asyncio.ensure_future(second(write, **options))
        insert = write_soon(write, **options)
        wall(jump)
        followed.append(asyncio.ensure_future(store.expiry.follow_clock()))
        return insert

    async def second(write, **options):
        await followed[0]
        return await write_soon(write, **options)

    write_soon = store.database.write_soon
    monkeypatch.setattr(store.database, "write_soon", jumping)
    info = await put(store, A, ttl_s=HOUR)
    await asyncio.gather(*followed)
    assert len(followed) == 1
    await store.database.write(lambda db: None)  # and whatever is written before it
    left = (await store.info(info.id)).expires_at.timestamp() - wall.shown
    assert left == pytest.approx(HOUR, abs=1e-3)
    reopened = await reopen_store()
    assert (await reopened.info(info.id)).expires_at.timestamp() - wall.shown == pytest.approx(HOUR, abs=1e-3)


@pytest.fixture
async def reopen_store(make_store, settings, store):
    async def reopen():
        await store.stop()
        return await make_store(settings)

    return reopen


@pytest.mark.parametrize("jump", [24 * HOUR, -24 * HOUR])
async def test_deadlines_and_keys_outlive_a_jump_and_a_restart_after_it(wall, settings, make_fake, put, gemm, jump):
    fake = make_fake()
    first = Core(settings, fake)
    await first.start()
    a = await put(first.store, A)
    await first.jobs.submit(gemm(a, a))
    waits, _ = await first.jobs.submit(gemm(a, a, timeout_s=HOUR), idempotency_key="k")
    wall(jump)
    await first.store.expiry.follow_clock()
    again, created = await first.jobs.submit(gemm(a, a, timeout_s=HOUR), idempotency_key="k")
    assert (again.id, created) == (waits.id, False)
    await first.stop()
    second = Core(settings, make_fake())
    await second.start()
    try:
        again, created = await second.jobs.submit(gemm(a, a, timeout_s=HOUR), idempotency_key="k")
        assert (again.id, created) == (waits.id, False)
        assert (await second.jobs.wait(waits.id, 0.1)).state in {JobState.QUEUED, JobState.RUNNING}
        task = second.jobs._live[waits.id].task
        assert task.timeout_s == pytest.approx(HOUR, abs=1e-3)
    finally:
        await second.stop()
