"""Moduli of the residue scheme, their Chinese remainder constants, and how many a product needs. Pure, exact integers.

Source: K. Ozaki, Y. Uchino, T. Imamura, Ozaki Scheme II: a GEMM-oriented emulation of floating-point matrix
multiplication using an integer modular technique, arXiv 2504.08009, sections 3 and 4.

Every row of op(A) and every column of op(B) is scaled so that its Euclidean norm is at most `Moduli.target`, by a
number of three bits, without a rounding, and rounded to integers: where those have more bits than elements, hardly
anything is lost but by the rounding of the result. By Cauchy and Schwarz no element of the integer product, real or
imaginary part, then exceeds half the product of the moduli, so its residues determine it. The scale depends on nothing
but the row: residues serve any partner. Cauchy and Schwarz lose a third of a bit a side to the best bound for random
data.

Complex numbers have moduli of their own, of which -1 has a root: an odd number has one, r, where all its prime factors
are 1 modulo 4. Then a + ib -> (a + rb, a - rb) modulo p is an isomorphism of the Gaussian integers modulo p to pairs,
multiplied part by part: two products of residues for each modulus, where Karatsuba's way takes three. Of a product's
pair (u, v) the real part is (u + v) / 2 and the imaginary part (u - v) / (2r), modulo p. (The number theoretic
transform of length two; I. S. Reed, T. K. Truong, IEEE Trans. Inf. Theory 21 (1975), for complex integers by residues.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

MODULI: Final = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
"""For real numbers: the largest pairwise coprime integers up to 256."""
SPLIT_MODULI: Final = (241, 233, 229, 221, 205, 197, 193, 181, 173, 157, 149, 137, 113, 109, 101, 97, 89)
"""For complex numbers: pairwise coprime, of prime factors that are 1 modulo 4, of the largest product that as many of
them have up to 256. A scaled element has less than 2**63 units, with all of either (see `Moduli.powers`)."""
LIMB: Final = 42
"""Bits of the lower two of three limbs with signs that integers modulo the product of the moduli are cut into."""
LIMBS: Final = 3
DIGITS: Final = 8
"""Bytes with signs that a scaled element is cut into."""
MAX_K: Final = 1 << 24
"""So that roundings of the sums of squares stay far below the margin of 2**-30 that is put on top of them."""

_WANTED: Final = 2.6e-15
"""Normwise relative error at most in double precision; FP64's own on an H200 is 4.4e-15 at k = 8192."""
_GROWTH: Final = {"c16": 3e-17, "f8": 1e-17}
"""Nor more than this times the root of k, by dtype: cuBLAS's own is 4.8e-17 (zgemm), 1.5e-17 (dgemm, which adds
up parts of k)."""
_SINGLE: Final = 8
"""In single precision, at every k: what rounding to integers adds to an element, in units of 2**-24, has a standard
deviation of at most 0.15 (complex) and 0.04 where lines pass the test of `ozaki.bound` (r there); of seven moduli it
would be 2.0 and 0.6, and the promise is one of 4."""


