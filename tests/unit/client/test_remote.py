"""Handles: flags instead of copies, NumPy's names, and operators that multiply on the server."""

from __future__ import annotations

import numpy as np
import pytest

import gemmserve
from gemmserve import RemoteArray

VIEWS = {
    "plain": lambda x: x,
    "T": lambda x: x.T if isinstance(x, RemoteArray) else x.swapaxes(-1, -2),
    "H": lambda x: x.H if isinstance(x, RemoteArray) else x.conj().swapaxes(-1, -2),
    "conj": lambda x: x.conj(),
    "T.T": lambda x: x.T.T if isinstance(x, RemoteArray) else x,
    "H.conj": lambda x: x.H.conj() if isinstance(x, RemoteArray) else x.swapaxes(-1, -2),
    "conj.T": lambda x: x.conj().T if isinstance(x, RemoteArray) else x.conj().swapaxes(-1, -2),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_describe_and_download_what_they_show(client, random_complex, view) -> None:
    stored = random_complex(2, 3, 5)
    remote, truth = view(client.put(stored)), view(stored)
    assert (remote.shape, remote.dtype, remote.ndim) == (truth.shape, truth.dtype, 3)
    assert (remote.size, remote.nbytes) == (truth.size, truth.nbytes)
    assert len(remote) == 2
    np.testing.assert_array_equal(remote.numpy(), truth)
    np.testing.assert_array_equal(np.asarray(remote), truth)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("trans", "NTCR")
def test_flags_and_letters_reach_the_server_together(client, service, random_complex, view, trans) -> None:
    ops = {"N": lambda x: x, "T": VIEWS["T"], "C": VIEWS["H"], "R": np.conj}
    stored = random_complex(2, 4, 4)
    b = random_complex(2, 4, 4)
    service_bytes = len(service.arrays)
    result = client.gemm(view(client.put(stored)), view(client.put(b)), trans_a=trans, trans_b=trans)
    expected = ops[trans](view(stored)) @ ops[trans](view(b))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert len(service.arrays) == service_bytes + 3  # no view was uploaded


def test_views_cost_nothing(client, service, random_complex) -> None:
    remote = client.put(random_complex(3, 4))
    before = len(service.requests)
    view = remote.T.H.conj().mT
    assert (view.id, view.shape) == (remote.id, (4, 3))
    assert len(service.requests) == before


def test_vectors_and_real_arrays(client) -> None:
    vector = client.put(np.arange(3.0))
    assert vector.T is vector
    np.testing.assert_array_equal(vector.H.numpy(), np.arange(3.0))
    scalar = client.put(np.array(2.5))
    assert scalar.T.shape == ()
    with pytest.raises(TypeError):
        len(scalar)


@pytest.mark.parametrize("local", [0, 1])
def test_matmul_with_local_arrays_on_either_side(client, service, random_complex, local) -> None:
    a, b = random_complex(3, 4), random_complex(4, 2)
    operands = [array if index == local else client.put(array) for index, array in enumerate((a, b))]
    result = operands[0] @ operands[1]
    assert isinstance(result, RemoteArray)
    np.testing.assert_allclose(result.numpy(), a @ b, rtol=1e-5)
    assert set(service.arrays) == {operands[1 - local].id, result.id}  # the upload for this product is gone


def test_lists_multiply_too(client) -> None:
    remote = client.put([[1.0, 2.0]])
    np.testing.assert_array_equal((remote @ [[3.0], [4.0]]).numpy(), [[11.0]])
    np.testing.assert_array_equal(([[3.0], [4.0]] @ remote).numpy(), [[3.0, 6.0], [4.0, 8.0]])


def test_a_chain_asks_for_no_metadata(client, service, random_complex) -> None:
    a = random_complex(3, 3)
    ra = client.put(a)
    service.requests.clear()
    chained = ra @ ra.H @ ra.T @ ra
    assert service.calls == ["POST /v1/jobs"] * 3
    np.testing.assert_allclose(chained.numpy(), a @ a.conj().T @ a.T @ a, rtol=1e-4)
    assert chained.shape == (3, 3)
    assert service.calls[3:] == ["GET /v1/arrays/arr/data", "GET /v1/arrays/arr"]


def test_numpy_functions_download(client, random_complex) -> None:
    a = random_complex(3, 4)
    remote = client.put(a)
    np.testing.assert_array_equal(np.abs(remote), np.abs(a))
    assert np.linalg.norm(remote) == np.linalg.norm(a)
    assert np.asarray(remote, dtype=np.complex128).dtype == np.complex128
    with pytest.raises(ValueError, match="copy"):
        np.array(remote, copy=False)
    with pytest.raises(TypeError):
        a * remote
    with pytest.raises(TypeError):
        bool(remote)


def test_repr_says_what_is_known_without_asking(client, service, random_complex) -> None:
    remote = client.put(random_complex(3, 4))
    assert repr(remote.H) == f"<RemoteArray {remote.id} complex64[4, 3]>.H"
    product = remote @ remote.H
    before = len(service.requests)
    assert repr(product) == f"<RemoteArray {product.id}>"
    assert len(service.requests) == before


def test_delete_and_with(client, service) -> None:
    with client.put(np.eye(2)) as remote:
        assert remote.id in service.arrays
    assert remote.id not in service.arrays
    with pytest.raises(gemmserve.NotFound):
        remote.numpy()


def test_c_has_no_flags(client, random_complex) -> None:
    a, c = client.put(random_complex(3, 3)), client.put(random_complex(3, 3))
    with pytest.raises(gemmserve.ParameterInvalid, match="c cannot be"):
        client.gemm(a, a, c.T, beta=1)
    real = client.put(np.eye(3))
    client.gemm(a, a, real.conj(), beta=1)  # conjugating what is real changes nothing


async def test_an_async_handle_has_to_be_awaited(async_client, random_complex) -> None:
    a = random_complex(3, 4)
    remote = await async_client.put(a)
    with pytest.raises(TypeError, match="await"):
        np.asarray(remote)
    np.testing.assert_array_equal(await remote.H.numpy(), a.conj().T)
    product = await (remote @ remote.H)
    assert product.shape == (3, 3)
    product = await (a.conj().T @ remote)
    np.testing.assert_allclose(await product.numpy(), a.conj().T @ a, rtol=1e-5)
    async with product:
        pass
    with pytest.raises(gemmserve.NotFound):
        await product.numpy()
