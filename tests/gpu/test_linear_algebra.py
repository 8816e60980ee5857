"""Linear algebra on the device: backward errors, matrices without a result, stacks as well as large matrices."""

from __future__ import annotations

import numpy as np
import pytest
from linalg_cases import DTYPES, adjoint, eps, positive, random

from gemmserve_kernels import KernelError, Operand
from gemmserve_kernels.operations.table import OPERATIONS

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


def run(kind, arrays, **params):
    """(result on the host, what a check of it finds)."""
    operation = OPERATIONS[kind](**{name: Operand.of(array) for name, array in arrays.items()}, **params)
    operands = {name: cupy.asarray(array) for name, array in arrays.items()}
    shape, dtype, _ = operation.results["d"]
    out = cupy.empty(shape, dtype)
    operation.run(operands, {"d": out})
    return cupy.asnumpy(out), operation.find(operands, {"d": out}, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(50, 7, 7), (3, 2, 100, 100), (2, 300, 300), (1500, 1500)])
def test_systems_and_factors(dtype, shape):
    rng = np.random.default_rng(1)
    a, p = random(rng, shape, dtype), positive(rng, shape, dtype)
    n = shape[-1]
    b = random(rng, (*shape[:-1], 3), dtype)
    wide = a + (4 * n * np.eye(n)).astype(dtype)
    for assume, matrix, exact in (
        ("general", a, a),
        ("positive", p, p),
        ("lower", wide, np.tril(wide)),
        ("upper", wide, np.triu(wide)),
    ):
        x, found = run("solve", {"a": matrix, "b": b}, assume=assume)
        size = np.linalg.norm(exact, axis=(-2, -1)) * np.linalg.norm(x, axis=(-2, -1))
        left = np.linalg.norm(exact @ x.astype(np.complex128) - b, axis=(-2, -1))
        assert (left <= (n + 8) * eps(dtype) * size).all(), assume
        assert found.excess < 8
        assert run("inv", {"a": matrix}, assume=assume)[1].excess < 8
    lower, found = run("cholesky", {"a": p})
    assert found.excess < 8
    assert not np.triu(lower, 1).any()


@pytest.mark.parametrize("dtype", [*DTYPES, "f2"])
@pytest.mark.parametrize("n", [100, 5000])
def test_hermitian_products(dtype, n):
    a = random(np.random.default_rng(1), (n, 64), dtype)
    made, found = run("herk", {"a": a})
    np.testing.assert_array_equal(made, adjoint(made))
    assert found.excess < 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials(dtype):
    a = random(np.random.default_rng(1), (20, 30, 30), dtype)
    a = a - adjoint(a)
    made, _ = run("expm", {"a": a})
    unitary = made @ adjoint(made).astype(np.complex128)
    assert np.abs(unitary - np.eye(30)).max() < 1e4 * eps(dtype)


@pytest.mark.parametrize("n", [5, 400])
def test_a_matrix_without_a_result_is_named(n):
    a = positive(np.random.default_rng(1), (4, n, n), "c16")
    a[2, 1] = a[2, :, 1] = 0
    for kind, params in (("inv", {}), ("cholesky", {}), ("inv", {"assume": "positive"}), ("inv", {"assume": "lower"})):
        with pytest.raises(KernelError) as error:
            run(kind, {"a": a}, **params)
        assert error.value.index == [2]


def test_sums():
    a = random(np.random.default_rng(1), (30, 1000, 20), "c8")
    made, found = run("sum", {"a": a}, axes=[0, 1])
    np.testing.assert_allclose(made, a.astype("c16").sum((0, 1)), atol=30000 * eps("c8"))
    assert found.excess < 8
