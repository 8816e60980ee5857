"""Grids: every element of the result is in one block, and a block is the product of the panels that it names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve_kernels import GemmConfig, GemmProblem, GemmReduceProblem, Operand, gemm
from gemmserve_kernels.blocks.grid import DEFAULT_RULE, Grid, GridRule, panel_order


def problem_of(m, n, k, dtype="complex64", batch=(), **options):
    return GemmProblem.build(
        Operand.contiguous((*batch, m, k), dtype), Operand.contiguous((*batch, k, n), dtype), **options
    )


@pytest.mark.parametrize(
    ("shape", "sides", "count"),
    [
        ((32768, 32768, 32768), (4096, 4096, 1), 64),
        ((65536, 65536, 65536), (4096, 4096, 1), 256),
        ((16384, 16384, 16384), (4096, 4096, 1), 16),
        ((8192, 16384, 32768), (2048, 2048, 1), 32),  # few rows: halved
        ((100, 1 << 20, 1 << 17), (100, 2048, 1), 512),
        ((10000, 20000, 20000), (3584, 4096, 1), 15),  # three of rows about as long as each other
    ],
)
def test_the_grid_follows_from_the_shape(shape, sides, count) -> None:
    grid = Grid.of(problem_of(*shape))
    assert (grid.sides, grid.count) == (sides, count)


def test_what_has_no_grid() -> None:
    n = 4096
    assert Grid.of(problem_of(n, n, n)) is None  # 2^39 operations
    assert Grid.of(problem_of(16 * n, 16 * n, 16 * n, alpha=0)) is None
    assert Grid.of(problem_of(0, 16 * n, n)) is None
    whole = problem_of(16 * n, 16 * n, 16 * n)
    few = problem_of(16 * n, 16 * n, 128)
    assert Grid.of(GemmReduceProblem.build(few.a, few.b, reduce="absmax")) is None
    assert Grid.of(GemmReduceProblem.build(whole.a, whole.b, reduce="absmax")).count == 256
    assert Grid.of(problem_of(16, 16, 1 << 42)) is None  # one block
    assert DEFAULT_RULE.min_flops == 1 << 43


def test_a_block_of_a_batch_has_several_small_matrices() -> None:
    rule = GridRule(8)
    grid = Grid.of(problem_of(4, 4, 64, batch=(3, 10)), rule)
    assert grid.sides == (4, 4, 4)
    assert [grid.block(index).shape for index in range(3)] == [(4, 4, 4), (4, 4, 4), (2, 4, 4)]
    assert grid.count == 9
    assert grid.block_problem(2).batch_shape == (1, 2)


def test_a_grid_is_found_again_by_its_sides() -> None:
    problem = problem_of(100, 90, 300)
    grid = Grid.of(problem, GridRule(32))
    assert Grid.with_sides(problem, grid.sides) == grid
    with pytest.raises(ValueError, match="a block of"):
        Grid.with_sides(problem, (0, 1, 1))
    for index in (-1, grid.count):
        with pytest.raises(IndexError):
            grid.block(index)


def test_the_wavefront_uses_what_has_come() -> None:
    """When x panels of A and x of B have come in turns, x^2 blocks are before the next one."""
    grid = Grid.with_sides(problem_of(60, 40, 8), (10, 10, 1))
    seen: tuple[set[int], set[int]] = (set(), set())
    for done, index in enumerate(grid.order):
        new = grid.row_panel(index) not in seen[0], grid.column_panel(index) not in seen[1]
        if any(new):
            assert done == len(seen[0]) * len(seen[1])
        seen[0].add(grid.row_panel(index))
        seen[1].add(grid.column_panel(index))
        assert abs(len(seen[0]) - len(seen[1])) <= 1 or len(seen[1]) == 4


shapes = st.tuples(st.integers(1, 24), st.integers(1, 24), st.integers(1, 4))
batches = st.sampled_from([((), ()), ((3,), (3,)), ((2, 5), (5,)), ((), (4,)), ((2, 1), (1, 3)), ((1,), (6,))])


@st.composite
def products(draw):
    """A product of small integers, exact in every order, and its operands."""
    (m, n, k), (batch_a, batch_b) = draw(shapes), draw(batches)
    trans_a, trans_b = draw(st.sampled_from("NTCR")), draw(st.sampled_from("NTCR"))
    planar = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))

    def array(*shape):
        if planar:
            return rng.integers(-4, 5, (2, *shape)).astype("f8")
        return (rng.integers(-4, 5, shape) + 1j * rng.integers(-4, 5, shape)).astype("c16")

    a = array(*batch_a, *((k, m) if trans_a in "TC" else (m, k)))
    b = array(*batch_b, *((n, k) if trans_b in "TC" else (k, n)))
    if draw(st.booleans()):
        a = np.asfortranarray(a)
    options = {"trans_a": trans_a, "trans_b": trans_b, "layout": "planar" if planar else "interleaved", "alpha": 2}
    c = draw(st.sampled_from([None, (m, n), (1, n), (*np.broadcast_shapes(batch_a, batch_b), m, n)]))
    return a, b, None if c is None else array(*c), options


@settings(max_examples=60, deadline=None)
@given(products(), st.tuples(st.integers(3, 12), st.integers(3, 12), st.integers(1, 4)))
def test_blocks_make_the_product(product, sides) -> None:
    a, b, c, options = product
    operands = [None if each is None else Operand.of(each) for each in (a, b, c)]
    problem = GemmProblem.build(*operands, **options)
    grid = Grid.with_sides(problem, sides)
    out = np.full(problem.result_shape, np.nan, problem.result_dtype)
    panels: dict[tuple[str, int], tuple] = {}
    for index in grid.order:
        parts = {"a": a[grid.operand_panel("a", index)], "b": b[grid.operand_panel("b", index)]}
        if c is not None:
            parts["c"] = c[grid.c_window(index)]
        window = out[grid.window(index)]
        assert np.isnan(window).all()  # nobody else's
        window[...] = gemm(parts["a"], parts["b"], parts.get("c"), **options)
        copies = {name: Operand.of(part.copy(order=panel_order(part))) for name, part in parts.items()}
        described = grid.block_problem(index)
        for side in ("a", "b"):
            assert getattr(described, side).shape == copies[side].shape
            assert grid.panel_bytes(side, index) == copies[side].nbytes
            number = side, grid.panel(side, index)
            assert panels.setdefault(number, grid.operand_panel(side, index)) == grid.operand_panel(side, index)
        assert described.result_shape == window.shape
        assert described == GemmProblem.build(described.a, described.b, described.c, **options)
        assert grid.flops(index) == described.flops()
    assert sorted(grid.order) == list(range(grid.count))
    np.testing.assert_array_equal(out, gemm(a, b, c, **options))
    for side in ("a", "b"):
        numbers = {number for name, number in panels if name == side}
        assert numbers == set(range(len(numbers)))


def test_a_block_keeps_what_the_product_was_asked_for() -> None:
    config = GemmConfig(algorithm="simt")
    grid = Grid.of(problem_of(100, 90, 300, config=config, compute="fp32", beta=0), GridRule(32))
    block = grid.block_problem(0)
    assert (block.config, block.compute, block.k) == (config, "fp32", 300)
