"""Products of float64 and complex128 on the tensor cores of compute capability 8.0 and later.

`run_gemm` makes a whole product, `run_tiles` those tiles that operands of residues cannot be trusted with
(`ozaki.bound`). Every real product and sum is one fused multiply-add in double precision: NaN,
infinities and subnormals are what plain arithmetic has, and a product with one nonzero term for each element is exact.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import Operands
from gemmserve_kernels.algorithms.dmma.kernel import Kernel
from gemmserve_kernels.algorithms.dmma.tile import COPIED_TILES, DmmaTile, choose, kind_of, resolve_tile
from gemmserve_kernels.algorithms.mma.tile import check_device
from gemmserve_kernels.device.struct_params import launches, matrix_view, stored_operands
from gemmserve_kernels.device.structures import device_struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import MatrixView
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem


MAX_TILES: Final = 1 << 30
"""Tiles of one launch."""
JUDGED_M: Final = 128
JUDGED_N: Final = 256
"""Rows and columns of the tiles that `run_tiles` is told of; JUDGED_M, JUDGED_N in cuda/common/judging/judged.cuh."""


@device_struct("dmma/dmma_gemm.cu")
class DmmaParams(ctypes.Structure):
    """Arguments of dmma_gemm."""


@device_struct("dmma/dmma_tiles.cu")
class DmmaTilesParams(ctypes.Structure):
    """Arguments of dmma_tiles."""


@dataclass(frozen=True)
class Region:
    """View of one launch of `run_tiles`: rows and columns of the product, of `matrices` matrices from `first` on."""

    first: int
    matrices: int
    row: int
    rows: int
    column: int
    columns: int


def supports(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why no kernel of `dmma` can compute `problem` on `spec`, or None."""
    if reason := check_device(spec):
        return reason
    if problem.dtype.name not in {"float64", "complex128"}:
        return f"dmma multiplies float64 or complex128, not {problem.dtype.name}"
    others = (problem.b, getattr(problem, "c", None))
    if any(operand.dtype != problem.a.dtype for operand in others if operand is not None):
        return "A, B and C must have one dtype"
    return None


def resolve(config: GemmConfig | None, problem: GemmProblem, spec: DeviceSpec) -> DmmaTile:
    """The tile for `problem` on `spec`: see `tile.resolve_tile`. Raises ConfigInfeasible."""
    return resolve_tile(config, (problem.m, problem.n), problem, spec)


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | DmmaTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0. Raises
    ConfigInfeasible, CompileError.
    """
    stored, bases = stored_operands(launcher, problem, a, b, c, out)
    operands = Operands.of(problem, stored[0], stored[1])
    shape = (*problem.batch_shape, problem.m, problem.n)
    views = [operands.a, operands.b, *(matrix_view(x, shape, planar=problem.planar) for x in stored[2:])]
    conjugates = (operands.conjugate_a, operands.conjugate_b)
    tile = config if isinstance(config, DmmaTile) else resolve(config, problem, launcher.spec)
    for _, batch_shape, cut in launches(problem.batch_shape, views):
        placed = [view.shifted_by(base) for view, base in zip(cut, bases, strict=True)]
        kernel = Kernel.of(launcher.spec, problem, tile, placed, conjugates, batch_shape)
        gemm = kernel.params(problem, placed, (problem.m, problem.n))
        tiles = gemm.tiles_m * gemm.tiles_n * math.prod(batch_shape)
        for first in range(0, tiles, MAX_TILES):
            gemm.first_tile, count = first, min(tiles - first, MAX_TILES)
            kernel.launch(launcher, "dmma_gemm", DmmaParams(gemm=gemm, tiles=count), count)


def run_tiles(
    launcher: Launcher,
    problem: GemmProblem,
    views: Sequence[MatrixView],
    conjugates: tuple[bool, bool],
    batch_shape: tuple[int, ...],
    region: Region,
    failing: int,
    counters: int,
) -> None:
    """Writes those tiles of the product whose numbers lie at `failing` (judging/judged.cuh), of single precision too,
    which is multiplied in double and rounded once. `views`: A, B, C and D, with addresses. `counters`:
    `Launcher.counters`.
    """
    a, b, c, d = views
    row, column = region.row, region.column
    cut = (
        replace(a.shifted(row * a.row_stride), rows=region.rows),
        replace(b.shifted(column * b.column_stride), columns=region.columns),
        c.shifted(row * c.row_stride + column * c.column_stride),
        d.shifted(row * d.row_stride + column * d.column_stride),
    )
    kind = kind_of(problem)
    tile = choose(problem.m, problem.n, launcher.spec, kind, problem.batch)
    kernel = Kernel.of(launcher.spec, problem, tile, cut, conjugates, batch_shape)
    if kernel.sources is None and kind in COPIED_TILES:
        kernel = Kernel.of(launcher.spec, problem, COPIED_TILES[kind], cut, conjugates, batch_shape)
    gemm = kernel.params(problem, cut, (region.rows, region.columns))
    tiles = gemm.tiles_m * gemm.tiles_n * region.matrices
    down, right = -(-region.rows // JUDGED_M), -(-region.columns // JUDGED_N)
    params = DmmaTilesParams(
        gemm=gemm,
        failing=failing,
        tiles=tiles,
        first=region.first,
        counters=counters,
        judged=region.matrices * down * right,
        judged_m=down,
        judged_n=right,
    )
    kernel.launch(launcher, "dmma_tiles", params, tiles)
