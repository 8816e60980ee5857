"""Observation of every request, as plain ASGI: its id, log line, count and audit, and the answer to unexpected errors.

`body_rate` and `access` follow.
"""

from __future__ import annotations

import random
import re
import time
from typing import TYPE_CHECKING, Final

import structlog
from starlette.datastructures import Headers

from gemmserve.wire import EXCHANGE_HEADER, EXCHANGE_PATTERN, TRACEPARENT_HEADER
from gemmserve_service.http.extensions import RECEIVER, SENDER
from gemmserve_service.http.headers.every_answer import POLICY, SECURITY, request_fields
from gemmserve_service.http.middleware.request_traces import begin_trace, end_trace
from gemmserve_service.http.problems import SLUG, problem_response
from gemmserve_service.runtime.logs import REQUESTS
from gemmserve_service.runtime.tracing.spans import REQUEST, TRACEPARENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gemmserve_service.http.metrics.metrics import Metrics
    from gemmserve_service.http.middleware.audit import AuditLog
    from gemmserve_service.runtime.tracing.spans import RequestTrace, Tracing

log = structlog.get_logger("gemmserve.access")

CONTEXT: Final = "gemmserve.context"
"""Key in the ASGI scope's `state`, of the request's id and trace (`context_of`), once they are known."""
REFUSED: Final = "gemmserve.refused"
"""Key likewise, of the status that the connection has answered with in the app's place, the body being malformed."""

_EXCHANGE: Final = re.compile(EXCHANGE_PATTERN)
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,128}")
_MADE_UP: Final = random.Random()  # noqa: S311 (seeded by the system; an id is no secret, only nobody else's)
_QUIET: Final = frozenset({"/healthz", "/livez", "/readyz", "/metrics"})


class Observe:
    """Outermost: gives each request an id, logs, counts and audits it, and answers for errors that nobody foresaw."""

    def __init__(self, app: ASGIApp, metrics: Metrics, audit: AuditLog, tracing: Tracing | None = None) -> None:
        self._app = app
        self._tracing = tracing
        self._metrics = metrics
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._tracing)
        structlog.contextvars.bind_contextvars(**exchange.context)
        if exchange.trace is not None:  # the context is the request's own: see `protocol.HttpProtocol.run`
            REQUEST.set(exchange.trace)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            log.exception("unexpected error")
            if exchange.started:
                raise  # the transport closes the connection: a truncated answer must not look whole
            await problem_response(error)(scope, receive, exchange.send)
        finally:
            self._finish(exchange)
            structlog.contextvars.unbind_contextvars(*exchange.context)

    def _finish(self, exchange: _Exchange) -> None:
        request_done(
            self._metrics,
            exchange.scope,
            exchange.context,
            exchange.scope["state"].get(REFUSED) or exchange.status,
            seconds=time.perf_counter() - exchange.began,
            received=exchange.received,
            sent=exchange.sent,
            complete=exchange.complete,
            trace=exchange.trace,
        )
        problem = exchange.scope["state"].get(SLUG)
        self._audit.request(exchange.scope, exchange.status, problem, exchange.location)


def request_done(
    metrics: Metrics,
    scope: Scope,
    context: Mapping[str, str],
    status: int,
    *,
    seconds: float,
    received: int,
    sent: int,
    complete: bool,
    trace: RequestTrace | None = None,
) -> None:
    """Counts a request and writes its line. `status` 0: the client hung up before there was an answer.

    `context`: its id and trace (`context_of`).
    """
    status = status or 499  # nginx's
    method = scope["method"]
    path = scope["path"]
    route = getattr(scope.get("route"), "path", "unmatched")
    if trace is not None:
        end_trace(trace, scope, route, status, seconds=seconds, received=received, sent=sent, complete=complete)
    metrics.request_done(
        route,
        method if method in _METHODS else "other",
        status,
        seconds=seconds,
        received=received,
        sent=sent,
        trace="" if trace is None else trace.traceparent,
    )
    fields = {
        **context,
        "method": method,
        "path": path,
        "route": route,
        "status": status,
        "duration_ms": round(seconds * 1e3, 3),
        "bytes_in": received,
        "bytes_out": sent,
        "complete": complete,
    }
    caller = scope.get("state", {}).get("caller")
    if caller is not None and caller.key_id:
        fields["key"] = caller.key_id
    REQUESTS.write("debug" if path in _QUIET else "info", fields)


