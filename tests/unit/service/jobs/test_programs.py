"""Programs as jobs: whatever happens to them, they end once, with the right results or a problem, and hold nothing."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from inline_executor import InlineExecutor
from program_requests import powers, program, step
from pydantic import TypeAdapter
from works import packed, unpacked

from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_service.errors import (
    Gone,
    IdempotencyMismatch,
    NotFound,
    StepInvalid,
    describe,
)
from gemmserve_service.executor.protocol import TO_WORKER, Decoder, encode
from gemmserve_service.jobs.core import Core
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import JobRequest, JobState, StepInfo

REQUEST = TypeAdapter(JobRequest)
A = (np.arange(64.0).reshape(8, 8) / 64 + 1j).astype("c8")


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


async def test_results_by_step(real, put, fetch, held):
    a = await put(real.store, A)
    request = program(
        step("x2", a, a),
        step("y", "$x2", a, "gemm_reduce", reduce=["sumsq", "argmax"]),
        step("z", "$x2", "$x2", order="F"),
        keep=["x2", "y", "z"],
        verify=True,
        ttl_s=60,
    )
    info, created = await real.jobs.submit(request)
    assert created
    done = await real.jobs.wait(info.id, 60)
    assert (done.state, done.op, done.attempt, done.algorithm) == (JobState.SUCCEEDED, "program", 1, "numpy")
    assert list(done.result) == ["x2", "y.sumsq", "y.argmax", "z"]
    x2 = A.astype("c16") @ A
    np.testing.assert_allclose(fetch(real.store, done.result["x2"]), x2, rtol=1e-5)
    np.testing.assert_allclose(fetch(real.store, done.result["z"]), x2 @ x2, rtol=1e-4)
    y = x2 @ A
    np.testing.assert_allclose(fetch(real.store, done.result["y.sumsq"]), (np.abs(y) ** 2).sum(0), rtol=1e-4)
    np.testing.assert_array_equal(fetch(real.store, done.result["y.argmax"]), np.abs(y).argmax(0))
    assert (await real.store.info(done.result["z"])).order == "F"
    assert (await real.store.info(done.result["z"])).expires_at is not None
    assert [info.id for info in done.steps] == ["x2", "y", "z"]
    assert done.residual == max(info.residual for info in done.steps) < 1e-5
    assert done.timings.kernel_s > 0
    assert held(real.store) == (0, 0, 0)


async def test_the_bits_are_those_of_single_jobs(real, put, fetch, gemm):
    a = await put(real.store, A)
    info, _ = await real.jobs.submit(powers(a, 4))
    together = (await real.jobs.wait(info.id, 60)).result["x4"]
    alone = a.id
    for _ in range(4):
        info, _ = await real.jobs.submit(gemm(alone, alone))
        alone = (await real.jobs.wait(info.id, 60)).result["d"]
    assert fetch(real.store, together).tobytes() == fetch(real.store, alone).tobytes()


async def test_a_thousand_steps(real, put, fetch):
    a = await put(real.store, np.eye(8, dtype="f4") * 2)
    half = await put(real.store, np.eye(8, dtype="f4") / 2)
    steps = [step("s0", a, half), *(step(f"s{n}", f"$s{n - 1}", (a, half)[n % 2]) for n in range(1, 1000))]
    info, _ = await real.jobs.submit(program(*steps))
    done = await real.jobs.wait(info.id, 60)
    assert done.state == JobState.SUCCEEDED
    assert len(done.steps) == 1000
    assert (await real.jobs.get(info.id)).request["steps"] == steps, "as they were sent"
    np.testing.assert_array_equal(fetch(real.store, done.result["s999"]), np.eye(8) / 2)


async def test_the_longest_program_fits_into_a_frame(core, fake, put):
    """Long names, two stored operands of each step's own, and a result of each that is kept."""
    a = await put(core.store, np.ones((4, 4), "f4"))
    ids = [new_id("arr") for _ in range(2000)]
    record = core.store._catalog.get(a.id)
    for array_id in ids:
        core.store._catalog._records[array_id] = dataclasses.replace(
            record, info=record.info.model_copy(update={"id": array_id})
        )
    most = ["sum", "max", "min", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]
    names = [f"s{n:0>60}" for n in range(1000)]
    steps = [
        step(name, ids[2 * n], ids[2 * n + 1], "gemm_reduce", reduce=most, return_c=True)
        for n, name in enumerate(names)
    ]
    await core.jobs.submit(program(*steps, keep=[f"{name}.c" for name in names]))
    (_, (message,)) = fake.sent[-1]
    frame = encode(packed(message))
    assert 1 << 19 < len(frame) < 1 << 22
    (body,) = Decoder().feed(frame)
    (back,) = unpacked(TO_WORKER.validate_json(body))
    assert (len(back.operands), len(back.results)) == (2000, 1000)
    assert back.params == message.params
    with pytest.raises(ParameterInvalid, match="10000 results"):
        await core.jobs.submit(program(*steps))


