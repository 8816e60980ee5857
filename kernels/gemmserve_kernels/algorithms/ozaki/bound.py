"""Bound that decides which products residues may make: one of every element, by counting. Pure.

The promise is one of elements: |D - R|_ij is small beside (|A| |B|)_ij, real and imaginary part each. Scaled lines x
(rows of op(A)) and y (columns of op(B)), each of `parts` real parts, have Euclidean norms of at most t =
`Moduli.target` and are rounded to integers; scaling and all that follows is exact but for one rounding of the result.
Integers round by half a unit of the line's scale, which is what a line with one large element loses its other elements
to.

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

**What is lost.** Let d_k and e_k be what rounding to integers adds to x_k and y_k, at most 1/2 (and 2^-43, which the
margin of what kernels count covers). By Cauchy and Schwarz sum_k |d_k y_k + x_k e_k + d_k e_k|, over the pairs that
make a part of D, is at most sqrt(parts k) t + parts k / 4, so

    |D - R|_ij <= (1 + w) 2^-53 (|A| |B|)_ij  always,  w = 2^53 (sqrt(parts k) t + parts k / 4) / m          (2)

where 1 is the result's. If roundings d_k, e_k are independent and symmetric (unlike those of a line of
equal elements), their sum has a standard deviation of at most t / sqrt(6), so that

    |D - R|_ij <= (1 + z r) 2^-53 (|A| |B|)_ij  but for a chance of 2 exp(-z^2 / 2),  r = 2^53 t / (m sqrt(6))    (3)

With 15 moduli r is 0.15 (float64) and 3.1 (complex128) at worst, half of that where all pairs have such deficits; with
all that there are 0.011 and 0.033. On normal data (1) finds a third of what there is, and errors are 0.05 to 1 units.
Of single precision (2) and (3) hold with 2^-24 in the place of 2^-53: with 8 moduli r is 0.04 (float32) and 0.15
(complex64).

**Outliers.** A few elements far above the others make a line's scale too coarse for those. They are taken out of it:
x = x' + x^, y = y' + y^, where x^ and y^ have at most `most_outliers` elements, and

    sum_k x_k y_k = sum_k x'_k y'_k + sum_k x^_k y_k + sum_k x'_k y^_k                                          (4)

Scales, counts and residues are those of x' and y'; where x' is zero throughout, so are its integers. The other two
sums, of disjoint steps of k, are added to the rounded first one with twice the bits (Dot2 of Ogita, Rump and Oishi:
with s terms, what is added to the rounding of the result is below 4 s^2 2^-106 of the sum of magnitudes). Since (|x'|
|y'|) and the magnitudes of those terms add up to (|A| |B|)_ij, (2) and (3) hold with 2 in the place of 1, whatever
elements are outliers. Which are (cuda/ozaki/outliers.cuh) depends on the line and the 32 lines that it is one of:
steps of k modulo 32 are 32 classes; the eighth smallest of their largest elements is an ordinary one wherever outliers
lie in at most 24 of them; outliers are those above twice that (three times where k is small), where they are few
enough, the 32 lines have half as many in the mean, and the scale gains half of itself. Normal lines have none: their
bits are the same with and without. An outlier costs a multiply-add of every element of its row or column, read from
memory: about what residues save in 120 steps of k (complex128 8192^3 on an H100).

**What passes.** Normal, uniform, one-sided, QAM, steering-vector data and what has their rows and columns scaled, from
k = 128 on; with outliers such data with spikes or point targets, and lines of a few elements (identities, permutations,
gates). Not so other sparse rows (a share of NU of the terms must be large), tails as heavy as Cauchy's, elements that
are not finite, grading along k: their tiles are multiplied in double precision, those of single precision too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.ozaki.moduli import Moduli

GAMMA: Final = 0.6
"""Size of a whole element, over the root mean square of elements that fill the norm."""
NU: Final = 3 / 16
"""The least share of k of which both factors must be whole."""
WHOLE: Final = 64
"""Weight of a whole element in kernels; TALLY_WHOLE in cuda/ozaki/params.cuh."""
WORDS: Final = 3
"""Deficits of a group of lines: `most`, `both`, `better`."""
QUARTERS: Final = 4
"""Words of a group of what its lines lack at least by their norms: each of a quarter of its lines."""
MOST_OUTLIERS: Final = 64
"""Outliers of a line at most; MOST_OUTLIERS in cuda/ozaki/params.cuh."""
_WORTH: Final = {
    "complex128": (1024, 128),
    "float64": (2048, 512),
    "complex64": (1024, 128),
    "float32": (2048, 512),
}
"""Where residues begin to save time, and steps of k from there on for each outlier that a line may have: half as many
in the mean of rows and of columns cost what residues save, at worst."""
LINES: Final = 128
"""Lines that are judged together; JUDGED_LINES in cuda/common/judging/judged.cuh."""


def whole(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """C, the scaled magnitude that counts as a whole element."""
    return GAMMA * moduli.target(k) / math.sqrt(k * (2 if complex_ else 1))


def limit(k: int) -> int:
    """Return the limit of the sum of two parts' deficits, in 64ths."""
    return math.floor((1 - NU) * WHOLE * k)


def most_outliers(k: int, dtype: np.dtype) -> int:
    """Return how many outliers a line of k elements may have so that multiplying them apart pays."""
    least, worth = _WORTH[np.dtype(dtype).name]
    return max(0, min(MOST_OUTLIERS, (k - least) // worth))
