"""gemm through the wire, on every backend, by a job and in one request: D = alpha op(A) op(B) + beta C."""

from __future__ import annotations

import numpy as np
import pytest

OPS = {
    "N": lambda x: x,
    "T": lambda x: np.swapaxes(x, -1, -2),
    "C": lambda x: np.swapaxes(x.conj(), -1, -2),
    "R": np.conj,
}
DTYPES = ["float16", "float32", "float64", "complex64", "complex128"]


def wide(array):
    return array.astype(np.clongdouble if array.dtype.kind == "c" else np.longdouble)


def product(a, b, trans_a="N", trans_b="N"):
    """The exact product (to extended precision) and |A| |B|, which bounds its rounding errors."""
    left, right = OPS[trans_a](wide(a)), OPS[trans_b](wide(b))
    return left @ right, abs(left) @ abs(right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(compute, random_array, close, dtype):
    a, b = random_array((33, 47), dtype), random_array((47, 29), dtype, seed=1)
    d = compute("gemm", {"a": a, "b": b})["d"]
    expected, magnitude = product(a, b)
    assert d.dtype == dtype
    close(d, expected, magnitude, 47, dtype)


@pytest.mark.parametrize("trans_a", OPS)
@pytest.mark.parametrize("trans_b", OPS)
def test_every_operation(compute, random_array, close, trans_a, trans_b):
    a = random_array((20, 30) if trans_a in "NR" else (30, 20))
    b = random_array((30, 25) if trans_b in "NR" else (25, 30), seed=1)
    d = compute("gemm", {"a": a, "b": b}, trans_a=trans_a, trans_b=trans_b)["d"]
    expected, magnitude = product(a, b, trans_a, trans_b)
    close(d, expected, magnitude, 30, "complex64")


@pytest.mark.parametrize("order", ["C", "F"])
def test_alpha_beta_and_order(compute, random_array, close, order):
    a, b, c = random_array((15, 22)), random_array((22, 18), seed=1), random_array((15, 18), seed=2)
    d = compute("gemm", {"a": a, "b": b, "c": c}, alpha=[0.5, -2], beta=[1, 1], order=order)["d"]
    expected, magnitude = product(a, b)
    expected = (0.5 - 2j) * expected + (1 + 1j) * wide(c)
    close(d, expected, 2.1 * magnitude + 2 * abs(c), 24, "complex64")
    assert d.flags.c_contiguous if order == "C" else d.flags.f_contiguous


@pytest.mark.parametrize(
    ("left", "right"), [((4, 9, 7), (7, 5)), ((9, 7), (4, 7, 5)), ((2, 1, 9, 7), (3, 7, 5)), ((1, 9, 7), (6, 7, 5))]
)
def test_batches_broadcast(compute, random_array, close, left, right):
    a, b = random_array(left), random_array(right, seed=1)
    expected, magnitude = product(a, b)
    close(compute("gemm", {"a": a, "b": b})["d"], expected, magnitude, 7, "complex64")


@pytest.mark.parametrize(
    ("left", "right"), [("float32", "complex64"), ("complex64", "float64"), ("float16", "float32")]
)
def test_mixed_dtypes_follow_numpy(compute, random_array, close, left, right):
    a, b = random_array((12, 16), left), random_array((16, 9), right, seed=1)
    d = compute("gemm", {"a": a, "b": b})["d"]
    expected, magnitude = product(a, b)
    assert d.dtype == np.result_type(a, b)
    close(d, expected.astype(np.clongdouble), magnitude, 16, d.dtype)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_and_tiny(compute, shape):
    m, k, n = shape
    a, b, c = np.ones((m, k), "c8"), np.ones((k, n), "c8"), np.ones((m, n), "c8")
    d = compute("gemm", {"a": a, "b": b, "c": c}, beta=2)["d"]
    assert np.array_equal(d, a @ b + 2 * c)


def test_big_endian_and_fortran_operands(compute, random_array, close):
    a = np.asfortranarray(random_array((21, 34))).astype(">c8", order="K")
    b = np.asfortranarray(random_array((34, 13), seed=1))
    expected, magnitude = product(a.astype("c8"), b)
    close(compute("gemm", {"a": a, "b": b})["d"], expected, magnitude, 34, "complex64")


def test_planar(compute, random_array, close):
    a, b = random_array((2, 17, 23), "float32"), random_array((2, 23, 11), "float32", seed=1)
    d = compute("gemm", {"a": a, "b": b}, layout="planar")["d"]
    expected, magnitude = product(a[0] + 1j * a[1], b[0] + 1j * b[1])
    assert (d.dtype, d.shape) == (np.float32, (2, 17, 11))
    close((d[0] + 1j * d[1]).astype("c8"), expected, magnitude, 23, "complex64")


def test_beta_zero_never_reads_c(compute):
    c = np.full((2, 2), np.nan, "c8")
    assert np.array_equal(
        compute("gemm", {"a": np.eye(2, dtype="c8"), "b": np.eye(2, dtype="c8"), "c": c}, beta=0)["d"], np.eye(2)
    )


def test_c_is_added_where_beta_is_not_given(compute):
    a, c = np.eye(3, dtype="c8"), np.full((3, 3), 2 - 1j, "c8")
    for unset in ({}, {"beta": None}):
        assert np.array_equal(compute("gemm", {"a": a, "b": a, "c": c}, **unset)["d"], a + c)
        assert np.array_equal(compute("gemm", {"a": a, "b": a}, **unset)["d"], a)


def test_nonfinite_elements_stay_where_they_belong(compute):
    a = np.ones((3, 4), "f4")
    a[1, 2] = np.nan
    a[2, 0] = np.inf
    d = compute("gemm", {"a": a, "b": np.ones((4, 2), "f4")})["d"]
    assert np.array_equal(d, [[4, 4], [np.nan, np.nan], [np.inf, np.inf]], equal_nan=True)


@pytest.mark.parametrize("compute_mode", ["auto", "fp32"])
def test_past_one_tile(compute, random_array, close, compute_mode):
    a, b = random_array((257, 129)), random_array((129, 193), seed=1)
    expected, magnitude = product(a, b)
    close(compute("gemm", {"a": a, "b": b}, compute=compute_mode)["d"], expected, magnitude, 129, "complex64")


def test_products_are_chained_remotely(http, put, random_array, close):
    a = random_array((16, 16), "complex128") / 8
    identifier, expected = put(a), a
    for _ in range(4):
        job = {"op": "gemm", "a": identifier, "b": identifier}
        info = http.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"}).json()
        identifier, expected = info["result"]["d"], expected @ expected
    data = http.get(f"/v1/arrays/{identifier}/data", headers={"Accept": "application/octet-stream"}).content
    assert np.allclose(np.frombuffer(data, "c16").reshape(16, 16), expected, rtol=1e-9)


def test_verify_reports_a_small_residual(http, put, random_array):
    job = {"op": "gemm", "a": put(random_array((64, 48))), "b": put(random_array((48, 32), seed=1)), "verify": True}
    info = http.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"}).json()
    assert 0 <= info["residual"] < 1e-4


def test_bits_do_not_change_from_run_to_run(compute, random_array):
    a, b = random_array((65, 300)), random_array((300, 65), seed=1)
    first, second = (compute("gemm", {"a": a, "b": b})["d"] for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_a_missing_mode_names_those_there_are(http, put, problem):
    (device,) = http.get("/v1/devices").json()["devices"]
    for dtype, mode, plain in (("c8", "ozaki", "fp32"), ("f8", "tf32", "fp64")):  # no mode of f8, on any device
        eye = put(np.eye(4, dtype=dtype))
        answer = http.post("/v1/jobs", json={"op": "gemm", "a": eye, "b": eye, "compute": mode})
        document = problem(answer, 422, "compute-unsupported")
        assert {"auto", plain} <= set(document["available"]) <= set(device["compute_modes"])
