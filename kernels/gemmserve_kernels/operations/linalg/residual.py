"""Checks of results by random vectors: what an operation's definition leaves of them, beside the size of its terms.

The vectors are of independent signs (as in `freivalds.finding`), so that the norm of what is left estimates the
Frobenius norm of the whole residual, in O(n^2) operations and double precision. The residual of a check here is
relative to the terms: ||op(A) X - B|| / (||A|| ||X|| + ||B||) of a system, which is the backward error that a stable
method keeps at a few units of rounding however ill-conditioned A is (N. Higham, Accuracy and Stability of Numerical
Algorithms, 7.1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.freivalds import Finding, rounding
from gemmserve_kernels.operations.linalg.library import diagonals, stack_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_VECTORS: Final = 2
_BLOCK_BYTES: Final = 1 << 26
"""Bytes of the rows that are made double at once."""


def find_residual(
    xp: Any,
    stacks: Sequence[Any],
    columns: int,
    residual: Callable[[Sequence[Any], Any], Any],
    size: Callable[[Sequence[Any]], Any],
    arithmetic: tuple[np.dtype[Any], np.dtype[Any], int],
    seed: int,
) -> Finding:
    """Return the finding of a stack of results; `stacks` are arrays (..., rows, columns) of the same leading axes.

    `residual` gives, of parts of the stacks and vectors (`columns`, count), what should be zero but for rounding;
    `size` gives the size of its terms from the Frobenius norms of the stacks' matrices. `arithmetic`: the dtypes of
    the result and of its sums, and their length. Matrices that are not finite are not judged.
    """
    signs = np.random.default_rng(seed).integers(0, 2, (columns, _VECTORS)) * 2.0 - 1.0
    x = xp.asarray(signs)
    errors, sizes = [], []
    each = sum(stack.shape[-1] * stack.shape[-2] for stack in stacks) * 16
    with np.errstate(all="ignore"):
        for part in stack_parts(xp, stacks[0].shape[:-2], 4 * each, each):
            some = [stack[part] for stack in stacks]
            left = residual(some, x)
            errors.append(_host(xp, xp.sqrt((xp.abs(left) ** 2).sum(axis=(-2, -1)) / _VECTORS)))
            sizes.append(_host(xp, size([_norm(xp, matrix) for matrix in some])))
        dtype, accumulate, terms = arithmetic
        unit = rounding("auto", dtype, accumulate, terms)
        tiny = float(np.finfo(accumulate).tiny) * (terms + 8) + float(np.finfo(dtype).smallest_subnormal) * columns
        return _judged(errors, sizes, unit, tiny)


def _judged(errors: list[Any], sizes: list[Any], unit: float, tiny: float) -> Finding:
    if not errors:
        return Finding(0.0, 0.0)
    error, size = np.concatenate(errors), np.concatenate(sizes)
    known = np.isfinite(size)
    if not known.any():
        return Finding(math.nan, math.nan)
    error, size = error[known], size[known]
    if not np.isfinite(error).all():
        return Finding(math.inf, math.inf)
    relative = np.divide(error, size, out=np.where(error > tiny, math.inf, 0.0), where=size > 0)
    excess = error / (unit * size + tiny)
    return Finding(float(relative.max()), float(excess.max()))


def times(xp: Any, a: Any, x: Any) -> Any:
    """A x of a stack (..., m, k) and vectors (..., k, count), in double precision."""
    y = xp.zeros((*a.shape[:-1], x.shape[-1]), _wide(a, x))
    for rows in _blocks(a):
        y[..., rows, :] = xp.matmul(_double(a[..., rows, :]), x)
    return y


def hermitian_times(xp: Any, a: Any, x: Any, *, lower: bool) -> Any:
    """A x of a stack of Hermitian matrices of which one triangle is read, in double precision."""
    wide = _wide(a, x)
    diagonal = diagonals(xp, a).real
    y = xp.zeros((*a.shape[:-1], x.shape[-1]), wide)
    y += diagonal[..., None].astype(np.float64) * x
    for rows in _blocks(a):
        block = _double(a[..., rows, :])
        block = xp.tril(block, rows.start - 1) if lower else xp.triu(block, rows.start + 1)
        y[..., rows, :] += xp.matmul(block, x)
        y += xp.matmul(xp.conjugate(block.swapaxes(-1, -2)), x[..., rows, :])
    return y


def _norm(xp: Any, a: Any) -> Any:
    total = xp.zeros(a.shape[:-2])
    for rows in _blocks(a):
        total += (xp.abs(_double(a[..., rows, :])) ** 2).sum(axis=(-2, -1))
    return xp.sqrt(total)


def _blocks(a: Any) -> Iterator[slice]:
    """Slices of rows whose copies in double are of a bounded size."""
    step = max(1, _BLOCK_BYTES // max(1, 16 * math.prod(a.shape[:-2]) * a.shape[-1]))
    for start in range(0, a.shape[-2], step):
        yield slice(start, min(start + step, a.shape[-2]))


def _wide(*arrays: Any) -> np.dtype[Any]:
    return np.dtype(np.complex128 if any(array.dtype.kind == "c" for array in arrays) else np.float64)


def _double(a: Any) -> Any:
    return a.astype(_wide(a), copy=False)


def _host(xp: Any, values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values if xp is np else values.get(), np.float64).reshape(-1)
