"""Are the results of a product right? Freivalds' check, sampled outputs, and plain arithmetic where it is in doubt.

A product is checked by Freivalds' method (R. Freivalds, "Probabilistic machines can use less running time", IFIP
Congress 1977): D x = alpha A (B x) + beta C x for random x, in double precision and O(n^2) operations; of a reduction a
few outputs are computed again. What comes out is the relative error as the caller would measure it.

An error that plain arithmetic would not be expected to make is no proof: sums may cancel. So a doubtful product is
computed again in plain FP32 (FP64 for double precision). If that is much nearer, the first result was wrong: it is
thrown away and reported. If it is not, the data are to blame, and nothing is.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels import GemmProblem, Operand
from gemmserve_kernels.operand import real_dtype
from gemmserve_kernels.reference import freivalds, sampled_reduction_errors
from gemmserve_service.operations import build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve_service.schemas import GemmParams, GemmReduceParams

log = logging.getLogger(__name__)

# Rounding errors of random data grow with the square root of k (Higham, Accuracy and Stability of Numerical Algorithms,
# 2.8); what exceeds that several times is looked at again, which costs time and nothing else.
_MARGIN: Final = 8.0
_INPUT_ROUNDING: Final = {"tf32": 2.0**-11, "1xtf32": 2.0**-11}
_MUCH_NEARER: Final = 4.0


def residual(
    params: GemmParams | GemmReduceParams, operands: Mapping[str, np.ndarray[Any, Any]], results: Mapping[str, Any]
) -> float:
    """The relative error that the check finds; NaN where data are not finite, which it then cannot judge."""
    problem = build(params, {name: Operand.of(array) for name, array in operands.items()})
    rng = np.random.default_rng()
    with np.errstate(all="ignore"):
        if isinstance(problem, GemmProblem):
            return float(freivalds(problem, operands["a"], operands["b"], operands.get("c"), results["d"], rng))
        errors = sampled_reduction_errors(problem, operands["a"], operands["b"], dict(results), rng)
        return max(errors.values(), default=0.0)


def doubtful(params: GemmParams | GemmReduceParams, operands: Mapping[str, np.ndarray[Any, Any]], found: float) -> bool:
    """Whether rounding alone would seldom make such an error."""
    if math.isnan(found):
        return False
    problem = build(params, {name: Operand.of(array) for name, array in operands.items()})
    arithmetic = float(np.finfo(real_dtype(problem.accumulate)).eps)
    stored = float(np.finfo(real_dtype(problem.dtype)).eps)
    terms = problem.k if isinstance(problem, GemmProblem) else problem.k * max(problem.extent, 1)
    expected = (math.sqrt(terms) + 8) * arithmetic + stored + 2 * _INPUT_ROUNDING.get(params.compute, 0.0)
    return found > _MARGIN * expected


def verdict(
    params: GemmParams | GemmReduceParams,
    operands: Mapping[str, np.ndarray[Any, Any]],
    results: Callable[[], Mapping[str, np.ndarray[Any, Any]]],
    compute: Callable[[GemmParams | GemmReduceParams], object],
    what: str,
) -> tuple[float | None, float | None]:
    """The residual of a product (None where it cannot be judged), and that of a first result that was wrong.

    `compute` computes it again in place of the first, in the way it is told; `results` are those of then.
    """
    found, mismatch = residual(params, operands, results()), None
    if doubtful(params, operands, found):
        simple = plain(params, operands)
        compute(simple)
        again = residual(simple, operands, results())
        if was_wrong(found, again):
            log.error("%s was wrong by %.1e, plain arithmetic by %.1e", what, found, again)
            mismatch = found
        found = again
    return None if math.isnan(found) else found, mismatch


def plain(params: GemmParams | GemmReduceParams, operands: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """The same product in plain arithmetic."""
    wide = any(array.dtype in (np.float64, np.complex128) for array in operands.values())
    return params.model_copy(update={"compute": "fp64" if wide else "fp32", "config": None})


def was_wrong(first: float, again: float) -> bool:
    """Whether the first result was wrong, given the errors of both."""
    return first > _MUCH_NEARER * again
