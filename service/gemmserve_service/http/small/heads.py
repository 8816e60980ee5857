"""Heads of small requests: what they say, and those that were seen before.

A client that multiplies small matrices sends the same head again and again, byte for byte. What a parser made of it the
first time is remembered, and the next time nothing has to be parsed. Three values alone are others every time: what the
client calls the exchange, which the answer repeats, the Idempotency-Key of a job, and the traceparent of a request that
is traced. Where a path ends with an id, that is a fourth one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gemmserve.wire import (
    EXCHANGE_HEADER,
    EXCHANGE_PATTERN,
    IDEMPOTENCY_HEADER,
    NPY,
    NPZ,
    SESSION_HEADER,
    TRACEPARENT_HEADER,
)
from gemmserve_service.errors import ServiceError
from gemmserve_service.http.headers.every_answer import EXCHANGE
from gemmserve_service.http.headers.preferences import Preference, choose_media_type, parse_prefer
from gemmserve_service.http.middleware.observe import exchange_of
from gemmserve_service.http.requests.multipart_decoder import boundary_of
from gemmserve_service.http.requests.strict_json import one_shot_params
from gemmserve_service.http.small.form_memo import FormMemo
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
_ID: Final = "[A-Za-z0-9_]{1,64}"
_END: Final = b"\r\n\r\n"
_VARYING: Final = re.compile(
    rf"\r\n({EXCHANGE_HEADER}|{IDEMPOTENCY_HEADER}|{TRACEPARENT_HEADER}): ({EXCHANGE_PATTERN})(?=\r\n)".encode("ascii")
)
_TARGET: Final = re.compile(rf"(?:GET /v1/(?:jobs|arrays)/|DELETE /v1/arrays/)({_ID})(?=[ ?])".encode("ascii"))
_PATH: Final = re.compile(rf"(/v1/(?:jobs|arrays)/)({_ID})")
_WAIT: Final = re.compile(rb"wait=((?:0|[1-9]\d{0,4})(?:\.\d{1,6})?)")
_KEY: Final = IDEMPOTENCY_HEADER.lower().encode("ascii")
_MAX_KEY: Final = 255
_EXCHANGE_NAME: Final = EXCHANGE_HEADER.encode("ascii")
_TRACEPARENT: Final = TRACEPARENT_HEADER.encode("ascii")


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


@dataclass(frozen=True, slots=True)
class JobsRoute:
    """The route by which jobs are submitted, likewise."""

    path: str = "/v1/jobs"


@dataclass(frozen=True, slots=True)
class DeletionsRoute:
    """The route by which many arrays are deleted, likewise."""

    path: str = "/v1/deletions"


@dataclass(frozen=True, slots=True)
class StatesRoute:
    """The route by which the states of several jobs are asked for, likewise."""

    path: str = "/v1/job-states"


@dataclass(frozen=True, slots=True)
class ItemRoute:
    """A route of one job or array, whose id is the end of the path; likewise."""

    path: str


SMALL: Final[dict[str, SmallRoute | JobsRoute | DeletionsRoute | StatesRoute]] = {
    route.path: route
    for route in (
        SmallRoute("/v1/gemm", GemmParams, frozenset({"a", "b", "c", "params"})),
        SmallRoute("/v1/gemm-reduce", GemmReduceParams, frozenset({"a", "b", "params"})),
        JobsRoute(),
        DeletionsRoute(),
        StatesRoute(),
    )
}
JOB: Final = ItemRoute("/v1/jobs/{job_id}")
ARRAY: Final = ItemRoute("/v1/arrays/{array_id}")
_ITEMS: Final = {("GET", "/v1/jobs/"): JOB, ("GET", "/v1/arrays/"): ARRAY, ("DELETE", "/v1/arrays/"): ARRAY}


class Varying(NamedTuple):
    """Values of a head that are others every time."""

    repeats: bytes = b""
    """Value that the answer says again."""
    key: str | None = None
    """Idempotency-Key."""
    item: str = ""
    """Id of the job or array in the path."""
    traceparent: str = ""
    """Traceparent, as it came."""


_NOTHING: Final = Varying()


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Contents of a plain head."""

    route: SmallRoute | JobsRoute | DeletionsRoute | StatesRoute | ItemRoute
    fields: dict[bytes, bytes]
    """Its headers, none of which is there twice."""
    size: int
    """Bytes of the body."""
    request_id: str
    varying: Varying
    """Those of the request that was parsed."""
    boundary: bytes
    """Boundary of a form; empty for JSON."""
    timeout_s: float | None
    """Seconds that the query names: of a one-shot, or for which a job is waited for."""
    preference: Preference
    scope: dict[str, Any]
    """Part of the ASGI scope that the head alone decides."""
    form: FormMemo = field(default_factory=FormMemo, init=False)
    """The last form that came with it."""


