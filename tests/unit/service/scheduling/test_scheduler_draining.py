"""Who is admitted, and what becomes of tasks when the scheduler drains, is waited for, or stops."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gemmserve_service.errors import Draining, NotReady, QueueFull
from gemmserve_service.executor.protocol import Done
from gemmserve_service.scheduling.scheduler import Scheduler


async def test_admission(make_scheduler, fake, submit):
    scheduler = await make_scheduler(fake, max_queued_jobs=2)
    await submit(scheduler, "runs")
    with contextlib.ExitStack() as arriving:
        arriving.enter_context(scheduler.admission())
        arriving.enter_context(scheduler.admission())
        with pytest.raises(QueueFull) as full, scheduler.admission():
            pass
        assert full.value.retry_after_s >= 1
    await submit(scheduler, "waits")
    with scheduler.admission():
        pass
    scheduler.drain()
    with pytest.raises(Draining), scheduler.admission():
        pass


async def test_nothing_is_admitted_before_a_worker_has_spoken(store, settings, fake):
    scheduler = Scheduler(settings, store, fake)
    with pytest.raises(NotReady), scheduler.admission():
        pass
    await fake.start(scheduler)
    fake.lose()
    with scheduler.admission():  # it will be back
        pass


async def test_draining_keeps_durable_tasks_and_refuses_the_others(scheduler, fake, submit, listener, make_task):
    await submit(scheduler, "runs", durable=False)
    await submit(scheduler, "kept")
    await submit(scheduler, "refused", durable=False)
    scheduler.drain()
    assert isinstance(listener.outcomes["refused"], Draining)
    late = await make_task("late", durable=False)
    scheduler.submit(late)  # it was admitted before
    assert isinstance(listener.outcomes["late"], Draining)
    fake.done()
    assert isinstance(listener.outcomes["runs"], Done)
    assert fake.running() == []
    assert scheduler.queued == 1
    assert "kept" not in listener.outcomes


async def test_idle_waits_for_what_somebody_wants(scheduler, fake, submit):
    wanted, dropped = await submit(scheduler, "wanted"), None
    assert not await scheduler.idle(0.02)
    waiting = asyncio.create_task(scheduler.idle(3600))
    await asyncio.sleep(0)
    scheduler.cancel(wanted)  # the worker goes on with it, nobody waits for that
    assert await asyncio.wait_for(waiting, 60)
    fake.done()
    dropped = await submit(scheduler, "second")
    waiting = asyncio.create_task(scheduler.idle(3600))
    await asyncio.sleep(0)
    fake.done()
    assert dropped.over
    assert await asyncio.wait_for(waiting, 60)


async def test_a_worker_lost_while_draining(scheduler, fake, submit, listener, make_scheduler):
    await submit(scheduler, "oneshot", durable=False)
    scheduler.drain()
    fake.lose()
    assert isinstance(listener.outcomes["oneshot"], Draining)
    assert await scheduler.idle(0)


async def test_stop_answers_requests_and_silences_deadlines(scheduler, fake, submit, listener):
    await submit(scheduler, "oneshot", durable=False)
    await submit(scheduler, "job", timeout_s=0.02)
    scheduler.stop()
    assert isinstance(listener.outcomes["oneshot"], Draining)
    await asyncio.sleep(0.04)  # a timer that was left would have come before this one
    assert "job" not in listener.outcomes
