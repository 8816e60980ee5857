"""The check on a device: host side of cuda/freivalds/freivalds.cu and freivalds_judge.cu."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import (
    BATCH_DIMS,
    VECTOR_BYTES,
    MatrixView,
    StoredArray,
    launches,
    matrix_view,
    set_factors,
)
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.freivalds.finding import floor_of
from gemmserve_kernels.freivalds.signs import VECTORS

if TYPE_CHECKING:
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.problem.problem import GemmProblem

_THREADS: Final = 256
_WARPS: Final = _THREADS // 32
_FEWEST: Final = 4
"""Threads side by side in a row at least."""
_HELD: Final = {"f": 4, "c": 2}
"""Columns that a warp takes at once where it walks along them, by kind."""
_MAX_WIDE: Final = 16
"""Bytes of the double-precision form of what a thread takes at once: more takes too many registers."""
_LINES: Final = {True: (512, 256, 128), False: (2048, 1024, 512)}
"""Rows of one block, across and along memory: as many as leave enough blocks to fill a device."""
_BLOCKS_PER_SM: Final = 2
_WORKSPACE: Final = 64 << 20
"""Bytes of partial sums; of batches that would need more, a part is checked at a time."""
_FIGURES: Final = 3


@device_struct("freivalds/freivalds_judge.cu")
class SignsParams(ctypes.Structure):
    """Arguments of freivalds_signs."""


@device_struct("freivalds/freivalds_judge.cu")
class FoldParams(ctypes.Structure):
    """Arguments of freivalds_fold."""


@device_struct("freivalds/freivalds.cu")
class TimesParams(ctypes.Structure):
    """Arguments of freivalds_times."""


@device_struct("freivalds/freivalds_judge.cu")
class SideParams(ctypes.Structure):
    """Figures that one matrix of each product left."""


@device_struct("freivalds/freivalds_judge.cu")
class JudgeParams(ctypes.Structure):
    """Arguments of freivalds_judge."""


@dataclass(frozen=True)
class _DeviceSide:
    """Figures that one matrix of each product left on the device, in `memory`: see SideParams in freivalds_judge.cu."""

    memory: Any
    address: int
    squares: int
    parts: int
    part_stride: int

    def params(self) -> SideParams:
        return SideParams(self.address, self.squares, self.parts, self.part_stride)


_NOTHING: Final = _DeviceSide(None, 0, 0, 0, 0)


@dataclass(frozen=True)
class _Weights:
    """Vectors that rows are multiplied with: `own` where every matrix has its own; no squares: signs."""

    values: int
    squares: int
    own: bool


def figures(launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any, seed: int) -> Any:
    """(products, parts of their rows, 3) figures on the launcher's device, as `judged` takes them.

    Arrays are those of `problem`, which has a result that is not empty. Raises CompileError.
    """
    vectors = launcher.empty((vectors_size(problem),), np.dtype(np.float64))
    out = launcher.empty(figures_shape(problem), np.dtype(np.float64))
    fill_signs(launcher, problem, vectors, seed)
    run(launcher, problem, a, b, c, d, vectors, launcher.pointer(out))
    return out


def vectors_size(problem: GemmProblem) -> int:
    """Doubles that `fill_signs` fills: VECTORS signs for each column, and the seed's bits as the last."""
    return VECTORS * problem.n + 1


