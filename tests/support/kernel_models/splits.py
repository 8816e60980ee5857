"""NumPy models of products from planes: the pre-pass, what is counted, which tiles are served, the products.

`split` makes the very bits that the kernels make (cuda/splits); products are modelled as in
`numerics.models`, which names the sources. Vectors are rows of op(A) and columns of op(B), k along the last axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gemmserve_kernels.algorithms.common.splits import DEPTHS, WIDE, is_wide
from gemmserve_kernels.algorithms.common.verdict import DEEP, GROUP, GROUP_WORDS, NEVER, SPARSE, UNFIT, most_deficit
from gemmserve_kernels.algorithms.wgmma.candidates import promotion
from gemmserve_kernels.numerics import models

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.common.splits import Scheme

    Array = np.ndarray[Any, Any]
    Pair = tuple[Array, Array]

Kernel = Literal["wgmma", "mma"]

DEEPEST: Final = 92
"""Binades below a vector's largest magnitude down to which bfloat16 products are exact."""
REACH: Final = 64
"""Binades below it, less half of those of k, within which elements are not far from it."""
MIN_NORMAL: Final = np.float32(2.0**-126)


@dataclass(frozen=True)
class Split:
    """One operand: float16 (planes, rows, k), or bfloat16 as float32; int32 exponents (rows); int64 counts (rows,
    GROUP_WORDS) as `common.verdict` has them of groups; int32 flags (rows) of bfloat16 planes.
    """

    planes: Array
    exponents: Array
    counts: Array
    flags: Array


def _top(scheme: str) -> int:
    return 30 if is_wide(scheme) else 13 if scheme == "3xfp16-3m" else 14


def _parts(x: Array) -> list[Array]:
    return [x.real, x.imag] if x.dtype.kind == "c" else [x]


def bfloat16(x: Array) -> Array:
    """Rounded to nearest, ties to even; finite numbers that do not overflow. float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _is_sparse(part: Array, largest: Array) -> Array:
    """Whether half of the elements, or more, are far from the vector's largest magnitude."""
    reach = REACH - (part.shape[1].bit_length() + 1) // 2
    near = np.ldexp(np.float64(1), np.frexp(largest)[1] - 1 - reach)[:, None]
    return np.asarray((2 * (np.abs(part) < near).sum(1) >= part.shape[1]) & (part != 0).any(1))


def _infinite(part: Array, depth: int, depths: int) -> Array:
    """A plane of vectors that hold infinities."""
    if depth + 1 == depths:
        return np.where(np.isinf(part), part, 0).astype(np.float32)
    return np.where(part != 0, np.copysign(1, part), 0).astype(np.float32) if depth == 0 else np.zeros_like(part)


