"""Plans are remembered, errors and unhashable arguments are not."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels import GemmProblem, Operand, ParameterInvalid, gemm
from gemmserve_kernels.device.caching import cached

A = Operand.contiguous((3, 3), "float32")


def test_the_same_job_is_planned_once():
    assert cached(GemmProblem.build, A, A, alpha=2) is cached(GemmProblem.build, A, A, alpha=2)
    assert cached(GemmProblem.build, A, A, alpha=2) is not cached(GemmProblem.build, A, A, alpha=3)


def test_unhashable_arguments_work_or_are_refused_by_the_function():
    assert gemm(np.ones((1, 1)), np.ones((1, 1)), alpha=np.array(2.0))[0, 0] == 2
    with pytest.raises(ParameterInvalid, match="alpha"):
        cached(GemmProblem.build, A, A, alpha=[1])


def test_errors_are_raised_each_time():
    for _ in range(2):
        with pytest.raises(ParameterInvalid):
            cached(GemmProblem.build, A, A, alpha=float("nan"))


def test_errors_inside_are_not_swallowed():
    def fails():
        raise TypeError("inside")

    with pytest.raises(TypeError, match="inside"):
        cached(fails)
