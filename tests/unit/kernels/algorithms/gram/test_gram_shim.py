"""Sums of squares from Gram matrices on the CPU shim: accuracy, every kind of operand, what goes to the product."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reduce_cases import build, run
from simt_cases import ShimMachine, random, strided
from simt_shim.launcher import ShimLauncher

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.algorithms.gram import gemm_reduce as gram
from gemmserve_kernels.algorithms.gram import plan
from gemmserve_kernels.algorithms.simt import gemm_reduce as simt
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference

ROUNDED = 2.0**-24 + plan.ACCURACY
"""What a form may be wrong by, relative to the result: rounding to float32, and what the bound leaves."""


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(KNOWN["H200"], optimize="-O0"))


@pytest.fixture
def checked():
    """Looks at every access."""
    return ShimMachine(ShimLauncher(KNOWN["H200"], checked=True, optimize="-O0"))


@pytest.fixture
def forms(monkeypatch):
    """A function (machine, a, b, **options) -> (results of the forms alone, flags): nothing is computed again."""
    seen = []

    def note(launcher, problem, a, b, flags, *rest):
        address = flags.columns if problem.over_rows else flags.rows
        count = problem.batch * (problem.n if problem.over_rows else problem.m)
        status = ctypes.c_int32.from_address(flags.status[0]).value
        found = np.array((ctypes.c_int32 * count).from_address(address), bool)
        assert bool(status) == found.any()
        seen.append(found.reshape(*problem.batch_shape, -1))

    def go(machine, a, b, **options):
        with monkeypatch.context() as patch:
            patch.setattr(gram.reduce_fallback, "run", note)
            problem, results = run(machine, gram.run_gemm_reduce, a, b, **{"reduce": "sumsq"} | options)
        return problem, results["sumsq"], seen[-1]

    return go


def oracle(problem, a, b):
    with np.errstate(all="ignore"):
        return reference.oracle_gemm_reduce(problem, a, b)


def check(machine, forms, a, b, **options):
    """Nothing is flagged, and every result is as good as rounded."""
    options = {"reduce": "sumsq"} | options
    problem, found, flags = forms(machine, a, b, **options)
    assert gram.supports(problem, KNOWN["H200"]) is None
    assert not flags.any()
    exact = oracle(problem, a, b)["sumsq"]
    assert found.dtype == np.float32
    assert (np.abs(found - exact) <= ROUNDED * exact).all(), np.abs(found / exact - 1).max()
    return found


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_every_dtype_and_axis(checked, forms, dtype, axis):
    a, b = random(1, dtype, 2, 75, 40), random(2, dtype, 2, 40, 81)
    check(checked, forms, a, b, axis=axis, alpha=2)


@pytest.mark.parametrize(("trans_a", "trans_b"), ["NR", "TT", "CN", "RC", "CC", "TN"])
def test_operations(machine, forms, trans_a, trans_b):
    a, b = random(1, "complex64", 40, 40), random(2, "complex64", 40, 40)
    for axis in "mn":
        check(machine, forms, a, b, trans_a=trans_a, trans_b=trans_b, alpha=1 - 2j, axis=axis)


@pytest.mark.parametrize("how", ["fortran", "reversed", "gaps", "constant rows"])
def test_strides(machine, forms, how):
    """Constant rows of A make a matrix of rank 1, of B columns that are all alike."""
    a, b = random(1, "complex64", 3, 34, 50), strided(random(2, "complex64", 50, 37), how)
    check(machine, forms, strided(a, how), b, axis="m")
    check(machine, forms, a, b, axis="n")


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("k", [5, 33, 64, 65, 128])
def test_tiles(machine, checked, forms, dtype, k):
    """Narrow and wide tiles, one and several along a side, whole and cut."""
    a, b = random(1, dtype, 70, k), random(2, dtype, k, 40)
    check(checked if k == 65 else machine, forms, a, b)


@pytest.mark.parametrize("m", [1, 511, 513, 1025, 2600])
def test_runs_and_parts(machine, forms, m):
    assert {1: 1, 511: 1, 513: 1, 1025: 2, 2600: 3}[m] == plan.Cut.of(m, 6, np.dtype(np.complex128)).parts
    a, b = random(1, "complex64", m, 6), random(2, "complex64", 6, 9)
    check(machine, forms, a, b)
    check(machine, forms, b.T, a.T, axis="n")


def test_instructions_of_four_steps_give_as_much(machine, forms):
    a, b = random(1, "complex64", 300, 40), random(2, "complex64", 40, 33)
    check(machine, forms, a, b, config=GemmConfig(algorithm="gram", instruction_k=4))
    older = ShimMachine(ShimLauncher(KNOWN["A100"], optimize="-O0"))
    check(older, forms, a, b)


def test_planar_and_mixed(machine, forms):
    a, b = random(1, "float32", 2, 33, 40), random(2, "float32", 2, 40, 21)
    check(machine, forms, a, b, layout="planar", axis="n", alpha=1j)
    check(machine, forms, random(1, "float32", 33, 40), random(2, "complex64", 40, 21))
    check(machine, forms, random(1, "float16", 33, 40), random(2, "float32", 40, 21))
    check(machine, forms, random(1, "complex64", 33, 40), random(2, "float16", 40, 21), axis="n")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 70, 3), (70, 1, 40)])
def test_edges(machine, forms, m, n, k):
    for axis in "mn":
        check(machine, forms, random(1, "complex64", m, k), random(2, "complex64", k, n), axis=axis)


@pytest.mark.parametrize("scale", [1e-30, 1e-21, 1e8])
def test_sizes(machine, forms, scale):
    """Squares of elements that float32 could not hold: the forms can, and where float32 can the result is right."""
    a, b = random(1, "complex64", 40, 20, scale=scale), random(2, "complex64", 20, 33, scale=min(1 / scale, 1e20))
    check(machine, forms, a, b)


def test_subnormal_elements(machine, forms):
    a = np.arange(1, 41, dtype="f4").reshape(8, 5) * np.float32(2.0**-149)
    b = np.full((5, 3), 2.0**120, "f4")
    check(machine, forms, a, b)


def test_zeros(machine, forms):
    """A column of zeros in B, in A, and nothing else: no bound is broken where there is nothing to be wrong."""
    a, b = random(1, "complex64", 40, 20), random(2, "complex64", 20, 33)
    a[:, 3], b[:, 5] = 0, 0
    assert check(machine, forms, a, b)[5] == 0
    assert not check(machine, forms, np.zeros_like(a), b).any()


def test_beside_sums_and_of_magnitudes(machine):
    a, b = random(1, "complex64", 2, 75, 40), random(2, "complex64", 40, 31)
    for axis in (["m"], ["n", "batch"]):
        problem, found = run(machine, gram.run_gemm_reduce, a, b, reduce=["mean", "sumsq", "sum"], axis=axis, alpha=1j)
        for name, expected in oracle(problem, a, b).items():
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6 * np.abs(expected).max())
        _, same = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq", pre_op="abs", axis=axis, alpha=1j)
        np.testing.assert_array_equal(same["sumsq"], found["sumsq"])


# ---- what goes back to the product


def cancelling(dtype, seed=1):
    """A whose columns 0 and 1 are nearly equal, B whose columns 7 and 30 are their difference alone."""
    a, b = random(seed, dtype, 2, 90, 12), random(seed + 1, dtype, 2, 12, 40)
    a[..., 1] = a[..., 0] * np.float32(1 + 2.0**-20)
    for column in (7, 30):
        b[..., column] = 0
        b[..., 0, column], b[..., 1, column] = 1, -1
    return a, b


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"]], ids=",".join)
def test_cancellation_is_left_to_the_product(checked, machine, forms, dtype, axis):
    a, b = cancelling(dtype)
    if "n" in axis:
        a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
    problem, alone, flags = forms(machine, a, b, axis=axis)
    assert set(np.flatnonzero(flags.any(0))) == {7, 30}
    exact = oracle(problem, a, b)["sumsq"]
    lost = np.abs(alone - exact)[..., [7, 30]] / exact[..., [7, 30]]
    assert lost.max() > 1e-5
    _, found = run(checked, gram.run_gemm_reduce, a, b, reduce="sumsq", axis=axis)
    # float32 holds every product here, and subtracts neighbours without an error.
    assert (np.abs(found["sumsq"] - exact) <= 4e-6 * exact).all()
    # What does not stand beside them is left alone.
    np.testing.assert_array_equal(found["sumsq"][..., 32:], alone[..., 32:])
    assert (found["sumsq"][..., :32] != alone[..., :32]).any()


@pytest.mark.parametrize("axis", [["m"], ["n"], ["n", "batch"]], ids=",".join)
def test_not_finite(machine, axis):
    """The same NaN and infinities as the product's, in every place that one may be."""
    for value in (np.nan, np.inf, -np.inf):
        for side in range(2):
            a, b = random(1, "float32", 3, 40, 9), random(2, "float32", 3, 9, 50)
            a[:, 4], b[:, :, 6] = 0, 0
            (a if side == 0 else b)[1, 3, 2] = value
            with np.errstate(invalid="ignore"):
                _, found = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq", axis=axis)
                _, plain = run(machine, simt.run_gemm_reduce, a, b, reduce="sumsq", axis=axis)
            np.testing.assert_array_equal(np.isnan(found["sumsq"]), np.isnan(plain["sumsq"]))
            np.testing.assert_allclose(found["sumsq"], plain["sumsq"], rtol=1e-5)
            assert not np.isfinite(found["sumsq"]).all()


