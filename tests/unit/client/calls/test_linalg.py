"""Linear algebra by both clients and their programs, against the real app."""

from __future__ import annotations

import numpy as np
import pytest

import gemmserve
from gemmserve import AsyncClient, Client, NotPositiveDefinite, ParameterInvalid, ShapeMismatch, SingularMatrix


@pytest.fixture
def live(app_url):
    with Client(app_url) as client:
        yield client


@pytest.fixture
def matrices(rng):
    a = rng.standard_normal((3, 6, 6)) + 1j * rng.standard_normal((3, 6, 6))
    positive = a @ a.conj().swapaxes(-1, -2) + 6 * np.eye(6)
    b = rng.standard_normal((6, 2))
    return a, positive, b


def expm(a):
    values, vectors = np.linalg.eig(a)
    return (vectors * np.exp(values)[..., None, :]) @ np.linalg.inv(vectors)


def calls(matrices):
    """Calls by name: what is called, operands, options, and NumPy's result."""
    a, positive, b = matrices
    aah = a @ a.conj().swapaxes(-1, -2)
    return {
        "herk": ("herk", (a,), {"alpha": 0.5}, 0.5 * aah),
        "herk of a triangle": ("herk", (a, positive), {"beta": -1, "fill": "lower"}, np.tril(aah - positive)),
        "herk with an addend": ("herk", (a, positive), {}, aah + positive),
        "solve": ("solve", (a, b), {}, np.linalg.solve(a, b)),
        "solve a vector": ("solve", (a[0], b[:, 0]), {}, np.linalg.solve(a[0], b[:, 0])),
        "solve positive": ("solve", (positive, b), {"assume": "positive"}, np.linalg.solve(positive, b)),
        "solve a triangle": ("solve", (a, b), {"assume": "upper"}, np.linalg.solve(np.triu(a), b)),
        "inv": ("inv", (a,), {}, np.linalg.inv(a)),
        "cholesky": ("cholesky", (positive,), {}, np.linalg.cholesky(positive)),
        "expm": ("expm", (a,), {}, expm(a)),
        "a triangle": ("triangle", (a, "upper"), {}, np.triu(a)),
        "hemm": ("hemm", (positive + np.triu(a, 1), b), {}, positive @ b),
        "hemm on the right": (
            "hemm",
            (positive + np.tril(a, -1), b.T),
            {"side": "right", "fill": "upper"},
            b.T @ positive,
        ),
        "trmm": ("trmm", (a, b), {"fill": "upper"}, np.triu(a) @ b),
        "trmm of ones": ("trmm", (a, b), {"unit": True}, (np.tril(a, -1) + np.eye(a.shape[-1])) @ b),
        **{
            f"power {n}": ("matrix_power", (a,), {"n": n}, np.linalg.matrix_power(a, n))
            for n in (-5, -2, -1, 0, 1, 2, 3, 6, 13)
        },
    }


def test_numpy_in_numpy_out_and_remote_in_remote_out(live, matrices) -> None:
    for name, (method, operands, options, expected) in calls(matrices).items():
        made = getattr(live, method)(*operands, **options)
        assert isinstance(made, np.ndarray), name
        np.testing.assert_allclose(made, expected, atol=1e-9 * np.abs(expected).max(), err_msg=name)
        remote = getattr(live, method)(live.put(operands[0]), *operands[1:], **options)
        assert isinstance(remote, gemmserve.RemoteArray), name
        assert (remote.shape, remote.dtype) == (expected.shape, expected.dtype), name
        np.testing.assert_array_equal(remote.numpy(), made, err_msg=name)
    kept = len(live.arrays())
    live.inv(matrices[0])
    live.matrix_power(matrices[0], 5)
    assert len(live.arrays()) == kept  # what was sent and made for local operands is gone


