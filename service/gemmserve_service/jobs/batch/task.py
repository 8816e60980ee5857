"""Many products as one task: sorted by kind, checked one kind at a time, placed, sent to a worker in one message.

What is wrong with one of them is told of that one alone; the others are computed. In the queue a batch is one task that
costs what its products do together.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gemmserve.wire import RESULT_DTYPES
from gemmserve_kernels import KernelError, Operand, Plan
from gemmserve_service import products as operations
from gemmserve_service.errors import ServiceError
from gemmserve_service.executor.packing import ArrayKind, ExtentTable, form_of
from gemmserve_service.executor.protocol import Part, Work
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.scheduling.tasks import Task, described, plan_of

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_service.products import Product
    from gemmserve_service.scheduling.tasks import Listener
    from gemmserve_service.schemas import GemmParams, GemmReduceParams
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload


class Placed(NamedTuple):
    """An array, and where its bytes are."""

    kind: ArrayKind
    extent: Extent | None
    """Extent with its bytes; None: it has none."""
    offset: int = 0
    cache_id: str | None = None
    """Id under which a device may keep it, where the extent holds one immutable array alone."""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.kind[1]) * RESULT_DTYPES[self.kind[0]].itemsize


class Item(NamedTuple):
    """Product of a batch, as requested."""

    params: GemmParams | GemmReduceParams
    key: Any
    """Equal for equal params: they are not hashable themselves."""
    operands: Mapping[str, Placed]


@dataclass(eq=False)
class Group:
    """Products that differ in nothing but their data."""

    params: GemmParams | GemmReduceParams
    problem: Product
    outputs: dict[str, tuple[tuple[int, ...], np.dtype[Any], str]]
    size: tuple[int, int]
    """Bytes and operations of one product: the queue asks for all of them several times."""
    items: list[int] = field(default_factory=list)
    """Their numbers in the batch."""
    results: dict[str, list[Placed]] = field(default_factory=dict)
    """Results by name, in the order of `items`; set before the batch is sent."""


Failures = dict[int, ServiceError | KernelError]
"""Errors by the number of the product."""


@dataclass(frozen=True)
class BatchProblem:
    """All products together, as far as queue and estimates look at them."""

    groups: tuple[Group, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the first group's products."""
        return self.groups[0].problem.dtype

    def nbytes(self) -> int:
        """Bytes of operands and results."""
        return sum(group.size[0] * len(group.items) for group in self.groups)

    def flops(self) -> int:
        """Operations."""
        return sum(group.size[1] * len(group.items) for group in self.groups)


async def sort(
    items: Sequence[Item | ServiceError], check: Callable[[Product], object]
) -> tuple[list[Group], Failures]:
    """The products by kind, and what is wrong with the others. `check`: raises what no device can run.

    Others have their turns meanwhile.
    """
    groups: dict[Any, Group | KernelError] = {}
    failures: Failures = {}
    numbers = itertools.count()
    async for some in Turns().slices(items):
        for item, number in zip(some, numbers, strict=False):
            if isinstance(item, ServiceError):
                failures[number] = item
                continue
            key = (item.key, *item.operands, *[placed.kind for placed in item.operands.values()])
            group = groups.get(key)
            if group is None:
                try:
                    group = _describe(item, check)
                except KernelError as error:
                    group = error
                groups[key] = group
            if isinstance(group, KernelError):
                failures[number] = group
            else:
                group.items.append(number)
    return [group for group in groups.values() if isinstance(group, Group)], failures


def _describe(item: Item, check: Callable[[Product], object]) -> Group:
    operands = {
        name: Operand.contiguous(placed.kind[1], RESULT_DTYPES[placed.kind[0]], placed.kind[2])
        for name, placed in item.operands.items()
    }
    problem = operations.build(item.params, operands)
    check(problem)
    return Group(item.params, problem, operations.outputs(problem), (problem.nbytes(), problem.flops()))