def test_an_infinity_that_meets_a_zero(machine):
    """It is NaN in one row of the product, where the form would be infinite as its squared sum is."""
    a, b = np.abs(random(1, "float32", 40, 9)), np.abs(random(2, "float32", 9, 50))
    a[5, 2], b[2, [3, 40]] = 0, np.inf
    _, found = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq")
    assert np.flatnonzero(np.isnan(found["sumsq"])).tolist() == [3, 40]


def test_float16_goes_back_to_float32(machine, forms):
    a, b = random(1, "float16", 60, 8), random(2, "float16", 8, 30)
    a[:, 1], b[:, 7] = a[:, 0], [1, -1, 0, 0, 0, 0, 0, 0]
    problem, _, flags = forms(machine, a, b)
    assert np.flatnonzero(flags).tolist() == [7]
    _, found = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq")
    assert found["sumsq"][7] == 0
    np.testing.assert_allclose(found["sumsq"], oracle(problem, a, b)["sumsq"], rtol=1e-6)


def test_overflow_is_that_of_float32(machine):
    a, b = random(1, "float32", 40, 9), random(2, "float32", 9, 50)
    b[:, 3], b[:, 4] = 1e25, 3e38
    with np.errstate(over="ignore"):
        _, found = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq")
    assert np.isinf(found["sumsq"][3:5]).all()
    assert np.isfinite(np.delete(found["sumsq"], [3, 4])).all()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_is_kept_is_rounded(forms, data):
    """Data made to cancel, more or less: whatever the bound lets pass is right to the last place."""
    machine = ShimMachine(ShimLauncher(KNOWN["H200"], optimize="-O0"))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    k, rank = 8, data.draw(st.integers(1, 8))
    noise = 2.0 ** data.draw(st.integers(-24, 0))
    grade = 2.0 ** data.draw(st.integers(0, 30))

    def normal(*shape):
        return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)

    a = normal(60, rank) @ normal(rank, k) + noise * normal(60, k)
    scales = grade ** rng.uniform(-1, 1, k)
    _, _, vectors = np.linalg.svd(a)
    b = vectors.conj().T @ (normal(k, 20) * 2.0 ** rng.integers(-20, 1, (k, 20)))
    a, b = (a * scales).astype("c8"), (b / scales[:, None]).astype("c8")
    problem, found, flags = forms(machine, a, b)
    exact = oracle(problem, a, b)["sumsq"]
    error = np.abs(found - exact) / exact
    assert (error[~flags] <= ROUNDED * (1 + 1e-6)).all()
    # Nor is more flagged than must be: a form of a 25,000th of its squared sum is kept.
    weight = (np.linalg.norm(a.astype("c16"), axis=0)[:, None] * np.abs(b)).sum(0) ** 2
    assert not flags[exact > 4e-5 * weight].any()


