"""What the host of the MFMA kernels hands over: the argument structure, defines, plans of launches."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.arguments import (
    BATCH_DIMS,
    Access,
    GemmParams,
    GemmReduceParams,
    MatrixView,
    StoredArray,
    choose_access,
    launches,
    matrix_view,
)
from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.config import GemmConfig
from gemmserve_kernels.mfma.tiles import ARITHMETIC, MfmaTile, resolve_tile
from gemmserve_kernels.problem import GemmReduceProblem
from gemmserve_kernels.reduction import Partials, epilogue_defines, local_bytes
from gemmserve_kernels.simt.gemm import runs_along_rows
from gemmserve_kernels.tiling import TYPES, Operands, flag

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.mma.plan import Layout
    from gemmserve_kernels.problem import GemmProblem

    Problem = GemmProblem | GemmReduceProblem

_PLANE_ACCESS: Final = Access(along_k=True, vector=8)
"""Planes lie along k, their rows at multiples of 128 bytes."""


class MfmaParams(ctypes.Structure):
    """Mirror of MfmaParams in cuda/mfma/params.cuh."""

    _fields_ = (
        ("work", GemmReduceParams),
        ("exponents", ctypes.c_uint64 * 2),
        ("exponent_stride", ctypes.c_int64 * BATCH_DIMS * 2),
        ("plane_stride", ctypes.c_int64 * 2),
    )


@dataclass(frozen=True)
class Plan:
    """The launches of one product; addresses in `pieces` count from the arrays' bases.

    `swapped` where it is the transposed product, so that A and B change places. `length`: partials of one product for
    each output.
    """

    source: KernelSource
    tile: MfmaTile
    shared: int
    pieces: tuple[tuple[MfmaParams, int], ...]
    swapped: bool
    length: int = 0

    def launch(
        self,
        launcher: Launcher,
        bases: Sequence[int],
        exponents: Sequence[int] = (0, 0),
        *,
        partials: Partials | None = None,
        first_matrix: int = 0,
    ) -> None:
        """Enqueues everything; `bases` in the order a, b, c, d, where A and B have changed places if `swapped`."""
        for piece, tiles in self.pieces:
            params = MfmaParams.from_buffer_copy(piece)
            gemm = params.work.gemm
            for matrix, base in zip((gemm.a, gemm.b, gemm.c, gemm.d), bases, strict=False):
                matrix.re += base
                matrix.im += base
            for side in range(2):
                params.exponents[side] += exponents[side]
            if partials is not None:
                params.work.partial, params.work.outputs = partials.params(launcher), partials.outputs
                params.work.first_batch += first_matrix
            for first in range(0, tiles, launcher.max_grid):
                gemm.first_tile = first
                launcher.launch(
                    self.source,
                    self.source.name,
                    grid=min(tiles - first, launcher.max_grid),
                    block=self.tile.threads,
                    shared=self.shared,
                    params=params,
                )


@lru_cache(maxsize=1024)
def dense_plan(
    spec: DeviceSpec,
    problem: Problem,
    arithmetic: str,
    config: GemmConfig | MfmaTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray | None,
    d: StoredArray | None,
) -> Plan:
    """For operands as they are stored. Raises ConfigInfeasible."""
    operands = Operands.of(problem, a, b)
    c_view, d_view = _written(problem, c, d)
    swapped = _turned(problem, d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if isinstance(config, GemmConfig) else config
    tile = config if isinstance(config, MfmaTile) else _tile(spec, problem, arithmetic, config, operands.m, operands.n)
    defines = {
        "TYPE_A": TYPES[operands.a.dtype.name],
        "TYPE_B": TYPES[operands.b.dtype.name],
        **_access("A", _packed(operands.a, tile, arithmetic, k_is_row=False)),
        **_access("B", _packed(operands.b, tile, arithmetic, k_is_row=True)),
        "INDEX": _index_type(operands, tile),
    }
    views = [operands.a, operands.b, c_view, d_view]
    conjugates = (operands.conjugate_a, operands.conjugate_b)
    return _finish(problem, tile, arithmetic, defines, views, c, d, swapped=swapped, conjugates=conjugates)


@lru_cache(maxsize=1024)
def planes_plan(
    spec: DeviceSpec,
    problem: Problem,
    tile: MfmaTile,
    a: Layout,
    b: Layout,
    c: StoredArray | None,
    d: StoredArray | None,
) -> Plan:
    """For float16 planes."""
    del spec
    c_view, d_view = _written(problem, c, d)
    swapped = _turned(problem, d_view)
    if swapped:
        a, b, c_view, d_view = b, a, c_view.transposed(), d_view.transposed()
    views = [a.planes(), b.planes().transposed(), c_view, d_view, a.exponents(), b.exponents()]
    defines = {
        "TYPE_A": "Half",
        "TYPE_B": "Half",
        **_access("A", _PLANE_ACCESS),
        **_access("B", _PLANE_ACCESS),
        "INDEX": "int" if max(a.pitch * tile.block_m, b.pitch * tile.block_n) < 2**31 else "long long",
    }
    strides = (a.rows * a.pitch, b.rows * b.pitch)
    return _finish(problem, tile, a.scheme, defines, views, c, d, swapped=swapped, plane_strides=strides)


def _tile(spec: DeviceSpec, problem: Problem, arithmetic: str, config: GemmConfig | None, m: int, n: int) -> MfmaTile:
    return resolve_tile(
        config,
        arithmetic,
        (m, n),
        problem.batch,
        spec,
        is_complex=problem.dtype.kind == "c",
        local_bytes=local_bytes(problem) if isinstance(problem, GemmReduceProblem) else 0,
    )


def _written(problem: Problem, c: StoredArray | None, d: StoredArray | None) -> list[MatrixView]:
    shape = (*problem.batch_shape, problem.m, problem.n)
    nowhere = MatrixView(0, 0, _stored_dtype(problem), problem.m, problem.n, 0, 0, (0,) * len(problem.batch_shape))
    return [nowhere if array is None else matrix_view(array, shape, planar=problem.planar) for array in (c, d)]


def _stored_dtype(problem: Problem) -> np.dtype[Any]:
    return problem.stored((), problem.dtype)[1]


def _turned(problem: Problem, d: MatrixView) -> bool:
    """Whether the transposed product is computed: columns are what is reduced, or what lies along memory."""
    return not problem.over_rows if isinstance(problem, GemmReduceProblem) else runs_along_rows(d)


def _packed(view: MatrixView, tile: MfmaTile, arithmetic: str, *, k_is_row: bool) -> Access:
    """How an operand is read: no vector longer than a piece along k, and across it no thread without work."""
    block, pack = tile.block_n if k_is_row else tile.block_m, ARITHMETIC[arithmetic].instruction.pack
    found = choose_access(view, k_is_row=k_is_row, block=block, block_k=tile.block_k)
    vector = min(found.vector, pack) if found.along_k else found.vector
    while not found.along_k and vector > 1 and block // vector * (tile.block_k // pack) < tile.threads:
        vector //= 2
    return Access(found.along_k, vector)


def _access(operand: str, access: Access) -> dict[str, str]:
    return {f"{operand}_ALONG_K": flag(access.along_k), f"VECTOR_{operand}": str(access.vector)}


def _index_type(operands: Operands, tile: MfmaTile) -> str:
    """Offsets inside one tile: 32 bits unless the strides ask for more. Tiles and matrices are always found in 64."""
    a, b = operands.a, operands.b
    reach = max(
        abs(a.row_stride) * tile.block_m + abs(a.column_stride) * tile.block_k,
        abs(b.column_stride) * tile.block_n + abs(b.row_stride) * tile.block_k,
    )
    return "int" if reach < 2**31 else "long long"


def _finish(
    problem: Problem,
    tile: MfmaTile,
    arithmetic: str,
    defines: dict[str, str],
    views: Sequence[MatrixView],
    c: StoredArray | None,
    d: StoredArray | None,
    *,
    swapped: bool,
    conjugates: tuple[bool, bool] = (False, False),
    plane_strides: tuple[int, int] = (0, 0),
) -> Plan:
    """The plan for `views`: A, B, C, D and, of planes, the exponents of A and B."""
    is_complex, shape = problem.dtype.kind == "c", ARITHMETIC[arithmetic]
    reduces = isinstance(problem, GemmReduceProblem)
    shared = tile.shared_bytes(
        arithmetic,
        is_complex=is_complex,
        local_bytes=local_bytes(problem) if isinstance(problem, GemmReduceProblem) else 0,
    )
    all_defines = {
        **defines,
        "TYPE_C": TYPES[(c.dtype if c else _stored_dtype(problem)).name],
        "TYPE_D": TYPES[(d.dtype if d else _stored_dtype(problem)).name],
        "TYPE_ACC": TYPES[problem.accumulate.name],
        "INSTRUCTION": shape.instruction.name,
        "PARTS": str(shape.parts),
        "PLANES": flag(shape.planes),
        "PLANAR": flag(problem.planar),
        "ROUNDING": shape.rounding,
        "BLOCK_M": str(tile.block_m),
        "BLOCK_N": str(tile.block_n),
        "BLOCK_K": str(tile.block_k),
        "WARP_M": str(tile.warp_m),
        "WARP_N": str(tile.warp_n),
        "STAGES": str(tile.stages),
        "GROUP": str(tile.raster),
        "THREADS": str(tile.threads),
        "MIN_BLOCKS": "1",
        "SHARED_BYTES": str(shared),
        **(epilogue_defines(problem) if isinstance(problem, GemmReduceProblem) else {}),
    }
    m, n = views[0].rows, views[1].columns
    tiles_m, tiles_n = -(-m // tile.block_m), -(-n // tile.block_n)
    alpha, beta = complex(problem.alpha), 0j if isinstance(problem, GemmReduceProblem) else complex(problem.beta)
    pieces = []
    for first_matrix, inner, cut in launches(problem.batch_shape, views):
        gemm = GemmParams(m=m, n=n, k=problem.k, tiles_m=tiles_m, tiles_n=tiles_n)
        gemm.conjugate_a, gemm.conjugate_b = conjugates
        gemm.a, gemm.b, gemm.c, gemm.d = (view.params() for view in cut[:4])
        gemm.batch_shape[:] = inner
        gemm.alpha[:] = alpha.real, alpha.imag
        gemm.beta[:] = beta.real, beta.imag
        params = MfmaParams(work=GemmReduceParams(gemm=gemm, first_batch=first_matrix))
        params.plane_stride[:] = plane_strides
        if isinstance(problem, GemmReduceProblem):
            params.work.reduce_batch = problem.over_batch
        for side, view in enumerate(cut[4:]):
            matrix = view.params()
            params.exponents[side] = matrix.re
            params.exponent_stride[side][:] = matrix.batch_stride[:]
        pieces.append((params, tiles_m * tiles_n * math.prod(inner)))
    source = KernelSource("mfma_reduce" if reduces else "mfma_gemm", tuple(all_defines.items()))
    length = tiles_m * (problem.batch if isinstance(problem, GemmReduceProblem) and problem.over_batch else 1)
    return Plan(source, tile, shared, tuple(pieces), swapped, length)
