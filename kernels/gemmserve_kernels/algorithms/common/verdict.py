"""Choice of the tiles of a product that may be taken from float16 planes: a proof by counting, made by the pre-pass on
the device.

The promise is one of elements: |D - R|_ij stays below a few units of FP32's last place of (|A| |B|)_ij, on any data
("Grade A" of J. Demmel et al., "Grading emulated matrix multiplication", 2025). Planes keep 22 bits of an element x of
a vector (a row of op(A), a column of op(B)) that is scaled to a largest magnitude M in [2**14, 2**15), but nothing
below 2**-25: they lose at most max(2**-22 |x|, 2**-25). The first term is a rounding, of the size of FP32's own. The
second is nothing beside 2**-22 |x| from |x| = 2**-3 on; below 2**-4 it is a *loss*, which no element of D may notice.

Count, for the real and for the imaginary part of a vector each, the steps of its k at which it is not *large*, that is
below 2**8 in magnitude, and the parts that lose, 0 < |x| < 2**-4 (l, of both together).

Theorem. Let x and y be parts of two vectors with c_x and c_y steps that are not large, and L the number of all parts of
both vectors that lose. If c_x + c_y + L/4 <= k - SPARE, then what all these losses change in a real or imaginary part
of D is less than 2**-24 of sum_k |x_k y_k|, and at least SPARE terms of that are products of large elements.
Proof. At least p = k - c_x - c_y steps have two large factors, so sum_k |x_k y_k| >= p 2**16. A part of D is a sum of
products of parts, of which a loss changes each by at most 2**-25 2**15 = 2**-10 (products of two losses are smaller
than 2**-25 times one), and every part of a vector occurs in one of its products: together less than L 2**-10. The
premise says p >= L/4 + SPARE, so that this is less than 2**-24 p 2**16. QED.

The real part of D is sum(re re) - sum(im im), the imaginary one sum(re im) + sum(im re): each has a sum with either
part of a vector, by some part of the other. So the theorem holds for both, each against its own sum of magnitudes, if
it holds for the better part (of fewer steps that are not large) of the one vector by the worse part of the other,
whichever these are. Where both have one part that is all zero (real data in complex arrays), a part of D is 0 whatever
is lost, and for the other the better parts count. So do DFT matrices and steering vectors, some of whose rows have one
faint part, meet other data without a loss; where both sides have such parts, they go the wide way.

`1xfp16`, whose roundings are 2**-11 |x|, loses below 2**-15 by the same argument; `3xfp16-3m` is scaled to half of
that and counts as large half as much: its parts hold against both parts' sums of magnitudes, not each against its own.

SPARE: roundings of a few terms do not average out, and FP32 may have none there (an identity, a permutation, a gate):
products of sparse rows are none for 22 bits.

A tile of GROUP x GROUP elements is taken from the planes where the largest counts of its rows and of its columns fit
the theorem; otherwise it is taken the wide way (`splits.gemm`), or from plain FP32 or double (`splits.fallback`). The
grid of tiles begins at the product's first element, whatever tiles kernels have: what is taken from where, and so D's
bits, do not depend on them. A vector is in *doubt* where twice the count of its worse part + l/2 + 2 exceeds
k - SPARE: where none is, every tile is served, and kernels look at one word only. That is so for data whose elements
are mostly within 2**-6 of the largest, such as normal, uniform, one-sided and QAM data, whatever scales their rows and
columns have.

The wide way has a theorem of the same kind. Of a vector scaled to M in [2**30, 2**31), bfloat16 planes and the sums of
their products hold everything but for elements below 2**-92 M, which are *deep*: of these a step of k loses at most
2**-94. Let b be the bits of k, and h half of them, rounded up. Where more than half of the steps of both vectors have
parts of at least 2**(h - 64) M, some step has two of them, so sum_k |x_k y_k| is at least 2**(b - 68), and k < 2**b
steps lose less than 2**-26 of it. So what must not be multiplied by these planes is a pair of vectors of which one is
deep and one (the same, maybe) is *sparse*, that is, has a part, not all zero, of which half of the steps or more lie
below 2**(h - 64) M. Plain FP32, or double, computes such elements (`splits.fallback`).

Usual counts: 3 % of k for normal data (a part in a hundred thousand loses), 2 % for uniform data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

GROUP: Final = 256
"""Vectors of which the largest deficit is kept: the extent of a tile that is judged. As in verdict.cuh."""
SPARE: Final = 16
"""Large terms that every sum must have beside those that make up for losses."""
NEVER: Final = 1 << 30
"""The count of a vector that is not finite."""
GROUP_WORDS: Final = 4
"""Words of a group: the largest counts of the better and of the worse part, the largest l, and which parts are not all
zero in any of its vectors (1 the real, 2 the imaginary one; of real data 1).
"""

DEEP: Final = 1
SPARSE: Final = 2
UNFIT: Final = DEEP | SPARSE
"""Flags of a vector of bfloat16 planes, and those of a pair, together, that these must not multiply
(cuda/common/judging/flag_bits.cuh)."""

Tiles = Literal["served", "rest", "failing"]
"""Tiles that float16 planes serve, the rest of them, and those that residues do not serve (`ozaki.bound`)."""
TILES: Final = {None: 0, "served": 1, "rest": 2, "failing": 3}
"""enum Tiles in cuda/common/judging/verdict.cuh: what a kernel computes; None: all."""


def groups(vectors: int) -> int:
    """Groups of `vectors`."""
    return -(-vectors // GROUP)


def most_deficit(k: int) -> int:
    """The largest c_x + c_y + L/4 with which a product may be taken from planes."""
    return k - SPARE


def words(matrices: int, vectors: int) -> int:
    """Words of an operand's deficits: how many vectors are in doubt, then the groups of every matrix."""
    return 1 + matrices * groups(vectors) * GROUP_WORDS


@dataclass(frozen=True)
class Deficits:
    """Place of an operand's deficits in int32 `words` (zero before the pre-pass) from number `first` on."""

    words: Any
    first: int


class Judged(NamedTuple):
    """Tiles that a kernel computes: those that float16 planes serve, the rest of them, or those that residues do not.

    Addresses: of the operands' deficits, of a word that the former kernel sets where there is a rest, and of the
    counters (`Launcher.counters`) that the latter adds its elements to. Of "failing" tiles: `words_*` of the deficits
    from one product to the next, 0 where the operand is shared; the `most` that two deficits may be together.
    """

    tiles: Tiles
    deficits_a: int
    deficits_b: int
    wanted: int
    counters: int
    words_a: int = 0
    words_b: int = 0
    most: int = 0


def is_doubtful(counts: Any, k: int) -> Any:
    """Whether a vector with these counts, int64 (..., GROUP_WORDS), is in doubt."""
    return (counts[..., 3] != 0) & (2 * counts[..., 1] + (counts[..., 2] + 1) // 2 + 2 > most_deficit(k))
