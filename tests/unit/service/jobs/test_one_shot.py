"""Jobs of a single request: no record, and whatever ends them, nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from gemmserve_kernels.problem.errors import ShapeMismatch
from gemmserve_service.errors import BodyTooShort, Draining, JobFailed, JobTimeout, WorkerCrashed
from gemmserve_service.schemas import GemmParams, GemmReduceParams

A = np.ones((8, 8), "c8")


async def test_one_shot(real, scratch, held):
    rng = np.random.default_rng(0)
    left, right, c = (rng.standard_normal((6, 6)) for _ in range(3))
    uploads = await scratch(real.store, a=left, b=right, c=c)
    done = await real.jobs.run(GemmParams(alpha=2, beta=-1, trans_a="T"), uploads)
    product = np.frombuffer(done.results["d"].view, "f8").reshape(6, 6)
    np.testing.assert_allclose(product, 2 * left.T @ right - c, rtol=1e-12, atol=1e-12)
    del product
    done.release()
    done.release()
    assert held(real.store) == (0, 0, 0)


async def test_one_shot_reductions(real, scratch, held):
    uploads = await scratch(real.store, a=A, b=A)
    done = await real.jobs.run(GemmReduceParams(reduce=["sum", "absmax"]), uploads)
    np.testing.assert_array_equal(np.frombuffer(done.results["sum"].view, "c8"), np.full(8, 64))
    np.testing.assert_array_equal(np.frombuffer(done.results["absmax"].view, "f4"), np.full(8, 8))
    done.release()
    assert held(real.store) == (0, 0, 0)


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        (lambda fake, core: fake.fail(), JobFailed),
        (lambda fake, core: [(fake.lose(), fake.hello()) for _ in range(3)], WorkerCrashed),
        (lambda fake, core: (core.scheduler.drain(), fake.lose()), Draining),
        (lambda fake, core: core.scheduler.stop(), Draining),
    ],
    ids=["failed", "crashed", "draining", "stopped"],
)
async def test_one_shot_that_ends_badly(core, fake, scratch, idle, ending, error, eventually):
    running = asyncio.create_task(core.jobs.run(GemmParams(), await scratch(core.store, a=A, b=A)))
    await eventually(fake.running)
    ending(fake, core)
    with pytest.raises(error):
        await asyncio.wait_for(running, 60)
    while fake.running():
        fake.done()
    await idle()


async def test_one_shot_past_its_deadline(core, fake, scratch, idle):
    with pytest.raises(JobTimeout):
        await core.jobs.run(GemmParams(), await scratch(core.store, a=A, b=A), timeout_s=0.02)
    fake.done()
    await idle()


async def test_one_shot_that_is_refused_leaves_nothing(core, scratch, idle, put):
    with pytest.raises(ShapeMismatch):
        await core.jobs.run(GemmParams(), await scratch(core.store, a=A, b=np.ones((3, 3), "c8")))
    await idle()
    uploads = await scratch(core.store, a=A)
    uploads["b"] = core.store.allocate(A.dtype, A.shape, "C", ttl_s=None, scratch=True)
    with pytest.raises(BodyTooShort):
        await core.jobs.run(GemmParams(), uploads)
    await idle()
    core.scheduler.drain()
    with pytest.raises(Draining):
        await core.jobs.run(GemmParams(), await scratch(core.store, a=A, b=A))
    await idle()


# How many turns of the event loop lie between the worker's answer and the hanging up; the last ones come after the end.
@pytest.mark.parametrize("order", ["hang up, then done", "done, then hang up"])
@pytest.mark.parametrize("turns", range(4))
async def test_hanging_up_races_with_the_answer(core, fake, scratch, idle, order, turns, eventually):
    running = asyncio.create_task(core.jobs.run(GemmParams(), await scratch(core.store, a=A, b=A)))
    await eventually(fake.running)
    if order == "done, then hang up":
        fake.done()
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
    else:
        running.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        fake.done()
    with contextlib.suppress(asyncio.CancelledError):
        (await running).release()
    await idle()
