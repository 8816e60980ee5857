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
_LINES_RATE: Final = 3e12
"""Bytes a second of operands read and rounded lines written."""
_SCORES_RATE: Final = 2.5e12
"""Bytes a second of the float16 product, which is looked through."""
_MADE_RATE: Final = 5e12
"""Bytes a second of what elements in double are made of: each row once, and a column for each."""
_STEP_S: Final = 1e-8
"""Seconds of a step of k: elements are made by one warp each, which waits for its loads."""
_LAUNCHES_S: Final = 1.5e-5
"""Seconds of launches, and of the full product and its results where no row asks for them."""
_DOUBT: Final = 1.1
"""Factor for what the fit misses."""


def screen_seconds(problem: GemmReduceProblem, spec: DeviceSpec, product: Callable[[Point], float]) -> float:
    """Return the seconds of `problem`; `product`: those of one of float16 of a shape (batch, m, n, k)."""
    parts = 2 if problem.dtype.kind == "c" else 1
    rows, extent = (problem.n, problem.m) if problem.over_rows else (problem.m, problem.n)
    batch, k = problem.batch, problem.k
    scale = spec.sm_count / MEASURED_SMS
    itemsize = ITEMSIZE[problem.dtype.name]
    lines = batch * k * (itemsize * (rows + extent) + 2 * parts * (parts * rows + extent))
    scores = 2 * parts * batch * rows * extent
    made = (1 + _CANDIDATES) * batch * rows * k * itemsize
    seconds = (lines / _LINES_RATE + scores / _SCORES_RATE + made / _MADE_RATE) / scale
    seconds += k * _STEP_S + _LAUNCHES_S
    return _DOUBT * (seconds + product((batch, parts * rows, extent, parts * k)))
