"""Findings of Freivalds' check, and what rounding alone would let it find. Pure.

The check takes random vectors x of signs and forms r = D x - (alpha op(A) op(B) x + beta C x) in double precision
(R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977). For independent signs the mean
square of r_i is the sum of squares of row i of D's error, so norms of r estimate norms of the error (M. F. Hutchinson,
"A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines", Commun. Stat. Simul.
Comput. 19 (1990)).

Two numbers come of it. The *residual* is the relative Frobenius error as a caller would measure it; where sums cancel,
it is large in any arithmetic. So that is not what decides: the *excess* is the worst row's error, relative to

    size_i^2 = |alpha|^2 sum_l |op(A)_il|^2 sum_j |op(B)_lj|^2 + |beta|^2 sum_j |C_ij|^2 + sum_j |D_ij|^2

and in units of the relative error that rounding would leave. The first term is what the row's sum of squares would be
if its terms had random signs: rounding errors are proportional to the terms and not to their sum, and to the partial
sums, which the last term stands for where all terms have one sign. All are sums of squares that the same pass over the
elements gives, without a product, and none is random: no chance makes the divisor small. By rows, since a wrong element
is n^(1/2) times more of its row than it is of a matrix of n rows.

How it grows with k: rounding errors of random data grow with the square root of k (N. J. Higham, Accuracy and Stability
of Numerical Algorithms, 2nd ed., 2.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from gemmserve_kernels.problem.problem import GemmProblem

INPUT_ROUNDING: Final = {"tf32": 2.0**-11, "1xtf32": 2.0**-11}
"""Relative error of rounding an input where a mode rounds it."""
_TOGETHER: Final = 1 << 17
"""Products whose figures are looked through at once."""


@dataclass(frozen=True)
class Element:
    """The worst of the elements that were looked at. NaN where none could be judged."""

    excess: float
    """Its error in units of what rounding would leave; infinity where it is not finite though it could be, or finite
    though it cannot be."""
    error: float
    """Its error relative to |alpha| (|A| |B|)_ij + |beta| |C_ij|."""
    place: tuple[int, int, int] | None
    """The product in the batch, its row and its column."""


NOTHING: Final = Element(0.0, 0.0, None)


@dataclass(frozen=True)
class Finding:
    """Finding of a check. NaN where data are not finite, so that nothing can be told; infinity where the result is not
    finite though it could be, which overflow explains or nothing does.
    """

    residual: float
    """Relative Frobenius error, estimated."""
    excess: float
    """The worst row's error in units of what rounding would leave."""
    element: Element = NOTHING
    """The worst of the elements that were computed again (`sampled`)."""


def rounding(compute: str, dtype: np.dtype[Any], accumulate: np.dtype[Any], terms: int) -> float:
    """The relative error that rounding may leave in sums of `terms` products, stored as `dtype`."""
    arithmetic = float(np.finfo(real_dtype(accumulate)).eps)
    stored = float(np.finfo(real_dtype(dtype)).eps)
    return (math.sqrt(terms) + 8) * arithmetic + stored + 2 * INPUT_ROUNDING.get(compute, 0.0)


def unit_of(problem: GemmProblem) -> float:
    """`rounding` of a product's elements."""
    return rounding(problem.compute, problem.dtype, problem.accumulate, problem.k)


def tiny_of(problem: GemmProblem) -> float:
    """The absolute error that rounding may leave in an element: subnormal numbers have one, or, where accumulated, are
    taken for zero.
    """
    accumulate, stored = (np.finfo(real_dtype(dtype)) for dtype in (problem.accumulate, problem.dtype))
    alpha = abs(problem.alpha.real) + abs(problem.alpha.imag)
    return float(accumulate.tiny) * (2 * problem.k + 8) * max(1.0, alpha) + float(stored.smallest_subnormal)


def floor_of(problem: GemmProblem) -> float:
    """Return the term that `tiny_of` adds to a row's squared size."""
    return problem.n * (tiny_of(problem) / unit_of(problem)) ** 2


def judged(problem: GemmProblem, figures: np.ndarray[Any, Any]) -> Finding:
    """The finding of (products, parts of their rows, 3) figures: of the rows' squared errors the sum, of the squares of
    what was expected the sum, and of squared errors over squared sizes the largest.

    Products that cannot be judged do not count where others can.
    """
    error = expected = 0.0
    largest = math.nan
    for start in range(0, len(figures), _TOGETHER):
        checkpoint()
        some = figures[start : start + _TOGETHER]
        worst = some[..., 2].max(axis=-1, initial=0.0)  # NaN wins
        known = ~np.isnan(worst)
        if known.any():
            error, expected = error + float(some[known, :, 0].sum()), expected + float(some[known, :, 1].sum())
            largest = max(float(worst[known].max()), 0.0 if math.isnan(largest) else largest)
    if math.isnan(largest):
        return Finding(math.nan, math.nan) if len(figures) else Finding(0.0, 0.0)
    share = error / expected if expected else math.inf
    residual = math.sqrt(share) if error else 0.0
    return Finding(residual, math.sqrt(largest) / unit_of(problem))
