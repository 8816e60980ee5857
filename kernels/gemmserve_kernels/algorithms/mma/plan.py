"""Arguments of the mma.sync kernels: argument structures, plans of launches, defines."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from gemmserve_kernels.algorithms.common import matrix_units
from gemmserve_kernels.algorithms.common.matrix_units import rebase, set_exponents
from gemmserve_kernels.algorithms.common.operands import Operands, flag, runs_along_rows, written
from gemmserve_kernels.algorithms.common.partials import Partials, epilogue_defines
from gemmserve_kernels.algorithms.common.splits import is_wide
from gemmserve_kernels.algorithms.common.verdict import TILES, most_deficit
from gemmserve_kernels.algorithms.mma.tile import ARITHMETIC, MmaTile, resolve_tile
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.algorithms.common.splits import Planes
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.struct_params import MatrixView, StoredArray
    from gemmserve_kernels.problem.problem import GemmProblem

_WORKSPACE_BYTES: Final = 256 << 20
"""Partial sums of one launch at most; a batch that needs more is launched in turns."""
_WORD: Final = 4
"""Bytes of the word ahead of the deficits, which says whether there is a doubt."""
_TF32_MASK: Final = 0xFFFFE000
"""The bits of a float32 that TF32 has."""
TF32_MODES: Final = {"3xtf32": "3xtf32", "1xtf32": "1xtf32", "tf32": "1xtf32"}
"""Arithmetic by compute mode."""


@device_struct("mma/params.cuh")
class MmaParams(ctypes.Structure):
    """Arguments of mma_gemm and mma_reduce."""


@dataclass(frozen=True)
class MmaPlan:
    """The launches of one product (matrix_units.MatrixUnitPlan); addresses in `pieces` count from the arrays' bases.

    `most_blocks` of a launch, whose blocks then look for tiles in turns; 0: a block for each. `deficits`: addresses of
    A's and B's (common.verdict), where tiles are chosen by them; `wanted`: of the word that says whether any are left;
    `counters`: of what the rest of them is counted by.
    """

    source: KernelSource
    tile: MmaTile
    shared: int
    tile_bytes: int
    pieces: tuple[tuple[MmaParams, int], ...]
    swapped: bool
    length: int = 0
    most_blocks: int = 0
    deficits: tuple[int, int] = (0, 0)
    wanted: int = 0
    counters: int = 0

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
        splits = self.tile.split_k
        per_launch = launcher.max_grid // splits
        partial = arrivals = None
        if splits > 1:
            most = max(tiles for _, tiles in self.pieces)
            per_launch = max(1, min(per_launch, most, _WORKSPACE_BYTES // (self.tile_bytes * splits)))
            partial = launcher.empty((per_launch * splits * self.tile_bytes // 4,), np.dtype(np.float32))
            arrivals = launcher.zeros((sum(tiles for _, tiles in self.pieces),), np.dtype(np.uint32))
        deficits = self.deficits[::-1] if self.swapped else self.deficits
        done = 0
        for piece, tiles in self.pieces:
            params = MmaParams.from_buffer_copy(piece)
            gemm = params.gemm
            rebase(gemm, params, bases, exponents)
            for side, base in enumerate(deficits):
                params.doubt[side] = base
                params.deficits[side] += base + _WORD
            params.wanted, params.counters = self.wanted, self.counters
            if partials is not None:
                partials.place(launcher, params.reduce, first_matrix)
            for first in range(0, tiles, per_launch):
                if splits > 1:
                    params.partial = launcher.pointer(partial)
                    params.arrivals = launcher.pointer(arrivals) + 4 * (done + first)
                gemm.first_tile = first * splits
                params.blocks = grid = min(tiles - first, per_launch) * splits
                if self.most_blocks:
                    grid = min(grid, self.most_blocks)
                launcher.launch(
                    self.source, self.source.name, grid=grid, block=self.tile.threads, shared=self.shared, params=params
                )
            done += tiles


def resolve_tf32(
    config: GemmConfig | None, problem: GemmProblem | GemmReduceProblem, shape: tuple[int, int], spec: DeviceSpec
) -> MmaTile:
    """The tile for a product of that many rows and columns. Raises ConfigInfeasible."""
    arithmetic = TF32_MODES[problem.compute]
    return resolve_tile(config, arithmetic, (*shape, problem.k), spec, is_complex=problem.dtype.kind == "c")


@lru_cache(maxsize=1024)
def tf32_plan(
    spec: DeviceSpec,
    problem: GemmProblem | GemmReduceProblem,
    config: GemmConfig | MmaTile | None,
    a: StoredArray,
    b: StoredArray,
    c: StoredArray | None,
    d: StoredArray | None,
) -> MmaPlan:
    operands = Operands.of(problem, a, b)
    c_view, d_view = written(problem, c, d)
    swapped = _turned(problem, d_view)
    if swapped:
        operands, c_view, d_view = operands.transposed(), c_view.transposed(), d_view.transposed()
        config = config.transposed() if isinstance(config, GemmConfig) else config
    tile = config if isinstance(config, MmaTile) else resolve_tf32(config, problem, (operands.m, operands.n), spec)
    is_complex = problem.dtype.kind == "c"
    views = [operands.a, operands.b, c_view, d_view]
    along = [_along_k(operands.a, k_is_row=False), _along_k(operands.b, k_is_row=True)]
    units = [_unit(operands.a, along_k=along[0], k_is_row=False), _unit(operands.b, along_k=along[1], k_is_row=True)]
    arithmetic = TF32_MODES[problem.compute]
    # A lane has four neighbours where B lies across k; interleaved complex ones are written by two (Store::piece).
    pair = 2 if along[1] or (is_complex and not problem.planar) else 4
    defines = {
        **_defines(problem, tile, arithmetic, c, d, d_view, pair=pair),
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
def planes_plan(
    spec: DeviceSpec,
    problem: GemmProblem | GemmReduceProblem,
    tile: MmaTile,
    a: Planes,
    b: Planes,
    c: StoredArray | None,
    d: StoredArray | None,
    tiles: Literal["served", "rest"] | None = None,
) -> MmaPlan:
    """`tiles`: those that are computed, as in `common.verdict.Judged`; None: all."""
    c_view, d_view = written(problem, c, d)
    swapped = _turned(problem, d_view)
    if swapped:
        a, b, c_view, d_view = b, a, c_view.transposed(), d_view.transposed()
    views = [a.first_plane(), b.first_plane().transposed(), c_view, d_view, a.row_exponents(), b.row_exponents()]
    views += [a.group_deficits(), b.group_deficits()]
    defines = {**_defines(problem, tile, a.scheme, c, d, d_view, pair=2), "TILES": str(TILES[tiles])}
    strides = (a.rows * a.pitch, b.rows * b.pitch)
    plan = _finish(problem, tile, a.scheme, defines, views, (False, False), swapped=swapped, plane_strides=strides)
    return replace(plan, most_blocks=spec.sm_count * tile.min_blocks) if tiles == "rest" else plan


def _turned(problem: GemmProblem | GemmReduceProblem, d: MatrixView) -> bool:
    """Whether the transposed product is computed: columns are what is reduced, or what lies along memory."""
    return problem.over_rows if isinstance(problem, GemmReduceProblem) else runs_along_rows(d)


def warp_columns(tile: MmaTile, columns: int) -> int:
    """Warps side by side over that many columns: each leaves a partial of every row."""
    return -(-columns // tile.block_n) * (tile.block_n // tile.warp_n)


def _defines(
    problem: GemmProblem | GemmReduceProblem,
    tile: MmaTile,
    arithmetic: str,
    c: StoredArray | None,
    d: StoredArray | None,
    d_view: MatrixView,
    *,
    pair: int,
) -> dict[str, str]:
    """Return the defines of both families; `pair`: neighbouring columns that one lane writes at once."""
    is_complex = problem.dtype.kind == "c"
    shape = ARITHMETIC[arithmetic]
    return {
        "COMPLEX": flag(is_complex),
        "PLANES": flag(shape.planes),
        "PLANAR": flag(problem.planar),
        "PARTS": str(shape.parts),
        "PRODUCTS": str(shape.products),
        "BFLOAT": flag(is_wide(arithmetic)),
        "TILES": str(TILES[None]),
        **matrix_units.defines(problem, tile, c, d),
        "VECTOR_D": flag(d is not None and d_view.column_stride == 1 and d_view.aligned(pair, d_view.row_stride)),
        "PROMOTE": str(tile.promote),
        "MIN_BLOCKS": str(tile.min_blocks),
        "THREADS": str(tile.threads),
        "SHARED_BYTES": str(tile.shared_bytes(arithmetic, is_complex=is_complex)),
        **(epilogue_defines(problem) if isinstance(problem, GemmReduceProblem) else {}),
    }


def _finish(
    problem: GemmProblem | GemmReduceProblem,
    tile: MmaTile,
    arithmetic: str,
    defines: dict[str, str],
    views: Sequence[MatrixView],
    conjugates: tuple[bool, bool],
    *,
    swapped: bool,
    plane_strides: tuple[int, int] = (0, 0),
) -> MmaPlan:
    """The plan for `views`: A, B, C, D and, of planes, the exponents and the deficits of A and B."""
    is_complex = problem.dtype.kind == "c"
    reduces = isinstance(problem, GemmReduceProblem)
    mask = 0xFFFFFFFF if ARITHMETIC[arithmetic].planes else _TF32_MASK
    pieces = []
    for gemm, tiles, first_matrix, of_planes in matrix_units.pieces(problem, tile, views, conjugates):
        params = MmaParams(
            gemm=gemm,
            k_part=tile.k_part(problem.k),
            splits=tile.split_k,
            mask=mask,
            most_deficit=most_deficit(problem.k),
        )
        params.plane_stride[:] = plane_strides
        if isinstance(problem, GemmReduceProblem):
            params.reduce.first_batch = first_matrix
            params.reduce.reduce_batch = problem.over_batch
        set_exponents(params, of_planes[:2])
        for side, view in enumerate(of_planes[2:]):
            params.deficits[side] = view.re
            params.deficit_stride[side][:] = view.params().batch_stride[:]
        pieces.append((params, tiles))
    shared = tile.shared_bytes(arithmetic, is_complex=is_complex)
    tile_bytes = tile.block_m * tile.block_n * (8 if is_complex else 4)
    source = KernelSource("mma_reduce" if reduces else "mma_gemm", tuple(defines.items()))
    length = 0
    if isinstance(problem, GemmReduceProblem):
        length = warp_columns(tile, views[1].columns) * (problem.batch if problem.over_batch else 1)
    return MmaPlan(source, tile, shared, tile_bytes, tuple(pieces), swapped, length)


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
