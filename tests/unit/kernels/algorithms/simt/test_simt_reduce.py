"""The fused reductions on the CPU shim: values, NaN, ties, orders of threads, orders of partials."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simt_cases import COMPLEX_KINDS, REAL_KINDS, REDUCE_CASES, Reduce, ShimMachine, check_reduce, random, run_reduce
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.errors import ParameterInvalid

H200, MI300X = KNOWN["H200"], KNOWN["MI300X"]


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(H200))


@pytest.mark.parametrize("case", REDUCE_CASES.values(), ids=REDUCE_CASES)
def test_every_case(machine, case):
    check_reduce(machine, case)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("spec", [H200, MI300X], ids=["warp32", "warp64"])
def test_reproducible_in_any_thread_order(spec, order):
    case = Reduce((3, 37, 21), (21, 19), COMPLEX_KINDS, axis=("m", "batch"))
    *_, expected = run_reduce(ShimMachine(ShimLauncher(H200)), case)
    *_, results = run_reduce(ShimMachine(ShimLauncher(spec, order=order)), case)
    for name in COMPLEX_KINDS:
        np.testing.assert_array_equal(results[name], expected[name])


@pytest.mark.parametrize("name", ["complex64 over m+batch", "float16 over n", "atomic sums", "returns c"])
def test_no_races_and_no_stray_accesses(name):
    check_reduce(ShimMachine(ShimLauncher(H200, checked=True)), REDUCE_CASES[name])


def test_long_grids_are_cut(machine):
    case = REDUCE_CASES["complex64 over n"]
    *_, whole = run_reduce(machine, case)
    launcher = ShimLauncher(H200, max_grid=5)
    *_, results = run_reduce(ShimMachine(launcher), case)
    assert launcher.launches.count("gemm_reduce") > 3
    for name in COMPLEX_KINDS:
        np.testing.assert_array_equal(results[name], whole[name])


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_and_ties_as_numpy(machine, dtype, axis):
    """Small integers tie everywhere; NaN sits before, at and behind the extremes, and alone fills a line."""
    values = np.random.default_rng(3).integers(-2, 3, (40, 23)).astype(dtype)
    values[[5, 30], 2] = np.nan
    values[39, 4], values[0, 6] = np.nan, np.nan
    values[:, 8] = np.nan
    a, b = values, np.eye(23, dtype=dtype)
    # NaN * 0 in the other columns of its row would spread: select columns by reading them one at a time.
    for column in (0, 2, 4, 6, 8, 11):
        picked = values[:, [column]]
        a, b = (picked, np.ones((1, 5), dtype)) if axis == "m" else (np.ones((5, 1), dtype), picked.T.copy())
        *_, results = run_reduce(machine, Reduce(a.shape, b.shape, REAL_KINDS, (dtype, dtype), (axis,)), (a, b))
        line = picked[:, 0]
        for name in ("max", "min", "argmax", "argmin"):
            np.testing.assert_array_equal(results[name], np.full(5, getattr(np, name)(line)))
        for name, function in (("absmax", np.max), ("absmin", np.min)):
            np.testing.assert_array_equal(results[name], np.full(5, function(np.abs(line))))
        np.testing.assert_array_equal(results["sum"], np.full(5, line.astype(np.float64).sum()))


def test_first_nan_of_complex_values(machine):
    column = random(4, "complex64", 50, 1)
    column[[17, 31], 0] = complex(np.nan, 0), complex(1, np.nan)
    case = Reduce((50, 1), (1, 3), ("absmax", "absmin", "argmax", "argmin"))
    *_, results = run_reduce(machine, case, (column, np.ones((1, 3), np.complex64)))
    np.testing.assert_array_equal(results["argmax"], [17] * 3)
    np.testing.assert_array_equal(results["argmin"], [17] * 3)
    assert np.isnan(results["absmax"]).all()
    assert np.isnan(results["absmin"]).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_all_infinite(machine, value):
    """The identities of max and min are infinities: a line of nothing else must still name its first element."""
    a, b = np.full((40, 1), value, np.float32), np.ones((1, 3), np.float32)
    *_, results = run_reduce(machine, Reduce(a.shape, b.shape, REAL_KINDS, ("float32", "float32")), (a, b))
    for name in ("argmax", "argmin"):
        np.testing.assert_array_equal(results[name], [0, 0, 0])
    for name in ("max", "min", "sum", "mean"):
        np.testing.assert_array_equal(results[name], np.full(3, value, np.float32))
    np.testing.assert_array_equal(results["absmin"], np.full(3, np.inf, np.float32))


def test_index_over_the_batch_counts_in_c_order(machine):
    values = np.zeros((2, 3, 20, 1), np.float32)
    values[1, 0, 13], values[1, 2, 4] = 7, 7
    b = np.ones((1, 2), np.float32)
    case = Reduce(values.shape, b.shape, ("argmax",), ("float32", "float32"), ("m", "batch"))
    *_, results = run_reduce(machine, case, (values, b))
    np.testing.assert_array_equal(results["argmax"], [values.argmax()] * 2)


def test_float16_reduces_in_float32(machine):
    """Sums pass 65504 and keep what float16 would round away; maxima are rounded at the end."""
    a = np.full((4000, 1), 33, np.float16)
    a[7] = 33.03125
    case = Reduce(a.shape, (1, 2), ("sum", "max"), ("float16", "float16"), options={"alpha": 1.25})
    *_, results = run_reduce(machine, case, (a, np.ones((1, 2), np.float16)))
    np.testing.assert_array_equal(results["sum"], np.full(2, 1.25 * (3999 * 33 + 33.03125), np.float32))
    np.testing.assert_array_equal(results["max"], np.full(2, np.float16(1.25 * 33.03125)))


def test_magnitude_does_not_overflow(machine):
    a = np.array([[3e30 + 4e30j], [1e30]], np.complex64)
    case = Reduce(a.shape, (1, 1), ("absmax", "argmax"))
    *_, results = run_reduce(machine, case, (a, np.ones((1, 1), np.complex64)))
    np.testing.assert_allclose(results["absmax"], [5e30], rtol=1e-6)
    np.testing.assert_array_equal(results["argmax"], [0])


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float16", {}),
        ("float32", {"compute": "fp64"}),
        ("complex64", {}),
        ("complex128", {"pre_op": "abs"}),
        ("float32", {"layout": "planar"}),
    ],
)
def test_partial_results_are_those_before_they_are_rounded(machine, dtype, options):
    complex_values = np.dtype(dtype).kind == "c" or "layout" in options
    kinds = tuple(name for name in (COMPLEX_KINDS if complex_values else REAL_KINDS) if name != "mean")
    case = Reduce((37, 21), (21, 19), kinds, (dtype, dtype), options=options)
    *_, whole = run_reduce(machine, case)
    problem, _, _, parts = run_reduce(machine, replace(case, options=options | {"partial": True}))
    extreme = np.finfo(problem.accumulate).dtype
    for name in kinds:
        expected = np.dtype(np.int64) if name.startswith("arg") else extreme
        if name in {"sum", "sumsq"}:
            expected = np.dtype(np.complex128 if whole[name].dtype.kind == "c" else np.float64)
        assert parts[name].dtype == expected, name
        np.testing.assert_array_equal(parts[name].astype(whole[name].dtype), whole[name], err_msg=name)
    rounded = parts["sum"].astype(whole["sum"].dtype)
    assert dtype == "complex128" or np.any(rounded != parts["sum"]), "nothing was rounded away"


def test_a_part_of_a_mean_is_a_sum(machine):
    with pytest.raises(ParameterInvalid, match="sum"):
        run_reduce(machine, Reduce((4, 4), (4, 4), ("mean",), options={"partial": True}))
