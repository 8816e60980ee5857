"""NumPy's functions on handles: NumPy's results, by whichever name they are called, and not a byte downloaded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmserve
from gemmserve import RemoteArray
from gemmserve._handles.functions import cheapest_order

M, N, V = (3, 4), (4, 5), (4,)
PRODUCTS = {
    "matmul": (np.matmul, gemmserve.matmul, [(M, N), (M, V), (V, N), (V, V), ((2, *M), V), (V, (2, *N)), ((2, *M), N)]),
    "dot": (np.dot, gemmserve.dot, [(M, N), (M, V), (V, N), (V, V), ((2, *M), V), (V, (2, *N)), ((2, *M), N)]),
    "inner": (np.inner, gemmserve.inner, [((3, 4), (5, 4)), (M, V), (V, M), (V, V), ((2, 3, 4), (5, 4)),
                                          (V, (2, 3, 4))]),
    "vdot": (np.vdot, gemmserve.vdot, [(V, V), (M, M), ((), ())]),
    "outer": (np.outer, gemmserve.outer, [(V, V), (M, V), ((), V)]),
    "linalg.outer": (np.linalg.outer, gemmserve.outer, [(V, V)]),
    "linalg.matmul": (np.linalg.matmul, gemmserve.matmul, [(M, N)]),
    "linalg.vecdot": (np.linalg.vecdot, gemmserve.vecdot, [(M, M), (V, M), ((2, 1, 4), M)]),
}  # fmt: skip


@pytest.fixture
def live(app_url):
    with gemmserve.Client(app_url) as client:
        yield client


@pytest.fixture
def fetched(service):
    """The downloads so far."""
    return lambda: [call for call in service.calls if call == "GET /v1/arrays/arr/data"]


@pytest.mark.parametrize("local", ["neither", "first", "second"])
@pytest.mark.parametrize(
    ("name", "shapes"), [(name, pair) for name, (_, _, pairs) in PRODUCTS.items() for pair in pairs]
)
def test_products(client, fetched, random_complex, name, shapes, local) -> None:
    theirs, ours, _ = PRODUCTS[name]
    arrays = [np.asarray(random_complex(*shape)) for shape in shapes]
    operands = [x if which == local else client.put(x) for x, which in zip(arrays, ("first", "second"), strict=True)]
    truth = theirs(*arrays)
    for function in (theirs, ours):
        result = function(*operands)
        assert isinstance(result, RemoteArray)
        assert (result.shape, result.dtype) == (truth.shape, truth.dtype)
        assert fetched() == []
    np.testing.assert_allclose(result.numpy(), truth, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours(*arrays), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 0])
def test_vectors_of_newer_numpys(client, random_complex, axis) -> None:
    a, x = random_complex(2, 3, 4), random_complex(4)
    ra, rx = client.put(a), client.put(x)
    np.testing.assert_allclose(gemmserve.matvec(ra, rx).numpy(), a @ x, rtol=1e-4, atol=1e-5)
    z = random_complex(3)
    np.testing.assert_allclose(gemmserve.vecmat(z, ra).numpy(), z.conj() @ a, rtol=1e-4, atol=1e-5)
    y = random_complex(2, 3, 4)
    truth = (a.conj() * y).sum(axis)
    np.testing.assert_allclose(gemmserve.vecdot(ra, y, axis=axis).numpy(), truth, rtol=1e-4, atol=1e-5)


def test_what_numpy_takes_for_no_matrix(client, service) -> None:
    vector, matrix = client.put(np.ones(3)), client.put(np.ones((3, 3)))
    asked = list(service.requests)
    for call in (
        lambda: gemmserve.matvec(vector, vector),
        lambda: gemmserve.vecmat(matrix, vector),
        lambda: np.linalg.outer(matrix, vector),
    ):
        with pytest.raises(gemmserve.ShapeMismatch):
            call()
    assert service.requests == asked


def test_dot_with_a_number_scales(live) -> None:
    rx = live.put(np.arange(3.0))
    for made in (np.dot(rx, 2), np.dot(2, rx), np.inner(rx, np.float32(2)), rx.dot(2.0)):
        assert made.dtype == np.float64
        np.testing.assert_array_equal(made.numpy(), [0, 2, 4])
    np.testing.assert_array_equal(rx.dot(rx).numpy(), 5)


VIEWS = {
    "transpose": lambda xp, x: xp.transpose(x),
    "transpose by axes": lambda xp, x: xp.transpose(x, (1, 0, 2)),
    "swapaxes": lambda xp, x: xp.swapaxes(x, 0, -1),
    "moveaxis": lambda xp, x: xp.moveaxis(x, (0, 1), (2, 0)),
    "matrix_transpose": lambda xp, x: xp.matrix_transpose(x),
    "squeeze": lambda xp, x: xp.squeeze(x[:1]),
    "expand_dims": lambda xp, x: xp.expand_dims(x, (0, 2)),
    "broadcast_to": lambda xp, x: xp.broadcast_to(x, (5, 2, 3, 4)),
    "diagonal": lambda xp, x: xp.diagonal(x, 1, 1, 2),
    "flip": lambda xp, x: xp.flip(x, 1),
    "conjugate": lambda xp, x: xp.conjugate(x),
    "conj": lambda xp, x: xp.conj(x),
    "real": lambda xp, x: xp.real(x),
    "imag": lambda xp, x: xp.imag(x),
    "reshape": lambda xp, x: xp.reshape(x, (6, -1)),
    "reshape with a copy": lambda xp, x: xp.reshape(x.T, (6, -1)),
    "reshape in Fortran order": lambda xp, x: xp.reshape(x, (6, -1), order="F"),
    "ravel": lambda xp, x: xp.ravel(x),
    "copy": lambda xp, x: xp.copy(x[:, ::2]),
    "shape": lambda xp, x: xp.shape(x),
    "ndim": lambda xp, x: xp.ndim(x),
    "size": lambda xp, x: (xp.size(x), xp.size(x, 1)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(client, fetched, random_complex, view) -> None:
    a = random_complex(2, 3, 4)
    ra = client.put(a)
    truth = view(np, a)
    np.testing.assert_array_equal(view(gemmserve, a), truth)
    for found in (view(np, ra), view(gemmserve, ra)):
        assert fetched() == []
        if not isinstance(truth, np.ndarray):
            assert found == truth
            continue
        assert isinstance(found, RemoteArray)
        assert (found.shape, found.dtype) == (truth.shape, truth.dtype)
    if isinstance(truth, np.ndarray):
        np.testing.assert_array_equal(gemmserve.to_numpy(found), truth)


def test_sums_and_traces(live, rng) -> None:
    x = rng.standard_normal((3, 4, 4))
    rx = live.put(x)
    for found, truth in (
        (gemmserve.sum(rx, 1), x.sum(1)),
        (gemmserve.sum(x, 1), x.sum(1)),
        (gemmserve.trace(rx, 1, 1, 2), x.trace(1, 1, 2)),
        (np.trace(rx[0]), x[0].trace()),
        (np.linalg.trace(rx, offset=-1), np.linalg.trace(x, offset=-1)),
    ):
        assert found.shape == np.shape(truth)
        np.testing.assert_allclose(gemmserve.to_numpy(found), truth, rtol=1e-13, atol=1e-13)


def test_more_of_numpys_names(client, random_complex) -> None:
    a = random_complex(2, 3, 4)
    ra = client.put(a)
    np.testing.assert_array_equal(np.linalg.matrix_transpose(ra).numpy(), a.mT)
    np.testing.assert_array_equal(np.linalg.diagonal(ra, offset=1).numpy(), np.linalg.diagonal(a, offset=1))
    np.testing.assert_array_equal(np.permute_dims(ra, (2, 0, 1)).numpy(), a.transpose(2, 0, 1))
    assert np.result_type(ra, np.float64) == np.complex128
    assert np.iscomplexobj(ra)
    assert np.isrealobj(ra.real)


def optimum(lengths: tuple[int, ...]) -> int:
    """The fewest multiplications for a chain, by trying every order."""
    if len(lengths) == 2:
        return 0
    return min(
        lengths[i - 1] * lengths[i] * lengths[i + 1] + optimum((*lengths[:i], *lengths[i + 1 :]))
        for i in range(1, len(lengths) - 1)
    )


@given(st.lists(st.integers(0, 9), min_size=3, max_size=7))
def test_chains_are_cheapest(lengths) -> None:
    matrices = list(itertools.pairwise(lengths))
    cost = 0
    for one, other in cheapest_order(lengths):
        (m, k), (k_too, n) = matrices[one], matrices[other]
        assert k == k_too
        cost += m * k * n
        matrices.append((m, n))
    assert matrices[-1] == (lengths[0], lengths[-1])
    assert cost == optimum(tuple(lengths))


@pytest.mark.parametrize("shapes", [
    [(2, 9), (9, 3), (3, 5)], [(9,), (9, 3), (3,)], [(2, 9), (9,)], [(9,), (9, 3), (3, 4)],
    [(1, 2), (2, 3), (3, 4), (4, 1)],
])  # fmt: skip
def test_multi_dot_is_one_job(client, service, fetched, random_complex, shapes) -> None:
    arrays = [random_complex(*shape) for shape in shapes]
    operands = [client.put(x) if i else x for i, x in enumerate(arrays)]
    truth = np.linalg.multi_dot(arrays)
    for function in (np.linalg.multi_dot, gemmserve.multi_dot):
        service.requests.clear()
        result = function(operands)
        assert service.calls == ["POST /v1/arrays", "POST /v1/jobs", "DELETE /v1/arrays/arr"]
        assert (result.shape, result.dtype) == (np.shape(truth), truth.dtype)
    np.testing.assert_allclose(result.numpy(), truth, rtol=1e-4, atol=1e-4)


def test_multi_dot_in_a_program(client, service, random_complex) -> None:
    a = random_complex(3, 3)
    ra = client.put(a)
    service.requests.clear()
    with client.program() as p:
        x = p.gemm(ra, ra)
        d = np.linalg.multi_dot([ra, x, ra[:, 0]])
        row = np.dot(ra[0], x)
        copied = np.reshape(x.T, -1)
    assert service.calls == ["POST /v1/jobs"]
    np.testing.assert_allclose(d.numpy(), a @ a @ a @ a[:, 0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(row.numpy(), a[0] @ a @ a, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(copied.numpy(), (a @ a).T.ravel(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: gemmserve.matmul(x, 2.0),
        lambda x: gemmserve.matmul(x[0, 0], x),
        lambda x: gemmserve.multi_dot([x]),
        lambda x: gemmserve.multi_dot([x, x]),
        lambda x: gemmserve.multi_dot([x, x[None], x]),
        lambda x: np.linalg.multi_dot([x, x[0], x]),
    ],
)
def test_what_has_no_product(client, wrong) -> None:
    with pytest.raises(gemmserve.ShapeMismatch):
        wrong(client.put(np.ones((3, 4))))


def test_recorded_results_of_unknown_shape_are_matrices(client, service) -> None:
    ra = client.put(np.stack([np.eye(3), np.zeros((3, 3))]))
    with client.program() as p:
        x = p.gemm_reduce(ra, ra, layout="planar", return_c=True)["c"]
        assert x._known is not None
        x._slot.base = None
        y = x @ x
    assert math.prod(y.numpy().shape) == 18


async def test_awaited(async_client, random_complex) -> None:
    a, x = random_complex(3, 4), random_complex(4)
    ra = await async_client.put(a)
    np.testing.assert_allclose(await (await gemmserve.matmul(ra, x)).numpy(), a @ x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(await (await (x @ ra.T)).numpy(), x @ a.T, rtol=1e-4, atol=1e-5)
    chain = await gemmserve.multi_dot([ra, ra.T, a])
    np.testing.assert_allclose(await chain.numpy(), a @ a.T @ a, rtol=1e-4, atol=1e-4)
    assert await (await gemmserve.vdot(ra, ra)).item() == pytest.approx(np.vdot(a, a), rel=1e-5)
    np.testing.assert_array_equal(await np.transpose(ra).numpy(), a.T)
    np.testing.assert_array_equal(await gemmserve.reshape(ra, (2, 6)).numpy(), a.reshape(2, 6))
    for call, instead in (
        (lambda: np.linalg.inv(ra), r"await client\.inv"),
        (lambda: np.dot(ra, x), r"await gemmserve\.dot"),
    ):
        with pytest.raises(TypeError, match=instead):
            call()
    with pytest.raises(TypeError, match=r"await x\.copy"):
        ra.T.reshape(-1)
    np.testing.assert_array_equal(await (await ra.T.copy()).reshape(-1).numpy(), a.T.ravel())
    async with async_client.program() as p:
        y = await p.gemm(ra, ra.T)
        z = await gemmserve.multi_dot([y, a, ra.T])
        w = await y[:, ::2].copy()
    np.testing.assert_allclose(await z.numpy(), a @ a.T @ a @ a.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(await w.numpy(), (a @ a.T)[:, ::2], rtol=1e-4, atol=1e-4)
