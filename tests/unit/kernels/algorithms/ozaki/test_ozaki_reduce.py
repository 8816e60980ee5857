"""Reductions of products by residues, on the CPU shim: every kind, axis, layout; the product's bits, panel by panel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, build, check_exact, exact, run
from simt_cases import ShimMachine, assert_reduced, random, strided
from simt_shim import ShimLauncher

from gemmserve_kernels.algorithms.common import panels
from gemmserve_kernels.algorithms.ozaki import gemm, gemm_reduce
from gemmserve_kernels.algorithms.ozaki.plan import OzakiTile
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.problem import GemmProblem, Operand

PLAIN = OzakiTile(15, plain=True)
AXES = pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)


def machine():
    return ShimMachine(ShimLauncher(replace(KNOWN["H200"], sm_count=3), optimize="-O2"))


def check(a, b, **options):
    problem, results = run(machine(), gemm_reduce.run_gemm_reduce, a, b, config=PLAIN, **options)
    assert_reduced(problem, a, b, results)
    return results


@AXES
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_every_reduction(dtype, axis):
    a, b = random(1, dtype, 2, 15, 130), random(2, dtype, 2, 130, 21)
    check(a, b, reduce=list(COMPLEX if dtype == "complex128" else REAL), axis=axis, alpha=-2)


@pytest.mark.parametrize("trans", ["TT", "CR", "RN", "NC"])
@pytest.mark.parametrize("axis", ["m", "n"])
def test_operations(trans, axis):
    a = random(1, "complex128", *((20, 130) if trans[0] in "NR" else (130, 20)))
    b = random(2, "complex128", *((130, 25) if trans[1] in "NR" else (25, 130)))
    check(a, b, reduce=["sum", "argmin"], axis=axis, trans_a=trans[0], trans_b=trans[1], pre_op="square")


@pytest.mark.parametrize("axis", ["m", "n"])
def test_operations_on_planes(axis):
    a, b = random(1, "float64", 2, 3, 130, 20), random(2, "float64", 2, 3, 24, 130)
    check(a, b, reduce=["sum", "absmin", "sumsq"], axis=axis, trans_a="C", trans_b="T", layout="planar")


@AXES
def test_panels_change_no_bit(monkeypatch, axis):
    a, b = (
        strided(random(seed, "float64", *shape), "offset") for seed, shape in ((1, (2, 260, 130)), (2, (2, 130, 258)))
    )
    names = ["sum", "argmax"]
    whole = check(a, b, reduce=names, axis=axis)
    monkeypatch.setattr(panels, "PANEL", 530_000)
    parts = check(a, b, reduce=names, axis=axis)
    for name in names:
        np.testing.assert_array_equal(whole[name], parts[name])


def test_panels_of_matrices_and_of_rows(monkeypatch):
    def cut(*shape, axis="n"):
        batch, m, n = shape
        a, b = np.zeros((batch, m, 130)), np.zeros((batch, 130, n))
        return list(panels.Panels.of(build(a, b, reduce="sum", axis=axis), 8))

    monkeypatch.setattr(panels, "PANEL", 650_000)
    assert cut(3, 300, 290) == [(i, 1, row, rows) for i in range(3) for row, rows in ((0, 256), (256, 44))]
    assert cut(5, 100, 200) == [(0, 4, 0, 100), (4, 1, 0, 100)]
    assert cut(5, 400, 50, axis="m") == [(0, 4, 0, 50), (4, 1, 0, 50)]


def test_a_batch_that_repeats(monkeypatch):
    monkeypatch.setattr(panels, "PANEL", 20_000)
    a, b = random(1, "float64", 3, 1, 20, 130), random(2, "float64", 2, 130, 30)
    check(a, b, reduce=["max", "sum"], axis=["m", "batch"])
    check(a, b, reduce=["max", "sum"], axis="n")
    check(a[:, 0], b[0], reduce="absmin", axis="n")


def test_sums_without_an_order_have_one():
    a, b = random(1, "float64", 3, 20, 130), random(2, "float64", 3, 130, 30)
    check(a, b, reduce=["sum", "sumsq", "max"], axis=["n", "batch"], reproducible=False)


def test_what_is_reduced_are_the_products_bits():
    on, a, b = machine(), random(1, "float64", 70, 300), random(2, "float64", 300, 41)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    out = on.put(np.empty((70, 41)))
    gemm.run_gemm(on.launcher, problem, PLAIN, on.put(a), on.put(b), None, out)
    results = check(a, b, reduce=["max", "min"], axis="n")
    np.testing.assert_array_equal(results["max"], on.get(out).max(1))
    np.testing.assert_array_equal(results["min"], on.get(out).min(1))


def test_ties_and_what_is_not_finite():
    a, b = exact(1, "float64", 70, 130), exact(2, "float64", 130, 66)
    b[:, 3], b[0, 7], b[2, 40] = -np.inf, np.nan, np.inf
    a[:, :] = np.abs(a) + 1
    b[:, 50:60] = b[:, 50:51]
    with np.errstate(invalid="ignore"):
        names = ["max", "min", "argmax", "argmin"]
        check_exact(machine(), gemm_reduce.run_gemm_reduce, a, b, config=PLAIN, reduce=names)


def test_what_it_refuses():
    a, b = random(1, "float64", 80, 130), random(2, "float64", 130, 80)

    def reason(a=a, b=b, spec=KNOWN["H200"], **options):
        return gemm_reduce.supports(build(a, b, **{"reduce": "sumsq"} | options), spec)

    assert reason() is None
    assert "returned" in reason(return_c=True)
    assert "float32" in reason(a.astype("f4"), b.astype("f4"))
    assert "k = 128" in reason(a[:, :100], b[:100])
    assert "9.0" in reason(spec=KNOWN["A100"])
