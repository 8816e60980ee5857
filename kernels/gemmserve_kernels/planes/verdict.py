"""Which tiles of a product may be taken from float16 planes: a proof by counting, made by the pre-pass on the device.

The promise is one of elements: |D - R|_ij stays below a few units of FP32's last place of (|A| |B|)_ij, on any data
("Grade A" of J. Demmel et al., "Grading emulated matrix multiplication", 2025). Planes keep 22 bits of an element x of
a vector (a row of op(A), a column of op(B)) that is scaled to a largest magnitude M in [2**14, 2**15), but nothing
below 2**-25: they lose at most max(2**-22 |x|, 2**-25). The first term is a rounding, of the size of FP32's own. The
second is nothing beside 2**-22 |x| from |x| = 2**-3 on; below 2**-4 it is a *loss*, which no element of D may notice.

Count, for the real and for the imaginary parts of a vector each, its k elements that are not *large*, that is below
2**8 in magnitude, and those that lose, 0 < |x| < 2**-4, once more: s_i = (k - n_i) + l_i, n_i being large and l_i
lossy. The *deficit* d_i of a vector is the larger one of its parts that are not all zero; 0 where both are; NEVER where
something is not finite.

Theorem. Let x and y be parts of a row and of a column with d_i + d_j <= k - SPARE. What both lose changes their sum of
products by less than 2**-26 of sum_k |x_k y_k|, and at least SPARE of its terms are products of large elements.
Proof. At most (k - n_i) + (k - n_j) steps of k have a factor that is not large, so at least p = n_i + n_j - k have none,
and sum_k |x_k y_k| >= p 2**16. A loss of x_k costs at most 2**-25 |y_k| < 2**-10, so all losses together less than
(l_i + l_j) 2**-10 (products of two losses are smaller than 2**-25 times one). The premise says
k - n_i + l_i + k - n_j + l_j <= k - SPARE, that is p >= l_i + l_j + SPARE. QED.

A complex element of D is four such sums, each of a real or imaginary part by another one: with parts that are all zero
left out every one of them holds, so do the real and the imaginary part of D, each against its own sum of magnitudes.
`1xfp16`, whose roundings are 2**-11 |x|, loses below 2**-15 by the same argument; `3xfp16-3m` is scaled to half of
that and counts as large half as much: its parts hold against both parts' sums of magnitudes, not each against its own.

SPARE: roundings of a few terms do not average out, and FP32 may have none there (an identity, a permutation, a gate):
products of sparse rows are none for 22 bits.

A tile of GROUP x GROUP elements is taken from the planes where the largest deficits of its rows and of its columns fit
the theorem; otherwise it is taken the wide way (`planes.wide`), or from plain FP32 (`planes.fallback`). The grid of
tiles begins at the product's first element, whatever tiles kernels have: what is taken from where, and so D's bits, do
not depend on them. Where twice a vector's deficit fits for every vector, every tile does, and kernels look at one word
only, `doubt`: always so for data whose elements are mostly within 2**-6 of the largest, such as normal, uniform,
one-sided, QAM and steering-vector data, and whatever scales their rows and columns have.

Usual deficits: 3 % of k for normal data (a hundredth of an element in a thousand loses), 2 % for uniform data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

GROUP: Final = 256
"""Vectors of which the largest deficit is kept: the extent of a tile that is judged. As in cuda/common/verdict.cuh."""
SPARE: Final = 16
"""Large terms that every sum must have beside those that make up for losses."""
NEVER: Final = 1 << 30
"""The deficit of a vector that is not finite."""

TILES: Final = {None: 0, "served": 1, "rest": 2}
"""enum Tiles in cuda/common/verdict.cuh: what a kernel computes; None: all."""


def groups(vectors: int) -> int:
    """Groups of `vectors`."""
    return -(-vectors // GROUP)


def most_deficit(k: int) -> int:
    """The largest sum of two vectors' deficits with which their product may be taken from planes."""
    return k - SPARE


def words(matrices: int, vectors: int) -> int:
    """Words of an operand's deficits: how many vectors are in doubt, then the groups of every matrix."""
    return 1 + matrices * groups(vectors)


@dataclass(frozen=True)
class Deficits:
    """Where an operand's are, in int32 `words` (zero before the pre-pass) from number `first` on."""

    words: Any
    first: int


class Judged(NamedTuple):
    """Which tiles a kernel computes: those that float16 planes serve, or the rest of them. Addresses of deficits."""

    tiles: Literal["served", "rest"]
    deficits_a: int
    deficits_b: int
