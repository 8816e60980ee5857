"""A new core on what another left behind, whether it stopped or died."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from inline_executor import InlineExecutor

from gemmserve_service.jobs.core import Core
from gemmserve_service.schemas import JobState
from gemmserve_service.store.database.migrations import DatabaseError

pytestmark = pytest.mark.flaky(reruns=0)  # a job that is lost once is lost

A = np.arange(16.0).reshape(4, 4)


async def settled(core):
    await core.database.write(lambda _: None)


@pytest.mark.parametrize("how", ["stop", "die"])
async def test_jobs_that_waited_or_ran_run_again(settings, make_fake, make_core, put, gemm, fetch, die, held, how):
    fake = make_fake()
    first = Core(settings, fake)
    await first.start()
    a = await put(first.store, A)
    done, _ = await first.jobs.submit(gemm(a, a))
    fake.done()
    await first.jobs.wait(done.id, 60)
    running, _ = await first.jobs.submit(gemm(a, a, alpha=2))
    waiting, _ = await first.jobs.submit(gemm(a, a, alpha=3), idempotency_key="k")
    await first.store.delete(a.id)
    await settled(first)
    await (first.stop() if how == "stop" else die(first))

    second = await make_core(settings)
    results = {}
    for job, alpha in ((running, 2), (waiting, 3)):
        info = await second.jobs.wait(job.id, 60)
        assert info.state == JobState.SUCCEEDED
        results[job.id] = info
        np.testing.assert_array_equal(fetch(second.store, info.result["d"]), alpha * A @ A)
    assert (results[running.id].attempt, results[waiting.id].attempt) == (2, 1)
    assert (await second.jobs.get(done.id)).state == JobState.SUCCEEDED
    again, created = await second.jobs.submit(gemm(a, a, alpha=3), idempotency_key="k")
    assert (again.id, created) == (waiting.id, False)
    assert held(second.store) == (0, 0, 0)


async def test_a_job_that_has_lost_a_worker_waits_for_the_first_of_the_next_server(
    settings, make_fake, make_core, put, gemm
):
    """It is queued again before any worker has said hello."""
    fake = make_fake()
    first = Core(settings, fake)
    await first.start()
    a = await put(first.store, A)
    info, _ = await first.jobs.submit(gemm(a, a))
    fake.lose()
    await first.stop()
    fake = make_fake()
    second = await make_core(settings, fake)
    fake.done()
    info = await second.jobs.wait(info.id, 60)
    assert (info.state, info.attempt) == (JobState.SUCCEEDED, 2)


async def test_a_job_that_ended_while_the_server_died_is_one_or_the_other(
    settings, make_fake, make_core, put, gemm, die
):
    fake = make_fake()
    first = Core(settings, fake)
    await first.start()
    a = await put(first.store, A)
    info, _ = await first.jobs.submit(gemm(a, a))
    await first.store.delete(a.id)
    fake.fail()
    await die(first)  # the end may or may not be on record
    second = await make_core(settings)
    end = await second.jobs.wait(info.id, 60)
    assert end.state in {JobState.SUCCEEDED, JobState.FAILED}
    if end.state == JobState.FAILED:
        assert end.error.type == "/problems/device-error"  # not that its operand is unknown


async def test_the_deadline_goes_on_while_the_server_is_down(settings, make_fake, make_core, put, gemm):
    first = Core(settings, make_fake())
    await first.start()
    a = await put(first.store, A)
    await first.jobs.submit(gemm(a, a))
    late, _ = await first.jobs.submit(gemm(a, a, timeout_s=0.1))
    in_time, _ = await first.jobs.submit(gemm(a, a, timeout_s=3600))
    await first.stop()
    await asyncio.sleep(0.12)
    fake = make_fake()
    fake.fleet.clear()
    second = await make_core(settings, fake)
    assert (await second.jobs.wait(late.id, 60)).state == JobState.EXPIRED
    assert (await second.jobs.wait(in_time.id, 0.05)).state == JobState.QUEUED


async def test_a_job_whose_operand_is_lost_fails_and_the_others_do_not(
    settings, make_fake, make_core, put, gemm, die, own_files
):
    first = Core(settings, make_fake())
    await first.start()
    lost, kept = await put(first.store, A), await put(first.store, A)
    bad, _ = await first.jobs.submit(gemm(lost, kept))
    good, _ = await first.jobs.submit(gemm(kept, kept))
    (settings.data_dir / "extents" / first.store._catalog.get(lost.id).extent.name).unlink()
    await settled(first)
    await die(first)
    second = await make_core(settings)
    failed = await second.jobs.wait(bad.id, 60)
    assert (failed.state, failed.error.type) == (JobState.FAILED, "/problems/not-found")
    assert (await second.jobs.wait(good.id, 60)).state == JobState.SUCCEEDED


async def test_results_not_yet_on_record_leave_no_space_behind(
    settings, make_fake, make_core, put, gemm, die, own_files
):
    first = Core(settings, make_fake())
    await first.start()
    a = await put(first.store, A)
    info, _ = await first.jobs.submit(gemm(a, a))
    await settled(first)
    await die(first)
    assert len(list((settings.data_dir / "extents").iterdir())) == 2
    fake = make_fake()
    second = await make_core(settings, fake)
    await second.jobs.cancel(info.id)
    fake.done()
    await second.stop()
    assert len(list((settings.data_dir / "extents").iterdir())) == 1


async def test_a_core_that_cannot_start_leaves_nothing_open(settings):
    settings.data_dir.mkdir()
    (settings.data_dir / "gemmserve.sqlite").write_bytes(b"no database" * 1000)
    core = Core(settings, InlineExecutor())
    with pytest.raises(DatabaseError, match="cannot be opened"):
        await core.start()
    assert not core.database.is_open
    await core.stop()
