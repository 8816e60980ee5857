"""Checks of results: what is wrong is found and computed again, what merely cancels is left in peace."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.executor.inline import InlineExecutor
from gemmserve_service.schemas import GemmParams, GemmReduceParams, JobState
from gemmserve_service.worker import verification
from gemmserve_service.worker.device import CpuBackend, call

RNG = np.random.default_rng(9)
N = 96


def arrays(dtype="c8", lead=()):
    return {
        name: (RNG.standard_normal((*lead, N, N)) + 1j * RNG.standard_normal((*lead, N, N))).astype(dtype)
        if np.dtype(dtype).kind == "c"
        else RNG.standard_normal((*lead, N, N)).astype(dtype)
        for name in "ab"
    }


def computed(params, operands):
    shape = np.broadcast_shapes(operands["a"].shape[:-2], operands["b"].shape[:-2])
    if isinstance(params, GemmParams):
        results = {"d": np.empty((*shape, N, N), np.result_type(*operands.values()))}
    else:
        results = {"sumsq": np.empty((*shape, N), np.result_type(operands["a"].real.dtype, "f4"))}
    call(params, operands, results)
    return results


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("params", [GemmParams(alpha=2, trans_b="T"), GemmReduceParams(reduce=["sumsq"])])
def test_right_results_are_in_no_doubt(dtype, params):
    for lead in ((), (3,)):
        operands = arrays(dtype, lead)
        found = verification.residual(params, operands, computed(params, operands))
        assert 0 <= found < 1e-2
        assert not verification.doubtful(params, operands, found)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_one_wrong_element_is_found(dtype):
    operands = arrays(dtype)
    results = computed(GemmParams(), operands)
    results["d"][17, 5] *= 1.5
    assert verification.doubtful(GemmParams(), operands, verification.residual(GemmParams(), operands, results))


def test_data_that_cannot_be_judged_are_not():
    operands = arrays()
    operands["a"][0, 0] = np.inf
    found = verification.residual(GemmParams(), operands, computed(GemmParams(), operands))
    assert np.isnan(found)
    assert not verification.doubtful(GemmParams(), operands, found)


class Faulty(CpuBackend):
    """Gets every product wrong that is not asked for in plain arithmetic."""

    def __init__(self, always=False):
        super().__init__()
        self.always, self.asked = always, []

    def run(self, params, operands, results, checkpoint):
        timings = super().run(params, operands, results, checkpoint)
        self.asked.append(params.compute)
        if self.always or params.compute == "auto":
            next(iter(results.values())).flat[3] += 1
        return timings


@pytest.fixture
async def job_on(make_core, make_settings, put, gemm):
    async def run(backend, operands, *, verify=True, share=0.0):
        executor = InlineExecutor()
        core = await make_core(make_settings(verify_share=share), executor)
        executor._runner.backend = backend
        ids = [await put(core.store, operands[name]) for name in "ab"]
        info, _ = await core.jobs.submit(gemm(*ids, verify=verify))
        return core, await core.jobs.wait(info.id, 10)

    return run


async def test_a_wrong_result_is_thrown_away_and_reported(job_on, fetch):
    backend, operands = Faulty(), arrays("c16")
    core, info = await job_on(backend, operands)
    assert backend.asked == ["auto", "fp64"]
    assert info.state == JobState.SUCCEEDED
    assert info.mismatch > 1e-4
    assert info.residual < 1e-14
    assert info.timings.verify_s > 0
    np.testing.assert_allclose(fetch(core.store, info.result["d"]), operands["a"] @ operands["b"], rtol=1e-9)
    assert await core.jobs.queue.get(info.id) == info, "on record"


async def test_a_right_result_is_checked_once_and_a_job_that_is_not_asked_for_not_at_all(job_on):
    _, info = await job_on(CpuBackend(), arrays())
    assert (info.mismatch, info.state) == (None, JobState.SUCCEEDED)
    assert 0 < info.residual < 1e-6
    _, info = await job_on(CpuBackend(), arrays(), verify=False)
    assert (info.residual, info.timings.verify_s) == (None, 0.0)


async def test_a_share_of_all_products_is_checked_unasked(job_on):
    backend = Faulty()
    _, info = await job_on(backend, arrays(), verify=False, share=1.0)
    assert info.mismatch is not None
    assert backend.asked == ["auto", "fp32"]


async def test_cancellation_in_the_data_is_no_mismatch(job_on):
    """The exact product is 0 and rounding is all there is: the relative error is large in any arithmetic."""
    a = RNG.standard_normal((N, N)).astype("f4")
    b = np.concatenate([a[: N // 2].T, a[: N // 2].T], axis=1).astype("f4")
    left = np.concatenate([a[:, : N // 2], -a[:, : N // 2] * np.float32(1 + 1e-6)], axis=1)
    right = np.concatenate([b[: N // 2], b[: N // 2]], axis=0)
    _, info = await job_on(CpuBackend(), {"a": left, "b": right})
    assert info.state == JobState.SUCCEEDED
    assert info.residual > 1e-3
    assert info.mismatch is None
