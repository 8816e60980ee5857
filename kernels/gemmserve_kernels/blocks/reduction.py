"""A large reduction from those of its blocks: where each leaves its part, and how parts become results.

A part is a run of what is reduced: the rows (or columns) of a row (or column) of blocks, of a run of matrices where the
batch is reduced too. Of every part and output there is one partial result, in double where it is a sum: which there
are, and the order in which they are put together, follow from the grid, so that the bits of the results do not depend
on who has computed which block, when, or how often. Of equal elements the first has its place returned, NaN is the
largest and the smallest, and the first of several NaN has its place returned: as the kernels have it for one block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.problem.problem import GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_kernels.blocks.grid import Grid

    Array = np.ndarray[Any, Any]

_ALIGNED: Final = 64
"""Bytes of which places of partial results are multiples."""
_JOIN: Final = {"max": np.maximum, "min": np.minimum, "absmax": np.maximum, "absmin": np.minimum}


class _Place(NamedTuple):
    """Partial results of one name: shape with the parts first, dtype, and where they begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


class BlockReduction:
    """Partial results of a grid of a reduction. Raises ValueError for a grid of another product."""

    def __init__(self, grid: Grid) -> None:
        if grid.reduction is None:
            raise ValueError("not a grid of a reduction")
        self.grid = grid
        self.problem = problem = grid.reduction
        along = grid.down if problem.over_rows else grid.across
        self.parts = along * (len(grid.runs) if problem.over_batch else 1)
        """Partial results of every output."""
        self._along = along
        block = grid.block_problem(0)
        assert isinstance(block, GemmReduceProblem)
        self._places: dict[str, _Place] = {}
        end = 0
        for name in block.reductions:
            stored, dtype = block.results[name]
            planes = stored[: len(stored) - len(block.outputs_shape)]
            shape = (self.parts, *planes, *problem.outputs_shape)
            self._places[name] = _Place(shape, dtype, end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
        self.nbytes = end
        """Bytes of all partial results."""

    def arrays(self, memory: Any) -> dict[str, Array]:
        """Return the partial results by name, in `nbytes` bytes of memory: parts first, then as the whole's results."""
        return {
            name: np.ndarray(place.shape, place.dtype, memory, place.offset) for name, place in self._places.items()
        }

    def window(self, index: int, name: str) -> tuple[int | slice, ...]:
        """Return where a block's result goes among the partial results of that name."""
        run, row, column = self.grid.place(index)
        block = self.grid.block(index)
        number, kept = (row, block.columns) if self.problem.over_rows else (column, block.rows)
        matrices = () if self.problem.over_batch else block.matrices
        if self.problem.over_batch:
            number += run * self._along
        place = self._places[name]
        planes = (slice(None),) * (len(place.shape) - 2 - len(matrices))
        return (number, *planes, *matrices, kept)

    def combine(self, partials: Mapping[str, Array], results: Mapping[str, Array]) -> None:
        """Write the results from `partials` (`arrays`), each block's of which are there, into arrays of the whole's
        shapes and dtypes, of any strides. Between parts there is a `checkpoint`.
        """
        with np.errstate(all="ignore"):
            for name in self.problem.reductions:
                out = results[name]
                if name.startswith("arg"):
                    out[...] = self._argument(name, partials)
                elif name in _JOIN:
                    out[...] = self._folded(partials[name], _JOIN[name])
                else:
                    total = self._folded(partials["sum" if name == "mean" else name], np.add)
                    out[...] = total / self.problem.extent if name == "mean" else total

    def _folded(self, parts: Array, join: np.ufunc) -> Array:
        found = parts[0].copy()
        for part in parts[1:]:
            checkpoint()
            join(found, part, out=found)
        return np.asarray(found)

    def _argument(self, name: str, partials: Mapping[str, Array]) -> Array:
        """Return places among all that is reduced, of the best values, which lie beside those within each part."""
        largest = name == "argmax"
        magnitude = "abs" if self.problem.value_dtype.kind == "c" else ""
        values, places = partials[magnitude + name.removeprefix("arg")], partials[name]
        best, found = values[0].copy(), self._within_whole(0, places[0])
        for part in range(1, self.parts):
            checkpoint()
            value, place = values[part], self._within_whole(part, places[part])
            nan = np.isnan(best)
            better = (value > best) if largest else (value < best)
            better |= np.isnan(value) & ~nan
            equal = (value == best) | (np.isnan(value) & nan)
            better |= equal & (place < found)
            np.copyto(best, value, where=better)
            np.copyto(found, place, where=better)
        return found

    def _within_whole(self, part: int, places: Array) -> Array:
        """Return places within a part as places in the whole: of rows (or columns), or of those of all matrices."""
        problem, grid = self.problem, self.grid
        run, number = divmod(part, self._along)
        length, step = (problem.m, grid.rows) if problem.over_rows else (problem.n, grid.columns)
        start = number * step
        if not problem.over_batch:
            return places + start
        first = 0
        for piece, extent in zip(grid.runs[run], problem.batch_shape, strict=True):
            first = first * extent + piece.start
        matrix, line = np.divmod(places, min(step, length - start))
        return np.asarray((first + matrix) * length + start + line)