def context_of(request_id: str, traceparent: str) -> dict[str, str]:
    """Fields of every log line of a request: its id, which is made up unless it is well-formed, and its trace."""
    context = {"request_id": request_id if _REQUEST_ID.fullmatch(request_id) else f"{_MADE_UP.getrandbits(128):032x}"}
    if traceparent and (match := TRACEPARENT.fullmatch(traceparent)):
        context |= {"trace_id": match[1], "parent_id": match[2]}
    return context


def context_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """`context_of` a request with these headers, their names in lower case."""
    fields = dict(headers)
    request_id, traceparent = (fields.get(name, b"").decode("latin-1") for name in (b"x-request-id", b"traceparent"))
    return context_of(request_id, traceparent)


def exchange_of(value: str) -> bytes:
    """Value that the answer repeats of its request, so that the client knows it for that one's; empty: nothing."""
    return value.encode("ascii") if _EXCHANGE.fullmatch(value) else b""


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Exchange:
    """One request and its answer, as counted on their way."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, tracing: Tracing | None) -> None:
        self.scope = scope
        self.began = time.perf_counter()
        self.status = 0
        self.location: str | None = None
        self.started = self.complete = False
        self.received = self.sent = 0
        self._receive, self._send = receive, send
        self._asked = False
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        self.context: dict[str, str] = state.get(CONTEXT) or context_of_headers(scope["headers"])
        state[CONTEXT] = self.context
        self.trace: RequestTrace | None = None
        if tracing is not None:
            traceparent = headers.get(TRACEPARENT_HEADER, "")
            self.trace = begin_trace(tracing, scope, self.context, traceparent, dict(scope["headers"]))
        self._repeats = exchange_of(headers.get(EXCHANGE_HEADER, ""))
        self._expects_continue = headers.get("expect", "").lower() == "100-continue"
        extensions = scope.get("extensions") or {}
        if RECEIVER in extensions:
            extensions[RECEIVER].on_bytes = self._received
            extensions[SENDER].on_bytes = self._sent

    async def receive(self) -> Message:
        """Counts the body."""
        self._asked = True
        message = await self._receive()
        self._count(len(message.get("body", b"")))
        return message

    def _received(self, count: int) -> None:
        """Counts what did not pass `receive`."""
        self._asked = True
        self._count(count)

    def _count(self, count: int) -> None:
        self.received += count
        if count and self.trace is not None:
            self.trace.received()

    def _sent(self, count: int) -> None:
        """Counts what did not pass `send`."""
        self.sent += count

    async def send(self, message: Message) -> None:
        """Adds the id and the security headers; counts the body."""
        if message["type"] == "http.response.start":
            self.started = True
            if self.trace is not None:
                self.trace.answering()
            self.status = message["status"]
            given = message["headers"]
            self.location = next((value.decode("latin-1") for name, value in given if name == b"location"), None)
            headers = [*request_fields(self.context, self._repeats), *SECURITY]
            if not any(name == b"content-security-policy" for name, _ in given):
                headers.append(POLICY)
            if self._expects_continue and not self._asked and not any(name == b"connection" for name, _ in given):
                # The client holds its body back and may not send it at all (RFC 9110, section 10.1.1): what comes
                # next on this connection could be read as that body.
                headers.append((b"connection", b"close"))
            message["headers"] = [*given, *headers]
        elif message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)
