"""What tensor cores must not answer: flagged rows, columns and tiles, in plain FP32 on the multiply-add units.

Sums of 64 steps of k are added up: no less accurate than a BLAS that splits k.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import GemmParams, MatrixParams, MatrixView, StoredArray, launches, matrix_view
from gemmserve_kernels.config import SimtTile
from gemmserve_kernels.planes.verdict import GROUP_WORDS, groups, most_deficit
from gemmserve_kernels.simt.gemm import runs_along_rows
from gemmserve_kernels.tiling import Operands, TiledKernel, gemm_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.planes.prepass import Prepass
    from gemmserve_kernels.problem import GemmProblem, GemmReduceProblem

DEPENDENT: Final = True
"""The kernel waits for the one ahead of it (cuda/common/dependent.cuh)."""
TILES: Final = {
    "float32": SimtTile(64, 64, 8, 8, 8, min_blocks=4),
    "complex64": SimtTile(64, 64, 8, 8, 4, min_blocks=2),
}
"""Those of `simt`'s large products: where much is flagged, this is as fast."""
BLOCKS: Final = 4
"""Blocks for each multiprocessor; each takes one tile after another."""
_INT: Final = np.dtype(np.int32)


class FlagParams(ctypes.Structure):
    """Mirror of FlagParams in cuda/epilogue/flags.cuh."""

    _fields_ = (
        ("rows", MatrixParams),
        ("columns", MatrixParams),
        ("row_deficits", MatrixParams),
        ("column_deficits", MatrixParams),
        ("status_a", ctypes.c_int64),
        ("status_b", ctypes.c_int64),
        ("most_deficit", ctypes.c_int64),
        ("counters", ctypes.c_uint64),
        ("widened", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class FallbackParams(ctypes.Structure):
    """Mirror of FallbackParams in cuda/fallback.cu."""

    _fields_ = (("gemm", GemmParams), ("flags", FlagParams), ("tiles", ctypes.c_int64))


@dataclass(frozen=True)
class Flags:
    """What is to be computed in plain arithmetic. Addresses, 0 where there is nothing: int32 flags of the rows of op(A)
    and of the columns of op(B); their deficits (`planes.verdict`); two words that are both 0 where nothing is flagged.
    `matrices_*`: matrices to step in A's and B's for each axis of the batch. `counters`: what the elements that are
    computed are counted by (`Launcher.counters`), 0: nothing. `widened`: the deficits' tiles have been computed the
    wide way, and are replaced where a row or column is flagged.
    """

    rows: int
    columns: int
    deficits_a: int
    deficits_b: int
    status: tuple[int, int]
    matrices_a: tuple[int, ...]
    matrices_b: tuple[int, ...]
    counters: int = 0
    widened: bool = False

    @classmethod
    def of(cls, launcher: Launcher, ready: Prepass, wide: Prepass | None, counters: int) -> Flags:
        """What the planes of a product do not serve, nor those of the wide way if there is one."""
        steps = ready.a.planes.batch_strides, ready.b.planes.batch_strides
        deficits = (0, 0)
        if ready.a.deficits is not None:
            deficits = ready.a.deficits_at(launcher), ready.b.deficits_at(launcher)
            if wide is None:
                return cls(0, 0, *deficits, deficits, *steps, counters)
        planes = wide or ready
        rows, columns = launcher.pointer(planes.a.flags), launcher.pointer(planes.b.flags)
        status = planes.status, planes.status
        return cls(rows, columns, *deficits, status, *steps, counters, widened=wide is not None)

    @staticmethod
    def views(
        problem: GemmProblem | GemmReduceProblem, matrices_a: tuple[int, ...], matrices_b: tuple[int, ...]
    ) -> tuple[MatrixView, MatrixView, MatrixView, MatrixView]:
        """Flags of rows and columns, deficits of both, as matrices of one row; addresses count from the arrays'."""

        def view(length: int, steps: tuple[int, ...]) -> MatrixView:
            return MatrixView(0, 0, _INT, 1, length, 0, 1, tuple(step * length for step in steps))

        sides = (problem.m, matrices_a), (problem.n, matrices_b)
        rows, columns = (view(length, steps) for length, steps in sides)
        row_groups, column_groups = (view(groups(length) * GROUP_WORDS, steps) for length, steps in sides)
        return rows, columns, row_groups, column_groups

    @staticmethod
    def swap(
        views: tuple[MatrixView, MatrixView, MatrixView, MatrixView],
    ) -> tuple[MatrixView, MatrixView, MatrixView, MatrixView]:
        """The views where rows are those of op(B)."""
        return views[1], views[0], views[3], views[2]

    @staticmethod
    def params(views: Sequence[MatrixView], k: int) -> FlagParams:
        """The arguments, without addresses."""
        names = "rows", "columns", "row_deficits", "column_deficits"
        found = {name: view.params() for name, view in zip(names, views, strict=True)}
        return FlagParams(**found, most_deficit=most_deficit(k))

    def place(self, params: FlagParams, *, swapped: bool) -> None:
        """Adds the addresses to views; where `swapped`, rows are those of op(B)."""
        pairs = (
            (params.rows, params.columns, self.rows, self.columns),
            (
                params.row_deficits,
                params.column_deficits,
                self.deficits_a and self.deficits_a + _INT.itemsize,
                self.deficits_b and self.deficits_b + _INT.itemsize,
            ),
        )
        for rows, columns, of_a, of_b in pairs:
            for matrix, address in zip((rows, columns), (of_b, of_a) if swapped else (of_a, of_b), strict=True):
                matrix.re = matrix.re + address if address else 0
        params.status_a, params.status_b = self.status
        params.counters, params.widened = self.counters, self.widened


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
    flag_views = Flags.views(problem, matrices_a, matrices_b)
    swapped = runs_along_rows(d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        flag_views = Flags.swap(flag_views)
    tile = TILES[problem.dtype.name]
    kernel = TiledKernel.build("fallback", operands, tile, c_dtype=c.dtype, d_dtype=d.dtype, d=d_view)
    pieces = []
    views = [operands.a, operands.b, c_view, d_view, *flag_views]
    for _, inner, found in launches(problem.batch_shape, views):
        gemm, tiles = gemm_params(kernel, operands, inner, found[:4], complex(problem.alpha), complex(problem.beta))
        params = FallbackParams(gemm=gemm, flags=Flags.params(found[4:], problem.k), tiles=tiles)
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
