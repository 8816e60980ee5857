"""Plan of a contraction: an equation and a tree become the steps of a program, each a product on views.

Every contraction of two operands is one batched gemm where a label is summed, else one elementwise product. A gemm
needs each of its three groups of labels (rows, columns, summed) as one axis with one stride. A group that lies so in
memory is a view and costs nothing; rows and columns that do not are cut, and the rest becomes part of the batch. Where
that costs more than a pass through memory, or summed labels lie apart, the operand is copied into order first. Which of
these is chosen, and in which order each result lies, is decided by estimated time, step by step, with a look at the
contraction that takes the result next.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from gemmserve import _errors
from gemmserve._contraction import paths
from gemmserve._contraction.equation import Equation, parse
from gemmserve._handles.view import MAX_NDIM, Base, View, contiguous

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from gemmserve._handles.view import Part

Seen: TypeAlias = tuple[int, View]
"""A view of a value: the number of an operand or, after those, of a step; and which of its elements."""

LAUNCH: Final = 1 << 14
"""Cost of a step besides its work; costs are in elements moved. Short: on the CPU a step is microseconds."""

BATCH: Final = 64
"""Cost of one more product in a batch."""

TILE: Final = 8
"""Rows, columns and summed elements that a small product takes as many as."""


@dataclass(frozen=True)
class Operand:
    """An operand of an equation: an array that is on the server as a view of what is stored, or one that is not."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    view: View | None = None
    """None: not yet sent, so that its axes may be laid in any order, and its elements be cast."""


@dataclass(frozen=True)
class Step:
    """A step of a program: gemm, multiply, add (a copy) or sum; its result lies in C order."""

    op: str
    operands: Mapping[str, Seen]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...] = ()
    """Axes that a sum is over."""

    @property
    def result(self) -> Base:
        """The array that the step makes."""
        return Base(self.shape, self.dtype)


@dataclass(frozen=True)
class Laid:
    """An operand that was not yet sent: how it is to be."""

    axes: tuple[int, ...]
    """Order of its axes, outermost first, of which it is then a C-ordered array."""
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Plan:
    """Steps, and where the result is after the last of them; without a step it is a view of the one operand."""

    equation: Equation
    pairs: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    result: Seen
    dtype: np.dtype[Any]
    laid: Mapping[int, Laid]
    flops: int
    """Real additions and multiplications of the gemms."""
    largest: int
    """Most elements of a step's result."""
    peak_nbytes: int
    """Most bytes of operands and results that are needed at one time."""

    @property
    def copies(self) -> int:
        """Number of steps that only move elements."""
        return sum(step.op == "add" for step in self.steps)

    @property
    def path(self) -> list[Any]:
        """The order in the form of numpy.einsum_path, which `optimize` takes."""
        left = [*range(len(self.equation.inputs))]
        found: list[Any] = ["einsum_path"]
        for number, pair in enumerate(self.pairs, len(left)):
            found.append(tuple(sorted(map(left.index, pair))))
            left = [*(each for each in left if each not in pair), number]
        return found if self.pairs else [*found, (0,)]

    @property
    def report(self) -> str:
        """Account of the plan in words."""
        count = Counter(step.op for step in self.steps)
        return "\n".join(
            (
                f"operands: {len(self.equation.inputs)}",
                f"steps: {count['gemm']} gemm, {count['multiply']} multiply, {count['sum']} sum, {count['add']} copies",
                f"operations of the products: {self.flops:.3e}",
                f"largest intermediate result: {self.largest:.3e} elements",
                f"needed at one time: {self.peak_nbytes:.3e} bytes",
            )
        )


