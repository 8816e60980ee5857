"""Products of float16 planes on Hopper's tensor cores: host side of cuda/wgmma_gemm.cu.

`resolve` chooses a tile, `multiply` launches it. Everything but the addresses is planned once: a plan depends on
shapes, strides, dtypes and alignment.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gemmserve_kernels.arguments import (
    BATCH_DIMS,
    MatrixParams,
    MatrixView,
    RowReduceParams,
    StoredArray,
    launches,
    matrix_view,
)
from gemmserve_kernels.compiler import KernelSource
from gemmserve_kernels.problem import GemmReduceProblem
from gemmserve_kernels.reduction import epilogue_defines
from gemmserve_kernels.tiling import TYPES, flag
from gemmserve_kernels.wgmma.tensor_map import Box, TensorMap
from gemmserve_kernels.wgmma.tiles import WgmmaTile, resolve, supports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gemmserve_kernels.launch import Launcher
    from gemmserve_kernels.planes.layout import Planes, Scheme
    from gemmserve_kernels.problem import GemmProblem
    from gemmserve_kernels.reduction import Partials

__all__ = ["WgmmaTile", "multiply", "resolve", "supports"]

_SCHEMES: Final = {"3xfp16": 0, "3xfp16-3m": 1, "1xfp16": 2}
"""enum Scheme in cuda/wgmma_gemm.cu."""
_COMBINE_THREADS: Final = 256
DEPENDENT: Final = True
"""The kernels wait themselves for the one ahead (cuda/common/dependent.cuh)."""


class PlaneParams(ctypes.Structure):
    """Mirror of PlaneParams in cuda/wgmma/params.cuh."""

    _fields_ = (
        ("exponents", ctypes.c_uint64),
        ("first_matrix", ctypes.c_int64),
        ("batch_stride", ctypes.c_int64 * BATCH_DIMS),
    )


class WgmmaParams(ctypes.Structure):
    """Mirror of WgmmaParams."""

    _fields_ = (
        ("map_left", TensorMap),
        ("map_right", TensorMap),
        ("left", PlaneParams),
        ("right", PlaneParams),
        ("c", MatrixParams),
        ("d", MatrixParams),
        ("workspace", ctypes.c_uint64),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("batch_shape", ctypes.c_int32 * BATCH_DIMS),
        ("k_blocks", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("tiles_m", ctypes.c_int32),
        ("tiles_n", ctypes.c_int32),
        ("matrices", ctypes.c_int32),
        ("units", ctypes.c_int32),
        ("alpha", ctypes.c_double * 2),
        ("beta", ctypes.c_double * 2),
        ("reduce", RowReduceParams),
        ("reserved", ctypes.c_int64 * 3),  # up to a whole multiple of a tensor map's alignment
    )


class _Side(NamedTuple):
    """What a plan knows of `Planes`; a tuple, because it is made and hashed for every call."""

    scheme: Scheme
    complex: bool
    planes: int
    matrices: int
    rows: int
    k: int
    pitch: int
    batch_strides: tuple[int, ...]

    @classmethod
    def of(cls, planes: Planes) -> _Side:
        """That of `planes`."""
        return cls(
            planes.scheme,
            planes.complex,
            planes.count,
            planes.matrices,
            planes.rows,
            planes.k,
            planes.pitch,
            planes.batch_strides,
        )

    def view(self) -> MatrixView:
        """As a batched matrix whose elements are matrices: its `re` counts them."""
        return MatrixView(0, 0, np.dtype(np.uint8), self.rows, self.k, 0, 0, self.batch_strides)

    def box(self, block_k: int, rows: int, planes: int) -> Box:
        """How tiles of the planes are fetched."""
        return Box((self.pitch, self.rows, self.planes, self.matrices), (block_k, rows, planes, 1))


@dataclass(frozen=True)
class _Piece:
    """One launch's share of the batch, its addresses counting from the arrays' bases."""

    params: WgmmaParams
    grid: int
    workspace: int
    elements: int


@dataclass(frozen=True)
class _Plan:
    """Everything but the addresses; `threads` and `shared` are the launch's, `swapped` where D^T is computed."""

    source: KernelSource
    threads: int
    shared: int
    left: Box
    right: Box
    pieces: tuple[_Piece, ...]
    swapped: bool

    def placed(
        self, launcher: Launcher, a: Planes, b: Planes, bases: Sequence[int]
    ) -> Iterator[tuple[_Piece, WgmmaParams]]:
        """The launches and their arguments; `bases` of C and D where there are any."""
        left, right = (b, a) if self.swapped else (a, b)
        for piece in self.pieces:
            params = WgmmaParams.from_buffer_copy(piece.params)
            params.map_left = launcher.tensor_map(self.left, launcher.pointer(left.data))
            params.map_right = launcher.tensor_map(self.right, launcher.pointer(right.data))
            params.left.exponents = launcher.pointer(left.exponents)
            params.right.exponents = launcher.pointer(right.exponents)
            for matrix, base in zip((params.c, params.d), bases, strict=False):
                matrix.re += base
                matrix.im += base
            yield piece, params

    def launch(self, launcher: Launcher, piece: _Piece, params: WgmmaParams) -> None:
        """Enqueues one."""
        name = self.source.name
        launcher.launch(
            self.source,
            name,
            grid=piece.grid,
            block=self.threads,
            shared=self.shared,
            params=params,
            dependent=DEPENDENT,
        )


