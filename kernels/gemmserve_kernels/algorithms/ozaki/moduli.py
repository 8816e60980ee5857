"""Moduli of the residue scheme, their Chinese remainder constants, and how many a product needs. Pure, exact integers.

Source: K. Ozaki, Y. Uchino, T. Imamura, Ozaki Scheme II: a GEMM-oriented emulation of floating-point matrix
multiplication using an integer modular technique, arXiv 2504.08009, sections 3 and 4.

Every row of op(A) and every column of op(B) is scaled so that its Euclidean norm is at most `Moduli.target`, and
rounded to integers. By Cauchy and Schwarz no element of the integer product, real or imaginary part, then exceeds half
the product of the moduli, so its residues determine it. The scale depends on nothing but the row: residues serve any
partner. Cauchy and Schwarz lose a third of a bit a side to the best bound for random data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

MODULI: Final = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197)
"""The largest pairwise coprime integers up to 256. With these 15 a scaled element has less than 2**59 units (see
ozaki/convert.cuh) and the product of the moduli less than 118 bits (see ozaki/combine.cuh)."""
LIMB: Final = 39
"""Bits of one of the three limbs that integers modulo the product of the moduli are cut into."""
LIMBS: Final = 3
DIGIT: Final = 15
"""Bits of one of the four signed digits that a scaled element is cut into."""
MAX_K: Final = 1 << 24
"""So that roundings of the sums of squares stay far below the margin of 2**-30 that is put on top of them."""

_WANTED: Final = {8: 2.6e-15, 4: 2.5e-7}
"""Normwise relative error at most, by bytes of a real number; FP64's own on an H200 is 4.4e-15 at k = 8192."""
_GROWTH: Final = {"c16": 3e-17, "f8": 1e-17, "c8": 1e-8, "f4": 1e-8}
"""Nor more than this times the root of k, by dtype: cuBLAS's own is 4.8e-17 (zgemm), 1.5e-17 (dgemm, which adds
up parts of k), 1.3e-8 (cgemm)."""


@dataclass(frozen=True)
class Moduli:
    """Constants of the first `count` moduli.

    `product`: P. `weights[i]`: the multiple of P / p_i that is 1 modulo p_i, in [0, P). `digits[i]`: 2**15, 2**30 and
    2**45 modulo p_i, in [-p_i / 2, p_i / 2].
    """

    count: int
    product: int
    weights: tuple[int, ...]
    digits: tuple[tuple[int, ...], ...]

    @classmethod
    @lru_cache
    def first(cls, count: int) -> Moduli:
        """Return the constants of the first `count` moduli."""
        moduli = MODULI[:count]
        product = math.prod(moduli)
        weights = tuple(product // p * pow(product // p, -1, p) for p in moduli)
        digits = tuple(tuple(_centred(1 << DIGIT * i, p) for i in (1, 2, 3)) for p in moduli)
        return cls(count, product, tuple(weight % product for weight in weights), digits)

    @property
    def moduli(self) -> tuple[int, ...]:
        """The moduli themselves."""
        return MODULI[: self.count]

    def target(self, k: int) -> float:
        """The largest Euclidean norm of a scaled row of k elements, before it is rounded to integers.

        Rounding adds at most sqrt(2 k) / 2 to it. The margin keeps |x| / P away from 1/2 by 2**-27, more than the
        roundings in the choice of the multiple of P that is taken away. Not positive where the moduli are too few.
        """
        return math.sqrt(self.product / 2) * (1 - 2.0**-26) - math.sqrt(k / 2) - 1

    def error(self, k: int, *, complex_: bool) -> float:
        """Expected normwise relative error for a product of random operands with rows and columns of length k.

        Rounding to integers moves every part by a uniform error of variance 1/12, on both sides; scaled norms are at
        least 4/5 of the target, and 9/10 on average.
        """
        target = 0.9 * self.target(k)
        return math.sqrt(k / (3 if complex_ else 6)) / target if target > 0 else math.inf


def _centred(x: int, modulus: int) -> int:
    remainder = x % modulus
    return remainder - modulus if remainder > modulus // 2 else remainder


def limbs(x: int) -> tuple[float, ...]:
    """X as three limbs of 39 bits, the lowest first; the last may be longer. All are exact in float64."""
    mask = (1 << LIMB) - 1
    return float(x & mask), float(x >> LIMB & mask), float(x >> 2 * LIMB)


def needed(k: int, dtype: np.dtype) -> int:
    """The number of moduli for the accuracy of `dtype` at this k: 14 for complex128 up to 11,000, 15 for float64."""
    dtype = np.dtype(dtype)
    complex_ = dtype.kind == "c"
    size = dtype.itemsize // (2 if complex_ else 1)
    wanted = min(_WANTED[size], _GROWTH[f"{dtype.kind}{dtype.itemsize}"] * math.sqrt(k))
    enough = (n for n in range(2, len(MODULI)) if Moduli.first(n).error(k, complex_=complex_) <= wanted)
    return next(enough, len(MODULI))
