"""ctypes mirrors of cuda/ozaki/params.cuh, and the constants that fill them."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.algorithms.ozaki.bound import WHOLE, limit, whole
from gemmserve_kernels.algorithms.ozaki.moduli import LIMB, limbs
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.ozaki.moduli import Moduli


JUDGES: Final = 1
CLEARS: Final = 2
LISTS: Final = 4
"""enum Judging in cuda/common/judging/judged.cuh."""
STATUS_WORDS: Final = 4
"""STATUS_WORDS there."""


@device_struct("ozaki/params.cuh")
class LineParams(ctypes.Structure):
    """An operand as lines along k."""


@device_struct("ozaki/params.cuh")
class TallyParams(ctypes.Structure):
    """Counts of lines."""


@device_struct("ozaki/params.cuh")
class ScaleParams(ctypes.Structure):
    """Arguments of ozaki_scale."""


@device_struct("ozaki/params.cuh")
class ConvertParams(ctypes.Structure):
    """Arguments of ozaki_convert."""


@device_struct("common/judging/judged.cuh")
class JudgedParams(ctypes.Structure):
    """Deficits by which tiles are judged."""


@device_struct("ozaki/params.cuh")
class MultiplyParams(ctypes.Structure):
    """Arguments of ozaki_multiply."""


@device_struct("ozaki/params.cuh")
class RemainderParams(ctypes.Structure):
    """Arguments of ozaki_combine."""


def tally_constants(params: TallyParams, moduli: Moduli, k: int, *, complex_: bool) -> None:
    """Set the weights of what is counted; a little less than the theorem has, for float32 rounds."""
    params.limit = limit(k)
    params.step = WHOLE * (1 - 2.0**-20) / whole(moduli, k, complex_=complex_)


MAGIC: Final = 3 << 22
"""A float32 that rounds what is added to it to integers."""


def base_of(modulus: int, powers: tuple[tuple[int, ...], ...]) -> int:
    """Return what `residue` in cuda/ozaki adds to sums of digits times `powers`: the least multiple of 256 that leaves
    them no less than 2**23, and is a multiple of the modulus less `half_of` it. It is so small that the quotient in
    float32 is right, for the moduli that there are.
    """
    least, unit = (1 << 23) + 128 * sum(abs(power) for each in powers for power in each), math.lcm(256, modulus)
    base = 256 * (-half_of(modulus) * pow(256, -1, modulus) % modulus) if modulus % 2 else 0
    return base + -(-(least - base) // unit) * unit


def half_of(modulus: int) -> int:
    """Return the middle of the residues from 0 on; 0 of an even modulus, 256, of which the lowest byte is taken
    anyway.
    """
    return modulus // 2 if modulus % 2 else 0


def inverse_of(modulus: int) -> np.float32:
    """Return 1 over a modulus, for the quotients. Rounded up that of 255 would make some quotients too large; rounded
    down some are one too small, and what is left is 255 in the place of 0, which is a byte as good.
    """
    nearest = np.float32(1 / modulus)
    return np.nextafter(nearest, np.float32(0)) if modulus == 255 else nearest


def convert_constants(params: ConvertParams, moduli: Moduli) -> None:
    """The moduli, their inverses, what is added to sums, and powers of 2**8 modulo each, four a word."""
    for i, (p, powers) in enumerate(zip(moduli.moduli, moduli.powers, strict=True)):
        params.modulus[i] = p
        base = base_of(p, powers)
        params.base[i] = int(np.float32(base).view(np.int32))
        params.zero[i] = (base + half_of(p)) // p + MAGIC
        params.inverse[i] = inverse_of(p)
        for part, each in enumerate(powers):
            words = np.array(each, np.int8).view("<i4")
            params.power[i][part][:] = [int(word) for word in words]


def multiply_constants(params: MultiplyParams, moduli: Moduli) -> None:
    """For `reduce` in cuda/ozaki/layout.cuh."""
    for i, p in enumerate(moduli.divisors):
        params.divisor[i] = p
        params.reciprocal[i] = (1 << 39) // p


def combine_constants(params: RemainderParams, moduli: Moduli) -> None:
    """Set weights and product, in limbs, and the inverses of scales."""
    for i, (p, weights) in enumerate(zip(moduli.divisors, moduli.weights, strict=True)):
        params.zero[i] = (1 << 52) + p
        for part, weight in enumerate(weights):
            params.weight[i][part][:] = limbs(weight)
    for n in range(4, 8):
        params.inverse[n - 4][:] = 4 / n, float(Fraction(4, n) - Fraction(4 / n))
    params.product[:] = limbs(moduli.product)
    params.inverse_product = (1 << 2 * LIMB) / moduli.product