def plan(equation: Any, operands: Sequence[Operand], *, optimize: Any = True, dtype: Any = None) -> Plan:
    """Return the plan of `equation` (text, or lists of labels, the output's last) for these operands.

    `optimize` as in `paths.find`. `dtype`: of the computation and the result, one that NumPy casts the operands' to
    safely; by default their result type. Raises ParameterInvalid, ShapeMismatch, DtypeUnsupported.
    """
    parsed = parse(equation, [operand.shape for operand in operands])
    common = np.result_type(*(operand.dtype for operand in operands))
    wanted = common if dtype is None else np.dtype(dtype)
    if not np.can_cast(common, wanted, "safe"):
        raise _errors.DtypeUnsupported(
            f"dtype {wanted} does not hold what {common} does", problem={"parameter": "dtype"}
        )
    return _Planner(parsed, operands, wanted, optimize).plan()


@dataclass(frozen=True)
class _Tensor:
    """A value and where its axes are. Axes of length 1 have no label."""

    source: int
    offset: int
    strides: Mapping[str, int]
    dtype: np.dtype[Any]
    conj: bool = False
    part: Part | None = None
    free: bool = False
    """Whether it is an operand that is not yet sent; its strides are those of C order then."""


@dataclass(frozen=True)
class _Next:
    """Knowledge of what takes a value next, by which the order of its axes is chosen."""

    output: tuple[str, ...] | None = None
    """Labels of the result, of the last value."""
    summed: tuple[str, ...] = ()
    """Labels that the next contraction sums; in the order of the other operand where that is known to be one axis."""
    fixed: bool = False
    """Whether the other operand has them in that order."""
    other: float = 0.0
    """Elements of the other operand."""
    batch: frozenset[str] = frozenset()
    """Labels that both have and that stay."""

    def orders(self, labels: Iterable[str]) -> list[list[str]]:
        """Return orders worth a look for labels that may lie as one likes, those as they are among them."""
        given = list(labels)
        if self.output is not None:
            place = {label: number for number, label in enumerate(self.output)}
            return _distinct([sorted(given, key=lambda label: place[label]), given])
        place = {label: number for number, label in enumerate(self.summed)}
        summed = sorted((label for label in given if label in place), key=lambda label: place[label])
        batch = [label for label in given if label in self.batch]
        rest = [label for label in given if label not in place and label not in self.batch]
        return _distinct([batch + rest + summed, batch + summed + rest, given])

    def penalty(self, order: Sequence[str], sizes: Mapping[str, int]) -> float:
        """Return what it costs later that a value lies in this order, in elements moved."""
        volume = _volume(order, sizes)
        if self.output is not None:
            return 0.0 if tuple(order) == self.output else volume / 2
        if not self.summed or not order:
            return 0.0
        copy = 2.0 * volume + LAUNCH
        place = {label: number for number, label in enumerate(order)}
        at = [place[label] for label in self.summed]
        if max(at) - min(at) != len(at) - 1:
            return copy
        cost = 0.0
        if self.fixed and any(q != p + 1 for p, q in pairwise(at)):
            cost += 2.0 * min(volume, self.other) + LAUNCH
        summed = set(self.summed)
        best, current, rows = 1, 1, 1
        for label in order:
            if label in summed or label in self.batch:
                current = 1
            else:
                current *= sizes[label]
                rows *= sizes[label]
                best = max(best, current)
        if rows > best:
            cost += BATCH * rows / best
        if order[-1] in self.batch:
            cost += volume
        return min(cost, copy)


@dataclass(frozen=True)
class _Choice:
    """One way to make a gemm of two values."""

    copied: tuple[bool, bool]
    summed: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    batch: tuple[str, ...]
    swapped: bool
    """Whether the product is B^T A^T, so that the columns lie outside of the rows."""

    @property
    def order(self) -> tuple[str, ...]:
        """Labels of the result as they lie."""
        last = self.columns + self.rows if self.swapped else self.rows + self.columns
        return self.batch + last


