"""NumPy model of what AMD's matrix units make of float16 and XF32: the bits of their kernels, on any machine.

float32 and double are chains of fused multiply-adds, which need no model. A float16 instruction of 8 steps of k, or an
XF32 one of 4, multiplies exactly, cuts the products towards zero 24 bits below the largest one's binary point, and adds
them up; that sum, cut towards minus infinity 31 bits below the larger one's binary point, and the accumulator, cut 24
bits below it, are added and rounded to nearest. So a sum of k numbers is rounded k / 8 times, to nearest: unlike
NVIDIA's, it has next to no bias, and nothing is given back in the end.

Source: P. Xie et al., MMA-Sim: bit-accurate reference model of tensor cores and matrix cores, arXiv 2511.10909, which
measured CDNA 1 to 3. CDNA 4 (gfx950) is assumed to be the same, its instruction of 16 steps two of 8. RDNA 3 (gfx1100)
rounds to nearest (RDNA 3 instruction set architecture reference guide, section 7.9); in which order it adds 16 products
is not documented, and assumed to be one after another. No AMD device was at hand to check this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, Any]

_PRODUCT_BITS: Final = 24
_SUM_BITS: Final = 31
_NOTHING: Final = -126
"""Exponent of zero."""
HALF_LEAST: Final = -14
"""Exponent of a subnormal float16."""
FLOAT_LEAST: Final = -126
PROMOTE: Final = 32
"""Steps of k whose sums are promoted where planes are multiplied: a tile's depth."""


@dataclass(frozen=True)
class Unit:
    """Float16 instruction: `per` neighbours in k a group of lanes, `groups` of them; `width` steps at once."""

    per: int
    groups: int
    width: int

    @property
    def depth(self) -> int:
        """Steps of k that all lanes hold at once, whose products of parts follow one another."""
        return max(_PACK, self.per) * self.groups

    def order(self, k: int) -> Array:
        """`order` of this unit."""
        return order(k, max(_PACK, self.per), self.per, self.groups)


_PACK: Final = 8
"""float16 numbers of one piece."""
UNITS: Final = {"gfx942": Unit(4, 2, 8), "gfx950": Unit(8, 2, 8), "gfx1100": Unit(16, 1, 1)}
"""By architecture."""


def step(accumulator: Array, x: Array, y: Array, least: int) -> Array:
    """float32 (m, n) plus x y as one instruction has it: `x` (m, few), `y` (few, n), of 11 significant bits each.

    `least`: the exponent of the operands' subnormal numbers. Finite data. One step alone is rounded to nearest.
    """
    if x.shape[1] == 1:
        return np.asarray(accumulator + x * y, np.float32)  # the product of 11 bits by 11 is exact
    products = x[:, None, :].astype(np.float64) * y.T[None, :, :].astype(np.float64)
    of_products = _exponents(x, least)[:, None, :] + _exponents(y.T, least)[None, :, :]
    of_products = np.where(products == 0, _NOTHING, of_products)
    largest = of_products.max(axis=-1)
    total = np.trunc(np.ldexp(products, _PRODUCT_BITS - largest[..., None])).sum(axis=-1)
    of_accumulator = np.where(accumulator == 0, _NOTHING, _exponents(accumulator, FLOAT_LEAST))
    top = np.maximum(largest, of_accumulator)
    summed = np.ldexp(np.floor(np.ldexp(total, largest - top + _SUM_BITS - _PRODUCT_BITS)), top - _SUM_BITS)
    kept = np.floor(np.ldexp(accumulator.astype(np.float64), _PRODUCT_BITS - top))
    return np.asarray((summed + np.ldexp(kept, top - _PRODUCT_BITS)).astype(np.float32))


def _exponents(x: Array, least: int) -> Array:
    return np.asarray(np.maximum(np.frexp(np.where(x == 0, 1, x).astype(np.float64))[1] - 1, least))


