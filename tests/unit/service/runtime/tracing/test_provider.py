"""When a front has traces: by what is set, what is installed, and what there is already."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from gemmserve_service.runtime.tracing import provider

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

ASKED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_SERVICE_NAME": "mine"},
        {**ASKED, "OTEL_SDK_DISABLED": "true"},
        {**ASKED, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nobody_has_asked(environment):
    assert provider.open_tracing(1.0, environment) is None


def test_nothing_is_imported_where_nobody_has_asked():
    script = (
        "import sys\nfrom gemmserve_service.runtime.tracing.provider import open_tracing\n"
        "import gemmserve_service.jobs.core\nassert open_tracing(1.0, {}) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "import gemmserve_service.http.app\nassert open_tracing(1.0, {}) is None\n"  # FastAPI imports the API
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "environment",
    [ASKED, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, {"OTEL_TRACES_EXPORTER": "console"}],
)
def test_the_sdk_is_set_up(environment):
    tracing = provider.open_tracing(0.0, environment)
    assert tracing is not None
    tracing.close()


def test_a_provider_that_is_there_is_used(monkeypatch):
    mine = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: mine)
    tracing = provider.open_tracing(0.0, {})
    assert tracing is not None
    assert tracing.tracer.resource is mine.resource


def test_what_is_missing_is_said_and_nothing_else(caplog):
    with caplog.at_level(logging.WARNING):
        assert provider.open_tracing(0.0, {"OTEL_TRACES_EXPORTER": "carrier-pigeon"}) is None
    assert "carrier-pigeon" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
        assert provider.open_tracing(0.0, ASKED) is None
    assert "opentelemetry.sdk.resources is not installed" in caplog.text


def test_the_end_waits_for_no_collector(monkeypatch):
    monkeypatch.setattr(provider, "_CLOSE_S", 0.01)
    import threading

    ended = threading.Event()

    class Stuck(TracerProvider):
        def shutdown(self):
            ended.wait()

    monkeypatch.setattr(trace, "get_tracer_provider", Stuck)
    tracing = provider.open_tracing(0.0, {})
    tracing.close()
    ended.set()
