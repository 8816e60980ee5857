"""Random signs from a counter: the same on the host and on a device, for any seed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint

VECTORS: Final = 4
"""Vectors of a check. VECTORS in cuda/freivalds/freivalds.cu and freivalds_judge.cu."""

_TOGETHER: Final = 1 << 16
"""Rows of signs that are made at once: what stays in a processor's cache."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


def random_bits(seed: int, index: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Numbers `index` (integers, any shape) of the generator SplitMix64 whose state is `seed`, 64 bits each.

    G. L. Steele Jr., D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants as
    in S. Vigna's splitmix64.c (public domain).
    """
    bits = np.uint64(seed) + (index.astype(np.uint64) + np.uint64(1)) * _STEP
    for shift, factor in _MIX:
        bits = (bits ^ (bits >> np.uint64(shift))) * factor
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def signs(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(count, VECTORS) of 1 and -1: sign v of row j is bit v of number j."""
    found = np.empty((count, VECTORS))
    for start in range(0, count, _TOGETHER):
        checkpoint()
        bits = random_bits(seed, np.arange(start, min(start + _TOGETHER, count)))
        chosen = bits[:, None] >> np.arange(VECTORS, dtype=np.uint64) & np.uint64(1)
        found[start : start + len(bits)] = np.where(chosen, -1.0, 1.0)
    return found
