"""Arguments of the MFMA kernels: the argument structure, defines, plans of launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common import matrix_units
from gemmserve_kernels.algorithms.common.matrix_units import rebase, set_exponents, written
from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag, runs_along_rows
from gemmserve_kernels.algorithms.common.partials import Partials, epilogue_defines, local_bytes
from gemmserve_kernels.algorithms.mfma.tile import ARCHITECTURES, Arithmetic, MfmaTile, resolve_tile
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    BATCH_DIMS,
    Access,
    GemmReduceParams,
    MatrixView,
    StoredArray,
    choose_access,
)
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.algorithms.common.matrix_units import Layout
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem

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
class MfmaPlan:
    """The launches of one product (matrix_units.MatrixUnitPlan); addresses in `pieces` count from the arrays' bases."""

    source: KernelSource
    threads: int
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
        """See matrix_units.MatrixUnitPlan."""
        for piece, tiles in self.pieces:
            params = MfmaParams.from_buffer_copy(piece)
            gemm = params.work.gemm
            rebase(gemm, params, bases, exponents)
            if partials is not None:
                params.work.partial, params.work.outputs = partials.params(launcher), partials.outputs
                params.work.first_batch += first_matrix
            for first in range(0, tiles, launcher.max_grid):
                gemm.first_tile = first
                launcher.launch(
                    self.source,
                    self.source.name,
                    grid=min(tiles - first, launcher.max_grid),
                    block=self.threads,
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
) -> MfmaPlan:
    """For operands as they are stored. Raises ConfigInfeasible."""
    operands = Operands.of(problem, a, b)
    c_view, d_view = written(problem, c, d)
    swapped = _turned(problem, d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if isinstance(config, GemmConfig) else config
    tile = config if isinstance(config, MfmaTile) else _tile(spec, problem, arithmetic, config, operands.m, operands.n)
    how = ARCHITECTURES[spec.arch][arithmetic]
    defines = {
        "TYPE_A": TYPES[operands.a.dtype.name],
        "TYPE_B": TYPES[operands.b.dtype.name],
        **_access("A", _packed(operands.a, tile, how, k_is_row=False)),
        **_access("B", _packed(operands.b, tile, how, k_is_row=True)),
        "INDEX": _index_type(operands, tile),
    }
    views = [operands.a, operands.b, c_view, d_view]
    conjugates = (operands.conjugate_a, operands.conjugate_b)
    return _finish(problem, tile, how, defines, views, c, d, swapped=swapped, conjugates=conjugates)


@lru_cache(maxsize=1024)
def planes_plan(
    spec: DeviceSpec,
    problem: Problem,
    tile: MfmaTile,
    a: Layout,
    b: Layout,
    c: StoredArray | None,
    d: StoredArray | None,
) -> MfmaPlan:
    """For float16 planes."""
    c_view, d_view = written(problem, c, d)
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
    how = ARCHITECTURES[spec.arch][a.scheme]
    return _finish(problem, tile, how, defines, views, c, d, swapped=swapped, plane_strides=strides)


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


def _turned(problem: Problem, d: MatrixView) -> bool:
    """Whether the transposed product is computed: columns are what is reduced, or what lies along memory."""
    return not problem.over_rows if isinstance(problem, GemmReduceProblem) else runs_along_rows(d)


def _packed(view: MatrixView, tile: MfmaTile, how: Arithmetic, *, k_is_row: bool) -> Access:
    """Return how an operand is read: no vector longer than a piece along k, and across it no thread without work."""
    block, pack = tile.block_n if k_is_row else tile.block_m, how.instruction.pack
    found = choose_access(view, k_is_row=k_is_row, block=block, block_k=tile.block_k)
    vector = min(found.vector, pack) if found.along_k else found.vector
    threads = tile.threads(how.instruction)
    while not found.along_k and vector > 1 and block // vector * (tile.block_k // pack) < threads:
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
    how: Arithmetic,
    defines: dict[str, str],
    views: Sequence[MatrixView],
    c: StoredArray | None,
    d: StoredArray | None,
    *,
    swapped: bool,
    conjugates: tuple[bool, bool] = (False, False),
    plane_strides: tuple[int, int] = (0, 0),
) -> MfmaPlan:
    """The plan for `views`: A, B, C, D and, of planes, the exponents of A and B."""
    is_complex = problem.dtype.kind == "c"
    reduces = isinstance(problem, GemmReduceProblem)
    shared = tile.shared_bytes(
        how,
        is_complex=is_complex,
        local_bytes=local_bytes(problem) if isinstance(problem, GemmReduceProblem) else 0,
    )
    all_defines = {
        **defines,
        **matrix_units.defines(problem, tile, c, d),
        "TYPE_ACC": TYPES[problem.accumulate.name],
        "INSTRUCTION": how.instruction.name,
        "PARTS": str(how.parts),
        "PLANES": flag(how.planes),
        "PLANAR": flag(problem.planar),
        "ROUNDING": how.rounding,
        "THREADS": str(tile.threads(how.instruction)),
        "MIN_BLOCKS": "1",
        "SHARED_BYTES": str(shared),
        **(epilogue_defines(problem) if isinstance(problem, GemmReduceProblem) else {}),
    }
    pieces = []
    for gemm, tiles, first_matrix, exponents in matrix_units.pieces(problem, tile, views, conjugates):
        params = MfmaParams(work=GemmReduceParams(gemm=gemm, first_batch=first_matrix))
        params.plane_stride[:] = plane_strides
        if isinstance(problem, GemmReduceProblem):
            params.work.reduce_batch = problem.over_batch
        set_exponents(params, exponents)
        pieces.append((params, tiles))
    source = KernelSource("mfma_reduce" if reduces else "mfma_gemm", tuple(all_defines.items()))
    length = -(-views[0].rows // tile.block_m) * (
        problem.batch if isinstance(problem, GemmReduceProblem) and problem.over_batch else 1
    )
    return MfmaPlan(source, tile.threads(how.instruction), shared, tuple(pieces), swapped, length)
