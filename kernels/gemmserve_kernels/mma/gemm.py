"""Products on the tensor cores of compute capability 8.0 and later: mma.sync behind a pipeline of cp.async.

Two families share one kernel, cuda/mma_gemm.cu. `run_gemm` multiplies float32 and complex64 as TF32, read as they are
stored (any strides, interleaved or planar) and split in registers: `3xtf32` into a big and a small part with three
products, `1xtf32` (and `tf32`) with one. `multiply` multiplies float16 planes (`planes.Planes`): `3xfp16`, `1xfp16`.

Source of the split and of staged accumulation: NVIDIA CUTLASS, examples 27 to 29; errors are modelled in `models`.
Elements of a TF32 product that come out infinite or NaN are computed again in plain float32, so that data which are not
finite, or overflow, give what plain float32 gives.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.arguments import BATCH_DIMS, GemmParams, MatrixView, StoredArray, launches, matrix_view
from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.config import GemmConfig
from gemmserve_kernels.mma.tiles import ARITHMETIC, MmaTile, check_device, resolve_tile
from gemmserve_kernels.planes.layout import PLANES
from gemmserve_kernels.tiling import TYPES, Operands, flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.planes.layout import Planes, Scheme
    from gemmserve_kernels.problem import GemmProblem

__all__ = ["MmaTile", "multiply", "resolve", "resolve_planes", "run_gemm", "supports", "supports_planes"]

_WORKSPACE_BYTES: Final = 256 << 20
"""Partial sums of one launch at most; a batch that needs more is launched in turns."""
_ENTRY: Final = "mma_gemm"
_TF32_MASK: Final = 0xFFFFE000
"""The bits of a float32 that TF32 has."""
_TF32_MODES: Final = {"3xtf32": "3xtf32", "1xtf32": "1xtf32", "tf32": "1xtf32"}
"""Arithmetic by compute mode."""


class MmaParams(ctypes.Structure):
    """Mirror of MmaParams in cuda/mma_sync/params.cuh."""

    _fields_ = (
        ("gemm", GemmParams),
        ("k_part", ctypes.c_int64),
        ("splits", ctypes.c_int32),
        ("mask", ctypes.c_uint32),
        ("partial", ctypes.c_uint64),
        ("arrivals", ctypes.c_uint64),
        ("exponents", ctypes.c_uint64 * 2),
        ("exponent_stride", ctypes.c_int64 * BATCH_DIMS * 2),
        ("plane_stride", ctypes.c_int64 * 2),
    )


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Why `run_gemm` cannot compute `problem` on `spec` as TF32, or None. Any shape, strides and C."""
    if reason := check_device(spec):
        return reason
    if problem.compute not in _TF32_MODES:
        return f"compute {problem.compute!r} is not TF32"
    wanted = np.float32 if problem.planar else problem.dtype
    if problem.dtype.name not in {"float32", "complex64"} or problem.a.dtype != wanted or problem.b.dtype != wanted:
        return f"TF32 multiplies float32 or complex64, not {problem.a.dtype.name} by {problem.b.dtype.name}"
    return None


def resolve(config: GemmConfig | None, problem: GemmProblem, spec: DeviceSpec) -> MmaTile:
    """The tile of `run_gemm`: what `config` asks for, the rest chosen. Raises ConfigInfeasible naming the limit."""
    return _resolve(config, problem, (problem.m, problem.n), spec)


def _resolve(config: GemmConfig | None, problem: GemmProblem, shape: tuple[int, int], spec: DeviceSpec) -> MmaTile:
    arithmetic = _TF32_MODES[problem.compute]
    return resolve_tile(config, arithmetic, (*shape, problem.k), spec, is_complex=problem.dtype.kind == "c")


