"""Grid of a large product: blocks of its result, each a product of its own, that follow from the problem alone.

Blocks of a reduction are reductions themselves, of their part of the product, which `blocks.reduction` puts together.

A block is alpha op(A)[rows, :] op(B)[:, columns] + beta C[rows, columns] with all of k, computed as any product of its
shape from panels of the operands that lie as `operand_panel` has them. Nothing about it depends on other blocks, on how
much memory there is, or on who computes it: so the bits of the result do not either.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem

if TYPE_CHECKING:
    from collections.abc import Iterator

SIDE: Final = 4096
"""Rows and columns of a block. On an H200 with copies beneath, complex64 32768^3 took 1.42 s so and 1.58 s in blocks of
2048."""
_FLOPS_PER_VOLUME: Final = 1 << 7
"""Operations from which a product is cut, of side^3: 2^43 with sides of 4096, a twentieth of a second on an H200."""
_STEP: Final = 256
"""Extents of blocks are multiples, where they are as long: the tiles by which algorithms judge accuracy divide them
(`algorithms.common.verdict`), and those of kernels."""
_LEAST_DEPTH: Final = 8
"""Part of a side that k is at least where a reduction is cut: blocks of fewer operations take less time than to send
them, and their partial results more bytes than the operands."""
_AREAS: Final = 1 << 9
"""Bytes of operands, in squares of a side, from which reductions are cut that need no product: 2^33 with sides of 4096.
They read every element once, so what is on a device is through before a block is sent."""
_FEW: Final = 2
"""Blocks along m or n up to which sides are halved: fewer could neither be spread nor streamed."""

Index = tuple[slice, ...]


@dataclass(frozen=True)
class GridRule:
    """Rule by which products are cut: `side` rows and columns a block, at least 1."""

    side: int = SIDE

    @property
    def min_flops(self) -> int:
        """Operations (`GemmProblem.flops`) from which a product is cut."""
        return _FLOPS_PER_VOLUME * self.side**3


DEFAULT_RULE: Final = GridRule()


@dataclass(frozen=True)
class Block:
    """Part of the result: `rows` and `columns` of the matrices whose place along each axis of the batch is in
    `matrices`, one slice an axis.
    """

    index: int
    matrices: Index
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        count = math.prod(part.stop - part.start for part in self.matrices)
        return count, self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


@dataclass(frozen=True)
class Grid:
    """Blocks of `problem`, numbered matrices first, then rows, then columns; at least one.

    `rows`, `columns`: of a block, but for the last ones. `matrices`: of a block along the batch's last axis; along the
    other axes it has one.
    """

    problem: GemmProblem
    rows: int
    columns: int
    matrices: int
    reduction: GemmReduceProblem | None = None
    """The reduction whose product `problem` is, where the blocks are of one."""

    @classmethod
    def of(cls, problem: GemmProblem | GemmReduceProblem, rule: GridRule = DEFAULT_RULE) -> Grid | None:
        """Return the grid of a product, or of a reduction, that is large enough; None of others, of reductions
        whose blocks would have little to do, and where it would have one block.
        """
        if problem.flops() < rule.min_flops or not problem.alpha:
            return None
        reduction: GemmReduceProblem | None = None
        if isinstance(problem, GemmReduceProblem):
            reduction = problem
            if problem.k * _LEAST_DEPTH < rule.side:
                return None
            if _needs_no_product(problem) and problem.a.nbytes + problem.b.nbytes < _AREAS * rule.side**2:
                return None
            problem = problem.product
        if 0 in problem.result_shape:
            return None
        side = rule.side
        if problem.batch == 1 and min(problem.m, problem.n) <= _FEW * side:
            side = max(1, side // 2)
        rows, columns = _extent(problem.m, side), _extent(problem.n, side)
        alike = problem.batch_shape[-1] if problem.batch_shape else 1
        matrices = max(1, min(alike, rule.side**2 // (rows * columns)))
        grid = cls(problem, rows, columns, matrices, reduction)
        return grid if grid.count > 1 else None

    @classmethod
    def with_sides(cls, problem: GemmProblem | GemmReduceProblem, sides: tuple[int, int, int]) -> Grid:
        """Return the grid whose `sides` somebody has noted. Raises ValueError where one is less than 1."""
        if min(sides) < 1:
            raise ValueError(f"a block of {sides} rows, columns and matrices")
        if isinstance(problem, GemmReduceProblem):
            return cls(problem.product, *sides, problem)
        return cls(problem, *sides)

    @property
    def sides(self) -> tuple[int, int, int]:
        """Rows, columns and matrices of a block: with the problem, all that there is to know."""
        return self.rows, self.columns, self.matrices

    @property
    def down(self) -> int:
        """Blocks from the first row to the last."""
        return -(-self.problem.m // self.rows)

    @property
    def across(self) -> int:
        """Blocks from the first column to the last."""
        return -(-self.problem.n // self.columns)

    @cached_property
    def runs(self) -> tuple[Index, ...]:
        """Matrices of the batch that blocks have together."""
        *outer, last = self.problem.batch_shape or (1,)
        pieces = [slice(low, min(low + self.matrices, last)) for low in range(0, last, self.matrices)]
        if not self.problem.batch_shape:
            return ((),)
        ones = [[slice(i, i + 1) for i in range(extent)] for extent in outer]
        return tuple(itertools.product(*ones, pieces))

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.runs) * self.down * self.across

    def block(self, index: int) -> Block:
        """Return a block by its number. Raises IndexError."""
        run, row, column = self.place(index)
        return Block(
            index,
            self.runs[run],
            _piece(row, self.rows, self.problem.m),
            _piece(column, self.columns, self.problem.n),
        )

    def place(self, index: int) -> tuple[int, int, int]:
        """Return numbers of a block's run of matrices, of its rows and of its columns. Raises IndexError."""
        if not 0 <= index < self.count:
            raise IndexError(f"block {index} of {self.count}")
        rest, column = divmod(index, self.across)
        run, row = divmod(rest, self.down)
        return run, row, column

    def at(self, run: int, row: int, column: int) -> int:
        """Return the number of the block at a place."""
        return (run * self.down + row) * self.across + column

    def row_panel(self, index: int) -> int:
        """Return the number of the panel of A that a block needs, below `row_panels`; the same one for matrices over
        which A is broadcast.
        """
        run, row, _ = self.place(index)
        return self._own(run, self.problem.a) * self.down + row

    def column_panel(self, index: int) -> int:
        """Return the number of the panel of B, likewise."""
        run, _, column = self.place(index)
        return self._own(run, self.problem.b) * self.across + column

    def panel(self, side: Literal["a", "b"], index: int) -> int:
        """Return the number of the panel of A or B that a block needs."""
        return self.row_panel(index) if side == "a" else self.column_panel(index)

    def flops(self, index: int) -> int:
        """Return the operations of a block: those of all make the problem's."""
        matrices, rows, columns = self.block(index).shape
        return (8 if self.problem.dtype.kind == "c" else 2) * matrices * rows * columns * self.problem.k

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Every block once, as a wavefront: when so many panels of A and of B have come in turns, all blocks of them
        are before the next one. One run of matrices after the other.
        """
        return tuple(
            self.at(run, row, column) for run in range(len(self.runs)) for row, column in shells(self.down, self.across)
        )

    def operand_panel(self, side: Literal["a", "b"], index: int) -> Index:
        """Return the part of A or B, as stored, that a block needs, as an index into the array."""
        block, problem = self.block(index), self.problem
        operand, trans = (problem.a, problem.trans_a) if side == "a" else (problem.b, problem.trans_b)
        across = slice(None)
        line = (block.rows, across) if side == "a" else (across, block.columns)
        return self._index(operand, block, line[::-1] if trans in {"T", "C"} else line)

    def c_window(self, index: int) -> Index | None:
        """Return the part of C that belongs to a block, likewise; None where the product has none."""
        problem = self.problem
        if problem.c is None:
            return None
        block = self.block(index)
        return self._index(problem.c, block, (block.rows, block.columns))

    def window(self, index: int) -> Index:
        """Return the part of the result that a block is, as an index into its array."""
        block = self.block(index)
        planes = (slice(None),) * (len(self.problem.result_shape) - len(block.matrices) - 2)
        return (*planes, *block.matrices, block.rows, block.columns)

    def block_problem(self, index: int) -> GemmProblem | GemmReduceProblem:
        """Return the product or reduction that a block is, of operands that lie as fresh copies of their panels."""
        product = self._block_product(index)
        if self.reduction is None:
            return product
        return replace(
            self.reduction,
            **{name: getattr(product, name) for name in ("a", "b", "m", "n", "batch_shape")},
            reductions=partial_names(self.reduction),
            partial=True,
        )

    def window_bytes(self, index: int) -> int:
        """Return the bytes of a block's results, and of its part of C."""
        block = self.block_problem(index)
        if isinstance(block, GemmReduceProblem):
            return sum(math.prod(shape) * dtype.itemsize for shape, dtype in block.results.values())
        return block.result.nbytes + (block.c.nbytes if block.c is not None else 0)

    def _block_product(self, index: int) -> GemmProblem:
        problem = self.problem
        c = self.c_window(index)
        matrices, rows, columns = self.block(index).shape
        shape = (*(1 for _ in problem.batch_shape[:-1]), matrices) if problem.batch_shape else ()
        return replace(
            problem,
            a=panel_operand(problem.a, self.operand_panel("a", index)),
            b=panel_operand(problem.b, self.operand_panel("b", index)),
            c=None if c is None or problem.c is None else panel_operand(problem.c, c),
            m=rows,
            n=columns,
            batch_shape=shape,
        )

    def panel_bytes(self, side: Literal["a", "b"], index: int) -> int:
        """Return the bytes of the panel of A or B that a block needs."""
        operand = self.problem.a if side == "a" else self.problem.b
        return panel_operand(operand, self.operand_panel(side, index)).nbytes

    def _own(self, run: int, operand: Operand) -> int:
        """Return the number of a run among those that differ for an operand."""
        return self._owned[operand is self.problem.b][run]

    @cached_property
    def _owned(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = []
        full = slice(None)
        for operand in (self.problem.a, self.problem.b):
            numbers: dict[tuple[tuple[Any, Any], ...], int] = {}
            parts = [self._index(operand, Block(0, run, full, full), (full, full)) for run in self.runs]
            keys = [tuple((part.start, part.stop) for part in index) for index in parts]
            found.append(tuple(numbers.setdefault(key, len(numbers)) for key in keys))
        return found[0], found[1]

    def _index(self, operand: Operand, block: Block, line: tuple[slice, slice]) -> Index:
        """Return the index of a part of an operand, whole along axes over which it is broadcast."""
        planes = 1 if self.problem.planar else 0
        extents = operand.shape[planes:]
        own = extents[:-2]
        batch = block.matrices[len(block.matrices) - len(own) :] if own else ()
        parts = (*batch, *line)
        index = [slice(None) if extent == 1 else part for extent, part in zip(extents, parts, strict=True)]
        return (slice(None),) * planes + tuple(index)


def partial_names(problem: GemmReduceProblem) -> tuple[str, ...]:
    """Return the reductions of a block that those of the whole are made of: sums for means, and the values at the
    places of the largest and the smallest.
    """
    magnitude = "abs" if problem.value_dtype.kind == "c" else ""
    found = []
    for name in problem.reductions:
        found.append("sum" if name == "mean" else name)
        if name.startswith("arg"):
            found.append(magnitude + name.removeprefix("arg"))
    return tuple(dict.fromkeys(found))


def _needs_no_product(problem: GemmReduceProblem) -> bool:
    """Whether some device may reduce it without its product (`dispatch.routes.WITHOUT_PRODUCT`): sums and means, and
    sums of squares of a product with little depth.
    """
    by_product = problem.config is not None and problem.config.algorithm == "product"
    if problem.pre_op != "identity" or problem.return_c or by_product:
        return False
    names = set(problem.reductions)
    if names <= {"sum", "mean"}:
        return True
    return names <= {"sum", "mean", "sumsq"} and 4 * problem.k * (problem.m + problem.n) <= problem.m * problem.n


def panel_operand(operand: Operand, index: Index) -> Operand:
    """Return how a copy of a part of an operand lies: contiguous, in Fortran order where the operand's columns are
    closer together than its rows, else in C order.
    """
    shape = tuple(len(range(*part.indices(extent))) for part, extent in zip(index, operand.shape, strict=True))
    return Operand.contiguous(shape, operand.dtype, panel_order(operand))


def panel_order(operand: Any) -> Literal["C", "F"]:
    """Return the order in which panels of an operand, or of an array, are copied."""
    rows, columns = (abs(stride) for stride in operand.strides[-2:])
    return "F" if rows < columns else "C"


def _extent(whole: int, side: int) -> int:
    """Return the extent of blocks along an axis: about equal ones, none longer than `side`."""
    if whole <= side:
        return max(1, whole)
    step = math.gcd(_STEP, side)
    even = -(-whole // -(-whole // side))
    return min(side, -(-even // step) * step)


def _piece(number: int, step: int, end: int) -> slice:
    return slice(number * step, min((number + 1) * step, end))


def shells(down: int, across: int) -> Iterator[tuple[int, int]]:
    """Yield the places of a grid by the larger of row and column."""
    for shell in range(max(down, across)):
        if shell < across:
            yield from ((row, shell) for row in range(min(shell, down)))
        if shell < down:
            yield from ((shell, column) for column in reversed(range(min(shell + 1, across))))