def split(x: Array, scheme: Scheme, side: str) -> Split:
    """The pre-pass on vectors `x`, float32 or complex64 (rows, k)."""
    gauss, wide, depths, top = scheme == "3xfp16-3m", is_wide(scheme), DEPTHS[scheme], _top(scheme)
    with np.errstate(all="ignore"):
        largest = np.maximum.reduce([np.abs(p).max(1, initial=0) for p in _parts(x)])
        usable = np.isfinite(largest)
        exponents = np.where(usable & (largest > 0), np.frexp(largest)[1] - 1 - top, 0).astype(np.int32)
        parts = [
            np.where(usable[:, None], np.ldexp(p, -exponents[:, None]), p * 0).astype(np.float32) for p in _parts(x)
        ]
        if wide:  # no first plane of a number is 0
            parts = [
                np.where((p != 0) & (np.abs(q) < MIN_NORMAL) & usable[:, None], np.copysign(MIN_NORMAL, p), q).astype(
                    np.float32
                )
                for p, q in zip(_parts(x), parts, strict=True)
            ]
        values = list(parts)
        if gauss:
            re, im = parts
            values = [re, im - re if side == "b" else im, re + im]
        cut: list[list[Array]] = [[] for _ in values]
        rest = values
        for _ in range(depths):
            planes = [bfloat16(v) if wide else v.astype(np.float16) for v in rest]
            for found, plane in zip(cut, planes, strict=True):
                found.append(plane)
            rest = [v - p.astype(np.float32) for v, p in zip(rest, planes, strict=True)]
        tiny = np.ldexp(np.float64(1), np.frexp(largest)[1] - 1 - DEEPEST)[:, None]
        deep = np.logical_or.reduce([((p != 0) & (np.abs(p) < tiny)).any(1) for p in _parts(x)])
        sparse = np.logical_or.reduce([_is_sparse(p, largest) for p in _parts(x)])
        deep, sparse = deep & usable, sparse & usable
        if scheme == "9xbf16":
            deep, sparse = deep | np.isinf(largest), sparse | np.isinf(largest)
        flags = (DEEP * deep + SPARSE * sparse).astype(np.int32)
        if wide and scheme != "9xbf16":
            infinite = np.isinf(largest)
            for number, p in enumerate(_parts(x)):
                for depth in range(depths):
                    cut[number][depth] = np.where(infinite[:, None], _infinite(p, depth, depths), cut[number][depth])
        ordered = [p for each in cut for p in each] if gauss else [each[d] for d in range(depths) for each in cut]
        large, safe = 2.0 ** (top - 6), 2.0**-4 - 2.0**-16 if depths > 1 else 2.0**-15 - 2.0**-25
        counts = np.zeros((len(x), GROUP_WORDS), np.int64)
        found = []
        for number, part in enumerate(parts):
            # Whether it is large is asked of the first plane, so of the part rounded to float16.
            size = np.abs(part if gauss or wide else part.astype(np.float16).astype(np.float32))
            found.append((~(size >= large)).sum(1))
            counts[:, 2] += ((part != 0) & (np.abs(part) < safe)).sum(1)
            counts[:, 3] |= (part != 0).any(1) << number
        counts[:, 0], counts[:, 1] = np.minimum.reduce(found), np.maximum.reduce(found)
    counts[~usable] = NEVER, NEVER, 0, (1 << len(parts)) - 1
    return Split(np.stack(ordered), exponents, np.where((largest != 0)[:, None], counts, 0), flags)


def group_counts(counts: Array) -> Array:
    """The largest counts of each vector's group (rows, GROUP_WORDS)."""
    starts = np.arange(0, len(counts), GROUP)
    largest = np.maximum.reduceat(counts, starts, axis=0)
    largest[:, 3] = np.bitwise_or.reduceat(counts[:, 3], starts)
    return np.asarray(np.repeat(largest, GROUP, axis=0)[: len(counts)])


def served(a: Split, b: Split, k: int) -> Array:
    """Return which elements of a product float16 planes serve, bool (rows of A, rows of B)."""
    left, right = group_counts(a.counts)[:, None], group_counts(b.counts)[None]
    return np.asarray(is_served(left, right, k))


@dataclass(frozen=True)
class Product:
    """A product (m, n), and which elements the wide way took and which plain FP32 (double on Hopper), bool."""

    d: Array
    wide: Array
    plain: Array


def is_served(a: Array, b: Array, k: int) -> Array:
    """Whether planes serve the products of vectors or groups whose counts are `a` and `b`, int64 (..., GROUP_WORDS).

    bool, of their shapes broadcast. As in cuda/common/judging/verdict.cuh.
    """
    terms = np.minimum(a[..., 0] + b[..., 1], a[..., 1] + b[..., 0])
    one_part = _has_one_part(a) & _has_one_part(b)
    terms = np.where(one_part, a[..., 0] + b[..., 0], terms)
    return terms + (a[..., 2] + b[..., 2] + 3) // 4 <= most_deficit(k)


def _has_one_part(counts: Array) -> Array:
    return (counts[..., 3] == 1) | (counts[..., 3] == 2)


def product(
    a: Array,
    b: Array,
    scheme: Scheme,
    promote: int | None = None,
    *,
    kernel: Kernel = "wgmma",
    unit: models.MatrixUnit = models.HOPPER,
) -> Product:
    """A B of float32 or complex64 (m, k) and (k, n), as `splits.gemm` has it with `kernel`."""
    columns = np.ascontiguousarray(b.T)
    left, right = split(a, scheme, "a"), split(columns, scheme, "b")
    fine = np.ones((len(a), len(columns)), bool) if is_wide(scheme) else served(left, right, a.shape[1])
    with np.errstate(all="ignore"):
        plain = a @ b
        found = _from(left, right, scheme, promote, kernel, unit)
        if not is_wide(scheme):
            left, right = split(a, WIDE[scheme], "a"), split(columns, WIDE[scheme], "b")
            found = np.where(fine, found, _from(left, right, WIDE[scheme], None, kernel, unit))
        flagged = np.bitwise_or.outer(left.flags, right.flags) == UNFIT
        if not is_wide(scheme):
            flagged &= ~fine
        found = np.where(np.logical_or.outer(np.isnan(a).any(1), np.isnan(b).any(0)), np.float32(np.nan), found)
        found = np.where(np.logical_or.outer(np.isinf(a).any(1), np.isinf(b).any(0)), plain, found)
        return Product(np.where(flagged, plain, found), ~fine & ~flagged, flagged)


