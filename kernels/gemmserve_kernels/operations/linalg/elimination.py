"""Elimination and substitution, cut in halves so that nearly all of it is products, and it can be interrupted.

Triangular systems after F. Gustavson (IBM J. Res. Dev. 41, 1997): for a lower triangle, X1 = L11^-1 B1, then
X2 = L22^-1 (B2 - L21 X1). Substitution is backward stable row by row (N. Higham, Accuracy and Stability of Numerical
Algorithms, theorem 8.5), with any product for the update.

LU of one large matrix on the host: LAPACK's own routine does not come back before it is done, minutes for a matrix of
some ten thousand rows. This one is S. Toledo's recursion on columns (SIAM J. Matrix Anal. Appl. 18, 1997) with partial
pivoting, whose error bounds are those of any Gaussian elimination with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.operations.linalg.library import diagonals

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_LEAF: Final = 16
"""Rows that are substituted, and columns that are eliminated, one by one; rows for all matrices of a stack at once."""


def substitute(xp: Any, a: Any, b: Any, *, lower: bool, unit: bool = False) -> Any:
    """Return X of A X = B, where only the lower (upper) triangle of A is read; `unit`: its diagonal is 1.

    `a` (..., n, n) and `b` (..., n, k) have the same leading axes and dtype. Raises LinAlgError where an element of a
    diagonal is zero.
    """
    if not unit and bool((diagonals(xp, a) == 0).any()):
        raise np.linalg.LinAlgError("Singular matrix")
    if xp is not np and not unit and a.shape[-1] > _LEAF:
        from cupyx.scipy.linalg import solve_triangular

        return solve_triangular(a, b, lower=lower, check_finite=False)
    x = xp.array(b, order="C")
    _in_place(xp, a, x, lower, unit)
    return x


def _in_place(xp: Any, a: Any, x: Any, lower: bool, unit: bool) -> None:
    n = a.shape[-1]
    if n > _LEAF:
        checkpoint()
        half = n // 2
        first, second = slice(half), slice(half, n)
        if not lower:
            first, second = second, first
        _in_place(xp, a[..., first, first], x[..., first, :], lower, unit)
        rest = x[..., second, :]
        gemm(a[..., second, first], x[..., first, :], rest, alpha=-1, beta=1, out=rest)
        _in_place(xp, a[..., second, second], rest, lower, unit)
        return
    for row in range(n) if lower else range(n - 1, -1, -1):
        if not unit:
            x[..., row, :] /= a[..., row, row, None]
        rest = slice(row + 1, n) if lower else slice(row)
        x[..., rest, :] -= a[..., rest, row, None] * x[..., row, None, :]


def solve_in_pieces(a: Array, b: Array) -> Array:
    """Return X of A X = B for one matrix and NumPy arrays of one dtype. Raises LinAlgError where a pivot is zero."""
    factors = np.array(a, order="C")
    rows = _factor(factors)
    y = substitute(np, factors, b[rows], lower=True, unit=True)
    return np.asarray(substitute(np, factors, y, lower=False))


def _factor(a: Array) -> Array:
    """Factor m x n in place, m >= n; return the permutation of its rows: L U = A[rows]."""
    m, n = a.shape
    if n <= _LEAF:
        return _eliminate(a)
    checkpoint()
    half = n // 2
    left, right = a[:, :half], a[:, half:]
    rows = _factor(left)
    right[...] = right[rows]
    right[:half] = substitute(np, left[:half], right[:half], lower=True, unit=True)
    rest = right[half:]
    gemm(left[half:], right[:half], rest, alpha=-1, beta=1, out=rest)
    below = _factor(rest)
    left[half:] = left[half:][below]
    rows[half:] = rows[half:][below]
    assert rows.size == m
    return rows


def _eliminate(a: Array) -> Array:
    m, n = a.shape
    panel = np.asfortranarray(a)
    rows = np.arange(m)
    for column in range(n):
        pivot = column + int(np.argmax(np.abs(panel[column:, column])))
        if panel[pivot, column] == 0:
            raise np.linalg.LinAlgError("Singular matrix")
        if pivot != column:
            panel[[column, pivot]] = panel[[pivot, column]]
            rows[[column, pivot]] = rows[[pivot, column]]
        panel[column + 1 :, column] /= panel[column, column]
        panel[column + 1 :, column + 1 :] -= panel[column + 1 :, column, None] * panel[column, column + 1 :]
    a[...] = panel
    return rows
