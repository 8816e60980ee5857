"""Factorizations and solutions of stacks of matrices: by LAPACK or cuSOLVER, in pieces where they are large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.operations.linalg.elimination import solve_in_pieces, substitute
from gemmserve_kernels.operations.linalg.hermitian import herk
from gemmserve_kernels.operations.linalg.library import adjoint, failing, operated, vendor_cholesky, vendor_solve
from gemmserve_kernels.problem.errors import NotPositiveDefinite, SingularMatrix
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from gemmserve_kernels.operations.linalg.library import Index

_CHOLESKY_ROWS: Final = 512
"""Rows that LAPACK factors in one call of Cholesky's: what a cancellation waits for."""
_LU_ROWS: Final = 1024
"""Rows up to which LAPACK solves a system in one call; beyond, it is cut so that it can be interrupted."""


def cholesky_flops(n: int, dtype: np.dtype[Any]) -> int:
    """Return the operations of one factorization."""
    return (4 if dtype.kind == "c" else 1) * n**3 // 3


def factor_flops(assume: str, n: int, dtype: np.dtype[Any]) -> int:
    """Return the operations of one factorization: 2 n^3 / 3 of LU, half as many of Cholesky's, none of a triangle."""
    return {"general": 2, "positive": 1}.get(assume, 0) * cholesky_flops(n, dtype)


def factor(xp: Any, a: Any, part: Index, trans: str, dtype: np.dtype[Any]) -> Any:
    """Return L of op(A), in `dtype`, of the matrices in `part` of the stack `a`: what is copied is copied of those
    alone. Raises NotPositiveDefinite.
    """

    def run(some: Index) -> Any:
        return _factor(xp, operated(xp, a[some], trans).astype(dtype, copy=False))

    try:
        return run(part)
    except np.linalg.LinAlgError:
        index = failing(run, part)
        where = f" {list(index)}" if index else ""
        raise NotPositiveDefinite(f"the matrix{where} is not positive definite", index) from None


def _factor(xp: Any, a: Any) -> Any:
    if xp is not np or a.shape[-1] <= _CHOLESKY_ROWS:
        return vendor_cholesky(xp, a)
    work = np.array(a, order="C")
    _in_place(work)
    return np.tril(work)


def _in_place(a: Any) -> None:
    """Factor the lower triangles of a stack on the host; above the diagonal anything may be left."""
    n = a.shape[-1]
    if n <= _CHOLESKY_ROWS:
        a[...] = vendor_cholesky(np, a)
        return
    checkpoint()
    half = n // 2
    first, second = slice(half), slice(half, n)
    _in_place(a[..., first, first])
    across, rest = a[..., second, first], a[..., second, second]
    across[...] = adjoint(np, substitute(np, a[..., first, first], adjoint(np, across), lower=True))
    operands = Operand.of(across), Operand.of(rest)
    update = GemmProblem.build(operands[0], operands[0], operands[1], alpha=-1, beta=1, trans_b="C")
    made = np.empty(rest.shape, rest.dtype)
    herk(across, rest, made, update, "lower")
    rest[...] = made
    _in_place(rest)


def solved(xp: Any, a: Any, b: Any, part: Index, assume: str, trans: str = "N") -> Any:
    """Return X of op(A) X = B, in the dtype of b, of the matrices in `part` of two stacks. What is copied of a is
    copied of that part alone. Raises SingularMatrix, NotPositiveDefinite.
    """
    if assume == "positive":
        lower = factor(xp, a, part, trans, b.dtype)
        return substitute(xp, adjoint(xp, lower), substitute(xp, lower, b[part], lower=True), lower=False)

    def run(some: Index) -> Any:
        left, right = operated(xp, a[some], trans).astype(b.dtype, copy=False), b[some]
        if assume != "general":
            return substitute(xp, left, right, lower=assume == "lower")
        if xp is not np or a.shape[-1] <= _LU_ROWS:
            return vendor_solve(xp, left, right)
        x = np.empty(right.shape, right.dtype)
        for index in np.ndindex(x.shape[:-2]):
            x[index] = solve_in_pieces(left[index], right[index])
        return x

    try:
        return run(part)
    except np.linalg.LinAlgError:
        index = failing(run, part)
        where = f" {list(index)}" if index else ""
        raise SingularMatrix(f"the matrix{where} is singular", index) from None
