"""Heads of small one-shot requests: what they say, and those that were seen before.

A client that multiplies small matrices sends the same head again and again, byte for byte. What a parser made of it the
first time is remembered, and the next time nothing has to be parsed. One line alone is another every time: what the
client calls the exchange, which the answer repeats.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from gemmserve.wire import EXCHANGE_HEADER, EXCHANGE_PATTERN, NPY, NPZ, SESSION_HEADER
from gemmserve_service.errors import ServiceError
from gemmserve_service.http.headers.every_answer import EXCHANGE
from gemmserve_service.http.headers.preferences import choose_media_type
from gemmserve_service.http.middleware.observe import exchange_of
from gemmserve_service.http.requests.multipart_decoder import boundary_of
from gemmserve_service.http.requests.strict_json import one_shot_params
from gemmserve_service.schemas import GemmParams, GemmReduceParams

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES: Final = 1 << 18
"""Bytes of a small body: it is gathered before it is looked at, and several may be at one time."""

_TIMEOUT: Final = re.compile(rb"timeout_s=((?:0|[1-9]\d{0,4})(?:\.\d{1,6})?)")
_MAX_S: Final = 86_400.0
_UNUSUAL: Final = frozenset(
    {
        *(b"transfer-encoding", b"content-encoding", b"content-digest", b"want-content-digest", b"upgrade"),
        SESSION_HEADER.lower().encode("ascii"),
    }
)
_MAX_KEPT: Final = 256
_MAX_BYTES: Final = 2048
_BEGINNING: Final = b"POST /"
_END: Final = b"\r\n\r\n"
_EXCHANGE: Final = re.compile(rf"\r\n{EXCHANGE_HEADER}: ({EXCHANGE_PATTERN})(?=\r\n)".encode("ascii"))


@dataclass(frozen=True, slots=True)
class SmallRoute:
    """A one-shot route as small requests need it; for the log and the metrics it stands for the route."""

    path: str
    kind: type[GemmParams | GemmReduceParams]
    names: frozenset[str]
    """Parts that a body may have."""

    def parse(self, text: bytes | None) -> GemmParams | GemmReduceParams:
        """Return the params part. Raises MalformedJson, InvalidParameters."""
        return one_shot_params(self.kind, text)


SMALL: Final = {
    route.path: route
    for route in (
        SmallRoute("/v1/gemm", GemmParams, frozenset({"a", "b", "c", "params"})),
        SmallRoute("/v1/gemm-reduce", GemmReduceParams, frozenset({"a", "b", "params"})),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Contents of a plain head."""

    route: SmallRoute
    fields: dict[bytes, bytes]
    """Its headers, none of which is there twice."""
    boundary: bytes
    size: int
    """Bytes of the body."""
    timeout_s: float | None
    request_id: str
    traceparent: str
    repeats: bytes
    """Value that the answer says again, of the request that was parsed."""
    scope: dict[str, Any]
    """Part of the ASGI scope that the head alone decides."""


def read(scope: Mapping[str, Any]) -> Head | None:
    """Contents of a parsed head; None: it is not plain, or wrong."""
    route = SMALL.get(scope["path"])
    if route is None or scope["method"] != "POST":
        return None
    timeout_s = None
    if scope["query_string"]:
        match = _TIMEOUT.fullmatch(scope["query_string"])
        timeout_s = float(match[1]) if match else 0.0
        if not 0 < timeout_s <= _MAX_S:
            return None
    fields: dict[bytes, bytes] = dict(scope["headers"])
    if len(fields) != len(scope["headers"]) or not fields.keys().isdisjoint(_UNUSUAL):
        return None
    length = fields.get(b"content-length", b"")
    size = int(length) if length.isdigit() and len(length) < 8 else MAX_BYTES + 1
    if size > MAX_BYTES or not _acceptable(fields.get(b"accept", b"")):
        return None
    try:
        boundary = boundary_of(_text(fields.get(b"content-type")), hint="")
    except ServiceError:
        return None
    kept = {name: scope[name] for name in ("type", "method", "path", "query_string", "headers")}
    request_id, traceparent = _text(fields.get(b"x-request-id")), _text(fields.get(b"traceparent"))
    repeats = exchange_of(_text(fields.get(EXCHANGE)))
    return Head(route, fields, boundary, size, timeout_s, request_id, traceparent, repeats, kept)


class KnownHeads:
    """Heads seen last, by their bytes. All of HTTP/1.1, on connections that stay, and not waiting for a word."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Head] = OrderedDict()

    def find(self, data: bytes) -> tuple[Head, int, bytes] | None:
        """The head that `data` begins with, its bytes, and what the answer repeats of it; None: it is not known, or not
        whole.
        """
        length, key, repeats = _key(data)
        head = self._known.get(key)
        if head is None:
            return None
        self._known.move_to_end(key)
        return head, length, repeats

    def learn(self, data: bytes, head: Head) -> None:
        """A parser has read `head` at the beginning of `data`."""
        length, key, _ = _key(data)
        if length and b"expect" not in head.fields:
            self._known[key] = head
            if len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)


def _key(data: bytes) -> tuple[int, bytes, bytes]:
    """Key of the head that `data` begins with: its length in bytes, the head without the value that is another every
    time, and that value. Whatever the value, a parser makes the same of the rest. The length is 0 where the head is not
    whole, too long, or begins otherwise.
    """
    end = data.find(_END, 0, _MAX_BYTES) if data.startswith(_BEGINNING) else -1
    if end < 0:
        return 0, b"", b""
    length = end + len(_END)
    found = _EXCHANGE.search(data, 0, length)
    if found is None:
        return length, data[:length], b""
    return length, data[: found.start(1)] + data[found.end(1) : length], found[1]


@lru_cache(256)
def _acceptable(accept: bytes) -> bool:
    return choose_media_type(accept.decode("latin-1"), (NPY, NPZ)) is not None


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")
