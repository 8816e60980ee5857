"""RFC 9457 problem details: every exception that a route may raise <-> one stable slug, status and title.

`gemmserve_service.errors.describe` knows the errors of every layer; the ones that HTTP alone raises are defined here.
GET /problems/{slug} documents each from its class's docstring.
"""

# ruff: noqa: N818 (the names are the problem slugs)

from __future__ import annotations

import inspect
import json
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gemmserve.wire import PROBLEM, NpyError
from gemmserve_kernels.problem.errors import DeviceError, KernelError
from gemmserve_service.errors import (
    Forbidden,
    InvalidParameters,
    InvalidRequest,
    ItemInvalid,
    JobFailed,
    NotFound,
    OtherCell,
    ServiceError,
    StepInvalid,
    Unauthorized,
    UnsupportedCoding,
    describe,
)
from gemmserve_service.field_errors import field_of, message_of
from gemmserve_service.http.inference.paths import is_inference
from gemmserve_service.schemas import VALUE, VIEW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

SLUG: Final = "gemmserve.problem"
"""Key in the ASGI scope's `state`, of the slug of the problem that is answered."""

MAX_ERRORS: Final = 20
"""Fields that one problem tells of."""

_CHALLENGE: Final = 'Bearer realm="gemmserve"'


class MalformedJson(ServiceError, slug="malformed-json", status=400, title="The JSON is malformed"):
    """The JSON does not parse: a syntax error, NaN or Infinity, a name given twice, or text that is not UTF-8."""


class MalformedMultipart(ServiceError, slug="malformed-multipart", status=400, title="The multipart body is malformed"):
    """The multipart body breaks off, lacks its boundary, or has a part without a name."""


class NotAcceptable(ServiceError, slug="not-acceptable", status=406, title="No acceptable media type"):
    """The Accept header admits none of the media types that this resource has."""


class MethodNotAllowed(ServiceError, slug="method-not-allowed", status=405, title="The method is not allowed here"):
    """The path exists and knows other methods; the Allow header lists them."""


class RangeNotSatisfiable(
    ServiceError, slug="range-not-satisfiable", status=416, title="The range cannot be satisfied"
):
    """The Range selects no byte; Content-Range says how many there are."""


class HostNotAllowed(ServiceError, slug="host-not-allowed", status=403, title="The Host is not allowed"):
    """While the server has no API keys it answers to loopback names alone, so that no web page can reach it through
    a name of its own (DNS rebinding). GEMMSERVE_ALLOWED_HOSTS admits further names.
    """


class OriginNotAllowed(ServiceError, slug="origin-not-allowed", status=403, title="The Origin is not allowed"):
    """A web page of another site sent this request. GEMMSERVE_ALLOWED_HOSTS admits further sites."""


class MalformedRequest(InvalidRequest):
    """Also what is no request of HTTP/1.1 that can be read in one way only; the connection ends then."""


class HttpVersion(ServiceError, slug="http-version", status=505, title="The HTTP version is not supported"):
    """HTTP/1.1 and HTTP/1.0 are spoken here; a request line without a version, HTTP/2 and its preface are refused."""


class RequestTimeout(ServiceError, slug="request-timeout", status=408, title="The body came too slowly"):
    """The body came more slowly than GEMMSERVE_MIN_BODY_RATE allows; what was reserved for it is free again."""


class HeadTooSlow(RequestTimeout):
    """Also a head that was not whole within GEMMSERVE_HEAD_TIMEOUT_S."""


class HeadTooLarge(ServiceError, slug="head-too-large", status=431, title="The request's head is too large"):
    """Request line and headers together have more bytes than GEMMSERVE_MAX_HEAD_BYTES."""


class TooManyConnections(ServiceError, slug="too-many-connections", status=503, title="Too many connections"):
    """Every connection that this address, or the server, may have is in the middle of a request."""


class TooManyListeners(TooManyConnections):
    """Also as many listeners of the overview's stream as there may be, of all or of one owner."""


