"""Model of the time of extremes that are looked for in float16. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common.time_model import BANDWIDTH, ITEMSIZE, LAUNCH_S, MEASURED_SMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.algorithms.common.time_model import Point
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmReduceProblem

_LAUNCHES: Final = 6
"""Beside the product's: both operands, rows, the full product that nobody needs, partials."""
_CANDIDATES: Final = 1.5
"""Elements of a row that are made in double: 1.1 to 1.3 of normal data, 1.5 of numbers of one sign (k = 512)."""
_SECTOR: Final = 32
"""Bytes that an element of a column takes where columns do not lie together."""
_CACHED: Final = 5e12
"""Bytes a second of the second-level cache, about."""
_DOUBT: Final = 1.25
"""Factor for want of a measurement."""


def screen_seconds(problem: GemmReduceProblem, spec: DeviceSpec, product: Callable[[Point], float]) -> float:
    """Return the seconds of `problem`; `product`: those of one of float16 of a shape (batch, m, n, k)."""
    parts = 2 if problem.dtype.kind == "c" else 1
    rows, extent = (problem.n, problem.m) if problem.over_rows else (problem.m, problem.n)
    batch, k = problem.batch, problem.k
    scale = spec.sm_count / MEASURED_SMS
    itemsize = ITEMSIZE[problem.dtype.name]
    lines = batch * k * (itemsize * (rows + extent) + 2 * parts * (parts * rows + extent))
    scores = 2 * parts * batch * rows * extent
    made = _CANDIDATES * batch * rows * k * (itemsize + _SECTOR)
    seconds = _LAUNCHES * LAUNCH_S + (lines + scores) / (BANDWIDTH * scale) + made / (_CACHED * scale)
    return _DOUBT * (seconds + product((batch, parts * rows, extent, parts * k)))
