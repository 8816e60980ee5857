"""Checks of a product's results: norms and elements, sampled outputs, and plain arithmetic where it is in doubt.

A product is checked by Freivalds' method: D x = alpha A (B x) + beta C x for random x, in double precision and O(n^2)
operations, which sees norms; and some hundred of its elements are computed again, each beside its own terms, for what
norms cannot see (`gemmserve_kernels.freivalds` has the statistics and their sources). Of a reduction a few outputs are
computed again. All are done where the arrays are: in host memory, or on a device that has operands and results. What
comes out is the relative error as the caller would measure it, and how much more it is than rounding would leave.

An error that plain arithmetic would not be expected to make is no proof: sums may cancel. So a doubtful product is
computed again in plain FP32 (FP64 for double precision), and checked by the same vectors, outputs and numbers that
choose elements. If that is much nearer in what was in doubt, the first result was wrong: it is thrown away and
reported. If it is not, the data are to blame, and nothing is.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels import GemmProblem, Operand
from gemmserve_kernels.device.interruption import pieces
from gemmserve_kernels.freivalds import Finding, freivalds_check, rounding
from gemmserve_kernels.freivalds.sampled_reductions import sampled_reduction_errors
from gemmserve_service.products import build, build_operation
from gemmserve_service.schemas import GemmParams, GemmReduceParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gemmserve_service.schemas import StepParams

    Params = StepParams
    Check = Callable[[Params, int], Finding]
    """The finding of the results that there are now, computed as it is told; the number chooses what is looked at."""

log = logging.getLogger(__name__)

_MARGIN: Final = 8.0
"""Multiple of the expected rounding above which a result is looked at again, which costs time and nothing else."""
_MUCH_NEARER: Final = 4.0
_PIECE: Final = 16 << 20  # bytes that are looked through between two moments at which a check can be interrupted


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a product, or on the worst of many."""

    residual: float | None = None
    """The relative error; None where it cannot be told."""
    mismatch: float | None = None
    """Relative error of a first result, which was wrong and is gone; None where there was none. Where the result was
    not even finite, the largest number that there is."""
    replaced: bool = False
    """Whether plain arithmetic has taken the first result's place, wrong or not: another way would not come to the same
    bits."""


def find(params: Params, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
    """Return what a check of these results finds, all arrays NumPy's or all CuPy's on the current device.

    Raises what a launch raises.
    """
    if not any(array.size for array in results.values()):  # of which there may be any number
        return Finding(0.0, 0.0)
    described = {name: Operand.of(array) for name, array in operands.items()}
    if not isinstance(params, GemmParams | GemmReduceParams):
        return build_operation(params, described).find(operands, results, seed)
    problem = build(params, described)
    if isinstance(problem, GemmProblem):
        return freivalds_check(problem, operands["a"], operands["b"], operands.get("c"), results["d"], seed)
    if problem.vanishes:  # to sample it would be to form columns of any length
        wrong = any(bool(piece.any()) for array in results.values() for piece in pieces(array, _PIECE))
        return Finding(math.inf, math.inf) if wrong else Finding(0.0, 0.0)
    with np.errstate(all="ignore"):
        errors = sampled_reduction_errors(
            problem, operands["a"], operands["b"], dict(results), np.random.default_rng(seed)
        )
    residual = _largest(errors.values())
    if math.isnan(residual) and all(_is_finite(operands[name]) for name in ("a", "b")):
        residual = math.inf  # nothing that went in explains it
    terms = problem.k * max(problem.extent, 1)
    return Finding(residual, residual / rounding(params.compute, problem.dtype, problem.accumulate, terms))


def _largest(errors: Iterable[float]) -> float:
    """Return the largest value; NaN where there is one."""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _is_finite(array: Any) -> bool:
    return all(bool(np.isfinite(piece).all()) for piece in pieces(array, _PIECE))


def find_on_device(params: Params, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
    """`find` for CuPy arrays: a few numbers come to the host. A name of its own, for stand-ins of a device."""
    return find(params, operands, results, seed)


def doubtful(found: Finding) -> bool:
    """Whether rounding alone would seldom make such errors. What cannot be judged is in no doubt."""
    return any(_in_doubt(found))


def _in_doubt(found: Finding) -> tuple[float, float]:
    """Excess of rows and of elements where it is in doubt; 0 where it is not."""
    rows, elements = found.excess, found.element.excess
    return rows if rows > _MARGIN else 0.0, elements if elements > _MARGIN else 0.0


def was_wrong(first: Finding, again: Finding) -> bool:
    """Whether the first result was wrong, given what was found of both: by what was in doubt of it. It is not where
    nothing can be told of the second.
    """
    rows, elements = _in_doubt(first)
    return rows > _MUCH_NEARER * again.excess or elements > _MUCH_NEARER * again.element.excess


def _error(found: Finding) -> float:
    """Return the error of a wrong result: the relative error of all of it, or of an element in doubt, the larger."""
    known = [found.residual, found.element.error if found.element.excess > _MARGIN else 0.0]
    error = max(each for each in known if not math.isnan(each))
    return min(error, float(np.finfo(np.float64).max))


def verdict(
    params: Params, operands: Mapping[str, Any], check: Check, compute: Callable[[Params], object], what: str
) -> Verdict:
    """Return the verdict on a product that has been computed. `compute` computes it again in place of the first, in the
    way it is told.
    """
    seed = secrets.randbits(64)
    found, mismatch = check(params, seed), None
    in_doubt = doubtful(found)
    if in_doubt:
        simple = plain(params, operands)
        compute(simple)
        again = check(simple, seed)
        if was_wrong(found, again):
            mismatch = _error(found)
            log.error(
                "%s was wrong by %.1e, plain arithmetic by %.1e; times what rounding leaves: rows %.1e, %.1e; elements "
                "%.1e, %.1e; product, row and column %s",
                what, found.residual, again.residual, found.excess, again.excess, found.element.excess,
                again.element.excess, found.element.place,
            )  # fmt: skip
        found = again
    return Verdict(found.residual if math.isfinite(found.residual) else None, mismatch, in_doubt)


def on_host(
    params: Params,
    operands: Mapping[str, np.ndarray[Any, Any]],
    results: Mapping[str, np.ndarray[Any, Any]],
    compute: Callable[[Params], object],
    what: str,
) -> Verdict:
    """`verdict` of a product in host memory."""
    return verdict(params, operands, lambda chosen, seed: find(chosen, operands, results, seed), compute, what)


def on_device(
    params: Params,
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
    compute: Callable[[Params], object],
    what: str,
) -> Verdict:
    """`verdict` of a product on the current device, which has done it by then. Raises what a launch raises."""

    def check(chosen: Params, seed: int) -> Finding:
        return find_on_device(chosen, operands, results, seed)

    return verdict(params, operands, check, compute, what)


def plain(params: Params, operands: Mapping[str, Any]) -> Any:
    """Return the params of the same product in plain arithmetic; of other operations, which have one way, the same."""
    if not isinstance(params, GemmParams | GemmReduceParams):
        return params
    wide = any(array.dtype in (np.float64, np.complex128) for array in operands.values())
    return params.model_copy(update={"compute": "fp64" if wide else "fp32", "config": None})


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict on many products in one answer: the largest of either."""
    return Verdict(
        max((each.residual for each in verdicts if each.residual is not None), default=None),
        max((each.mismatch for each in verdicts if each.mismatch is not None), default=None),
        any(each.replaced for each in verdicts),
    )
