"""gemm_reduce on the CPU against NumPy in double precision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from host_products import array, assert_close, join, products
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve_kernels import ComputeUnsupported, ConfigInfeasible, GemmConfig, ParameterInvalid, gemm_reduce
from gemmserve_kernels.algorithms.cpu import gemm_reduce as cpu_reduce

ALL = ["sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin", "max", "min"]


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.fixture
def tiny_blocks(monkeypatch):
    monkeypatch.setattr(cpu_reduce, "_BLOCK_BYTES", 300)


def lined_up(values, axis, over_batch):
    """What is reduced on axis 0, in index order."""
    values = values if axis == "m" else values.swapaxes(-1, -2)
    if over_batch:
        return values.reshape(int(np.prod(values.shape[:-1])), values.shape[-1])
    return np.moveaxis(values, -2, 0)


def check(drawn, axis, over_batch, pre_op):
    product = drawn.product
    values = {"identity": product, "abs": np.abs(product), "square": product * product}[pre_op]
    lines = lined_up(values, axis, over_batch)
    ordered = np.abs(lines) if lines.dtype.kind == "c" else lines
    names = ALL if lines.dtype.kind != "c" else ALL[:-2]
    names = names if lines.shape[0] else ["sum", "sumsq"]
    axes = [axis, "batch"] if over_batch else [axis]
    found = gemm_reduce(drawn.a, drawn.b, reduce=names, axis=axes, pre_op=pre_op, return_c=True, **drawn.options)
    assert list(found) == [*names, "c"]
    single = np.dtype(np.float32) if drawn.dtype == np.float16 else drawn.dtype
    terms = 4 * (drawn.a.shape[-1] + drawn.a.shape[-2] + lines.shape[0])
    size = max(1.0, float(np.abs(values).max(initial=0)))

    def near(name, expected, dtype=single):
        result = found[name]
        planar = drawn.planar and expected.dtype.kind == "c"
        assert_close((join(result) if planar else result) / size, expected / size, dtype, terms)

    near("c", product, drawn.dtype)
    near("sum", lines.sum(0))
    assert_close(found["sumsq"] / size**2, (np.abs(lines) ** 2).sum(0) / size**2, single, 4 * terms)
    if not lines.shape[0]:
        return
    near("mean", lines.mean(0))
    near("absmax", np.abs(lines).max(0), drawn.dtype)
    near("absmin", np.abs(lines).min(0), drawn.dtype)
    if "max" in names:
        near("max", lines.max(0), drawn.dtype)
        near("min", lines.min(0), drawn.dtype)
    if lines.size:
        for name in ("argmax", "argmin"):
            assert found[name].dtype == np.int64
            at = np.take_along_axis(ordered, found[name][None], 0)[0]
            assert_close(at / size, getattr(ordered, name[3:])(0) / size, single, terms)


ARGUMENTS = (
    products(with_c=False), st.sampled_from("mn"), st.booleans(), st.sampled_from(["identity", "abs", "square"])
)  # fmt: skip


@settings(max_examples=300)
@given(*ARGUMENTS)
def test_everything_against_numpy(drawn, axis, over_batch, pre_op):
    check(drawn, axis, over_batch, pre_op)


@pytest.mark.usefixtures("tiny_blocks")
def test_everything_in_tiny_blocks():
    settings(max_examples=300)(given(*ARGUMENTS)(check))()


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize(("axis", "over_batch"), list(itertools.product("mn", [False, True])))
@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_nan_and_first_index_as_in_numpy(axis, over_batch, dtype, rng):
    """Small integers make ties everywhere; a NaN in A makes rows of them."""
    a = rng.integers(-2, 3, (3, 23, 2)).astype(dtype)
    b = rng.integers(-2, 3, (3, 2, 19)).astype(dtype)
    a[1, 4, 0] = a[2, 20, 1] = b[0, 1, 7] = np.nan
    product = a @ b
    lines = lined_up(product, axis, over_batch)
    ordered = np.abs(lines) if dtype == "c8" else lines
    names = ["absmax", "absmin", "argmax", "argmin", "sum", *(["max", "min"] if dtype == "f4" else [])]
    axes = [axis, "batch"] if over_batch else [axis]
    found = gemm_reduce(a, b, reduce=names, axis=axes)
    assert np.array_equal(found["argmax"], ordered.argmax(0))
    assert np.array_equal(found["argmin"], ordered.argmin(0))
    assert np.array_equal(found["absmax"], np.abs(lines).max(0), equal_nan=True)
    assert np.array_equal(found["absmin"], np.abs(lines).min(0), equal_nan=True)
    assert np.array_equal(np.isnan(found["sum"]), np.isnan(lines.sum(0)))
    if dtype == "f4":
        assert np.array_equal(found["max"], lines.max(0), equal_nan=True)
        assert np.array_equal(found["min"], lines.min(0), equal_nan=True)


def test_all_infinite_columns_have_an_argument():
    a, b = np.full((5, 1), -np.inf, "f4"), np.ones((1, 3), "f4")
    found = gemm_reduce(a, b, reduce=["argmax", "max"])
    assert found["argmax"].tolist() == [0, 0, 0]
    assert np.isneginf(found["max"]).all()


def test_float16_arguments_are_compared_in_float32():
    a = np.array([[1.0], [1.0]], "f2")
    b = np.array([[1.0]], "f2")
    stretched = np.array([[2048.0, 0.5], [2048.0, 1.0]], "f2")
    assert gemm_reduce(stretched, np.ones((2, 1), "f2"), reduce="argmax")[0] == 1
    assert gemm_reduce(a, b, reduce="argmax")[0] == 0


def test_sums_of_float16_do_not_overflow():
    a, b = np.full((100, 1), 250, "f2"), np.full((1, 2), 200, "f2")
    assert gemm_reduce(a, b)[0] == 5e6
    assert gemm_reduce(a, b, reduce="sumsq").dtype == np.float32


def test_sums_keep_their_precision():
    """A float32 running sum of 2^20 ones and a large value would stop counting."""
    a = np.full((1 << 20, 1), 1, "f4")
    a[0] = 1 << 25
    assert gemm_reduce(a, np.ones((1, 1), "f4"))[0] == (1 << 25) + (1 << 20)


def test_one_name_gives_an_array_and_several_a_dict(rng):
    a, b = array(rng, (4, 3), "f4"), array(rng, (3, 2), "f4")
    assert isinstance(gemm_reduce(a, b), np.ndarray)
    assert list(gemm_reduce(a, b, reduce=["max", "sum"])) == ["max", "sum"]
    assert list(gemm_reduce(a, b, return_c=True)) == ["sum", "c"]


def test_out_takes_some_or_all_results(rng):
    a, b = array(rng, (4, 3), "c8"), array(rng, (3, 6), "c8")
    total = np.zeros(12, "c8")[::2]
    found = gemm_reduce(a, b, reduce=["sum", "absmax"], out={"sum": total})
    assert found["sum"] is total
    assert np.allclose(total, (a @ b).sum(0))
    assert np.allclose(found["absmax"], np.abs(a @ b).max(0))
    with pytest.raises(ParameterInvalid, match="absmin"):
        gemm_reduce(a, b, out={"absmin": total})
    with pytest.raises(ParameterInvalid, match="out"):
        gemm_reduce(a, b, out={"sum": np.zeros(6, "c16")})


def test_the_product_is_never_whole(monkeypatch, rng):
    """The largest array asked for while reducing a product of 64 MiB."""
    a, b = array(rng, (4096, 2), "f4"), array(rng, (2, 4096), "f4")
    import tracemalloc

    tracemalloc.start()
    gemm_reduce(a, b, reduce=["absmax", "sum"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20


def test_results_are_the_same_bit_for_bit(rng):
    a, b = array(rng, (300, 40), "c8"), array(rng, (40, 50), "c8")
    first = gemm_reduce(a, b, reduce=["sum", "sumsq"])
    for _ in range(3):
        again = gemm_reduce(a, b, reduce=["sum", "sumsq"])
        assert all(again[name].tobytes() == first[name].tobytes() for name in first)


def test_bad_requests_are_typed():
    a, b = np.ones((3, 4), "c8"), np.ones((4, 5), "c8")
    with pytest.raises(ParameterInvalid, match="absmax"):
        gemm_reduce(a, b, reduce="max")
    with pytest.raises(ComputeUnsupported):
        gemm_reduce(a, b, compute="tf32")
    with pytest.raises(ConfigInfeasible):
        gemm_reduce(a, b, config=GemmConfig(algorithm="vendor"))
