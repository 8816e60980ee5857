"""NumPy models of products from float16 planes: the pre-pass, the balancing along k, what is flagged, the product.

`split` and `balance` make the very bits that the kernels make (cuda/split, cuda/balance.cu); the product is modelled as
in `models`, whose docstring gives the sources. Vectors are rows of op(A) and columns of op(B), k along the last axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gemmserve_kernels import models
from gemmserve_kernels.wgmma.tiles import promotion

if TYPE_CHECKING:
    from gemmserve_kernels.planes.layout import Scheme

    Array = np.ndarray[Any, Any]
    Pair = tuple[Array, Array]

Kernel = Literal["wgmma", "mma"]

DEEPEST: Final = 60
"""Binades that a step of k is moved at most."""
AGREE: Final = 8
_FLAT: Final = 4


@dataclass(frozen=True)
class Split:
    """One operand: float16 (planes, rows, k), int32 exponents, flags, the largest scaled and unscaled magnitudes."""

    planes: Array
    exponents: Array
    flags: Array
    relative: Array
    absolute: Array

    def is_flat(self, scheme: Scheme) -> bool:
        """Whether it needs no balancing."""
        return bool(np.all((self.absolute == 0) | (self.relative >= 2.0 ** (_top(scheme) - _FLAT))))


def _top(scheme: Scheme) -> int:
    return 13 if scheme == "3xfp16-3m" else 14


def _magnitude(x: Array) -> Array:
    return np.fmax(np.abs(x.real), np.abs(x.imag)) if x.dtype.kind == "c" else np.abs(x)


def _parts(x: Array) -> list[Array]:
    return [x.real, x.imag] if x.dtype.kind == "c" else [x]


def _undo(largest: Array, scheme: Scheme) -> Array:
    usable = np.isfinite(largest) & (largest > 0)
    exponent = np.frexp(np.where(usable, largest, 1))[1] - 1 - _top(scheme)
    return np.where(usable, exponent, 0).astype(np.int32)


def _cut(
    parts: list[Array], scheme: Scheme, side: str, weights: Array | float
) -> tuple[Array, list[Array], list[Array]]:
    """Planes of scaled parts; per part, the weighted sums of what is lost and of the magnitudes."""
    gauss, low = scheme == "3xfp16-3m", scheme != "1xfp16"
    values = list(parts)
    if gauss:
        re, im = parts
        values = [re, im - re if side == "b" else im, re + im]
    high = [v.astype(np.float16) for v in values]
    rest = [v - h.astype(np.float32) for v, h in zip(values, high, strict=True)]
    below = [r.astype(np.float16) for r in rest]
    kept = np.float32(2.0**-21 if low else 2.0**-10)
    if low:
        rest = [r - b.astype(np.float32) for r, b in zip(rest, below, strict=True)]
    excess = [np.fmax(np.abs(r) - kept * np.abs(v), 0) for r, v in zip(rest, values, strict=True)]
    wide = [(weights * e.astype(np.float64)).sum(-1) for e in excess]
    lost = [wide[0], wide[1] + wide[2]] if gauss else wide
    norms = [(weights * np.abs(v).astype(np.float64)).sum(-1) for v in parts]
    if gauss:
        norms = [norms[0] + norms[1]] * 2
    if not low:
        planes = high
    elif gauss:
        planes = [plane for pair in zip(high, below, strict=True) for plane in pair]
    else:
        planes = high + below
    return np.stack(planes), lost, norms


def _too_much(lost: list[Array], norms: list[Array], present: list[Array], scheme: Scheme) -> Array:
    tolerance = 2.0**-33 if scheme != "1xfp16" else 2.0**-22
    flags = [
        ~(el <= tolerance * no) | ~np.isfinite(no) | ((no == 0) & any_)
        for el, no, any_ in zip(lost, norms, present, strict=True)
    ]
    return np.asarray(np.logical_or.reduce(flags))


def split(x: Array, scheme: Scheme, side: str) -> Split:
    """The pre-pass on vectors `x`, float32 or complex64 (rows, k)."""
    with np.errstate(all="ignore"):
        largest = np.fmax.reduce(_magnitude(x), axis=1, initial=0)
        exponents = _undo(largest, scheme)
        infinite = np.isinf(largest)[:, None]
        parts = [np.where(infinite, p * 0, np.ldexp(p, -exponents[:, None])).astype(np.float32) for p in _parts(x)]
        planes, lost, norms = _cut(parts, scheme, side, 1.0)
        present = [(p != 0).any(1) for p in _parts(x)]
        flags = _too_much(lost, norms, present, scheme) | np.isinf(largest)
        scaled = np.fmax.reduce([np.abs(p) for p in parts])
        usable = ~infinite
        relative = np.fmax.reduce(np.where(usable, scaled, 0), axis=0, initial=0)
        absolute = np.fmax.reduce(np.where(usable, _magnitude(x), 0), axis=0, initial=0)
    return Split(planes, exponents, flags, relative.astype(np.float32), absolute.astype(np.float32))


def _regular(of: Split) -> bool:
    if np.any((of.absolute != 0) & (of.relative == 0)):
        return False
    here = of.absolute != 0
    if not here.any():
        return True
    difference = np.frexp(of.absolute[here])[1] - np.frexp(of.relative[here])[1]
    return bool(difference.max() - difference.min() <= AGREE)


def balance(x: Array, y: Array, a: Split, b: Split, scheme: Scheme) -> tuple[Split, Split, bool]:
    """Both operands as `balance.cu` leaves them, and whether the whole pair is flagged; `x`, `y` are their vectors."""
    flat_a, flat_b = a.is_flat(scheme), b.is_flat(scheme)
    if flat_a and flat_b:
        return a, b, False
    if not (_regular(a) and _regular(b)):
        return a, b, True
    steps = np.zeros(x.shape[1], int)
    both = not flat_a and not flat_b
    if both:
        found = np.frexp(np.where(a.relative > 0, a.relative, 1))[1] - 1 - _top(scheme)
        steps = np.where(a.relative > 0, np.maximum(found, -DEEPEST), 0)
    return (
        _again(x, a, b, -steps, scheme, "a", rewrite=both),
        _again(y, b, a, steps, scheme, "b", rewrite=both),
        False,
    )


def _again(x: Array, mine: Split, other: Split, steps: Array, scheme: Scheme, side: str, *, rewrite: bool) -> Split:
    with np.errstate(all="ignore"):
        meets = other.absolute != 0
        infinite: Array = ~np.asarray(np.isfinite(_magnitude(x)).all(1))
        scaled = [np.ldexp(np.ldexp(p, -mine.exponents[:, None]), steps) for p in _parts(x)]
        scaled = [np.where(meets, p, 0).astype(np.float32) for p in scaled]
        deeper = np.zeros(len(x), np.int32)
        if rewrite:
            deeper = _undo(np.fmax.reduce([np.abs(p) for p in scaled]).max(1), scheme)
        scaled = [np.ldexp(p, -deeper[:, None]) for p in scaled]
        weights = np.ldexp(other.relative.astype(np.float64), -steps)
        planes, lost, norms = _cut(scaled, scheme, side, weights)
        present = [(np.where(meets, p, 0) != 0).any(1) for p in _parts(x)]
        flags = _too_much(lost, norms, present, scheme)
    if not rewrite:
        return Split(mine.planes, mine.exponents, mine.flags | (flags & ~infinite), mine.relative, mine.absolute)
    keep = infinite
    return Split(
        np.where(keep[:, None], mine.planes, planes),
        np.where(keep, mine.exponents, mine.exponents + deeper).astype(np.int32),
        np.where(keep, mine.flags, flags),
        mine.relative,
        mine.absolute,
    )


def product(
    a: Array,
    b: Array,
    scheme: Scheme,
    promote: int | None = None,
    *,
    kernel: Kernel = "wgmma",
    unit: models.MatrixUnit = models.HOPPER,
) -> tuple[Array, Array]:
    """A B of float32 or complex64 (m, k) and (k, n), and which elements fell back to plain FP32."""
    columns = np.ascontiguousarray(b.T)
    left, right = split(a, scheme, "a"), split(columns, scheme, "b")
    left, right, whole = balance(a, columns, left, right, scheme)
    flagged = left.flags[:, None] | right.flags | whole
    with np.errstate(all="ignore"):
        result = multiply(left.planes, right.planes, scheme, promote, kernel=kernel, unit=unit)
        exponent = left.exponents[:, None] + right.exponents
        result = models.times_powers(result, exponent)
        return np.where(flagged, a @ b, result), flagged


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
    complex_ = len(a) > (1 if scheme == "1xfp16" else 2)
    if scheme == "1xfp16" and kernel == "wgmma":
        return _unpromoted(a, b, unit, complex_=complex_)
    promote = promote or (promotion(scheme, complex_, k) if kernel == "wgmma" else _MMA_PROMOTE)
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
    ("3xfp16", "wgmma", True): _complex_wgmma,
    ("3xfp16", "wgmma", False): _real,
    ("3xfp16", "mma", True): _complex_mma,
    ("3xfp16", "mma", False): _real,
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