def _from(
    left: Split, right: Split, scheme: Scheme, promote: int | None, kernel: Kernel, unit: models.MatrixUnit
) -> Array:
    result = multiply(left.planes, right.planes, scheme, promote, kernel=kernel, unit=unit)
    return models.times_powers(result, left.exponents[:, None] + right.exponents)


def multiply(
    left: Array,
    right: Array,
    scheme: Scheme,
    promote: int | None = None,
    *,
    kernel: Kernel = "wgmma",
    unit: models.MatrixUnit = models.HOPPER,
) -> Array:
    """Products of planes (planes, m, k) and (planes, n, k) as `kernel` has them on tensor cores like `unit`.

    Partial sums are promoted every `promote` steps of k, by default as often as the kernel does; k is not split.
    """
    a, b = left.astype(np.float32), right.astype(np.float32).swapaxes(1, 2)
    a, b = np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0)
    k = a.shape[2]
    complex_ = len(a) > DEPTHS[scheme]
    if scheme == "1xfp16" and kernel == "wgmma":
        return _unpromoted(a, b, unit, complex_=complex_)
    promote = promote or (promotion(scheme, complex_, k) if kernel == "wgmma" else _MMA_PROMOTE)
    if scheme in _TERMS:
        parts = (_thirds if kernel == "wgmma" else _thirds_mma)(a, b, _TERMS[scheme], complex_=complex_)
    else:
        parts = _SCHEDULES[scheme, kernel, complex_](a, b)
    sums = [models.promoted(turns, k, promote, unit.fp16, unit) for turns in parts]
    if scheme == "3xfp16":
        together = 2 if complex_ and kernel == "wgmma" else 1
        sums = [models.restored(x, models.accumulations(promote, together)) for x in sums]
    return np.asarray(sums[0] + 1j * sums[1], np.complex64) if complex_ else sums[0]


def _terms(a: Array, b: Array, of_a: int, of_b: int, step: int, sign: int = 1) -> list[Pair]:
    """Low times high, high times low, high times high of two numbers whose low parts are `step` planes further."""
    x, y = np.float32(sign) * a, b
    return [(x[of_a + step], y[of_b]), (x[of_a], y[of_b + step]), (x[of_a], y[of_b])]


_TERMS: Final = {
    "6xbf16": ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)),
    "9xbf16": ((2, 2), (2, 1), (1, 2), (2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)),
}
"""Parts of the left and of the right operand that are multiplied, in the kernels' order."""


def _thirds(a: Array, b: Array, terms: tuple[tuple[int, int], ...], *, complex_: bool) -> list[list[models.Turn]]:
    """Three bfloat16 parts: small products come first, and are promoted by themselves where they are complex, which are
    otherwise as `_complex_wgmma` has them.
    """
    if not complex_:
        return [[[(1, [[(a[i], b[j]) for i, j in terms]])]]]

    def pairs(left: int, right: int, sign: int) -> list[Pair]:
        return [(np.float32(sign) * a[2 * i + left], b[2 * j + right]) for i, j in terms]

    def both(first: list[Pair], second: list[Pair]) -> list[Pair]:
        return [pair for two in zip(first, second, strict=True) for pair in two]

    re: list[models.Turn] = []
    im: list[models.Turn] = []
    for first, second, sign in ((0, 1, 1), (1, 0, -1)):
        of_re = both(pairs(first, first, 1), pairs(second, second, -1))
        of_im = both(pairs(first, second, 1), pairs(second, first, 1))
        re.append([(sign, [of_re[:-2]]), (sign, [of_re[-2:]])])
        im.append([(1, [of_im[:-2]]), (1, [of_im[-2:]])])
    return [re, im]


