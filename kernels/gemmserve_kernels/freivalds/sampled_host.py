"""Elements of a product computed again with NumPy: the figures of sampled.cu, up to the rounding of double."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.freivalds.sampled import CANDIDATE_BITS, CANDIDATES, FIGURES, Bound, Choice, in_stratum, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.problem.problem import GemmProblem

    Array = np.ndarray[Any, Any]
    Pair = tuple[Array, Array]
    """A sum, and what its rounding lost."""

_TOGETHER: Final = 1 << 17
"""Elements that are gathered at once: in double precision, what stays in a processor's cache."""
_SPLIT: Final = 2.0**27 + 1


def figures(problem: GemmProblem, a: Array, b: Array, c: Array | None, d: Array, seed: int) -> Array:
    """(products, FIGURES): of each product the worst element, as `sampled.worst` takes them; no empty result."""
    choice, bound = Choice.of(problem), Bound.of(problem)
    of_d = _Gather.of(problem, d, "N")
    operands = _Gather.of(problem, a, problem.trans_a), _Gather.of(problem, b, problem.trans_b)
    of_c = None if c is None or problem.beta == 0 else _Gather.of(problem, c, "N")
    found = np.empty((choice.products, FIGURES))
    looked_at = max(choice.count, choice.quarter * min(CANDIDATES, max(choice.m, choice.n, problem.k)))
    for some in _slices(choice.products, looked_at):
        rows, columns = places(choice, operands, problem.k, of_d, seed, some)
        products = np.broadcast_to(np.arange(some.start, some.stop)[:, None], rows.shape)
        flat = products.ravel(), rows.ravel(), columns.ravel()
        ratio, error = np.empty(rows.size), np.empty(rows.size)
        for few in _slices(rows.size, problem.k):
            at = flat[0][few], flat[1][few], flat[2][few]
            sums = _Sums.of(operands, problem.k, at, compensated=bound.compensated)
            ratio[few], error[few] = _judged(problem, bound, sums, None if of_c is None else of_c(*at), of_d(*at))
        ratio = ratio.reshape(rows.shape)
        first = np.argmax(np.where(np.isnan(ratio), -1.0, ratio), axis=1)
        picked = np.arange(len(rows)), first
        for column, x in enumerate((ratio, error.reshape(rows.shape), rows, columns)):
            found[some, column] = x[picked]
    return found


def places(
    choice: Choice, operands: tuple[_Gather, _Gather], k: int, d: _Gather, seed: int, some: slice
) -> tuple[Array, Array]:
    """(some products, count) rows, and columns, of the elements that are looked at."""
    found = (choice.spread(seed, some), _small(choice, d, seed, some), _large(choice, operands, k, seed, some))
    rows, columns = (np.concatenate(arrays, axis=1) for arrays in zip(*found, strict=True))
    return rows, columns


