"""What tensor cores must not answer: flagged rows, columns and products, in plain FP32 on the multiply-add units.

The same operations as `simt`'s, but k is summed up in runs of 64, whose sums are then added: as accurate as what these
stand in for.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import GemmParams, MatrixParams, MatrixView, StoredArray, launches, matrix_view
from gemmserve_kernels.config import SimtTile
from gemmserve_kernels.simt.gemm import runs_along_rows
from gemmserve_kernels.tiling import Operands, TiledKernel, gemm_params

if TYPE_CHECKING:
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.problem import GemmProblem

_TILES: Final = {"float32": SimtTile(32, 32, 16, 4, 4), "complex64": SimtTile(32, 32, 8, 4, 2)}
"""Small: a flagged row costs all rows of its tile."""
_BLOCKS: Final = 4
"""Blocks for each multiprocessor; each takes one tile after another."""
_INT: Final = np.dtype(np.int32)


class FallbackParams(ctypes.Structure):
    """Mirror of FallbackParams in cuda/fallback.cu."""

    _fields_ = (
        ("gemm", GemmParams),
        ("rows", MatrixParams),
        ("columns", MatrixParams),
        ("pairs", MatrixParams),
        ("status", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Flags:
    """Addresses of int32 flags: two arrays for the rows of op(A), two for the columns of op(B), one for the pairs, and
    a word that is 0 where none is set.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    pairs: int
    status: int


@dataclass(frozen=True)
class _Piece:
    params: FallbackParams
    grid: int


@dataclass(frozen=True)
class _Plan:
    kernel: TiledKernel
    pieces: tuple[_Piece, ...]
    swapped: bool


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmProblem,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray,
    d: StoredArray,
    matrices_a: tuple[int, ...],
    matrices_b: tuple[int, ...],
) -> _Plan:
    """`matrices_*`: matrices to step in the flags for each axis of the batch."""
    operands = Operands.of(problem, a, b)
    shape = (*problem.batch_shape, problem.m, problem.n)
    c_view, d_view = (matrix_view(array, shape, planar=problem.planar) for array in (c, d))
    pair_steps, step = [], 1
    for extent in reversed(problem.batch_shape):
        pair_steps.append(step)
        step *= extent

    def flags(length: int, steps: tuple[int, ...]) -> MatrixView:
        return MatrixView(0, 0, _INT, 1, length, 0, 1, tuple(step * length for step in steps))

    rows, columns = flags(problem.m, matrices_a), flags(problem.n, matrices_b)
    pairs = flags(1, tuple(reversed(pair_steps)))
    swapped = runs_along_rows(d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        rows, columns = columns, rows
    tile = _TILES[problem.dtype.name]
    kernel = TiledKernel.build("fallback", operands, tile, c_dtype=c.dtype, d_dtype=d.dtype, d=d_view)
    pieces = []
    views = [operands.a, operands.b, c_view, d_view, rows, columns, pairs]
    for _, inner, (*found, row_flags, column_flags, pair_flags) in launches(problem.batch_shape, views):
        gemm, tiles = gemm_params(kernel, operands, inner, found, complex(problem.alpha), complex(problem.beta))
        params = FallbackParams(
            gemm=gemm,
            rows=row_flags.params(),
            columns=column_flags.params(),
            pairs=pair_flags.params(),
            tiles=tiles,
        )
        pieces.append(_Piece(params, min(tiles, _BLOCKS * spec.sm_count)))
    return _Plan(kernel, tuple(pieces), swapped)


def run(
    launcher: Launcher,
    problem: GemmProblem,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
    flags: Flags,
    matrices_a: tuple[int, ...],
    matrices_b: tuple[int, ...],
) -> None:
    """Writes the flagged elements of alpha op(a) op(b) + beta c into `out`; `c` must not overlap it."""
    arrays = [a, b, out if c is None or problem.beta == 0 else c, out]
    found = [StoredArray.of(launcher, array) for array in arrays]
    plan = _plan(launcher.spec, problem, *(stored for stored, _ in found), matrices_a, matrices_b)
    bases = [base for _, base in found]
    rows, columns = flags.rows, flags.columns
    if plan.swapped:
        bases[:2] = bases[1::-1]
        rows, columns = columns, rows
    for piece in plan.pieces:
        params = FallbackParams.from_buffer_copy(piece.params)
        gemm = params.gemm
        for matrix, base in zip((gemm.a, gemm.b, gemm.c, gemm.d), bases, strict=True):
            matrix.re += base
            matrix.im += base
        for matrix, pair in (
            (params.rows, rows),
            (params.columns, columns),
            (params.pairs, (flags.pairs, flags.pairs)),
        ):
            matrix.re += pair[0]
            matrix.im += pair[1]
        params.status = flags.status
        launcher.launch(
            plan.kernel.source,
            "fallback",
            grid=min(piece.grid, launcher.max_grid),
            block=plan.kernel.tile.threads,
            shared=plan.kernel.shared,
            params=params,
        )
