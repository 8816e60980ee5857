"""Reductions of products in memory: made panel by panel by whatever multiplies, and a pass over each panel.

Where the product is not returned, it is turned so that its rows are reduced, and a panel, some of its matrices or rows,
takes at most `PANEL` bytes. A product that is returned is one panel, where the caller wants it.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from gemmserve_kernels.algorithms.common.operands import TYPES, flag
from gemmserve_kernels.algorithms.common.partials import Partials, combine, contiguous, epilogue_defines, outputs_of
from gemmserve_kernels.algorithms.common.time_model import BANDWIDTH, LAUNCH_S, MEASURED_SMS
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.struct_params import VECTOR_BYTES, StoredArray, matrix_view
from gemmserve_kernels.device.structures import device_struct
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmReduceProblem, Trans

PANEL: Final = 1 << 30
_ROWS: Final = 256
"""Rows of a panel are a multiple of this, where it has not all; of half of it, and so on, where rows are very long."""
_LEAST_ROWS: Final = 32
_FOLDED: Final = 64
"""Elements that one thread folds."""
_LANES: Final = ((4, 1), (16, 4), (64, 16))
"""Neighbours that fold a row together, by the longest one: four elements each."""
_MOST_LANES: Final = 32
_THREADS: Final = 256
_TRANSPOSED: Final[dict[str, Trans]] = {"N": "T", "T": "N", "C": "R", "R": "C"}


@device_struct("epilogue/stored_reduce.cu")
class StoredReduceParams(ctypes.Structure):
    """Arguments of stored_reduce."""


class Multiply(Protocol):
    """A way to make the product of a panel."""

    def __call__(self, product: GemmProblem, left: Side, right: Side, out: Any, /) -> None:
        """Write `product` of what lies at both sides into `out`, which is contiguous."""


@dataclass(frozen=True)
class Panels:
    """Cut of the product, turned so that rows are reduced: along the first axis of the batch, then along rows. `first`:
    that axis' extent; `rest`: matrices of each of its places.
    """

    first: int
    rest: int
    rows: int
    extent: int
    itemsize: int

    @classmethod
    def of(cls, problem: GemmReduceProblem, itemsize: int) -> Panels:
        """The cut of the product of `problem` in elements of so many bytes."""
        rows, extent = (problem.n, problem.m) if problem.over_rows else (problem.m, problem.n)
        first = problem.batch_shape[0] if problem.batch_shape else 1
        return cls(first, problem.batch // max(first, 1), rows, extent, itemsize)

    def bytes_of(self, places: int, rows: int) -> int:
        """Bytes of so many rows of the matrices at so many places of the first axis."""
        return places * self.rest * rows * self.extent * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole product."""
        return self.bytes_of(self.first, self.rows)

    @property
    def unfit(self) -> str | None:
        """Why the product cannot be cut into panels, or None."""
        if self.nbytes == 0:
            return "an empty product"
        if self.bytes_of(1, min(_LEAST_ROWS, self.rows)) > PANEL:
            return f"{_LEAST_ROWS} rows of the matrices along one axis of the batch take more than {PANEL >> 20} MiB"
        return None

    @property
    def _step(self) -> int:
        step = _ROWS
        while step > _LEAST_ROWS and self.bytes_of(1, step) > PANEL:
            step //= 2
        return step

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """First place and places along the axis, first row and rows of each panel."""
        count, rows = max(1, PANEL // self.bytes_of(1, self.rows)), self.rows
        if self.bytes_of(1, rows) > PANEL:
            rows = max(self._step, PANEL // self.bytes_of(1, 1) // self._step * self._step)
        for first in range(0, self.first, count):
            for row in range(0, self.rows, rows):
                yield first, min(count, self.first - first), row, min(rows, self.rows - row)


@dataclass(frozen=True)
class Side:
    """An operand of the turned product."""

    stored: StoredArray
    base: int
    trans: Trans
    planar: bool

    @classmethod
    def lying(cls, operand: Operand, trans: Trans, *, planar: bool) -> Side:
        """A side that lies like `operand`, at no address."""
        item = operand.dtype.itemsize
        strides = tuple(item * stride for stride in operand.strides)
        return cls(StoredArray(operand.shape, strides, operand.dtype, 0), 0, trans, planar)

    @property
    def address(self) -> int:
        """Where its first element lies."""
        return self.base + self.stored.phase

    def cut(self, axis: int, first: int, count: int) -> Side:
        """Some places of an axis, counted from the last one backwards; all where it repeats or is none."""
        stored = self.stored
        if -axis > len(stored.shape) - self.planar or stored.shape[axis] == 1:
            return self
        at = self.address + first * stored.strides[axis]
        shape = list(stored.shape)
        shape[axis] = count
        phase = at % VECTOR_BYTES
        return replace(self, stored=replace(stored, shape=tuple(shape), phase=phase), base=at - phase)

    def operand(self) -> Operand:
        """How it lies in memory."""
        item = self.stored.dtype.itemsize
        return Operand(self.stored.shape, self.stored.dtype, tuple(s // item for s in self.stored.strides))


@dataclass(frozen=True)
class Panel:
    """Product of a panel, and the numbers of its first matrix and of its first row in the whole."""

    product: GemmProblem
    left: Side
    right: Side
    first_matrix: int
    first_row: int


@dataclass(frozen=True)
class _Shares:
    """Shares of what is reduced of each row: elements of each, how many there are, and threads that fold one. `down`:
    what is reduced lies apart, since the product lies as it is returned.
    """

    extent: int
    parts: int
    lanes: int
    down: bool

    @classmethod
    def of(cls, problem: GemmReduceProblem) -> _Shares:
        down = problem.return_c and problem.over_rows
        whole = Panels.of(problem, problem.accumulate.itemsize).extent
        lanes = 1 if down else next((lanes for longest, lanes in _LANES if whole <= longest), _MOST_LANES)
        return cls(_FOLDED * lanes, -(-whole // (_FOLDED * lanes)), lanes, down)


def panel_bytes(problem: GemmReduceProblem, itemsize: int) -> int:
    """Return bytes of the product that are held at once, at most, beside one that is returned."""
    return 0 if problem.return_c else min(PANEL, Panels.of(problem, itemsize).nbytes)


def pass_seconds(problem: GemmReduceProblem, spec: DeviceSpec, itemsize: int) -> float:
    """Return seconds that the pass over the product takes, beside making it."""
    nbytes = Panels.of(problem, itemsize).nbytes
    panels = 1 if problem.return_c else -(-nbytes // PANEL)
    return (1 + panels) * LAUNCH_S + nbytes / (BANDWIDTH * spec.sm_count / MEASURED_SMS)


def turned(problem: GemmReduceProblem) -> bool:
    """Whether the transposed product is made: where columns would be what lies together, and nobody asks for it."""
    return problem.over_rows and not problem.return_c


def sides_of(problem: GemmReduceProblem, a: Side, b: Side) -> tuple[Side, Side]:
    """The operands of the product that is made, left and right."""
    if not turned(problem):
        return a, b
    return replace(b, trans=_TRANSPOSED[b.trans]), replace(a, trans=_TRANSPOSED[a.trans])


def lying_sides(problem: GemmReduceProblem) -> tuple[Side, Side]:
    """Operands that lie as the problem says, at no address."""
    planar = problem.planar
    return Side.lying(problem.a, problem.trans_a, planar=planar), Side.lying(problem.b, problem.trans_b, planar=planar)


def whole_product(problem: GemmReduceProblem) -> GemmProblem:
    """The product that is made, of all panels together."""
    return _product(problem, *sides_of(problem, *lying_sides(problem)))


def panels_of(problem: GemmReduceProblem, a: Side, b: Side, itemsize: int) -> Iterator[Panel]:
    """Yield the panels of the product of both operands."""
    whole_left, whole_right = sides_of(problem, a, b)
    if problem.return_c:
        yield Panel(_product(problem, whole_left, whole_right), whole_left, whole_right, 0, 0)
        return
    panels = Panels.of(problem, itemsize)
    axis = -2 - len(problem.batch_shape)
    for first, places, row, rows in panels:
        left, right = whole_left.cut(-2 if whole_left.trans in "NR" else -1, row, rows), whole_right
        if problem.batch_shape:
            left, right = (side.cut(axis, first, places) for side in (left, right))
        yield Panel(_product(problem, left, right), left, right, first * panels.rest, row)


def _product(problem: GemmReduceProblem, left: Side, right: Side) -> GemmProblem:
    return GemmProblem.build(
        left.operand(), right.operand(), alpha=problem.alpha, trans_a=left.trans, trans_b=right.trans,
        layout=problem.layout, compute=problem.compute,
    )  # fmt: skip


def reduce_panels(
    launcher: Launcher,
    problem: GemmReduceProblem,
    a: Any,
    b: Any,
    results: dict[str, Any],
    dtype: np.dtype[Any],
    multiply: Multiply,
) -> None:
    """Writes the reductions of alpha op(a) op(b) into `results`, of what `multiply` makes of it in elements of `dtype`
    (real where it is planar); and the product itself as "c" where the problem returns it.
    """
    side_a = Side(*StoredArray.of(launcher, a), problem.trans_a, problem.planar)
    side_b = Side(*StoredArray.of(launcher, b), problem.trans_b, problem.planar)
    itemsize = problem.accumulate.itemsize
    shares = _Shares.of(problem)
    length = shares.parts * (problem.batch if problem.over_batch else 1)
    partials = Partials.allocate(launcher, problem, length, length)
    for panel in panels_of(problem, side_a, side_b, itemsize):
        made = results["c"] if problem.return_c else launcher.empty(panel.product.result_shape, dtype)
        if not contiguous(made):
            made = launcher.empty(panel.product.result_shape, dtype)
        multiply(panel.product, panel.left, panel.right, made)
        _fold(launcher, problem, panel, made, partials, shares)
        if problem.return_c and made is not results["c"]:
            results["c"][...] = made
    combine(launcher, problem, partials, results)


def _fold(
    launcher: Launcher, problem: GemmReduceProblem, panel: Panel, made: Any, partials: Partials, shares: _Shares
) -> None:
    """Partials of a panel."""
    stored, base = StoredArray.of(launcher, made)
    product, item = panel.product, stored.dtype.itemsize
    shape = (math.prod(product.batch_shape), product.m, product.n)
    flat = replace(
        stored, shape=(*stored.shape[: problem.planar], *shape),
        strides=(*stored.strides[: problem.planar], *(product.n * item * x for x in (product.m, 1)), item),
    )  # fmt: skip
    view = matrix_view(flat, shape, planar=problem.planar).shifted_by(base)
    if shares.down:
        view = view.transposed()
    params = StoredReduceParams(
        d=view.params(), matrices=shape[0], first_matrix=panel.first_matrix, first_row=panel.first_row, rows=view.rows,
        m=problem.n if problem.over_rows else problem.m, n=view.columns, share=shares.extent,
        parts=shares.parts,
        partial=partials.params(launcher), outputs=outputs_of(problem), reduce_batch=problem.over_batch,
    )  # fmt: skip
    epilogue = epilogue_defines(problem)
    defines = {
        "TYPE_X": TYPES[stored.dtype.name],
        "TYPE_ACC": TYPES[problem.accumulate.name],
        "PLANAR": flag(problem.planar),
        "DOWN": flag(shares.down),
        "LANES": str(shares.lanes),
        "REDUCTIONS": epilogue["REDUCTIONS"],
        "PRE_OP": epilogue["PRE_OP"],
    }
    threads = shape[0] * view.rows * shares.parts * shares.lanes
    source = KernelSource("stored_reduce", tuple(defines.items()))
    launcher.launch(source, "stored_reduce", grid=-(-threads // _THREADS), block=_THREADS, shared=0, params=params)
