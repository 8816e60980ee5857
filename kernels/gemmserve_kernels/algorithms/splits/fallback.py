"""Fallback of products from planes: flagged rows, columns and tiles computed again in plain arithmetic.

On Hopper in double on tensor cores (`dmma_fallback`), elsewhere in plain FP32 on the multiply-add units, where sums of
64 steps of k are added up: no less accurate than a BLAS that splits k.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.simt.tile import SimtTile
from gemmserve_kernels.algorithms.simt.tiled_kernel import TiledKernel
from gemmserve_kernels.algorithms.splits import dmma_fallback
from gemmserve_kernels.algorithms.splits.flags import Flags, Oriented
from gemmserve_kernels.device.struct_params import launches, place_all, stored_operands
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from gemmserve_kernels.algorithms.splits.flags import Failing
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import StoredArray
    from gemmserve_kernels.problem.problem import GemmProblem

DEPENDENT: Final = True
"""The kernel waits for the one ahead of it (cuda/common/dependent.cuh)."""
TILES: Final = {
    "float32": SimtTile(64, 64, 8, 8, 8, min_blocks=4),
    "complex64": SimtTile(64, 64, 8, 8, 4, min_blocks=2),
}
"""Tiles of `simt`'s large products: where much is flagged, this is as fast."""
BLOCKS: Final = 4
"""Blocks for each multiprocessor; each takes one tile after another."""


@device_struct("splits/fallback.cu")
class FallbackParams(ctypes.Structure):
    """Arguments of fallback."""


@dataclass(frozen=True)
class _FallbackPlan:
    kernel: TiledKernel
    pieces: tuple[tuple[FallbackParams, int], ...]
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
    failing: Failing | None = None,
) -> _FallbackPlan:
    """`matrices_*`: matrices to step in the flags for each axis of the batch; `failing`: as in `Flags`."""
    oriented = Oriented.of(problem, (a, b, c, d), matrices_a, matrices_b, failing)
    operands = oriented.operands
    tile = TILES[problem.dtype.name]
    extra = None if failing is None else failing.define(swapped=oriented.swapped)
    kernel = TiledKernel.build("fallback", operands, tile, c_dtype=c.dtype, d_dtype=d.dtype, d=oriented.d, extra=extra)
    pieces = []
    for _, inner, found in launches(problem.batch_shape, oriented.views):
        gemm, tiles = kernel.gemm_params(problem, operands, inner, found[:4])
        params = FallbackParams(gemm=gemm, flags=Flags.params(found[4:], problem.k, failing), tiles=tiles)
        pieces.append((params, min(tiles, BLOCKS * spec.sm_count)))
    return _FallbackPlan(kernel, tuple(pieces), oriented.swapped)


def run(
    launcher: Launcher,
    problem: GemmProblem,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
    flags: Flags,
    *,
    plain: bool = False,
) -> None:
    """Writes the flagged elements of alpha op(a) op(b) + beta c into `out`; `c` must not overlap it. `plain`: in plain
    FP32 on every device, with the bits that reductions have (`reduce_fallback`).
    """
    if not plain and dmma_fallback.run(launcher, problem, a, b, c, out, flags):
        return
    stored, bases = stored_operands(launcher, problem, a, b, c, out)
    plan = _plan(launcher.spec, problem, *stored, flags.matrices_a, flags.matrices_b, flags.failing)
    if plan.swapped:
        bases[:2] = bases[1::-1]
    for piece, grid in plan.pieces:
        params = FallbackParams.from_buffer_copy(piece)
        place_all(params.gemm, bases)
        flags.place(params.flags, swapped=plan.swapped)
        launcher.launch(
            plan.kernel.source,
            "fallback",
            grid=min(grid, launcher.max_grid),
            block=plan.kernel.tile.threads,
            shared=plan.kernel.shared,
            params=params,
            dependent=DEPENDENT,
        )
