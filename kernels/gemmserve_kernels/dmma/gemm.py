"""Products of float64 and complex128 on the tensor cores of compute capability 8.0 and later.

`run_gemm` makes a whole product, `run_tiles` those tiles that operands of residues cannot be trusted with
(gemmserve_kernels.ozaki.bound). Every real product and sum is one fused multiply-add in double precision: NaN,
infinities and subnormals are what plain arithmetic has, and a product with one nonzero term for each element is exact.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.arguments import GemmParams, StoredArray, choose_access, launches, matrix_view
from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.dmma.tiles import DmmaTile, choose
from gemmserve_kernels.mma.tiles import check_device
from gemmserve_kernels.tiling import TYPES, Operands, flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.arguments import MatrixView
    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.problem import GemmProblem


_MOST_TILES: Final = 1 << 30
"""Of one launch."""


class JudgedParams(ctypes.Structure):
    """Mirror of JudgedParams in cuda/common/judged.cuh."""

    _fields_ = (
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("doubt_a", ctypes.c_uint64),
        ("doubt_b", ctypes.c_uint64),
        ("a_step", ctypes.c_int64),
        ("b_step", ctypes.c_int64),
        ("limit", ctypes.c_uint32),
        ("judged", ctypes.c_uint32),
    )


class DmmaParams(ctypes.Structure):
    """Mirror of DmmaParams in cuda/dmma_gemm.cu."""

    _fields_ = (("gemm", GemmParams), ("tiles", ctypes.c_int64))


class DmmaTilesParams(ctypes.Structure):
    """Mirror of DmmaTilesParams in cuda/dmma_tiles.cu."""

    _fields_ = (
        ("gemm", GemmParams),
        ("judged", JudgedParams),
        ("tiles", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("counters", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Region:
    """What one launch of `run_tiles` sees: rows and columns of the product, of `matrices` matrices from `first` on."""

    first: int
    matrices: int
    row: int
    rows: int
    column: int
    columns: int


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Why `run_gemm` cannot compute `problem` on `spec`, or None."""
    if reason := check_device(spec):
        return reason
    if problem.dtype.name not in {"float64", "complex128"}:
        return f"dmma multiplies float64 or complex128, not {problem.dtype.name}"
    if any(operand.dtype != problem.a.dtype for operand in (problem.b, problem.c) if operand is not None):
        return "A, B and C must have one dtype"
    return None