async def test_what_a_worker_is_sent(core, fake, a):
    await core.jobs.submit(powers(a))
    (_, (message,)) = fake.sent[-1]
    assert list(message.operands) == [a.id]
    assert message.operands[a.id].cache_id == a.id
    assert list(message.results) == ["x3"]
    assert message.algorithm == "program"


# -- what happens to them -------------------------------------------------------------------------------------------


async def test_operands_deleted_after_submission_are_used_all_the_same(core, fake, a, idle):
    info, _ = await core.jobs.submit(powers(a))
    await core.store.delete(a.id)
    assert core.store.used_bytes >= a.nbytes
    with pytest.raises(StepInvalid) as caught:
        await core.jobs.submit(powers(a))
    assert isinstance(caught.value.cause, NotFound)
    fake.done()
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    await idle()


async def test_operands_that_expire_meanwhile(core, fake, put, idle, eventually, later):
    brief = await put(core.store, A, ttl_s=3600)
    info, _ = await core.jobs.submit(powers(brief))
    later(3600)
    core.store.expiry.wake()
    await eventually(lambda: brief.id in core.store._catalog._tombstones)
    with pytest.raises(Gone):
        await core.store.info(brief.id)
    with pytest.raises(StepInvalid) as caught:
        await core.jobs.submit(powers(brief))
    assert describe(caught.value).status == 410
    fake.done()
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    await idle()


@pytest.mark.parametrize("when", ["queued", "running"])
async def test_cancel(core, fake, a, idle, when):
    if when == "queued":
        first, _ = await core.jobs.submit(powers(a))
    info, _ = await core.jobs.submit(powers(a, 5))
    assert (await core.jobs.cancel(info.id)).state == JobState.CANCELLED
    assert when == "queued" or fake.cancelled == [("cpu", info.id)]
    while fake.running():
        fake.done()
    if when == "queued":
        assert (await core.jobs.wait(first.id, 60)).state == JobState.SUCCEEDED
    await idle()


async def test_deadline(core, fake, a, idle):
    info, _ = await core.jobs.submit(powers(a, timeout_s=0.05))
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.error.type) == (JobState.EXPIRED, "/problems/timeout")
    fake.done()
    await idle()


async def test_a_lost_worker_runs_the_whole_program_again(core, fake, a, idle):
    info, _ = await core.jobs.submit(powers(a))
    fake.lose()
    fake.hello()
    assert len(fake.sent) == 2
    first, again = (run for _, (run,) in fake.sent)
    assert (first.express, again.express) == (True, False)  # what has lost a worker goes alone
    assert dataclasses.replace(again, express=True) == first
    fake.done()
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 2)
    await idle()


async def test_a_program_fails_after_three_lost_workers(core, fake, a, idle):
    info, _ = await core.jobs.submit(powers(a))
    for _ in range(3):
        fake.lose()
        fake.hello()
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.error.type) == (JobState.FAILED, "/problems/worker-crashed")
    await idle()