class BatchTask(Task):
    """One task of many products. `held` is closed at its end: pins of operands, and extents of one request."""

    def __init__(
        self,
        task_id: str,
        params: GemmParams | GemmReduceParams,
        problem: BatchProblem,
        listener: Listener,
        *,
        items: Sequence[Item | ServiceError],
        results: Sequence[Upload],
        held: contextlib.ExitStack,
        **fields: Any,
    ) -> None:
        super().__init__(task_id, params, problem, {}, {}, listener, **fields)  # type: ignore[arg-type]  # is alike
        self.products = sum(len(group.items) for group in problem.groups)
        self.groups = problem.groups
        self.uploads = results
        self._items = items
        self._held = held
        self._planned: dict[int, tuple[DeviceSpec, list[Plan | KernelError]]] = {}
        """The groups' plans, by the identity of the device's description, which is held."""
        self._table = ExtentTable()
        self._parts: list[Part] = []

    async def prepare(self, specs: Iterable[DeviceSpec]) -> None:
        """Prepare the results of `plan` and `message`, in turns with other tasks of the event loop."""
        turns = Turns()
        for spec in specs:
            plans = self._planned[id(spec)] = spec, []
            for group in self.groups:
                plans[1].append(plan_of(group.problem, spec))
                await turns.pause()
        for group in self.groups:
            self._add(group)
            await turns.pause()

    def described(self) -> dict[str, str | int]:
        """See `Task`: extents only where all products are alike."""
        alike = described(self.groups[0].problem) if len(self.groups) == 1 else {}
        return {"gemmserve.op": self.params.op, "gemmserve.products": self.products, **alike}

    def plan(self, spec: DeviceSpec) -> Plan | KernelError:
        """The first product's plan, or why the device cannot run one of them."""
        plans = self._plans(spec)
        return next((plan for plan in plans if isinstance(plan, KernelError)), plans[0])

    def message(self, chosen: Plan, *, verify: bool) -> Work:
        """See `Task`."""
        del chosen
        assert self.worker is not None
        assert self.worker.spec is not None
        for group in self.groups[len(self._parts) :]:
            self._add(group)
        parts = []
        for part, plan in zip(self._parts, self._plans(self.worker.spec), strict=True):
            assert isinstance(plan, Plan)  # `plan` saw to it
            same = part.algorithm == plan.algorithm
            parts.append(part if same else replace(part, algorithm=plan.algorithm))
        return Work(task=self.id, extents=self._table.rows, parts=parts, verify=verify)

    def _plans(self, spec: DeviceSpec) -> list[Plan | KernelError]:
        known = self._planned.get(id(spec))
        if known is None:
            known = self._planned[id(spec)] = spec, [plan_of(group.problem, spec) for group in self.groups]
        return known[1]

    def _add(self, group: Group) -> None:
        """The part of the message that is this group's, by any device's algorithm."""
        wanted = [item for number in group.items if isinstance(item := self._items[number], Item)]
        sides = {name: [item.operands[name] for item in wanted] for name in wanted[0].operands}, group.results
        kinds = [{name: arrays[0].kind for name, arrays in side.items()} for side in sides]
        places = [{name: self._places(arrays) for name, arrays in side.items()} for side in sides]
        plans = [plans[len(self._parts)] for _, plans in self._planned.values()]
        algorithm = next((plan.algorithm for plan in plans if isinstance(plan, Plan)), "")
        part = Part(form=form_of(group.params, *kinds), algorithm=algorithm, operands=places[0], results=places[1])
        self._parts.append(part)

    def _places(self, arrays: Sequence[Placed]) -> list[tuple[int, int]]:
        """Return the places of these arrays."""
        number, extents = self._table.number, {(array.extent, array.cache_id) for array in arrays}
        numbers = {extent: number(extent, cache_id) for extent, cache_id in extents}
        return [(numbers[extent], offset) for _, extent, offset, _ in arrays]

    def close(self, *, reusable: bool = True) -> None:
        """See `Task`; idempotent."""
        for upload in self.uploads:
            if reusable:
                upload.abort()
            else:
                upload.discard()
        self.unpin()

    def unpin(self) -> None:
        """Lets the operands go."""
        self._held.close()


def placed(pinned: Pinned) -> Placed:
    """A stored array as an operand."""
    info = pinned.info
    return Placed((info.dtype, info.shape, info.order), pinned.extent, 0, info.id)


_ALIGNED: Final = 64


@dataclass(frozen=True)
class Packed:
    """Layout of results in one extent. `uniform`: as one array, the products along the first axis, by name."""

    nbytes: int
    offsets: dict[tuple[int, str], int]
    """Offsets by the product's number and the result's name."""
    uniform: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] | None


def pack(groups: Sequence[Group], count: int) -> Packed:
    """Places every result in one extent; evenly, in the order of the products, where all are of one kind."""
    outputs = {number: group.outputs for group in groups for number in group.items}
    first = groups[0].outputs
    alike = len(outputs) == count and all(group.outputs == first for group in groups)
    offsets: dict[tuple[int, str], int] = {}
    position = 0
    if alike and all(order == "C" or len(shape) < 2 for shape, _, order in first.values()):
        for name, (shape, dtype, _) in first.items():
            size = math.prod(shape) * dtype.itemsize
            offsets.update(((number, name), position + number * size) for number in range(count))
            position += -(-size * count // _ALIGNED) * _ALIGNED
        return Packed(position, offsets, {name: ((count, *shape), dtype) for name, (shape, dtype, _) in first.items()})
    for number in sorted(outputs):
        for name, (shape, dtype, _) in outputs[number].items():
            offsets[number, name] = position
            position += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
    return Packed(position, offsets, None)


async def place(groups: Sequence[Group], where: Callable[[int, str], tuple[Extent | None, int]]) -> None:
    """Sets the groups' results: `where` says of a product's number and a result's name the extent and the offset.

    Others have their turns meanwhile.
    """
    turns = Turns()
    for group in groups:
        for name, (shape, dtype, order) in group.outputs.items():
            kind = (dtype.newbyteorder("=").name, shape, order)
            if not math.prod(shape):
                group.results[name] = [Placed(kind, None)] * len(group.items)
                continue
            placed = group.results[name] = []
            async for some in turns.slices(group.items):
                placed += [Placed(kind, *where(number, name)) for number in some]


def each_result(groups: Sequence[Group]) -> Iterator[tuple[int, str, Placed]]:
    """Number, name and place of every result."""
    for group in groups:
        for name, results in group.results.items():
            yield from ((number, name, result) for number, result in zip(group.items, results, strict=True))
