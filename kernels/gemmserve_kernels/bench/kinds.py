"""Kinds of data by name, hostile ones among them, made by NumPy or CuPy where they are used.

A kind is a function (xp, rng, shape, side, dtype) -> array: `xp` is numpy or cupy, `rng` its `random.default_rng`,
`shape` that of op(A), (m, k), where `side` is "a", and of op(B), (k, n), where it is "b", `dtype` float32, float64,
complex64 or complex128. Real and imaginary parts are drawn alike and independently but where the kind says otherwise.
Many rows make a trap: with thousands of them, something large is found at every step of k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.bench.elementwise import limit
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = Any
    Shape = tuple[int, int]
    Make = Callable[[Any, Any, Shape, str, np.dtype[Any]], Any]

_BLOCK: Final = 64
"""Rows and columns of a block of block-diagonal data."""
_SPIKY: Final = 1e8
"""Factor of one element in normal data."""
_DOMINATED: Final = 2.0**-5.5
"""Factor of the elements beside a dominant one: their terms are 2**-11 of its term, 63 of them 2**-5."""


@dataclass(frozen=True)
class Kind:
    """Recipe of one kind. `exact`: every element of the product has one term that is not zero, and factor 1.

    `weight`: how much it has shown, kinds of the largest are measured first. `bound`: what elements of 32-bit data may
    be off by, in units of u, where the rule of all other kinds does not hold; 0 where it does.
    """

    make: Make
    about: str
    exact: bool = False
    weight: int = 1
    bound: float = 0.0


KINDS: dict[str, Kind] = {}


def draw(xp: Any, rng: Any, kind: str, shape: Shape, side: str, dtype: Any) -> Array:
    """Data of that kind. Raises KeyError for a name that is none of `KINDS`."""
    made = KINDS[kind].make(xp, rng, shape, side, np.dtype(dtype))
    return made.astype(dtype, copy=False)


def operands(xp: Any, kind: str, m: int, n: int, k: int, dtype: Any, seed: int) -> tuple[Array, Array]:
    """A, (m, k), and B, (k, n), of that kind; the same for the same seed and library."""
    rng = xp.random.default_rng(seed)
    return draw(xp, rng, kind, (m, k), "a", dtype), draw(xp, rng, kind, (k, n), "b", dtype)


def most(kind: str, dtype: Any, vendor: float) -> float:
    """Largest error of an element that `auto` may have on data of that kind, in units of u, beside the vendor's own."""
    return max(limit(vendor), KINDS[kind].bound if real_dtype(np.dtype(dtype)).itemsize == 4 else 0.0)


def _kind(name: str, about: str, make: Make, *, exact: bool = False, weight: int = 1, bound: float = 0.0) -> None:
    KINDS[name] = Kind(make, about, exact, weight, bound)


# ---- pieces


def _wide(dtype: np.dtype[Any]) -> type:
    return np.float32 if real_dtype(dtype).itemsize == 4 else np.float64


