"""Flipped bits on the way: found by digests, sent for again, and never in a result."""

from __future__ import annotations

import base64
import hashlib

import httpx
import numpy as np
import pytest
from fake_service import npy

import gemmserve
from gemmserve import AsyncClient, Client, RetryPolicy
from gemmserve._calls import arrays as array_flows
from gemmserve._transfer import bodies, parts
from gemmserve._transport import digests as _digests


def whole(body) -> bytes:
    return b"".join(bytes(piece) for piece in body.pieces())


def test_the_field_s_value() -> None:
    body = bodies.NpyBody(np.eye(5))
    digest = hashlib.sha256(whole(body)).digest()
    assert _digests.field_value(body.pieces()) == f"sha-256=:{base64.b64encode(digest).decode()}:"
    for field in (_digests.field_value(body.pieces()), f"md5=:AA==:, {_digests.field_value([whole(body)])}"):
        assert _digests.sha256_of(field) == digest
    for field in (None, "", "sha-512=:AAAA:", "sha-256=:AAAA:", "x-sha-256=:" + "A" * 43 + "=:"):
        assert _digests.sha256_of(field) is None


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(gemmserve.ParameterInvalid, match="digests"):
        Client(digests="sometimes")


class Line(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """To the real app; flips a bit of bodies: `up` of requests', `down` of answers' that hold arrays."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport()
        self.up = self.down = 0
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        if self.up and len(body) > 200:
            self.up -= 1
            body = flipped(body)
        sent = httpx.Request(request.method, request.url, headers=request.headers, content=body)
        self.requests.append(sent)
        answer = self.inner.handle_request(sent)
        content = answer.read()
        if self.down and answer.status_code in {200, 206} and len(content) > 200:
            self.down -= 1
            content = flipped(content)
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = b"".join([piece async for piece in request.stream])
        plain = httpx.Request(request.method, request.url, headers=request.headers, content=content)
        return self.handle_request(plain)


def flipped(data: bytes) -> bytes:
    at = len(data) - 50
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def connect(app_url, line):
    def make(kind=Client, **options):
        return kind(app_url, transport=line, retry=RetryPolicy(base_s=0.001), **options)

    return make


@pytest.fixture
def in_parts(monkeypatch) -> None:
    monkeypatch.setattr(array_flows, "PARTS_FROM", 20_000)
    for module in (array_flows, parts):
        monkeypatch.setattr(module, "PART", 9_000)


@pytest.fixture
def a(rng):
    return rng.standard_normal((80, 60))


def known(connect, client: Client, remote: gemmserve.RemoteArray) -> gemmserve.RemoteArray:
    """The array, once the server has its digest."""
    with connect(digests="always") as asking:
        asking.array(remote.id).numpy()
    assert client.array(remote.id).info.sha256
    return remote


@pytest.mark.parametrize("connections", [0, 3])
def test_a_download_that_was_changed_is_fetched_again(connect, line, a, connections) -> None:
    with connect(connections=connections) as client:
        remote = known(connect, client, client.put(a))
        line.down = 2
        np.testing.assert_array_equal(remote.numpy(), a)
        assert not line.down
        line.down = 100
        with pytest.raises(gemmserve.CorruptAnswer):
            remote.numpy()
        assert line.down == 95  # what changes every time is not in passing


@pytest.mark.usefixtures("in_parts")
def test_in_parts_too(connect, line, a) -> None:
    with connect() as client:
        remote = known(connect, client, client.put(a))
        line.down = 3
        np.testing.assert_array_equal(remote.numpy(), a)
        assert not line.down


def test_never_looks_not(connect, line, a) -> None:
    with connect(digests="never") as client:
        remote = known(connect, client, client.put(a))
        line.down = 1
        assert not np.array_equal(remote.numpy(), a)


@pytest.mark.parametrize("way", ["up", "down"])
def test_always_checks_products_both_ways(connect, line, a, way) -> None:
    with connect(digests="always") as client:
        for call, expected in (
            (lambda: client.gemm(a, a.T), a @ a.T),
            (lambda: client.gemm_reduce(a, a.T, reduce="sum"), (a @ a.T).sum(0)),
            (lambda: client.gemm_many([a, a], a.T), [a @ a.T] * 2),
            (lambda: client.put(a).numpy(), a),
        ):
            setattr(line, way, 2)
            np.testing.assert_allclose(call(), expected, rtol=1e-12)
            assert not getattr(line, way)


@pytest.mark.usefixtures("in_parts")
def test_always_has_results_hashed_that_nobody_had(connect, line, a) -> None:
    with connect(digests="always") as client:
        remote = client.put(a)
        product = remote @ remote.T
        assert product.info.sha256 is None
        line.down = 1
        np.testing.assert_allclose(product.numpy(), a @ a.T, rtol=1e-12)
        assert client.array(product.id).info.sha256


def test_always_checks_documents(connect, line, a) -> None:
    """A job's JSON is as good as the operands that it names."""
    with connect(digests="always") as client:
        remote = client.put(a)
        line.requests.clear()
        line.up = 0
        job = client.submit("gemm", remote, remote.T)
        assert "content-digest" in line.requests[-1].headers
        assert client.job(job.id).id == job.id
        assert [info.state for info in job.events()][-1] == "succeeded"


async def test_a_stream_of_events_has_no_digest_so_its_end_is_asked_for_again(connect, line, a) -> None:
    with connect(digests="always") as client:
        remote = client.put(a)
        job = client.submit("gemm", remote, remote.T)
        job.wait()
        line.requests.clear()
        (last,) = job.events()
        assert [request.url.path.rpartition("/")[2] for request in line.requests] == ["events", job.id]
        assert last.state == "succeeded"
    async with connect(AsyncClient, digests="always") as client:
        found = await client.job(job.id)
        assert [info.state async for info in found.events()] == ["succeeded"]
        assert line.requests[-1].url.path.endswith(job.id)


async def test_awaited(connect, line, a) -> None:
    async with connect(AsyncClient, digests="always") as client:
        line.up = line.down = 1
        np.testing.assert_allclose(await client.gemm(a, a.T), a @ a.T, rtol=1e-12)
        remote = await client.put(a)
        line.down = 1
        np.testing.assert_array_equal(await remote.numpy(), a)
        assert (line.up, line.down) == (0, 0)


def test_always_wants_one(service) -> None:
    """What answers without is no server that was asked for one."""
    with Client(transport=httpx.MockTransport(service), digests="always") as client:
        for call in (lambda: client.gemm(np.eye(2), np.eye(2)), client.health):
            with pytest.raises(gemmserve.ProtocolError, match="Content-Digest"):
                call()


def test_past_the_library_too() -> None:
    """A receiver that knows where bytes belong is told where they landed."""
    data = npy(np.arange(40.0)).content
    for wrong in (False, True):
        expected = hashlib.sha256(data + b"x" * wrong).digest()
        receiver = _digests.CheckedPlacing(bodies.NpyReceiver(len(data)), expected)
        receiver.feed(data[:200])
        rest = memoryview(data)[200:]
        place = receiver.place()
        for start in range(0, len(rest), 33):
            piece = rest[start : start + 33]
            place[start : start + len(piece)] = piece
            receiver.landed(len(piece))
        if wrong:
            with pytest.raises(gemmserve.CorruptAnswer):
                receiver.finish()
        else:
            np.testing.assert_array_equal(receiver.finish(), np.arange(40.0))
