"""Which products are small, so that their sums are those of short runs."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels.algorithms.common.runs import is_medium, is_small
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem


@pytest.mark.parametrize(
    ("batch", "m", "n", "small", "medium"),
    [
        (1, 97, 83, True, True),
        (1, 384, 384, False, True),
        (1, 1, 100_000, True, True),
        (200, 32, 32, False, True),
        (1, 768, 768, False, False),
        (600, 32, 32, False, False),
    ],
)
@pytest.mark.parametrize("reduces", [False, True])
def test_all_results_count(batch, m, n, small, medium, reduces):
    a, b = (Operand.contiguous((batch, *shape), np.dtype(np.complex64)) for shape in ((m, 131), (131, n)))
    problem = GemmReduceProblem.build(a, b, reduce=["sum"], axis=["n"]) if reduces else GemmProblem.build(a, b, None)
    assert (is_small(problem), is_medium(problem)) == (small, medium)
