"""Choice of the elements of a product that are computed again, and what rounding may leave of one. Pure.

Freivalds' check sees norms (`finding`): an element that is wrong by less than its row's rounding is nothing to it, and
where the elements of a row differ by orders of magnitude, all small ones may be. So some elements are computed again in
double (64-bit data with compensation), each beside its own scale:

    |D - R|_ij <= rounding(t) (|alpha| (|A| |B|)_ij + |beta| |C_ij|) + floor,    |z| = |re| + |im|, each part of D - R

where t counts the terms of the sum that are not zero (twice where they are complex), for adding zeros rounds nothing.
The *excess* of an element is its error over the right side: what is beyond a margin of 8 is in doubt.

    rounding(t) = (t^(1/2) + 2) eps + eps of the result + 2 * rounding of an input,    eps = 2 u of the arithmetic

The worst case of t products and additions in any order is gamma_t = t u / (1 - t u), and 3 u more for alpha, beta and
the sum with C (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 3.1, 3.5). Eight times this unit
is at least 16 t^(1/2) u + 32 u, so up to t = 300 no rounding of plain arithmetic can be in doubt. Past that the worst
case is met by design only; were rounding errors independent and without bias, |error| <= L t^(1/2) u would hold with
probability at least 1 - 2 t exp(-L^2 / 2) (N. J. Higham, T. Mary, "A new approach to probabilistic rounding error
analysis", SIAM J. Sci. Comput. 41 (2019)); L = 16 leaves 2 t 1e-56. Where they are biased more may come out: 16384
equal terms that are added one by one in float32 reach 8. Then plain arithmetic, which is asked next, has it as well,
and nothing is called wrong. A bound without chance would let pass 16 times as much at t = 65536.

Modes by what they promise. `auto`, `fp32`, `fp64`, `3xfp16`, `3xtf32`, `ozaki`: plain arithmetic of the width that is
accumulated. `tf32`, `1xtf32`: each input is rounded to 11 bits besides. float16: float32's sums, rounded once. In
`3xfp16-3m` parts of a complex number are split after they were added, so that it promises norms: there (|A| |B|)_ij is
|a_i| |b_j|, the row's norm times the column's. `floor`: as in `finding`.

What is not finite in R must be so in D: the same infinity, or NaN, of real data; of complex data anything that is not
finite. D may overflow where the sum of magnitudes comes to half the largest number: nothing is said of it where it is
not finite then.

Which elements: 2^b of each product. Half are spread: one at random in each of 2^(b-1) cells of a grid over rows and
columns. Each element is as likely to be hit as any other: where a share p of them is wrong, they are all missed with
probability (1 - p)^(2^(b-1)) at most, for the product of the cells' shares is largest where they are equal.

The others are *aimed*. A quarter at what is small: where what is small gets lost, elements come out small, so each is
the smallest |D_ij| of up to 4096 spread over a row, or a column, drawn at random; one time in two 0 and what is not
finite do not count, for they may belong there, and one time in two they come first, for they may not. A quarter at
rows and columns whose largest elements hide the others: the row that has the largest of up to 4096 elements of op(A)
drawn at random, and the column that has the largest of as many of op(B). Of these nothing is promised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.freivalds.finding import INPUT_ROUNDING, Element, tiny_of
from gemmserve_kernels.freivalds.signs import random_bits
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from gemmserve_kernels.problem.problem import GemmProblem

    Array = np.ndarray[Any, Any]

CANDIDATE_BITS: Final = 12
"""CANDIDATE_BITS in cuda/freivalds/sampled.cu: elements among which one is aimed at, at most, as a power of two."""
CANDIDATES: Final = 1 << CANDIDATE_BITS
FIGURES: Final = 4
"""Figures of an element: its excess, its error relative to the sum of magnitudes, its row and its column. NaN: unknown.
"""
_TOGETHER: Final = 1 << 17
"""Products whose figures are looked through at once."""
_OF_ITS_OWN: Final = 0x6A09E667F3BCC908
"""OF_ITS_OWN in sampled.cu: the bits in which the seed of these numbers differs from that of the signs."""

_MAX_BITS: Final = 8
_FEWEST_BITS: Final = 3
_ALL_BITS: Final = 14
"""Bits of all products together, at least as long as each has the fewest."""
_NORMWISE: Final = ("3xfp16-3m",)
"""Modes that promise norms only."""


@dataclass(frozen=True)
class Bound:
    """Bound of what rounding leaves of an element of `t` terms and scale `s`: (per_root t^(1/2) + rest) s + floor."""

    per_root: float
    rest: float
    floor: float
    largest: float
    """Sum of magnitudes below which what is not finite is told from overflow."""
    by_norms: bool
    """Whether the scale of op(A) op(B) is a product of norms."""
    compensated: bool
    """Whether products of elements are inexact in double, so that sums are compensated."""

    @classmethod
    def of(cls, problem: GemmProblem) -> Bound:
        """Return the bound of the problem's mode and dtypes."""
        arithmetic, stored = (np.finfo(real_dtype(dtype)) for dtype in (problem.accumulate, problem.dtype))
        rest = 2 * float(arithmetic.eps) + float(stored.eps) + 2 * INPUT_ROUNDING.get(problem.compute, 0.0)
        return cls(
            float(arithmetic.eps),
            rest,
            tiny_of(problem),
            min(float(arithmetic.max), float(stored.max)) / 2,
            problem.compute in _NORMWISE,
            any(real_dtype(operand.dtype) == np.float64 for operand in (problem.a, problem.b)),
        )


