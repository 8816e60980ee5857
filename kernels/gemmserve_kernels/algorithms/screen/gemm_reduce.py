"""Extremes of the rows or columns of products of float64 and complex128, of which few elements are made in double.

    round    lines of both operands in one launch, scaled, to float16, and what that takes from each (`bound`)
    product  of float16 on tensor cores (`wgmma.direct`), ten times as fast as double precision there
    rows     which elements of a row may be its extreme; those in double precision
    dmma     the full product of rows of tiles in which a row has too many such (`bound.MOST`), or what is not finite

The device decides, without a look from the host. Results are elements in double precision, as plain arithmetic has
them, and the extremes of all elements: nothing is taken from the product in float16 but what it rules out.

Workspace: at most `WORKSPACE` bytes of rounded lines and products, or what one matrix's columns and a block of rows
take; larger problems go panel by panel, and results do not depend on panels.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.common.operands import TYPES, Operands, flag
from gemmserve_kernels.algorithms.common.partials import Partials, epilogue_defines, fold, outputs_of, targets
from gemmserve_kernels.algorithms.dmma import gemm_reduce as dmma
from gemmserve_kernels.algorithms.screen.bound import MAX_K, MOST, accumulated, exponent, promotion
from gemmserve_kernels.algorithms.wgmma.direct import gemm as direct
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import MatrixView, StoredArray, launches, place
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem
from gemmserve_kernels.problem.vocabulary import PARTIAL_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.algorithms.dmma.tile import DmmaTile
    from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmReduceProblem

WORKSPACE: Final = 1 << 30
_HALF: Final = np.dtype(np.float16)
_STEP: Final = 8
"""Numbers that lines and rows of the product are padded to: what the copy engine asks for."""
_ROWS: Final = 256
"""Rows of a panel are a multiple of this, where it has not all."""
_THREADS: Final = 256
_BLOCK_ROWS: Final = (16, 8)
"""Rows of a block of screen_rows: the first of float64 where such blocks fill the device (an H200 took a twelfth less
for complex128 with the second, for float64 the same).
"""
_FILLING: Final = 3
"""Such blocks for each multiprocessor, of four that fit on it, with which the device counts as filled."""
_FEW_STEPS: Final = 1024
"""Numbers along k up to which beginnings and ends of tiles are much of the product in float16: smaller ones leave fewer
multiprocessors without work then (an H200 took a tenth less for all of it, at 512 and at 1024).
"""
_TILE: Final = 128
_LINES: Final = (16, 8)
"""Lines of a block of screen_round: the first where they fit whole."""
_LINE_STEPS: Final = 32
"""Steps of k of such a block are a multiple of this."""
_KEPT: Final = 8192
"""Numbers of its lines in shared memory, 64 KiB, so that three blocks share a multiprocessor."""
_LEAST_EXTENT: Final = 4 * MOST
"""Elements of a row from which on there is something to be ruled out."""
_FACTORS: Final = (2.0**-100, 2.0**100)
"""Magnitudes of alpha that keep what lines allow from overflow."""
_INFO: Final = 2
"""Words of 8 bytes of a LineInfo."""


@device_struct("screen/params.cuh")
class RoundSide(ctypes.Structure):
    """One operand of screen_round."""


@device_struct("screen/params.cuh")
class RoundParams(ctypes.Structure):
    """Arguments of screen_round."""


@device_struct("screen/params.cuh")
class ScreenParams(ctypes.Structure):
    """Arguments of screen_rows."""


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
    if not spec.has_wgmma:
        return f"extremes are looked for on a Hopper GPU (sm_90a), and {spec.name} is none"
    if reason := dmma.supports(problem, spec):
        return reason
    if problem.return_c:
        return "the product is not made"
    if problem.pre_op == "square":
        return "extremes of squares are not looked for"
    sizes = problem.dtype.kind == "c" or problem.pre_op == "abs"
    known = {"max", "argmax", "absmax"} | (set() if sizes else {"min", "argmin"})
    if others := set(problem.reductions) - known:
        return f"what is close to nothing, and sums, are not looked for: {', '.join(sorted(others))}"
    if not _FACTORS[0] <= max(abs(problem.alpha.real), abs(problem.alpha.imag)) <= _FACTORS[1]:
        return "alpha is 0, not finite, or beyond 2^100"
    if problem.batch * problem.m * problem.n == 0 or not 0 < _numbers(problem) <= MAX_K:
        return f"k is from 1 to {MAX_K}, half of that for complex numbers"
    extent = problem.m if problem.over_rows else problem.n
    if extent < _LEAST_EXTENT:
        return f"fewer than {_LEAST_EXTENT} elements for each result"
    sizes_of = Sizes.of(problem)
    if sizes_of.columns + min(_ROWS, sizes_of.rows) * sizes_of.row > WORKSPACE or extent > 1 << 30:
        return "one matrix's columns take too much memory"
    return direct.supports(_product(problem, min(sizes_of.rows, _ROWS), (1, 1)), spec)


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> DmmaTile:
    """The tile of the full product. Raises ConfigInfeasible."""
    config = config or GemmConfig()
    config.only("screen", ())
    return dmma.resolve(None, problem, spec)


def screened_bytes(problem: GemmReduceProblem) -> int:
    """Return bytes of rounded lines and products at once, at most."""
    sizes = Sizes.of(problem)
    return min(WORKSPACE, problem.batch * (sizes.columns + sizes.rows * sizes.row))


def _numbers(problem: GemmReduceProblem) -> int:
    """Numbers of a line."""
    return problem.k * (2 if problem.dtype.kind == "c" else 1)


def _up(extent: int, step: int) -> int:
    return -(-extent // step) * step


def lines_of_block(k: int, parts: int) -> tuple[int, int]:
    """Return the lines of a block of screen_round and the steps of k of them that are in shared memory at once."""
    whole = _up(k, _LINE_STEPS)
    for lines in _LINES:
        if lines * parts * whole <= _KEPT:
            return lines, whole
    return _LINES[-1], _KEPT // (_LINES[-1] * parts)


def _along_k(view: MatrixView) -> bool:
    """Whether neighbours in memory are those along k, of lines by k."""
    return view.rows == 1 or (view.columns > 1 and abs(view.column_stride) <= abs(view.row_stride))


@dataclass(frozen=True)
class Sizes:
    """Bytes: of a row's line and its part of the product, of a matrix's columns. `parts`: numbers of an element."""

    rows: int
    extent: int
    parts: int
    pitch: int
    row: int
    columns: int

    @classmethod
    def of(cls, problem: GemmReduceProblem) -> Sizes:
        rows, extent = (problem.n, problem.m) if problem.over_rows else (problem.m, problem.n)
        parts, pitch = 2 if problem.dtype.kind == "c" else 1, _up(_numbers(problem), _STEP)
        padded = _up(extent, _STEP)
        return cls(rows, extent, parts, pitch, 2 * parts * (pitch + padded), 2 * padded * pitch)

    @property
    def padded(self) -> int:
        """Numbers of a row of the product."""
        return _up(self.extent, _STEP)

    def panels(self, matrices: int) -> Iterator[tuple[int, int, int, int]]:
        """First matrix, matrices, first row and rows of each panel."""
        rows = self.rows
        if self.columns + rows * self.row > WORKSPACE:
            rows = min(rows, max(_ROWS, (WORKSPACE - self.columns) // self.row // _ROWS * _ROWS))
        count = 1 if rows < self.rows else max(1, min(matrices, WORKSPACE // (self.columns + rows * self.row)))
        for first in range(0, matrices, count):
            for row in range(0, self.rows, rows):
                yield first, min(count, matrices - first), row, min(rows, self.rows - row)


def rows_of_block(problem: GemmReduceProblem, rows: int, spec: DeviceSpec) -> int:
    """Return the rows of a block of screen_rows, which has `rows` of all matrices of a launch."""
    many, few = _BLOCK_ROWS
    return many if problem.dtype.kind != "c" and rows >= many * _FILLING * spec.sm_count else few


def product_tile(product: GemmProblem, spec: DeviceSpec) -> WgmmaTile:
    """Return the tile of the product in float16: that of any other such product, but no large one where k is short."""
    config = GemmConfig(promote=promotion(product.k))
    tile = direct.resolve(config, product, spec)
    if product.k <= _FEW_STEPS and tile.block_m * tile.block_n > _TILE**2:
        return direct.resolve(replace(config, block_m=_TILE, block_n=_TILE), product, spec)
    return tile


@lru_cache(maxsize=1024)
def _product(problem: GemmReduceProblem, rows: int, matrices: tuple[int, int]) -> GemmProblem:
    """The product in float16 of a panel, of so many matrices of A and of B: 1 where all are the same."""
    sizes = Sizes.of(problem)
    a = Operand.contiguous((matrices[0], sizes.parts * rows, sizes.pitch), _HALF)
    b = Operand.contiguous((matrices[1], sizes.padded, sizes.pitch), _HALF)
    return GemmProblem.build(a, b, trans_b="T")


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | DmmaTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes extremes of alpha op(a) op(b) over its rows or columns into `results`. Raises ConfigInfeasible,
    CompileError.
    """
    tile = resolve(config, problem, launcher.spec) if config is None or isinstance(config, GemmConfig) else config
    (stored_a, base_a), (stored_b, base_b) = (StoredArray.of(launcher, x) for x in (a, b))
    full = dmma.plan_reduction(launcher.spec, problem, tile, stored_a, stored_b, None, None, screened=True)
    operands, bases = Operands.of(problem, stored_a, stored_b), [base_a, base_b]
    if problem.over_rows:
        operands, bases = operands.transposed(), bases[::-1]
    blocks = -(-operands.m // tile.block_m)
    parts = full.length // (problem.batch if problem.over_batch else 1)
    partials = Partials.allocate(launcher, problem, full.length)
    marks = Marks.allocate(launcher, problem.batch * blocks, problem.batch * operands.m)
    with targets(launcher, problem, results) as pointers:
        rows = _Rows(launcher, problem, operands, partials, pointers, marks, tile.block_m, blocks, parts)
        for first, batch_shape, views in launches(problem.batch_shape, [operands.a, operands.b]):
            rows.run(first, batch_shape, (views[0], views[1].transposed()), bases)
        full.launch(launcher, [*bases, 0, 0], partials=partials, failing=(marks.blocks, marks.rows, marks.any))
        if problem.over_batch:
            fold(launcher, problem, partials, pointers)
        else:
            fold(launcher, problem, partials, pointers, failing=(marks.rows, marks.any))


@dataclass(frozen=True)
class Marks:
    """Addresses of words that are not 0 for blocks of rows, and for rows, of which the full product is made, and of one
    that is not 0 where there is any; `words` of them from `blocks` on. `keep`: the array.
    """

    blocks: int
    rows: int
    any: int
    words: int
    keep: Any

    @classmethod
    def allocate(cls, launcher: Launcher, blocks: int, rows: int) -> Marks:
        """Memory of any content; screen_round clears it."""
        marks = launcher.empty((blocks + rows + 1,), np.dtype(np.int32))
        at = launcher.pointer(marks)
        return cls(at, at + 4 * blocks, at + 4 * (blocks + rows), blocks + rows + 1, marks)


@dataclass(frozen=True)
class _Rounded:
    """Lines of an operand after screen_round: `lines` of each of `matrices` from `first` on, of one where all have the
    same; `stored`: those that there is memory for.
    """

    data: Any
    info: Any
    matrices: int
    first: int
    lines: int
    stored: int


@dataclass(frozen=True)
class _Rows:
    """Arguments of screen_rows, and all that leads to them, of a reduction turned so that it goes along rows."""

    launcher: Launcher
    problem: GemmReduceProblem
    operands: Operands
    partials: Partials
    pointers: dict[str, int]
    marks: Marks
    block: int
    blocks: int
    parts: int

    def run(
        self, first_batch: int, batch_shape: tuple[int, ...], views: tuple[MatrixView, MatrixView], bases: list[int]
    ) -> None:
        """Everything but the full product, of a piece of the batch. `views`: rows by k, columns by k."""
        sizes, launcher = Sizes.of(self.problem), self.launcher
        columns: tuple[int, _Rounded] | None = None
        for panel in sizes.panels(math.prod(batch_shape)):
            first, matrices, row, rows = panel
            if columns is not None and columns[0] != first:
                columns = None  # its memory may serve again
            right = columns[1] if columns else self._lines(views, 1, first, matrices, sizes.extent)
            left = self._lines(views, 0, first, matrices, rows)
            begins = first_batch == first == row == 0
            self._round(views, bases, batch_shape, panel, left, None if columns else right, clear=begins)
            columns = first, right
            product = _product(self.problem, rows, (left.matrices, right.matrices))
            out = launcher.empty(product.result_shape, _HALF)
            direct.run_gemm(launcher, product, product_tile(product, launcher.spec), left.data, right.data, None, out)
            self._find(first_batch, batch_shape, views, bases, panel, left, right, out)

    def _lines(
        self, views: tuple[MatrixView, MatrixView], side: int, first: int, matrices: int, lines: int
    ) -> _Rounded:
        """Memory for lines of matrices from `first` on."""
        sizes, launcher = Sizes.of(self.problem), self.launcher
        if not any(views[side].batch_strides):
            first, matrices = 0, 1
        stored = lines if side == 0 else sizes.padded
        data = launcher.empty((matrices, (sizes.parts if side == 0 else 1) * stored, sizes.pitch), _HALF)
        info = launcher.empty((matrices * lines * _INFO,), np.dtype(np.float64))
        return _Rounded(data, info, matrices, first, lines, stored)

    def _round(
        self, views: tuple[MatrixView, MatrixView], bases: list[int], batch_shape: tuple[int, ...],
        panel: tuple[int, int, int, int], left: _Rounded, right: _Rounded | None, *, clear: bool,
    ) -> None:  # fmt: skip
        """Rows of a panel, and the columns of its matrices where they are not there yet. `clear`: the marks, too."""
        sizes, launcher = Sizes.of(self.problem), self.launcher
        per_block, steps = lines_of_block(self.problem.k, sizes.parts)
        params = RoundParams(
            k=self.problem.k, pitch=sizes.pitch, steps=steps, exponent=exponent(_numbers(self.problem))
        )
        params.batch_shape[:] = batch_shape
        if clear:
            params.cleared, params.clear = self.marks.blocks, self.marks.words
        conjugates = self.operands.conjugate_a, self.operands.conjugate_b
        for number, (of, lines) in enumerate(((params.left, left), (params.right, right))):
            if lines is None:
                continue
            of.x = views[number].params()
            place([of.x], [bases[number]])
            of.first, of.first_line, of.lines, of.stored = (
                lines.first,
                0 if number else panel[2],
                lines.lines,
                lines.stored,
            )
            of.blocks = lines.matrices * -(-lines.lines // per_block)
            of.rounded, of.info = launcher.pointer(lines.data), launcher.pointer(lines.info)
            of.conjugate = conjugates[number]
        defines = self._defines(views[0]) | {
            "LEFT_ALONG": flag(_along_k(views[0])),
            "RIGHT_ALONG": flag(_along_k(views[1])),
            "LINES": str(per_block),
        }
        shared = 8 * per_block * sizes.parts * (steps + 1)
        self._launch("screen_round", defines, params.left.blocks + params.right.blocks, params, shared)

    def _find(
        self, first_batch: int, batch_shape: tuple[int, ...], views: tuple[MatrixView, MatrixView], bases: list[int],
        panel: tuple[int, int, int, int], left: _Rounded, right: _Rounded, products: Any,
    ) -> None:  # fmt: skip
        sizes, launcher, problem = Sizes.of(self.problem), self.launcher, self.problem
        first, matrices, row, rows = panel
        block_rows = rows_of_block(problem, matrices * rows, launcher.spec)
        params = ScreenParams(
            a=views[0].params(), b=views[1].params(), first=first, first_row=row, rows=rows, m=sizes.rows,
            n=sizes.extent, k=problem.k, products=launcher.pointer(products), pitch=sizes.padded,
            products_step=0 if max(left.matrices, right.matrices) < matrices else rows,
            of_rows=launcher.pointer(left.info), of_columns=launcher.pointer(right.info),
            rows_step=0 if left.matrices < matrices else rows,
            columns_step=0 if right.matrices < matrices else sizes.extent,
            failing=self.marks.blocks, failing_rows=self.marks.rows, failing_any=self.marks.any, block=self.block,
            blocks=self.blocks,
            parts=self.parts, partial=self.partials.params(launcher),
            outputs=outputs_of(problem), first_batch=first_batch,
            accumulated=accumulated(sizes.pitch, complex_=sizes.parts == 2), reduce_batch=problem.over_batch,
            conjugate_a=self.operands.conjugate_a, conjugate_b=self.operands.conjugate_b,
        )  # fmt: skip
        place([params.a, params.b], bases)
        params.batch_shape[:] = batch_shape
        params.alpha[:] = problem.alpha.real, problem.alpha.imag
        for name, pointer in self.pointers.items():
            params.result[PARTIAL_KINDS.index(name)] = pointer
        epilogue = epilogue_defines(problem)
        defines = self._defines(views[0]) | {
            "REDUCTIONS": epilogue["REDUCTIONS"],
            "PRE_OP": epilogue["PRE_OP"],
            "MOST": str(MOST),
            "ROWS": str(block_rows),
            "ACROSS": flag(not _along_k(views[0])),
            "A_NEXT": flag(views[0].column_stride == 1),
            "B_NEXT": flag(views[1].column_stride == 1),
        }
        # Not started early: beside the product its blocks take the room and the bandwidth that the product's end needs.
        self._launch("screen_rows", defines, matrices * -(-rows // block_rows), params, early=False)

    def _defines(self, view: MatrixView) -> dict[str, str]:
        complex_ = self.problem.dtype.kind == "c"
        return {
            "TYPE_X": TYPES[view.dtype.name],
            "TYPE_ACC": TYPES["complex128" if complex_ else "float64"],
            "PLANAR": flag(self.problem.planar),
        }

    def _launch(
        self, name: str, defines: dict[str, str], blocks: int, params: ctypes.Structure, shared: int = 0,
        *, early: bool = True,
    ) -> None:  # fmt: skip
        """Launches a kernel, `early`: before the end of the one ahead of it, for which it waits itself
        (cuda/common/dependent.cuh).
        """
        source = KernelSource(name, tuple(defines.items()))
        self.launcher.launch(source, name, grid=blocks, block=_THREADS, shared=shared, params=params, dependent=early)
