"""Checks of results: what is wrong is found and computed again, what merely cancels is left in peace."""

from __future__ import annotations

import numpy as np
import pytest
from inline_executor import InlineExecutor
from kernel_models import ozaki as ozaki_model

from gemmserve_kernels.algorithms.ozaki.moduli import Moduli, needed
from gemmserve_kernels.freivalds import Element, Finding
from gemmserve_kernels.numerics import models
from gemmserve_service.executor.worker.backend import call
from gemmserve_service.executor.worker.checks import verification
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.schemas import GemmParams, GemmReduceParams, JobState

RNG = np.random.default_rng(9)
N = 96


@pytest.fixture(autouse=True)
def same_numbers():
    """Each test has the same ones, whichever ran before it."""
    RNG.bit_generator.state = np.random.default_rng(9).bit_generator.state


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


def found(params, operands, results, seed=5):
    return verification.find(params, operands, results, seed)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("params", [GemmParams(alpha=2, trans_b="T"), GemmReduceParams(reduce=["sumsq"])])
def test_right_results_are_in_no_doubt(dtype, params):
    for lead in ((), (3,)):
        operands = arrays(dtype, lead)
        finding = found(params, operands, computed(params, operands))
        assert 0 <= finding.residual < 1e-2
        assert finding.excess < 1
        assert finding.element.excess < 1
        assert not verification.doubtful(finding)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("k", [N, 1500])
@pytest.mark.parametrize("mode", models.MODES)
def test_right_results_of_every_mode_are_in_no_doubt(mode, k, positive):
    """As the models of tensor cores compute them, promoted where the kernels promote. Wide data, too."""
    for dtype in ("f4", "c8"):
        a, b = (RNG.standard_normal(shape) for shape in ((24, k), (k, 20)))
        if dtype == "c8":
            a, b = a + 1j * RNG.standard_normal(a.shape), b + 1j * RNG.standard_normal(b.shape)
        if positive:
            a, b = (np.abs(x.real) + (1j * np.abs(x.imag) if dtype == "c8" else 0) for x in (a, b))
        for spread in (0, 12):
            rows, columns = np.exp2(RNG.uniform(-spread, spread, (24, 1))), np.exp2(RNG.uniform(-spread, spread, 20))
            operands = {"a": (a * rows).astype(dtype), "b": (b * columns).astype(dtype)}
            results = {"d": models.product(operands["a"], operands["b"], mode)}
            finding = found(GemmParams(compute=mode), operands, results)
            assert finding.excess < 1.5, finding
            assert finding.element.excess < 2, finding
            # That far from doubt, and yet where FP32 was asked for inputs rounded to TF32 are seen.
            if mode == "1xtf32" and not positive:
                assert verification.doubtful(found(GemmParams(), operands, results))


@pytest.mark.parametrize("k", [64, 700])
def test_residues_are_in_no_doubt(k):
    a, b = (RNG.standard_normal(shape) * np.exp2(RNG.uniform(-9, 9, shape)) for shape in ((9, k), (k, 7)))
    operands, results = {"a": a, "b": b}, {"d": ozaki_model.gemm(a, b, Moduli.first(needed(k, np.dtype("f8"))))}
    assert found(GemmParams(compute="ozaki"), operands, results).excess < 1


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("value", [1.5, np.inf, np.nan])
def test_one_wrong_element_is_found(dtype, value):
    operands = arrays(dtype, (5,))
    results = computed(GemmParams(), operands)
    results["d"][3, 17, 5] *= value
    assert verification.doubtful(found(GemmParams(), operands, results))


def test_data_that_cannot_be_judged_are_not():
    operands = arrays()
    operands["a"][0, 0] = np.inf
    finding = found(GemmParams(), operands, computed(GemmParams(), operands))
    assert np.isnan(finding.residual)
    assert not verification.doubtful(finding)


@pytest.mark.parametrize(("first", "again", "wrong"), [(9, 1, True), (9, 3, False), (np.inf, 1, True)])
def test_when_a_first_result_was_wrong(first, again, wrong):
    assert verification.was_wrong(Finding(0.1, first), Finding(0.1, again)) is wrong


@pytest.mark.parametrize(
    ("first", "again", "wrong"),
    [
        ((0.1, 20), (0.1, 1), True),
        ((0.1, 20), (0.1, 6), False),  # the data are to blame
        ((0.1, np.inf), (0.1, 1), True),
        ((0.1, 20), (0.1, np.nan), False),
        ((np.nan, 20), (np.nan, 1), True),
        ((9, 0.9), (9, 0.2), False),  # much nearer in what was in no doubt
        ((9, 0.2), (1, 0.9), True),
    ],
)
def test_rows_and_elements_are_in_doubt_by_themselves(first, again, wrong):
    found, second = (Finding(0.1, rows, Element(elements, 0.5, (0, 1, 2))) for rows, elements in (first, again))
    assert verification.doubtful(found)
    assert verification.was_wrong(found, second) is wrong
    assert not verification.doubtful(Finding(0.1, 7, Element(7, 0.5, None)))
    assert not verification.doubtful(Finding(np.nan, np.nan, Element(np.nan, np.nan, None)))


