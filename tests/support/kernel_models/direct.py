"""Model of `gemm` on float16 operands in NumPy: the float32 sums, before alpha, beta and rounding to float16."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmserve_kernels.numerics import models

Array = np.ndarray[Any, Any]


def product(a: Array, b: Array, promote: int = 0, *, unit: models.MatrixUnit = models.HOPPER) -> Array:
    """A B of float16 (m, k) and (k, n) in float32, as the matrix instruction adds it up.

    Partial sums are promoted every `promote` steps of k; 0 where the tensor core accumulates alone. k is not split.
    """
    x, y = (np.ascontiguousarray(each, np.float32) for each in (a, b))
    if not promote:
        return np.asarray(models.chain([(x, y)], unit.fp16, unit), np.float32)
    sums = models.promoted([[(1, [[(x, y)]])]], x.shape[1], promote, unit.fp16, unit)
    return models.restored(sums, models.accumulations(promote))