def read(scope: Mapping[str, Any]) -> Head | None:
    """Contents of a parsed head; None: it is not plain, or wrong."""
    path, item = scope["path"], ""
    route: SmallRoute | JobsRoute | DeletionsRoute | StatesRoute | ItemRoute | None
    route = SMALL.get(path) if scope["method"] == "POST" else None
    if route is None and (found := _PATH.fullmatch(path)) is not None:
        route, item = _ITEMS.get((scope["method"], found[1])), found[2]
    if route is None:
        return None
    timeout_s = None
    if scope["query_string"]:
        match = (_WAIT if route is JOB else _TIMEOUT).fullmatch(scope["query_string"])
        timeout_s = float(match[1]) if match else 0.0
        if not 0 < timeout_s <= _MAX_S:
            return None
    fields: dict[bytes, bytes] = dict(scope["headers"])
    if len(fields) != len(scope["headers"]) or not fields.keys().isdisjoint(_UNUSUAL):
        return None
    length = fields.get(b"content-length", b"0" if item else b"")
    size = int(length) if length.isdigit() and len(length) < 8 else MAX_BYTES + 1
    if size > MAX_BYTES:
        return None
    key: str | None = None
    boundary = b""
    if isinstance(route, ItemRoute):
        if size or b"expect" in fields or (timeout_s is not None and route is not JOB):
            return None
    elif isinstance(route, JobsRoute | DeletionsRoute | StatesRoute):
        key = _text(fields[_KEY]) if _KEY in fields else None
        media_type = _text(fields.get(b"content-type")).split(";")[0].strip().lower()
        plain = size > 0 and media_type == "application/json" and not scope["query_string"]
        if not plain or (key is not None and not 0 < len(key) <= _MAX_KEY):
            return None
    else:
        if not _acceptable(fields.get(b"accept", b"")):
            return None
        try:
            boundary = boundary_of(_text(fields.get(b"content-type")), hint="")
        except ServiceError:
            return None
    kept = {name: scope[name] for name in ("type", "method", "path", "query_string", "headers")}
    request_id = _text(fields.get(b"x-request-id"))
    varying = Varying(exchange_of(_text(fields.get(EXCHANGE))), key, item, _text(fields.get(b"traceparent")))
    preference = parse_prefer([_text(fields[b"prefer"])] if b"prefer" in fields else [])
    return Head(route, fields, size, request_id, varying, boundary, timeout_s, preference, kept)


class KnownHeads:
    """Heads seen last, by their bytes. All of HTTP/1.1, on connections that stay, and not waiting for a word."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, ...], Head] = OrderedDict()

    def find(self, data: bytes) -> tuple[Head, int, Varying] | None:
        """The head that `data` begins with, its bytes, and what is its own; None: it is not known, or not whole."""
        length, key, varying = _key(data)
        head = self._known.get(key)
        if head is None:
            return None
        self._known.move_to_end(key)
        # A value that was not taken out, because of its header's case or its characters, is that of the known head.
        known = head.varying
        return (
            head,
            length,
            Varying(
                varying.repeats or known.repeats,
                known.key if varying.key is None else varying.key,
                varying.item or known.item,
                varying.traceparent or known.traceparent,
            ),
        )

    def learn(self, data: bytes, head: Head) -> None:
        """A parser has read `head` at the beginning of `data`."""
        length, key, _ = _key(data)
        if length and b"expect" not in head.fields:
            self._known[key] = head
            if len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)


def _key(data: bytes) -> tuple[int, tuple[bytes, ...], Varying]:
    """Key of the head that `data` begins with: its length in bytes, the pieces of the head around the values that are
    others every time, and those. Whatever they are, a parser makes the same of the rest. The key has the names of what
    was taken out by themselves: a header without a value is no header whose value was. The length is 0 where the head
    is not whole, too long, or begins otherwise.
    """
    target = None if data.startswith(_BEGINNING) else _TARGET.match(data)
    end = data.find(_END, 0, _MAX_BYTES) if target is not None or data.startswith(_BEGINNING) else -1
    if end < 0:
        return 0, (), _NOTHING
    length = end + len(_END)
    start, item, beginning = 0, "", b""
    if target is not None:
        start, item, beginning = target.end(1), target[1].decode("ascii"), data[: target.start(1)]
    rest = _VARYING.split(data[start:length])  # text, then name, value and text of each
    repeats, key, traceparent = b"", None, ""
    for name, value in zip(rest[1::3], rest[2::3], strict=True):
        if name == _EXCHANGE_NAME:
            repeats = value
        elif name == _TRACEPARENT:
            traceparent = value.decode("ascii")
        else:
            key = value.decode("ascii")
    del rest[2::3]
    return length, (beginning, *rest), Varying(repeats, key, item, traceparent)


@lru_cache(256)
def _acceptable(accept: bytes) -> bool:
    return choose_media_type(accept.decode("latin-1"), (NPY, NPZ)) is not None


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("latin-1")
