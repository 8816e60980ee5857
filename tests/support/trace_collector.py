"""An OpenTelemetry collector for tests: takes OTLP over HTTP, and shows the spans that came."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from live_server import until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """A span as it was exported."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it is a root."""
    kind: int
    """As in the protocol: 1 internal, 2 server, 3 client."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    """Trace and span ids."""
    failed: bool
    service: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def ids(self) -> tuple[str, str]:
        return self.trace_id, self.span_id


class TraceCollector:
    """The collector, in threads of its own, and the spans that have come; `environment` is what a server needs."""

    def __init__(self, *, answers: bool = True) -> None:
        """Not `answers`: it takes what comes and says nothing until its end."""
        self.spans: list[Span] = []
        self._ended = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if not answers:
                    collector._ended.wait()
                    return
                collector.spans += _decoded(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "20",
            "OTEL_METRICS_EXPORTER": "none",
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def trace(self, trace_id: str) -> list[Span]:
        """Those of a trace, by the time at which they begin; those that begin at one time, the longest first."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: (span.start_ns, -span.end_ns))

    def wait_for(self, trace_id: str, *names: str) -> list[Span]:
        """Wait until a trace has spans of those names; return it."""
        wanted = set(names)
        with contextlib.suppress(AssertionError):
            until(lambda: {span.name for span in self.trace(trace_id)} >= wanted)
        found = self.trace(trace_id)
        assert {span.name for span in found} >= wanted, f"there are {found}, of {len(self.spans)} spans in all"
        return found


def _decoded(body: bytes) -> list[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    found = []
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            found += [_span(span, service) for span in scope.spans]
    return found


def _span(span: Any, service: str) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        span.status.code == 2,
        service,
    )


def _attributes(fields: Any) -> dict[str, Any]:
    return {field.key: getattr(field.value, field.value.WhichOneof("value")) for field in fields}
