"""gemm_reduce through the wire, on every backend, by a job and in one request."""

from __future__ import annotations

import numpy as np
import pytest

AXES = {"m": -2, "n": -1}


def reference(name, c, axis):
    """NumPy's own answer on the product `c`; arg* and abs* by magnitude for complex."""
    magnitude = np.abs(c) if np.iscomplexobj(c) or name.startswith("abs") else c
    return {
        "sum": lambda: c.sum(axis),
        "mean": lambda: c.mean(axis),
        "sumsq": lambda: (np.abs(c) ** 2).sum(axis),
        "max": lambda: c.max(axis),
        "min": lambda: c.min(axis),
        "absmax": lambda: np.abs(c).max(axis),
        "absmin": lambda: np.abs(c).min(axis),
        "argmax": lambda: magnitude.argmax(axis),
        "argmin": lambda: magnitude.argmin(axis),
    }[name]()


REAL = ["sum", "mean", "sumsq", "max", "min", "absmax", "absmin", "argmax", "argmin"]
COMPLEX = [name for name in REAL if name not in {"max", "min"}]


def check(results, names, c, axis, real):
    eps = np.finfo(real).eps
    for name in names:
        expected = reference(name, c, axis)
        actual = results[name]
        if name.startswith("arg"):
            assert actual.dtype == np.int64
            # Two elements may be as large as each other within rounding: then either index is right.
            axes = c.ndim + axis if isinstance(axis, int) else axis
            magnitude = np.abs(c) if np.iscomplexobj(c) else c
            chosen = np.take_along_axis(magnitude, np.expand_dims(actual, axes), axes).squeeze(axes)
            best = np.take_along_axis(magnitude, np.expand_dims(expected, axes), axes).squeeze(axes)
            assert np.allclose(chosen, best, rtol=100 * eps, atol=100 * eps)
        else:
            scale = np.abs(c).max() ** (2 if name == "sumsq" else 1) * (1 if "m" in name and name != "sum" else c.size)
            assert actual.shape == expected.shape
            assert np.max(np.abs(actual - expected)) <= 1000 * eps * scale, name


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_every_reduction_in_one_pass(compute, random_array, axis, dtype):
    names = COMPLEX if dtype.startswith("complex") else REAL
    a, b = random_array((37, 24), dtype), random_array((24, 41), dtype, seed=1)
    results = compute("gemm_reduce", {"a": a, "b": b}, reduce=names, axis=axis)
    assert list(results) == names
    wide = a.astype(np.result_type(a, "f8")) @ b.astype(np.result_type(b, "f8"))
    check(results, names, wide, AXES[axis], a.real.dtype)
    for name in ("sumsq", "absmax", "absmin"):
        assert results[name].dtype == a.real.dtype


@pytest.mark.parametrize("axis", AXES)
def test_over_the_batch_too(compute, random_array, axis):
    a, b = random_array((3, 8, 6)), random_array((6, 5), seed=1)
    results = compute("gemm_reduce", {"a": a, "b": b}, reduce=["sum", "absmax", "argmax"], axis=[axis, "batch"])
    c = a.astype("c16") @ b.astype("c16")
    # What is reduced is flattened in C order: (batch, m) for every n, or (batch, n) for every m.
    flat = c.reshape(-1, 5) if axis == "m" else c.transpose(0, 2, 1).reshape(-1, 8)
    check(results, ["sum", "absmax", "argmax"], flat, -2, np.float32)


