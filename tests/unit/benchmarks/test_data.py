"""Operands and oracles of the suite, by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_scripts import load

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.numerics.reference import errors, oracle_gemm

(data,) = load("data")
KINDS = ["normal", "positive", "wide", "graded", "ill-scaled"]


@pytest.mark.parametrize("init", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64", "complex128"])
def test_data_of_every_kind(init, dtype):
    case = Case(m=40, n=50, k=60, dtype=dtype, init=init, trans_a="T")
    found = data.operands(np, case)
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
        "a": ((60, 40), dtype),
        "b": ((60, 50), dtype),
    }
    a, b = found["a"].T.astype("c16"), found["b"].astype("c16")
    assert np.isfinite(a).all()
    if init == "positive":
        assert (a.real >= 0).all()
    if init == "wide":
        spread = np.ptp(np.frexp(np.abs(a[a != 0]))[1])
        assert spread >= (8 if dtype == "float16" else 20)
    if init == "graded":
        along = np.log2(np.abs(a).mean(axis=0)[-10:].mean() / np.abs(a).mean(axis=0)[:10].mean())
        across = np.log2(np.abs(b).mean(axis=1)[-10:].mean() / np.abs(b).mean(axis=1)[:10].mean())
        assert along == pytest.approx(-across, abs=2)
        assert along > (5 if dtype == "float16" else 30)
    if init == "ill-scaled":
        assert np.ptp(np.log2(np.abs(a).mean(axis=1))) > (4 if dtype == "float16" else 15)


CASES = [
    Case(m=30, n=20, k=40),
    Case(m=300, n=20, k=40, trans_a="C", trans_b="T"),
    Case(m=30, n=20, k=40, batch=3, alpha=2j, beta=-1),
    Case(m=20, n=20, k=20, batch=500, dtype="float32"),
    Case(m=30, n=20, k=40, layout="planar", trans_b="R"),
    Case(m=30, n=20, k=300, dtype="float64", init="wide"),
    Case(m=300, n=20, k=40, dtype="complex128", init="graded"),
    Case(m=30, n=20, k=40, batch=2, dtype="complex128", trans_a="C", init="ill-scaled"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_those_of_the_reference_on_the_host(case):
    arrays, problem = data.operands(np, case), case.problem()
    exact = oracle_gemm(problem, arrays["a"], arrays["b"], arrays.get("c"))
    wide = np.result_type(case.dtype, np.float64) if case.layout != "planar" else np.complex128
    d = exact.astype(np.complex64 if wide == np.complex128 and case.dtype == "complex64" else case.dtype)
    stored = np.stack([d.real, d.imag]) if case.layout == "planar" else d
    found, expected = data.Oracle(np, case, arrays).errors(stored), errors(d, exact)
    assert found.rel_fro == pytest.approx(expected.rel_fro, rel=0.2, abs=0)
    assert found.worst_row <= 1.01 * expected.worst_row
    assert found.rel_real == pytest.approx(expected.rel_real, rel=0.25, abs=0)
    assert found.checked == ("all" if case.m < 256 and case.batch * case.m < 4096 else found.checked)


def test_the_exact_product_has_twice_the_bits():
    case = Case(m=20, n=20, k=500, dtype="float64", init="wide")
    arrays = data.operands(np, case)
    exact = oracle_gemm(case.problem(), arrays["a"], arrays["b"])
    high, low = data.exact_product(np, arrays["a"], arrays["b"])
    assert (np.abs(high.astype(np.longdouble) + low - exact) <= 1e-18 * np.abs(exact)).all()
    plain = np.abs(arrays["a"] @ arrays["b"] - exact)
    assert plain.max() > 0


def test_an_element_that_was_not_written_shows():
    case = Case(m=300, n=20, k=40)
    arrays = data.operands(np, case)
    d = arrays["a"] @ arrays["b"]
    d[-1, 3] = np.nan
    found = data.Oracle(np, case, arrays).errors(d)
    assert np.isnan([found.rel_fro, found.worst_row]).all()


@pytest.mark.parametrize("reduce", [("sum",), ("absmax",), ("sum", "sumsq", "absmax")])
def test_reductions(reduce):
    case = Case(op="gemm_reduce", m=30, n=40, k=50, batch=10, reduce=reduce)
    arrays = data.operands(np, case)
    d = (arrays["a"] @ arrays["b"]).astype("c16")
    results = {"sum": d.sum(-2), "sumsq": (np.abs(d) ** 2).sum(-2), "absmax": np.abs(d).max(-2)}
    oracle = data.ReduceOracle(np, case, arrays)
    assert oracle.errors(results).rel_fro < 1e-5
    results[reduce[-1]] = 1.01 * results[reduce[-1]]
    assert oracle.errors(results).rel_fro == pytest.approx(0.01, rel=1e-2)
