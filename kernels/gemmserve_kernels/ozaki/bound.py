"""Which products of double precision residues may make: a bound of every element, by counting. Pure.

The promise is one of elements: |D - R|_ij is small beside (|A| |B|)_ij, real and imaginary part each. Scaled lines x
(rows of op(A)) and y (columns of op(B)), each of `parts` real parts, have Euclidean norms of at most t =
`Moduli.target` and are rounded to integers; all that follows is exact but for one rounding of the result. Scaling
rounds every element by 2^-53 of itself, integers by half a unit of the line's scale, which is what a line with one
large element loses its other elements to.

**Counting.** With c = GAMMA t / sqrt(parts k), let s(x) = sum_k min(|x_k|, c) / c for each real part, at most k. From
(1 - u)(1 - v) >= 0 for u, v in [0, 1] follows

    sum_k |x_k| |y_k| >= c^2 sum_k min(|x_k| / c, 1) min(|y_k| / c, 1) >= c^2 (s(x) + s(y) - k)          (1)

whatever lies where. The deficit of a line is the largest k - s(x) among its real parts that are not all zero (those
lose nothing, and nothing to others); a tile of lines i and columns j passes where the largest deficits of its lines
and of its columns add up to (1 - NU) k at most. Then every pair of parts that meet has sum_k |x_k| |y_k| >= NU' c^2 k =
NU' GAMMA^2 t^2 / parts =: m. (Kernels count in whole 64ths, at most k / 128 + 1/32 too much: NU' = NU - 1/128 - 1/(32
k).)

**What is lost.** Let d_k and e_k be what rounding to integers adds to x_k and y_k, at most 1/2. By Cauchy and Schwarz
|sum_k d_k y_k + x_k e_k + d_k e_k| <= sqrt(k) t + k / 4, so with (1)

    |D - R|_ij <= (3 + w) 2^-53 (|A| |B|)_ij  always,  w = 2^53 (sqrt(k) t + k / 4) / m                  (2)

where 3 are both scalings and the result. If roundings d_k, e_k are independent and symmetric (they are of no common
grid, unlike a line of equal elements), their sum has a standard deviation of at most t / sqrt(6), so that

    |D - R|_ij <= (3 + z r) 2^-53 (|A| |B|)_ij  but for a chance of 2 exp(-z^2 / 2),  r = 2^53 t / (m sqrt(6))   (3)

With 15 moduli (float64) r is 0.14, with 14 (complex128) 4 at worst and half as much where all parts have elements; on
normal data half of an element's size is found by (1), and errors are 0.1 to 1.5 units.

**What passes.** Normal, uniform, one-sided, QAM, steering-vector data and what has their rows and columns scaled, from k
= 128 on. Not so sparse rows, identities and gates (at least NU k terms must be large), heavy tails, elements that are
not finite, grading along k: their tiles are multiplied in double precision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from typing import Any

    from gemmserve_kernels.ozaki.moduli import Moduli

GAMMA: Final = 0.6
"""What counts as a whole element, over the root mean square of elements that fill the norm."""
NU: Final = 3 / 16
"""The least share of k of which both factors must be whole."""
WHOLE: Final = 64
"""Of a whole element in kernels; TALLY_WHOLE in cuda/ozaki/params.cuh."""
NEVER: Final = 1 << 30
"""The deficit of what is not finite, in 64ths."""
LINES: Final = 128
"""Lines that are judged together; JUDGED_LINES in cuda/common/judged.cuh."""
UNIT: Final = 2.0**-53


def whole(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """C, the scaled magnitude that counts as a whole element."""
    return GAMMA * moduli.target(k) / math.sqrt(k * (2 if complex_ else 1))


def limit(k: int) -> int:
    """What the deficits of a row and a column may add up to, in 64ths."""
    return math.floor((1 - NU) * WHOLE * k)


def least(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """M, what sum_k |x_k| |y_k| is at least for two real parts of lines that pass."""
    counted = NU - 1 / 128 - 1 / (32 * k)
    return counted * k * whole(moduli, k, complex_=complex_) ** 2


def worst(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """3 + w: the bound of |D - R| in units of 2^-53 (|A| |B|) that always holds."""
    lost = math.sqrt(k) * moduli.target(k) + k / 4
    return 3 + lost / (UNIT * least(moduli, k, complex_=complex_))


def deviation(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """R: the standard deviation, at most, of what independent roundings lose, in the same units."""
    return moduli.target(k) / math.sqrt(6) / (UNIT * least(moduli, k, complex_=complex_))


def deficits(parts: list[np.ndarray[Any, Any]], size: float) -> np.ndarray[Any, Any]:
    """Of lines of scaled real parts (lines, k), as the theorem has them: float64 (lines,).

    `size`: of a whole element.
    """
    k = parts[0].shape[1]
    found = np.zeros(len(parts[0]))
    for part in parts:
        sums = np.minimum(np.abs(part) / size, 1).sum(axis=1)
        found = np.maximum(found, np.where(part.any(axis=1), k - sums, 0))
    return found
