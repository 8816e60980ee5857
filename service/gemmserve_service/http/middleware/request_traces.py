"""Spans of requests, with the attributes of OpenTelemetry's semantic conventions for HTTP servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.http.problems import SLUG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from gemmserve_service.runtime.tracing.spans import RequestTrace, Tracing

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_MAX_TEXT: Final = 200


def begin_trace(
    tracing: Tracing | None, scope: Scope, context: dict[str, str], traceparent: str, fields: Mapping[bytes, bytes]
) -> RequestTrace | None:
    """Return the trace of a request that has just begun, None where it has none.

    `context`: the fields of its log lines (`observe.context_of`); trace and span are added, if it has any. `fields`:
    its headers.
    """
    valid = "trace_id" in context
    if tracing is None or not tracing.wanted(traceparent, valid=valid):
        return None
    tracestate, agent = (fields.get(name, b"").decode("latin-1") for name in (b"tracestate", b"user-agent"))
    known = _known(scope, context["request_id"], agent)
    trace = tracing.begin(traceparent, tracestate, known) if valid else tracing.begin("", "", known)
    if trace is not None:
        _, context["trace_id"], context["span_id"], _ = trace.traceparent.split("-")
    return trace


def end_trace(
    trace: RequestTrace, scope: Scope, route: str, status: int, *, seconds: float, received: int, sent: int,
    complete: bool,
) -> None:  # fmt: skip
    """End it, with what is known of the request then. `route`: its template, or "unmatched"."""
    attributes: dict[str, str | int | bool] = {
        "http.response.status_code": status,
        "http.request.body.size": received,
        "http.response.body.size": sent,
        "gemmserve.complete": complete,
    }
    method = _method(scope)
    name = "HTTP" if method == "_OTHER" else method
    if route != "unmatched":
        attributes["http.route"] = route
        name = f"{name} {route}"
    slug: str | None = scope.get("state", {}).get(SLUG)
    if slug is not None:
        attributes["gemmserve.problem"] = slug
    trace.end(name, attributes, (slug or str(status)) if status >= 500 else None, seconds)


def _known(scope: Scope, request_id: str, agent: str) -> Mapping[str, str]:
    """Attributes of a request's head."""
    method = _method(scope)
    attributes = {
        "http.request.method": method,
        "url.path": scope["path"][:_MAX_TEXT],
        "url.scheme": scope["scheme"],
        "network.protocol.name": "http",
        "gemmserve.request.id": request_id,
    }
    if method == "_OTHER":
        attributes["http.request.method_original"] = scope["method"][:_MAX_TEXT]
    if agent:
        attributes["user_agent.original"] = agent[:_MAX_TEXT]
    client: Any = scope.get("client")
    if client:
        attributes["client.address"] = client[0]
    return attributes


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"