def _small(choice: Choice, d: _Gather, seed: int, some: slice) -> tuple[Array, Array]:
    """Rows and columns (some products, quarter) where the smallest of a row, or of a column, is."""
    numbers = choice.numbers(choice.count // 2, choice.quarter, some)
    upper, kind = words(seed, numbers)
    aimed = np.broadcast_to(np.arange(choice.quarter), numbers.shape)
    found = np.empty(numbers.shape, np.int64), np.empty(numbers.shape, np.int64)
    for axis in (0, 1):
        here = kind & np.uint64(1) == axis
        lines = in_stratum((choice.m, choice.n)[axis], aimed[here], choice.bits - 2, upper[here])
        extent = (choice.n, choice.m)[axis]
        if extent <= CANDIDATES:
            along = np.broadcast_to(np.arange(extent), (len(lines), extent))
        else:
            along = choice.candidates(seed, numbers[here], extent, CANDIDATE_BITS, 0)
        place = (lines[:, None], along) if axis == 0 else (along, lines[:, None])
        size = _larger_part(d(numbers[here][:, None] >> choice.bits, *place))
        lost_key = np.where(kind[here] & np.uint64(2), -1.0, np.inf)[:, None]
        chosen = np.argmin(np.where(np.isfinite(size) & (size > 0), size, lost_key), axis=-1)
        found[axis][here], found[1 - axis][here] = lines, along[np.arange(len(lines)), chosen]
    return found


def _large(choice: Choice, operands: tuple[_Gather, _Gather], k: int, seed: int, some: slice) -> tuple[Array, Array]:
    """Rows and columns (some products, quarter) where the largest of some elements of op(A), and of op(B), are."""
    numbers = choice.numbers(choice.count // 2 + choice.quarter, choice.quarter, some)
    if k == 0:
        return np.zeros_like(numbers), np.zeros_like(numbers)
    product = numbers[..., None] >> choice.bits
    found = []
    for scan, (gather, elements, length) in enumerate(
        ((operands[0], choice.m * k, k), (operands[1], k * choice.n, choice.n))
    ):
        along = choice.candidates(seed, numbers, elements, choice.large_bits(elements), scan)
        size = _larger_part(gather(product, along // length, along % length))
        chosen = np.argmax(np.where(np.isfinite(size), size, -np.inf), axis=-1)
        found.append(np.take_along_axis(along, chosen[..., None], -1)[..., 0])
    return found[0] // k, found[1] % choice.n


def _slices(count: int, each: int) -> Iterator[slice]:
    """Yield slices of `count` things that take `each` elements."""
    step = max(1, _TOGETHER // max(1, each))
    for start in range(0, count, step):
        checkpoint()
        yield slice(start, min(start + step, count))


def _larger_part(x: Array) -> Array:
    """NaN where one is."""
    return np.asarray(np.maximum(np.abs(x.real), np.abs(x.imag)))


def _sum_of_parts(x: Array) -> Array:
    return np.asarray(np.abs(x.real) + np.abs(x.imag) if x.dtype.kind == "c" else np.abs(x))


@dataclass(frozen=True)
class _Gather:
    """Elements of op(array), broadcast to the problem's batch, in double precision."""

    planes: tuple[Array, ...]
    batch_shape: tuple[int, ...]
    conjugate: bool
    wide: type[Any]

    @classmethod
    def of(cls, problem: GemmProblem, array: Array, trans: str) -> _Gather:
        planes = tuple(array) if problem.planar else (array,)
        planes = tuple(plane.swapaxes(-1, -2) if trans in {"T", "C"} else plane for plane in planes)
        wide = np.complex128 if problem.dtype.kind == "c" else np.float64
        return cls(planes, problem.batch_shape, trans in {"C", "R"}, wide)

    def __call__(self, product: Array, row: Array, column: Array) -> Array:
        """Return the elements at those places, which broadcast."""
        found = [self._of(plane, product, row, column) for plane in self.planes]
        x = found[0].astype(self.wide)
        if len(found) > 1:
            x.imag = found[1]
        return np.asarray(x.conj() if self.conjugate else x)

    def _of(self, plane: Array, product: Array, row: Array, column: Array) -> Array:
        index = (*_unraveled(product, self.batch_shape), row, column)[len(self.batch_shape) + 2 - plane.ndim :]
        # Along an axis of one element there is but that one.
        found = plane[tuple(i if extent > 1 else 0 * i for i, extent in zip(index, plane.shape, strict=True))]
        return np.asarray(found)


def _unraveled(number: Array, shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Like np.unravel_index, which is wrong for arrays of two axes and more than 8192 elements in NumPy 2.4.6."""
    found: list[Array] = []
    for extent in reversed(shape):
        number, here = np.divmod(number, extent)
        found.insert(0, here)
    return tuple(found)


@dataclass(frozen=True)
class _Sums:
    """Sums of each element: real and imaginary part, size, terms that are not zero, squared norms."""

    re: Pair
    im: Pair
    size: Array
    terms: Array
    of_a: Array
    of_b: Array

    @classmethod
    def of(
        cls, operands: tuple[_Gather, _Gather], k: int, at: tuple[Array, Array, Array], *, compensated: bool
    ) -> _Sums:
        product, row, column = (index[:, None] for index in at)
        parts = 2 if operands[0].wide is np.complex128 else 1
        dot = _compensated if compensated else _plain
        sums = _Sums((np.zeros(len(row)),) * 2, (np.zeros(len(row)),) * 2, *np.zeros((4, len(row))))
        for depth in _slices(k, len(row)):
            along = np.arange(depth.start, depth.stop)[None]
            a, b = operands[0](product, row, along), operands[1](product, along, column)
            size_a, size_b = _sum_of_parts(a), _sum_of_parts(b)
            re, im = [(a.real, b.real)], []
            if parts == 2:
                re, im = [*re, (-a.imag, b.imag)], [(a.real, b.imag), (a.imag, b.real)]
            size = np.where(np.isfinite(size_a) & np.isfinite(size_b), size_a * size_b, 0).sum(axis=-1)
            terms = ((size_a != 0) & (size_b != 0)).sum(axis=-1)
            sums += cls(dot(re, row), dot(im, row), size, terms, np.square(size_a).sum(-1), np.square(size_b).sum(-1))
        return sums

    def __add__(self, more: _Sums) -> _Sums:
        """Return the sums over the terms of both."""
        return _Sums(
            _added(self.re, more.re),
            _added(self.im, more.im),
            self.size + more.size,
            self.terms + more.terms,
            self.of_a + more.of_a,
            self.of_b + more.of_b,
        )


def _added(x: Pair, y: Pair) -> Pair:
    """The sum of two, and what its rounding and theirs lost."""
    total, lost = two_sum(x[0], y[0])
    return total, np.where(np.isfinite(total), lost + x[1] + y[1], 0.0)


def _plain(factors: list[Pair], like: Array) -> Pair:
    """Dot products: products are exact."""
    total = np.zeros(len(like))
    for x, y in factors:
        total = total + (x * y).sum(axis=-1)
    return total, np.zeros(len(like))


def _compensated(factors: list[Pair], like: Array) -> Pair:
    """Dot products with what their rounding lost, halves added to halves (Dot2 of T. Ogita, S. M. Rump, S. Oishi,
    "Accurate sum and dot product", SIAM J. Sci. Comput. 26 (2005)).
    """
    if not factors:
        return np.zeros(len(like)), np.zeros(len(like))
    pairs = [two_product(x, y) for x, y in factors]
    high, low = np.concatenate([p for p, _ in pairs], axis=-1), sum(q.sum(axis=-1) for _, q in pairs)
    while high.shape[-1] > 1:
        if high.shape[-1] % 2:
            high = np.concatenate([high, np.zeros((*high.shape[:-1], 1))], axis=-1)
        half = high.shape[-1] // 2
        high, lost = two_sum(high[..., :half], high[..., half:])
        low = low + lost.sum(axis=-1)
    high = high.sum(axis=-1)
    return high, np.where(np.isfinite(high), low, 0.0)


def two_sum(x: Array, y: Array) -> Pair:
    """Sums and what their rounding loses (D. E. Knuth, The Art of Computer Programming, volume 2, 4.2.2, theorem B)."""
    total = x + y
    of_y = total - x
    return total, (x - (total - of_y)) + (y - of_y)


def two_product(x: Array, y: Array) -> Pair:
    """Products and what their rounding loses (T. J. Dekker, "A floating-point technique for extending the available
    precision", Numer. Math. 18 (1971)); 0 is said to be lost where the numbers are too large to be split.
    """
    product = x * y
    x_high, y_high = (_SPLIT * z - (_SPLIT * z - z) for z in (x, y))
    x_low, y_low = x - x_high, y - y_high
    lost = x_low * y_low - (((product - x_high * y_high) - x_low * y_high) - x_high * y_low)
    return product, np.where(np.isfinite(lost), lost, 0.0)


def _less(x: Array, factor: float, y: Array) -> Array:
    """The difference x - factor y, the product not rounded."""
    if factor == 0:
        return x
    product, lost = two_product(np.full_like(y, factor), y)
    return np.asarray((x - product) - lost)


def _remainder(d: Array, problem: GemmProblem, p: Pair, turned: Pair, c: Array, turned_c: Array) -> Array:
    """One part of D - alpha p - beta c."""
    alpha, beta = problem.alpha, problem.beta
    left = _less(_less(d, alpha.real, p[0]), alpha.imag, turned[0])
    left = _less(_less(left, beta.real, c), beta.imag, turned_c)
    return _less(_less(left, alpha.real, p[1]), alpha.imag, turned[1])


def _scaled(x: Array, factor: complex) -> Array:
    """Each part alone where the factor is real, so that an infinity does not turn into NaN by 0 * inf."""
    if x.dtype.kind != "c":
        return np.asarray(x * factor.real)
    if factor.imag == 0:
        return _complex(x.real * factor.real, x.imag * factor.real)
    return _complex(x.real * factor.real - x.imag * factor.imag, x.real * factor.imag + x.imag * factor.real)


def _complex(re: Array, im: Array) -> Array:
    x = np.empty(np.shape(re), np.complex128)
    x.real, x.imag = re, im
    return x


def _judged(problem: GemmProblem, bound: Bound, sums: _Sums, c: Array | None, d: Array) -> Pair:
    """Excess and error of each element; see `judge` in cuda/freivalds/sampled.cu."""
    is_complex = d.dtype.kind == "c"
    of_alpha, of_beta = (abs(z.real) + abs(z.imag) for z in (problem.alpha, problem.beta))
    size = np.sqrt(sums.of_a) * np.sqrt(sums.of_b) if bound.by_norms else sums.size
    weight = of_alpha * size
    expected = _scaled(_complex(sums.re[0], sums.im[0]) if is_complex else sums.re[0], problem.alpha)
    if c is not None:
        size_c = _sum_of_parts(c)
        weight = weight + np.where(np.isfinite(size_c), of_beta * size_c, 0.0)
        expected = (
            _complex(*(x + y for x, y in _parts(expected, _scaled(c, problem.beta))))
            if is_complex
            else (expected + _scaled(c, problem.beta))
        )
    c = np.zeros_like(d) if c is None else c
    overflows = ~((sums.size < bound.largest) & (weight < bound.largest))
    unit = bound.per_root * np.sqrt(sums.terms * (2.0 if is_complex else 1.0)) + bound.rest
    minus = -sums.im[0], -sums.im[1]
    error = np.abs(_remainder(d.real, problem, sums.re, minus, c.real, -c.imag))
    if is_complex:
        error = np.maximum(error, np.abs(_remainder(d.imag, problem, sums.im, sums.re, c.imag, c.real)))
    ratio = np.where(error == 0, 0.0, error / (unit * weight + bound.floor))
    error = np.where(error == 0, 0.0, np.where(weight > 0, error / weight, np.inf))
    same = ~np.isfinite(d) if is_complex else np.where(np.isnan(expected), np.isnan(d), d == expected)
    for wrong, unknown in ((~np.isfinite(d), overflows), (~np.isfinite(expected), overflows | (of_alpha == 0))):
        found = np.where(unknown, np.nan, np.where(same & ~np.isfinite(expected), 0.0, np.inf))
        ratio, error = np.where(wrong, found, ratio), np.where(wrong, found, error)
    return ratio, error


def _parts(x: Array, y: Array) -> tuple[Pair, Pair]:
    return (x.real, y.real), (x.imag, y.imag)
