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
    from gemmserve_kernels.problem import GemmProblem, GemmReduceProblem

DEPENDENT: Final = True
"""The kernel waits for the one ahead of it (cuda/common/dependent.cuh)."""
TILES: Final = {"float32": SimtTile(32, 32, 16, 4, 4), "complex64": SimtTile(32, 32, 8, 4, 2)}
"""Small: a flagged row costs all rows of its tile."""
BLOCKS: Final = 4
"""Blocks for each multiprocessor; each takes one tile after another."""
_INT: Final = np.dtype(np.int32)


class FlagParams(ctypes.Structure):
    """Mirror of FlagParams in cuda/epilogue/flags.cuh."""

    _fields_ = (
        ("rows", MatrixParams),
        ("columns", MatrixParams),
        ("pairs", MatrixParams),
        ("status", ctypes.c_int64),
    )


class FallbackParams(ctypes.Structure):
    """Mirror of FallbackParams in cuda/fallback.cu."""

    _fields_ = (("gemm", GemmParams), ("flags", FlagParams), ("tiles", ctypes.c_int64))


@dataclass(frozen=True)
class Flags:
    """Addresses of int32 flags: two arrays for the rows of op(A), two for the columns of op(B), one for the pairs, and
    a word that is 0 where none is set. `matrices_*`: matrices to step in A's and B's for each axis of the batch.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    pairs: int
    status: int
    matrices_a: tuple[int, ...]
    matrices_b: tuple[int, ...]

    @staticmethod
    def views(
        problem: GemmProblem | GemmReduceProblem, matrices_a: tuple[int, ...], matrices_b: tuple[int, ...]
    ) -> tuple[MatrixView, MatrixView, MatrixView]:
        """The flags of rows, columns and pairs as matrices of one row; addresses count from those of the arrays."""
        pair_steps, step = [], 1
        for extent in reversed(problem.batch_shape):
            pair_steps.append(step)
            step *= extent

        def view(length: int, steps: tuple[int, ...]) -> MatrixView:
            return MatrixView(0, 0, _INT, 1, length, 0, 1, tuple(step * length for step in steps))

        return view(problem.m, matrices_a), view(problem.n, matrices_b), view(1, tuple(reversed(pair_steps)))

    def place(self, params: FlagParams, *, swapped: bool) -> None:
        """Adds the addresses to views; where `swapped`, rows are those of op(B)."""
        rows, columns = (self.columns, self.rows) if swapped else (self.rows, self.columns)
        places = (params.rows, rows), (params.columns, columns), (params.pairs, (self.pairs, self.pairs))
        for matrix, (one, other) in places:
            matrix.re += one
            matrix.im += other
        params.status = self.status


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
    rows, columns, pairs = Flags.views(problem, matrices_a, matrices_b)
    swapped = runs_along_rows(d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        rows, columns = columns, rows
    tile = TILES[problem.dtype.name]
    kernel = TiledKernel.build("fallback", operands, tile, c_dtype=c.dtype, d_dtype=d.dtype, d=d_view)
    pieces = []
    views = [operands.a, operands.b, c_view, d_view, rows, columns, pairs]
    for _, inner, (*found, row_flags, column_flags, pair_flags) in launches(problem.batch_shape, views):
        gemm, tiles = gemm_params(kernel, operands, inner, found, complex(problem.alpha), complex(problem.beta))
        params = FallbackParams(
            gemm=gemm,
            flags=FlagParams(row_flags.params(), column_flags.params(), pair_flags.params()),
            tiles=tiles,
        )
        pieces.append(_Piece(params, min(tiles, BLOCKS * spec.sm_count)))
    return _Plan(kernel, tuple(pieces), swapped)


def run(
    launcher: Launcher,
    problem: GemmProblem,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
    flags: Flags,
) -> None:
    """Writes the flagged elements of alpha op(a) op(b) + beta c into `out`; `c` must not overlap it."""
    arrays = [a, b, out if c is None or problem.beta == 0 else c, out]
    found = [StoredArray.of(launcher, array) for array in arrays]
    plan = _plan(launcher.spec, problem, *(stored for stored, _ in found), flags.matrices_a, flags.matrices_b)
    bases = [base for _, base in found]
    if plan.swapped:
        bases[:2] = bases[1::-1]
    for piece in plan.pieces:
        params = FallbackParams.from_buffer_copy(piece.params)
        gemm = params.gemm
        for matrix, base in zip((gemm.a, gemm.b, gemm.c, gemm.d), bases, strict=True):
            matrix.re += base
            matrix.im += base
        flags.place(params.flags, swapped=plan.swapped)
        launcher.launch(
            plan.kernel.source,
            "fallback",
            grid=min(piece.grid, launcher.max_grid),
            block=plan.kernel.tile.threads,
            shared=plan.kernel.shared,
            params=params,
            dependent=DEPENDENT,
        )
