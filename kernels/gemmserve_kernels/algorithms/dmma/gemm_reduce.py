"""Reductions of products of float64 and complex128 on tensor cores: `gemm`'s tiles leave partials, which are combined.

What is reduced are the elements of `gemm`, or of the transposed product where rows are reduced. Every warp folds the
rows of its part of a tile in registers (cuda/dmma/dmma_reduce.cu); sums are added up in the order of the columns.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.algorithms.common.matrix_units import reduce_stored
from gemmserve_kernels.algorithms.common.operands import Operands, written
from gemmserve_kernels.algorithms.common.partials import epilogue_defines
from gemmserve_kernels.algorithms.dmma.gemm import MAX_TILES, supports
from gemmserve_kernels.algorithms.dmma.kernel import Kernel
from gemmserve_kernels.algorithms.dmma.tile import DmmaTile, resolve_tile
from gemmserve_kernels.device.struct_params import launches, place_all
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.algorithms.common.partials import Partials
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import StoredArray
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem

__all__ = ["resolve", "run_gemm_reduce", "supports"]


@device_struct("dmma/dmma_reduce.cu")
class DmmaReduceParams(ctypes.Structure):
    """Arguments of dmma_reduce."""


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> DmmaTile:
    """The tile for the product of `problem`, or for its transpose where rows are reduced. Raises ConfigInfeasible."""
    shape = problem.m, problem.n
    if problem.over_rows:
        config, shape = config.transposed() if config else None, shape[::-1]
    return resolve_tile(config, shape, problem, spec)


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | DmmaTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b), and the product as "c" where the problem returns it, into `results`.

    Raises ConfigInfeasible, CompileError.
    """
    tile = config if isinstance(config, DmmaTile) else resolve(config, problem, launcher.spec)
    reduce_stored(launcher, problem, partial(plan_reduction, launcher.spec, problem, tile), a, b, results)


@dataclass(frozen=True)
class ReducePlan:
    """The launches of one reduction (matrix_units.MatrixUnitPlan): kernel, arguments and tiles of each piece of the
    batch.
    """

    pieces: tuple[tuple[Kernel, DmmaReduceParams, int], ...]
    swapped: bool
    length: int
    screened: bool

    def launch(
        self,
        launcher: Launcher,
        bases: Sequence[int],
        exponents: Sequence[int] = (0, 0),
        *,
        partials: Partials | None = None,
        first_matrix: int = 0,
        failing: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """See matrix_units.MatrixUnitPlan; there are no exponents, and always partials. `failing`: addresses of what
        says which rows of tiles are made, which rows leave partials, and whether any does; of a `screened` plan.
        """
        del exponents
        assert partials is not None
        for kernel, piece, tiles in self.pieces:
            params = DmmaReduceParams.from_buffer_copy(piece)
            params.failing, params.failing_rows, params.failing_any = failing
            place_all(params.gemm, bases)
            partials.place(launcher, params.reduce, first_matrix)
            for first in range(0, tiles, MAX_TILES):
                params.gemm.first_tile, params.tiles = first, min(tiles - first, MAX_TILES)
                kernel.launch(
                    launcher, "dmma_reduce", params, params.tiles, (bases[0], bases[1]), dependent=self.screened
                )


@lru_cache(maxsize=1024)
def plan_reduction(
    spec: DeviceSpec,
    problem: GemmReduceProblem,
    tile: DmmaTile,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray | None,
    d: StoredArray | None,
    *,
    screened: bool = False,
) -> ReducePlan:
    """Plan a reduction, turned so that it goes along rows. C and D: None where the product is not returned.
    `screened`: of some rows alone, which the device knows.
    """
    operands = Operands.of(problem, a, b)
    views = written(problem, c, d)
    if problem.over_rows:
        operands, views = operands.transposed(), [view.transposed() for view in views]
    shape = operands.m, operands.n
    conjugates = operands.conjugate_a, operands.conjugate_b
    extra = epilogue_defines(problem) | ({"SCREENED": "1"} if screened else {})
    pieces = []
    for first_matrix, inner, cut in launches(problem.batch_shape, [operands.a, operands.b, *views]):
        kernel = Kernel.of(spec, problem, tile, cut, conjugates, inner, extra)
        gemm = kernel.params(problem, cut, shape)
        params = DmmaReduceParams(gemm=gemm)
        params.reduce.first_batch, params.reduce.reduce_batch = first_matrix, problem.over_batch
        pieces.append((kernel, params, gemm.tiles_m * gemm.tiles_n * math.prod(inner)))
    parts = -(-operands.n // tile.block_n) * (tile.block_n // tile.warp_n)
    length = parts * (problem.batch if problem.over_batch else 1)
    return ReducePlan(tuple(pieces), problem.over_rows, length, screened)
