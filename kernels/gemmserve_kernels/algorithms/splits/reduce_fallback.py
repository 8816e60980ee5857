"""Reductions of what tensor cores must not answer, in plain FP32: the partials of flagged products are replaced.

A product of the batch is computed again for a tile of outputs where one of them, or anything that is reduced for it, is
flagged.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import Operands
from gemmserve_kernels.algorithms.common.partials import Partials, epilogue_defines, local_bytes
from gemmserve_kernels.algorithms.simt.tile import SimtTile
from gemmserve_kernels.algorithms.simt.tiled_kernel import TiledKernel
from gemmserve_kernels.algorithms.splits.fallback import BLOCKS
from gemmserve_kernels.algorithms.splits.flags import Flags
from gemmserve_kernels.device.struct_params import GemmReduceParams, StoredArray, launches, place_all
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmReduceProblem


DEPENDENT: Final = True
"""The kernel waits itself for the one ahead (cuda/common/dependent.cuh)."""
_TILES: Final = {"float32": SimtTile(32, 32, 16, 4, 4), "complex64": SimtTile(32, 32, 8, 4, 2)}
"""With registers for two sums of each element: k is summed up in runs of 64, whose sums are then added."""


@device_struct("splits/reduce_fallback.cu")
class ReduceFallbackParams(ctypes.Structure):
    """Arguments of reduce_fallback."""


@dataclass(frozen=True)
class _ReduceFallbackPlan:
    kernel: TiledKernel
    pieces: tuple[tuple[ReduceFallbackParams, int], ...]
    swapped: bool


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmReduceProblem,
    a: StoredArray,
    b: StoredArray,
    matrices_a: tuple[int, ...],
    matrices_b: tuple[int, ...],
) -> _ReduceFallbackPlan:
    operands = Operands.of(problem, a, b)
    flag_views = Flags.views(problem, matrices_a, matrices_b)
    swapped = not problem.over_rows
    if swapped:
        operands, flag_views = operands.transposed(), Flags.swap(flag_views)
    stored = problem.stored((), problem.dtype)[1]
    kernel = TiledKernel.build(
        "reduce_fallback",
        operands,
        _TILES[problem.accumulate.name],
        c_dtype=stored,
        d_dtype=stored,
        d=None,
        local_bytes=local_bytes(problem),
        extra=epilogue_defines(problem),
    )
    pieces = []
    for first, inner, found in launches(problem.batch_shape, [operands.a, operands.b, *flag_views]):
        gemm, tiles = kernel.gemm_params(problem, operands, inner, found[:2])
        product = GemmReduceParams(gemm=gemm, first_batch=first, reduce_batch=problem.over_batch)
        flags = Flags.params(found[2:], problem.k)
        params = ReduceFallbackParams(product=product, flags=flags, tiles=tiles // gemm.tiles_m)
        pieces.append((params, min(params.tiles, BLOCKS * spec.sm_count)))
    return _ReduceFallbackPlan(kernel, tuple(pieces), swapped)


def run(
    launcher: Launcher,
    problem: GemmReduceProblem,
    a: Any,
    b: Any,
    flags: Flags,
    partials: Partials,
    parts: int,
    first_matrix: int,
) -> None:
    """Replaces partials of the problem's batch, which is number `first_matrix` and on of the partials' and left
    `parts` for each output of a product.
    """
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, array) for array in (a, b))
    plan = _plan(launcher.spec, problem, stored_a, stored_b, flags.matrices_a, flags.matrices_b)
    bases = (base_b, base_a) if plan.swapped else (base_a, base_b)
    for piece, grid in plan.pieces:
        params = ReduceFallbackParams.from_buffer_copy(piece)
        product = params.product
        place_all(product.gemm, bases)
        partials.place(launcher, product, first_matrix)
        params.parts = parts
        flags.place(params.flags, swapped=plan.swapped)
        launcher.launch(
            plan.kernel.source,
            "reduce_fallback",
            grid=min(grid, launcher.max_grid),
            block=plan.kernel.tile.threads,
            shared=plan.kernel.shared,
            params=params,
            dependent=DEPENDENT,
        )
