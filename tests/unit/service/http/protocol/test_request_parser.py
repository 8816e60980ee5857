"""Requests from bytes, without a connection: the same ones however the bytes are cut, within bounds."""

from __future__ import annotations

import pytest

from gemmserve_service.errors import TooLarge
from gemmserve_service.http.problems import HeadTooLarge, HttpVersion, MalformedRequest
from gemmserve_service.http.protocol.request_parser import RequestParser

GET = b"GET /a?b=c HTTP/1.1\r\nHost: x\r\nX-Spaces: \t y \r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKS = (
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: u\r\n\r\n"
)
UPGRADE = (
    b"POST /u HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello"
)  # fmt: skip
CLOSE = b"GET /z HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Heard:
    """What a parser has told."""

    def __init__(self, *, most=100) -> None:
        self.requests = []
        self.whole = 0
        self._most = most

    def head_begins(self):
        return len(self.requests) < self._most

    def head_ends(self, head):
        self.requests.append([head, b""])

    def body_comes(self, data):
        self.requests[-1][1] += data

    def request_ends(self):
        self.whole += 1

    @property
    def found(self):
        return [(head.method, head.target, head.keeps_alive, body) for head, body in self.requests]


def fed(data, size, **options):
    heard = Heard(**options)
    parser = RequestParser(heard, 4096)
    for start in range(0, len(data), size):
        parser.feed(data[start : start + size])
    return heard, parser


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1 << 16])
def test_pieces_do_not_matter(size):
    heard, _ = fed(GET + POST + CHUNKS + UPGRADE + GET + CLOSE, size)
    assert heard.found == [
        ("GET", b"/a?b=c", True, b""),
        ("POST", b"/p", True, b"hello"),
        ("POST", b"/c", True, b"abcde"),
        ("POST", b"/u", True, b"hello"),
        ("GET", b"/a?b=c", True, b""),
        ("GET", b"/z", False, b""),
    ]
    assert heard.whole == 6
    assert heard.requests[0][0].headers == [(b"host", b"x"), (b"x-spaces", b"y")]


def test_nothing_is_read_that_is_not_wanted():
    heard, _ = fed(GET + GET + b"nonsense", 1 << 16, most=1)
    assert len(heard.found) == 1


@pytest.mark.parametrize("rest", [0, 10])
@pytest.mark.parametrize("upgrade", [b"", b"Connection: Upgrade\r\nUpgrade: x\r\n"])
def test_a_body_that_is_received_elsewhere(rest, upgrade):
    """Its end may come by the parser, with what follows it."""
    heard, parser = fed(b"POST /p HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Content-Length: 30\r\n\r\n0123456789", 1 << 16)
    assert parser.left == 20
    parser.skip(20 - rest)
    assert (parser.left, heard.whole) == (rest, int(not rest))
    parser.feed(b"x" * rest + POST[:20])
    parser.feed(POST[20:])
    assert [each[1:] for each in heard.found] == [(b"/p", True, b"0123456789" + b"x" * rest), (b"/p", True, b"hello")]
    assert heard.whole == 2


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * 6000,
        b"GET / HTTP/1.1\r\nX: " + b"x" * 6000,
        b"GET / HTTP/1.1\r\n" + b"x" * 6000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000,
        CHUNKS[:-4] + b"x" * 6000,
        CHUNKS[:-2] + b"X: y\r\n" * 1000,
        CHUNKS[: CHUNKS.index(b"=y")] + b"x" * 6000,
    ],
    ids=["target", "value", "name", "fields", "trailer", "trailers", "chunk's extension"],
)
@pytest.mark.parametrize("size", [100, 1000])
def test_what_does_not_end_is_cut_off(data, size):
    with pytest.raises(HeadTooLarge):
        fed(data, size)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"nonsense\r\n\r\n", MalformedRequest),
        (b"GET / RTSP/1.0\r\n\r\n", MalformedRequest),
        (b"GET / ICE/1.0\r\n\r\n", MalformedRequest),
        (b"SOURCE / ICE/1.0\r\n\r\n", MalformedRequest),
        (b"GET /\r\n\r\n", HttpVersion),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HttpVersion),
        (POST.replace(b": 5", b": " + b"9" * 30), TooLarge),
        (UPGRADE.replace(b": 5", b": 5, 5"), MalformedRequest),
        (CHUNKS.replace(b"\r\n3\r\n", b"\r\nzz\r\n"), MalformedRequest),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 16])
def test_refusals(data, error, size):
    with pytest.raises(error):
        fed(GET + data, size)


def test_an_error_of_whoever_listens_is_no_client_s():
    class Failing(Heard):
        def head_ends(self, head):
            raise ZeroDivisionError

    with pytest.raises(Exception, match="callback") as caught:
        RequestParser(Failing(), 4096).feed(GET)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
