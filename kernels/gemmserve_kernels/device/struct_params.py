"""Arguments of kernels that many share, and the strided views that fill them.

Strides here count elements. A transposed operand is a view with its strides swapped, a broadcast one has stride 0, a
Fortran-ordered result is the transposed product: the kernels know none of these words.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

BATCH_DIMS: Final = 4
"""Batch dimensions of one launch; BATCH_DIMS of cuda/common/params.cuh."""
VECTOR_BYTES: Final = 16


@device_struct("common/params.cuh")
class MatrixParams(ctypes.Structure):
    """A batched matrix; strides count elements."""


@device_struct("common/params.cuh")
class GemmParams(ctypes.Structure):
    """A product, its operands as views."""


@device_struct("common/params.cuh")
class PartialParams(ctypes.Structure):
    """Partials of every kind of reduction."""


@device_struct("common/params.cuh")
class GemmReduceParams(ctypes.Structure):
    """A product whose tiles leave partials."""


@device_struct("common/params.cuh")
class CombineParams(ctypes.Structure):
    """Arguments of the kernels that fold partials."""


@dataclass(frozen=True)
class MatrixView:
    """A batched matrix: addresses of its first element, stored dtype, element strides; size-1 axes have stride 0.

    `im` is where the imaginary parts begin; the same as `re` unless the matrix is planar.
    """

    re: int
    im: int
    dtype: np.dtype[Any]
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    batch_strides: tuple[int, ...]

    def transposed(self) -> MatrixView:
        """The same elements with rows and columns exchanged."""
        return replace(
            self, rows=self.columns, columns=self.rows, row_stride=self.column_stride, column_stride=self.row_stride
        )

    def shifted(self, elements: int) -> MatrixView:
        """Beginning `elements` further on."""
        return self.shifted_by(elements * self.dtype.itemsize)

    def shifted_by(self, nbytes: int) -> MatrixView:
        """Beginning `nbytes` further on: where a base of addresses is added."""
        return replace(self, re=self.re + nbytes, im=self.im + nbytes)

    def aligned(self, width: int, *others: int) -> bool:
        """Whether vectors of `width` elements stay aligned from any row and matrix, given the `others` strides."""
        step = width * self.dtype.itemsize
        strides = (*others, *self.batch_strides)
        return self.re % step == 0 and self.im % step == 0 and all(stride % width == 0 for stride in strides)

    def params(self) -> MatrixParams:
        """The kernel's form; batch strides are right-aligned."""
        strides = (0,) * (BATCH_DIMS - len(self.batch_strides)) + self.batch_strides
        batch_stride = (ctypes.c_int64 * BATCH_DIMS)(*strides)
        return MatrixParams(self.re, self.im, self.row_stride, self.column_stride, batch_stride)


@dataclass(frozen=True)
class StoredArray:
    """Layout of an array in memory, its address only up to a multiple of VECTOR_BYTES. Strides in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    phase: int

    @classmethod
    def of(cls, launcher: Launcher, array: Any) -> tuple[StoredArray, int]:
        """Return the layout of `array`, and the base to which its `phase` is added."""
        address = launcher.pointer(array)
        phase = address % VECTOR_BYTES
        return cls(tuple(array.shape), tuple(array.strides), array.dtype, phase), address - phase


def matrix_view(array: StoredArray, shape: tuple[int, ...], *, planar: bool) -> MatrixView:
    """`array` broadcast to `shape` = (..., rows, columns), its leading axis being (re, im) where it is `planar`.

    Addresses count from the array's base.
    """
    itemsize = array.dtype.itemsize
    if any(stride % itemsize for stride in array.strides):
        raise ValueError("an array's strides must be whole elements")
    strides = [stride // itemsize for stride in array.strides]
    extents = list(array.shape)
    im = array.phase
    if planar:
        im += array.strides[0]
        strides, extents = strides[1:], extents[1:]
    missing = len(shape) - len(extents)
    for extent, wanted in zip(extents, shape[missing:], strict=True):
        if extent not in {1, wanted}:
            raise ValueError(f"an array of shape {array.shape} does not broadcast to {shape}")
    full = [0] * missing + [0 if extent == 1 else stride for extent, stride in zip(extents, strides, strict=True)]
    return MatrixView(array.phase, im, array.dtype, shape[-2], shape[-1], full[-2], full[-1], tuple(full[:-2]))


@dataclass(frozen=True)
class Access:
    """Reads of an operand by a block: `vector` elements at once, along k or across it."""

    along_k: bool
    vector: int


def choose_access(view: MatrixView, *, k_is_row: bool, block: int, block_k: int) -> Access:
    """The direction of the smaller stride, and the widest vector that no edge of tile or matrix can cut."""
    k_extent, extent = (view.rows, view.columns) if k_is_row else (view.columns, view.rows)
    k_stride, stride = (view.row_stride, view.column_stride) if k_is_row else (view.column_stride, view.row_stride)
    # A stride over one element says nothing.
    along_k = extent == 1 if 1 in {k_extent, extent} else abs(k_stride) <= abs(stride)
    fast, fast_stride, slow_stride, tile = (
        (k_extent, k_stride, stride, block_k) if along_k else (extent, stride, k_stride, block)
    )
    vector = max(1, VECTOR_BYTES // view.dtype.itemsize)
    while vector > 1 and not (
        fast_stride == 1 and fast % vector == 0 and tile % vector == 0 and view.aligned(vector, slow_stride)
    ):
        vector //= 2
    return Access(along_k, vector)


def piece_of(itemsize: int, count: int) -> int:
    """piece_of in cuda/common/numbers/types.cuh: elements of one 16-byte access that divide `count`."""
    piece = max(1, VECTOR_BYTES // itemsize)
    while count % piece:
        piece //= 2
    return piece


def own_extents(batch_shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The batch without the axes over which an operand is repeated: those have extent 1."""
    return tuple(1 if step == 0 else extent for extent, step in zip(batch_shape, strides, strict=True))


