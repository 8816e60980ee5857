"""Which products are small, so that their sums are those of short runs."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels.algorithms.common.runs import is_cut, is_medium, is_small
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.routes import candidates, plan_gemm
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem


@pytest.mark.parametrize(
    ("batch", "m", "n", "small", "medium"),
    [
        (1, 97, 83, True, True),
        (1, 511, 512, True, True),
        (1, 512, 512, False, True),
        (1, 1, 100_000, True, True),
        (250, 32, 32, True, True),
        (300, 32, 32, False, True),
        (1, 768, 768, False, False),
        (600, 32, 32, False, False),
    ],
)
@pytest.mark.parametrize("reduces", [False, True])
def test_all_results_count(batch, m, n, small, medium, reduces):
    a, b = (Operand.contiguous((batch, *shape), np.dtype(np.complex64)) for shape in ((m, 131), (131, n)))
    problem = GemmReduceProblem.build(a, b, reduce=["sum"], axis=["n"]) if reduces else GemmProblem.build(a, b, None)
    assert (is_small(problem), is_medium(problem)) == (small, medium)


@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 768), ("complex64", 768), ("complex128", 1024), ("float64", 2048)]
)
def test_a_long_k_is_cut_of_larger_ones_in_double_precision(dtype, least):
    def cut(n, batch=1):
        a = Operand.contiguous((batch, n, n), np.dtype(dtype))
        return is_cut(GemmProblem.build(a, a, None))

    assert cut(least - 1)
    assert cut(256, 8)
    assert not cut(least)
    assert not cut(256, (least // 256) ** 2)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "tiny"),
    [
        ("complex64", 100, 131, True),
        ("complex64", 64, 2048, True),
        ("complex64", 64, 2049, False),
        ("complex64", 128, 131, False),
        ("float32", 9, 131, False),
    ],
)
def test_tiny_products_of_complex64_are_not_cut_into_float16_by_auto(dtype, n, k, tiny):
    a, b = (Operand.contiguous(shape, np.dtype(dtype)) for shape in ((n, k), (k, n)))
    taken = {each.arithmetic for each in candidates(GemmProblem.build(a, b, None), KNOWN["H200"])}
    assert ("3xfp16" not in taken) == tiny
    named = GemmProblem.build(a, b, None, config=GemmConfig(algorithm="wgmma"))
    assert plan_gemm(named, KNOWN["H200"]).algorithm == "wgmma"


@pytest.mark.parametrize(("n", "offered"), [(1024, False), (2047, False), (2048, True)])
def test_residues_of_float64_are_left_to_products_whose_k_no_blas_cuts(n, offered):
    a, b = (Operand.contiguous(shape, np.dtype("float64")) for shape in ((n, 16384), (16384, n)))
    taken = {each.algorithm for each in candidates(GemmProblem.build(a, b, None), KNOWN["H200"])}
    assert ("ozaki" in taken) == offered
    named = GemmProblem.build(a, b, None, compute="ozaki")
    assert plan_gemm(named, KNOWN["H200"]).algorithm == "ozaki"