def figures_shape(problem: GemmProblem) -> tuple[int, int, int]:
    """Return the shape of what `run` fills."""
    return problem.batch, -(-problem.m // _THREADS), _FIGURES


def fill_signs(launcher: Launcher, problem: GemmProblem, vectors: Any, seed: int) -> None:
    """Makes the vectors, float64 (VECTORS, n), and puts the seed behind them."""
    at = launcher.pointer(vectors)
    params = SignsParams(out=at, seed_out=seed_address(problem, at), count=problem.n, seed=seed)
    launch_blocks(launcher, _common(problem), "freivalds_signs", -(-problem.n // _THREADS), params)


def seed_address(problem: GemmProblem, vectors: int) -> int:
    """Return the address of the seed of the vectors at that address."""
    return vectors + 8 * VECTORS * problem.n


def run(
    launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any, vectors: Any, out: int
) -> None:
    """The figures of a check by those vectors, to address `out`. What it launches depends on no address and no data."""
    _Check(launcher, problem).figures(a, b, c, d, vectors, out)


def _wide(problem: GemmProblem) -> np.dtype[Any]:
    return np.dtype(np.complex128 if problem.dtype.kind == "c" else np.float64)


def _common(problem: GemmProblem) -> KernelSource:
    return KernelSource("freivalds_judge", (("TYPE_ACC", TYPES[_wide(problem).name]),))


def views_of(
    launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any | None, d: Any
) -> tuple[Operands, list[MatrixView]]:
    """Return the operands, and views of op(A), op(B), D and of a C that is read, with addresses."""
    given = [a, b, d] if c is None or problem.beta == 0 else [a, b, d, c]
    stored = [StoredArray.of(launcher, array) for array in given]
    operands = Operands.of(problem, stored[0][0], stored[1][0])
    shape = (*problem.batch_shape, problem.m, problem.n)
    views = [operands.a, operands.b, *(matrix_view(x, shape, planar=problem.planar) for x, _ in stored[2:])]
    return operands, [view.shifted_by(base) for view, (_, base) in zip(views, stored, strict=True)]


def launch_blocks(
    launcher: Launcher, source: KernelSource, entry: str, blocks: int, params: Any, threads: int = _THREADS
) -> None:
    """Launches a kernel whose arguments have `first_block`, in as many grids as it takes."""
    for first in range(0, blocks, launcher.max_grid):
        params.first_block = first
        grid = min(blocks - first, launcher.max_grid)
        launcher.launch(source, entry, grid=grid, block=threads, shared=0, params=params)


class _Check:
    def __init__(self, launcher: Launcher, problem: GemmProblem) -> None:
        self.launcher = launcher
        self.problem = problem
        self.wide = _wide(problem)
        self.words = VECTORS * self.wide.itemsize // 8
        """Doubles of the values of one row; of its squares it is one."""

    def figures(self, a: Any, b: Any, c: Any | None, d: Any, vectors: Any, out: int) -> None:
        launcher, problem = self.launcher, self.problem
        blocks = figures_shape(problem)[1]
        operands, views = views_of(launcher, problem, a, b, c, d)
        signs = _Weights(launcher.pointer(vectors), 0, own=False)
        a_turned, b_turned = operands.conjugate_a, operands.conjugate_a != operands.conjugate_b
        shared = not any(views[1].batch_strides)
        alone = replace(views[1], batch_strides=())
        once = self._inner(alone, (1,) * BATCH_DIMS, 0, 1, signs, b_turned) if shared else None
        share = 8 * (self.words + 1) * (problem.k + problem.m * (len(views) - 1))
        step = max(1, _WORKSPACE // share)
        for first, inner, pieces in launches(problem.batch_shape, views):
            for low in range(0, math.prod(inner), step):
                some = min(step, math.prod(inner) - low)
                left = once or self._inner(pieces[1], inner, low, some, signs, b_turned)
                weights = _Weights(left.address, left.address + 8 * left.squares, own=not shared)
                of_a = self._times(pieces[0], inner, low, some, weights, turned=a_turned)
                others = [self._times(view, inner, low, some, signs, turned=False) for view in pieces[2:]]
                self._judge(of_a, others, some, blocks, out + 8 * _FIGURES * blocks * (first + low))

    def _inner(
        self, view: MatrixView, batch: tuple[int, ...], first: int, count: int, signs: _Weights, turned: bool
    ) -> _DeviceSide:
        """op(B) x, its parts added up."""
        side = self._times(view, batch, first, count, signs, turned=turned)
        if side.parts > 1:
            written = side.squares + count * self.problem.k
            params = FoldParams(values=side.address, count=written, parts=side.parts, stride=side.part_stride)
            launch_blocks(self.launcher, _common(self.problem), "freivalds_fold", -(-written // _THREADS), params)
        return side

    def _times(
        self, op: MatrixView, batch: tuple[int, ...], first: int, count: int, weights: _Weights, *, turned: bool
    ) -> _DeviceSide:
        """`op`, of `count` matrices of the batch from the `first` on, times the weights; `turned`: what is left is
        conjugated.
        """
        if op.rows == 0 or op.columns == 0:
            return _NOTHING
        view = op.transposed()
        across = view.columns > 1 and (view.rows == 1 or abs(view.column_stride) <= abs(view.row_stride))
        vector = self._vector(view, across=across)
        columns = vector * _lanes(-(-view.columns // vector)) if across else _WARPS * _HELD[self.wide.kind]
        tiles = -(-view.columns // columns)
        enough = _BLOCKS_PER_SM * self.launcher.spec.sm_count
        lines = next((n for n in _LINES[across] if tiles * count * -(-view.rows // n) >= enough), _LINES[across][-1])
        parts = -(-view.rows // lines)
        squares = count * view.columns * self.words
        part_stride = squares + count * view.columns
        part_stride += part_stride % 2  # values stay aligned
        memory = self.launcher.empty((parts * part_stride,), np.dtype(np.float64))
        side = _DeviceSide(memory, self.launcher.pointer(memory), squares, parts, part_stride)
        defines = {
            "TYPE_X": TYPES[view.dtype.name],
            "TYPE_ACC": TYPES[self.wide.name],
            "PLANAR": flag(self.problem.planar),
            "ACROSS": flag(across),
            "SIGNS": flag(weights.squares == 0),
            "VECTOR": str(vector),
            "COLUMNS": str(columns),
            "MIN_BLOCKS": str(_BLOCKS_PER_SM),
        }
        params = TimesParams(
            x=view.params(), rows=view.rows, columns=view.columns, weights=weights.values,
            square_weights=weights.squares, out=side.address, squares=squares, part_stride=part_stride,
            first_matrix=first, matrices=count, tiles=tiles, parts=parts, lines=lines, own_weights=weights.own,
            conjugate=turned,
        )  # fmt: skip
        params.batch_shape[:] = batch
        source = KernelSource("freivalds", tuple(defines.items()))
        launch_blocks(self.launcher, source, "freivalds_times", tiles * parts * count, params)
        return side

    def _vector(self, view: MatrixView, *, across: bool) -> int:
        fast, slow = (view.column_stride, view.row_stride) if across else (view.row_stride, view.column_stride)
        vector = min(VECTOR_BYTES // view.dtype.itemsize, _MAX_WIDE // self.wide.itemsize)
        while vector > 1 and not (fast == 1 and view.aligned(vector, slow)):
            vector //= 2
        return max(1, vector)

    def _judge(self, of_a: _DeviceSide, others: list[_DeviceSide], matrices: int, blocks: int, out: int) -> None:
        problem = self.problem
        of_d, of_c = others[0], others[1] if len(others) > 1 else _NOTHING
        params = JudgeParams(
            d=of_d.params(), a=of_a.params(), c=of_c.params(), rows=problem.m, matrices=matrices, blocks=blocks,
            floor=floor_of(problem), out=out,
        )  # fmt: skip
        set_factors(params, problem)
        launch_blocks(self.launcher, _common(problem), "freivalds_judge", matrices * blocks, params)


def _lanes(pieces: int) -> int:
    """Threads that have a row of a tile: a warp's, fewer where so many pieces are too few for one."""
    lanes = _FEWEST
    while lanes < min(pieces, 32):
        lanes *= 2
    return lanes