def multiply(
    launcher: Launcher, problem: GemmProblem, tile: WgmmaTile, a: Planes, b: Planes, c: Any | None, out: Any
) -> None:
    """Writes alpha (sum over k) 2^(exponents) + beta c into every element of `out`, for all of the problem's batch.

    `a` and `b` are the planes of the problem's operands; `c` is not read where beta is 0. Raises CompileError,
    DeviceError.
    """
    found = [StoredArray.of(launcher, array) for array in (out if c is None or problem.beta == 0 else c, out)]
    plan = _plan(launcher.spec.sm_count, problem, tile, _Side.of(a), _Side.of(b), *(stored for stored, _ in found))
    for piece, params in plan.placed(launcher, a, b, [base for _, base in found]):
        if piece.workspace:
            workspace = launcher.empty((piece.workspace,), np.dtype(np.float32))
            params.workspace = launcher.pointer(workspace)
        plan.launch(launcher, piece, params)
        if piece.workspace:
            blocks = -(-piece.elements // _COMBINE_THREADS)
            launcher.launch(
                plan.source,
                "wgmma_combine",
                grid=blocks,
                block=_COMBINE_THREADS,
                shared=0,
                params=params,
                dependent=DEPENDENT,
            )


def partials_length(problem: GemmReduceProblem, tile: WgmmaTile) -> int:
    """Partials that `multiply_reduce` leaves for each output of one product."""
    return -(-(problem.m if problem.over_rows else problem.n) // tile.block_n) * tile.split


def multiply_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    tile: WgmmaTile,
    a: Planes,
    b: Planes,
    partials: Partials,
    first_matrix: int,
    c: Any | None,
) -> None:
    """`multiply`, leaving partials of the problem's batch from number `first_matrix` on; the product in `c` if any.

    `tile.parts` is 1.
    """
    stored, base = (None, 0) if c is None else StoredArray.of(launcher, c)
    plan = _plan(launcher.spec.sm_count, problem, tile, _Side.of(a), _Side.of(b), stored, stored)
    for piece, params in plan.placed(launcher, a, b, [base, base] if c is not None else []):
        params.reduce.partial, params.reduce.outputs = partials.params(launcher), partials.outputs
        params.reduce.first_batch += first_matrix
        plan.launch(launcher, piece, params)


@lru_cache(maxsize=1024)
def _plan(
    sm_count: int,
    problem: GemmProblem | GemmReduceProblem,
    tile: WgmmaTile,
    a: _Side,
    b: _Side,
    c: StoredArray | None,
    d: StoredArray | None,
) -> _Plan:
    shape = (*problem.batch_shape, problem.m, problem.n)
    stored = problem.stored((), problem.dtype)[1]
    nowhere = MatrixView(0, 0, stored, problem.m, problem.n, 0, 0, (0,) * len(problem.batch_shape))
    c_view, d_view = (
        nowhere if array is None else matrix_view(array, shape, planar=problem.planar) for array in (c, d)
    )
    if isinstance(problem, GemmReduceProblem):  # rows remain
        swapped, beta = problem.over_rows, 0j
    else:
        swapped = d_view.columns > 1 and d_view.rows > 1 and abs(d_view.row_stride) < abs(d_view.column_stride)
        beta = complex(problem.beta)
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
            c=views[2].params(),
            d=views[3].params(),
        )
        for side, view in ((params.left, views[0]), (params.right, views[1])):
            side.first_matrix = view.re
            side.batch_stride[:] = (0,) * (BATCH_DIMS - len(view.batch_strides)) + view.batch_strides
        params.batch_shape[:] = inner
        if isinstance(problem, GemmReduceProblem):
            params.reduce.first_batch, params.reduce.reduce_batch = first_matrix, problem.over_batch
        alpha = complex(problem.alpha)
        params.alpha[:] = alpha.real, alpha.imag
        params.beta[:] = beta.real, beta.imag
        elements = matrices * m * n
        workspace = tile.parts * elements * (2 if left.complex else 1) if tile.parts > 1 else 0
        resident = max(1, sm_count // tile.cluster)
        groups = params.units if tile.split > 1 else min(params.units, resident)
        pieces.append(_Piece(params, groups * tile.cluster * tile.split, workspace, elements))
    stage_planes = tile.stage_planes
    by_planes = stage_planes % tile.cluster == 0
    vector = d is not None and d_view.column_stride == 1 and d_view.aligned(2, d_view.row_stride)
    name = "wgmma_reduce" if isinstance(problem, GemmReduceProblem) else "wgmma_gemm"
    source = KernelSource(name, _defines(problem, tile, c_view.dtype, d_view.dtype, swapped=swapped, vector=vector))
    return _Plan(
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


def _defines(
    problem: GemmProblem | GemmReduceProblem,
    tile: WgmmaTile,
    c: np.dtype[Any],
    d: np.dtype[Any],
    *,
    swapped: bool,
    vector: bool,
) -> tuple[tuple[str, str], ...]:
    defines = {
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
        "PLANAR": flag(problem.planar and tile.complex),
        "VECTOR_D": flag(vector),
        "TYPE_C": TYPES[c.name],
        "TYPE_D": TYPES[d.name],
        "PARAMS_BYTES": str(ctypes.sizeof(WgmmaParams)),
        **(epilogue_defines(problem) if isinstance(problem, GemmReduceProblem) else {}),
    }
    return tuple(defines.items())
