"""Sums of squares on the CPU from Gram matrices, b^H (A^H A) b in double: `algorithms.gram` with NumPy's BLAS.

A^H A is made a few thousand rows of A at a time. The bound of `gram.plan` holds in whatever order BLAS sums up; where
it is too large for one result, or anything is not finite, all of them are left to the product.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.cpu.gemm import Factor
from gemmserve_kernels.algorithms.gram.plan import tolerance_of, wide_dtype
from gemmserve_kernels.device.interruption import checkpoint

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.cpu.gemm import Block
    from gemmserve_kernels.problem.problem import GemmReduceProblem

    Array = np.ndarray[Any, Any]

_ROWS: Final = 4096
"""Rows of A that are made double and multiplied at once, at most: the bound counts them."""
_BLOCK_BYTES: Final = 8 << 20
"""Bytes of A's rows and B's columns in double, about."""
_AT_ONCE: Final = 1 << 29
"""Multiplications between two moments at which it can be interrupted, about."""
_LEAST: Final = 1 << 24
"""Multiplications of the product below which it is formed: what they cost is calls, not arithmetic."""
_GAIN: Final = 4
"""Times fewer multiplications than the product's that pay for double precision and for what may have to be repeated."""


def sum_of_squares(problem: GemmReduceProblem, a: Array, b: Array) -> Array | None:
    """The only result of `problem` in double, or None where the product is cheaper or more accurate."""
    if not _pays(problem):
        return None
    wide = wide_dtype(problem.dtype)
    left, right = Factor(a, problem.trans_a, problem), Factor(b, problem.trans_b, problem)
    left.dtype = right.dtype = wide
    total = np.zeros(problem.outputs_shape, np.float64)
    square = problem.alpha.real**2 + problem.alpha.imag**2
    made: tuple[tuple[int, ...], Array] | None = None
    source = left if problem.over_rows else right
    for index in np.ndindex(*problem.batch_shape):
        here = tuple(slice(i, i + 1) for i in index)
        own = tuple(i if n > 1 else 0 for i, n in zip(index, source.planes.shape[:-2], strict=True))
        if made is None or made[0] != own:
            made = own, _gram(problem, source, here)
        found = _forms(problem, made[1], right if problem.over_rows else left, here)
        if found is None:
            return None
        if problem.over_batch:
            total += found
        else:
            total[index] = found
    return total * square


def _pays(problem: GemmReduceProblem) -> bool:
    """Whether it can be done, and by how many multiplications."""
    asked = problem.config.algorithm if problem.config is not None else None
    if problem.reductions != ("sumsq",) or problem.pre_op == "square" or problem.return_c or asked == "product":
        return False
    if problem.compute != "auto" or problem.accumulate.name not in {"float32", "complex64"}:
        return False
    m, n, k = problem.m, problem.n, problem.k
    return problem.batch * m * n * k > 0 and m * n * k >= _LEAST and _GAIN * k * (m + n) <= m * n


def _tile(problem: GemmReduceProblem, factor: Factor, here: Block, lines: slice, *, reduced: bool) -> Array:
    """Some rows of A as it is reduced, or some columns of B, in double."""
    k = slice(0, problem.k)
    rows_first = reduced == problem.over_rows
    tile = factor.tile((*here, lines, k) if rows_first else (*here, k, lines))
    tile = tile.reshape(tile.shape[-2:])
    return tile if rows_first == reduced else tile.T


def _rows(k: int, wide: np.dtype[Any]) -> int:
    return max(1, min(_ROWS, _BLOCK_BYTES // (wide.itemsize * k)))


def _gram(problem: GemmReduceProblem, factor: Factor, here: Block) -> Array:
    """A^H A: of real and imaginary parts as columns of their own, since BLAS makes half of X^T X."""
    extent = problem.m if problem.over_rows else problem.n
    parts = 2 if factor.dtype.kind == "c" else 1
    total = np.zeros((parts * problem.k, parts * problem.k))
    step = _rows(problem.k, factor.dtype)
    for first in range(0, extent, step):
        checkpoint()
        x = _tile(problem, factor, here, slice(first, min(first + step, extent)), reduced=True)
        x = np.ascontiguousarray(x).view(np.float64)
        if x.size * x.shape[1] <= 4 * _AT_ONCE:  # of which BLAS makes half
            total += x.T @ x
            continue
        lines = max(64, _AT_ONCE // x.size)
        for low in range(0, x.shape[1], lines):
            checkpoint()
            total[low : low + lines] += x[:, low : low + lines].T @ x
    if parts == 1:
        return total
    gram = np.empty((problem.k, problem.k), factor.dtype)
    gram.real = total[0::2, 0::2] + total[1::2, 1::2]
    gram.imag = total[0::2, 1::2] - total[1::2, 0::2]
    return gram


def _forms(problem: GemmReduceProblem, gram: Array, factor: Factor, here: Block) -> Array | None:
    """b^H G b for every column of one B; None where the bound of one is broken."""
    reduced, kept = (problem.m, problem.n) if problem.over_rows else (problem.n, problem.m)
    each = 2 if gram.dtype.kind == "c" else 1
    rows = _rows(problem.k, gram.dtype)
    least = tolerance_of(min(rows, reduced) + math.ceil(reduced / rows) + 1 + 2 * each * problem.k)
    norms = np.sqrt(gram.diagonal().real)
    found = np.empty(kept)
    step = max(1, _BLOCK_BYTES // (gram.itemsize * problem.k))
    for first in range(0, kept, step):
        lines = slice(first, min(first + step, kept))
        b = _tile(problem, factor, here, lines, reduced=False)
        y = np.empty_like(b)
        height = max(64, _AT_ONCE // b.size)
        for low in range(0, problem.k, height):
            checkpoint()
            np.matmul(gram[low : low + height], b, out=y[low : low + height])
        forms, weights = (b.real * y.real).sum(0), norms @ np.abs(b.real)
        if each == 2:
            forms += (b.imag * y.imag).sum(0)
            weights += norms @ np.abs(b.imag)
        limit = least * weights**2
        if not ((forms >= limit) & (limit < np.inf)).all():  # NaN compares as false
            return None
        found[lines] = forms
    return found
