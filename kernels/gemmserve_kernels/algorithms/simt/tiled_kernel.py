"""Plans of the portable kernels: a source made concrete, argument structures.

A plan depends on shapes, strides, dtypes and the alignment of addresses, not on the addresses: the same product on
other arrays of the same kind finds its plan in a cache, and only adds where its arrays lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import (
    TYPES,
    Operands,
    access_defines,
    flag,
    index_type,
    runs_along_rows,
    written,
)
from gemmserve_kernels.algorithms.common.partials import epilogue_defines, local_bytes
from gemmserve_kernels.algorithms.common.runs import is_small
from gemmserve_kernels.algorithms.simt.tile import resolve_simt
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    GemmReduceParams,
    choose_access,
    gemm_params,
    launches,
    piece_of,
    place_all,
)
from gemmserve_kernels.problem.problem import GemmReduceProblem

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    import numpy as np

    from gemmserve_kernels.algorithms.common.partials import Partials
    from gemmserve_kernels.algorithms.simt.tile import SimtTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import GemmParams, MatrixView, StoredArray
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem

_RUN: Final = 8
"""Steps of k of small products that are summed up one after another, or the next more that are whole tiles."""
_RASTER_GROUP: Final = 8
"""Rows of tiles that blocks walk down together; 8 as in Triton's tutorial."""


@dataclass(frozen=True)
class TiledKernel:
    """A kernel made concrete: its source, and the launch shape that goes with it."""

    source: KernelSource
    tile: SimtTile
    shared: int

    @classmethod
    def build(
        cls,
        name: str,
        operands: Operands,
        tile: SimtTile,
        *,
        c_dtype: np.dtype[Any],
        d_dtype: np.dtype[Any],
        d: MatrixView | None,
        local_bytes: int = 0,
        extra: dict[str, str] | None = None,
    ) -> TiledKernel:
        """The defines for `operands` in `tile`; `d` is the matrix that is written, None where none is."""
        itemsize = operands.accumulate.itemsize
        a = choose_access(operands.a, k_is_row=False, block=tile.block_m, block_k=tile.block_k)
        b = choose_access(operands.b, k_is_row=True, block=tile.block_n, block_k=tile.block_k)
        shared = tile.shared_bytes(itemsize, pad_a=a.along_k, pad_b=b.along_k, local_bytes=local_bytes)
        piece = piece_of(itemsize, tile.thread_n)
        vector_d = d is not None and d.column_stride == 1 and d.aligned(piece, d.row_stride)
        defines = {
            "TYPE_A": TYPES[operands.a.dtype.name],
            "TYPE_B": TYPES[operands.b.dtype.name],
            "TYPE_C": TYPES[c_dtype.name],
            "TYPE_D": TYPES[d_dtype.name],
            "TYPE_ACC": TYPES[operands.accumulate.name],
            "PLANAR": flag(operands.planar),
            "INDEX": index_type(operands, (tile.block_m, tile.block_n, tile.block_k)),
            "BLOCK_M": str(tile.block_m),
            "BLOCK_N": str(tile.block_n),
            "BLOCK_K": str(tile.block_k),
            "THREAD_M": str(tile.thread_m),
            "THREAD_N": str(tile.thread_n),
            "STAGES": str(tile.stages),
            "MIN_BLOCKS": str(tile.min_blocks),
            "GROUP": str(_RASTER_GROUP),
            "THREADS": str(tile.threads),
            "SHARED_BYTES": str(shared),
            **access_defines(a, b),
            "VECTOR_D": flag(vector_d),
            **(extra or {}),
        }
        return cls(KernelSource(name, tuple(defines.items())), tile, shared)

    def launch(self, launcher: Launcher, entry: str, params: ctypes.Structure, gemm: GemmParams, tiles: int) -> None:
        """Launches all `tiles` of `gemm`, which is `params` or a part of it, in as many grids as it takes."""
        for first in range(0, tiles, launcher.max_grid):
            gemm.first_tile = first
            grid = min(tiles - first, launcher.max_grid)
            launcher.launch(self.source, entry, grid=grid, block=self.tile.threads, shared=self.shared, params=params)

    def gemm_params(
        self,
        problem: GemmProblem | GemmReduceProblem,
        operands: Operands,
        batch_shape: tuple[int, ...],
        views: Sequence[MatrixView],
    ) -> tuple[GemmParams, int]:
        """Arguments of one launch over `batch_shape`, `views` being A, B and what is written; and its tiles."""
        shape, block = (operands.m, operands.n), (self.tile.block_m, self.tile.block_n)
        conjugates = operands.conjugate_a, operands.conjugate_b
        return gemm_params(problem, views, shape, block, batch_shape, conjugates)


