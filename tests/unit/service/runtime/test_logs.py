"""The plain line of a log: the same as structlog's own, faster."""

from __future__ import annotations

import pytest
import structlog

from gemmserve_service.runtime.logs import PlainRenderer

CONSOLE = structlog.dev.ConsoleRenderer(colors=False)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"status": 200, "path": "/v1/gemm", "duration_ms": 1.25, "complete": True, "key": None},
        {"path": "/with space", "quote": "it's", "equals": "a=b", "newline": "a\nb", "empty": ""},
        {"nested": {"a": [1]}, "exc_info": None},
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