def test_batches_keep_their_place(compute, random_array):
    a, b = random_array((4, 8, 6)), random_array((4, 6, 5), seed=1)
    (result,) = compute("gemm_reduce", {"a": a, "b": b}, reduce="sum", axis="n").values()
    assert result.shape == (4, 8)
    assert np.allclose(result, (a.astype("c16") @ b).sum(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pre_op", ["identity", "abs", "square"])
def test_pre_ops(compute, random_array, pre_op):
    a, b = random_array((12, 9)), random_array((9, 7), seed=1)
    (result,) = compute("gemm_reduce", {"a": a, "b": b}, reduce="sum", pre_op=pre_op, alpha=[0, 2]).values()
    c = 2j * (a.astype("c16") @ b)
    c = {"identity": c, "abs": np.abs(c), "square": np.square(c)}[pre_op]
    assert result.dtype == (np.float32 if pre_op == "abs" else np.complex64)
    assert np.allclose(result, c.sum(0), rtol=1e-3, atol=1e-3)


def test_max_of_complex_after_abs_is_real(compute, random_array):
    a, b = random_array((12, 9)), random_array((9, 7), seed=1)
    (result,) = compute("gemm_reduce", {"a": a, "b": b}, reduce="max", pre_op="abs").values()
    assert np.allclose(result, abs(a.astype("c16") @ b).max(0), rtol=1e-5)


def test_return_c(compute, random_array):
    a, b = random_array((12, 9)), random_array((9, 7), seed=1)
    results = compute("gemm_reduce", {"a": a, "b": b}, reduce=["sumsq"], return_c=True)
    assert list(results) == ["sumsq", "c"]
    assert np.allclose(results["c"], a.astype("c16") @ b, rtol=1e-3, atol=1e-5)


def test_float16_accumulates_in_float32(compute):
    # In float16 the sum would stop at 2048.
    a, b = np.ones((3000, 1), "f2"), np.ones((1, 2), "f2")
    (result,) = compute("gemm_reduce", {"a": a, "b": b}, reduce="sum").values()
    assert result.dtype == np.float32
    assert np.array_equal(result, [3000, 3000])


def test_nan_counts_as_in_numpy(compute):
    a = np.ones((4, 2), "f4")
    a[2, 0] = np.nan
    results = compute("gemm_reduce", {"a": a, "b": np.eye(2, dtype="f4")}, reduce=["max", "argmax"])
    assert np.isnan(results["max"]).all()
    assert results["argmax"][0] == 2


def test_first_of_equals(compute):
    results = compute(
        "gemm_reduce", {"a": np.ones((500, 3), "f4"), "b": np.ones((3, 2), "f4")}, reduce=["argmax", "argmin"]
    )
    assert np.array_equal(results["argmax"], [0, 0])
    assert np.array_equal(results["argmin"], [0, 0])


def test_reducing_nothing(compute):
    results = compute("gemm_reduce", {"a": np.ones((0, 3)), "b": np.ones((3, 2))}, reduce=["sum", "sumsq"])
    assert np.array_equal(results["sum"], [0, 0])
    assert np.array_equal(results["sumsq"], [0, 0])


def test_no_terms_are_zeros(compute):
    results = compute("gemm_reduce", {"a": np.ones((4, 0)), "b": np.ones((0, 2))}, reduce=["absmax", "argmax", "mean"])
    assert all(np.array_equal(results[name], [0, 0]) for name in results)


@pytest.mark.parametrize("reproducible", [True, False])
def test_reproducible_is_bit_for_bit(compute, random_array, reproducible):
    a, b = random_array((700, 33)), random_array((33, 65), seed=1)
    runs = [
        compute("gemm_reduce", {"a": a, "b": b}, reduce=["sum", "sumsq"], reproducible=reproducible) for _ in range(3)
    ]
    for name in ("sum", "sumsq"):
        assert np.allclose(runs[0][name], runs[1][name], rtol=1e-3, atol=1e-2)
        if reproducible:
            assert len({run[name].tobytes() for run in runs}) == 1


def test_max_of_complex_hints_at_absmax(http, put, problem, random_array):
    job = {"op": "gemm_reduce", "a": put(random_array((3, 3))), "b": put(random_array((3, 3))), "reduce": "max"}
    assert "absmax" in problem(http.post("/v1/jobs", json=job), 422, "parameter-invalid")["detail"]


@pytest.mark.parametrize("axis", ["m", "n"])
def test_verify_recomputes_some_outputs(http, put, random_array, axis):
    a, b = put(random_array((3, 40, 30))), put(random_array((3, 30, 50), seed=1))
    job = {"op": "gemm_reduce", "a": a, "b": b, "reduce": ["sumsq", "absmax"], "axis": axis, "verify": True}
    info = http.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"}).json()
    assert info["state"] == "succeeded"
    assert 0 <= info["residual"] < 1e-5


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("reduce", "power", "'power' is no reduction; there are sum, max"),
        ("reduce", ["sum", "power"], "'power' is no reduction"),
        ("reduce", [], "at least one reduction is wanted"),
        ("reduce", 3, "'3' is no reduction"),
        ("axis", "k", "'k' is no axis; there are m, n, batch"),
    ],
)
def test_names_that_are_none(http, put, problem, random_array, field, value, said):
    job = {"op": "gemm_reduce", "a": put(random_array((3, 3))), "b": put(random_array((3, 3))), field: value}
    found = problem(http.post("/v1/jobs", json=job), 422, "parameter-invalid")
    assert found["detail"].count(said) == 1
    assert "valid list" not in found["detail"]
