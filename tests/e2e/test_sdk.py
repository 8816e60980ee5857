"""The SDK against the real server: products, arrays and errors, with real bytes on a real socket."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cutting_proxy import CuttingProxy
from fake_service import nobody_s_address

import gemmserve
from gemmserve import AsyncClient, Client, RetryPolicy
from gemmserve._transport.pool import IN_FLIGHT


@pytest.fixture(params=["alone", "two cells"])
def server(request, monkeypatch):
    """What a client is given the URL of: a server, or a router before two, the second of which is the owner's."""
    if request.param == "alone":
        return request.getfixturevalue("lone_server")
    cells = request.getfixturevalue("cells")
    monkeypatch.setenv("GEMMSERVE_API_KEY", cells.owners[1])
    return cells


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back_bit_for_bit(client, rng, dtype, order) -> None:
    stored = np.asarray(rng.standard_normal((3, 5, 7)).astype(dtype), order=order)
    remote = client.put(stored)
    assert (remote.shape, remote.dtype, remote.nbytes) == (stored.shape, stored.dtype, stored.nbytes)
    np.testing.assert_array_equal(remote.numpy(), stored)
    np.testing.assert_array_equal(np.asarray(remote), stored)
    remote.delete()
    with pytest.raises(gemmserve.NotFound):
        client.array(remote.id).numpy()


def test_special_values_survive(client) -> None:
    stored = np.array([[np.nan, np.inf, -np.inf, -0.0, 1e-45]], dtype=np.float32)
    assert client.put(stored).numpy().tobytes() == stored.tobytes()


def test_a_large_array_survives(client, rng) -> None:
    stored = rng.standard_normal((9, 1 << 19))  # 36 MiB: many pieces, more than any socket buffer
    np.testing.assert_array_equal(client.put(stored).numpy(), stored)


def test_numpy_in_numpy_out(client, random_complex) -> None:
    a, b, c = random_complex(2, 20, 30), random_complex(30, 10), random_complex(20, 10)
    d = client.gemm(a, b, c, alpha=1 - 1j, beta=2j)
    assert isinstance(d, np.ndarray)
    assert d.dtype == np.complex64
    np.testing.assert_allclose(d, (1 - 1j) * (a @ b) + 2j * c, rtol=1e-4, atol=1e-4)


def test_chained_products_stay_remote(client, random_complex) -> None:
    a, b = random_complex(40, 40), random_complex(40, 40)
    ra, rb = client.put(a), client.put(b)
    chained = ra.H @ (ra @ rb.T) @ rb.conj()
    assert isinstance(chained, gemmserve.RemoteArray)
    truth = a.conj().T.astype(complex) @ (a @ b.T) @ b.conj()
    assert np.linalg.norm(chained.numpy() - truth) < 1e-5 * np.linalg.norm(truth)


def test_a_remote_operand_keeps_the_result_remote(client, random_complex) -> None:
    a, b = random_complex(8, 9), random_complex(9, 4)
    result = client.gemm(client.put(a), b)
    assert isinstance(result, gemmserve.RemoteArray)
    np.testing.assert_allclose(result.numpy(), a @ b, rtol=1e-5, atol=1e-5)


