"""A strided-batched BLAS of column-major matrices by NumPy: what a plan's calls make of memory at addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.algorithms.vendor.blas import BlasMatrix, BlasPlan
    from gemmserve_kernels.problem.problem import GemmProblem


def multiply(
    problem: GemmProblem, plan: BlasPlan, addresses: tuple[int, ...], memory: Callable[[int], np.ndarray]
) -> None:
    """The calls of `plan` without C. `memory`: the bytes from an address to the end of the buffer it lies in."""
    sums = plan.dtype if plan.dtype != np.float16 else np.dtype(np.float32)
    alpha = sums.type(problem.alpha if sums.kind == "c" else complex(problem.alpha).real)
    columns = {"a": (plan.m, plan.k), "b": (plan.k, plan.n)}

    def stored(name: str, matrix: BlasMatrix, at: int) -> np.ndarray:
        """Op of what is stored, in the order of the call: the transposed operand where it is swapped."""
        shape = columns[name][::-1] if plan.swapped else columns[name]
        found = _matrices(memory(at), plan.dtype, shape if matrix.trans == "N" else shape[::-1], matrix, plan.batch)
        found = found if matrix.trans == "N" else found.swapaxes(1, 2)
        return (found.conj() if matrix.trans == "C" else found).astype(sums)

    for offsets in plan.offsets():
        item = plan.dtype.itemsize
        a = stored("a", plan.a, addresses[0] + offsets[0] * item)
        b = stored("b", plan.b, addresses[1] + offsets[1] * item)
        shape = (plan.n, plan.m) if plan.swapped else (plan.m, plan.n)
        at = addresses[2] + offsets[2] * plan.d_dtype.itemsize
        d = _matrices(memory(at), plan.d_dtype, shape, plan.d, plan.batch)
        with np.errstate(all="ignore"):
            product = np.matmul(b, a) if plan.swapped else np.matmul(a, b)
            d[...] = alpha * product


def _matrices(
    memory: np.ndarray, dtype: np.dtype, shape: tuple[int, int], matrix: BlasMatrix, batch: int
) -> np.ndarray:
    """(batch, rows, columns) in column-major order, which must not leave the memory."""
    rows, columns = shape
    assert matrix.leading >= max(1, rows), f"leading dimension {matrix.leading} for {rows} rows"
    item = dtype.itemsize
    extent = ((batch - 1) * matrix.batch_stride + (columns - 1) * matrix.leading + rows) * item
    assert extent <= len(memory), "the call leaves its array"
    strides = (matrix.batch_stride * item, item, matrix.leading * item)
    return np.ndarray((batch, rows, columns), dtype, memory, 0, strides)
