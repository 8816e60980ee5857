"""Client spans in OpenTelemetry's form, and the context sent along, where the caller's code has a span that records.

Nothing is imported for it: a span can only be recording where `opentelemetry.trace` is there already.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from gemmserve._errors import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from opentelemetry.trace import Span

    from gemmserve._calls.requests import Request
    from gemmserve._transport.direct import Answer
    from gemmserve._transport.library import httpx

_ID: Final = re.compile(r"(?<=/)[a-z]+_[0-9a-z]+(?:_[0-9]+)?")
_UNTRACED: Final = contextlib.nullcontext[None]()


def span_of(
    request: Request[Any], base: httpx.URL, headers: dict[str, str]
) -> contextlib.AbstractContextManager[Span | None]:
    """Return a context that is a client span of one exchange, and add its context to `headers`; where no span is
    recording, one that does nothing.

    `base`: URL of the server. The span is not made current: an exchange may be left and entered again, as events are.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().is_recording():
        return _UNTRACED
    return _span(trace, request, base, headers)


@contextlib.contextmanager
def _span(trace: ModuleType, request: Request[Any], base: httpx.URL, headers: dict[str, str]) -> Iterator[Span]:
    from opentelemetry import propagate

    template = _ID.sub("{id}", request.path)
    attributes: dict[str, str | int] = {
        "http.request.method": request.method,
        "server.address": base.host,
        "server.port": base.port or (443 if base.scheme == "https" else 80),
        "url.full": f"{base.scheme}://{base.netloc.decode('ascii')}{request.path}",
        "url.template": template,
    }
    if request.body is not None:
        attributes["http.request.body.size"] = request.body.nbytes
    tracer = trace.get_tracer("gemmserve", importlib.metadata.version("gemmserve"))
    span: Span = tracer.start_span(f"{request.method} {template}", kind=trace.SpanKind.CLIENT, attributes=attributes)
    propagate.inject(headers, trace.set_span_in_context(span))
    try:
        yield span
    except GeneratorExit:  # whoever reads events has read enough
        raise
    except BaseException as error:
        _failed(span, type(error).__name__)
        raise
    finally:
        span.end()


def note(span: Span | None, response: httpx.Response | Answer) -> None:
    """Take down what an answer's head says."""
    if span is None:
        return
    span.set_attribute("http.response.status_code", response.status_code)
    request_id = response.headers.get(REQUEST_ID_HEADER)
    if request_id is not None:
        span.set_attribute("gemmserve.request.id", request_id)
    if response.status_code >= 400:
        _failed(span, str(response.status_code))


def _failed(span: Span, error: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR)
    span.set_attribute("error.type", error)