@dataclass(frozen=True)
class TiledPlan:
    """The launches of one product (matrix_units.MatrixUnitPlan); addresses in `pieces` count from the arrays' bases."""

    kernel: TiledKernel
    pieces: tuple[tuple[GemmReduceParams, int], ...]
    swapped: bool
    length: int

    def launch(
        self,
        launcher: Launcher,
        bases: Sequence[int],
        exponents: Sequence[int] = (0, 0),
        *,
        partials: Partials | None = None,
        first_matrix: int = 0,
    ) -> None:
        """See matrix_units.MatrixUnitPlan; there are no exponents."""
        del exponents
        for piece, tiles in self.pieces:
            params = GemmReduceParams.from_buffer_copy(piece)
            place_all(params.gemm, bases)
            if partials is not None:
                partials.place(launcher, params, first_matrix)
            given = params.gemm if partials is None else params
            self.kernel.launch(launcher, self.kernel.source.name, given, params.gemm, tiles)


@lru_cache(maxsize=1024)
def tiled_plan(
    spec: DeviceSpec,
    problem: GemmProblem | GemmReduceProblem,
    config: GemmConfig | SimtTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray | None,
    d: StoredArray | None,
) -> TiledPlan:
    """Plan a product, turned so that its result runs along rows, or a reduction, turned so that rows are reduced.

    C and D of a reduction: None where the product is not returned. Raises ConfigInfeasible.
    """
    operands = Operands.of(problem, a, b)
    c_view, d_view = written(problem, c, d)
    reduces = isinstance(problem, GemmReduceProblem)
    swapped = not problem.over_rows if isinstance(problem, GemmReduceProblem) else runs_along_rows(d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if config else None
    shared = local_bytes(problem) if isinstance(problem, GemmReduceProblem) else 0
    tile = resolve_simt(
        config, m=operands.m, n=operands.n, batch=problem.batch, accumulate=operands.accumulate, spec=spec,
        local_bytes=shared, runs=is_small(problem),
    )  # fmt: skip
    run = 0
    if is_small(problem) and (roomy := tile.with_runs(operands.accumulate.itemsize, spec)) is not None:
        tile, run = roomy, _RUN if tile.block_k % _RUN == 0 else -(-_RUN // tile.block_k) * tile.block_k
    extra = {"SUM_STEPS": str(run)}
    if isinstance(problem, GemmReduceProblem):
        extra |= epilogue_defines(problem)
    kernel = TiledKernel.build(
        "gemm_reduce" if reduces else "gemm", operands, tile, c_dtype=c_view.dtype, d_dtype=d_view.dtype, d=d_view,
        local_bytes=shared, extra=extra,
    )  # fmt: skip
    pieces, over_batch = [], isinstance(problem, GemmReduceProblem) and problem.over_batch
    for first_matrix, inner, views in launches(problem.batch_shape, [operands.a, operands.b, c_view, d_view]):
        gemm, tiles = kernel.gemm_params(problem, operands, inner, views)
        pieces.append((GemmReduceParams(gemm=gemm, first_batch=first_matrix, reduce_batch=over_batch), tiles))
    length = -(-operands.m // tile.block_m) * (problem.batch if over_batch else 1)
    return TiledPlan(kernel, tuple(pieces), swapped, length)
