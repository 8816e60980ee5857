"""gemm_many and gemm_reduce_many against the real app."""

from __future__ import annotations

import numpy as np
import pytest

import gemmserve
from gemmserve import AsyncClient, Client
from gemmserve._calls.batch import Column, batch_body


@pytest.fixture
def client(app_url):
    with Client(app_url) as client:
        yield client


def same(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-4)


def test_lists_of_equal_and_unequal_shapes(client, random_complex) -> None:
    equal = [random_complex(8, 5) for _ in range(6)], [random_complex(5, 7) for _ in range(6)]
    shapes = [(3, 4, 3), (9, 1, 5), (2, 2, 8)]
    unequal = [random_complex(m, k) for m, k, _ in shapes], [random_complex(k, n) for _, k, n in shapes]
    for a, b in (equal, unequal):
        results = client.gemm_many(a, b)
        assert len(results) == len(a)
        for x, y, d in zip(a, b, results, strict=True):
            assert d.tobytes() == client.gemm(x, y).tobytes()


def test_stacks_shared_operands_and_views(client, random_complex) -> None:
    a, b, c = random_complex(4, 6, 5), random_complex(5, 3), random_complex(6, 3)
    for i, d in enumerate(client.gemm_many(a, b, c, beta=2j, alpha=3)):
        same(d, 3 * a[i] @ b + 2j * c)
    strided = a[:, ::2]
    for i, d in enumerate(client.gemm_many(strided, b)):
        same(d, strided[i] @ b)
    fortran = [np.asfortranarray(x) for x in a]
    for x, d in zip(a, client.gemm_many(fortran, b), strict=True):
        same(d, x @ b)
    (only,) = client.gemm_many([a[0]], [np.asfortranarray(b)])
    same(only, a[0] @ b)
    (only,) = client.gemm_many(a[0], b)
    same(only, a[0] @ b)
    batched = client.gemm_many([random_complex(2, 3, 4)], [random_complex(4, 3)])
    assert batched[0].shape == (2, 3, 3)
    swapped = client.gemm_many(a.astype(">c8"), b)
    same(swapped[1], a[1] @ b)
    assert client.gemm_many([], []) == []
    assert client.gemm_many(np.empty((0, 3, 2)), np.eye(2)) == []


def test_remote_operands_give_remote_results(client, random_complex) -> None:
    a, b = [random_complex(4, 5), random_complex(6, 5)], random_complex(5, 3)
    ra, rb = [client.put(x) for x in a], client.put(b)
    results = client.gemm_many(ra, rb)
    for x, d in zip(a, results, strict=True):
        assert (d.shape, d.dtype) == ((x.shape[0], 3), np.complex64)
        same(d, x @ b)
    flagged = client.gemm_many([ra[0].H, ra[1].conj()], [a[0], rb])
    same(flagged[0], a[0].conj().T @ a[0])
    same(flagged[1], a[1].conj() @ b)
    before = {array.id for array in client.arrays()}
    client.gemm_many(ra, [b, b])
    made = {array.id for array in client.arrays()} - before
    assert len(made) == 2, "the temporary operands are gone, the results are not"


@pytest.mark.parametrize("remote", [False, True])
def test_one_product_s_error(client, random_complex, remote) -> None:
    a, b = [random_complex(4, 5), random_complex(4, 4), random_complex(2, 5)], random_complex(5, 3)
    operands = [client.put(x) for x in a] if remote else a
    with pytest.raises(gemmserve.ShapeMismatch, match="product 1") as caught:
        client.gemm_many(operands, b)
    assert caught.value.problem["item"] == 1
    results = client.gemm_many(operands, b, errors="return")
    assert isinstance(results[1], gemmserve.ShapeMismatch)
    same(results[0], a[0] @ b)
    same(results[2], a[2] @ b)
    with pytest.raises(gemmserve.ParameterInvalid, match="errors"):
        client.gemm_many(operands, b, errors="ignore")


def test_what_can_be_checked_before_anything_is_sent(client) -> None:
    eye = np.eye(2)
    with pytest.raises(gemmserve.ShapeMismatch, match="a has 2, b has 3"):
        client.gemm_many([eye] * 2, [eye] * 3)
    with pytest.raises(gemmserve.DtypeUnsupported, match=r"a\[1\]"):
        client.gemm_many([eye, eye.astype(int)], eye)
    with pytest.raises(gemmserve.DtypeUnsupported, match=r"^b is the id of an array"):
        client.gemm_many([eye], "arr_01jd2w7m4h8k3n5p6q9r0s1t2v")
    with pytest.raises(gemmserve.ParameterInvalid, match="beta needs c"):
        client.gemm_many([eye], [eye], beta=1)


def test_reductions(client, random_complex) -> None:
    a, b = random_complex(3, 6, 4), [random_complex(4, 5), random_complex(4, 2), random_complex(4, 5)]
    for i, d in enumerate(client.gemm_reduce_many(a, b, reduce="absmax")):
        same(d, abs(a[i] @ b[i]).max(0))
    for stacked in (b, np.stack([b[0]] * 3)):
        several = client.gemm_reduce_many(a, stacked, reduce=["sum", "sumsq"], return_c=True)
        for i, results in enumerate(several):
            assert set(results) == {"sum", "sumsq", "c"}
            same(results["sum"], (a[i] @ stacked[i]).sum(0))
            same(results["c"], a[i] @ stacked[i])
    remote = client.gemm_reduce_many([client.put(x) for x in a], b, reduce=["sum"])
    same(remote[1]["sum"], (a[1] @ b[1]).sum(0))


async def test_awaited(app_url, random_complex) -> None:
    a, b = [random_complex(4, 5), random_complex(6, 5)], random_complex(5, 3)
    async with AsyncClient(app_url) as client:
        for x, d in zip(a, await client.gemm_many(a, b), strict=True):
            same(d, x @ b)
        remote = await client.gemm_many([await client.put(x) for x in a], b)
        same(await remote[1].numpy(), a[1] @ b)
        (largest,) = await client.gemm_reduce_many(a[:1], b, reduce="absmax")
        same(largest, abs(a[0] @ b).max(0))


def test_data_lie_where_the_server_can_use_them(random_complex) -> None:
    operands = {
        "a": Column("a", [random_complex(3, 5) for _ in range(4)], shared=False),
        "b": Column("b", [random_complex(5, 2), random_complex(5, 7)], shared=False),
    }
    for length in range(1, 70):
        body = batch_body({"op": "gemm", "x": "y" * length}, operands)
        data = b"".join(body.pieces())
        assert len(data) == body.nbytes
        start = -1
        while (start := data.find(b"\x93NUMPY", start + 1)) >= 0:
            assert start % 8 == 0
        assert data.find(b"\x93NUMPY") % 64 == 0
