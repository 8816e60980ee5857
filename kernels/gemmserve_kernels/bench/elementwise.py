"""Errors of a product element by element, in units of u: the worst |D - R|_ij / (|A| |B|)_ij, by NumPy or CuPy.

R is the exact product, or near enough to it: of 32-bit data the product in double, whose own error is at most
k 2**-53 (|A| |B|)_ij; of 64-bit data `exact_product`. Complex matrices are embedded into real ones,

    [Re Im] = [Ar Ai] [ Br Bi]        so that   |[Ar Ai]| [|Br| |Bi|]
                      [-Bi Br]                            [|Bi| |Br|]

holds (|Ar| |Br| + |Ai| |Bi|) and (|Ar| |Bi| + |Ai| |Br|), what real and imaginary part are measured against, and every
sum is one of real products: of what is not finite the class is then that of the definition. All work is done by the
library's real GEMM, a panel at a time.

Sources: J. Demmel and others on grading matrix products by elementwise bounds ("Grade A": |D - R| <= c u |A| |B|);
N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 2.8 (underflow), 3.1 and 3.5; K. Ozaki,
T. Ogita, S. Oishi, S. M. Rump, Error-free transformations of matrix multiplication, Numer. Algorithms 59 (2012); D. E.
Knuth, The Art of Computer Programming 2, section 4.2.2 (the error of a sum).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    Array = Any

MAX_SLICES: Final = 16
"""Slices of an operand at most, of 19 bits or more: 304 bits below the largest element of a row. What an operand holds
below that stays in the last slice, whose products round as double precision does."""
PANEL_BYTES: Final = 1 << 29
"""Bytes of one panel of an operand or of the product in double, about; a dozen are held at once."""


def unit(dtype: Any) -> float:
    """The unit roundoff u: 2**-24 of float32 and complex64, 2**-53 of float64 and complex128."""
    return float(np.finfo(real_dtype(np.dtype(dtype))).eps) / 2


@dataclass(frozen=True)
class Elementwise:
    """Worst errors of one product, in units of u, and where the worst of the moduli is (row, column).

    `modulus`: |D - R| / (|A| |B|); `real`, `imag`: of the parts, each against what it is the sum of (see above). 0 over
    0 is 0, and a quotient is infinite where only its denominator is 0 or where D is of another class than R: finite,
    NaN, either infinity. Complex elements are finite or not: plain arithmetic itself makes NaN of an infinite part
    where it multiplies by a complex alpha of 1. `odd` counts the parts that are not finite in D or should not be.
    """

    modulus: float
    real: float
    imag: float
    at: tuple[int, int]
    odd: int


def limit(vendor: float) -> float:
    """Return the limit of an error, in units of u, beside the vendor's own on the same data: Grade A as this project
    has it.
    """
    return max(4.0, 2 * vendor)


def elementwise(
    xp: Any, a: Array, b: Array, results: Mapping[str, Array], *, panel_bytes: int = PANEL_BYTES
) -> dict[str, Elementwise]:
    """Errors of every result, (m, n), as a product of `a`, (m, k), and `b`, (k, n), all of one library.

    Results have the dtype of the operands; its unit roundoff is the unit. What plain arithmetic may lose to underflow,
    half of the smallest subnormal number for every product of a sum, does not count.
    """
    dtype = np.dtype(np.result_type(a.dtype, b.dtype))
    (m, k), n = a.shape, b.shape[1]
    parts = 2 if dtype.kind == "c" else 1
    worst = {name: _Worst(xp, dtype) for name in results}
    per_column, per_row = 8 * parts * parts * max(k, 1), 8 * parts * max(k, 1)
    columns = max(1, min(n, panel_bytes // per_column))
    rows = max(1, min(m, panel_bytes // per_row, panel_bytes // (8 * parts * columns)))
    for left in range(0, n, columns):
        right = _Factor.right(xp, b[:, left : left + columns], dtype)
        for top in range(0, m, rows):
            truth = _Truth(xp, _Factor.left(xp, a[top : top + rows], dtype), right, dtype)
            for name, d in results.items():
                worst[name].take(truth, d[top : top + rows, left : left + columns], (top, left))
    return {name: each.found() for name, each in worst.items()}


def product_and_scale(xp: Any, a: Array, b: Array) -> tuple[Array, Array]:
    """R, the product rounded to double or complex128, and |A| |B| in double, both (m, n). Finite operands."""
    dtype = np.dtype(np.result_type(a.dtype, b.dtype))
    truth = _Truth(xp, _Factor.left(xp, a, dtype), _Factor.right(xp, b, dtype), dtype)
    reference, moduli = truth.high, truth.moduli
    if truth.exponent is not None:
        n = moduli.shape[1]
        reference = xp.ldexp(reference, truth.exponent)
        moduli = xp.ldexp(moduli, truth.exponent[:, :n])
    if dtype.kind != "c":
        return reference, moduli
    joined = xp.empty(moduli.shape, np.complex128)
    joined.real, joined.imag = reference[:, : moduli.shape[1]], reference[:, moduli.shape[1] :]
    return joined, moduli


# ---- the exact product


def exact_product(xp: Any, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Real A B of finite float64, (..., m, k) and (..., k, n), as (high + low) 2**exponent, the three (..., m, n).

    Rows of A and columns of B are scaled by powers of two and cut into slices, A = S1 + S2 + ..., each a multiple of
    2**q with |S| <= 2**(q + bits) in that row, 2 bits + log2 k <= 53: sums of products of two slices are integers of at
    most 53 bits times a power of two, and exact in whatever order, with whatever multiply-adds a GEMM has.

    Slices of an element x add up to less than 4 |x|: the first that is not 0 is at most 2 |x|, the rest then at most
    |x|, and every slice after it at most 2**(1 - bits) of the one before. So the t = s1 s2 products of slices add up
    to at most 16 |A| |B|. They are summed in two doubles: the error of every sum is known exactly (Knuth) and at most
    16 u |A| |B|, so the sum of those errors is below 16 t u |A| |B| and off by t u of it: by 16 t**2 u**2 |A| |B| in
    all, which for t = 256 is 2**-33 u. |low| is at most half a unit of high's last place.
    """
    bits = slice_bits(a.shape[-1])
    exponent_a, slices_a = slices(xp, a, bits, axis=-1)
    exponent_b, slices_b = slices(xp, b, bits, axis=-2)
    high, low = _summed(xp, slices_a, slices_b)
    return high, low, exponent_a + exponent_b


