"""Launches of the Hopper tensor-core kernel: what its host hands over, worked out once for operands that lie alike.

A plan depends on shapes, strides, dtypes and alignment; the addresses come in when it is launched. The kernel's side is
cuda/wgmma/params.cuh.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, flag
from gemmserve_kernels.algorithms.common.partials import epilogue_defines
from gemmserve_kernels.algorithms.common.verdict import TILES, most_deficit
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    BATCH_DIMS,
    MatrixView,
    StoredArray,
    launches,
    matrix_view,
    place,
    set_factors,
)
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.problem import GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gemmserve_kernels.algorithms.common.partials import Partials
    from gemmserve_kernels.algorithms.common.verdict import Judged, Tiles
    from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.tensor_map import Box
    from gemmserve_kernels.problem.problem import GemmProblem

_SCHEMES: Final = {"3xfp16": 0, "3xfp16-3m": 1, "1xfp16": 2, "fp16": 3, "3xbf16": 4, "6xbf16": 5, "9xbf16": 6}
"""enum Scheme in cuda/wgmma/kernel.cuh."""
_PAIR: Final = 2
_WIDE: Final = 8
"""Neighbouring results that one lane writes at once; the latter of float16, 16 bytes."""
_COMBINE_THREADS: Final = 256
_INT_BYTES: Final = 4
DEPENDENT: Final = True
"""The kernels wait themselves for the one ahead (cuda/common/dependent.cuh)."""


@device_struct("wgmma/params.cuh")
class WgmmaParams(ctypes.Structure):
    """Arguments of wgmma_gemm, wgmma_reduce and wgmma_combine."""


class WgmmaSide(Protocol):
    """Layout of an operand, as the copy engine sees it. Hashable: plans are kept by it."""

    def __hash__(self) -> int:
        """Hash of all that is known."""

    @property
    def complex(self) -> bool:
        """Whether there are imaginary parts."""

    @property
    def rows(self) -> int:
        """Rows of op(A), or columns of op(B)."""

    @property
    def k(self) -> int:
        """Length of the sums."""

    @property
    def across(self) -> bool:
        """Whether neighbours in memory are neighbours along the rows, not along k."""

    def view(self) -> MatrixView:
        """As a batched matrix whose elements are matrices: its `re` counts them."""

    def box(self, block_k: int, rows: int, planes: int) -> Box:
        """Return the box by which tiles are fetched."""


class Source(NamedTuple):
    """An operand: how it lies, the address that its map begins at, and those of its exponents and deficits if any.

    `deficit_words`: as in `Judged`. `keep`: what must not be freed before everything is enqueued.
    """

    side: WgmmaSide
    data: int
    exponents: int = 0
    deficits: int = 0
    deficit_words: int = 0
    keep: Any = None


@dataclass(frozen=True)
class _Piece:
    """One launch's share of the batch, from product `first` on; addresses count from the arrays' bases."""

    first: int
    params: WgmmaParams
    grid: int
    workspace: int
    elements: int


@dataclass(frozen=True)
class WgmmaPlan:
    """Everything but the addresses; `threads` and `shared` are the launch's, `swapped` where D^T is computed."""

    source: KernelSource
    threads: int
    shared: int
    left: Box
    right: Box
    pieces: tuple[_Piece, ...]
    swapped: bool

    def run(
        self,
        launcher: Launcher,
        a: Source,
        b: Source,
        bases: Sequence[int],
        *,
        partials: Partials | None = None,
        first_matrix: int = 0,
        judged: Judged | None = None,
    ) -> None:
        """Enqueues everything; `bases` of C and D where there are any. Where it reduces, `partials` are left of the
        batch from number `first_matrix` on. `judged`: which tiles, where not all.
        """
        for piece, params in self._placed(launcher, a, b, bases):
            if judged is not None:
                params.wanted, params.counters = judged.wanted, judged.counters
                params.most_deficit = judged.most or params.most_deficit
            if partials is not None:
                partials.place(launcher, params.reduce, first_matrix)
            if piece.workspace:
                workspace = launcher.empty((piece.workspace,), np.dtype(np.float32))
                params.workspace = launcher.pointer(workspace)
            self._launch(launcher, self.source.name, piece.grid, self.threads, self.shared, params)
            if piece.workspace:
                blocks = -(-piece.elements // _COMBINE_THREADS)
                self._launch(launcher, "wgmma_combine", blocks, _COMBINE_THREADS, 0, params)

    def _placed(
        self, launcher: Launcher, a: Source, b: Source, bases: Sequence[int]
    ) -> Iterator[tuple[_Piece, WgmmaParams]]:
        """The launches and their arguments."""
        left, right = (b, a) if self.swapped else (a, b)
        for piece in self.pieces:
            params = WgmmaParams.from_buffer_copy(piece.params)
            params.map_left = launcher.tensor_map(self.left, left.data)
            params.map_right = launcher.tensor_map(self.right, right.data)
            params.left.exponents, params.right.exponents = left.exponents, right.exponents
            for side, source in ((params.left, left), (params.right, right)):
                side.deficits = source.deficits + _INT_BYTES * source.deficit_words * piece.first
                side.deficit_words = source.deficit_words
            place((params.c, params.d), bases)
            yield piece, params

    def _launch(self, launcher: Launcher, entry: str, grid: int, block: int, shared: int, params: WgmmaParams) -> None:
        launcher.launch(self.source, entry, grid=grid, block=block, shared=shared, params=params, dependent=DEPENDENT)


@lru_cache(maxsize=1024)
def plan(
    sm_count: int,
    problem: GemmProblem | GemmReduceProblem,
    tile: WgmmaTile,
    a: WgmmaSide,
    b: WgmmaSide,
    c: StoredArray | None,
    d: StoredArray | None,
    tiles: Tiles | None = None,
) -> WgmmaPlan:
    """The launches of alpha A B + beta C, or of its reductions, on a device of that many multiprocessors.

    C and D: None where there are none. `tiles`: those that are computed, as in `common.verdict.Judged`; None: all.
    """
    shape = (*problem.batch_shape, problem.m, problem.n)
    stored = problem.stored((), problem.dtype)[1]
    nowhere = MatrixView(0, 0, stored, problem.m, problem.n, 0, 0, (0,) * len(problem.batch_shape))
    c_view, d_view = (
        nowhere if array is None else matrix_view(array, shape, planar=problem.planar) for array in (c, d)
    )
    if isinstance(problem, GemmReduceProblem):  # rows remain
        swapped = problem.over_rows
    else:
        swapped = d_view.columns > 1 and d_view.rows > 1 and abs(d_view.row_stride) < abs(d_view.column_stride)
    left, right = (b, a) if swapped else (a, b)
    if swapped:
        c_view, d_view = c_view.transposed(), d_view.transposed()
    m, n = left.rows, right.rows
    tiles_m, tiles_n = -(-m // (tile.block_m * tile.cluster)), -(-n // tile.block_n)
    k_blocks = -(-left.k // tile.block_k)
    pieces = []
    for first_matrix, inner, views in launches(problem.batch_shape, [left.view(), right.view(), c_view, d_view]):
        matrices = math.prod(inner)
        params = WgmmaParams(
            m=m,
            n=n,
            k_blocks=k_blocks,
            parts=tile.parts,
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            matrices=matrices,
            units=matrices * tiles_m * tiles_n * tile.parts,
            most_deficit=most_deficit(problem.k),
            c=views[2].params(),
            d=views[3].params(),
        )
        for params_of, view in zip((params.left, params.right), views, strict=False):
            params_of.first_matrix = view.re
            params_of.batch_stride[:] = (0,) * (BATCH_DIMS - len(view.batch_strides)) + view.batch_strides
        params.batch_shape[:] = inner
        if isinstance(problem, GemmReduceProblem):
            params.reduce.first_batch, params.reduce.reduce_batch = first_matrix, problem.over_batch
        set_factors(params, problem)
        elements = matrices * m * n
        workspace = tile.parts * elements * (2 if left.complex else 1) if tile.parts > 1 else 0
        resident = max(1, sm_count // tile.cluster)
        groups = params.units if tile.split > 1 else min(params.units, resident)
        pieces.append(_Piece(first_matrix, params, groups * tile.cluster * tile.split, workspace, elements))
    stage_planes = tile.stage_planes
    by_planes = stage_planes % tile.cluster == 0
    rows_along = d is not None and d_view.column_stride == 1
    vector = rows_along and d_view.aligned(_PAIR, d_view.row_stride)
    wide = rows_along and d_view.dtype == np.float16 and d_view.aligned(_WIDE, d_view.row_stride)
    name = "wgmma_reduce" if isinstance(problem, GemmReduceProblem) else "wgmma_gemm"
    across = (left.across, right.across)
    source = KernelSource(
        name,
        defines(
            problem,
            tile,
            c_view.dtype,
            d_view.dtype,
            swapped=swapped,
            vector=vector,
            wide=wide,
            across=across,
            tiles=tiles,
        ),
    )
    return WgmmaPlan(
        source,
        tile.threads,
        tile.shared_bytes,
        left.box(tile.block_k, tile.block_m, 1 if tile.quartered else stage_planes),
        right.box(
            tile.block_k,
            tile.block_n if by_planes else tile.block_n // tile.cluster,
            1 if tile.quartered else stage_planes // tile.cluster if by_planes else stage_planes,
        ),
        tuple(pieces),
        swapped,
    )


def defines(
    problem: GemmProblem | GemmReduceProblem,
    tile: WgmmaTile,
    c: np.dtype[Any],
    d: np.dtype[Any],
    *,
    swapped: bool,
    vector: bool,
    wide: bool = False,
    across: tuple[bool, bool] = (False, False),
    tiles: Tiles | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return the defines of the kernel. `vector`, `wide`: whether pairs, or float16 results by eight, are written at
    once. `across`: of the left and of the right operand, as in `WgmmaSide`. `tiles` as in `plan`.
    """
    found = {
        "SCHEME": str(_SCHEMES[tile.scheme]),
        "COMPLEX": flag(tile.complex),
        "BLOCK_M": str(tile.block_m),
        "BLOCK_N": str(tile.block_n),
        "BLOCK_K": str(tile.block_k),
        "INSTRUCTION_N": str(tile.instruction_n),
        "QUARTERED": flag(tile.quartered),
        "STAGES": str(tile.stages),
        "PROMOTE": str(tile.promote),
        "CLUSTER": str(tile.cluster),
        "SPLIT": str(tile.split),
        "PARTIAL": flag(tile.parts > 1),
        "RASTER": str(tile.raster),
        "SWAPPED": flag(swapped),
        "TILES": str(TILES[tiles]),
        "PLANAR": flag(problem.planar and tile.complex),
        "VECTOR_D": flag(vector),
        "WIDE_D": flag(wide),
        "ADDS_C": flag(not isinstance(problem, GemmReduceProblem)),
        "LEFT_ACROSS": flag(across[0]),
        "RIGHT_ACROSS": flag(across[1]),
        "TYPE_C": TYPES[c.name],
        "TYPE_D": TYPES[d.name],
        "PARAMS_BYTES": str(ctypes.sizeof(WgmmaParams)),
        **(epilogue_defines(problem) if isinstance(problem, GemmReduceProblem) else {}),
    }
    return tuple(found.items())