def supports_planes(problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> str | None:
    """Why `multiply` cannot compute `problem` from planes of `scheme` on `spec`, or None."""
    if reason := check_device(spec):
        return reason
    if scheme not in ARITHMETIC:
        return f"mma has no {scheme}"
    if problem.dtype.name not in {"float32", "complex64"}:
        return f"{scheme} multiplies float32 or complex64, not {problem.dtype.name}"
    return None


def resolve_planes(config: GemmConfig | None, problem: GemmProblem, scheme: Scheme, spec: DeviceSpec) -> MmaTile:
    """The tile of `multiply`, as `resolve`. Raises ConfigInfeasible."""
    shape = (problem.m, problem.n, problem.k)
    return resolve_tile(config, scheme, shape, spec, is_complex=problem.dtype.kind == "c")


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | MmaTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, of any strides; `c` is not read where beta is 0.

    `problem.compute` is "3xtf32", "1xtf32" or "tf32". Raises ConfigInfeasible, CompileError.
    """
    arrays = [a, b, out if c is None or problem.beta == 0 else c, out]
    found = [StoredArray.of(launcher, array) for array in arrays]
    plan = _tf32_plan(launcher.spec, problem, config, *(stored for stored, _ in found))
    bases = [base for _, base in found]
    if plan.swapped:
        bases[:2] = bases[1::-1]
    plan.launch(launcher, bases)


def multiply(
    launcher: Launcher, problem: GemmProblem, tile: MmaTile, a: Planes, b: Planes, c: Any | None, out: Any
) -> None:
    """Writes alpha (planes of a times planes of b) 2^(exponents) + beta c into `out`, for the whole batch.

    Every element is written; where a row or column does not fit the planes, with whatever comes out.
    """
    c_array = out if c is None or problem.beta == 0 else c
    (c_stored, c_base), (d_stored, d_base) = (StoredArray.of(launcher, array) for array in (c_array, out))
    plan = _planes_plan(launcher.spec, problem, tile, _Layout.of(a), _Layout.of(b), c_stored, d_stored)
    sides = [b, a] if plan.swapped else [a, b]
    bases = [launcher.pointer(side.data) for side in sides] + [c_base, d_base]
    plan.launch(launcher, bases, [launcher.pointer(side.exponents) for side in sides])


@dataclass(frozen=True)
class _Layout:
    """Where planes lie in their arrays."""

    scheme: Scheme
    complex: bool
    side: str
    rows: int
    k: int
    pitch: int
    batch_strides: tuple[int, ...]

    @classmethod
    def of(cls, planes: Planes) -> _Layout:
        return cls(
            planes.scheme, planes.complex, planes.side, planes.rows, planes.k, planes.pitch, planes.batch_strides
        )

    @property
    def matrix(self) -> int:
        """Elements of all planes of one matrix."""
        return len(PLANES[self.scheme, self.complex, self.side]) * self.rows * self.pitch

    def planes(self) -> MatrixView:
        """The first plane, as rows x k."""
        strides = tuple(step * self.matrix for step in self.batch_strides)
        return MatrixView(0, 0, np.dtype(np.float16), self.rows, self.k, self.pitch, 1, strides)

    def exponents(self) -> MatrixView:
        """The exponents of the rows, as a matrix of one column."""
        strides = tuple(step * self.rows for step in self.batch_strides)
        return MatrixView(0, 0, np.dtype(np.int32), self.rows, 1, 1, 0, strides)


@dataclass(frozen=True)
class _Plan:
    """The launches of one product; addresses in `pieces` count from the arrays' bases.

    `swapped` where it is the transposed product, so that A and B change places.
    """

    source: KernelSource
    tile: MmaTile
    shared: int
    tile_bytes: int
    pieces: tuple[tuple[MmaParams, int], ...]
    swapped: bool

    def launch(self, launcher: Launcher, bases: Sequence[int], exponents: Sequence[int] = (0, 0)) -> None:
        """Enqueues everything; `bases` in the order a, b, c, d, where A and B have changed places if `swapped`."""
        splits = self.tile.split_k
        per_launch = launcher.max_grid // splits
        partial = arrivals = None
        if splits > 1:
            most = max(tiles for _, tiles in self.pieces)
            per_launch = max(1, min(per_launch, most, _WORKSPACE_BYTES // (self.tile_bytes * splits)))
            partial = launcher.empty((per_launch * splits * self.tile_bytes // 4,), np.dtype(np.float32))
            arrivals = launcher.zeros((sum(tiles for _, tiles in self.pieces),), np.dtype(np.uint32))
        done = 0
        for piece, tiles in self.pieces:
            params = MmaParams.from_buffer_copy(piece)
            gemm = params.gemm
            for matrix, base in zip((gemm.a, gemm.b, gemm.c, gemm.d), bases, strict=True):
                matrix.re += base
                matrix.im += base
            for side in range(2):
                params.exponents[side] += exponents[side]
            for first in range(0, tiles, per_launch):
                if splits > 1:
                    params.partial = launcher.pointer(partial)
                    params.arrivals = launcher.pointer(arrivals) + 4 * (done + first)
                gemm.first_tile = first * splits
                grid = min(tiles - first, per_launch) * splits
                launcher.launch(
                    self.source, _ENTRY, grid=grid, block=self.tile.threads, shared=self.shared, params=params
                )
            done += tiles


@lru_cache(maxsize=1024)
def _tf32_plan(
    spec: DeviceSpec,
    problem: GemmProblem,
    config: GemmConfig | MmaTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray,
    d: StoredArray,
) -> _Plan:
    operands = Operands.of(problem, a, b)
    c_view, d_view = _written(problem, c, d)
    swapped = _runs_along_rows(d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if isinstance(config, GemmConfig) else config
    tile = config if isinstance(config, MmaTile) else _resolve(config, problem, (operands.m, operands.n), spec)
    is_complex = problem.dtype.kind == "c"
    views = [operands.a, operands.b, c_view, d_view]
    along = [_along_k(operands.a, k_is_row=False), _along_k(operands.b, k_is_row=True)]
    units = [
        _unit(operands.a, along_k=along[0], k_is_row=False),
        _unit(operands.b, along_k=along[1], k_is_row=True),
    ]
    arithmetic = _TF32_MODES[problem.compute]
    defines = {
        **_defines(problem, tile, arithmetic, c, d, d_view, pair=2 if along[1] or is_complex else 4),
        "CONJUGATE_A": flag(is_complex and operands.conjugate_a),
        "CONJUGATE_B": flag(is_complex and operands.conjugate_b),
        "A_ALONG_K": flag(along[0]),
        "B_ALONG_K": flag(along[1]),
        "UNIT_A": str(units[0]),
        "UNIT_B": str(units[1]),
        "ROUNDING_BIG": tile.rounding_big.upper(),
        "ROUNDING_SMALL": tile.rounding_small.upper(),
        "INSTRUCTION_K": str(tile.instruction_k),
    }
    conjugates = (operands.conjugate_a, operands.conjugate_b)
    return _finish(problem, tile, arithmetic, defines, views, conjugates, swapped=swapped)


@lru_cache(maxsize=1024)
def _planes_plan(
    spec: DeviceSpec, problem: GemmProblem, tile: MmaTile, a: _Layout, b: _Layout, c: StoredArray, d: StoredArray
) -> _Plan:
    del spec
    c_view, d_view = _written(problem, c, d)
    swapped = _runs_along_rows(d_view)
    if swapped:
        a, b, c_view, d_view = b, a, c_view.transposed(), d_view.transposed()
    views = [a.planes(), b.planes().transposed(), c_view, d_view, a.exponents(), b.exponents()]
    defines = _defines(problem, tile, a.scheme, c, d, d_view, pair=2)
    strides = (a.rows * a.pitch, b.rows * b.pitch)
    return _finish(problem, tile, a.scheme, defines, views, (False, False), swapped=swapped, plane_strides=strides)


def _written(problem: GemmProblem, c: StoredArray, d: StoredArray) -> list[MatrixView]:
    shape = (*problem.batch_shape, problem.m, problem.n)
    return [matrix_view(array, shape, planar=problem.planar) for array in (c, d)]


def _defines(
    problem: GemmProblem,
    tile: MmaTile,
    arithmetic: str,
    c: StoredArray,
    d: StoredArray,
    d_view: MatrixView,
    *,
    pair: int,
) -> dict[str, str]:
    """What both families tell the compiler; `pair`: neighbouring columns that one lane writes at once."""
    is_complex = problem.dtype.kind == "c"
    shape = ARITHMETIC[arithmetic]
    return {
        "COMPLEX": flag(is_complex),
        "PLANES": flag(shape.planes),
        "PLANAR": flag(problem.planar),
        "PARTS": str(shape.parts),
        "TYPE_C": TYPES[c.dtype.name],
        "TYPE_D": TYPES[d.dtype.name],
        "VECTOR_D": flag(d_view.column_stride == 1 and d_view.aligned(pair, d_view.row_stride)),
        "BLOCK_M": str(tile.block_m),
        "BLOCK_N": str(tile.block_n),
        "BLOCK_K": str(tile.block_k),
        "WARP_M": str(tile.warp_m),
        "WARP_N": str(tile.warp_n),
        "STAGES": str(tile.stages),
        "GROUP": str(tile.raster),
        "PROMOTE": str(tile.promote),
        "MIN_BLOCKS": str(tile.min_blocks),
        "THREADS": str(tile.threads),
        "SHARED_BYTES": str(tile.shared_bytes(arithmetic, is_complex=is_complex)),
    }


def _finish(
    problem: GemmProblem,
    tile: MmaTile,
    arithmetic: str,
    defines: dict[str, str],
    views: Sequence[MatrixView],
    conjugates: tuple[bool, bool],
    *,
    swapped: bool,
    plane_strides: tuple[int, int] = (0, 0),
) -> _Plan:
    """The plan for `views`: A, B, C, D and, of planes, the exponents of A and B."""
    is_complex = problem.dtype.kind == "c"
    m, n, k = views[0].rows, views[1].columns, problem.k
    tiles_m, tiles_n = -(-m // tile.block_m), -(-n // tile.block_n)
    alpha, beta = complex(problem.alpha), complex(problem.beta)
    pieces = []
    for _, inner, cut in launches(problem.batch_shape, views):
        gemm = GemmParams(m=m, n=n, k=k, tiles_m=tiles_m, tiles_n=tiles_n)
        gemm.conjugate_a, gemm.conjugate_b = conjugates
        gemm.a, gemm.b, gemm.c, gemm.d = (view.params() for view in cut[:4])
        gemm.batch_shape[:] = inner
        gemm.alpha[:] = alpha.real, alpha.imag
        gemm.beta[:] = beta.real, beta.imag
        mask = 0xFFFFFFFF if ARITHMETIC[arithmetic].planes else _TF32_MASK
        params = MmaParams(gemm=gemm, k_part=tile.k_part(k), splits=tile.split_k, mask=mask)
        params.plane_stride[:] = plane_strides
        for side, view in enumerate(cut[4:]):
            matrix = view.params()
            params.exponents[side] = matrix.re
            params.exponent_stride[side][:] = matrix.batch_stride[:]
        pieces.append((params, tiles_m * tiles_n * math.prod(inner)))
    shared = tile.shared_bytes(arithmetic, is_complex=is_complex)
    tile_bytes = tile.block_m * tile.block_n * (8 if is_complex else 4)
    return _Plan(KernelSource(_ENTRY, tuple(defines.items())), tile, shared, tile_bytes, tuple(pieces), swapped)


def _runs_along_rows(d: MatrixView) -> bool:
    """Whether neighbours in memory are neighbours in a column of D: then the transposed product is computed."""
    if d.rows == 1 or d.columns == 1:
        return d.columns == 1 and d.rows > 1
    return abs(d.row_stride) < abs(d.column_stride)


def _along_k(view: MatrixView, *, k_is_row: bool) -> bool:
    """Whether neighbours in memory are neighbours in k; a stride over one element says nothing."""
    k_extent, extent = (view.rows, view.columns) if k_is_row else (view.columns, view.rows)
    k_stride, stride = (view.row_stride, view.column_stride) if k_is_row else (view.column_stride, view.row_stride)
    return extent == 1 if 1 in {k_extent, extent} else abs(k_stride) <= abs(stride)


def _unit(view: MatrixView, *, along_k: bool, k_is_row: bool) -> int:
    """Bytes that one cp.async may copy: 16, 8 or 4. Its end may be cut off, its address must be a multiple."""
    fast, slow = (view.row_stride, view.column_stride) if along_k == k_is_row else (view.column_stride, view.row_stride)
    itemsize = view.dtype.itemsize
    for unit in (16, 8):
        steps = [view.re, view.im, *(stride * itemsize for stride in (slow, *view.batch_strides))]
        if unit > itemsize and fast != 1:
            continue
        if unit <= itemsize:
            steps.append(fast * itemsize)
        if all(step % unit == 0 for step in steps):
            return unit
    return 4
