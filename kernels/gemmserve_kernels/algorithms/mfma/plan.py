"""Arguments of the MFMA kernels: the argument structure, defines, plans of launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.algorithms.common import matrix_units
from gemmserve_kernels.algorithms.common.matrix_units import rebase, set_exponents
from gemmserve_kernels.algorithms.common.operands import (
    TYPES,
    Operands,
    access_defines,
    flag,
    index_type,
    runs_along_rows,
    written,
)
from gemmserve_kernels.algorithms.common.partials import Partials, epilogue_defines, local_bytes
from gemmserve_kernels.algorithms.mfma.tile import ARCHITECTURES, Arithmetic, MfmaTile, resolve_tile
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import Access, GemmReduceParams, MatrixView, StoredArray, choose_access
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.algorithms.common.splits import Planes
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem

    Problem = GemmProblem | GemmReduceProblem

_PLANE_ACCESS: Final = Access(along_k=True, vector=8)
"""Planes lie along k, their rows at multiples of 128 bytes."""


@device_struct("mfma/params.cuh")
class MfmaParams(ctypes.Structure):
    """Arguments of mfma_gemm and mfma_reduce."""


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
                partials.place(launcher, params.work, first_matrix)
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
    m, n = operands.m, operands.n
    tile = config if isinstance(config, MfmaTile) else dense_tile(spec, problem, arithmetic, config, m, n)
    how = ARCHITECTURES[spec.arch][arithmetic]
    defines = {
        "TYPE_A": TYPES[operands.a.dtype.name],
        "TYPE_B": TYPES[operands.b.dtype.name],
        **access_defines(_packed(operands.a, tile, how, k_is_row=False), _packed(operands.b, tile, how, k_is_row=True)),
        "INDEX": index_type(operands, (tile.block_m, tile.block_n, tile.block_k)),
    }
    views = [operands.a, operands.b, c_view, d_view]
    conjugates = (operands.conjugate_a, operands.conjugate_b)
    return _finish(problem, tile, how, defines, views, c, d, swapped=swapped, conjugates=conjugates)


@lru_cache(maxsize=1024)
def planes_plan(
    spec: DeviceSpec,
    problem: Problem,
    tile: MfmaTile,
    a: Planes,
    b: Planes,
    c: StoredArray | None,
    d: StoredArray | None,
) -> MfmaPlan:
    """For float16 planes."""
    c_view, d_view = written(problem, c, d)
    swapped = _turned(problem, d_view)
    if swapped:
        a, b, c_view, d_view = b, a, c_view.transposed(), d_view.transposed()
    views = [a.first_plane(), b.first_plane().transposed(), c_view, d_view, a.row_exponents(), b.row_exponents()]
    defines = {
        "TYPE_A": "Half",
        "TYPE_B": "Half",
        **access_defines(_PLANE_ACCESS, _PLANE_ACCESS),
        "INDEX": "int" if max(a.pitch * tile.block_m, b.pitch * tile.block_n) < 2**31 else "long long",
    }
    strides = (a.rows * a.pitch, b.rows * b.pitch)
    how = ARCHITECTURES[spec.arch][a.scheme]
    return _finish(problem, tile, how, defines, views, c, d, swapped=swapped, plane_strides=strides)


def dense_tile(
    spec: DeviceSpec, problem: Problem, arithmetic: str, config: GemmConfig | None, m: int, n: int
) -> MfmaTile:
    """The tile of `dense_plan` for m x n products. Raises ConfigInfeasible."""
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
        how, is_complex=is_complex, local_bytes=local_bytes(problem) if isinstance(problem, GemmReduceProblem) else 0
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
