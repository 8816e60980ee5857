"""The plain line of a log: the same as structlog's own, faster."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import structlog

from gemmserve_service.runtime import logs
from gemmserve_service.runtime.logs import PlainRenderer

CONSOLE = structlog.dev.ConsoleRenderer(colors=False)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"status": 200, "path": "/v1/gemm", "duration_ms": 1.25, "complete": True, "key": None},
        {"path": "/with space", "quote": "it's", "equals": "a=b", "newline": "a\nb", "empty": ""},
        {"nested": {"a": [1]}, "exc_info": None},
        {"nested": {"a": ["it's"]}, "100%": "%s", "b": "100%", "a": ("x", None), "c": 1e-9, "d": True},
        {"plain": "a/b", "quote": 'a"b', "other": "a/c"},
        {"bytes": b"a b", "beyond": "é", "space": " "},
    ],
)
def test_the_line(fields):
    event = {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "request", **fields}
    assert PlainRenderer(CONSOLE)(None, "info", dict(event)) == CONSOLE(None, "info", dict(event))


def test_what_a_client_sent_cannot_steer_a_terminal():
    line = PlainRenderer(CONSOLE)(None, "info", {"level": "info", "event": "x", "path": "/\x1b[2J"})
    assert "\x1b" not in line


def test_an_exception_has_its_traceback():
    event = {"level": "error", "event": "x", "exc_info": ValueError("why")}
    assert "ValueError: why" in PlainRenderer(CONSOLE)(None, "error", event)


@pytest.mark.parametrize("ns", [0, 1_767_225_599_999_999_999, 1_767_225_600_000_000_000, 1_767_225_600_000_001_999])
def test_the_time_is_structlog_s(monkeypatch, ns):
    monkeypatch.setattr(logs.time, "time_ns", lambda: ns)
    expected = datetime.fromtimestamp(ns // 10**9, UTC) + timedelta(microseconds=ns // 1000 % 10**6)
    assert logs._now() == expected.isoformat().replace("+00:00", "Z")