def _thirds_mma(a: Array, b: Array, terms: tuple[tuple[int, int], ...], *, complex_: bool) -> list[list[models.Turn]]:
    """Every real product, and of it that of the first parts, has partial sums of its own, promoted together."""

    def sums(*products: tuple[int, int, int]) -> models.Turn:
        of_each = 2 if complex_ else 1
        found = [
            [(np.float32(sign) * a[of_each * i + x], b[of_each * j + y]) for i, j in terms] for x, y, sign in products
        ]
        return [(1, [each[:-1] for each in found] + [each[-1:] for each in found])]

    if not complex_:
        return [[sums((0, 0, 1))]]
    return [[sums((0, 0, 1), (1, 1, -1))], [sums((1, 0, 1), (0, 1, 1))]]


def _real(a: Array, b: Array) -> list[list[models.Turn]]:
    return [[[(1, [_terms(a, b, 0, 0, 1) if len(a) == 2 else [(a[0], b[0])]])]]]


def _complex_wgmma(a: Array, b: Array) -> list[list[models.Turn]]:
    """All products of one part in one partial sum; real and imaginary parts take turns at being the first."""
    re: list[models.Turn] = []
    im: list[models.Turn] = []
    for first, second, sign in ((0, 1, 1), (1, 0, -1)):
        re.append([(sign, [_low_first([_terms(a, b, first, first, 2), _terms(a, b, second, second, 2, -1)])])])
        im.append([(1, [_low_first([_terms(a, b, first, second, 2), _terms(a, b, second, first, 2)])])])
    return [re, im]


def _low_first(products: list[list[Pair]]) -> list[Pair]:
    return [term for terms in products for term in terms[:2]] + [terms[2] for terms in products]


def _complex_mma(a: Array, b: Array) -> list[list[models.Turn]]:
    if len(a) == 2:
        re, im = [[(a[0], b[0])], [(-a[1], b[1])]], [[(a[1], b[0])], [(a[0], b[1])]]
    else:
        re = [_terms(a, b, 0, 0, 2), _terms(a, b, 1, 1, 2, -1)]
        im = [_terms(a, b, 1, 0, 2), _terms(a, b, 0, 1, 2)]
    return [[[(1, re)]], [[(1, im)]]]


def _gauss(a: Array, b: Array) -> list[list[models.Turn]]:
    first, second, third = (_terms(a, b, 2 * i, 2 * j, 1) for i, j in ((2, 0), (0, 1), (1, 2)))
    return [[[(1, [first]), (-1, [third])]], [[(1, [first]), (1, [second])]]]


_SCHEDULES: Final = {
    ("3xbf16", "wgmma", True): _complex_wgmma,
    ("3xbf16", "wgmma", False): _real,
    ("3xfp16", "wgmma", True): _complex_wgmma,
    ("3xfp16", "wgmma", False): _real,
    ("3xfp16", "mma", True): _complex_mma,
    ("3xfp16", "mma", False): _real,
    ("3xbf16", "mma", True): _complex_mma,
    ("3xbf16", "mma", False): _real,
    ("1xfp16", "mma", True): _complex_mma,
    ("1xfp16", "mma", False): _real,
    ("3xfp16-3m", "wgmma", True): _gauss,
}
_MMA_PROMOTE: Final = 32
_STAGE: Final = 64


def _unpromoted(a: Array, b: Array, unit: models.MatrixUnit, *, complex_: bool) -> Array:
    """One product that the tensor core accumulates alone, stage after stage."""
    parts = [[(a[0], b[0])]]
    if complex_:
        parts = [[(a[0], b[0]), (-a[1], b[1])], [(a[0], b[1]), (a[1], b[0])]]
    sums: list[Array | None] = [None] * len(parts)
    for first in range(0, a.shape[2], _STAGE):
        here = slice(first, min(first + _STAGE, a.shape[2]))
        sums = [
            models.chain([(x[:, here], y[here]) for x, y in terms], unit.fp16, unit, start)
            for terms, start in zip(parts, sums, strict=True)
        ]
    found = [np.asarray(x, np.float32) for x in sums]
    return np.asarray(found[0] + 1j * found[1], np.complex64) if complex_ else found[0]
