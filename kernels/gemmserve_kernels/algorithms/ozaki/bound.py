"""Bound that decides which products of double precision residues may make: one of every element, by counting. Pure.

The promise is one of elements: |D - R|_ij is small beside (|A| |B|)_ij, real and imaginary part each. Scaled lines x
(rows of op(A)) and y (columns of op(B)), each of `parts` real parts, have Euclidean norms of at most t =
`Moduli.target` and are rounded to integers; all that follows is exact but for one rounding of the result. Scaling
rounds every element by 2^-53 of itself, integers by half a unit of the line's scale, which is what a line with one
large element loses its other elements to.

**Counting.** With c = GAMMA t / sqrt(parts k), let s(x) = sum_k min(|x_k|, c) / c for each real part, at most k. From
(1 - u)(1 - v) >= 0 for u, v in [0, 1] follows, whatever lies where,

    sum_k |x_k| |y_k| >= c^2 sum_k min(|x_k| / c, 1) min(|y_k| / c, 1) >= c^2 (s(x) + s(y) - k)          (1)

The deficit of a real part is k - s; parts that are all zero lose nothing, and nothing to others. A part of x and one of
y whose deficits add up to (1 - NU) k at most have sum_k |x_k| |y_k| >= NU' c^2 k = NU' GAMMA^2 t^2 / parts =: m.
(Kernels count in whole 64ths, at most k / 128 + 1/32 too much for two lines: NU' = NU - 1/128 - 1 / (32 k).) A tile
passes where one of these holds for all of its rows and columns, and for either of real and imaginary part of D:

    - all pairs of parts that are not zero have such deficits: `most` of rows and of columns add up to (1 - NU) k;
    - both parts of the rows (`both`) have, each with the better part of the columns (`better`); or vice versa.

**Before counting.** min(|x_k|, c) <= |x_k|: s is at most the sum of a part's magnitudes over c, and its deficit at
least what that leaves of k. A group whose lines so lack more, with the best group of the other side, than a tile may
lack has no tile that passes; it is neither scaled nor converted. Kernels count 1/64 at least for every four neighbours
that are not all zero, at most k / 4 of k 64ths in all, and bounds leave room for that: what they tell of is told by
counting too, and no bit of a result depends on whether they were looked at.

**What is lost.** Let d_k and e_k be what rounding to integers adds to x_k and y_k, at most 1/2. By Cauchy and Schwarz
sum_k |d_k y_k + x_k e_k + d_k e_k|, over the pairs that make a part of D, is at most sqrt(parts k) t + parts k / 4, so

    |D - R|_ij <= (3 + w) 2^-53 (|A| |B|)_ij  always,  w = 2^53 (sqrt(parts k) t + parts k / 4) / m          (2)

where 3 are both scalings and the result. If roundings d_k, e_k are independent and symmetric (unlike those of a line of
equal elements), their sum has a standard deviation of at most t / sqrt(6), so that

    |D - R|_ij <= (3 + z r) 2^-53 (|A| |B|)_ij  but for a chance of 2 exp(-z^2 / 2),  r = 2^53 t / (m sqrt(6))    (3)

With 15 moduli (float64) r is 0.15, with 14 (complex128) 4.2 at worst, half of that where all pairs have such deficits.
On normal data (1) finds a third of what there is, and errors are 0.1 to 1 units.

**What passes.** Normal, uniform, one-sided, QAM, steering-vector data and what has their rows and columns scaled, from
k = 128 on. Not so sparse rows, identities and gates (a share of NU of the terms must be large), heavy tails, elements
that are not finite, grading along k: their tiles are multiplied in double precision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from typing import Any

    from gemmserve_kernels.algorithms.ozaki.moduli import Moduli

GAMMA: Final = 0.6
"""Size of a whole element, over the root mean square of elements that fill the norm."""
NU: Final = 3 / 16
"""The least share of k of which both factors must be whole."""
WHOLE: Final = 64
"""Weight of a whole element in kernels; TALLY_WHOLE in cuda/ozaki/params.cuh."""
NEVER: Final = 1 << 30
"""The deficit of what is not finite, in 64ths."""
WORDS: Final = 3
"""Deficits of a group of lines: `most`, `both`, `better`."""
QUARTERS: Final = 4
"""Words of a group of what its lines lack at least by their norms: each of a quarter of its lines."""
LINES: Final = 128
"""Lines that are judged together; JUDGED_LINES in cuda/common/judging/judged.cuh."""
UNIT: Final = 2.0**-53


def whole(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """C, the scaled magnitude that counts as a whole element."""
    return GAMMA * moduli.target(k) / math.sqrt(k * (2 if complex_ else 1))


def limit(k: int) -> int:
    """Return the limit of the sum of two parts' deficits, in 64ths."""
    return math.floor((1 - NU) * WHOLE * k)


def least(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """M, what sum_k |x_k| |y_k| is at least for two real parts of lines that pass."""
    counted = NU - 1 / 128 - 1 / (32 * k)
    return counted * k * whole(moduli, k, complex_=complex_) ** 2


def worst(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """3 + w: the bound of |D - R| in units of 2^-53 (|A| |B|) that always holds."""
    parts = 2 if complex_ else 1
    lost = math.sqrt(parts * k) * moduli.target(k) + parts * k / 4
    return 3 + lost / (UNIT * least(moduli, k, complex_=complex_))


def deviation(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """R: the standard deviation, at most, of what independent roundings lose, in the same units."""
    return moduli.target(k) / math.sqrt(6) / (UNIT * least(moduli, k, complex_=complex_))


def deficits(parts: list[np.ndarray[Any, Any]], size: float) -> np.ndarray[Any, Any]:
    """`most`, `both` and `better` of lines, as the theorem has them, of their scaled real parts (lines, k).

    float64 (lines, 3). `size`: of a whole element.
    """
    k = parts[0].shape[1]
    short = np.stack([k - np.minimum(np.abs(part) / size, 1).sum(axis=1) for part in parts], axis=1)
    there = np.stack([np.asarray(part.any(axis=1)) for part in parts], axis=1)
    most = np.where(there, short, 0).max(axis=1)
    better = np.where(there, short, np.inf).min(axis=1)
    both = np.where(there.all(axis=1), most, NEVER / WHOLE)
    found = np.stack([most, both, better], axis=1)
    found[~np.asarray(there.any(axis=1))] = 0
    return found


def least_deficits(parts: list[np.ndarray[Any, Any]], size: float) -> np.ndarray[Any, Any]:
    """Return a lower bound of `better` of scaled lines (lines, k), by their norms alone. float64 (lines,)."""
    k = parts[0].shape[1]
    counted = np.max([np.abs(part).sum(axis=1) for part in parts], axis=0) / size
    return np.where(counted > 0, np.maximum(k - counted - (k / 4 + 2) / WHOLE, 0), 0)


def passes(rows: np.ndarray[Any, Any], columns: np.ndarray[Any, Any], k: int) -> bool:
    """Whether a tile of lines with these deficits does."""
    a, b = rows.max(axis=0), columns.max(axis=0)
    return bool(min(a[0] + b[0], a[1] + b[2], a[2] + b[1]) * WHOLE <= limit(k))