@dataclass(frozen=True)
class Choice:
    """Choice of the elements of each product that are looked at."""

    products: int
    m: int
    n: int
    bits: int
    """2^bits elements of each product."""
    row_bits: int
    """2^row_bits strata of rows, for those that are spread."""

    @classmethod
    def of(cls, problem: GemmProblem) -> Choice:
        """256 elements of each product, fewer of more than 64 products, and of tiny ones."""
        bits = min(_MAX_BITS, max(_FEWEST_BITS, _ALL_BITS - (max(1, problem.batch) - 1).bit_length()))
        bits = min(bits, max(_FEWEST_BITS, 1 + (problem.m * problem.n - 1).bit_length()))
        spread = bits - 1
        columns = min(spread - min(-(-spread // 2), (problem.m - 1).bit_length()), (problem.n - 1).bit_length())
        return cls(problem.batch, problem.m, problem.n, bits, spread - columns)

    @property
    def count(self) -> int:
        """Elements of each product."""
        return 1 << self.bits

    @property
    def column_bits(self) -> int:
        """As `row_bits`."""
        return self.bits - 1 - self.row_bits

    @property
    def quarter(self) -> int:
        """Elements that are aimed at what is small, and as many at what is large."""
        return self.count // 4

    def numbers(self, first: int, count: int, products: slice = slice(None)) -> Array:
        """(products, count): which random number each of `count` elements of a product has, from its `first` on."""
        of = np.arange(*products.indices(self.products))
        return (of[:, None] << self.bits) + np.arange(first, first + count)

    def spread(self, seed: int, products: slice = slice(None)) -> tuple[Array, Array]:
        """(products, count / 2) rows, and columns, of the elements that are spread."""
        half = self.count // 2
        sample = np.arange(half)
        upper, lower = words(seed, self.numbers(0, half, products))
        rows = in_stratum(self.m, sample >> self.column_bits, self.row_bits, upper)
        columns = in_stratum(self.n, sample & ((1 << self.column_bits) - 1), self.column_bits, lower)
        return rows, columns

    def candidates(self, seed: int, numbers: Array, extent: int, bits: int, scan: int) -> Array:
        """(..., 2^bits): for each element with such a number, where in [0, extent) to look, in its scan 0 or 1."""
        strata = np.arange(1 << bits)
        first = (self.products << self.bits) + (2 * numbers[..., None] + scan) * CANDIDATES
        return in_stratum(extent, strata, bits, words(seed, first + strata)[1])

    @staticmethod
    def large_bits(elements: int) -> int:
        """2^bits elements of an operand are looked at for a large one: a 32nd at most, so that chance decides."""
        return min(CANDIDATE_BITS, max(0, elements.bit_length() - 6))


def words(seed: int, numbers: Array) -> tuple[Array, Array]:
    """The upper and the lower 32 bits of random numbers."""
    bits = random_bits(seed ^ _OF_ITS_OWN, numbers)
    return bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)


def in_stratum(extent: int, stratum: Array, bits: int, random: Array) -> Array:
    """A number of [0, extent) in each stratum of 2^bits, by 32 random bits each."""
    fraction = (stratum.astype(np.uint64) << np.uint64(32) | random) << np.uint64(32 - bits)
    return _upper_half(fraction, extent).astype(np.int64)


def _upper_half(x: Array, by: int) -> Array:
    """The upper 64 bits of products."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    high, low = np.uint64(by >> 32), np.uint64(by & 0xFFFFFFFF)
    x_high, x_low = x >> half, x & mask
    if by <= mask:
        return np.asarray(x_high * low + (x_low * low >> half) >> half)
    middle = x_high * low + (x_low * low >> half)
    carried = (middle & mask) + x_low * high
    return np.asarray(x_high * high + (middle >> half) + (carried >> half))


def worst(figures: Array) -> Element:
    """Return the worst element of the figures (products, FIGURES) of each product's."""
    if not len(figures):
        return Element(0.0, 0.0, None)
    found = Element(math.nan, math.nan, None)
    for start in range(0, len(figures), _TOGETHER):
        checkpoint()
        some = figures[start : start + _TOGETHER]
        first = int(np.argmax(np.where(np.isnan(some[:, 0]), -1.0, some[:, 0])))
        excess, error, row, column = (float(x) for x in some[first])
        if excess > found.excess or (math.isnan(found.excess) and not math.isnan(excess)):
            found = Element(excess, error, (start + first, int(row), int(column)))
    return found