def _real_normal(_: Any, rng: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
    return rng.standard_normal(shape, _wide(dtype))


def _uniform(rng: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
    return rng.random(shape, _wide(dtype))


def _joined(xp: Any, re: Array, im: Array) -> Array:
    made = xp.empty(re.shape, np.result_type(re.dtype, np.complex64))
    made.real, made.imag = re, im
    return made


def _each_part(part: Callable[[Any, Any, Shape, np.dtype[Any]], Any]) -> Make:
    """A kind whose real and imaginary parts are drawn alike."""

    def make(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
        del side
        re = part(xp, rng, shape, dtype)
        return re if dtype.kind != "c" else _joined(xp, re, part(xp, rng, shape, dtype))

    return make


_normal: Final = _each_part(_real_normal)


def _index(xp: Any, count: int, axis: int) -> Array:
    """0, 1 ... along an axis of a matrix."""
    return xp.arange(count).reshape((count, 1) if axis == 0 else (1, count))


def _along_k(shape: Shape, side: str) -> tuple[int, int]:
    """The axis of k and its extent."""
    return (1, shape[1]) if side == "a" else (0, shape[0])


def _lines(shape: Shape, side: str) -> tuple[int, int]:
    """The axis of A's rows or B's columns and its extent."""
    return (0, shape[0]) if side == "a" else (1, shape[1])


def _one_side(side: str, make: Make) -> Make:
    """Normal data on the other side."""

    def both(xp: Any, rng: Any, shape: Shape, here: str, dtype: np.dtype[Any]) -> Array:
        return (make if here == side else _normal)(xp, rng, shape, here, dtype)

    return both


def _scaled(factor: Callable[[Any, Any, Shape, str, np.dtype[Any]], Any], of: Make = _normal) -> Make:
    """Data of another kind times real factors that broadcast."""

    def make(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
        return of(xp, rng, shape, side, dtype) * factor(xp, rng, shape, side, dtype).astype(_wide(dtype))

    return make


def _where(kept: Callable[[Any, Any, Shape, str], Any], of: Make = _normal) -> Make:
    """Data of another kind, zero elsewhere."""

    def make(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
        return xp.where(kept(xp, rng, shape, side), of(xp, rng, shape, side, dtype), np.zeros((), dtype)[()])

    return make


# ---- distributions

_kind("normal", "N(0, 1)", _normal, weight=3)
_kind("uniform", "uniform in [-1, 1)", _each_part(lambda _, rng, shape, dtype: 2 * _uniform(rng, shape, dtype) - 1))
_kind(
    "positive",
    "uniform in [0, 1): nothing cancels",
    _each_part(lambda _, rng, shape, dtype: _uniform(rng, shape, dtype)),
    weight=2,
)


def _exponential(sigma: int) -> Callable[[Any, Any, Shape, np.dtype[Any]], Any]:
    return lambda xp, rng, shape, dtype: xp.exp(sigma * _real_normal(xp, rng, shape, dtype))


for _sigma in range(1, 7):
    _kind(
        f"exp-{_sigma}n",
        f"exp({_sigma} N(0, 1)): heavy tails, one sign",
        _each_part(_exponential(_sigma)),
        weight={3: 3, 6: 4}.get(_sigma, 1),
    )


def _signed_exponential(xp: Any, rng: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
    magnitude = _exponential(6)(xp, rng, shape, dtype)
    return xp.where(_uniform(rng, shape, dtype) < 0.5, -magnitude, magnitude)


_kind("exp-6n-signed", "exp(6 N(0, 1)) with random signs", _each_part(_signed_exponential), weight=2)


def _cauchy(xp: Any, rng: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
    top, bottom = _real_normal(xp, rng, shape, dtype), _real_normal(xp, rng, shape, dtype)
    return top / xp.where(bottom == 0, 1, bottom).astype(top.dtype)


_kind("cauchy", "Cauchy: the quotient of two normal numbers", _each_part(_cauchy), weight=3)


def _spikes(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    base = _normal(xp, rng, shape, side, dtype)
    spiked = rng.random(shape, np.float32) < 1e-4
    return xp.where(spiked, dtype.type(1e3), base * _wide(dtype)(1e-6))


_kind("spikes", "1e-6 N(0, 1) with one entry in 10^4 of 1e3", _spikes, weight=4)


def _spiky_row(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    x = _normal(xp, rng, shape, side, dtype)
    lines, count = _lines(shape, side)
    spot = (count // 3, shape[1] // 2) if lines == 0 else (shape[0] // 3, count // 2)
    x[spot[0] : spot[0] + 1, spot[1] : spot[1] + 1] = _SPIKY
    return x


_kind("spiky-row", "normal, one element of one row and of one column 1e8", _spiky_row)


def _binades(count: int) -> Make:
    def part(xp: Any, rng: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
        exponents = xp.floor((2 * rng.random(shape, np.float32) - 1) * (count // 2)).astype(np.int32)
        return xp.ldexp(_real_normal(xp, rng, shape, dtype), exponents)

    return _each_part(part)


_kind("24-binades", "normal times powers of two over 24 binades", _binades(24))
_kind("60-binades", "normal times powers of two over 60 binades", _binades(60), weight=2)


# ---- zeros


def _density(density: float) -> Make:
    return _where(lambda _, rng, shape, __: rng.random(shape, np.float32) < density)


_kind("sparse-10", "normal, one element in 10 other than 0", _density(0.1), weight=2)
_kind("sparse-1", "normal, one element in 100 other than 0", _density(0.01), weight=2)


def _few(xp: Any, rng: Any, shape: Shape, side: str) -> Array:
    axis, k = _along_k(shape, side)
    lines = _lines(shape, side)[1]
    spots = xp.floor(rng.random((3, lines), np.float32) * k).astype(np.int32)
    spots = spots[:, :, None] if axis == 1 else spots[:, None, :]
    index = _index(xp, k, axis)
    return (index == spots[0]) | (index == spots[1]) | (index == spots[2])


_kind("few", "normal, three elements of each row of A and column of B other than 0", _where(_few), weight=2)
_kind(
    "zero-rows",
    "normal, every third row of A and column of B 0",
    _where(lambda xp, _, shape, side: _index(xp, _lines(shape, side)[1], _lines(shape, side)[0]) % 3 != 0),
)


def _blocks(xp: Any, rng: Any, shape: Shape, side: str) -> Array:
    del rng
    count = max(1, -(-_along_k(shape, side)[1] // _BLOCK))
    row, column = (_index(xp, extent, axis) * count // max(1, extent) for axis, extent in enumerate(shape))
    return row == column


_kind("block-diagonal", "normal in diagonal blocks of about 64 steps of k", _where(_blocks))


# ---- one factor of a simple structure, the other normal


def _eye(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    del rng, side
    return (_index(xp, shape[0], 0) == _index(xp, shape[1], 1)).astype(dtype)


def _permutation(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    """One 1 in each row of A or column of B; of square ones a permutation."""
    axis, k = _along_k(shape, side)
    lines = _lines(shape, side)[1]
    order = xp.argsort(rng.random((k,), np.float64))
    spots = order[xp.arange(lines) % max(1, k)] if k else xp.zeros((lines,), np.int64)
    spots = spots[:, None] if axis == 1 else spots[None, :]
    return (_index(xp, k, axis) == spots).astype(dtype)


def _gate(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    """kron(I, [[1, 1], [1, -1]])."""
    del rng, side
    row, column = (_index(xp, extent, axis) for axis, extent in enumerate(shape))
    sign = 1 - 2 * ((row % 2) & (column % 2))
    return xp.where(row // 2 == column // 2, sign, 0).astype(dtype)


def _diagonal(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    axis, lines = _lines(shape, side)
    half = 30 if real_dtype(dtype).itemsize == 4 else 300
    grading = _binades(2 * half)(xp, rng, (lines, 1) if axis == 0 else (1, lines), side, dtype)
    return xp.where(_index(xp, shape[0], 0) == _index(xp, shape[1], 1), grading, np.zeros((), dtype)[()])


_kind("identity", "the identity times normal data", _one_side("a", _eye), exact=True, weight=4)
_kind("identity-right", "normal data times the identity", _one_side("b", _eye), exact=True)
_kind("permutation", "a permutation times normal data", _one_side("a", _permutation), exact=True, weight=3)
_kind("permutation-right", "normal data times a permutation", _one_side("b", _permutation), exact=True)
_kind("gate", "kron(I, [[1, 1], [1, -1]]) times normal data", _one_side("a", _gate), weight=3)
_kind("diagonal", "a diagonal over 60 binades (64-bit data: 600) times normal data", _one_side("a", _diagonal))


def _inverse_cubes(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    """1 / r^3 between random points of a cube, complex ones times exp(20 i r)."""
    del side
    targets, sources = rng.random((3, shape[0], 1), np.float64), rng.random((3, 1, shape[1]), np.float64)
    square = (targets[0] - sources[0]) ** 2 + 1e-6
    for axis in (1, 2):
        square = square + (targets[axis] - sources[axis]) ** 2
    r = xp.sqrt(square)
    kernel = 1 / (square * r)
    return kernel if dtype.kind != "c" else _joined(xp, kernel * xp.cos(20 * r), kernel * xp.sin(20 * r))


_kind("inverse-cubes", "1 / r^3 between random points times normal data", _one_side("a", _inverse_cubes), weight=2)


# ---- scales


def _powers(binades: int) -> Callable[[Any, Any, Shape, str, np.dtype[Any]], Any]:
    def factor(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
        del dtype
        axis, lines = _lines(shape, side)
        half = binades // 2
        exponents = xp.floor((2 * rng.random((lines, 1) if axis == 0 else (1, lines), np.float32) - 1) * half)
        return xp.exp2(exponents)

    return factor


_kind("row-scaled", "normal, rows of A times powers of two over 60 binades", _one_side("a", _scaled(_powers(60))))
_kind("column-scaled", "normal, columns of B times powers of two over 60 binades", _one_side("b", _scaled(_powers(60))))


def _graded(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    del rng, dtype
    axis, k = _along_k(shape, side)
    exponents = 40 / max(1, k) * _index(xp, k, axis)
    return xp.exp2(exponents if side == "a" else -exponents)


_kind("graded", "normal, A growing along k by 2^40, B shrinking as much", _scaled(_graded))
_kind("graded-heavy", "exp(6 N(0, 1)) graded along k likewise", _scaled(_graded, _each_part(_signed_exponential)))


def _tiny(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    del rng, shape, side
    single = real_dtype(dtype).itemsize == 4
    return xp.full((1, 1), 2.0**-70 if single else 2.0**-531)


def _huge(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    """Sums of magnitudes stay below the largest number: elements of up to 8 deviations."""
    del rng
    k = _along_k(shape, side)[1]
    top = 127 if real_dtype(dtype).itemsize == 4 else 1023
    return xp.full((1, 1), 2.0 ** math.floor((top - 8 - math.log2(max(1, k))) / 2))


def _subnormal(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    del rng, shape
    single = real_dtype(dtype).itemsize == 4
    exponent = (-138 if single else -1064) if side == "a" else (100 if single else 1000)
    return xp.full((1, 1), 2.0**exponent, np.float64)


def _then_rounded(factor: Callable[[Any, Any, Shape, str, np.dtype[Any]], Any]) -> Make:
    """Scaled in double first: a factor of its own would be rounded."""

    def make(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
        x = _normal(xp, rng, shape, side, dtype)
        return (x.astype(np.result_type(dtype, np.float64)) * factor(xp, rng, shape, side, dtype)).astype(dtype)

    return make


_kind("tiny", "normal at a scale where the product's elements are subnormal", _scaled(_tiny))
_kind("huge", "normal at a scale where sums nearly overflow", _scaled(_huge))
_kind("subnormal", "subnormal A times large B", _then_rounded(_subnormal))
_kind("constant", "1/3 throughout", lambda xp, _, shape, __, dtype: xp.full(shape, dtype.type(1 / 3), dtype))


# ---- signals


def _constellation(levels: int) -> Make:
    scale = math.sqrt(3 / (2 * (levels**2 - 1)))

    def part(xp: Any, rng: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
        steps = xp.floor(rng.random(shape, np.float32) * levels)
        return ((2 * steps - (levels - 1)) * scale).astype(_wide(dtype))

    return _each_part(part)


_kind("qam16", "points of 16-QAM of unit power", _constellation(4))
_kind("qam64", "points of 64-QAM of unit power", _constellation(8))


def _steering(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    """exp(i pi l sin(theta)) of the l-th of k sensors half a wavelength apart; real ones are the cosine."""
    axis, k = _along_k(shape, side)
    lines = _lines(shape, side)[1]
    sine = xp.sin(math.pi * (rng.random((lines, 1) if axis == 1 else (1, lines), np.float64) - 0.5))
    phase = math.pi * sine * _index(xp, k, axis)
    return xp.cos(phase) if dtype.kind != "c" else _joined(xp, xp.cos(phase), xp.sin(phase))


_kind("steering", "steering vectors exp(i phi) of a line of sensors", _steering)


def _dominant_term(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    axis, k = _along_k(shape, side)
    step = _index(xp, k, axis)
    factor = xp.where(step == k - 1, 1.0, xp.where(step >= k - _BLOCK, _DOMINATED, 0.0)).astype(_wide(dtype))
    return (
        _each_part(lambda _, rng, shape, dtype: 1 - _uniform(rng, shape, dtype) / 2)(xp, rng, shape, side, dtype)
        * factor
    )


_kind(
    "dominant-term",
    "uniform in (1/2, 1], one sign: the last step of k outweighs by 2^5 the 63 before it, which come after zeros",
    _dominant_term,
    bound=16,
)


def _cancelling_parts(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    re = _uniform(rng, shape, dtype)
    if dtype.kind != "c":
        return re
    im = re * (1 + _wide(dtype)(2.0**-10) * _uniform(rng, shape, dtype))
    return _joined(xp, re, im if side == "a" else -im)


_kind("cancelling-imag", "positive real parts, imaginary parts of the product that cancel", _cancelling_parts, weight=2)


def _pairs(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    """Return x and -x (1 + eps) at neighbouring steps of k for A, the same y at both for B."""
    axis, k = _along_k(shape, side)
    half = (shape[0], -(-k // 2)) if axis == 1 else (-(-k // 2), shape[1])
    x = _normal(xp, rng, half, side, dtype)
    second = x
    if side == "a":
        eps = (_uniform(rng, half, dtype) * 2.0**-12).astype(_wide(dtype))
        second = -x * (1 + eps)
    both = xp.stack([x, second], axis=axis + 1)
    wide = (half[0], 2 * half[1]) if axis == 1 else (2 * half[0], half[1])
    both = both.reshape(wide)
    return xp.ascontiguousarray(both[:, :k] if axis == 1 else both[:k])


_kind("pairs", "x and -x (1 + eps) at neighbouring steps of k", _pairs, weight=2)


def _real_in_complex(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    del side
    return _real_normal(xp, rng, shape, dtype).astype(dtype)


_kind("real-in-complex", "normal, imaginary parts 0", _real_in_complex)


def _faint(xp: Any, rng: Any, shape: Shape, side: str, dtype: np.dtype[Any]) -> Array:
    x = _normal(xp, rng, shape, side, dtype)
    return x if dtype.kind != "c" else _joined(xp, x.real, x.imag * _wide(dtype)(2.0**-20))


_kind("faint-imag", "normal, imaginary parts times 2^-20", _faint)

BY_WEIGHT: Final = tuple(sorted(KINDS, key=lambda name: -KINDS[name].weight))
"""Every name, those that have shown most first."""
EXACT: Final = tuple(name for name, kind in KINDS.items() if kind.exact)