def dense_strides(extents: Sequence[int], step: int) -> tuple[int, ...]:
    """Strides of matrices in C order that are `step` apart; 0 along axes of extent 1."""
    strides = []
    for extent in reversed(extents):
        strides.append(0 if extent == 1 else step)
        step *= extent
    return tuple(reversed(strides))


def place(matrices: Iterable[MatrixParams], bases: Iterable[int]) -> None:
    """Adds to the addresses of views what they count from."""
    for matrix, base in zip(matrices, bases, strict=False):
        matrix.re += base
        matrix.im += base


def place_all(gemm: GemmParams, bases: Iterable[int]) -> None:
    """The same of a product's views, in the order a, b, c, d."""
    place((gemm.a, gemm.b, gemm.c, gemm.d), bases)


def gemm_params(
    problem: GemmProblem | GemmReduceProblem,
    views: Sequence[MatrixView],
    shape: tuple[int, int],
    block: tuple[int, int],
    batch_shape: tuple[int, ...],
    conjugates: tuple[bool, bool] = (False, False),
) -> tuple[GemmParams, int]:
    """Arguments of one launch over `batch_shape`, of m x n products cut into tiles of `block`; and its tiles.

    `views`: A, B, C and D, or the first of them.
    """
    (m, n), (block_m, block_n) = shape, block
    params = GemmParams(m=m, n=n, k=problem.k, tiles_m=-(-m // block_m), tiles_n=-(-n // block_n))
    for name, view in zip("abcd", views, strict=False):
        setattr(params, name, view.params())
    params.batch_shape[:] = batch_shape
    params.conjugate_a, params.conjugate_b = conjugates
    set_factors(params, problem)
    return params, params.tiles_m * params.tiles_n * math.prod(batch_shape)


def set_factors(params: Any, problem: GemmProblem | GemmReduceProblem) -> None:
    """Sets `alpha` and `beta` of arguments that have them; of a reduction beta is 0."""
    beta = getattr(problem, "beta", 0j)
    params.alpha[:] = problem.alpha.real, problem.alpha.imag
    params.beta[:] = beta.real, beta.imag


def stored_operands(
    launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any | None, out: Any
) -> tuple[list[StoredArray], list[int]]:
    """Return how A, B, C and D lie in memory, and the bases of their addresses; D stands for a C that is not read."""
    arrays = (a, b, out if c is None or problem.beta == 0 else c, out)
    found = [StoredArray.of(launcher, array) for array in arrays]
    return [stored for stored, _ in found], [base for _, base in found]


def coalesce(shape: Sequence[int], strides: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merges neighbouring batch axes that every operand walks through evenly; drops axes of length 1.

    `strides` has one tuple per operand, as long as `shape`. The order of the matrices does not change.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        here = tuple(operand[axis] for operand in strides)
        if merged and all(outer == inner * extent for outer, inner in zip(merged[-1][1], here, strict=True)):
            merged[-1] = (merged[-1][0] * extent, here)
        else:
            merged.append((extent, here))
    return (
        tuple(extent for extent, _ in merged),
        [tuple(by_axis[operand] for _, by_axis in merged) for operand in range(len(strides))],
    )


def launches(
    shape: Sequence[int], views: Sequence[MatrixView]
) -> Iterator[tuple[int, tuple[int, ...], list[MatrixView]]]:
    """Cuts a batch into pieces of at most BATCH_DIMS axes: (first matrix, batch shape padded with 1, views)."""
    merged, strides = coalesce(shape, [view.batch_strides for view in views])
    outer, inner = merged[: -BATCH_DIMS or None], merged[-BATCH_DIMS:]
    if len(merged) <= BATCH_DIMS:
        outer, inner = (), merged
    padded = (1,) * (BATCH_DIMS - len(inner)) + inner
    matrices = math.prod(inner)
    for number, index in enumerate(np.ndindex(*outer)):
        pieces = []
        for view, stride in zip(views, strides, strict=True):
            offset = sum(i * s for i, s in zip(index, stride, strict=False))
            pieces.append(replace(view, batch_strides=stride[len(outer) :]).shifted(offset))
        yield number * matrices, padded, pieces