def run_gemm(
    launcher: Launcher, problem: GemmProblem, tile: DmmaTile | None, a: Any, b: Any, c: Any | None, out: Any
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0."""
    found = [StoredArray.of(launcher, array) for array in (a, b, out if c is None or problem.beta == 0 else c, out)]
    operands = Operands.of(problem, found[0][0], found[1][0])
    shape = (*problem.batch_shape, problem.m, problem.n)
    views = [operands.a, operands.b, *(matrix_view(x, shape, planar=problem.planar) for x, _ in found[2:])]
    conjugates = (operands.conjugate_a, operands.conjugate_b)
    tile = tile or _choose(problem, launcher)
    for _, batch_shape, cut in launches(problem.batch_shape, views):
        source = _source("dmma_gemm", problem, tile, cut, conjugates)
        gemm = _params(problem, tile, cut, batch_shape, (problem.m, problem.n))
        for matrix, (_, base) in zip((gemm.a, gemm.b, gemm.c, gemm.d), found, strict=True):
            matrix.re += base
            matrix.im += base
        tiles = gemm.tiles_m * gemm.tiles_n * math.prod(batch_shape)
        for first in range(0, tiles, _MOST_TILES):
            gemm.first_tile, count = first, min(tiles - first, _MOST_TILES)
            params = DmmaParams(gemm=gemm, tiles=count)
            _launch(launcher, source, tile, problem, min(count, _resident(launcher, tile)), params)


def run_tiles(
    launcher: Launcher,
    problem: GemmProblem,
    views: Sequence[MatrixView],
    conjugates: tuple[bool, bool],
    batch_shape: tuple[int, ...],
    region: Region,
    judged: JudgedParams,
    counters: int,
) -> None:
    """Writes what of the product `judged` does not let pass. `views`: A, B, C and D, with addresses. `counters`:
    `Launcher.counters`.
    """
    a, b, c, d = views
    down, right = region.row, region.column
    cut = (
        a.shifted(down * a.row_stride),
        b.shifted(right * b.column_stride),
        c.shifted(down * c.row_stride + right * c.column_stride),
        d.shifted(down * d.row_stride + right * d.column_stride),
    )
    tile = _choose(problem, launcher)
    source = _source("dmma_tiles", problem, tile, cut, conjugates)
    gemm = _params(problem, tile, cut, batch_shape, (region.rows, region.columns))
    tiles = gemm.tiles_m * gemm.tiles_n * region.matrices
    params = DmmaTilesParams(gemm=gemm, judged=judged, tiles=tiles, first=region.first, counters=counters)
    _launch(launcher, source, tile, problem, min(tiles, _resident(launcher, tile)), params)


def _choose(problem: GemmProblem, launcher: Launcher) -> DmmaTile:
    is_complex = problem.dtype.kind == "c"
    return choose(problem.m, problem.n, launcher.spec, is_complex=is_complex, planar=problem.planar)


def _resident(launcher: Launcher, tile: DmmaTile) -> int:
    return min(launcher.max_grid, launcher.spec.sm_count * tile.min_blocks)


def _launch(
    launcher: Launcher, source: KernelSource, tile: DmmaTile, problem: GemmProblem, grid: int, params: ctypes.Structure
) -> None:
    shared = tile.shared_bytes(is_complex=problem.dtype.kind == "c")
    launcher.launch(source, source.name, grid=grid, block=tile.threads, shared=shared, params=params)


def _params(
    problem: GemmProblem,
    tile: DmmaTile,
    views: Sequence[MatrixView],
    batch_shape: tuple[int, ...],
    shape: tuple[int, int],
) -> GemmParams:
    a, b, c, d = (view.params() for view in views)
    m, n = shape
    params = GemmParams(
        a=a, b=b, c=c, d=d, m=m, n=n, k=problem.k, tiles_m=-(-m // tile.block_m), tiles_n=-(-n // tile.block_n)
    )
    params.batch_shape[:] = batch_shape
    alpha, beta = complex(problem.alpha), complex(problem.beta)
    params.alpha[:] = alpha.real, alpha.imag
    params.beta[:] = beta.real, beta.imag
    return params


def _source(
    name: str, problem: GemmProblem, tile: DmmaTile, views: Sequence[MatrixView], conjugates: tuple[bool, bool]
) -> KernelSource:
    a, b, _, d = views
    is_complex = problem.dtype.kind == "c"
    access_a = choose_access(a, k_is_row=False, block=tile.block_m, block_k=tile.block_k)
    access_b = choose_access(b, k_is_row=True, block=tile.block_n, block_k=tile.block_k)
    itemsize = a.dtype.itemsize
    defines = {
        "TYPE_ACC": TYPES[problem.dtype.name],
        "PLANAR": flag(problem.planar),
        "CONJUGATE_A": flag(is_complex and conjugates[0]),
        "CONJUGATE_B": flag(is_complex and conjugates[1]),
        "A_ALONG_K": flag(access_a.along_k),
        "B_ALONG_K": flag(access_b.along_k),
        "UNIT_A": str(itemsize * access_a.vector),
        "UNIT_B": str(itemsize * access_b.vector),
        "VECTOR_D": flag(d.column_stride == 1 and d.aligned(2, d.row_stride)),
        "BLOCK_M": str(tile.block_m),
        "BLOCK_N": str(tile.block_n),
        "BLOCK_K": str(tile.block_k),
        "WARP_M": str(tile.warp_m),
        "WARP_N": str(tile.warp_n),
        "STAGES": str(tile.stages),
        "GROUP": str(tile.raster),
        "INSTRUCTION_K": str(tile.instruction_k),
        "READ_K": str(tile.read_k),
        "RUN": str(tile.run),
        "MIN_BLOCKS": str(tile.min_blocks),
        "THREADS": str(tile.threads),
        "SHARED_BYTES": str(tile.shared_bytes(is_complex=is_complex)),
    }
    return KernelSource(name, tuple(defines.items()))