def order(k: int, pack: int, per: int, groups: int = 2) -> Array:
    """Steps of k in the order in which instructions take them: a group of lanes brings `pack` neighbours at once, of
    which an instruction takes `per`. Past k the numbers go on.
    """
    whole = -(-k // (pack * groups)) * pack * groups
    return np.arange(whole).reshape(-1, groups, pack // per, per).swapaxes(1, 2).reshape(-1)


def chain(terms: Sequence[tuple[Array, Array]], width: int, least: int, start: Array | None = None) -> Array:
    """The sum of x y over `terms`, (m, k) and (k, n) with k in the instructions' order, `width` steps at once."""
    left, right = terms[0]
    total = np.zeros((left.shape[0], right.shape[1]), np.float32) if start is None else start
    for x, y in terms:
        for first in range(0, x.shape[1], width):
            total = step(total, x[:, first : first + width], y[first : first + width], least)
    return total


def product_fp16(a: Array, b: Array, arch: str = "gfx942") -> Array:
    """float32 sums of float16 matrices (m, k) and (k, n)."""
    unit = UNITS[arch]
    x, y = _padded(a, b, unit.order(a.shape[1]))
    return chain([(x, y)], unit.width, HALF_LEAST)


def product_xf32(a: Array, b: Array) -> Array:
    """float32 matrices, rounded to TF32 on their way (cuda/mfma/copy.cuh)."""
    x, y = _padded(nearest_tf32(a), nearest_tf32(b), order(a.shape[1], 4, 2))
    return chain([(x, y)], 4, FLOAT_LEAST)


def nearest_tf32(x: Array) -> Array:
    """float32 to the nearest with 10 bits of fraction, ties to even; nothing becomes infinite or zero that was not."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    up = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    finite = (up & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    word = np.where(finite, up, bits) & np.uint32(0xFFFFE000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    lost = (magnitude > np.uint32(0x7F800000)) | ((word & np.uint32(0x7FFFFFFF) == 0) & (magnitude != 0))
    return np.where(lost, word | np.uint32(0x2000), word).view(np.float32)


def multiply(left: Array, right: Array, scheme: str, arch: str = "gfx942") -> Array:
    """Products of planes (planes, m, k) and (planes, n, k), as `splits.models.multiply` has them on other devices."""
    parts = 2 if scheme == "3xfp16" else 1
    components = len(left) // parts
    k = left.shape[2]
    shape = (left.shape[1], right.shape[1])
    sums = [np.zeros(shape, np.float32) for _ in range(components)]
    for first in range(0, k, PROMOTE):
        here = slice(first, min(first + PROMOTE, k))
        tiles = _tile(left[:, :, here], right[:, :, here].swapaxes(1, 2), parts, components, UNITS[arch])
        sums = [np.asarray(total + tile, np.float32) for total, tile in zip(sums, tiles, strict=True)]
    return np.asarray(sums[0] + 1j * sums[1], np.complex64) if components == 2 else sums[0]


def _tile(a: Array, b: Array, parts: int, components: int, unit: Unit) -> list[Array]:
    """The sums of one tile: as many steps of k at a time as lanes hold, small products first."""
    found: list[Array | None] = [None] * components
    steps = unit.order(a.shape[2])
    for first in range(0, len(steps), unit.depth):
        planes_a, planes_b = _padded(a, b, steps[first : first + unit.depth])
        for of_a, of_b in ((1, 0), (0, 1), (0, 0)) if parts == 2 else ((0, 0),):
            x, y = planes_a[of_a * components :], planes_b[of_b * components :]
            terms = [(0, x[0], y[0])]
            if components == 2:
                terms += [(1, x[0], y[1]), (0, -x[1], y[1]), (1, x[1], y[0])]
            for number, left, right in terms:
                found[number] = chain([(left, right)], unit.width, HALF_LEAST, found[number])
    return [np.asarray(each) for each in found]


def _padded(a: Array, b: Array, steps: Array) -> tuple[Array, Array]:
    """Return those steps of k as float32, zeros past the end."""
    more = max(0, int(steps.max()) + 1 - a.shape[-1])
    x = np.concatenate([a, np.zeros((*a.shape[:-1], more), a.dtype)], axis=-1)
    y = np.concatenate([b, np.zeros((*b.shape[:-2], more, b.shape[-1]), b.dtype)], axis=-2)
    return x[..., steps].astype(np.float32), y[..., steps, :].astype(np.float32)
