"""What every request passes first, as plain ASGI: its id, its log line, its count, and the answer to unexpected errors.

`audit`, `body_rate` and `access` follow.
"""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING, Final

import structlog
from starlette.datastructures import Headers

from gemmserve_service.landing import EXTENSION
from gemmserve_service.problems import problem_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gemmserve_service.metrics import Metrics

log = structlog.get_logger("gemmserve.access")

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,128}")
# W3C Trace Context, section 3.2: version, trace id, parent id, flags; neither id may be all zeros.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)
_QUIET: Final = frozenset({"/healthz", "/livez", "/readyz", "/metrics"})

_SECURITY: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
_POLICY: Final = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


class Observe:
    """Outermost: gives each request an id, logs and counts it, and answers for errors that nobody foresaw."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        structlog.contextvars.bind_contextvars(**exchange.context)
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
        seconds = time.perf_counter() - exchange.began
        # 499 (nginx's): the client hung up before there was an answer.
        status = exchange.status or 499
        method = exchange.scope["method"]
        path = exchange.scope["path"]
        route = getattr(exchange.scope.get("route"), "path", "unmatched")
        self._metrics.request_done(
            route,
            method if method in _METHODS else "other",
            status,
            seconds=seconds,
            received=exchange.received,
            sent=exchange.sent,
        )
        caller = exchange.scope.get("state", {}).get("caller")
        known = {"key": caller.key_id} if caller is not None and caller.key_id else {}
        line = log.debug if path in _QUIET else log.info
        line(
            "request",
            method=method,
            path=path,
            route=route,
            status=status,
            duration_ms=round(seconds * 1e3, 3),
            bytes_in=exchange.received,
            bytes_out=exchange.sent,
            complete=exchange.complete,
            **known,
        )


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Exchange:
    """One request and its answer, as counted on their way."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.began = time.perf_counter()
        self.status = 0
        self.started = self.complete = False
        self.received = self.sent = 0
        self._receive, self._send = receive, send
        self._asked = False
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.context: dict[str, str] = {"request_id": self.request_id}
        if match := _TRACEPARENT.fullmatch(headers.get("traceparent", "")):
            self.context |= {"trace_id": match[1], "parent_id": match[2]}
        self._expects_continue = headers.get("expect", "").lower() == "100-continue"
        landing = (scope.get("extensions") or {}).get(EXTENSION)
        if landing is not None:
            landing.on_landed.append(self._landed)

    async def receive(self) -> Message:
        """Counts the body."""
        self._asked = True
        message = await self._receive()
        self.received += len(message.get("body", b""))
        return message

    def _landed(self, count: int) -> None:
        """Counts what did not pass `receive`."""
        self._asked = True
        self.received += count

    async def send(self, message: Message) -> None:
        """Adds the id and the security headers; counts the body."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            given = message["headers"]
            headers = [(b"x-request-id", self.request_id.encode("ascii")), *_SECURITY]
            if not any(name == b"content-security-policy" for name, _ in given):
                headers.append(_POLICY)
            if self._expects_continue and not self._asked:
                # The client holds its body back and may not send it at all (RFC 9110, section 10.1.1): what comes
                # next on this connection could be read as that body.
                headers.append((b"connection", b"close"))
            message["headers"] = [*given, *headers]
        elif message["type"] == "http.response.body":
            self.sent += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)