@dataclass
class _Planner:
    equation: Equation
    operands: Sequence[Operand]
    dtype: np.dtype[Any]
    optimize: Any
    steps: list[Step] = field(default_factory=list)
    laid: dict[int, Laid] = field(default_factory=dict)
    flops: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.equation.sizes

    def plan(self) -> Plan:
        sizes, output = self.sizes, self.equation.output
        wanted = tuple(label for label in output if sizes[label] != 1)
        leaves = [self._leaf(number) for number in range(len(self.operands))]
        count = Counter(label for leaf in leaves for label in leaf.strides) + Counter(wanted)
        # What a single operand has, and the output not, is summed before anything else.
        terms = [[label for label in leaf.strides if count[label] > 1] for leaf in leaves]
        pairs = paths.find(terms, wanted, sizes, self.optimize)
        made = paths.kept_after(terms, wanted, pairs)
        labels = [frozenset(term) for term in terms] + made
        partners = {a: (b, made[n]) for n, pair in enumerate(pairs) for a, b in (pair, pair[::-1])}
        values: list[_Tensor | None] = list(leaves)

        def following(number: int) -> _Next:
            if number not in partners:
                return _Next(output=wanted)
            partner, kept = partners[number]
            shared = labels[number] & labels[partner]
            other = values[partner] if partner < len(values) else None
            return self._next(shared - kept, shared & kept, other, _volume(labels[partner], sizes))

        for number, term in enumerate(terms):
            values[number] = self._summed(leaves[number], term, following(number))
        for a, b in pairs:
            left, right = values[a], values[b]
            values[a] = values[b] = None
            assert left is not None
            assert right is not None  # a tree: each value is used once
            values.append(self._pair(left, right, labels[len(values)], following(len(values))))
        last = values[-1]
        assert last is not None
        if last.dtype != self.dtype:
            last = self._copied(last, wanted, self.dtype)
        elif last.free:
            last = self._settled(last, last.strides)
        strides = tuple(last.strides.get(label, 0) for label in output)
        result = View(self.equation.shape, strides, last.offset, last.conj, last.part)
        largest = max((math.prod(step.shape) for step in self.steps), default=0)
        return Plan(
            self.equation,
            tuple(pairs),
            tuple(self.steps),
            (last.source, result),
            self.dtype,
            self.laid,
            self.flops,
            largest,
            self._peak(last.source),
        )

    def _leaf(self, number: int) -> _Tensor:
        """An operand, the diagonals of labels that come twice taken."""
        operand, term = self.operands[number], self.equation.inputs[number]
        view = operand.view or View.whole(Base(operand.shape, operand.dtype))
        free = operand.view is None and len(set(term)) == len(term)
        found: dict[str, int] = {}
        for label, size, stride in zip(term, operand.shape, view.strides, strict=True):
            if size != 1:
                found[label] = found.get(label, 0) + stride
        if operand.view is None and not free:
            self.laid[number] = Laid(tuple(range(len(term))), operand.dtype)
        return _Tensor(number, view.offset, found, operand.dtype, view.conj, view.part, free)

    def _next(self, summed: frozenset[str], batch: frozenset[str], other: _Tensor | None, volume: float) -> _Next:
        if other is not None and not other.free:
            found = self._runs(other, summed)
            if len(found) == 1:
                return _Next(None, found[0], True, volume, batch)
        return _Next(None, tuple(sorted(summed)), False, volume, batch)

    def _summed(self, x: _Tensor, term: Sequence[str], following: _Next) -> _Tensor:
        """The value with the labels of `term` alone."""
        gone = [label for label in x.strides if label not in term]
        if not gone:
            return x
        x = self._raised(x)
        if x.free:
            x = self._settled(x, x.strides)
        given = self._by_stride(x, term)
        order = min(following.orders(given), key=lambda order: following.penalty(order, self.sizes))
        groups = [*self._grouped(order, x), *self._grouped(self._by_stride(x, gone), x)]
        kept = len(self._grouped(order, x))
        axes = tuple(range(kept, len(groups)))
        shape = tuple(self._length(group) for group in groups[:kept])
        return self._result("sum", {"a": self._view(x, groups)}, shape, x.dtype, order, axes)

    def _pair(self, a: _Tensor, b: _Tensor, kept: frozenset[str], following: _Next) -> _Tensor:
        precision = _precision(self.dtype)
        if _precision(np.result_type(a.dtype, b.dtype)) < precision:
            # A product of two narrow operands of a wide result is formed in the wide dtype.
            if (a.free, -self._volume(a)) >= (b.free, -self._volume(b)):
                a = self._raised(a)
            else:
                b = self._raised(b)
        summed = (a.strides.keys() & b.strides.keys()) - kept
        return self._gemm(a, b, summed, following) if summed else self._multiply(a, b, following)

    def _multiply(self, a: _Tensor, b: _Tensor, following: _Next) -> _Tensor:
        """The product of every pair of elements whose common labels are equal; no label is summed."""
        large, small = (a, b) if self._volume(a) >= self._volume(b) else (b, a)
        mine = self._by_stride(large, large.strides)
        others = [label for label in self._by_stride(small, small.strides) if label not in large.strides]
        orders = [order for given in _distinct([others + mine, mine + others]) for order in following.orders(given)]
        order = min(_distinct(orders), key=lambda order: following.penalty(order, self.sizes))
        a, b = (self._settled(x, x.strides) if x.free else x for x in (a, b))
        groups = self._grouped(order, a, b)
        views = {"a": self._view(a, groups), "b": self._view(b, groups)}
        shape = tuple(self._length(group) for group in groups)
        return self._result("multiply", views, shape or (1,), np.result_type(a.dtype, b.dtype), order)

    def _gemm(self, a: _Tensor, b: _Tensor, summed: Collection[str], following: _Next) -> _Tensor:
        choice = min(
            self._choices(a, b, frozenset(summed), following), key=lambda choice: self._cost(a, b, choice, following)
        )
        if len(self._grouped(choice.batch, a, b)) > MAX_NDIM - 2:
            both = [each for each in self._choices(a, b, frozenset(summed), following) if all(each.copied)]
            choice = min(both, key=lambda choice: self._cost(a, b, choice, following))
        outer = [[label for label in choice.batch if label in x.strides] for x in (a, b)]
        a, b = (
            self._settled(x, x.strides) if x.free and not copied else x
            for x, copied in zip((a, b), choice.copied, strict=True)
        )
        if choice.copied[0]:
            a = self._copied(a, [*outer[0], *choice.rows, *choice.summed])
        if choice.copied[1]:
            # The rows of the operand on the right lie in the order in which the columns do in the result.
            b = self._copied(b, [*outer[1], *choice.columns, *choice.summed])
        groups = self._grouped(choice.batch, a, b)
        left, right = (b, a) if choice.swapped else (a, b)
        rows, columns = (choice.columns, choice.rows) if choice.swapped else (choice.rows, choice.columns)
        views = {
            "a": self._view(left, [*groups, rows, choice.summed], matrix=True),
            "b": self._view(right, [*groups, choice.summed, columns], matrix=True),
        }
        shape = tuple(self._length(group) for group in (*groups, rows, columns))
        dtype = np.result_type(a.dtype, b.dtype)
        macs = math.prod(shape) * self._length(choice.summed)
        self.flops += macs * (8 if dtype.kind == "c" else 2)
        return self._result("gemm", views, shape, dtype, choice.order)

    def _choices(self, a: _Tensor, b: _Tensor, summed: frozenset[str], following: _Next) -> Iterable[_Choice]:
        shared = [label for label in a.strides if label in b.strides and label not in summed]
        mine = [
            [label for label in self._by_stride(x, x.strides) if label not in y.strides] for x, y in ((a, b), (b, a))
        ]
        lies = [self._runs(x, summed) for x in (a, b)]
        cuts = [self._cuts(x, own) for x, own in zip((a, b), mine, strict=True)]
        laid = [[(tuple(order), ()) for order in following.orders(own)] for own in mine]
        for copied in product((False, True), (False, True)):
            orders = {found[0] for found, copy in zip(lies, copied, strict=True) if not copy and len(found) == 1}
            if len(orders) > 1 or any(not copy and len(found) > 1 for found, copy in zip(lies, copied, strict=True)):
                continue
            order = orders.pop() if orders else tuple(self._by_stride(a, summed))
            rows, columns = (laid[n] if copied[n] else cuts[n] for n in (0, 1))
            for (row, row_rest), (column, column_rest) in product(rows, columns):
                batch = sorted(
                    [*shared, *row_rest, *column_rest],
                    key=lambda label: -max(abs(x.strides.get(label, 0)) for x in (a, b)),
                )
                for outer, swapped in product(following.orders(batch), (False, True)):
                    yield _Choice(copied, order, row, column, tuple(outer), swapped)

    def _cuts(self, x: _Tensor, own: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The labels that become one axis, and the others, which join the batch: the longest run, and the innermost."""
        runs = self._runs(x, own)
        if not runs:
            return [((), ())]
        chosen = {max(range(len(runs)), key=lambda n: self._length(runs[n])), len(runs) - 1}
        return [
            (runs[n], tuple(label for m, run in enumerate(runs) if m != n for label in run)) for n in sorted(chosen)
        ]

    def _cost(self, a: _Tensor, b: _Tensor, choice: _Choice, following: _Next) -> float:
        """Estimated time of the copies, the product, and what comes of its order; in elements moved."""
        cost = 0.0
        for x, copied, own in zip((a, b), choice.copied, (choice.rows, choice.columns), strict=True):
            volume = self._volume(x)
            cost += volume
            if copied:
                cost += volume if x.free else 2.0 * volume + LAUNCH
            elif not any(abs(x.strides[group[-1]]) == 1 for group in (own, choice.summed) if group):
                cost += volume  # no axis of the matrix is contiguous: the kernel, or BLAS, has to gather it
        batch = self._length(choice.batch)
        m, n, k = (-(-self._length(group) // TILE) * TILE for group in (choice.rows, choice.columns, choice.summed))
        cost += self._length(choice.order) + batch * (BATCH + m * n * k / paths.MOVED)
        return cost + following.penalty(choice.order, self.sizes)

    def _copied(self, x: _Tensor, order: Sequence[str], dtype: np.dtype[Any] | None = None) -> _Tensor:
        """The value with its labels in this order, each inside the one before it."""
        if x.free:
            return self._settled(x, order, dtype)
        groups = self._grouped(order, x)
        shape = tuple(self._length(group) for group in groups)
        return self._result("add", {"a": self._view(x, groups)}, shape or (1,), dtype or x.dtype, order)

    def _settled(self, x: _Tensor, order: Collection[str], dtype: np.dtype[Any] | None = None) -> _Tensor:
        """An operand that is not yet sent, its axes laid in this order; those of length 1 anywhere."""
        term = self.equation.inputs[x.source]
        size = self.operands[x.source].shape
        short = [axis for axis in range(len(term)) if size[axis] == 1]
        axes = (*short, *(term.index(label) for label in order))
        self.laid[x.source] = Laid(axes, dtype or x.dtype)
        strides = dict(zip(order, contiguous([self.sizes[label] for label in order]), strict=True))
        return replace(x, strides=strides, dtype=dtype or x.dtype, free=False)

    def _raised(self, x: _Tensor) -> _Tensor:
        """The value in the precision of the result, real if it is real."""
        if _precision(x.dtype) >= _precision(self.dtype):
            return x
        wide = {4: np.float32, 8: np.float64} if x.dtype.kind == "f" else {8: np.complex128}
        dtype = np.dtype(wide[_precision(self.dtype)])
        if x.free:
            return replace(x, dtype=dtype)
        return self._copied(x, self._by_stride(x, x.strides), dtype)

    def _result(
        self, op: str, views: Mapping[str, Seen], shape: tuple[int, ...], dtype: np.dtype[Any], order: Sequence[str],
        axes: tuple[int, ...] = (),
    ) -> _Tensor:  # fmt: skip
        self.steps.append(Step(op, views, shape, dtype, axes))
        strides = dict(zip(order, contiguous([self.sizes[label] for label in order]), strict=True))
        return _Tensor(len(self.operands) + len(self.steps) - 1, 0, strides, dtype)

    def _view(self, x: _Tensor, groups: Sequence[Sequence[str]], *, matrix: bool = False) -> Seen:
        """The value with one axis for each group; one of length 1 where it has none of its labels. Leading ones go.

        Raises ParameterInvalid for more axes than a view may have.
        """
        shape = [self._length(group) if group and group[0] in x.strides else 1 for group in groups]
        strides = [x.strides[group[-1]] if group and group[0] in x.strides else 0 for group in groups]
        least = 2 if matrix else 1
        while len(shape) > least and shape[0] == 1:
            del shape[0], strides[0]
        if not shape:
            shape, strides = [1], [1]
        if len(shape) > MAX_NDIM:
            raise _errors.ParameterInvalid(
                f"a step would have an operand of {len(shape)} axes that lie apart; {MAX_NDIM} are possible",
                problem={"parameter": "equation"},
            )
        return x.source, View(tuple(shape), tuple(strides), x.offset, x.conj and x.dtype.kind == "c", x.part)

    def _grouped(self, order: Sequence[str], *tensors: _Tensor) -> list[tuple[str, ...]]:
        """Labels in this order, those together that are one axis in every tensor."""
        groups: list[list[str]] = []
        for label in order:
            if groups and all(self._nested(x, groups[-1][-1], label) for x in tensors):
                groups[-1].append(label)
            else:
                groups.append([label])
        return [tuple(group) for group in groups]

    def _nested(self, x: _Tensor, outer: str, inner: str) -> bool:
        """Whether both are one axis of x, or no axis of it."""
        if outer not in x.strides or inner not in x.strides:
            return outer not in x.strides and inner not in x.strides
        return x.strides[outer] == x.strides[inner] * max(self.sizes[inner], 1)

    def _runs(self, x: _Tensor, labels: Collection[str]) -> list[tuple[str, ...]]:
        """Labels in the order in which they lie in memory, those together that are one axis."""
        return self._grouped(self._by_stride(x, labels), x)

    def _by_stride(self, x: _Tensor, labels: Iterable[str]) -> list[str]:
        order = [label for label in x.strides if label in set(labels)]
        return sorted(order, key=lambda label: -abs(x.strides[label]))

    def _length(self, labels: Iterable[str]) -> int:
        return math.prod(self.sizes[label] for label in labels)

    def _volume(self, x: _Tensor) -> float:
        return _volume(x.strides, self.sizes)

    def _peak(self, result: int) -> int:
        """Most bytes alive at one time, an operand from its first use on."""
        sizes = [math.prod(operand.shape) * operand.dtype.itemsize for operand in self.operands]
        for number, laid in self.laid.items():
            sizes[number] = math.prod(self.operands[number].shape) * laid.dtype.itemsize
        sizes += [step.result.size * step.dtype.itemsize for step in self.steps]
        last = {source: number for number, step in enumerate(self.steps) for source, _ in step.operands.values()}
        last.pop(result, None)
        alive: set[int] = set()
        peak = held = 0
        for number, step in enumerate(self.steps):
            for source in {source for source, _ in step.operands.values()} | {len(self.operands) + number}:
                if source not in alive:
                    alive.add(source)
                    held += sizes[source]
            peak = max(peak, held)
            for source in [source for source in alive if last.get(source) == number]:
                alive.remove(source)
                held -= sizes[source]
        return peak


def _precision(dtype: np.dtype[Any]) -> int:
    """Bytes of a real number of the dtype."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def _volume(labels: Iterable[str], sizes: Mapping[str, int]) -> float:
    return math.prod((sizes[label] for label in labels), start=1.0)


def _distinct(orders: Iterable[list[str]]) -> list[list[str]]:
    return [list(order) for order in dict.fromkeys(map(tuple, orders))]
