"""Model of the time of sums of squares by way of Gram matrices. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common.time_model import (
    BANDWIDTH,
    ITEMSIZE,
    LAUNCH_S,
    MEASURED_SMS,
    MODELS,
    occupancy,
)
from gemmserve_kernels.device.spec import DOUBLE_SPEED

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.time_model import Point
    from gemmserve_kernels.device.spec import DeviceSpec

_RATE: Final = 3.5e13
"""Operations a second of Gram matrices on an H200's matrix units: two thirds of what cuBLAS reaches there in double,
for want of a measurement."""
_LAUNCHES: Final = 5


def gram_seconds(spec: DeviceSpec, dtype: str, shape: Point, matrices: int, elements: float, parts: int) -> float:
    """Seconds of sums of squares over m of products of `shape` by way of Gram matrices; inf where nothing is known.

    `matrices`: different ones of A in the batch. `elements`: of each Gram matrix that are made. `parts`: blocks for
    each of them.
    """
    speed = DOUBLE_SPEED.get(spec.arch, 0.0)
    if speed == 0.0:
        return math.inf
    batch, m, n, k = shape
    scale = spec.sm_count / MEASURED_SMS
    complexity, wide = (8, "complex128") if dtype.startswith("complex") else (2, "float64")
    made_s = complexity * matrices * m * elements / (_RATE * scale * speed * occupancy(spec, matrices * parts))
    # Half of each matrix is multiplied, and the squares on its diagonal.
    model = MODELS["simt", "plain", wide]
    rows, columns = (math.ceil(extent / model.tile) * model.tile for extent in (k, n))
    forms = complexity * batch * columns * rows * (rows + model.tile) / 2
    forms_s = forms / (model.rate * scale * speed * occupancy(spec, batch * columns // model.tile))
    memory_s = ITEMSIZE[dtype] * (matrices * m * k + batch * k * n) / (BANDWIDTH * scale)
    return _LAUNCHES * LAUNCH_S + max(made_s + forms_s, memory_s)