def slice_bits(k: int) -> int:
    """Bits of a slice, for sums of k products of two of them to be exact."""
    return (53 - math.ceil(math.log2(max(2, k)))) // 2


def slices(xp: Any, x: Array, bits: int, axis: int) -> tuple[Array, list[Array]]:
    """Exponents along `axis`, and slices of `bits` bits that add up to x / 2**exponent, one at least."""
    exponent = _exponents(xp, x, axis)
    rest = xp.ldexp(x, -exponent)
    found: list[Array] = []
    while len(found) < MAX_SLICES - 1:
        top = _exponents(xp, rest, axis)
        # Adding and taking away 1.5 * 2**(52 + q) rounds to multiples of 2**q.
        magic = xp.ldexp(xp.full(top.shape, 1.5), top - bits + 52)
        piece = (rest + magic) - magic
        found.append(piece)
        rest = rest - piece
        if not bool((rest != 0).any()):
            return exponent, found
    return exponent, [*found, rest]


def _exponents(xp: Any, x: Array, axis: int) -> Array:
    """Exponent of the largest magnitude along `axis`, which is less than 2 to that power; int32."""
    if not x.shape[axis]:
        return xp.zeros(tuple(1 if i == axis % x.ndim else n for i, n in enumerate(x.shape)), np.int32)
    return xp.frexp(abs(x).max(axis=axis, keepdims=True))[1].astype(np.int32)


def _summed(xp: Any, slices_a: list[Array], slices_b: list[Array]) -> tuple[Array, Array]:
    """The sum of the products of all slices, in two doubles."""
    high = low = None
    for slice_a, slice_b in itertools.product(slices_a, slices_b):
        part = slice_a @ slice_b
        if high is None or low is None:
            high, low = part, xp.zeros_like(part)
            continue
        total = high + part
        taken = total - high
        low += (high - (total - taken)) + (part - taken)
        high = total
    assert high is not None
    assert low is not None
    total = high + low
    return total, low - (total - high)