def test_reductions(client, random_complex) -> None:
    a, b = random_complex(3, 20, 30), random_complex(3, 30, 10)
    c = a.astype(complex) @ b
    np.testing.assert_allclose(client.gemm_reduce(a, b, reduce="absmax", axis="m"), np.abs(c).max(1), rtol=1e-5)
    several = client.gemm_reduce(a, b, reduce=["sum", "argmin"], axis=["n", "batch"], return_c=True)
    assert list(several) == ["sum", "argmin", "c"]
    np.testing.assert_allclose(several["sum"], c.sum((0, 2)), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(several["argmin"], np.abs(c).swapaxes(0, 1).reshape(20, -1).argmin(1))
    np.testing.assert_allclose(several["c"], c, rtol=1e-4, atol=1e-4)


def test_errors_are_typed(client, random_complex) -> None:
    a = random_complex(4, 5)
    with pytest.raises(gemmserve.ShapeMismatch):
        client.gemm(client.put(a), client.put(a))
    with pytest.raises(gemmserve.ParameterInvalid):
        client.gemm_reduce(a, a.T, reduce="max")  # complex numbers have no order
    with pytest.raises(gemmserve.ComputeUnsupported) as caught:
        client.gemm(a, a.T, compute="ozaki")
    assert "fp32" in caught.value.available


@pytest.fixture
def nowhere():
    with nobody_s_address() as url:
        yield url


def test_nothing_listens_there(nowhere) -> None:
    with Client(nowhere, timeout=60, retry=RetryPolicy(total_s=0.5)) as nobody, pytest.raises(gemmserve.TransportError):
        nobody.put(np.zeros((2, 2)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_is_not_asked_for_this_machine(server, nowhere, monkeypatch, host) -> None:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, nowhere)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Client(server.url.replace("127.0.0.1", host)) as client:
        assert client.ready()


async def test_the_async_client_does_the_same(server, random_complex) -> None:
    a, b = random_complex(20, 30), random_complex(30, 10)
    async with AsyncClient(server.url) as client:
        np.testing.assert_allclose(await client.gemm(a, b), a @ b, rtol=1e-5, atol=1e-5)
        remote = await client.gemm(await client.put(a), b)
        np.testing.assert_allclose(await remote.numpy(), a @ b, rtol=1e-5, atol=1e-5)
        job = await client.submit("gemm_reduce", a, b, reduce="sumsq")
        await job.wait(60)
        assert job.state == "succeeded"


def test_fifty_threads_open_fifty_connections(server, random_complex) -> None:
    a = random_complex(40, 40)
    ready = threading.Barrier(50)
    with CuttingProxy(server.url, []) as proxy, Client(proxy.url) as client:

        def work(_: int) -> None:
            ready.wait(60)
            for _ in range(6):
                np.testing.assert_allclose(client.gemm(a, a), a @ a, rtol=1e-4, atol=1e-4)

        with ThreadPoolExecutor(50) as pool:
            list(pool.map(work, range(50)))
        assert proxy.connections <= 50


async def test_four_hundred_at_once_take_no_more_connections_than_help(server, random_complex) -> None:
    """They wait for one where that costs nothing."""
    a = random_complex(16, 16)
    with CuttingProxy(server.url, []) as proxy:
        async with AsyncClient(proxy.url) as client:
            for found in await asyncio.gather(*[client.gemm(a, a) for _ in range(400)]):
                np.testing.assert_allclose(found, a @ a, rtol=1e-4, atol=1e-4)
        assert proxy.connections <= IN_FLIGHT


def test_many_products_by_few_exchanges(client, random_complex) -> None:
    a = random_complex(8, 8)
    ra = client.put(a)
    jobs = client.submit_many([{"op": "gemm", "a": ra, "b": ra, "alpha": number} for number in range(1, 40)])
    for number, job in enumerate(jobs, 1):
        np.testing.assert_allclose(job.result().numpy(), number * (a @ a), rtol=1e-4, atol=1e-4)
    asked = ({"op": "gemm", "a": ra, "b": ra, "alpha": number} for number in range(1, 60))
    for number, result in enumerate(client.map(asked, in_flight=16), 1):
        np.testing.assert_allclose(result.numpy(), number * (a @ a), rtol=1e-4, atol=1e-4)
    assert number == 59


async def test_many_products_awaited(server, random_complex) -> None:
    a = random_complex(8, 8)
    async with AsyncClient(server.url) as client:
        ra = await client.put(a)
        jobs = await client.submit_many([{"op": "gemm", "a": ra, "b": a}] * 5)
        results = [await job.result() for job in jobs]
        results += [result async for result in client.map({"op": "gemm", "a": ra, "b": ra} for _ in range(20))]
        assert len(results) == 25
        np.testing.assert_allclose(await results[-1].numpy(), a @ a, rtol=1e-4, atol=1e-4)
