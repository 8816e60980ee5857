"""Model of the residue kernels in NumPy and exact integers: slow, for tests.

Every step of `ozaki` has its function here. The kernels must give the same codes, the same integers and residues, and
(but for the rare tie) the same bits of the result. Operands are matrices of lines along k: rows of op(A), columns of
op(B).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.algorithms.ozaki.bound import NU, WHOLE, limit, whole

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.ozaki.moduli import Moduli

    Array = np.ndarray[Any, Any]

ZERO_LINE = 1
NEVER = 1 << 30
"""The deficit of what is not finite, in 64ths."""
UNIT = 2.0**-53
CLASSES, CLEAN_CLASSES, LINES = 32, 8, 32
"""Classes of steps of k, how many of them have no outlier at least, lines that have half of the most in the mean
(cuda/ozaki/outliers.cuh)."""


def parts(x: Array) -> list[Array]:
    """The real part, and the imaginary one where there is one."""
    return [x.real, x.imag] if x.dtype.kind == "c" else [x]


def codes(x: Array, moduli: Moduli) -> Array:
    """The scale n / 4 * 2**e of each line as 8 e + n: the largest with a norm of at most the target. int64 (lines,)."""
    target = moduli.target(x.shape[1])
    found = []
    for line in np.stack([np.asarray(p, np.float64) for p in parts(x)], axis=-1).reshape(len(x), -1):
        largest = float(np.abs(line).max(initial=0))
        if largest == 0:
            found.append(ZERO_LINE)
            continue
        shift = math.frexp(largest)[1]
        norm = math.sqrt(math.fsum(math.ldexp(float(v), -shift) ** 2 for v in line)) * (1 + 2.0**-30)
        fraction, exponent = math.frexp(target / norm)
        found.append(8 * (exponent - 1 - shift) + int(fraction * 8))
    return np.array(found, np.int64)


def outliers(x: Array, moduli: Moduli, most: int) -> Array:
    """Which elements of each line are multiplied apart, at most so many, half of that in the mean. bool (lines, k)."""
    k = x.shape[1]
    size = np.max([np.abs(p) for p in parts(x)], axis=0)
    rest, code = np.zeros(x.shape, bool), codes(x, moduli)
    for i, line in enumerate(size):
        if not line.any():
            continue
        top = float(line.max())
        scaled = [np.ldexp(p[i], -math.frexp(top)[1]) for p in parts(x)]
        squares, sizes = sum(p**2 for p in scaled), [np.abs(p) for p in scaled]
        largest = np.array([line[c::CLASSES].max(initial=0) for c in range(CLASSES)])
        above = np.float64((3 if k < 4096 else 2) * np.sort(largest)[CLEAN_CLASSES - 1])
        above = (above.view(np.int64) | 0xFFFFFFFF).view(np.float64)
        clean = (largest <= above)[np.arange(k) % CLASSES]
        all_squares, of_clean = squares.sum(), squares[clean].sum()
        share = CLASSES / (largest <= above).sum()
        if 4 * most * math.ldexp(top, -math.frexp(top)[1]) ** 2 < all_squares or of_clean > 0.75 * all_squares:
            continue
        norm = math.sqrt(of_clean * share)
        if norm > 0:
            counted = max(each[clean].sum() for each in sizes) * share / norm * moduli.target(k)
            counted /= whole(moduli, k, complex_=len(scaled) == 2)
            if (k - counted - (k / 4 + 2) / WHOLE) * WHOLE > limit(k) * 3 / 4:
                continue
        apart = line > above
        if not 0 < apart.sum() <= most:
            continue
        (finer,) = codes(np.where(apart, 0, x[i])[None], moduli)
        binades = int(finer >> 3) - int(code[i] >> 3)
        if finer == ZERO_LINE or 2 * int(finer & 7) << max(0, min(binades, 9)) >= 3 * int(code[i] & 7):
            rest[i] = apart
    for first in range(0, len(x), LINES):
        if 2 * rest[first : first + LINES].sum() > LINES * most:
            rest[first : first + LINES] = False
    return rest


def integers(x: Array, code: Array) -> list[Array]:
    """The scaled parts, of up to 56 bits, rounded once: long double has them all. int64 (lines, k)."""
    factor = np.where(code == ZERO_LINE, 0, code & 7)[:, None] / np.longdouble(4)
    rounded = [np.rint(np.ldexp(np.asarray(p, np.longdouble), (code >> 3)[:, None]) * factor) for p in parts(x)]
    return [each.astype(np.int64) for each in rounded]


def centred(x: Array, p: int) -> Array:
    """X modulo p, nearest to 0; half of p counts as its negative, as it does in a byte."""
    return (x + p // 2) % p - p // 2


def residues(whole: list[Array], p: int, root: int) -> list[Array]:
    """Return the residues of real numbers, or those of a + rb and a - rb of complex ones."""
    if len(whole) == 1:
        return [centred(whole[0], p)]
    first, second = whole[0] % p, whole[1] % p * root % p
    return [centred(first + second, p), centred(first - second, p)]


def products(a: list[Array], b: list[Array], moduli: Moduli) -> list[Array]:
    """The parts of the integer product A B^T by Chinese remainders. Python integers (rows of A, rows of B)."""
    total: list[Array] = []
    for p, root, weights in zip(moduli.moduli, moduli.roots, moduli.weights, strict=True):
        each = [x @ y.T % p for x, y in zip(residues(a, p, root), residues(b, p, root), strict=True)]
        if len(each) == 2:
            each = [each[0] + each[1], each[0] - each[1]]
        total = total or [np.zeros(x.shape, object) for x in each]
        total = [t + x.astype(object) * weight for t, x, weight in zip(total, each, weights, strict=True)]
    half = moduli.product // 2
    return [(t + half) % moduli.product - half for t in total]


def gemm(a: Array, b: Array, moduli: Moduli) -> Array:
    """A B for float64 or complex128 matrices of finite elements, without the marks and the patches."""
    lines_a, lines_b = a, b.T
    code_a, code_b = codes(lines_a, moduli), codes(lines_b, moduli)
    whole = products(integers(lines_a, code_a), integers(lines_b, code_b), moduli)
    result = np.zeros((a.shape[0], b.shape[1]), np.result_type(a, b))
    for target, values in zip(parts(result), whole, strict=True):
        for i, j in np.ndindex(*result.shape):
            target[i, j] = _unscaled(int(values[i, j]), int(code_a[i]), int(code_b[j]))
    return result


def _unscaled(value: int, code_a: int, code_b: int) -> float:
    """Value / (scale of A * scale of B), rounded once: Python divides integers exactly."""
    if ZERO_LINE in {code_a, code_b}:
        return 0.0
    exponent = -(code_a >> 3) - (code_b >> 3)
    return math.ldexp(16 * value / ((code_a & 7) * (code_b & 7)), exponent)


# ---- what the bound promises (algorithms.ozaki.bound)


def least(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """M, what sum_k |x_k| |y_k| is at least for two real parts of lines that pass."""
    counted = NU - 1 / 128 - 1 / (32 * k)
    return counted * k * whole(moduli, k, complex_=complex_) ** 2


def lost(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """W: the bound of |D - R|, before D is rounded, in units of 2^-53 (|A| |B|) that always holds."""
    parts = 2 if complex_ else 1
    found = math.sqrt(parts * k) * moduli.target(k) + parts * k / 4
    return found / (UNIT * least(moduli, k, complex_=complex_))


def deviation(moduli: Moduli, k: int, *, complex_: bool) -> float:
    """R: the standard deviation, at most, of what independent roundings lose, in the same units."""
    return moduli.target(k) / math.sqrt(6) / (UNIT * least(moduli, k, complex_=complex_))


def deficits(parts: list[Array], size: float) -> Array:
    """`most`, `both` and `better` of lines, as the theorem has them, of their scaled real parts (lines, k).

    float64 (lines, 3). `size`: of a whole element.
    """
    k = parts[0].shape[1]
    short = np.stack([k - np.minimum(np.abs(part) / size, 1).sum(axis=1) for part in parts], axis=1)
    there = np.stack([np.asarray(part.any(axis=1)) for part in parts], axis=1)
    most = np.where(there, short, 0).max(axis=1)
    better = np.where(there, short, np.inf).min(axis=1)
    both = np.where(there.all(axis=1), most, NEVER / WHOLE)
    found = np.stack([most, both, better], axis=1)
    found[~np.asarray(there.any(axis=1))] = 0
    return found


def least_deficits(parts: list[Array], size: float) -> Array:
    """Return a lower bound of `better` of scaled lines (lines, k), by their norms alone. float64 (lines,)."""
    k = parts[0].shape[1]
    counted = np.max([np.abs(part).sum(axis=1) for part in parts], axis=0) / size
    return np.where(counted > 0, np.maximum(k - counted - (k / 4 + 2) / WHOLE, 0), 0)


def passes(rows: Array, columns: Array, k: int) -> bool:
    """Whether a tile of lines with these deficits does."""
    a, b = rows.max(axis=0), columns.max(axis=0)
    return bool(min(a[0] + b[0], a[1] + b[2], a[2] + b[1]) * WHOLE <= limit(k))
