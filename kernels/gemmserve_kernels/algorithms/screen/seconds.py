"""Model of the time of extremes that are looked for in float16. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common.time_model import ITEMSIZE, MEASURED_SMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.algorithms.common.time_model import Point
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_CANDIDATES: Final = 1.5
"""Elements of a row that are made in double: 1.1 to 1.3 of normal data, 1.5 of numbers of one sign (k = 512)."""
_SECTOR: Final = 32
"""Bytes that come from memory for a number whose neighbours along k are far away."""
_LINES_RATE: Final = 2.7e12
"""Bytes a second of operands read and rounded lines written."""
_SCORES_RATE: Final = 1.7e12
"""Bytes a second of the float16 product, written and looked through."""
_MADE_RATE: Final = 5.4e12
"""Bytes a second of what elements in double are made of: each row once, and a column for each."""
_NUMBER_S: Final = 1.33e-8
"""Seconds of a number of a row of the product: a row is looked through by one warp, however few rows there are."""
_LAUNCHES_S: Final = 2e-5
"""Seconds of launches, and of the full product and its results where no row asks for them."""
_DOUBT: Final = {1: 1.12, 2: 1.2}
"""Factors, by real parts of a number, for what the fit misses: it expects too little of some sizes."""


def screen_seconds(problem: GemmReduceProblem, spec: DeviceSpec, product: Callable[[Point], float]) -> float:
    """Return the seconds of `problem`; `product`: those of one of float16 of a shape (batch, m, n, k)."""
    parts = 2 if problem.dtype.kind == "c" else 1
    rows, extent = (problem.n, problem.m) if problem.over_rows else (problem.m, problem.n)
    batch, k = problem.batch, problem.k
    scale = spec.sm_count / MEASURED_SMS
    itemsize = ITEMSIZE[problem.dtype.name]
    lines = batch * k * (itemsize * (rows + extent) + 2 * parts * (parts * rows + extent))
    scores = 2 * parts * batch * rows * extent
    made = batch * rows * k * (itemsize + _CANDIDATES * _fetched(problem))
    seconds = (lines / _LINES_RATE + scores / _SCORES_RATE + made / _MADE_RATE) / scale
    seconds += parts * extent * _NUMBER_S + _LAUNCHES_S
    return _DOUBT[parts] * (seconds + product((batch, parts * rows, extent, parts * k)))


def _fetched(problem: GemmReduceProblem) -> int:
    """Return the bytes that come from memory for an element of a column of what is turned so that rows are reduced."""
    if problem.over_rows:
        operand, along = problem.a, problem.trans_a in {"N", "R"}
    else:
        operand, along = problem.b, problem.trans_b in {"T", "C"}
    step, itemsize = abs(operand.strides[-1 if along else -2]), operand.dtype.itemsize
    return (2 if problem.planar else 1) * max(itemsize, min(step * itemsize, _SECTOR))
