"""A large product, or reduction, and its grid, over the arrays that the front has named: each block's operands and
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels import Operand
from gemmserve_kernels.blocks.grid import Grid, GridRule, Index
from gemmserve_kernels.blocks.reduction import BlockReduction
from gemmserve_kernels.device.caching import cached
from gemmserve_kernels.problem.arrays import ArrayKey
from gemmserve_service.executor.protocol import PARTIALS
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.blocks.panel_slots import PanelUse
from gemmserve_service.products import PartialReduceParams, StripGemmParams, build
from gemmserve_service.schemas import GemmConfigFields, GemmParams, GemmReduceParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.executor.protocol import ArrayRef, BlockOf, Kind
    from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots, Side
    from gemmserve_service.products import Product
    from gemmserve_service.schemas import StepParams

    Array = np.ndarray[Any, Any]

_SIDES: Final[tuple[Side, ...]] = ("a", "b")


@dataclass(frozen=True)
class BlockWork:
    """One block, as a product of its own: parameters, operands, and windows of the results."""

    index: int
    params: GemmParams | GemmReduceParams
    operands: dict[str, HostArray]
    results: dict[str, Array]


@dataclass(frozen=True)
class Gridded:
    """A product with a grid, its operands and its results on the host; of a reduction the bytes of the partial ones are
    among these, or are memory of this process.
    """

    params: GemmParams | GemmReduceParams
    grid: Grid
    operands: Mapping[str, HostArray]
    results: Mapping[str, Array]

    @classmethod
    def of(
        cls,
        params: StepParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, Array],
        *,
        rule: GridRule,
        block: BlockOf | None = None,
    ) -> Gridded | None:
        """Return the product with its grid, the one that `block` is of or that of the rule; None: it has none.

        Raises ValueError for a block that is none.
        """
        if not isinstance(params, GemmParams | GemmReduceParams):
            if block is not None:
                raise ValueError("only products have blocks")
            return None
        keys = tuple((name, ArrayKey.of(operand.data)) for name, operand in operands.items())
        if block is None:
            grid: Grid | None = cached(_grid, params, keys, rule)
        else:
            grid = cached(_grid_of_sides, params, keys, block.sides)
            if block.combine and grid.reduction is None:
                raise ValueError("only blocks of reductions are combined")
            if grid.reduction is not None and PARTIALS not in results:
                raise ValueError("a block of a reduction has no place for its partial results")
            if not 0 <= block.index < grid.count:
                raise ValueError(f"block {block.index} of {grid.count}")
        return None if grid is None else cls(params, grid, operands, results)

    def work(self, index: int, slots: PanelSlots | None, algorithm: str | None = None) -> BlockWork:
        """Return a block's work; `algorithm`: that it is to be computed by, unless the product's parameters say so."""
        grid = self.grid
        operands: dict[str, HostArray] = {side: self.panel(side, index, slots) for side in _SIDES}
        if (part := grid.c_window(index)) is not None:
            operands["c"] = _part(self.operands["c"], part)
        params, reduction = self.params, self.reduction
        strips = 1
        if slots is not None and index in slots.plan.stripped and algorithm in {None, slots.plan.algorithm}:
            # Those that the plan of memory counts on: by another algorithm, memory is looked for.
            strips, algorithm = slots.plan.strips, slots.plan.algorithm
        if algorithm is not None and params.config is None:
            params = params.model_copy(update={"config": GemmConfigFields.model_validate({"algorithm": algorithm})})
        if strips > 1 and params.config is not None and params.config.algorithm == algorithm:
            fields = {name: getattr(params, name) for name in type(params).model_fields}
            params = StripGemmParams.model_construct(**fields, strips=strips)
        if reduction is None:
            return BlockWork(index, params, operands, {name: x[grid.window(index)] for name, x in self.results.items()})
        fields = {name: getattr(params, name) for name in type(params).model_fields} | {"reduce": list(self.partials)}
        results = {name: array[reduction.window(index, name)] for name, array in self.partials.items()}
        if "c" in self.results:
            results["c"] = self.results["c"][grid.window(index)]
        return BlockWork(index, PartialReduceParams.model_construct(**fields), operands, results)

    @cached_property
    def reduction(self) -> BlockReduction | None:
        """How blocks of a reduction become its results."""
        return None if self.grid.reduction is None else BlockReduction(self.grid)

    @cached_property
    def partials(self) -> dict[str, Array]:
        """Partial results of a reduction, by name. Raises ValueError where their place is too small."""
        assert self.reduction is not None
        memory = self.results.get(PARTIALS)
        if memory is None:
            memory = np.empty(self.reduction.nbytes, np.uint8)
        elif memory.nbytes < self.reduction.nbytes:
            raise ValueError(f"{memory.nbytes} bytes for partial results of {self.reduction.nbytes}")
        return self.reduction.arrays(memory)

    def combine(self) -> None:
        """Write a reduction's results from the partial ones of all blocks; of a product, whose blocks are its result,
        nothing.
        """
        if self.reduction is not None:
            self.reduction.combine(self.partials, self.results)

    def panel(self, side: Side, index: int, slots: PanelSlots | None = None) -> HostArray:
        """Return a block's panel of A or B as an operand."""
        use = None if slots is None else PanelUse(slots, side, index)
        return _part(self.operands[side], self.grid.operand_panel(side, index), use)


def grid_of(params: StepParams, operands: Mapping[str, ArrayRef | Kind], rule: GridRule) -> Grid | None:
    """Return the grid of a product whose operands the front has named, if it has one. Raises KernelError."""
    if not isinstance(params, GemmParams | GemmReduceParams):
        return None
    # Of every product, however small: so the key is what the front has said, as it is.
    kinds = tuple([(name, ref.dtype, ref.shape, ref.order) for name, ref in operands.items()])
    return cached(_grid_of_kinds, params, kinds, rule)


def _grid_of_kinds(
    params: GemmParams | GemmReduceParams, kinds: tuple[tuple[str, str, tuple[int, ...], str], ...], rule: GridRule
) -> Grid | None:
    described = {name: Operand.contiguous(shape, np.dtype(dtype), order) for name, dtype, shape, order in kinds}
    return Grid.of(build(params, described), rule)


def _part(operand: HostArray, index: Index, panel: PanelUse | None = None) -> HostArray:
    """Return a part of an operand."""
    fetch, array = operand.fetch, operand.cache_id
    return HostArray(
        operand.data[index],
        None,
        None if fetch is None else lambda: fetch()[index],
        panel,
        None if array is None else (array, index),
    )


def _problem(params: GemmParams | GemmReduceParams, keys: tuple[tuple[str, ArrayKey], ...]) -> Product:
    return build(params, {name: Operand.of(key) for name, key in keys})


def _grid(params: GemmParams | GemmReduceParams, keys: tuple[tuple[str, ArrayKey], ...], rule: GridRule) -> Grid | None:
    return Grid.of(_problem(params, keys), rule)


def _grid_of_sides(
    params: GemmParams | GemmReduceParams, keys: tuple[tuple[str, ArrayKey], ...], sides: tuple[int, int, int]
) -> Grid:
    return Grid.with_sides(_problem(params, keys), sides)
