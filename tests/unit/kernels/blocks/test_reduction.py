"""Reductions by blocks: against higher precision and against the whole's; whatever the order, the same bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve_kernels import GemmReduceProblem, Operand, gemm_reduce
from gemmserve_kernels.blocks.grid import Grid, GridRule
from gemmserve_kernels.blocks.reduction import BlockReduction

REAL = ("sum", "mean", "sumsq", "max", "min", "absmax", "absmin", "argmax", "argmin")
COMPLEX = tuple(name for name in REAL if name not in {"max", "min"})
BATCHES = [((), ()), ((3,), (3,)), ((2, 3), (3,)), ((4,), ())]


def by_blocks(a, b, sides, order=None, twice=(), **options):
    """Results of a reduction from blocks, in an order of theirs, some computed twice."""
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    grid = Grid.with_sides(problem, sides)
    reduction = BlockReduction(grid)
    partials = reduction.arrays(np.full(reduction.nbytes, 0xFF, np.uint8))
    results = {name: np.empty(shape, dtype) for name, (shape, dtype) in problem.results.items()}
    indices = list(range(grid.count)) if order is None else [index for index in order if index < grid.count]
    for index in (*indices, *(index for index in twice if index < grid.count)):
        block = grid.block_problem(index)
        out = {name: partials[name][reduction.window(index, name)] for name in block.reductions}
        if problem.return_c:
            out["c"] = results["c"][grid.window(index)]
        panel_a, panel_b = (x[grid.operand_panel(side, index)].copy("K") for side, x in (("a", a), ("b", b)))
        gemm_reduce(panel_a, panel_b, out=out, **options | {"reduce": block.reductions, "partial": True})
    reduction.combine(partials, results)
    return problem, results


def operands(rng, dtype, batches, m, n, k, trans, *, small=False):
    def array(batch, rows, columns, turned):
        shape = (*batch, columns, rows) if turned else (*batch, rows, columns)
        if small:  # products are exact, and many are equal
            x = rng.integers(-2, 3, shape).astype(dtype)
        else:
            x = rng.standard_normal(shape)
            x = (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)
        return x

    return array(batches[0], m, k, trans[0] in "TC"), array(batches[1], k, n, trans[1] in "TC")


@settings(max_examples=80, deadline=None)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12)),
    st.tuples(st.integers(3, 20), st.integers(3, 20), st.integers(1, 2)),
    st.sampled_from(BATCHES),
    st.sampled_from(["float32", "float64", "complex64"]),
    st.sampled_from(["m", "n"]),
    st.booleans(),
    st.sampled_from(["identity", "abs", "square"]),
    st.sampled_from(["NN", "TN", "NT", "CC"]),
    st.integers(0, 2**32 - 1),
)
def test_exact_data_have_the_very_results_of_the_whole(
    shape, sides, batches, dtype, axis, over_batch, pre_op, trans, seed
) -> None:
    """Small integers: sums are exact but for roots, and places are those of the first of many equal elements."""
    rng = np.random.default_rng(seed)
    a, b = operands(rng, dtype, batches, *shape, trans, small=True)
    names = REAL if pre_op == "abs" or dtype != "complex64" else COMPLEX
    options = {
        "reduce": names, "axis": (axis, "batch") if over_batch else axis, "pre_op": pre_op,
        "trans_a": trans[0], "trans_b": trans[1], "return_c": True,
    }  # fmt: skip
    problem, found = by_blocks(a, b, sides, **options)
    whole = gemm_reduce(a, b, **options)
    for name in problem.results:
        if name in {"sum", "mean"} and pre_op == "abs" and dtype == "complex64":  # roots are not exact
            np.testing.assert_allclose(found[name], whole[name], rtol=3e-7)
        else:
            np.testing.assert_array_equal(found[name], whole[name], err_msg=name)


@pytest.mark.parametrize("axis", ["m", "n", ("m", "batch"), ("n", "batch")])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_accuracy(dtype, axis) -> None:
    """Sums are sums in double of what the kernels make, rounded once; the product is bounded by its terms."""
    rng = np.random.default_rng(3)
    a, b = operands(rng, dtype, ((3,), (3,)), 50, 60, 30, "NN")
    names = COMPLEX if np.dtype(dtype).kind == "c" else REAL
    problem, found = by_blocks(a, b, (16, 24, 2), reduce=names, axis=axis)
    wide = np.complex128 if problem.dtype.kind == "c" else np.float64
    product = a.astype(wide) @ b.astype(wide)
    axes = ((0,) if problem.over_batch else ()) + ((1,) if problem.over_rows else (2,))
    unit = np.finfo(problem.accumulate).eps
    rounded = np.finfo(problem.results["sum"][1]).eps
    bound = 4 * 30 * unit * (np.abs(a).astype("f8") @ np.abs(b).astype("f8"))
    total, most = product.sum(axes), bound.sum(axes)
    assert np.all(np.abs(found["sum"] - total) <= most + rounded * np.abs(total))
    assert np.all(np.abs(found["mean"] - total / problem.extent) <= (most + rounded * np.abs(total)) / problem.extent)
    largest = np.abs(product).max(axes)
    assert np.all(np.abs(found["absmax"] - largest) <= bound.max(axes) + np.finfo(problem.dtype).eps * largest)


def test_any_order_and_any_repetition_leaves_the_same_bits() -> None:
    rng = np.random.default_rng(5)
    a, b = operands(rng, "complex64", ((2, 3), (3,)), 30, 40, 20, "NT")
    options = {"reduce": COMPLEX, "axis": ("n", "batch"), "trans_b": "T"}
    _, first = by_blocks(a, b, (8, 12, 2), **options)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(1000)
        _, again = by_blocks(a, b, (8, 12, 2), order=order.tolist(), twice=order[:7].tolist(), **options)
        for name in first:
            assert first[name].tobytes() == again[name].tobytes()


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("axis", ["m", "n"])
def test_nan_and_infinities_as_the_whole_has_them(axis, batch) -> None:
    rng = np.random.default_rng(7)
    a, b = operands(rng, "float32", ((2,), (2,)), 40, 40, 3, "NN", small=True)
    a[0, 5], a[1, 30], a[0, 17], a[1, 2] = np.nan, np.nan, np.inf, -np.inf
    b[0, :, 33], b[1, :, 7], b[0, :, 20] = np.nan, -np.inf, 0
    options = {"reduce": REAL, "axis": (axis, "batch") if batch else axis}
    _, found = by_blocks(a, b, (16, 8, 1), **options)
    for name, whole in gemm_reduce(a, b, **options).items():
        np.testing.assert_array_equal(found[name], whole, err_msg=name)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_planar_operands(axis) -> None:
    rng = np.random.default_rng(9)
    a, b = (rng.integers(-3, 4, (2, 3, *shape)).astype("f4") for shape in ((20, 6), (6, 30)))
    options = {"reduce": COMPLEX, "axis": axis, "layout": "planar", "return_c": True}
    _, found = by_blocks(a, b, (8, 16, 1), **options)
    for name, whole in gemm_reduce(a, b, **options).items():
        np.testing.assert_array_equal(found[name], whole, err_msg=name)


def test_sums_that_cancel_between_blocks_are_in_double() -> None:
    a = np.zeros((4, 1), "f4")
    a[:, 0] = 2**60, 1, -(2**60), 2  # in float32, and in double, from the left: 2^60 + 1 - 2^60 + 2 = 2
    b = np.ones((1, 1), "f4")
    _, found = by_blocks(a, b, (1, 1, 1), reduce="sum")
    assert found["sum"] == 2.0
    a[:, 0] = 2**40, 1, -(2**40), 2
    _, found = by_blocks(a, b, (1, 1, 1), reduce="sum")
    assert found["sum"] == 3.0, "float32 would leave 2"


def test_extremes_of_fp64_are_compared_before_they_are_rounded() -> None:
    a = np.array([[1.0, 0.0], [1.0, 2.0**-30]], "f4")
    b = np.ones((2, 1), "f4")
    _, found = by_blocks(a, b, (1, 1, 1), reduce=("argmax", "max"), compute="fp64")
    assert found["argmax"] == 1
    assert found["max"] == 1.0


def test_which_reductions_are_cut() -> None:
    def cut(m, n, k, dtype="complex64", side=64, **options):
        a, b = Operand.contiguous((m, k), np.dtype(dtype)), Operand.contiguous((k, n), np.dtype(dtype))
        return Grid.of(GemmReduceProblem.build(a, b, **options), GridRule(side)) is not None

    assert cut(512, 512, 512, reduce="absmax")
    assert cut(512, 512, 512, reduce=("sum", "absmax"))
    assert cut(512, 512, 512, reduce="sum", return_c=True)
    assert not cut(128, 128, 128, reduce="absmax"), "few operations"
    assert not cut(4096, 4096, 7, reduce="absmax"), "blocks of few operations"
    assert not cut(512, 512, 128, reduce="sum"), "read once"
    assert cut(512, 512, 512, reduce="sum"), "operands of 512 squares of a side"
    assert not cut(4096, 4096, 32, reduce="sumsq", dtype="float32"), "by Gram matrices"
    assert not cut(4096, 4096, 32, reduce=["sum", "sumsq"], dtype="float32"), "as well"
    assert cut(512, 512, 256, reduce="sumsq")


def test_a_grid_of_a_product_has_no_partial_results() -> None:
    operand = Operand.contiguous((512, 512), np.dtype("c8"))
    problem = GemmReduceProblem.build(operand, operand)
    with pytest.raises(ValueError, match="reduction"):
        BlockReduction(Grid.with_sides(problem.product, (64, 64, 1)))


@pytest.mark.parametrize(("axis", "batches"), list(itertools.product(["m", ("n", "batch")], BATCHES)))
def test_windows_are_apart_and_cover_everything(axis, batches) -> None:
    a, b = (Operand.contiguous(shape, np.dtype("f4")) for shape in ((*batches[0], 30, 8), (*batches[1], 8, 50)))
    grid = Grid.with_sides(GemmReduceProblem.build(a, b, reduce=("sum", "argmax"), axis=axis), (8, 16, 2))
    reduction = BlockReduction(grid)
    arrays = reduction.arrays(np.zeros(reduction.nbytes, np.uint8))
    assert set(arrays) == {"sum", "argmax", "max"}
    for name, array in arrays.items():
        kept = [array[reduction.window(index, name)] for index in range(grid.count)]
        for index, window in enumerate(kept):
            assert window.shape == grid.block_problem(index).results[name][0]
            np.add(window, 1, out=window)
        assert np.all(array == 1)
