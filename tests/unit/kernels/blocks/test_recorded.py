"""Records of algorithms: written, read and obeyed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from gemmserve_kernels import GemmConfig, GemmProblem, Operand, plan
from gemmserve_kernels.blocks.grid import Grid
from gemmserve_kernels.blocks.recorded import Recorded
from gemmserve_kernels.device.spec import KNOWN

H200 = KNOWN["H200"]


def grid_of(n: int, dtype: str = "complex64", **options) -> Grid:
    operand = Operand.contiguous((n, n), np.dtype(dtype))
    grid = Grid.of(GemmProblem.build(operand, operand, **options))
    assert grid is not None
    return grid


@pytest.mark.parametrize("dtype", ["complex64", "float64", "float16"])
def test_a_record_comes_back_from_json(dtype) -> None:
    grid = grid_of(33000, dtype)
    recorded = Recorded.of(grid, H200)
    assert len(recorded.algorithms) == 4  # the last row and the last column are shorter
    assert Recorded.load(json.loads(json.dumps(recorded.dump()))) == recorded


def test_what_is_recorded_overrules_the_plan() -> None:
    """The recorded algorithm, as a configuration, is what the plan had; and what another device would not choose."""
    grid = grid_of(33000, compute="auto")
    recorded = Recorded.of(grid, H200)
    for index in range(grid.count):
        name = recorded.algorithm(grid, index)
        problem = grid.block_problem(index)
        free = plan(problem, H200)
        held = plan(replace(problem, config=GemmConfig(algorithm=name)), H200)
        assert (held.algorithm, held.arithmetic) == (free.algorithm, free.arithmetic) == (name, free.arithmetic)
    other = Recorded(recorded.sides, dict.fromkeys(recorded.algorithms, "simt"))
    held = plan(replace(grid.block_problem(0), config=GemmConfig(algorithm=other.algorithm(grid, 0))), H200)
    assert held.algorithm == "simt"


def test_a_record_of_another_grid_is_refused() -> None:
    recorded = Recorded.of(grid_of(33000), H200)
    with pytest.raises(KeyError):
        recorded.algorithm(grid_of(40000), 0)
    document = recorded.dump()
    with pytest.raises(ValueError, match="no algorithm"):
        Recorded.load(document | {"algorithms": {"1x2x3": "magic"}})
    with pytest.raises(KeyError):
        Recorded.load({"sides": [1, 2, 3]})
