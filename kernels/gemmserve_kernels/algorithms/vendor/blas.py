"""Products as calls of a column-major strided-batched BLAS. Pure: strides in, arguments of the calls out.

A row-major matrix is its transpose in column-major order, so a row-major D = op(A) op(B) is the call
D^T = op(B)^T op(A)^T. BLAS knows no transposition, transposition and conjugate transposition of what is stored; an
operand that needs anything else (conjugation alone, strides both ways, another dtype, planar parts) is first copied;
whether that pays is for `dispatch` to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.operand import Operand

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gemmserve_kernels.problem.problem import GemmProblem

_MAX_INT: Final = 2**31 - 1
"""Sizes and leading dimensions are 32-bit in the classic interface."""

_MAX_CALLS: Final = 32
"""Calls for one product at most: each costs some microseconds on the host. From no source."""

_HALF_ALIGNMENT: Final = 8
"""Elements: batched float16 products must keep every matrix at 16 bytes, or cuBLAS may pick a kernel that faults
(the workaround in CuPy's matmul)."""


class NotExpressible(ValueError):  # noqa: N818 (what it says, not that it is an error)
    """The product is no call of a BLAS; the message says why."""


@dataclass(frozen=True)
class BlasMatrix:
    """One matrix argument: its flag, leading dimension, batch stride, and the strides of the loop around the calls.

    `copied`: the operand is replaced by a C-contiguous copy of op(operand) in the working dtype first; for the result,
    the calls write a temporary that is stored into the result afterwards.
    """

    trans: str
    leading: int
    batch_stride: int
    outer_strides: tuple[int, ...]
    copied: bool


@dataclass(frozen=True)
class BlasPlan:
    """The calls: `swapped` ones compute D^T = op(B)^T op(A)^T. `dtype` is what the BLAS multiplies, `d_dtype` what it
    writes: the same, but that products of float16 may be written as they are summed.
    """

    swapped: bool
    m: int
    n: int
    k: int
    a: BlasMatrix
    b: BlasMatrix
    d: BlasMatrix
    outer_shape: tuple[int, ...]
    batch: int
    dtype: np.dtype[Any]
    d_dtype: np.dtype[Any]

    def offsets(self) -> Iterator[tuple[int, int, int]]:
        """For each call, the first element of a, b and d."""
        for index in np.ndindex(*self.outer_shape):
            a, b, d = (
                sum(i * stride for i, stride in zip(index, matrix.outer_strides, strict=True))
                for matrix in (self.a, self.b, self.d)
            )
            yield a, b, d


def lower(problem: GemmProblem, result: Operand | None = None) -> BlasPlan:
    """The calls for `problem` with a result stored as `result` (by default the fresh array that the problem asks for),
    of its dtype or of the one that products are summed in.

    beta C is the caller's: it puts C where the result goes and passes beta on. Raises NotExpressible.
    """
    if problem.k == 0 or problem.batch * problem.m * problem.n == 0:
        raise NotExpressible("empty: there is nothing to multiply")
    if problem.alpha == 0:
        raise NotExpressible("alpha is 0: BLAS would not read A and B, and hide their NaN")
    if max(problem.m, problem.n, problem.k, problem.batch) > _MAX_INT:
        raise NotExpressible("a size exceeds 32 bits")
    dtype = problem.accumulate if problem.compute == "fp64" else problem.dtype
    into = result or problem.result
    d_dtype = problem.accumulate if into.dtype == problem.accumulate else dtype
    d = _readable(into, d_dtype, problem)
    copied_d = d is None or not _leading(d)
    if d is None or copied_d:
        d = Operand.contiguous((*problem.batch_shape, problem.m, problem.n), d_dtype)
    order, leading = next(iter(_leading(d).items()))
    swapped = order == "row"
    a = _side(problem.a, problem.trans_a, problem, dtype, swapped=swapped)
    b = _side(problem.b, problem.trans_b, problem, dtype, swapped=swapped)
    sides = (a, b, _BlasSide(d, "N", leading, copied_d))
    shape, strides = _merge(problem.batch_shape, [_batch_strides(side.operand, problem.batch_shape) for side in sides])
    if math.prod(shape[:-1]) > _MAX_CALLS:
        raise NotExpressible(f"the batch would take {math.prod(shape[:-1])} calls")
    matrix_a, matrix_b, matrix_d = (
        BlasMatrix(side.trans, side.leading, own[-1] if own else 0, own[:-1], side.copied)
        for side, own in zip(sides, strides, strict=True)
    )
    m, n, k, batch = problem.m, problem.n, problem.k, shape[-1] if shape else 1
    plan = BlasPlan(swapped, m, n, k, matrix_a, matrix_b, matrix_d, shape[:-1], batch, dtype, d_dtype)
    _check_limits(plan)
    return plan


def copied_bytes(problem: GemmProblem, plan: BlasPlan) -> int:
    """Bytes that the plan's copies read and write."""
    item = plan.dtype.itemsize
    stored = (
        (plan.a.copied, problem.a.nbytes, item * problem.a.size),
        (plan.b.copied, problem.b.nbytes, item * problem.b.size),
        (plan.d.copied, problem.result.nbytes, item * problem.batch * problem.m * problem.n),
    )
    return sum(outside + inside for copied, outside, inside in stored if copied)


@dataclass(frozen=True)
class _BlasSide:
    """A matrix argument before the batch is looked at; `operand` is what BLAS reads, perhaps a copy."""

    operand: Operand
    trans: str
    leading: int
    copied: bool


def _side(operand: Operand, trans: str, problem: GemmProblem, dtype: np.dtype[Any], *, swapped: bool) -> _BlasSide:
    """op(operand), or its transpose where swapped, from what is stored; or from a copy of op(operand)."""
    readable = _readable(operand, dtype, problem)
    conjugate = trans in {"C", "R"} and dtype.kind == "c"
    flip = (trans in {"T", "C"}) != swapped
    for order, leading in (_leading(readable) if readable else {}).items():
        # What is stored in rows is, to BLAS, the transpose.
        flag = _FLAGS.get((flip != (order == "row"), conjugate))
        if flag is not None:
            assert readable is not None
            return _BlasSide(readable, flag, leading, False)
    shape = operand.shape[1:] if problem.planar else operand.shape
    if trans in {"T", "C"}:
        shape = (*shape[:-2], shape[-1], shape[-2])
    copy = Operand.contiguous(shape, dtype)
    return _BlasSide(copy, "N" if swapped else "T", max(1, shape[-1]), True)


_FLAGS: Final = {(False, False): "N", (True, False): "T", (True, True): "C"}
"""By (transposed, conjugated): BLAS has no conjugation alone."""


def _readable(operand: Operand, dtype: np.dtype[Any], problem: GemmProblem) -> Operand | None:
    """The operand, where BLAS could read its elements as they are; float16 batches must be aligned too."""
    if problem.planar or operand.dtype != dtype:
        return None
    if dtype == np.float16 and operand.ndim > 2:
        strides = zip(operand.strides[:-2], operand.shape[:-2], strict=True)
        if any(stride % _HALF_ALIGNMENT for stride, extent in strides if extent > 1):
            return None
    return operand


def _leading(operand: Operand) -> dict[str, int]:
    """The leading dimension of each order, "row" and "column", that the matrices are stored in; {} for neither."""
    (rows, columns), (row, column) = operand.shape[-2:], operand.strides[-2:]
    orders = {}
    for order, unit, unit_extent, other, other_extent in (
        ("row", column, columns, row, rows),
        ("column", row, rows, column, columns),
    ):
        least = max(1, unit_extent)
        # The stride of an axis of length 1 is never followed.
        other_stride = least if other_extent <= 1 else other
        if (unit == 1 or unit_extent <= 1) and least <= other_stride <= _MAX_INT:
            orders[order] = other_stride
    return orders


def _batch_strides(operand: Operand, batch_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the batch axes after broadcasting."""
    missing = len(batch_shape) - (operand.ndim - 2)
    own = zip(operand.shape[:-2], operand.strides[:-2], strict=True)
    return (0,) * missing + tuple(0 if extent == 1 else stride for extent, stride in own)


def _merge(shape: Sequence[int], strides: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Batch axes without those of length 1, neighbours made one where every matrix walks through them evenly.

    The longest comes last: it is the batch of a call, the others are loops around the calls.
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for extent, here in zip(shape, zip(*strides, strict=True), strict=True):
        if extent == 1:
            continue
        if axes and all(outer == inner * extent for outer, inner in zip(axes[-1][1], here, strict=True)):
            axes[-1] = (axes[-1][0] * extent, here)
        else:
            axes.append((extent, here))
    if axes:
        axes.append(axes.pop(max(range(len(axes)), key=lambda i: axes[i][0])))
    return tuple(extent for extent, _ in axes), [tuple(here[i] for _, here in axes) for i in range(len(strides))]


def _check_limits(plan: BlasPlan) -> None:
    for name, matrix in (("a", plan.a), ("b", plan.b), ("d", plan.d)):
        if matrix.batch_stride < 0:
            raise NotExpressible(f"the batch of {name} runs backwards")
        unaligned = any(stride % _HALF_ALIGNMENT for stride in (matrix.batch_stride, *matrix.outer_strides))
        if plan.dtype == np.float16 and unaligned:
            raise NotExpressible(f"the float16 matrices of {name} would not be aligned to 16 bytes")