async def test_a_crash_of_the_server_loses_no_program(core, fake, a, settings, fetch):
    """Its operand is deleted meanwhile, and the limits have become tighter: it was accepted."""
    info, _ = await core.jobs.submit(powers(a, 40, verify=True))
    waiting, _ = await core.jobs.submit(powers(a, 3))
    await core.store.delete(a.id)
    await core.stop()
    again = Core(
        settings.model_copy(update={"max_program_steps": 2, "max_queued_steps": 2, "max_array_bytes": 8}),
        InlineExecutor(),
    )
    await again.start()
    try:
        long, short = await again.jobs.wait(info.id, 60), await again.jobs.wait(waiting.id, 60)
        assert (long.state, short.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
        assert len(long.steps) == 40
        np.testing.assert_allclose(
            fetch(again.store, short.result["x3"]), np.linalg.matrix_power(A.astype("c16"), 8), rtol=1e-3
        )
        assert again.scheduler.admissions.steps == 0
    finally:
        await again.stop()


async def test_a_program_that_can_run_nowhere_any_more_fails_by_name(core, a, settings):
    """Its operand's bytes are gone, as after a restored backup."""
    info, _ = await core.jobs.submit(powers(a, 3))
    await core.stop()
    for path in (settings.data_dir / "extents").iterdir():
        path.unlink()
    again = Core(settings, InlineExecutor())
    await again.start()
    try:
        done = await again.jobs.wait(info.id, 60)
        assert (done.state, done.error.type) == (JobState.FAILED, "/problems/not-found")
        assert done.error.model_extra["step"] == "x1"
        assert again.scheduler.admissions.steps == 0
    finally:
        await again.stop()


async def test_a_client_that_hangs_up_while_a_long_program_is_checked(core, a, idle):
    task = asyncio.create_task(core.jobs.submit(powers(a, 400), idempotency_key="k"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not core.jobs._keys._arriving
    await idle()


async def test_the_same_key_answers_the_same_program(core, fake, a):
    first, created = await core.jobs.submit(powers(a), idempotency_key="k")
    again, anew = await core.jobs.submit(powers(a), idempotency_key="k")
    assert (again.id, created, anew) == (first.id, True, False)
    with pytest.raises(IdempotencyMismatch):
        await core.jobs.submit(powers(a, 4), idempotency_key="k")
    fake.done()


# -- records --------------------------------------------------------------------------------------------------------


async def test_listings_leave_the_steps_out(core, fake, a, gemm):
    finished, _ = await core.jobs.submit(powers(a))
    fake.done()
    await core.jobs.wait(finished.id, 60)
    live, _ = await core.jobs.submit(powers(a))
    plain, _ = await core.jobs.submit(gemm(a, a))
    page, _ = await core.jobs.list(state=None, limit=9, cursor=None)
    found = {info.id: info for info in page}
    assert [found[info.id].request for info in (finished, live)] == [None, None]
    assert found[plain.id].request["a"] == a.id
    assert (await core.jobs.get(live.id)).request["steps"][0]["id"] == "x1"
    assert (await core.jobs.get(finished.id)).request["steps"][0]["id"] == "x1"
    for state in (JobState.SUCCEEDED, JobState.RUNNING):
        page, _ = await core.jobs.list(state=state, limit=9, cursor=None)
        assert page[0].request is None
        assert page[0].op == "program"


async def test_programs_that_are_over_take_no_memory(core, fake, a):
    info, _ = await core.jobs.submit(powers(a))
    fake.done()
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    assert info.id not in core.jobs._recent


async def test_steps_are_kept_with_the_end(real, put, database):
    a = await put(real.store, A)
    info, _ = await real.jobs.submit(powers(a, verify=True))
    done = await real.jobs.wait(info.id, 60)
    stored = await real.jobs.queue.get(info.id)
    assert stored == done
    assert all(isinstance(info, StepInfo) and info.residual < 1e-4 for info in stored.steps)


async def test_cost_grows_with_steps(core, fake, a, gemm):
    """A thousand tiny steps are no tiny task: what is charged and when a worker is taken for hung know of them."""
    await core.jobs.submit(powers(a, 200))
    await core.jobs.submit(gemm(a, a))
    (running,) = [task for worker in core.executor.workers() for task in worker.tasks.values()]
    (waiting,) = core.scheduler.queue
    assert running.size[1] == 200 * waiting.size[1]
    assert running.cost_s > 100 * waiting.cost_s


async def test_a_check_unasked_counts_what_passes_between_steps(make_core, make_settings, fake, put):
    core = await make_core(make_settings(verify_share=1.0), fake)
    small = await put(core.store, A)
    column = await put(core.store, np.ones((1 << 12, 1), "f4"))
    await core.jobs.submit(powers(small))
    assert fake.sent[-1][1][0].verify
    fake.done()
    large = [step("outer", column, column, trans_b="T"), *(step(f"x{n}", "$outer", column) for n in range(5))]
    await core.jobs.submit(program(*large))
    assert not fake.sent[-1][1][0].verify, "its operands and results are small, and what is between them is not"


async def test_what_only_unneeded_steps_use_is_not_held(core, fake, a, put):
    other = await put(core.store, A)
    info, _ = await core.jobs.submit(program(step("u", other, other), step("x", a, a), keep=["x"]))
    assert core.store._catalog.get(other.id).pins == 0
    assert core.store._catalog.get(a.id).pins == 1
    assert list(fake.sent[-1][1][0].operands) == [a.id]
    fake.done()
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
