"""A product cut into panels: parts of its result that can be computed one after the other.

Between two panels a worker can stop (the job was cancelled), show that it gets on, or have made room for less memory.
How a product is cut follows from the product and the number of panels alone, so a second run gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmserve_kernels import GemmProblem, GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_STEP = 64  # extents of panels are multiples: the micro-kernels of every BLAS divide it

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of a product along one of its axes; `edges` are the panels' borders."""

    axis: str
    """"batch" (its first axis that is longer than 1), "m" or "n"."""
    position: int
    """Number of batch axes that come after it, where it is one."""
    edges: tuple[int, ...]

    def __len__(self) -> int:
        """Panels."""
        return len(self.edges) - 1


def plan_cut(problem: GemmProblem | GemmReduceProblem, count: int) -> Cut | None:
    """A cut into about `count` panels, never more; None where only one would come of it.

    Along the axis that gives most panels; of several the batch, then the one along which panels of the result are
    contiguous. An axis that is reduced is never cut: the order of summation stays what it was.
    """
    if count < 2:
        return None
    found: list[Cut] = []
    reduced = () if isinstance(problem, GemmProblem) else problem.axis
    if "batch" not in reduced:
        for index, extent in enumerate(problem.batch_shape):
            if extent > 1:
                found.append(Cut("batch", len(problem.batch_shape) - 1 - index, _edges(extent, count, 1)))
                break
    inner = ("n", "m") if isinstance(problem, GemmProblem) and problem.order == "F" else ("m", "n")
    extents = {"m": problem.m, "n": problem.n}
    found += [Cut(axis, 0, _edges(extents[axis], count, _STEP)) for axis in inner if axis not in reduced]
    longest = max(found, key=len, default=None)  # the first of several
    return None if longest is None or len(longest) < 2 else longest


def plan_grid(problem: GemmProblem | GemmReduceProblem, count: int) -> tuple[Cut, ...]:
    """Cuts along several axes that give about `count` panels together, as square as they can be; none where one panel
    is all there is.

    The first cut is the outermost. Square panels read least of the operands for each multiplication. An axis that is
    reduced is never cut.
    """
    cuts: list[Cut] = []
    reduced = () if isinstance(problem, GemmProblem) else problem.axis
    if "batch" not in reduced:
        for index, extent in enumerate(problem.batch_shape):
            if extent > 1 and count > 1:
                cuts.append(Cut("batch", len(problem.batch_shape) - 1 - index, _edges(extent, count, 1)))
                count = -(-count // len(cuts[-1]))
    extents = {"n": problem.n, "m": problem.m}
    free = [axis for axis in extents if axis not in reduced]
    side = math.sqrt(problem.m * problem.n / max(1, count)) if len(free) == 2 else 0.0
    for axis in free:
        parts = min(count, max(1, round(extents[axis] / side))) if side else count
        cut = Cut(axis, 0, _edges(extents[axis], parts, _STEP))
        if len(cut) > 1:
            cuts.append(cut)
            count = -(-count // len(cut))
        side = 0.0  # what is left falls to the other axis
    return tuple(cut for cut in cuts if len(cut) > 1)


def grid(
    problem: GemmProblem | GemmReduceProblem,
    cuts: tuple[Cut, ...],
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
) -> Iterator[tuple[Arrays, Arrays]]:
    """Operands and results of each panel of `plan_grid`."""
    if not cuts:
        yield dict(operands), dict(results)
        return
    for some, outs in panels(problem, cuts[0], operands, results):
        yield from grid(problem, cuts[1:], some, outs)


def panels(
    problem: GemmProblem | GemmReduceProblem, cut: Cut, operands: Mapping[str, Any], results: Mapping[str, Any]
) -> Iterator[tuple[Arrays, Arrays]]:
    """Operands and results of each panel: views, of NumPy's arrays or CuPy's."""
    for low, high in zip(cut.edges, cut.edges[1:], strict=False):
        piece = slice(low, high)
        yield (
            {name: _operand(problem, name, array, cut, piece) for name, array in operands.items()},
            {name: _view(array, _result_axis(problem, name, cut), piece) for name, array in results.items()},
        )


def _edges(extent: int, count: int, step: int) -> tuple[int, ...]:
    width = max(1, -(-extent // count))
    width = -(-width // step) * step
    return (*range(0, extent, width), extent) if extent else (0, 0)


def _operand(problem: GemmProblem | GemmReduceProblem, name: str, array: Any, cut: Cut, piece: slice) -> Any:
    """The part of an operand that a panel needs: all of it where the cut does not concern it, or it is broadcast."""
    transposed = {"a": problem.trans_a in "TC", "b": problem.trans_b in "TC", "c": False}[name]
    rows, columns = (-1, -2) if transposed else (-2, -1)
    if cut.axis == "batch":
        axis = -3 - cut.position
    elif name == "c":
        axis = {"m": rows, "n": columns}[cut.axis]
    elif (name, cut.axis) in {("a", "m"), ("b", "n")}:
        axis = rows if name == "a" else columns
    else:
        return array
    if array.ndim - problem.planar < -axis or array.shape[axis] == 1:
        return array
    return _view(array, axis, piece)


def _result_axis(problem: GemmProblem | GemmReduceProblem, name: str, cut: Cut) -> int:
    matrix = isinstance(problem, GemmProblem) or name == "c"
    if cut.axis == "batch":
        return -(2 if matrix else 1) - 1 - cut.position
    return -2 if matrix and cut.axis == "m" else -1


def _view(array: Any, axis: int, piece: slice) -> Any:
    index = [slice(None)] * array.ndim
    index[axis] = piece
    return array[tuple(index)]
