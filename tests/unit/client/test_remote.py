"""Handles: flags instead of copies, NumPy's names, and operators that multiply on the server."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace

import httpx
import numpy as np
import pytest
from fake_service import serving

import gemmserve
from gemmserve import Client, RemoteArray
from gemmserve._calls import arrays as array_flows

VIEWS = {
    "plain": lambda x: x,
    "mT": lambda x: x.mT,
    "H": lambda x: x.H if isinstance(x, RemoteArray) else x.conj().swapaxes(-1, -2),
    "conj": lambda x: x.conj(),
    "mT.mT": lambda x: x.mT.mT,
    "H.conj": lambda x: x.H.conj() if isinstance(x, RemoteArray) else x.swapaxes(-1, -2),
    "conj.mT": lambda x: x.conj().mT if isinstance(x, RemoteArray) else x.conj().swapaxes(-1, -2),
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
    ops = {"N": lambda x: x, "T": VIEWS["mT"], "C": VIEWS["H"], "R": np.conj}
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
    assert vector == vector.T
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
    assert service.calls[3:] == ["GET /v1/arrays/arr/data"], "what a product is follows from its operands"


def test_only_asarray_downloads(client, service, random_complex) -> None:
    a = random_complex(3, 4)
    remote = client.put(a)
    np.testing.assert_array_equal(np.asarray(remote), a)
    assert np.asarray(remote, dtype=np.complex128).dtype == np.complex128
    with pytest.raises(ValueError, match="copy"):
        np.array(remote, copy=False)
    service.requests.clear()
    for function in (np.abs, np.linalg.norm, np.sort, bool, lambda x: 1 in x, lambda x: a == x):
        with pytest.raises(TypeError, match=r"\.numpy\(\)"):
            function(remote)
    assert service.requests == []


def test_a_large_download_by_asarray_warns_once(service) -> None:
    transport = httpx.MockTransport(service)
    with Client(transport=transport, warn_download=95) as client:
        remote = client.put(np.eye(4))
        np.asarray(remote[:2])
        remote.numpy()
        with pytest.warns(gemmserve.DownloadWarning, match="downloads 0 MiB") as caught:
            np.asarray(remote)
        assert caught[0].filename == __file__
        np.asarray(remote)
    with Client(transport=transport, warn_download=None) as client:
        np.asarray(client.put(np.eye(4)))


def test_repr_says_what_is_known_without_asking(client, service, random_complex) -> None:
    remote = client.put(random_complex(3, 4))
    where = "at http://127.0.0.1:8000"
    whole = "complex64[3, 4]"
    assert repr(remote.H) == f"<RemoteArray {remote.id} complex64[4, 3] 96 B {where}>.H"
    assert repr(remote[1:, ::2]) == f"<RemoteArray {remote.id} complex64[2, 2] 32 B, a view of {whole} {where}>"
    assert repr(remote[0].imag) == f"<RemoteArray {remote.id} float32[4] 16 B, imag of {whole} {where}>"
    assert repr(remote[0].conj()) == f"<RemoteArray {remote.id} complex64[4] 32 B, conj of {whole} {where}>"
    product = remote @ remote.H
    unknown = RemoteArray(client, product.id)
    before = len(service.requests)
    assert repr(product) == f"<RemoteArray {product.id} complex64[3, 3] 72 B {where}>"
    assert repr(unknown) == f"<RemoteArray {product.id} {where}>"
    assert len(service.requests) == before


def test_delete_and_with(client, service) -> None:
    with client.put(np.eye(2)) as remote:
        assert remote.id in service.arrays
    assert remote.id not in service.arrays
    with pytest.raises(gemmserve.NotFound):
        remote.numpy()


def test_leaving_a_block_is_quiet_about_what_is_gone(client) -> None:
    with client.put(np.eye(2)) as remote:
        remote.delete()


def test_c_may_be_any_view(client, service, random_complex) -> None:
    a, c = random_complex(3, 3), random_complex(3, 3)
    ra, rc = client.put(a), client.put(c)
    np.testing.assert_allclose(client.gemm(ra, ra, rc.H, beta=1).numpy(), a @ a + c.conj().T, rtol=1e-5)
    real = client.put(np.eye(3))
    client.gemm(ra, ra, real.conj(), beta=1)
    sent = json.loads(service.requests[-1].content)
    assert sent["c"] == real.id, "conjugating what is real changes nothing"


OPERAND_VIEWS = {
    "rows": lambda x: x[1:3],
    "steps": lambda x: x[::-2, 1::2],
    "new axis": lambda x: x[None],
    "row": lambda x: x[1],
    "column": lambda x: x[:, 2],
    "transposed part": lambda x: x[1:, :3].T,
    "conjugated part": lambda x: x[:3, ::-1].conj(),
    "adjoint of a part": lambda x: x[:3, ::-1].conj().mT,
    "real": lambda x: x.real,
    "imag of a part": lambda x: x[::2].imag,
    "diagonal": lambda x: x.diagonal(1),
    "reshaped": lambda x: x.reshape(2, 4, 3),
    "none": lambda x: x[3:3],
    "scalar": lambda x: x[1, 1],
}


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("view", OPERAND_VIEWS.values(), ids=OPERAND_VIEWS)
def test_views_as_operands_and_downloads(client, service, random_complex, view, order) -> None:
    a = np.asarray(random_complex(4, 6), order=order)
    if view is OPERAND_VIEWS["reshaped"] and order == "F":
        a = a.reshape(4, 6, order="C")
    remote = client.put(a)
    shown, truth = view(remote), view(a)
    assert (shown.shape, shown.dtype, shown.size, shown.nbytes) == (truth.shape, truth.dtype, truth.size, truth.nbytes)
    before = len(service.arrays)
    np.testing.assert_array_equal(shown.numpy(), truth)
    assert len(service.arrays) == before, "nothing stays of what was gathered"
    if truth.ndim and truth.size:
        b = random_complex(truth.shape[-1], 3)
        np.testing.assert_allclose((shown @ b).numpy(), truth @ b, rtol=1e-4, atol=1e-5)
        left = random_complex(3, truth.shape[-2] if truth.ndim > 1 else truth.shape[0])
        np.testing.assert_allclose((left @ shown).numpy(), left @ truth, rtol=1e-4, atol=1e-5)


def test_downloads_fetch_what_is_shown(client, service, monkeypatch) -> None:
    monkeypatch.setattr(array_flows, "SMALL_SPAN", 0)
    a = np.arange(4000.0).reshape(100, 40)
    remote = client.put(a)

    def fetched(view):
        service.requests.clear()
        np.testing.assert_array_equal(view(remote).numpy(), view(a))
        return [*zip(service.calls, [r.headers.get("range") for r in service.requests], strict=True)]

    assert fetched(lambda x: x[2:4]) == [("GET /v1/arrays/arr/data", f"bytes={80 * 8}-{160 * 8 - 1}")]
    assert fetched(lambda x: x[3, ::-1]) == [("GET /v1/arrays/arr/data", f"bytes={120 * 8}-{160 * 8 - 1}")]
    assert fetched(lambda x: x[:, ::2].T) == [("GET /v1/arrays/arr/data", f"bytes=0-{3999 * 8 - 1}")]
    assert fetched(lambda x: x.T) == [("GET /v1/arrays/arr/data", None)]
    gathered = fetched(lambda x: x[:, 3])
    assert [call for call, _ in gathered] == [
        "POST /v1/jobs", "GET /v1/arrays/arr/data", "DELETE /v1/arrays/arr",
    ]  # fmt: skip
    assert fetched(lambda x: x[:0]) == [("GET /v1/arrays/arr", None)]
    service.arrays.clear()
    for view in (remote[:0], remote[2], remote[:, 3], remote.T):
        with pytest.raises(gemmserve.NotFound):
            view.numpy()


def test_views_under_digests_always_are_whole_or_gathered(client, service) -> None:
    client._flows = replace(client._flows, digests="always")
    remote = client.put(np.eye(4))
    service.requests.clear()
    with pytest.raises(gemmserve.ProtocolError):  # the fake has no digests
        remote[2:].numpy()
    assert service.calls[0] == "POST /v1/jobs"


def test_a_shape_that_is_no_view_is_a_copy_on_the_server(client, service, random_complex) -> None:
    a = random_complex(4, 6)
    remote = client.put(a)
    service.requests.clear()
    assert remote.reshape(-1, 3).id == remote.reshape((2, 2, 6)).id == remote.ravel().id == remote.id
    assert service.requests == []
    copied = remote.T.reshape(-1)
    assert service.calls == ["POST /v1/jobs"]
    np.testing.assert_array_equal(copied.numpy(), a.T.reshape(-1))
    np.testing.assert_array_equal(remote.reshape(3, 8, order="F").numpy(), a.reshape(3, 8, order="F"))
    assert remote.reshape(4, 6, copy=True).id != remote.id
    np.testing.assert_array_equal(remote[:, ::2].copy(order="F").numpy(), a[:, ::2])
    with pytest.raises(ValueError, match="without a copy"):
        remote.T.reshape(-1, copy=False)
    with pytest.raises(ValueError, match="reshape"):
        remote.reshape(5, 5)
    with pytest.raises(ValueError, match="order"):
        remote.reshape(24, order="K")
    with pytest.raises(ValueError, match="order"):
        remote.copy("K")


def test_rows_are_iterated_and_elements_downloaded(client, random_complex) -> None:
    a = random_complex(3, 4)
    remote = client.put(a)
    for row, truth in zip(remote, a, strict=True):
        np.testing.assert_array_equal(row.numpy(), truth)
    assert remote.item(1, 2) == remote[1, 2].item() == a[1, 2]
    for index in (5, -1, (2, -1)):
        assert remote.item(index) == a.item(index)
        assert remote[::-1].item(index) == a[::-1].item(index)
    assert remote[:1, 2:3].item() == a[0, 2]
    for wrong in ((a.size,), ((1,),), (1, 2, 3)):
        with pytest.raises((IndexError, ValueError)):
            remote.item(*wrong)
    with pytest.raises(TypeError, match="0-d"):
        iter(remote[0, 0])
    with pytest.raises(ValueError, match="no element"):
        remote.item()
    with pytest.raises(ValueError, match="ndim < 2"):
        remote[0].mT  # noqa: B018
    with pytest.raises(TypeError, match="real"):
        remote.real.imag  # noqa: B018
    assert remote.real.real == remote.real


def test_handles_are_equal_by_what_they_show(client, random_complex) -> None:
    remote = client.put(random_complex(3, 3))
    other = client.put(random_complex(3, 3))
    again = client.array(remote.id)
    assert remote == again
    assert remote != other
    assert remote == remote.T.T
    assert remote != remote.T
    assert remote.conj() != remote
    assert remote[0:2] == again[:-1]
    assert len({remote, again, remote.T, other}) == 3
    assert remote != 3
    with client.program() as p:
        x, y = p.gemm(remote, other), p.gemm(other, remote)
        found = {x: "x", y: "y"}
        assert x != y
    assert (found[x], x == x.T.T, x == y) == ("x", True, False)


def test_what_is_there_is_not_put_again(client, service) -> None:
    remote = client.put(np.eye(3))
    service.requests.clear()
    with pytest.raises(gemmserve.ParameterInvalid, match="already"):
        client.put(remote.T)
    assert service.requests == []


def test_a_view_goes_elsewhere(service, random_complex) -> None:
    with serving(service) as url, Client(url) as client:
        a = random_complex(4, 6)
        view = client.put(a)[1:, ::2].conj()
        for again in (pickle.loads(pickle.dumps(view)), copy.copy(view), copy.deepcopy(view)):
            assert again == view
            np.testing.assert_array_equal(again.numpy(), a[1:, ::2].conj())


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
