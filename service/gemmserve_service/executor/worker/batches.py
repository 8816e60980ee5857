"""Many products in one task: each with the bits that it would have alone, and few steps between one and the next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.schemas import ProgramParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gemmserve_service.executor.protocol import ExtentRow, Kind, Part, Places, Work
    from gemmserve_service.executor.worker.backend import DeviceBackend
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.unpack import Form, Forms

    Array = np.ndarray[Any, Any]


class Stack(NamedTuple):
    """Arrays of one kind, one a product."""

    dtype: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    places: Places


class Products:
    """The products of one part, on arrays over the extents' mappings."""

    def __init__(
        self, part: Part, form: Form, extents: list[ExtentRow], buffers: list[Any], *, verify: bool = False
    ) -> None:
        """`buffers`: the extents' mappings. Raises ValueError for a program, which is no part of a batch."""
        if isinstance(form.params, ProgramParams):
            raise ValueError("a program among the products of a batch")  # noqa: TRY004 (as pydantic would)
        self.params = form.params
        self.algorithm = part.algorithm
        self.verify = verify
        """Whether they are to be checked."""
        self.verdicts: list[Verdict] | None = None
        """Verdict on each product, once it was checked where the results are on a device."""
        self._operands, self._results = _stacks(form.operands, part.operands), _stacks(form.results, part.results)
        self._extents = extents
        self._buffers = buffers

    def __len__(self) -> int:
        """Return the number of products, at least one."""
        return len(next(iter(self._results.values())).places)

    def __iter__(self) -> Iterator[tuple[dict[str, HostArray], dict[str, Array]]]:
        """Operands and results of each."""
        operands, results = self.columns()
        for index in range(len(self)):
            yield (
                {
                    name: HostArray(arrays[index], self._cache_id(self._operands[name], index))
                    for name, arrays in operands.items()
                },
                {name: arrays[index] for name, arrays in results.items()},
            )

    def first(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Operands and results of the first of them."""
        return (
            {name: self._array(stack, stack.places[0], writable=False) for name, stack in self._operands.items()},
            {name: self._array(stack, stack.places[0], writable=True) for name, stack in self._results.items()},
        )

    def columns(self) -> tuple[dict[str, list[Array]], dict[str, list[Array]]]:
        """Operands and results by name, in the order of the products."""
        return (
            {name: self._arrays(stack, writable=False) for name, stack in self._operands.items()},
            {name: self._arrays(stack, writable=True) for name, stack in self._results.items()},
        )

    def aligned(self) -> bool:
        """Whether every array begins at a multiple of its elements' size."""
        stacks = (*self._operands.values(), *self._results.values())
        sizes = [np.dtype(stack.dtype).itemsize for stack in stacks]
        return not any(offset % size for stack, size in zip(stacks, sizes, strict=True) for _, offset in stack.places)

    def stacks(self) -> tuple[dict[str, Array], dict[str, Array]] | None:
        """Operands and results with the products along the first axis, where each lies evenly spaced in one extent."""
        operands, results = (
            {name: array for name, array in side.items() if array is not None} for side in self.each_stack()
        )
        whole = len(operands) == len(self._operands) and len(results) == len(self._results)
        return (operands, results) if whole else None

    def each_stack(self) -> tuple[dict[str, Array | None], dict[str, Array | None]]:
        """`stacks`, with None for those that do not lie so."""
        return (
            {name: self._stack(stack, writable=False) for name, stack in self._operands.items()},
            {name: self._stack(stack, writable=True) for name, stack in self._results.items()},
        )

    def _stack(self, stack: Stack, *, writable: bool) -> Array | None:
        places = stack.places
        if len(places) < 2 or places[0][0] < 0:
            return None
        number, start = places[0]
        step = places[1][1] - start
        one: Array = np.ndarray(stack.shape, stack.dtype, self._buffers[number], start, order=stack.order)
        # One array for several products is no stack: as one product with more rows it would have other bits.
        if step < one.nbytes or any(place != (number, start + i * step) for i, place in enumerate(places)):
            return None
        array: Array = np.ndarray(
            (len(places), *stack.shape), stack.dtype, self._buffers[number], start, (step, *one.strides)
        )
        array.flags.writeable = writable
        return array if array.flags.aligned else None

    def _arrays(self, stack: Stack, *, writable: bool) -> list[Array]:
        together = self._stack(stack, writable=writable)
        if together is not None and stack.shape:
            return list(together)  # views are made faster so than one by one
        made: dict[tuple[int, int], Array] = {}
        for place in stack.places:
            if place not in made:
                made[place] = self._array(stack, place, writable=writable)
        return [made[place] for place in stack.places]

    def _array(self, stack: Stack, place: tuple[int, int], *, writable: bool) -> Array:
        number, offset = place
        if number < 0:
            return np.empty(stack.shape, stack.dtype, order=stack.order)
        array: Array = np.ndarray(stack.shape, stack.dtype, self._buffers[number], offset, order=stack.order)
        array.flags.writeable = writable
        return array

    def _cache_id(self, stack: Stack, index: int) -> str | None:
        number = stack.places[index][0]
        return None if number < 0 else self._extents[number][-1]


def parts_of(work: Work, forms: Forms, locate: Callable[[ExtentRow], Any]) -> list[Products]:
    """A batch's parts. `locate` returns the bytes from where an extent begins. Raises OSError if an extent is gone,
    ValueError for a form that is none.
    """
    buffers = [locate(row) for row in work.extents]
    return [Products(part, forms.of(part.form), work.extents, buffers, verify=work.verify) for part in work.parts]


def _stacks(kinds: Mapping[str, Kind], places: Mapping[str, Places]) -> dict[str, Stack]:
    return {name: Stack(kind.dtype, kind.shape, kind.order, places[name]) for name, kind in kinds.items()}


def run_parts(parts: list[Products], backend: DeviceBackend, checkpoint: Callable[[], None]) -> Timings:
    """Computes every product. Raises what `DeviceBackend.run` raises: then no result counts."""
    return sum_of([backend.run_many(part, checkpoint) for part in parts])


def sum_of(timings: list[Timings]) -> Timings:
    """Phase by phase."""
    return Timings(
        compile_s=math.fsum(each.compile_s for each in timings),
        h2d_s=math.fsum(each.h2d_s for each in timings),
        kernel_s=math.fsum(each.kernel_s for each in timings),
        d2h_s=math.fsum(each.d2h_s for each in timings),
        verify_s=math.fsum(each.verify_s for each in timings),
    )
