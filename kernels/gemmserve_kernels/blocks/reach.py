"""Reach of a device's memory: the largest square products that lie there, and that stream through. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.blocks.grid import DEFAULT_RULE, Grid, GridRule
from gemmserve_kernels.blocks.workspace import STRIPS, algorithm_with_strips, workspace_bytes
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels.device.spec import DeviceSpec

_MOST: Final = 1 << 12
"""Blocks along an edge of the largest product that is looked at: n = 2^24, operands of petabytes."""


@dataclass(frozen=True)
class Reach:
    """Extents n of n x n x n, in steps of a block's side; 0 where not even one block's does.

    `resident`: of the largest product whose operands are in the device's memory at once. `streamed`: of the largest
    of which a pair of panels is, with a part of the result and what the algorithm takes.
    """

    resident: int
    streamed: int


def reach_of(spec: DeviceSpec, budget: int, rule: GridRule = DEFAULT_RULE, dtype: str = "complex64") -> Reach:
    """Return how far `budget` bytes of a device reach for products of `dtype` by `auto`, cut by `rule`. Raises what
    planning a block raises (ComputeUnsupported, ConfigInfeasible).
    """

    def bytes_of(blocks: int) -> tuple[int, int]:
        n = blocks * rule.side
        operand = Operand.contiguous((n, n), np.dtype(dtype))
        problem = GemmProblem.build(operand, operand)
        grid = Grid.of(problem, rule)
        if grid is None:
            whole = problem.nbytes() + workspace_bytes(problem, spec)
            return whole, whole
        block = grid.block_problem(0)
        beside = grid.window_bytes(0) + workspace_bytes(block, spec)
        strips = STRIPS[-1] if algorithm_with_strips(block, spec) is not None else 1
        least = block.a.nbytes + block.b.nbytes + grid.window_bytes(0) + workspace_bytes(block, spec, strips)
        return problem.a.nbytes + problem.b.nbytes + beside, least

    return Reach(
        rule.side * _last(lambda blocks: bytes_of(blocks)[0] <= budget),
        rule.side * _last(lambda blocks: bytes_of(blocks)[1] <= budget),
    )


def _last(fits: Callable[[int], bool]) -> int:
    """Return the last number, up to `_MOST`, that fits, where all before it do; 0 if none does."""
    low, high = 0, _MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
