"""Plans of memory: what they say is what a device would do that follows them, and little more than has to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve_kernels import DeviceSpec, GemmConfig, GemmProblem, GemmReduceProblem, Operand, plan
from gemmserve_kernels.blocks.grid import Grid, GridRule
from gemmserve_kernels.blocks.memory_plan import least_bytes, plan_memory
from gemmserve_kernels.blocks.workspace import workspace_bytes
from gemmserve_kernels.device.spec import KNOWN

if TYPE_CHECKING:
    from gemmserve_kernels.problem.vocabulary import AlgorithmName

H200 = KNOWN["H200"]
CPU = DeviceSpec("cpu", "a processor", "cpu", 4, 1, 0, 0, 0, 1 << 40, 0, ("auto", "fp32", "fp64"))


def square(n: int, dtype: str = "complex64", algorithm: AlgorithmName | None = None) -> Grid:
    operand = Operand.contiguous((n, n), np.dtype(dtype))
    config = None if algorithm is None else GemmConfig(algorithm=algorithm)
    grid = Grid.of(GemmProblem.build(operand, operand, config=config))
    assert grid is not None
    return grid


def seconds_of_planes(n: int, nbytes: int = 1 << 40) -> float:
    """What float16 planes take, which need less memory than residues, and are slower."""
    return plan_memory(square(n, algorithm="wgmma"), H200, nbytes).seconds


def follow(grid: Grid, plan) -> None:
    """Walks through a plan: every panel is in its slot when its block wants it, and no slot is filled too early."""
    memory: dict[tuple[str, int], int] = {}
    users: dict[tuple[str, int], int] = {}
    uploads = list(plan.uploads)
    assert [upload.before for upload in uploads] == sorted(upload.before for upload in uploads)
    for position, index in enumerate(plan.order):
        while uploads and uploads[0].before == position:
            upload = uploads.pop(0)
            place = upload.side, upload.slot
            assert 0 <= upload.slot < plan.slots[0 if upload.side == "a" else 1]
            assert upload.after == users.get(place, -1) < position
            assert upload.nbytes == grid.panel_bytes(upload.side, index)
            memory[place] = upload.panel
        for side in ("a", "b"):
            (place,) = [
                place for place, panel in memory.items() if place[0] == side and panel == grid.panel(side, index)
            ]
            users[place] = position
    assert not uploads
    assert sorted(plan.order) == list(range(grid.count))


def least_upload_bytes(grid: Grid, panel_bytes: int) -> int:
    """Return bytes below which no way through a grid of one matrix uploads, where `panel_bytes` of panels fit into
    memory at once: every panel comes once, and whichever of a block's two panels comes last meets no more of the other
    side than fits beside it.
    """
    panels = {side: {grid.panel(side, i): grid.panel_bytes(side, i) for i in range(grid.count)} for side in ("a", "b")}
    once = sum(panels["a"].values()) + sum(panels["b"].values())
    if len(grid.runs) > 1:
        return once
    problem = grid.problem
    row, column = problem.a.nbytes / problem.m, problem.b.nbytes / problem.n
    beside = panel_bytes - min((*panels["a"].values(), *panels["b"].values()))
    if beside <= 0:
        return once
    return max(once, int(problem.m * problem.n * row * column / beside))


extents = st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40))


@settings(max_examples=60, deadline=None)
@given(
    extents,
    st.tuples(st.integers(5, 30), st.integers(5, 30), st.integers(1, 2)),
    st.sampled_from([((), ()), ((3,), (3,)), ((2, 3), (3,)), ((4,), ())]),
    st.floats(0, 1.5),
    st.booleans(),
)
def test_a_plan_holds_what_it_says(shape, sides, batches, share, adds) -> None:
    m, n, k = shape
    a, b = Operand.contiguous((*batches[0], m, k), "f4"), Operand.contiguous((*batches[1], k, n), "f4")
    c = Operand.contiguous((m, n), "f4") if adds else None
    problem = GemmProblem.build(a, b, c)
    grid = Grid.with_sides(problem, sides)
    least = plan_memory(grid, CPU, 0)
    assert not least.fits
    assert least.peak_bytes == least.needed_bytes
    budget = least.needed_bytes + int(share * (a.nbytes + b.nbytes + 4 * least.window_bytes))
    plan = plan_memory(grid, CPU, budget)
    assert plan.fits
    assert plan.needed_bytes <= plan.peak_bytes <= budget
    follow(grid, plan)
    follow(grid, least)
    panels = plan.peak_bytes - plan.windows * plan.window_bytes - plan.workspace_bytes
    assert plan.uploaded_bytes >= least_upload_bytes(grid, panels)
    assert plan_memory(grid, CPU, least.needed_bytes).fits


@pytest.mark.parametrize("n", [16384, 32768, 65536])
def test_what_fits_comes_once(n) -> None:
    grid = square(n)
    operands = 2 * n * n * 8
    plan = plan_memory(grid, H200, 130 << 30)
    assert plan.uploaded_bytes == operands
    assert plan.order == grid.order
    assert plan.seconds < 1.1 * sum(map(grid.flops, range(grid.count))) / 2.2e14


@pytest.mark.parametrize("n", [65536, 98304, 131072])
def test_a_quarter_of_the_memory_costs_no_time_and_few_uploads(n) -> None:
    """The bound counts no panel that comes while others are used; groups of panels are whole, here 3 of 16."""
    grid = square(n)
    whole = plan_memory(grid, H200, 1 << 50)
    budget = 3 * n * n * 8 // 4
    plan = plan_memory(grid, H200, budget)
    assert plan.fits
    assert plan.seconds < 1.02 * whole.seconds
    panels = budget - plan.windows * plan.window_bytes - plan.workspace_bytes
    streaming = panels - max(plan.slot_bytes)
    assert plan.uploaded_bytes <= 1.75 * least_upload_bytes(grid, streaming)


def test_a_tight_budget_is_used_for_the_overlap() -> None:
    """32768^3 with 5 GiB: one panel of A, two of B."""
    plan = plan_memory(square(32768), H200, 5 << 30)
    assert plan.fits
    assert sorted(plan.slots) == [1, 2]
    assert plan.seconds < 1.25 * seconds_of_planes(32768)
    assert plan.seconds < seconds_of_planes(32768, 5 << 30)


@pytest.mark.parametrize(("gigabytes", "share"), [(5.5, 0.8), (6.4, 0.9), (7.0, 0.9), (8.0, 0.98), (10.0, 0.98)])
def test_strips_keep_most_of_the_rate_within_little_memory(gigabytes, share) -> None:
    """complex64 32768^3, whose residues take 4.6 GB at once; by the model."""
    grid = square(32768)
    plan = plan_memory(grid, H200, int(gigabytes * 1e9))
    assert plan.fits
    assert plan.peak_bytes <= gigabytes * 1e9
    assert seconds_of_planes(32768) >= share * plan.seconds
    assert plan.seconds < seconds_of_planes(32768, int(gigabytes * 1e9))
    assert plan.algorithm == (None if plan.strips == 1 else "ozaki")
    assert plan.stripped == (frozenset() if plan.strips == 1 else frozenset(range(grid.count)))
    follow(grid, plan)


def test_strips_are_taken_where_they_gain_alone() -> None:
    grid = square(32768)
    assert plan_memory(grid, H200, 1 << 40).strips == 1
    least = least_bytes(grid, H200)
    assert plan_memory(grid, H200, least).fits
    assert plan_memory(grid, H200, least).strips == 16
    assert not plan_memory(grid, H200, least - 1).fits
    added = GemmReduceProblem.build(grid.problem.a, grid.problem.b, reduce="absmax")
    assert plan_memory(Grid.of(added), H200, least).strips == 1, "reductions have none"


def test_a_pair_of_panels_that_does_not_fit_is_said() -> None:
    grid = Grid.of(GemmProblem.build(*[Operand.contiguous((512, 512), "f8")] * 2), GridRule(64))
    plan = plan_memory(grid, H200, 1000)
    assert not plan.fits
    assert plan.needed_bytes > 2 * 64 * 512 * 8
    assert plan_memory(grid, H200, plan.needed_bytes).fits
    assert not plan_memory(grid, H200, plan.needed_bytes - 1).fits


@pytest.mark.parametrize(
    ("dtype", "compute"), [("complex64", "auto"), ("complex128", "auto"), ("float32", "tf32"), ("float16", "auto")]
)
@pytest.mark.parametrize("device", sorted(KNOWN))
def test_every_device_has_a_plan(device, dtype, compute) -> None:
    if compute not in KNOWN[device].compute_modes:
        compute = "auto"
    operand = Operand.contiguous((40000, 40000), np.dtype(dtype))
    grid = Grid.of(GemmProblem.build(operand, operand, compute=compute))
    plan = plan_memory(grid, KNOWN[device], KNOWN[device].memory_bytes)
    assert plan.needed_bytes == sum(plan.slot_bytes) + plan.window_bytes + plan.workspace_bytes
    assert plan.fits == (plan.needed_bytes <= KNOWN[device].memory_bytes)
    follow(grid, plan)


def test_blocks_by_another_algorithm_than_the_largest_are_no_strips() -> None:
    """The last rows and columns are too few for residues: those blocks have planes, and are computed whole."""
    a, b = Operand.contiguous((9000, 32768), "complex64"), Operand.contiguous((32768, 9000), "complex64")
    grid = Grid.with_sides(GemmProblem.build(a, b), (4096, 4096, 1))
    by = [plan(grid.block_problem(index), H200).algorithm for index in range(grid.count)]
    assert set(by) == {"ozaki", "wgmma"}
    found = plan_memory(grid, H200, 6 * 10**9)
    assert (found.fits, found.algorithm) == (True, "ozaki")
    assert found.stripped == {index for index, algorithm in enumerate(by) if algorithm == "ozaki"}
    wgmma = workspace_bytes(grid.block_problem(by.index("wgmma")), H200)
    assert wgmma <= found.workspace_bytes < workspace_bytes(grid.block_problem(0), H200)