# ---- batches


def test_shared_operands(machine, forms):
    """One A for several products has one Gram matrix."""
    a, b = random(1, "complex64", 2, 1, 80, 20), random(2, "complex64", 3, 20, 15)
    check(machine, forms, a, b)
    check(machine, forms, a, b, axis=["m", "batch"])
    check(machine, forms, a, b, axis="n")
    check(machine, forms, random(1, "complex64", 60, 20), random(2, "complex64", 4, 20, 15))
    check(machine, forms, random(1, "complex64", 5, 60, 20), random(2, "complex64", 20, 15))


def test_more_batch_axes_than_a_launch_has(machine, forms):
    a, b = random(1, "float32", 2, 1, 2, 1, 2, 1, 40, 6), random(2, "float32", 1, 2, 1, 2, 1, 2, 6, 9)
    check(machine, forms, a, b)
    check(machine, forms, a, b, axis=["n", "batch"])
    b[0, 1, 0, 1, 0, 1, 3, 4] = np.nan
    for axis in "mn":
        with np.errstate(invalid="ignore"):
            problem, found = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq", axis=axis)
        np.testing.assert_allclose(found["sumsq"], oracle(problem, a, b)["sumsq"], rtol=1e-5)
        assert np.isnan(found["sumsq"]).sum() == (8 if axis == "m" else 8 * 40)


