"""Requests at whose length proxies and servers have disagreed: what each is, and what a server may make of it.

Each shape holds, where the right reading sees its body, another request. It must never be answered: the request is
either taken, with that text as its body, or refused, and then nothing more is read from the connection. Sources: RFC
9112, sections 2.2 to 7.3 and 11.2; the corpora of http-garden, smuggler and the http-desync-guardian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HIDDEN_PATH = "/v1/devices"
"""Path of the hidden request. Nothing else in the tests asks for it, so the count of requests by route shows it."""

HIDDEN = f"GET {HIDDEN_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: hidden\r\n\r\n".encode()

# Malformed as JSON: whoever answers so has read a body. An empty one is answered otherwise.
_LENGTH = str(len(HIDDEN)).encode()
_CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)


@dataclass(frozen=True)
class Shape:
    """Bytes that a client sends on a connection of its own."""

    name: str
    data: bytes
    outcome: Literal["taken", "refused"]
    statuses: tuple[int, ...]
    """Statuses that the one answer may have."""
    slug: str = ""
    """Slug of its problem."""
    closes: bool = False
    """Whether the connection ends although the request was taken."""

    def __str__(self) -> str:
        return self.name


def head(*fields: bytes, line: bytes = b"POST /v1/jobs HTTP/1.1", host: bytes = b"Host: 127.0.0.1") -> bytes:
    """Return the head of a request whose body would be a job."""
    return b"\r\n".join([line, *([host] if host else []), b"Content-Type: application/json", *fields, b"", b""])


def _taken(name: str, data: bytes, *, status: int = 400, slug: str = "malformed-json", closes: bool = False) -> Shape:
    return Shape(name, data, "taken", (status,), slug, closes)


def _refused(name: str, data: bytes, *statuses: int, slug: str = "invalid-request") -> Shape:
    return Shape(name, data, "refused", statuses or (400,), slug)


def _length(value: bytes) -> bytes:
    return head(b"Content-Length: " + value) + HIDDEN


def _coding(value: bytes) -> bytes:
    return head(b"Transfer-Encoding: " + value) + _CHUNKED


def _chunks(data: bytes) -> bytes:
    return head(b"Transfer-Encoding: chunked") + data


def _upgrade(*fields: bytes, body: bytes = HIDDEN) -> bytes:
    return head(*fields) + body


_CL = b"Content-Length: " + _LENGTH
_TE = b"Transfer-Encoding: chunked"
_CONNECTION = b"Connection: Upgrade"
_H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")

SHAPES = [
    # -- plain ones, so that the table is known to see what it looks for
    _taken("length", head(_CL) + HIDDEN),
    _taken("chunked", head(_TE) + _CHUNKED),
    # -- Upgrade: to be ignored (RFC 9110, section 7.8)
    _taken("upgrade to websocket with a length", _upgrade(_CONNECTION, b"Upgrade: websocket", _CL)),
    _taken("upgrade to websocket with chunks", _upgrade(_CONNECTION, b"Upgrade: websocket", _TE, body=_CHUNKED)),
    _taken("upgrade to the unknown with a length", _upgrade(_CONNECTION, b"Upgrade: x/1", _CL)),
    _taken("upgrade to h2c with a length", _upgrade(*_H2C, _CL)),
    _taken("upgrade to h2c with chunks", _upgrade(*_H2C, _TE, body=_CHUNKED)),
    _taken("upgrade and keep-alive", _upgrade(b"Connection: keep-alive, Upgrade", b"Upgrade: h2c", _CL)),
    _taken("upgrade behind the length", _upgrade(_CL, b"Upgrade: TLS/1.0", _CONNECTION)),
    _taken("upgrade and close", _upgrade(b"Connection: close, Upgrade", b"Upgrade: h2c", _CL), closes=True),
    _taken("upgrade of HTTP/1.0", _upgrade(_CONNECTION, b"Upgrade: x", _CL).replace(b"/1.1", b"/1.0", 1), closes=True),
    _taken("upgrade without Connection", _upgrade(b"Upgrade: websocket", _CL)),
    _taken("Connection: Upgrade without Upgrade", _upgrade(_CONNECTION, _CL)),
    _taken("upgrade of an empty body", _upgrade(_CONNECTION, b"Upgrade: x", body=b""), slug="invalid-request"),
    _taken(
        "upgrade of a length of 0", _upgrade(_CONNECTION, b"Upgrade: x", b"Content-Length: 0", body=b""),
        slug="invalid-request",
    ),
    _refused("upgrade with both lengths", _upgrade(_CONNECTION, b"Upgrade: x", _CL, _TE)),
    _refused("upgrade with an unknown coding", _upgrade(_CONNECTION, b"Upgrade: x", b"Transfer-Encoding: x")),
    _refused("upgrade with a broken chunk", _upgrade(_CONNECTION, b"Upgrade: x", _TE, body=b"zz\r\n" + HIDDEN)),
    _refused("connect", head(line=b"CONNECT 127.0.0.1:80 HTTP/1.1") + HIDDEN),
    _refused("connect with a length", head(_CL, line=b"CONNECT 127.0.0.1:80 HTTP/1.1") + HIDDEN),
    # -- Content-Length
    _taken("length with space behind", _length(_LENGTH + b" ")),
    _taken("length with tabs around", _length(b"\t" + _LENGTH + b"\t \t")),
    _taken("length with leading zeros", _length(b"000" + _LENGTH)),
    _refused("lengths that differ", head(_CL, b"Content-Length: 0") + HIDDEN),
    _refused("lengths that agree", head(_CL, _CL) + HIDDEN),
    _refused("list of lengths", _length(_LENGTH + b", " + _LENGTH)),
    _refused("length with a plus", _length(b"+" + _LENGTH)),
    _refused("length with a minus", _length(b"-" + _LENGTH)),
    _refused("length in hexadecimal", _length(b"0x3c")),
    _refused("length with a space within", _length(b"5 5")),
    _refused("length with an underscore", _length(b"5_0")),
    _refused("length in Arabic digits", _length("\N{ARABIC-INDIC DIGIT FIVE}".encode())),
    _refused("length that is empty", _length(b"")),
    _refused("length past 64 bits", _length(b"18446744073709551617"), 413, slug="too-large"),
    _refused("length of 40 digits", _length(b"9" * 40), 413, slug="too-large"),
    _refused("length beyond any array", _length(b"999999999999999999"), 413, slug="too-large"),
    _refused("length behind a vertical tab", _length(b"\x0b" + _LENGTH)),
    _refused("length behind a form feed", _length(b"\x0c" + _LENGTH)),
    _refused("length with a comma behind", _length(_LENGTH + b",")),
    _refused("length with a point", _length(_LENGTH + b".0")),
    _refused("length with an exponent", _length(b"1e2")),
    _refused("length with NUL behind", _length(_LENGTH + b"\0")),
    _refused("length and an unknown coding", head(_CL, b"Transfer-Encoding: x") + HIDDEN),
    # -- Transfer-Encoding
    _taken("coding in capitals", _coding(b"CHUNKED")),
    _refused("both lengths", head(_CL, _TE) + _CHUNKED),
    _refused("both lengths, the other way round", head(_TE, b"Content-Length: 4") + _CHUNKED),
    _refused("coding twice", head(_TE, _TE) + _CHUNKED),
    _refused("identity, then chunked", head(b"Transfer-Encoding: identity", _TE) + _CHUNKED),
    _refused("chunked, then identity", head(_TE, b"Transfer-Encoding: identity") + _CHUNKED),
    _refused("gzip and chunked", _coding(b"gzip, chunked")),
    _refused("chunked and identity", _coding(b"chunked, identity")),
    _refused("identity", _coding(b"identity")),
    _refused("xchunked", _coding(b"xchunked")),
    _refused("chunked in quotes", _coding(b'"chunked"')),
    _refused("chunked with a parameter", _coding(b"chunked;q=1")),
    _refused("chunked behind a vertical tab", _coding(b"\x0bchunked")),
    _refused("coding that is empty", _coding(b"")),
    _refused("coding of HTTP/1.0", _coding(b"chunked").replace(b"/1.1", b"/1.0", 1)),
    _taken("coding behind a tab", _coding(b"\tchunked")),
    _refused("coding with space behind", _coding(b"chunked \t")),
    _refused("coding with a comma before", _coding(b", chunked")),
    _refused("coding with a comma behind", _coding(b"chunked,")),
    _refused("chunked and chunked", _coding(b"chunked, chunked")),
    _refused("chunked and the unknown", _coding(b"chunked, x")),
    _refused("chunked with NUL behind", _coding(b"chunked\0")),
    _refused("chunked behind a form feed", _coding(b"\x0cchunked")),
    _refused("chunked with another letter", _coding("chun\N{KELVIN SIGN}ed".encode())),
    _refused("coding cut by a carriage return", _coding(b"chu\rnked")),
    _refused("an unknown coding", _coding(b"x")),
    _taken("coding named in Connection", head(b"Connection: Transfer-Encoding", _TE) + _CHUNKED),
    # -- fields
    _refused("space before a colon", head(b"Content-Length : " + _LENGTH) + HIDDEN),
    _refused("tab before a colon", head(b"Transfer-Encoding\t: chunked") + _CHUNKED),
    _refused("space before a name", head(b" " + _CL) + HIDDEN),
    _refused("folded line", head(b"X-Folded: a\r\n b", _CL) + HIDDEN),
    _refused("folded length", head(b"Content-Length:\r\n " + _LENGTH) + HIDDEN),
    _refused("folded coding", head(b"Transfer-Encoding:\r\n\tchunked") + _CHUNKED),
    _refused("space before the first field", b"POST /v1/jobs HTTP/1.1\r\n " + head(_CL).partition(b"\r\n")[2] + HIDDEN),
    _refused("bare line feeds", head(_CL).replace(b"\r\n", b"\n") + HIDDEN),
    _refused("bare line feed in a field", head(b"X: a\nContent-Length: 0", _CL) + HIDDEN),
    _refused("bare line feed at the end", head(_CL)[:-2] + b"\n" + HIDDEN),
    _refused("bare carriage return in a field", head(b"X: a\rContent-Length: 0", _CL) + HIDDEN),
    _refused("NUL in a value", head(b"X: a\0b", _CL) + HIDDEN),
    _refused("NUL in a name", head(b"Content-Length\0: 0", _CL) + HIDDEN),
    _refused("control character in a value", head(b"X: a\x01b", _CL) + HIDDEN),
    _refused("line without a colon", head(b"Content-Length", _CL) + HIDDEN),
    _refused("field without a name", head(b": a", _CL) + HIDDEN),
    _taken("underscore in a name", head(b"Content_Length: 0", b"Transfer_Encoding: chunked", _CL) + HIDDEN),
    _taken("length named in Connection", head(b"Connection: Content-Length", _CL) + HIDDEN),
    _refused("space within a name", head(b"Transfer Encoding: chunked", _CL) + HIDDEN),
    _refused("name in Latin-1", head(b"Content-Length\xa0: 0", _CL) + HIDDEN),
    _refused("carriage return twice", head(b"X: a\r", _CL) + HIDDEN),
    _refused("bare carriage return behind the fields", head(_CL)[:-2] + b"\r" + HIDDEN),
    _refused("line feed, carriage return", head(b"X: a\n\rContent-Length: 0", _CL) + HIDDEN),
    # -- request line
    _taken("empty lines in front", b"\r\n\r\n" + head(_CL) + HIDDEN),
    _taken("absolute form", head(_CL, line=b"POST http://127.0.0.1/v1/jobs HTTP/1.1") + HIDDEN),
    _refused("absolute form of another host", head(_CL, line=b"POST http://example.org/v1/jobs HTTP/1.1") + HIDDEN),
    _refused("absolute form with a user", head(_CL, line=b"POST http://a@127.0.0.1/v1/jobs HTTP/1.1") + HIDDEN),
    _refused("authority form", head(_CL, line=b"POST 127.0.0.1:80 HTTP/1.1") + HIDDEN),
    _refused("asterisk form", head(_CL, line=b"POST * HTTP/1.1") + HIDDEN),
    _refused("fragment", head(_CL, line=b"POST /v1/jobs#x HTTP/1.1") + HIDDEN),
    _refused("Latin-1 in the path", head(_CL, line=b"POST /v1/jobs\xe9 HTTP/1.1") + HIDDEN),
    _refused("Latin-1 in the query", head(_CL, line=b"POST /v1/jobs?\xe9 HTTP/1.1") + HIDDEN),
    _refused("space in the path", head(_CL, line=b"POST /v1/jobs x HTTP/1.1") + HIDDEN),
    _refused("tabs in the line", head(_CL, line=b"POST\t/v1/jobs\tHTTP/1.1") + HIDDEN),
    _refused("space behind the version", head(_CL, line=b"POST /v1/jobs HTTP/1.1 ") + HIDDEN),
    _refused("no version", head(_CL, line=b"POST /v1/jobs") + HIDDEN, 505, slug="http-version"),
    _refused("no version, no fields", b"GET /livez\r\n\r\n" + HIDDEN, 505, slug="http-version"),
    _refused("no version, a request in place of fields", b"GET /livez\r\n" + HIDDEN),
    _refused("HTTP/0.9", head(_CL, line=b"POST /v1/jobs HTTP/0.9") + HIDDEN, 505, slug="http-version"),
    _refused("HTTP/2.0", head(_CL, line=b"POST /v1/jobs HTTP/2.0") + HIDDEN, 505, slug="http-version"),
    _refused("RTSP/1.0", head(_CL, line=b"POST /v1/jobs RTSP/1.0") + HIDDEN),
    _refused("RTSP/1.1", head(_CL, line=b"POST /v1/jobs RTSP/1.1") + HIDDEN),
    _refused("RTSP and more spaces", head(_CL, line=b"POST  /v1/jobs  RTSP/1.0") + HIDDEN),
    _refused("RTSP to all", head(line=b"OPTIONS * RTSP/1.0")),
    _taken("RTSP in a field", head(b"X-Streams: POST / RTSP/1.0", _CL) + HIDDEN),
    _refused("RTSP in a GET", head(line=b"GET /livez RTSP/1.0")),
    _refused("ICE/1.0", head(_CL, line=b"POST /v1/jobs ICE/1.0") + HIDDEN),
    _refused("ICE/1.0 with its method", head(_CL, line=b"SOURCE /v1/jobs ICE/1.0") + HIDDEN),
    _refused("ICE's method", head(_CL, line=b"SOURCE /v1/jobs HTTP/1.1") + HIDDEN),
    _refused("HTTP/1.2", head(_CL, line=b"POST /v1/jobs HTTP/1.2") + HIDDEN),
    _refused("HTTP/1.10", head(_CL, line=b"POST /v1/jobs HTTP/1.10") + HIDDEN),
    _refused("http in small letters", head(_CL, line=b"POST /v1/jobs http/1.1") + HIDDEN),
    _refused("method in small letters", head(_CL, line=b"post /v1/jobs HTTP/1.1") + HIDDEN),
    _refused("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN, 505, slug="http-version"),
    _refused("the beginning of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + HIDDEN),
    _refused("space before the method", b" " + head(_CL) + HIDDEN),
    _refused("NUL in the path", head(_CL, line=b"POST /v1/jobs\0x HTTP/1.1") + HIDDEN),
    _refused("bare carriage return in the line", head(_CL, line=b"POST /v1/jobs\rHTTP/1.1") + HIDDEN),
    _refused("a whole request in the path", head(_CL, line=b"POST /v1/jobs HTTP/1.1 HTTP/1.1") + HIDDEN),
    # -- Host
    _taken("two hosts", head(b"Host: localhost", _CL) + HIDDEN, slug="invalid-request"),
    _taken("no host", head(_CL, host=b"") + HIDDEN, slug="invalid-request"),
    # -- chunks
    _taken("chunk with an extension", _chunks(b'%x;a=b;c="d"\r\n%b\r\n0\r\n\r\n' % (len(HIDDEN), HIDDEN))),
    _taken("chunk with leading zeros", _chunks(b"000%x\r\n%b\r\n000\r\n\r\n" % (len(HIDDEN), HIDDEN))),
    _taken("trailers", _chunks(b"%x\r\n%b\r\n0\r\nX-Trailer: a\r\n\r\n" % (len(HIDDEN), HIDDEN))),
    _taken(
        "Upgrade among the trailers",
        _chunks(b"%x\r\n%b\r\n0\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n" % (len(HIDDEN), HIDDEN)),
    ),
    _refused("Content-Length among the trailers", _chunks(b"0\r\nContent-Length: %b\r\n\r\n" % _LENGTH + HIDDEN)),
    _refused("Transfer-Encoding among the trailers", _chunks(b"0\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN)),
    _refused("bare line feed behind a size", _chunks(b"3\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("bare line feed in an extension", _chunks(b"3;\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("bare line feed behind a chunk", _chunks(b"3\r\nabc\n0\r\n\r\n" + HIDDEN)),
    _refused("bare line feed among the trailers", _chunks(b"0\r\nX: a\n\r\n" + HIDDEN)),
    _refused("nothing behind a chunk", _chunks(b"3\r\nabc0\r\n\r\n" + HIDDEN)),
    _refused("more behind a chunk", _chunks(b"3\r\nabcd\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size with a prefix", _chunks(b"0x3\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size with a sign", _chunks(b"-3\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size with a space behind", _chunks(b"3 \r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size with a space before", _chunks(b" 3\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size past 64 bits", _chunks(b"10000000000000003\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size that is empty", _chunks(b"\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _taken("chunks of several sizes", _chunks(b"%X\r\n%b\r\n" % (10, HIDDEN[:10]) + b"%X\r\n%b\r\n0\r\n\r\n" % (
        len(HIDDEN) - 10, HIDDEN[10:]))),
    _taken("an empty line behind the last chunk", _chunks(_CHUNKED + b"\r\n")),
    _refused("size with a plus", _chunks(b"+3\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size with an underscore", _chunks(b"0_3\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size with a point", _chunks(b"3.0\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("size of many digits", _chunks(b"f" * 17 + b"\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("bare carriage return behind a size", _chunks(b"3\rabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("bare carriage return in an extension", _chunks(b"3;a\rb\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("NUL in an extension", _chunks(b"3;a\0b\r\nabc\r\n0\r\n\r\n" + HIDDEN)),
    _refused("bare carriage return behind a chunk", _chunks(b"3\r\nabc\r0\r\n\r\n" + HIDDEN)),
    _refused("folded trailer", _chunks(b"0\r\nX: a\r\n b\r\n\r\n" + HIDDEN)),
    _refused("space before a colon among the trailers", _chunks(b"0\r\nX : a\r\n\r\n" + HIDDEN)),
    _refused("bare line feed at the end of the trailers", _chunks(b"0\r\n\n" + HIDDEN)),
    # -- bodies where none is expected, and connections that end
    _taken("body of a GET", head(_CL, line=b"GET /livez HTTP/1.1") + HIDDEN, status=200, slug=""),
    _taken("body of a GET in chunks", head(_TE, line=b"GET /livez HTTP/1.1") + _CHUNKED, status=200, slug=""),
    _taken("body of a HEAD", head(_CL, line=b"HEAD /livez HTTP/1.1") + HIDDEN, status=200, slug=""),
    _taken(
        "body of an OPTIONS", head(_CL, line=b"OPTIONS /livez HTTP/1.1") + HIDDEN, status=405, slug="method-not-allowed"
    ),
    _taken("request behind the last one", head(b"Connection: close", _CL) + HIDDEN + HIDDEN, closes=True),
    _taken(
        "request behind the last one, upgraded",
        _upgrade(b"Connection: close, Upgrade", b"Upgrade: x", _CL, body=HIDDEN + HIDDEN),
        closes=True,
    ),
    _taken("request behind one of HTTP/1.0", head(_CL).replace(b"/1.1", b"/1.0", 1) + HIDDEN + HIDDEN, closes=True),
]  # fmt: skip