def test_overflow_that_plain_arithmetic_has_too_is_no_mismatch():
    operands = {name: np.full((N, N), 200, "f2") for name in "ab"}
    results, seeds, plain = computed(GemmParams(), operands), [], []

    def check(params, seed):
        seeds.append(seed)
        return verification.find(params, operands, results, seed)

    with np.errstate(over="ignore"):
        verdict = verification.verdict(GemmParams(), operands, check, plain.append, "a product")
    assert verdict == verification.Verdict(None, None, replaced=True), "what is there now is plain arithmetic's"
    assert [params.compute for params in plain] == ["fp32"]
    assert seeds[0] == seeds[1], "the same vectors, so that chance is no difference"


def test_many_verdicts_in_one():
    many = [verification.Verdict(None, None), verification.Verdict(0.1, None), verification.Verdict(0.01, 0.5)]
    assert verification.worst(many) == verification.Verdict(0.1, 0.5)
    assert verification.worst(many[:1]) == verification.Verdict(None, None)
    assert verification.worst([verification.Verdict(replaced=True), *many]).replaced


@pytest.mark.parametrize("where", ["max", "sum"])
def test_a_reduction_that_is_not_a_number_for_no_reason(where):
    operands = {name: np.random.default_rng(1).standard_normal((N, N)).astype("f4") for name in "ab"}
    params = GemmReduceParams(reduce=["sum", "max"])
    product = operands["a"].astype("f8") @ operands["b"]
    results = {"sum": product.sum(0).astype("f4"), "max": product.max(0).astype("f4")}
    assert verification.find(params, operands, results, 1).excess < 1
    results[where] = np.full_like(results[where], np.nan)
    assert verification.doubtful(verification.find(params, operands, results, 1))
    operands["b"][3, 4] = np.nan
    assert not verification.doubtful(verification.find(params, operands, results, 1)), "it may be right"


class Faulty(CpuBackend):
    """Gets every product wrong that is not asked for in plain arithmetic."""

    def __init__(self, always=False, error=1):
        super().__init__()
        self.always, self.error, self.asked = always, error, []

    def run(self, params, operands, results, checkpoint):
        timings = super().run(params, operands, results, checkpoint)
        self.asked.append(params.compute)
        if self.always or params.compute == "auto":
            next(iter(results.values())).flat[3] += self.error
        return timings


class Losing(CpuBackend):
    """Gets small elements wrong in all but plain arithmetic: what norms cannot see."""

    def run(self, params, operands, results, checkpoint):
        timings = super().run(params, operands, results, checkpoint)
        if params.compute == "auto":
            for result in results.values():
                result[np.abs(result) < np.abs(result).max() * 1e-12] *= 0.75
        return timings


@pytest.fixture
async def job_on(make_core, make_settings, put, gemm):
    async def run(backend, operands, *, verify=True, share=0.0):
        executor = InlineExecutor()
        core = await make_core(make_settings(verify_share=share), executor)
        executor._runner.backend = backend
        ids = [await put(core.store, operands[name]) for name in "ab"]
        info, _ = await core.jobs.submit(gemm(*ids, verify=verify))
        return core, await core.jobs.wait(info.id, 60)

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


async def test_a_result_that_is_not_even_a_number(job_on, fetch):
    operands = arrays("c8")
    core, info = await job_on(Faulty(error=np.nan), operands)
    assert info.mismatch == np.finfo("f8").max
    assert info.residual < 1e-6
    np.testing.assert_allclose(fetch(core.store, info.result["d"]), operands["a"] @ operands["b"], rtol=1e-3, atol=1e-3)
    assert await core.jobs.queue.get(info.id) == info, "on record"


async def test_small_elements_that_are_wrong_are_found_and_said(job_on, fetch, caplog):
    operands = arrays("c8")
    operands["b"][:, : N // 2] *= 1e-14
    core, info = await job_on(Losing(), operands)
    assert info.mismatch == pytest.approx(0.25, abs=0.24), "of the element: of all of the result nothing is to be seen"
    assert info.residual < 1e-6
    exact = operands["a"].astype("c16") @ operands["b"]
    np.testing.assert_allclose(fetch(core.store, info.result["d"]), exact, rtol=1e-3, atol=1e-17)
    assert "product, row and column (0, " in caplog.text


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