class ProblemResponse(Response):
    """A problem's document, or, where the Open Inference Protocol is spoken, an error in its form. Its slug goes into
    the state of the request that it answers, for the audit.
    """

    media_type = PROBLEM

    def __init__(self, slug: str, content: bytes, status_code: int, headers: Mapping[str, str], detail: str) -> None:
        super().__init__(content, status_code, headers)
        self.slug = slug
        self._fields = headers
        self._detail = detail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        scope.setdefault("state", {})[SLUG] = self.slug
        if is_inference(scope["path"]):
            text = json.dumps({"error": self._detail})
            await Response(text, self.status_code, self._fields, "application/json")(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def problem_response(error: BaseException, headers: Mapping[str, str] | None = None) -> ProblemResponse:
    """The answer to an exception: its document, and Retry-After where the client may come back."""
    description = describe(error)
    sent = dict(headers or {})
    if description.retry_after_s is not None:
        sent.setdefault("Retry-After", str(max(1, math.ceil(description.retry_after_s))))
    elif description.status in {429, 503}:
        sent.setdefault("Retry-After", "1")
    if description.status == RequestTimeout.status:
        sent.setdefault("Connection", "close")  # RFC 9110, section 15.5.9: the rest of the body is not waited for
    if isinstance(error, Unauthorized):
        # RFC 6750, section 3: no error code where no key was sent.
        sent.setdefault("WWW-Authenticate", _CHALLENGE + (', error="invalid_token"' if error.presented else ""))
    elif isinstance(error, Forbidden):
        scope = error.extra.get("scope", "")
        sent.setdefault("WWW-Authenticate", f'{_CHALLENGE}, error="insufficient_scope", scope="{scope}"')
    elif isinstance(error, OtherCell):
        sent.setdefault("Location", error.location)
    elif isinstance(error, UnsupportedCoding):
        sent.setdefault("Accept-Encoding", error.accepted)  # RFC 9110, section 15.5.16
    # ASCII, so that a lone surrogate quoted from a request cannot break the answer.
    document = json.dumps(description.problem().model_dump(exclude_none=True))
    return ProblemResponse(description.slug, document.encode("ascii"), description.status, sent, description.detail)


_OTHER_WAY: Final = {("string_type", (VALUE,), dict), ("model_type", (VIEW,), str)}
"""Errors of operands that say no more than that they are given the other way: type, end of the place, type given."""


def describe_validation(errors: Sequence[Any], *, skip: Sequence[str] = ()) -> tuple[str, list[dict[str, str]]]:
    """One sentence and one entry a field from pydantic's list of errors; `skip` are tags of unions, not field names."""
    entries: dict[str, str] = {}
    for error in errors:
        if (error["type"], error["loc"][-1:], type(error.get("input"))) in _OTHER_WAY:
            continue
        names = [str(part) for part in field_of(error) if not (isinstance(part, str) and part in skip)]
        message = message_of(error)
        field = ".".join(names) or "body"
        if message != entries.get(field):
            entries[field] = f"{entries[field]}; or: {message}" if field in entries else message
    listed = [{"field": field[:120], "message": message} for field, message in list(entries.items())[:MAX_ERRORS]]
    return "; ".join(f"{entry['field']}: {entry['message']}" for entry in listed), listed


async def _render(_: Request, error: Exception) -> Response:
    return problem_response(error)


async def _render_validation(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise TypeError from error
    detail, entries = describe_validation(error.errors(), skip=("query", "path", "header", "body"))
    return problem_response(InvalidParameters(detail, entries))


async def _render_http(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, whose Allow knows only the first of several routes with the same path."""
    if not isinstance(error, HTTPException):
        raise TypeError from error
    if error.status_code == 404:
        return problem_response(NotFound(f"there is nothing at {request.url.path[:200]}"))
    if error.status_code == 405:
        allowed = ", ".join(sorted({*_methods_at(request)}))
        detail = f"{request.url.path[:200]} knows {allowed}, not {request.method[:20]}"
        return problem_response(MethodNotAllowed(detail), {"Allow": allowed})
    raise error


def _methods_at(request: Request) -> Iterator[str]:
    """The methods of every route whose path is the request's."""
    known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    scope = {key: value for key, value in request.scope.items() if key in {"type", "path", "root_path", "headers"}}
    for method in known:
        trial = {**scope, "method": method}
        if any(route.matches(trial)[0].name == "FULL" for route in request.app.routes):
            yield method
            if method == "GET":
                yield "HEAD"


async def _render_disconnect(_: Request, __: Exception) -> Response:
    """Answer a client that hung up while it was sending. The status is nginx's, for the log and metrics alone."""
    return Response(status_code=499)


def install(app: FastAPI) -> None:
    """Makes `app` answer every exception with its problem."""
    for kind in (ServiceError, KernelError, DeviceError, NpyError):
        app.add_exception_handler(kind, _render)
    app.add_exception_handler(RequestValidationError, _render_validation)
    app.add_exception_handler(HTTPException, _render_http)
    app.add_exception_handler(ClientDisconnect, _render_disconnect)


def catalogue() -> dict[str, dict[str, Any]]:
    """Problem types by slug: title, status and what it means, from the classes that raise it."""
    entries: dict[str, dict[str, Any]] = {}
    kinds: list[type[ServiceError | KernelError | DeviceError]] = [ServiceError, DeviceError]
    for root in (ServiceError, KernelError, DeviceError):
        kinds.extend(_subclasses(root))
    for kind in kinds:
        if kind in {JobFailed, ItemInvalid, StepInvalid}:
            continue  # speaks with the slug of its cause
        slug: str = kind.slug
        title = getattr(kind, "title", slug.replace("-", " ").capitalize())
        status = getattr(kind, "status", 500 if issubclass(kind, DeviceError) else 422)
        meaning = inspect.cleandoc(kind.__doc__ or "")
        if slug in entries:
            entries[slug]["detail"] += f" {meaning}"
        else:
            entries[slug] = {"type": f"/problems/{slug}", "title": title, "status": status, "detail": meaning}
    return dict(sorted(entries.items()))


def statuses(slug: str) -> set[int]:
    """Statuses that go with a slug: one, but for quota-exceeded."""
    return {kind.status for kind in _subclasses(ServiceError) if kind.slug == slug}


def _subclasses(kind: type[T]) -> Iterator[type[T]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
