"""The tracer provider of a front: the one that the process has, or OpenTelemetry's SDK as its variables set it up.

The service needs opentelemetry-api alone, and that only where there are traces; SDK and exporter are the operator's.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.runtime.tracing.spans import Tracing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import TracerProvider

_SIGNS: Final = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PACKAGES: Final = "'gemmserve[otel]' opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_CLOSE_S: Final = 2.0
"""Seconds for which the end of the process waits for the collector to take the last spans."""

log = logging.getLogger(__name__)


def open_tracing(ratio: float, environment: Mapping[str, str] = os.environ) -> Tracing | None:
    """Return the traces of this process, or None where nobody has asked for any.

    A provider that is installed already is used, such as `opentelemetry-instrument` installs. Otherwise the variables
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_TRACES_EXPORTER ask for one of the SDK.
    `ratio`: share of the requests without a traceparent that begin a trace. Where they ask for what is not installed,
    or cannot be set up, the log says so, and there are none: variables may be a whole platform's.
    """
    asked = any(environment.get(name) for name in _SIGNS) and environment.get("OTEL_TRACES_EXPORTER") != "none"
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        asked = False
    if not asked and "opentelemetry.trace" not in sys.modules:
        return None
    try:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider):
            return _tracing(provider, ratio)
        return _tracing(_sdk(environment), ratio) if asked else None
    except ImportError as error:
        log.warning("no traces: %s is not installed; pip install %s", error.name, _PACKAGES)
    except Exception:
        log.exception("no traces: OpenTelemetry's SDK cannot be set up")
    return None


def _tracing(provider: TracerProvider, ratio: float) -> Tracing:
    return Tracing(provider.get_tracer("gemmserve", version("gemmserve")), ratio, _closing(provider))


def _sdk(environment: Mapping[str, str]) -> TracerProvider:
    """The SDK's provider: sampler, resource, limits and batches are read from the environment by the SDK itself."""
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    own = {SERVICE_VERSION: version("gemmserve")}
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        own[SERVICE_NAME] = "gemmserve"
    provider = TracerProvider(resource=resource.merge(Resource(own)), shutdown_on_exit=False)
    for name in (environment.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        # A queue of bounded length, emptied by a thread of its own: a collector that does not answer stops nobody.
        provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip(), environment)))
    return provider


def _exporter(name: str, environment: Mapping[str, str]) -> Any:
    """The exporter of that name, as packages declare them. Raises ModuleNotFoundError where none does."""
    if name == "otlp":
        general = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        grpc = (environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general) == "grpc"
        name = "otlp_proto_grpc" if grpc else "otlp_proto_http"
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        return found.load()()
    raise ModuleNotFoundError(f"no exporter {name}", name=f"the exporter {name!r}")


def _closing(provider: TracerProvider) -> Any:
    """Return what exports the last spans and ends the provider, and waits for a bounded time."""

    def close() -> None:
        ends: Any = getattr(provider, "shutdown", None)  # the API's class has none
        if ends is not None:
            ending = threading.Thread(target=ends, daemon=True)
            ending.start()
            ending.join(_CLOSE_S)

    return close
