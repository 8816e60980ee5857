"""Reductions of a product on the CPU: a block of C at a time, never all of it, every reduction in the same pass.

Sums run in double precision whatever the data, extremes in the product's own; blocks come in a fixed order, so results
are the same bit for bit from run to run.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.cpu import gram
from gemmserve_kernels.algorithms.cpu.gemm import Planes, Product, Scratch, scalar
from gemmserve_kernels.device.interruption import checkpoint, pieces
from gemmserve_kernels.problem.operand import real_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_kernels.algorithms.cpu.gemm import Block
    from gemmserve_kernels.problem.problem import GemmReduceProblem

    Array = np.ndarray[Any, Any]

_BLOCK_BYTES: Final = 8 << 20
"""Bytes of a block of C; squares and magnitudes of a block are as large again, in double precision twice."""
_BLOCK_WORK: Final = 1 << 29
"""Multiplications of a block, some hundredths of a second: of what is reduced no caller can ask for a part."""


def run_gemm_reduce(problem: GemmReduceProblem, a: Array, b: Array, out: Mapping[str, Array]) -> None:
    """Writes every result of `problem` into the array of its name, of any strides. Shares no memory with a and b."""
    if problem.vanishes:
        for array in out.values():
            for piece in pieces(array, _BLOCK_BYTES):
                piece[...] = 0
        return
    with np.errstate(all="ignore"):
        squares = gram.sum_of_squares(problem, a, b)
        if squares is not None:
            Planes.of(out["sumsq"], planar=False).store(squares)
            return
    product = Product(problem, a, b)
    states = {name: _STATES[name](problem) for name in problem.reductions}
    stored = Planes.of(out["c"], problem.planar) if problem.return_c else None
    scratch = Scratch(product.dtype)
    alpha = scalar(problem.alpha, product.dtype)
    with np.errstate(all="ignore"):
        if math.prod(product.extents):
            for block in product.blocks(_BLOCK_BYTES, _BLOCK_WORK):
                tile = scratch.get(tuple(part.stop - part.start for part in block))
                product.multiply(block, tile)
                if problem.alpha != 1:
                    np.multiply(tile, alpha, out=tile)
                if stored is not None:
                    stored.at(_whole(block, stored.shape)).store(tile)
                panel = _Panel(problem, block, tile)
                for state in states.values():
                    checkpoint()
                    state.update(panel)
        for name, state in states.items():
            value = state.value()
            planar = problem.planar and value.dtype.kind == "c"
            Planes.of(out[name], planar).store(value)


def _whole(block: Block, shape: tuple[int, ...]) -> Block:
    return tuple(part if extent > 1 else slice(None) for part, extent in zip(block, shape, strict=True))


class _Panel:
    """One block of the product after pre_op, and where its results go."""

    def __init__(self, problem: GemmReduceProblem, block: Block, tile: Array) -> None:
        self.values = _PRE_OPS[problem.pre_op](tile)
        *batch, rows, columns = block
        reduced, kept = (rows, columns) if problem.over_rows else (columns, rows)
        axis = -2 if problem.over_rows else -1
        self.over_batch = problem.over_batch
        self.axes = (*range(len(batch)), axis) if problem.over_batch else (axis,)
        self.outputs = (kept,) if problem.over_batch else (*batch, kept)
        length = problem.m if problem.over_rows else problem.n
        first_matrix = 0
        if problem.over_batch:
            for part, extent in zip(batch, problem.batch_shape, strict=True):
                first_matrix = first_matrix * extent + part.start
        self.first_index = first_matrix * length + reduced.start
        """Index, among all that is reduced, of the first element here; the others follow in memory order."""

    @cached_property
    def magnitudes(self) -> Array:
        """|values|."""
        return np.asarray(np.abs(self.values))

    @cached_property
    def ordered(self) -> Array:
        """Return the values that arguments compare: magnitudes of complex values, real values as they are."""
        return self.magnitudes if self.values.dtype.kind == "c" else self.values

    def lined_up(self, values: Array) -> tuple[Array, int]:
        """`values` with all that is reduced on one axis, in index order, and that axis."""
        axis = self.axes[-1]
        if not self.over_batch:
            return values, axis
        if axis == -1:
            values = values.swapaxes(-1, -2)
        return values.reshape(math.prod(values.shape[:-1]), values.shape[-1]), 0


_PRE_OPS: Final[Mapping[str, Any]] = {"identity": lambda tile: tile, "abs": np.abs, "square": np.square}


class _Sum:
    """sum: in double precision."""

    def __init__(self, problem: GemmReduceProblem) -> None:
        self.problem = problem
        self.total = np.zeros(problem.outputs_shape, self.wide(problem.value_dtype))

    def wide(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)

    def update(self, panel: _Panel) -> None:
        part = self.total[panel.outputs]
        np.add(part, np.add.reduce(panel.values, axis=panel.axes, dtype=self.total.dtype), out=part)

    def value(self) -> Array:
        return self.total


class _Mean(_Sum):
    """mean: the sum over the count."""

    def value(self) -> Array:
        return np.asarray(self.total / self.problem.extent)


class _SumSquares(_Sum):
    """sumsq: the sum of |values|^2."""

    def wide(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return real_dtype(super().wide(dtype))

    def update(self, panel: _Panel) -> None:
        values, part = panel.values, self.total[panel.outputs]
        squares = np.square(values.real, dtype=np.float64)
        if values.dtype.kind == "c":
            squares += np.square(values.imag, dtype=np.float64)
        np.add(part, np.add.reduce(squares, axis=panel.axes), out=part)


class _Extreme:
    """max, min, absmax, absmin: NaN wins, as in NumPy."""

    def __init__(self, problem: GemmReduceProblem, ufunc: np.ufunc, *, magnitudes: bool) -> None:
        start = -np.inf if ufunc is np.maximum else np.inf
        self.best = np.full(problem.outputs_shape, start, real_dtype(problem.accumulate))
        self.ufunc = ufunc
        self.magnitudes = magnitudes

    def update(self, panel: _Panel) -> None:
        part = self.best[panel.outputs]
        values = panel.magnitudes if self.magnitudes else panel.values
        self.ufunc(part, self.ufunc.reduce(values, axis=panel.axes), out=part)

    def value(self) -> Array:
        return self.best


class _Argument:
    """argmax, argmin: the first index of the best value, or of the first NaN, as in NumPy."""

    def __init__(self, problem: GemmReduceProblem, *, largest: bool) -> None:
        start = -np.inf if largest else np.inf
        self.best = np.full(problem.outputs_shape, start, real_dtype(problem.accumulate))
        self.index = np.zeros(problem.outputs_shape, np.int64)
        self.largest = largest

    def update(self, panel: _Panel) -> None:
        values, axis = panel.lined_up(panel.ordered)
        local = (np.argmax if self.largest else np.argmin)(values, axis=axis, keepdims=True)
        found = np.take_along_axis(values, local, axis).squeeze(axis)
        best, index = self.best[panel.outputs], self.index[panel.outputs]
        better = (found > best) if self.largest else (found < best)
        better |= np.isnan(found) & ~np.isnan(best)
        np.copyto(best, found, where=better)
        np.copyto(index, local.squeeze(axis) + panel.first_index, where=better)

    def value(self) -> Array:
        return self.index


_STATES: Final[Mapping[str, Any]] = {
    "sum": _Sum,
    "mean": _Mean,
    "sumsq": _SumSquares,
    "max": lambda problem: _Extreme(problem, np.maximum, magnitudes=False),
    "min": lambda problem: _Extreme(problem, np.minimum, magnitudes=False),
    "absmax": lambda problem: _Extreme(problem, np.maximum, magnitudes=True),
    "absmin": lambda problem: _Extreme(problem, np.minimum, magnitudes=True),
    "argmax": lambda problem: _Argument(problem, largest=True),
    "argmin": lambda problem: _Argument(problem, largest=False),
}
