"""compression="zstd": what is sent and received so, against the real app, and what a stray answer does."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from gemmserve import AsyncClient, Client, _errors
from gemmserve._transfer.bodies import Whole
from gemmserve._transport import content_coding
from gemmserve._transport.content_coding import DecodingReceiver, compressed

try:
    zstd = content_coding.module()
except _errors.ParameterInvalid:
    pytest.skip("no zstd is installed", allow_module_level=True)


@pytest.fixture
def integers(rng):
    """12 MiB whose bytes get much shorter, as samples of a converter do."""
    return (rng.integers(-8, 8, (3, 1 << 19)) + 1j * rng.integers(-8, 8, (3, 1 << 19))).astype(np.complex64)


class Spy(httpx.HTTPTransport):
    """Remembers what went each way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def handle_request(self, request):
        answer = super().handle_request(request)
        self.seen.append((request, answer))
        return answer

    def last(self, method):
        return next(pair for pair in reversed(self.seen) if pair[0].method == method)


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("layout", ["C", "F", "strided", "big-endian"])
def test_there_and_back(app_url, integers, digest, layout) -> None:
    array = {
        "C": lambda: integers,
        "F": lambda: np.asfortranarray(integers),
        "strided": lambda: integers[::2, ::-3],
        "big-endian": lambda: integers.astype(">c8"),
    }[layout]()
    spy = Spy()
    with Client(app_url, compression="zstd", transport=spy) as client, client.put(array, digest=digest) as remote:
        request, _ = spy.last("POST")
        assert request.headers["content-encoding"] == "zstd"
        assert int(request.headers["content-length"]) < array.nbytes // 2
        back = remote.numpy()
        _, answer = spy.last("GET")
        assert answer.headers["content-encoding"] == "zstd"
        np.testing.assert_array_equal(back, array)


def test_noise_goes_as_it_is(app_url, rng) -> None:
    noise = rng.standard_normal((1 << 18,))
    spy = Spy()
    with Client(app_url, compression="zstd", transport=spy) as client, client.put(noise) as remote:
        np.testing.assert_array_equal(remote.numpy(), noise)
        for method in ("POST", "GET"):
            request, answer = spy.last(method)
            assert "content-encoding" not in request.headers
            assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,)])
def test_small_and_empty_arrays(app_url, shape) -> None:
    with Client(app_url, compression="zstd") as client:
        np.testing.assert_array_equal(client.put(np.ones(shape)).numpy(), np.ones(shape))


async def test_awaited(app_url, integers) -> None:
    async with AsyncClient(app_url, compression="zstd") as client:
        remote = await client.put(integers)
        np.testing.assert_array_equal(await client.get(remote.id), integers)
        await remote.delete()


def test_a_server_that_does_not_know_it_gets_the_array_as_it_is(app_url, integers, monkeypatch) -> None:
    spy = Spy()
    monkeypatch.setattr("gemmserve_service.http.headers.content_coding.zstd", lambda: None)
    with Client(app_url, compression="zstd", transport=spy) as client, client.put(integers) as remote:
        assert [answer.status_code for request, answer in spy.seen if request.method == "POST"] == [415, 201]
        np.testing.assert_array_equal(remote.numpy(), integers)


def test_what_is_no_coding_is_refused() -> None:
    with pytest.raises(_errors.ParameterInvalid, match="gzip"):
        Client("http://127.0.0.1:9", compression="gzip")


def test_without_the_package_it_says_which(monkeypatch) -> None:
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(content_coding, "import_module", missing)
    with pytest.raises(_errors.ParameterInvalid, match=r"pip install .*\[zstd\]"):
        Client("http://127.0.0.1:9", compression="zstd")


def test_what_hardly_gets_shorter_is_not_compressed(rng) -> None:
    assert compressed(rng.standard_normal(1000)) is None
    assert compressed(np.zeros(0)) is None
    mixed = np.concatenate([np.zeros(1 << 17), rng.standard_normal(3 << 20)])  # its first piece does
    assert compressed(mixed) is None


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_an_answer_in_pieces_of_any_size(size) -> None:
    data = bytes(3 << 20)
    coded = zstd.compress(data[:100]) + zstd.compress(b"") + zstd.compress(data[100:])
    receiver = DecodingReceiver(Whole(lambda whole: whole))
    for start in range(0, len(coded), size):
        receiver.feed(coded[start : start + size])
    assert receiver.finish() == data


def test_an_answer_that_breaks_off_or_is_no_zstd() -> None:
    receiver = DecodingReceiver(Whole(lambda whole: whole))
    receiver.feed(zstd.compress(b"x" * 1000)[:-1])
    with pytest.raises(_errors.TransportError, match="frame"):
        receiver.finish()
    with pytest.raises(_errors.ProtocolError, match="zstd"):
        DecodingReceiver(Whole(bytes)).feed(b"no such thing, not at all")


def test_a_bomb_is_received_in_bounded_pieces() -> None:
    pieces = []

    class Counting:
        def feed(self, piece):
            pieces.append(len(piece))
            if sum(pieces) > 2 << 20:
                raise _errors.ProtocolError("longer than its header says")

    with pytest.raises(_errors.ProtocolError, match="longer"):
        DecodingReceiver(Counting()).feed(zstd.compress(bytes(256 << 20)))
    assert max(pieces) <= 1 << 20
    assert sum(pieces) <= 3 << 20
