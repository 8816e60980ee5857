"""The fallback where tensor cores multiply doubles as fast as the multiply-add units floats: on Hopper.

Flagged rows, columns and tiles of products in single precision are computed in double, by the engine of `dmma`, which
brings operands as they are and converts them in registers, and rounded to single once: |D - R| is half a unit in the
last place of R, and nothing overflows on the way.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import flag
from gemmserve_kernels.algorithms.dmma.kernel import Kernel
from gemmserve_kernels.algorithms.dmma.tile import COPIED_TILES, DmmaTile, choose, kind_of
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
_PLACES: Final = 2048
"""Places of the table in which a block notes which tiles' rows and columns are flagged, in shared memory beside its
tiles."""
_FEW: Final = 56
"""Registers left to those who ask for tiles; they look for tiles and count elements."""


@device_struct("splits/dmma_fallback.cu")
class DmmaFallbackParams(ctypes.Structure):
    """Arguments of dmma_fallback."""


@dataclass(frozen=True)
class _DmmaFallbackPlan:
    pieces: tuple[tuple[Kernel, DmmaFallbackParams], ...]
    swapped: bool


@lru_cache(maxsize=1024)
def _plan(
    spec: DeviceSpec,
    problem: GemmProblem,
    tile: DmmaTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray,
    d: StoredArray,
    matrices_a: tuple[int, ...],
    matrices_b: tuple[int, ...],
    failing: Failing | None = None,
) -> _DmmaFallbackPlan | None:
    """`matrices_*`: matrices to step in the flags for each axis of the batch; `failing`: as in `Flags`. None: see
    `run`.
    """
    oriented = Oriented.of(problem, (a, b, c, d), matrices_a, matrices_b, failing)
    operands = oriented.operands
    kind = kind_of(problem)
    chosen = tile or choose(operands.m, operands.n, spec, kind, problem.batch)
    conjugates = operands.conjugate_a, operands.conjugate_b
    extra = {"PLACES": str(_PLACES), "FEW": str(_FEW), "SOME": flag(not problem.planar)}
    extra |= {} if failing is None else failing.define(swapped=oriented.swapped)
    pieces = []
    for _, inner, found in launches(problem.batch_shape, oriented.views):
        kernel = Kernel.of(spec, problem, chosen, found[:4], conjugates, inner, extra)
        if kernel.sources is None:
            copied = tile or COPIED_TILES.get(kind)
            if copied is None:
                return None
            kernel = Kernel.of(spec, problem, copied, found[:4], conjugates, inner, extra)
        gemm = kernel.params(problem, found[:4], (operands.m, operands.n))
        matrices = math.prod(inner)
        shift, columns = _places(matrices * gemm.tiles_m, matrices * gemm.tiles_n)
        params = DmmaFallbackParams(
            gemm=gemm,
            flags=Flags.params(found[4:], problem.k, failing),
            matrices=matrices,
            tiles=gemm.tiles_m * gemm.tiles_n * matrices,
            shift=shift,
            columns=columns,
        )
        pieces.append((kernel, params))
    return _DmmaFallbackPlan(tuple(pieces), oriented.swapped)


def _places(rows: int, columns: int) -> tuple[int, int]:
    """Return how so many tiles of rows, and of columns, find their places: the logarithm of those that share one, and
    where columns begin.
    """
    shift = 0
    while ((rows - 1) >> shift) + ((columns - 1) >> shift) + 2 > _PLACES:
        shift += 1
    return shift, ((rows - 1) >> shift) + 1


def run(
    launcher: Launcher,
    problem: GemmProblem,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
    flags: Flags,
    tile: DmmaTile | None = None,
) -> bool:
    """Writes the flagged elements of alpha op(a) op(b) + beta c into `out`; `c` must not overlap it.

    Returns whether it did: not on other devices, nor for planar operands that the copy engine cannot fetch.
    """
    if not launcher.spec.has_wgmma:
        return False
    stored, bases = stored_operands(launcher, problem, a, b, c, out)
    plan = _plan(launcher.spec, problem, tile, *stored, flags.matrices_a, flags.matrices_b, flags.failing)
    if plan is None:
        return False
    if plan.swapped:
        bases[:2] = bases[1::-1]
    for kernel, piece in plan.pieces:
        params = DmmaFallbackParams.from_buffer_copy(piece)
        place_all(params.gemm, bases)
        flags.place(params.flags, swapped=plan.swapped)
        kernel.launch(launcher, "dmma_fallback", params, params.tiles, (bases[0], bases[1]), dependent=DEPENDENT)
    return True
