"""Jobs and one-shots that are computed block by block, on the processor: right, in every form, and like any other."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.schemas import GemmJob, GemmParams, JobState

SIDE = 16
EPS = float(np.finfo(np.float32).eps)


@pytest.fixture
async def blocky(make_core, make_settings):
    return await make_core(make_settings(block_side=SIDE))


@pytest.fixture
def random():
    rng = np.random.default_rng(7)
    return lambda *shape: (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype("c8")


def op(x, trans):
    return {"N": x, "T": x.swapaxes(-1, -2), "C": x.swapaxes(-1, -2).conj(), "R": x.conj()}[trans]


def check(found, a, b, c=None, alpha=1.0, beta=0.0):
    """Within the error of sums in single precision, element by element."""
    k = a.shape[-1]
    exact = alpha * (a.astype(complex) @ b.astype(complex))
    size = abs(alpha) * (np.abs(a).astype(float) @ np.abs(b).astype(float))
    if c is not None:
        exact = exact + beta * c.astype(complex)
        size = size + abs(beta) * np.abs(c).astype(float)
    assert found.shape == exact.shape
    assert np.all(np.abs(found - exact) <= 2 * (k + 8) * EPS * size)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("trans_a", "trans_b"), [("N", "N"), ("T", "N"), ("N", "C"), ("R", "T"), ("C", "R")])
async def test_every_form(blocky, put, fetch, random, trans_a, trans_b, order, held):
    m, n, k = 80, 72, 96
    a = random(*((m, k) if trans_a in "NR" else (k, m)))
    b = np.asfortranarray(random(*((k, n) if trans_b in "NR" else (n, k))))
    c = random(m, n)
    ids = {name: (await put(blocky.store, array)).id for name, array in (("a", a), ("b", b), ("c", c))}
    job = GemmJob(
        op="gemm", **ids, trans_a=trans_a, trans_b=trans_b, alpha=1.5 - 0.5j, beta=0.25j, order=order, verify=True
    )
    info, _ = await blocky.jobs.submit(job)
    seen = [each async for each in blocky.jobs.events(info.id)]
    ended = seen[-1]
    assert ended.state == JobState.SUCCEEDED, ended.error
    assert len({each.progress for each in seen}) > 10, "by blocks"
    assert ended.residual < 1e-5
    found = fetch(blocky.store, ended.result["d"])
    check(found, op(a, trans_a), op(b, trans_b), c, 1.5 - 0.5j, 0.25j)
    assert held(blocky.store) == (0, 0, 0)


@pytest.mark.parametrize(("lead_a", "lead_b"), [((3,), (3,)), ((2, 3), (3,)), ((), (2,)), ((4, 1), (1, 2))])
async def test_batches(blocky, put, fetch, random, lead_a, lead_b):
    a, b = random(*lead_a, 64, 64), random(*lead_b, 64, 64)
    ids = {name: (await put(blocky.store, array)).id for name, array in (("a", a), ("b", b))}
    info, _ = await blocky.jobs.submit(GemmJob(op="gemm", **ids))
    ended = await blocky.jobs.wait(info.id, 60)
    assert ended.state == JobState.SUCCEEDED, ended.error
    check(fetch(blocky.store, ended.result["d"]), a, b)


async def test_a_product_of_a_single_request(blocky, scratch, random):
    a, b = random(80, 64), random(64, 96)
    uploads = await scratch(blocky.store, a=a, b=b)
    outcome = await blocky.jobs.run(GemmParams(), uploads)
    extent = outcome.results["d"].extent
    found = np.frombuffer(extent.view(a.shape[0] * b.shape[1] * 8), "c8").reshape(80, 96)
    check(found, a, b)
    assert outcome.timings.kernel_s > 0
    outcome.release()
    assert blocky.store.scratch_bytes == 0


async def test_blocks_that_are_lost_change_no_bits(make_core, make_settings, put, fetch, random):
    """A worker is given up in the middle, several times."""
    core = await make_core(make_settings(block_side=SIDE, max_attempts=9))
    a = (await put(core.store, random(96, 96))).id
    bits = []
    for losses in (0, 3):
        info, _ = await core.jobs.submit(GemmJob(op="gemm", a=a, b=a))
        left = losses
        async for each in core.jobs.events(info.id):
            if left and each.progress:
                left -= 1
                (worker,) = core.executor.workers()
                core.executor.kill(worker, "a test")
        ended = await core.jobs.get(info.id)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1), ended.error
        bits.append(fetch(core.store, ended.result["d"]).tobytes())
    assert bits[0] == bits[1]


async def test_an_estimate_of_all_of_it(make_core, make_settings, fake, put, random):
    core = await make_core(make_settings(block_side=SIDE), fake)
    a = (await put(core.store, random(96, 96))).id
    info, _ = await core.jobs.submit(GemmJob(op="gemm", a=a, b=a))
    (task,) = core.scheduler.queue
    running = await core.jobs.get(info.id)
    assert running.estimated_s == pytest.approx(36 * task.cost_s, abs=1e-6)
    assert (core.usage("")["jobs_running"], core.scheduler.products_running) == (1, 1)