def test_steps_of_one_program(live, matrices) -> None:
    a, _, b = matrices
    ra = live.put(a)
    with live.program() as p:
        r = p.herk(ra, alpha=0.1, name="covariance")
        w = p.solve(r, b, assume="positive")
        power = p.matrix_power(w.mT @ w, 3)
        p.keep(w)
    assert [step["op"] for step in p._recording.steps].count("solve") == 1
    covariance = 0.1 * a @ a.conj().swapaxes(-1, -2)
    expected = np.linalg.solve(covariance, b)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-8)
    np.testing.assert_allclose(
        power.numpy(), np.linalg.matrix_power(expected.swapaxes(-1, -2) @ expected, 3), rtol=1e-6
    )
    assert p.job.info.steps[0]["id"] == "covariance"


def test_numpys_functions_find_them(live, matrices) -> None:
    a, positive, b = matrices
    for function, operands in ((np.linalg.solve, (a, b)), (np.linalg.inv, (a,)), (np.linalg.cholesky, (positive,))):
        made = function(live.put(operands[0]), *operands[1:])
        np.testing.assert_allclose(made.numpy(), function(*operands), atol=1e-10)
    np.testing.assert_allclose(np.linalg.matrix_power(live.put(a), 3).numpy(), np.linalg.matrix_power(a, 3))


def test_views_and_conjugates_as_operands(live, matrices) -> None:
    a, _, b = matrices
    ra = live.put(a)
    np.testing.assert_allclose(live.solve(ra.H, b).numpy(), np.linalg.solve(a.conj().swapaxes(-1, -2), b))
    np.testing.assert_allclose(live.inv(ra[1, ::-1].conj()).numpy(), np.linalg.inv(a[1, ::-1].conj()))
    np.testing.assert_allclose(live.herk(ra.H).numpy(), a.conj().swapaxes(-1, -2) @ a, atol=1e-12)


def test_matrices_without_a_result(live, matrices) -> None:
    a, positive, b = matrices
    a[1, :, 3] = 0
    with pytest.raises(SingularMatrix, match=r"\[1\] is singular") as error:
        live.solve(live.put(a), b)
    assert error.value.index == (1,)
    assert error.value.status == 422
    assert isinstance(error.value, np.linalg.LinAlgError)
    positive[2, 0, 0] = -1
    for method in (live.cholesky, lambda x: live.inv(x, assume="positive")):
        with pytest.raises(NotPositiveDefinite) as error:
            method(positive)
        assert error.value.index == (2,)


def test_what_is_refused_before_anything_is_sent(live) -> None:
    jobs = len(live.jobs())
    for call in (
        lambda: live.inv(np.ones((2, 3))),
        lambda: live.solve(np.eye(3), np.ones((4, 1))),
        lambda: live.solve(np.eye(3), np.ones(4)),
        lambda: live.cholesky(np.ones(3)),
    ):
        with pytest.raises(ShapeMismatch):
            call()
    for options in ({"alpha": 1j}, {"beta": 1}, {"alpha": float("nan")}):
        with pytest.raises(ParameterInvalid):
            live.herk(np.eye(3), **options)
    with pytest.raises(TypeError):
        live.matrix_power(np.eye(3), 0.5)
    with pytest.raises(TypeError):
        live.inv(np.eye(3), name="x")  # of programs alone
    assert len(live.jobs()) == jobs


async def test_an_async_client(app_url, matrices) -> None:
    a, positive, b = matrices
    async with AsyncClient(app_url) as client:
        np.testing.assert_allclose(await client.solve(a, b), np.linalg.solve(a, b))
        ra = await client.put(a)
        remote = await client.matrix_power(ra, 5)
        np.testing.assert_allclose(await remote.numpy(), np.linalg.matrix_power(a, 5))
        async with client.program() as p:
            lower = await p.cholesky(positive)
            x = await p.expm(lower)
        np.testing.assert_allclose(await x.numpy(), expm(np.linalg.cholesky(positive)), rtol=1e-7)
        with pytest.raises(SingularMatrix):
            await client.inv(np.zeros((2, 2)))