@pytest.mark.parametrize("axis", [["m"], ["n", "batch"]], ids=",".join)
def test_shares_of_a_batch_have_the_same_bits(machine, monkeypatch, axis):
    a, b = cancelling("complex64")
    a, b = np.concatenate([a, a[::-1], a[:1]]).reshape(5, 1, 90, 12), np.stack([b[0], b[1]])
    if "n" in axis:
        a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
    _, whole = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq", axis=axis)
    for matrices in (1, 2, 3):
        machine.launcher.launches.clear()
        monkeypatch.setattr(plan, "WORKSPACE", matrices * 12 * 12 * 16)
        gram._plan.cache_clear()
        _, shares = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq", axis=axis)
        monkeypatch.undo()
        gram._plan.cache_clear()
        assert machine.launcher.launches.count("gram_form") > 1
        np.testing.assert_array_equal(shares["sumsq"], whole["sumsq"])


def test_the_same_bits_in_any_batch(machine):
    a, b = random(1, "complex64", 5, 300, 40), random(2, "complex64", 5, 40, 33)
    _, together = run(machine, gram.run_gemm_reduce, a, b, reduce="sumsq")
    for i in range(5):
        _, alone = run(machine, gram.run_gemm_reduce, a[i], b[i], reduce="sumsq")
        np.testing.assert_array_equal(together["sumsq"][i], alone["sumsq"])


def test_long_grids_are_cut(forms):
    on = ShimMachine(ShimLauncher(KNOWN["H200"], max_grid=3, optimize="-O0"))
    check(on, forms, random(1, "complex64", 5, 300, 50), random(2, "complex64", 5, 50, 133))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("complex64", {"reduce": "sum"}),
        ("complex64", {"reduce": ["sumsq", "absmax"]}),
        ("complex64", {"reduce": "sumsq", "pre_op": "square"}),
        ("complex64", {"reduce": ["sum", "sumsq"], "pre_op": "abs"}),
        ("complex64", {"reduce": "sumsq", "return_c": True}),
        ("complex64", {"reduce": "sumsq", "compute": "fp64"}),
        ("complex128", {"reduce": "sumsq"}),
        ("float64", {"reduce": "sumsq"}),
    ],
    ids=str,
)
def test_what_it_does_not_do(dtype, options):
    problem = build(random(1, dtype, 4, 5), random(2, dtype, 5, 6), **options)
    assert gram.supports(problem, KNOWN["H200"]) is not None
