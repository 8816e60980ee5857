"""Reductions of products of float64 and complex128 through residues: the product panel by panel, and a pass over it.

Large products by residues are two and three times as fast as those that tensor cores make in double, and reduce where
they are: more than writing them and reading them again costs. What is reduced are the elements of `ozaki.gemm`, or of
the transposed product where rows are reduced. A panel takes at most `PANEL` bytes.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels.algorithms.common.operands import TYPES, flag, stored_dtype
from gemmserve_kernels.algorithms.common.partials import Partials, combine, epilogue_defines, outputs_of
from gemmserve_kernels.algorithms.common.time_model import BANDWIDTH, LAUNCH_S, MEASURED_SMS
from gemmserve_kernels.algorithms.ozaki import gemm
from gemmserve_kernels.algorithms.ozaki.plan import OzakiTile, Run
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import VECTOR_BYTES, StoredArray, matrix_view
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.config import GemmConfig
    from gemmserve_kernels.problem.problem import GemmReduceProblem

PANEL: Final = 1 << 30
_ROWS: Final = 256
"""Rows of a panel are a multiple of this, where it has not all."""
_SHARE: Final = 4096
"""Columns that one warp folds."""
_THREADS: Final = 256
_TRANSPOSED: Final = {"N": "T", "T": "N", "C": "R", "R": "C"}


@device_struct("epilogue/stored_reduce.cu")
class StoredReduceParams(ctypes.Structure):
    """Arguments of stored_reduce."""


def supports(problem: GemmReduceProblem, spec: DeviceSpec) -> str | None:
    """Return why this cannot run `problem` on `spec`, or None."""
    if problem.return_c:
        return "the product is made in panels, not where it is returned"
    if problem.dtype.name not in {"float64", "complex128"}:
        return f"reductions through residues are of float64 and complex128, not {problem.dtype.name}"
    if problem.batch * problem.m * problem.n == 0:
        return "an empty product"
    panels = _Panels.of(problem)
    if panels.bytes_of(1, min(_ROWS, panels.rows)) > PANEL:
        return f"{_ROWS} rows of the matrices along one axis of the batch take more than {PANEL >> 20} MiB"
    return gemm.supports(problem.product, spec)


def resolve(config: GemmConfig | None, problem: GemmReduceProblem, spec: DeviceSpec) -> OzakiTile:
    """Moduli and stages as of the product. Raises ConfigInfeasible."""
    return gemm.resolve(config, problem.product, spec)


def panel_bytes(problem: GemmReduceProblem) -> int:
    """Return bytes of the product that are held at once, at most."""
    panels = _Panels.of(problem)
    return min(PANEL, panels.bytes_of(panels.first, panels.rows))


def pass_seconds(problem: GemmReduceProblem, spec: DeviceSpec) -> float:
    """Return seconds that the pass over the product takes, beside making it."""
    panels = _Panels.of(problem)
    nbytes = panels.bytes_of(panels.first, panels.rows)
    return (1 + -(-nbytes // PANEL)) * LAUNCH_S + nbytes / (BANDWIDTH * spec.sm_count / MEASURED_SMS)


@dataclass(frozen=True)
class _Panels:
    """Cut of the product, turned so that rows are reduced: along the first axis of the batch, then along rows. `first`:
    that axis' extent; `rest`: matrices of each of its places.
    """

    first: int
    rest: int
    rows: int
    extent: int
    itemsize: int

    @classmethod
    def of(cls, problem: GemmReduceProblem) -> _Panels:
        rows, extent = (problem.n, problem.m) if problem.over_rows else (problem.m, problem.n)
        first = problem.batch_shape[0] if problem.batch_shape else 1
        return cls(first, problem.batch // max(first, 1), rows, extent, problem.dtype.itemsize)

    def bytes_of(self, places: int, rows: int) -> int:
        return places * self.rest * rows * self.extent * self.itemsize

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """First place and places along the axis, first row and rows of each panel."""
        count, rows = max(1, PANEL // self.bytes_of(1, self.rows)), self.rows
        if self.bytes_of(1, rows) > PANEL:
            rows = max(_ROWS, PANEL // self.bytes_of(1, 1) // _ROWS * _ROWS)
        for first in range(0, self.first, count):
            for row in range(0, self.rows, rows):
                yield first, min(count, self.first - first), row, min(rows, self.rows - row)


@dataclass(frozen=True)
class _Side:
    """An operand of the turned product."""

    stored: StoredArray
    base: int
    trans: str
    planar: bool

    def cut(self, axis: int, first: int, count: int) -> _Side:
        """Some places of an axis, counted from the last one backwards; all where it repeats or is none."""
        stored = self.stored
        if -axis > len(stored.shape) - self.planar or stored.shape[axis] == 1:
            return self
        at = self.base + stored.phase + first * stored.strides[axis]
        shape = list(stored.shape)
        shape[axis] = count
        phase = at % VECTOR_BYTES
        return replace(self, stored=replace(stored, shape=tuple(shape), phase=phase), base=at - phase)

    def operand(self) -> Operand:
        item = self.stored.dtype.itemsize
        return Operand(self.stored.shape, self.stored.dtype, tuple(s // item for s in self.stored.strides))


def run_gemm_reduce(
    launcher: Launcher,
    problem: GemmReduceProblem,
    config: GemmConfig | OzakiTile | None,
    a: Any,
    b: Any,
    results: dict[str, Any],
) -> None:
    """Writes the reductions of alpha op(a) op(b) into `results`. Raises ConfigInfeasible, CompileError."""
    sides = [
        _Side(*StoredArray.of(launcher, array), trans, problem.planar)
        for array, trans in ((a, problem.trans_a), (b, problem.trans_b))
    ]
    if problem.over_rows:
        sides = [replace(side, trans=_TRANSPOSED[side.trans]) for side in sides[::-1]]
    tile = config if isinstance(config, OzakiTile) else resolve(config, problem, launcher.spec)
    panels = _Panels.of(problem)
    parts = -(-panels.extent // _SHARE)
    partials = Partials.allocate(launcher, problem, parts * (problem.batch if problem.over_batch else 1))
    axis = -2 - len(problem.batch_shape)
    for first, places, row, rows in panels:
        left = sides[0].cut(-2 if sides[0].trans in "NR" else -1, row, rows)
        left, right = (side.cut(axis, first, places) if problem.batch_shape else side for side in (left, sides[1]))
        _panel(launcher, problem, tile, (left, right), (first * panels.rest, row), partials, parts)
    combine(launcher, problem, partials, results)


def _panel(
    launcher: Launcher, problem: GemmReduceProblem, tile: OzakiTile, sides: tuple[_Side, _Side],
    at: tuple[int, int], partials: Partials, parts: int,
) -> None:  # fmt: skip
    """The product of a panel that begins with a matrix and a row `at`, and its partials."""
    left, right = sides
    product = GemmProblem.build(
        left.operand(), right.operand(), alpha=problem.alpha, trans_a=left.trans, trans_b=right.trans,
        layout=problem.layout, compute=problem.compute,
    )  # fmt: skip
    made = launcher.empty(product.result_shape, stored_dtype(problem))
    stored, base = StoredArray.of(launcher, made)
    Run(
        launcher, product, tile, [left.stored, right.stored, stored, stored], [left.base, right.base, base, base],
        (None, None),
    ).run()  # fmt: skip
    shape = (math.prod(product.batch_shape), product.m, product.n)
    flat = replace(
        stored, shape=(*stored.shape[: problem.planar], *shape),
        strides=(*stored.strides[: problem.planar], *(product.n * stored.dtype.itemsize * x for x in (product.m, 1)),
                 stored.dtype.itemsize),
    )  # fmt: skip
    view = matrix_view(flat, shape, planar=problem.planar).shifted_by(base)
    params = StoredReduceParams(
        d=view.params(), matrices=shape[0], first_matrix=at[0], first_row=at[1], rows=product.m,
        m=_Panels.of(problem).rows, n=product.n, share=_SHARE, parts=parts, partial=partials.params(launcher),
        outputs=outputs_of(problem), reduce_batch=problem.over_batch,
    )  # fmt: skip
    epilogue = epilogue_defines(problem)
    defines = {
        "TYPE_X": TYPES[stored.dtype.name],
        "TYPE_ACC": TYPES["complex128" if problem.dtype.kind == "c" else "float64"],
        "PLANAR": flag(problem.planar),
        "REDUCTIONS": epilogue["REDUCTIONS"],
        "PRE_OP": epilogue["PRE_OP"],
    }
    blocks = -(-shape[0] * product.m * parts // (_THREADS // 32))
    source = KernelSource("stored_reduce", tuple(defines.items()))
    launcher.launch(source, "stored_reduce", grid=blocks, block=_THREADS, shared=0, params=params)
