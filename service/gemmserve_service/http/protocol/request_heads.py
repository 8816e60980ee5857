"""Checks of a request's head beyond the parser's, so that no proxy in front of the server can read it otherwise.

llhttp refuses most of what RFC 9112 calls malformed: both lengths, folded and bare lines, spaces before a colon. Of
what it lets pass the rest is refused here: other versions, codings before `chunked`, targets that name another host,
and RTSP, which it reads as HTTP and tells nobody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import TooLarge
from gemmserve_service.http.problems import HttpVersion, MalformedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.errors import ServiceError

_VERSIONS: Final = frozenset({"1.0", "1.1"})
_TUNNELS: Final = frozenset({"CONNECT", "SOURCE"})  # SOURCE is ICE's
_RTSP: Final = b"RTSP/"
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's line and fields."""

    method: str
    target: bytes
    """Origin form: path and query."""
    version: str
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""
    keeps_alive: bool
    """Whether the client wants the connection to stay."""

    @property
    def content_length(self) -> int | None:
        """Bytes of the body; None for chunks, and where there is none. What is no number has been refused."""
        found = dict(self.headers)
        length = None if b"transfer-encoding" in found else found.get(b"content-length")
        return None if length is None else int(length)


def check_head(method: str, target: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The target in origin form: path and query. `headers`: the names in lower case.

    Raises MalformedRequest, HttpVersion.
    """
    if version not in _VERSIONS:
        raise _unspoken(version)
    if method in _TUNNELS:
        raise MalformedRequest(f"{method} is for proxies and streams; this server is none")
    lengths: list[bytes] = []
    codings: list[bytes] = []
    hosts: list[bytes] = []
    for name, value in headers:
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
        elif name == b"host":
            hosts.append(value)
    if len(lengths) + len(codings) > 1:
        raise MalformedRequest("one field says how long a body is: Content-Length or Transfer-Encoding, once")
    if lengths and not lengths[0].isdigit():  # bytes: ASCII digits alone
        raise MalformedRequest("Content-Length is a number of bytes, in digits")
    if codings and (version == "1.0" or codings[0].lower() != b"chunked"):
        raise MalformedRequest("the one Transfer-Encoding that is read is chunked, in HTTP/1.1")
    if not target.isascii():
        raise MalformedRequest("a request's target is of ASCII characters; others are percent-encoded")
    return target if target.startswith(b"/") and b"#" not in target else _origin_form(target, hosts)


def refuse_rtsp(method: str, target: bytes, data: bytes | bytearray) -> None:
    """Raises MalformedRequest for a request line of RTSP. `data`: what the head has come in, with whatever was before
    and after it: whoever has such a line there besides is refused, too.
    """
    if _RTSP in data and re.search(b"%b +%b +%b" % (method.encode("ascii"), re.escape(target), _RTSP), data):
        raise MalformedRequest("this is RTSP; HTTP/1.1 is spoken here")


def describe_parser_error(message: str) -> ServiceError:
    """The problem of a request that the parser refuses, by llhttp's message."""
    if message == "Content-Length overflow":
        return TooLarge("Content-Length is past 64 bits")
    if message == "Pause on PRI/Upgrade":
        return _unspoken("2.0")
    return MalformedRequest(f"this is not HTTP/1.1 as RFC 9112 has it: {message[:200]}")


def _unspoken(version: str) -> ServiceError:
    if version == "0.9":
        return HttpVersion("a request line ends with its version, HTTP/1.1")
    return HttpVersion(
        f"HTTP/{version} is not spoken here, HTTP/1.1 is: without prior knowledge of HTTP/2 clients begin with that, "
        "and go on with it where an Upgrade to h2c is not answered"
    )


def _origin_form(target: bytes, hosts: Sequence[bytes]) -> bytes:
    """Origin form of a target in absolute form, which may not name another host than Host (RFC 9112, 3.2.2)."""
    found = _ABSOLUTE.fullmatch(target)
    if found is None or b"#" in target:
        raise MalformedRequest("a request's target is a path, or a whole URL of this server without a fragment")
    authority, rest = found.groups()
    if len(hosts) != 1 or authority.lower() != hosts[0].lower():
        raise MalformedRequest("the request's target names another host than its Host field")
    return rest if rest.startswith(b"/") else b"/" + rest