# ---- panels


class _Factor:
    """Some rows of A (`axis` -1), or columns of B (-2): embedded, cut into slices where the data are of 64 bits."""

    def __init__(self, xp: Any, embedded: Array, dtype: np.dtype[Any], axis: int) -> None:
        self._xp, self._axis = xp, axis
        self.whole = embedded
        self.finite = xp.isfinite(embedded).all(axis=axis, keepdims=True)
        self.all_finite = bool(self.finite.all())
        self.exponent: Array | None = None
        self.slices: list[Array] = []
        if real_dtype(dtype).itemsize == 8:
            kept = embedded if self.all_finite else xp.where(self.finite, embedded, 0.0)
            self.exponent, self.slices = slices(xp, kept, slice_bits(embedded.shape[axis]), axis)

    @classmethod
    def left(cls, xp: Any, a: Array, dtype: np.dtype[Any]) -> _Factor:
        """[Ar Ai], or A."""
        return cls(xp, a.astype(np.float64) if dtype.kind != "c" else embedded_left(xp, a), dtype, -1)

    @classmethod
    def right(cls, xp: Any, b: Array, dtype: np.dtype[Any]) -> _Factor:
        """[Br Bi; -Bi Br], or B."""
        return cls(xp, b.astype(np.float64) if dtype.kind != "c" else embedded_right(xp, b), dtype, -2)

    def magnitudes(self) -> Array:
        """|embedded|, scaled as the slices are."""
        size = abs(self.whole)
        return size if self.exponent is None else self._xp.ldexp(size, -self.exponent)

    def moduli(self, magnitudes: Array) -> Array:
        """|A| or |B| of complex data, scaled likewise."""
        half = magnitudes.shape[1] // 2
        if self._axis == -2:
            magnitudes = magnitudes[: magnitudes.shape[0] // 2]
        return self._xp.hypot(magnitudes[:, :half], magnitudes[:, half:])


def embedded_left(xp: Any, a: Array) -> Array:
    """[Ar Ai] of complex A, (..., m, 2 k), in double."""
    return xp.concatenate(_parts(a), axis=-1)


def embedded_right(xp: Any, b: Array) -> Array:
    """[Br Bi; -Bi Br] of complex B, (..., 2 k, 2 n), in double."""
    re, im = _parts(b)
    return xp.concatenate([xp.concatenate([re, im], axis=-1), xp.concatenate([-im, re], axis=-1)], axis=-2)


def _parts(x: Array) -> list[Array]:
    """Real and imaginary part in double."""
    if x.dtype.kind != "c":
        return [x.astype(np.float64), x.astype(np.float64) * 0]
    return [x.real.astype(np.float64), x.imag.astype(np.float64)]


class _Truth:
    """Return the expected panel of the product: all of it scaled by 2**-exponent, where there is one."""

    def __init__(self, xp: Any, left: _Factor, right: _Factor, dtype: np.dtype[Any]) -> None:
        self.xp, self.dtype = xp, dtype
        self.real_dtype = real_dtype(dtype)
        self.low: Array | None = None
        self.exponent: Array | None = None
        inner = left.whole.shape[-1]
        with np.errstate(all="ignore"):
            if left.exponent is None or right.exponent is None:
                self.high = left.whole @ right.whole
                expected = self.high.astype(self.real_dtype)
            else:
                self.high, self.low = _summed(xp, left.slices, right.slices)
                self.exponent = left.exponent + right.exponent
                expected = xp.ldexp(self.high, self.exponent)
                if not (left.all_finite and right.all_finite):
                    plain = left.whole @ right.whole
                    expected = xp.where(left.finite & right.finite, expected, plain)
            size_a, size_b = left.magnitudes(), right.magnitudes()
            self.parts = size_a @ size_b
            self.moduli = self.parts if dtype.kind != "c" else left.moduli(size_a) @ right.moduli(size_b)
        self.expected = None if bool(xp.isfinite(expected).all()) else expected
        tiny = float(np.finfo(self.real_dtype).smallest_subnormal)
        self.lost: Any = inner / 2 * tiny
        if self.exponent is not None:
            self.lost = xp.ldexp(xp.full(self.exponent.shape, inner / 2), _log2(tiny) - self.exponent)

    def ratios(self, d: Array) -> tuple[Array, Array, int]:
        """Errors of every part, (rows, parts times columns), and of the moduli; the number of non-finite elements."""
        xp, n = self.xp, d.shape[1]
        if self.dtype.kind == "c":
            d = xp.concatenate([d.real, d.imag], axis=1)
        stored, d = d, d.astype(np.float64)
        with np.errstate(all="ignore"):
            if self.exponent is not None:
                d = xp.ldexp(d, -self.exponent)
            difference = d - self.high
            if self.low is not None:
                difference = difference - self.low
            difference = xp.maximum(abs(difference) - self.lost, 0.0)
            parts = self._over(difference, self.parts, d != 0)
            moduli, odd = parts, self._odd(stored)
            if self.dtype.kind == "c":
                there = (d[:, :n] != 0) | (d[:, n:] != 0)
                moduli = self._over(xp.hypot(difference[:, :n], difference[:, n:]), self.moduli, there)
            if odd is None:
                return parts, moduli, 0
            count = int(odd.sum())
            if self.dtype.kind == "c":
                odd = odd[:, :n] | odd[:, n:]
            value = xp.where(self._of_another_class(stored, n), np.inf, xp.zeros_like(moduli))
            moduli = xp.where(odd, value, moduli)
            if self.dtype.kind == "c":
                odd, value = (xp.concatenate([x, x], axis=1) for x in (odd, value))
            return xp.where(odd, value, parts), moduli, count

    def _over(self, difference: Array, size: Array, there: Array) -> Array:
        """0 / 0 is 0; what is there where nothing should be is infinite."""
        xp = self.xp
        nothing = size == 0
        found = difference / xp.where(nothing, 1.0, size)
        return xp.where(nothing & there, np.inf, xp.where(nothing, 0.0, found))

    def _odd(self, stored: Array) -> Array | None:
        """Elements that are not finite, or should not be; None of none."""
        finite = self.xp.isfinite(stored)
        if self.expected is not None:
            finite = finite & self.xp.isfinite(self.expected)
        elif bool(finite.all()):
            return None
        return ~finite

    def _of_another_class(self, stored: Array, n: int) -> Array:
        """Class of each element: NaN, infinity with its sign, or finite; of complex ones only whether it is finite."""
        xp = self.xp
        expected = xp.zeros_like(stored) if self.expected is None else self.expected
        finite, should = xp.isfinite(stored), xp.isfinite(expected)
        if self.dtype.kind == "c":
            return (finite[:, :n] & finite[:, n:]) != (should[:, :n] & should[:, n:])
        return ~((stored == expected) | (xp.isnan(stored) & xp.isnan(expected)) | (finite & should))


def _log2(x: float) -> int:
    return math.frexp(x)[1] - 1


class _Worst:
    """The worst errors of one result so far."""

    def __init__(self, xp: Any, dtype: np.dtype[Any]) -> None:
        self.xp, self.unit, self.complex = xp, unit(dtype), dtype.kind == "c"
        self.modulus = self.real = self.imag = 0.0
        self.at, self.odd = (0, 0), 0

    def take(self, truth: _Truth, d: Array, origin: tuple[int, int]) -> None:
        n = d.shape[1]
        if not d.size:
            return
        parts, moduli, odd = truth.ratios(d)
        self.odd += odd
        self.real = max(self.real, float(parts[:, :n].max()))
        if self.complex:
            self.imag = max(self.imag, float(parts[:, n:].max()))
        place = int(moduli.argmax())
        top = float(moduli[place // n, place % n])
        if top > self.modulus:
            self.modulus, self.at = top, (origin[0] + place // n, origin[1] + place % n)

    def found(self) -> Elementwise:
        modulus, real, imag = (value / self.unit for value in (self.modulus, self.real, self.imag))
        return Elementwise(modulus, real, imag, self.at, self.odd)
