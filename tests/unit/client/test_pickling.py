"""Clients and handles in other processes: by URL and id, and never with the key unless that was asked for."""

from __future__ import annotations

import copy
import pickle
import ssl

import httpx
import numpy as np
import pytest
from fake_service import FakeService, serving

import gemmserve
from gemmserve import AsyncClient, Client, RetryPolicy

KEY = "gms_0123456789_Secret"


@pytest.fixture(scope="module")
def url():
    with serving(FakeService()) as found:
        yield found


def again(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_is_pickled_as_what_it_was_made_of(kind) -> None:
    client = kind(
        "host:99/", timeout=7, retry=RetryPolicy(total_s=3), connections=1, verify=False, progress=False,
        digests="always",
    )  # fmt: skip
    made = again(client)
    assert type(made) is kind
    assert made.url == "http://host:99"
    assert made._options == client._options
    assert (made._io.timeout, made._flows.retry.total_s, made._flows.connections) == (7, 3, 1)
    assert made._flows.digests == "always"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_the_key_stays_behind(kind, monkeypatch) -> None:
    """What arrives takes the key of its process, as a new client does."""
    monkeypatch.delenv("GEMMSERVE_API_KEY", raising=False)
    client = kind("http://host", api_key=KEY)
    data = pickle.dumps(client)
    assert b"Secret" not in data
    assert pickle.loads(data)._io.auth is None
    monkeypatch.setenv("GEMMSERVE_API_KEY", "gms_of_the_process")
    assert pickle.loads(data)._io.auth.key == "gms_of_the_process"
    assert b"of_the_process" not in pickle.dumps(kind("http://host"))
    assert again(kind("http://host", api_key=""))._io.auth is None  # none was to be sent


def test_the_key_goes_along_where_that_was_asked_for(monkeypatch) -> None:
    monkeypatch.delenv("GEMMSERVE_API_KEY", raising=False)
    client = Client("http://host", api_key=KEY, pickle_key=True)
    assert "Secret" not in repr(client._options)
    assert again(again(client))._io.auth.key == KEY


def test_what_belongs_to_a_process_cannot_be_pickled() -> None:
    for client in (
        Client("http://host", transport=httpx.MockTransport(FakeService())),
        Client("https://host", verify=ssl.create_default_context()),
    ):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(client)
        assert copy.copy(client) is copy.deepcopy(client) is client


def test_arrays(url) -> None:
    a = np.arange(6.0).reshape(2, 3) * (1 + 1j)
    with Client(url) as client:
        stored = client.put(a)
        for view, expected in ((stored, a), (stored.T, a.T), (stored.H, a.conj().T)):
            arrived = again(view)
            assert (arrived.id, arrived.shape, arrived.dtype) == (view.id, view.shape, view.dtype)
            np.testing.assert_array_equal(arrived.numpy(), expected)
            assert arrived._client is not client
            assert copy.deepcopy([view])[0]._client is client
        one, other = again(stored), again(stored)
        assert one._client is other._client  # a task for each handle makes no connection for each


def test_jobs_and_errors(url) -> None:
    with Client(url) as client:
        a = client.put(np.eye(3))
        job = again(client.submit("gemm", a, a))
        assert job.state == "queued"
        np.testing.assert_array_equal(job.result().numpy(), np.eye(3))
        error = gemmserve.JobFailed("no", problem={"status": 500}, job=job)
        found = again(error)
        assert (found.job.id, found.problem, str(found)) == (job.id, {"status": 500}, "no")


def test_programs_and_their_results(url) -> None:
    with Client(url) as client, client.program() as program:
        x = program.gemm(np.eye(3), 2 * np.eye(3))
        with pytest.raises(gemmserve.ProgramError):
            pickle.dumps(x)
    arrived = again(x)
    assert type(arrived) is gemmserve.RemoteArray
    np.testing.assert_array_equal(arrived.numpy(), 2 * np.eye(3))
    with pytest.raises(TypeError, match="results can"):
        pickle.dumps(program)


async def test_handles_of_an_async_client(url) -> None:
    async with AsyncClient(url) as client:
        stored = await client.put(np.eye(3))
        arrived = again(stored)
        assert type(arrived) is gemmserve.AsyncRemoteArray
        np.testing.assert_array_equal(await arrived.numpy(), np.eye(3))
        job = again(await client.submit("gemm", stored, stored))
        np.testing.assert_array_equal(await (await job.result()).numpy(), np.eye(3))