@dataclass(frozen=True)
class Moduli:
    """Constants of the first `count` moduli for complex or for real numbers.

    `product`: P. `weights[i]`: for each real part of the result an integer in [-P / 2, P / 2]. Of real numbers it is
    the multiple of P / p_i that is 1 modulo p_i; of complex ones those that are 1 / 2, by which u + v is multiplied,
    and 1 / (2 r_i), by which u - v is. `powers[i]`: of 2**(8 d), d < DIGITS, the residues modulo p_i that are nearest
    to 0; of complex numbers also those of r_i 2**(8 d). `roots`: r_i, 0 for real numbers.
    """

    count: int
    complex_: bool
    moduli: tuple[int, ...]
    roots: tuple[int, ...]
    product: int
    weights: tuple[tuple[int, ...], ...]
    powers: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    @lru_cache
    def first(cls, count: int, *, complex_: bool = False) -> Moduli:
        """Return the constants of the first `count` moduli."""
        moduli = available(complex_=complex_)[:count]
        roots = tuple(root_of_minus_one(p) if complex_ else 0 for p in moduli)
        product = math.prod(moduli)
        weights, powers = [], []
        for p, root in zip(moduli, roots, strict=True):
            one = product // p * pow(product // p, -1, p)
            halves = (pow(2, -1, p), pow(2 * root, -1, p)) if complex_ else (1,)
            weights.append(tuple(centred(one * half, product) for half in halves))
            factors = (1, root) if complex_ else (1,)
            powers.append(tuple(tuple(centred(f << 8 * d, p) for d in range(DIGITS)) for f in factors))
        return cls(count, complex_, moduli, roots, product, tuple(weights), tuple(powers))

    @property
    def parts(self) -> int:
        """The residues of an element modulo each, and the products of residues."""
        return 2 if self.complex_ else 1

    @property
    def divisors(self) -> tuple[int, ...]:
        """Divisors that products are reduced by: the moduli, or twice them, 129 to 256: reciprocals have 32 bits."""
        return tuple(p if p > 128 else 2 * p for p in self.moduli)

    @property
    def short(self) -> bool:
        """Whether a scaled element fits four bytes with signs, at any k."""
        return math.sqrt(self.product / 2) < 127 * sum(1 << 8 * digit for digit in range(4))

    @property
    def planes(self) -> int:
        """Residues of an element."""
        return self.count * self.parts

    def target(self, k: int) -> float:
        """The largest Euclidean norm of a scaled row of k elements, before it is rounded to integers.

        Rounding adds at most sqrt(2 k) / 2 to it. The margin keeps |x| / P away from 1/2 by 2**-27, more than the
        roundings in the choice of the multiple of P that is taken away. Not positive where the moduli are too few.
        """
        return math.sqrt(self.product / 2) * (1 - 2.0**-26) - math.sqrt(k / 2) - 1

    def error(self, k: int) -> float:
        """Expected normwise relative error for a product of random operands with rows and columns of length k.

        Rounding to integers moves every part by a uniform error of variance 1/12, on both sides; scaled norms are at
        least 4/5 of the target, and 9/10 on average.
        """
        target = 0.9 * self.target(k)
        return math.sqrt(k / (3 if self.complex_ else 6)) / target if target > 0 else math.inf


def available(*, complex_: bool) -> tuple[int, ...]:
    """Moduli that there are for complex or for real numbers, the first ones first."""
    return SPLIT_MODULI if complex_ else MODULI


def root_of_minus_one(p: int) -> int:
    """The smallest r whose square is -1 modulo p. Raises ValueError where there is none."""
    found = next((r for r in range(1, p) if (r * r + 1) % p == 0), None)
    if found is None:
        raise ValueError(f"-1 has no root modulo {p}")
    return found


def centred(x: int, modulus: int) -> int:
    """X modulo `modulus`, nearest to 0; half of it counts as its negative, as it does in a byte."""
    return (x + modulus // 2) % modulus - modulus // 2


def limbs(x: int) -> tuple[float, ...]:
    """X as three limbs, the lowest first: the lower two in [-2**41, 2**41), the last may be longer. All are exact in
    float64.
    """
    low = centred(x, 1 << LIMB)
    middle = centred((x - low) >> LIMB, 1 << LIMB)
    return float(low), float(middle), float((((x - low) >> LIMB) - middle) >> LIMB)


def needed(k: int, dtype: np.dtype) -> int:
    """The number of moduli for the accuracy of `dtype` at this k: 15 for complex128 up to 22,000, for float64 up to
    four millions; 8 of single precision.
    """
    dtype = np.dtype(dtype)
    complex_ = dtype.kind == "c"
    if dtype.itemsize // (2 if complex_ else 1) == 4:
        return _SINGLE
    wanted = min(_WANTED, _GROWTH[f"{dtype.kind}{dtype.itemsize}"] * math.sqrt(k))
    most = len(available(complex_=complex_))
    return next((n for n in range(2, most) if Moduli.first(n, complex_=complex_).error(k) <= wanted), most)
