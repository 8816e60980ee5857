"""Reach of a memory: against the plans that devices make, and whole products where none is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gemmserve_kernels import DeviceSpec, GemmProblem, Operand
from gemmserve_kernels.blocks.grid import Grid, GridRule
from gemmserve_kernels.blocks.memory_plan import least_bytes, plan_memory
from gemmserve_kernels.blocks.reach import Reach, reach_of
from gemmserve_kernels.device.spec import KNOWN

SIDE = 256


def square(n: int, dtype: str) -> Grid:
    operand = Operand.contiguous((n, n), np.dtype(dtype))
    grid = Grid.of(GemmProblem.build(operand, operand), GridRule(SIDE))
    assert grid is not None
    return grid


@pytest.mark.parametrize("dtype", ["complex64", "float64"])
@pytest.mark.parametrize("device", ["H200", "MI300X", "cpu"])
def test_products_up_to_the_reach_have_plans_and_others_have_not(device, dtype) -> None:
    spec = DeviceSpec.cpu() if device == "cpu" else KNOWN[device]
    budget = 1 << 27
    reach = reach_of(spec, budget, GridRule(SIDE), dtype)
    assert 0 < reach.resident < reach.streamed
    assert least_bytes(square(reach.streamed, dtype), spec) <= budget
    assert least_bytes(square(reach.streamed + SIDE, dtype), spec) > budget
    operands = 2 * reach.resident**2 * np.dtype(dtype).itemsize
    assert plan_memory(square(reach.resident, dtype), spec, budget).uploaded_bytes == operands
    beyond = plan_memory(square(reach.resident + SIDE, dtype), spec, budget)
    assert beyond.slots != (reach.resident // SIDE + 1,) * 2


def test_what_is_not_cut_lies_there_whole_or_not_at_all() -> None:
    spec = DeviceSpec.cpu()
    operand = Operand.contiguous((2 * SIDE, 2 * SIDE), np.dtype("c8"))
    least = GemmProblem.build(operand, operand).nbytes()
    found = reach_of(spec, least, GridRule(SIDE))
    assert found.resident == found.streamed < 2 * SIDE, "with what the algorithm takes it is too much"
    assert reach_of(spec, 0) == Reach(0, 0)


def test_more_memory_never_reaches_less() -> None:
    found = [reach_of(KNOWN["H200"], budget << 28) for budget in (1, 4, 16, 64, 256, 1024)]
    for reach, more in pairwise(found):
        assert reach.resident <= more.resident
        assert reach.streamed <= more.streamed
