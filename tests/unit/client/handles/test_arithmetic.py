"""Operators of handles beside NumPy's: values, shapes and dtypes; in programs scaled sums of products are one gemm."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from gemmserve import AsyncClient, Client, DtypeUnsupported, ParameterInvalid, ShapeMismatch


@pytest.fixture
def live(app_url):
    with Client(app_url) as client:
        yield client


SCALARS = [2, -0.5, 1j, 0, 3 + 0j, np.float32(0.25), np.float64(2), np.int64(3), True]


@pytest.mark.parametrize("dtype", ["f2", "f4", "c8", "f8", "c16"])
def test_numbers(live, rng, dtype) -> None:
    x = rng.integers(-3, 4, (2, 3)).astype(dtype)
    rx = live.put(x)
    for scalar in SCALARS:
        for op in (operator.add, operator.sub, operator.mul):
            for expected, made in ((op(x, scalar), op(rx, scalar)), (op(scalar, x), op(scalar, rx))):
                what = f"{op.__name__} {scalar!r}"
                assert (made.shape, made.dtype) == (expected.shape, expected.dtype), what
                found = made.numpy()
                assert found.dtype == expected.dtype, what
                np.testing.assert_array_equal(found, expected, err_msg=what)
    np.testing.assert_array_equal((-rx).numpy(), -x)
    np.testing.assert_array_equal((+rx).numpy(), x)
    for halves in ((rx / 2).numpy(), (rx / np.float64(2)).numpy().astype(dtype)):
        np.testing.assert_array_equal(halves, x / 2)
    assert (rx / 2).dtype == x.dtype
    np.testing.assert_array_equal(np.negative(rx).numpy(), -x)
    assert (+rx).id != rx.id


@pytest.mark.parametrize("dtype", ["f2", "f4", "c8"])
def test_a_wider_scalar_computes_in_its_dtype(live, rng, dtype) -> None:
    x = rng.standard_normal(5).astype(dtype)
    rx = live.put(x)
    for made, expected in (
        (np.sqrt(2) * rx, np.sqrt(2) * x),
        (rx - np.float64(0.1), x - np.float64(0.1)),
        (np.float64(1e300) * rx, np.float64(1e300) * x),
    ):
        assert made.dtype == expected.dtype
        np.testing.assert_allclose(made.numpy(), expected, rtol=1e-15)


def test_arrays(live, rng) -> None:
    x, y = rng.standard_normal((2, 3)).astype("f4"), rng.standard_normal(3) + 1j
    rx, ry = live.put(x), live.put(y)
    for op in (operator.add, operator.sub, operator.mul):
        for made in (op(rx, ry), op(rx, y), op(x, ry), op(rx, y.tolist())):
            assert made.dtype == np.complex128
            np.testing.assert_allclose(made.numpy(), op(x, y))
    np.testing.assert_allclose((rx.T[::2] * rx[0, 1]).numpy(), x.T[::2] * x[0, 1])
    np.testing.assert_allclose((ry.conj() - ry.imag).numpy(), y.conj() - y.imag)
    for function in (np.add, np.subtract, np.multiply):
        np.testing.assert_allclose(function(x, ry).numpy(), function(x, y))


def test_sums_over_axes(live, rng) -> None:
    x = rng.standard_normal((2, 3, 4))
    rx = live.put(x)
    for axis in (None, 0, -1, (0, 2), ()):
        for keepdims in (False, True):
            made = rx.sum(axis, keepdims=keepdims)
            expected = x.sum(axis=axis, keepdims=keepdims)
            assert made.shape == expected.shape
            np.testing.assert_allclose(made.numpy(), expected)
    np.testing.assert_allclose(np.sum(rx.T[1], axis=0).numpy(), x.T[1].sum(0))
    with pytest.raises(np.exceptions.AxisError):
        rx.sum(3)
    with pytest.raises(ValueError, match="repeated"):
        rx.sum((0, -3))


def test_what_is_refused(live, rng) -> None:
    x = live.put(np.ones((2, 3), "f4"))
    jobs = len(live.jobs())
    with pytest.raises(ShapeMismatch, match="broadcast"):
        x + np.ones(4)
    for scalar in (float("nan"), float("inf"), 10**400):
        with pytest.raises(ParameterInvalid):
            x * scalar
    for call in (lambda: x + "a", lambda: x * None, lambda: x / x, lambda: 2 / x, lambda: x**2, lambda: x // 2):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ZeroDivisionError):
        x / 0
    with pytest.raises(DtypeUnsupported):
        x * np.longdouble(2)
    assert len(live.jobs()) == jobs


async def test_an_async_client_awaits_them(app_url, rng) -> None:
    a, b = rng.standard_normal((2, 4, 4))
    async with AsyncClient(app_url) as client:
        ra = await client.put(a)
        np.testing.assert_allclose(await (await (ra - b)).numpy(), a - b)
        async with client.program() as p:
            made = await (await p.gemm(ra, b) * 2)
        np.testing.assert_allclose(await made.numpy(), 2 * a @ b)
        assert len(p.job.info.steps) == 1
