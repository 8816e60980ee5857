"""The portable gemm kernel on the CPU shim, against a higher-precision reference and an a-priori bound."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from fresh_rng import fresh_rng
from hypothesis import given, settings
from hypothesis import strategies as st
from simt_cases import COMPLEX_ALPHA, GEMM_CASES, SMALL, Gemm, ShimMachine, check_gemm, random, run_gemm
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.problem import GemmProblem, Operand

H200, MI300X = KNOWN["H200"], KNOWN["MI300X"]


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(H200))


@pytest.mark.parametrize("case", GEMM_CASES.values(), ids=GEMM_CASES)
def test_every_case(machine, case):
    check_gemm(machine, case)


@pytest.mark.parametrize(("dtype", "u"), [("complex64", 2.0**-24), ("float64", 2.0**-53)])
def test_sums_of_small_products_are_those_of_short_runs(dtype, u):
    """A chain of 1003 multiply-adds of one sign is off by 10 u and more; runs of 8 and what their sum loses, by 2 u."""
    rng = fresh_rng()
    exact = np.longdouble if dtype == "float64" else np.complex128
    a, b = (rng.random(shape).astype(dtype) for shape in ((20, 1003), (1003, 30)))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), None)
    launcher = ShimLauncher(H200)
    out = launcher.empty((20, 30), np.dtype(dtype))
    simt.run_gemm(launcher, problem, None, launcher.array(a), launcher.array(b), None, out)
    expected = a.astype(exact) @ b.astype(exact)
    assert (np.abs(np.asarray(out) - expected) / np.abs(expected)).max() <= 1.8 * u


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("spec", [H200, MI300X], ids=["warp32", "warp64"])
def test_thread_orders_do_not_matter(spec, order):
    case = Gemm((37, 21), (21, 19), (37, 19), options=COMPLEX_ALPHA)
    expected = run_gemm(ShimMachine(ShimLauncher(H200)), case)[-1]
    result = run_gemm(ShimMachine(ShimLauncher(spec, order=order)), case)[-1]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", ["complex64 CR", "17x9x5", "float16 TN", "tile 10x6x3 5x3 1 stages"])
def test_no_races_and_no_stray_accesses(name):
    check_gemm(ShimMachine(ShimLauncher(H200, checked=True)), GEMM_CASES[name])


def test_long_grids_are_cut(machine):
    case = GEMM_CASES["broadcast both ways"]
    whole = run_gemm(machine, case)[-1]
    launcher = ShimLauncher(H200, max_grid=7)
    np.testing.assert_array_equal(run_gemm(ShimMachine(launcher), case)[-1], whole)
    assert len(launcher.launches) > 10


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_beta_zero_never_reads_c(machine, value):
    case = Gemm((20, 12), (12, 10), (20, 10), options={"beta": 0})
    a, b, c = case.operands()
    expected = run_gemm(machine, case, (a, b, c))[-1]
    np.testing.assert_array_equal(run_gemm(machine, case, (a, b, np.full_like(c, value)))[-1], expected)


def test_c_may_be_the_result(machine):
    case = GEMM_CASES["fortran with odd extents"]
    a, b, c = case.operands()
    *_, expected = run_gemm(machine, case, (a, b, c))
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c), **COMPLEX_ALPHA)
    held = machine.put(c)
    simt.run_gemm(machine.launcher, problem, case.config, machine.put(a), machine.put(b), held, held)
    np.testing.assert_allclose(held, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_non_finite_values_stay_in_their_rows_and_columns(machine, dtype):
    a, b = random(1, dtype, 21, 9), random(2, dtype, 9, 18)
    a[3, 4], a[5, 0], b[8, 7], b[2, 17] = np.nan, np.inf, -np.inf, np.nan
    result = run_gemm(machine, Gemm(a.shape, b.shape, dtypes=(dtype,)), (a, b, None))[-1]
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(result[np.isinf(expected)], expected[np.isinf(expected)].astype(dtype))


def test_complex_infinities_follow_the_four_products(machine):
    a, b = random(1, "complex64", 9, 5), random(2, "complex64", 5, 10)
    a[2, 1], b[3, 4] = complex(np.inf, 1), complex(0, np.nan)
    result = run_gemm(machine, Gemm(a.shape, b.shape, options={"alpha": 2}), (a, b, None))[-1]
    with np.errstate(all="ignore"):
        wide = [part.astype(np.float64) for part in (a.real, a.imag, b.real, b.imag)]
        real = wide[0] @ wide[2] - wide[1] @ wide[3]
        imag = wide[0] @ wide[3] + wide[1] @ wide[2]
    for got, expected in ((result.real, real), (result.imag, imag)):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        np.testing.assert_array_equal(got[np.isinf(expected)], expected[np.isinf(expected)])


def test_float16_overflow_and_subnormals(machine):
    a = np.array([[60000, 60000], [2.0**-14, 0], [2.0**-24, 0]], np.float16)
    b = np.array([[1, 2.0**-10, 0.75], [1, 0, 0]], np.float16)
    result = run_gemm(machine, Gemm(a.shape, b.shape, dtypes=("float16",)), (a, b, None))[-1]
    with np.errstate(over="ignore"):
        expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(result, expected)


def test_offsets_past_32_bits():
    """Rows 2^28 elements apart: the sixteenth lies past 2^31. The address space is reserved, a few pages are used."""
    rows, stride = 16, 1 << 28
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    with mmap.mmap(-1, rows * stride * 2, flags=flags) as memory:
        block = np.frombuffer(memory, np.float16)
        a = np.lib.stride_tricks.as_strided(block, (rows, 8), (stride * 2, 2))
        values, b = random(1, "float16", rows, 8), random(2, "float16", 8, 8)
        a[...] = values
        problem = GemmProblem.build(Operand.of(a), Operand.of(b))
        launcher = ShimLauncher(H200)
        out = launcher.empty((rows, 8), np.float16)
        simt.run_gemm(launcher, problem, SMALL, a, b, None, out)
        close = launcher.empty((rows, 8), np.float16)
        simt.run_gemm(launcher, problem, SMALL, values, b, None, close)
        np.testing.assert_array_equal(out, close)
        del a, block


SIDES = st.integers(1, 40)
HOW = st.sampled_from(["plain", "fortran", "reversed", "gaps", "offset", "padded"])


@settings(max_examples=40)
@given(
    m=SIDES,
    n=SIDES,
    k=st.integers(0, 30),
    batches=st.sampled_from([((), ()), ((3,), ()), ((2, 1), (3,)), ((1,), (2, 2))]),
    how=st.tuples(HOW, HOW, HOW),
    trans=st.tuples(st.sampled_from("NTCR"), st.sampled_from("NTCR")),
    alpha=st.complex_numbers(max_magnitude=4, allow_subnormal=False),
    beta=st.sampled_from([0, 1, -0.5 + 1j]),
)
def test_any_problem(m, n, k, batches, how, trans, alpha, beta):
    a = (*batches[0], k, m) if trans[0] in "TC" else (*batches[0], m, k)
    b = (*batches[1], n, k) if trans[1] in "TC" else (*batches[1], k, n)
    options = {"trans_a": trans[0], "trans_b": trans[1], "alpha": alpha, "beta": beta}
    c = (m, n) if beta else None
    case = Gemm(a, b, c, strides=how[:2], out=how[2], options=options)
    check_gemm(ShimMachine(ShimLauncher(H200)), case)
