"""Ids, log lines, the guard, and what happens to errors that nobody foresaw."""

from __future__ import annotations

import json
import logging
import sys

import httpx
import numpy as np
import pytest
import structlog

from gemmserve_service.http.middleware.audit import AuditLog
from gemmserve_service.http.middleware.observe import Observe
from gemmserve_service.runtime.logs import configure

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def lines():
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured


async def test_request_id(client):
    assert (await client.get("/livez", headers={"X-Request-Id": "abc-123"})).headers["x-request-id"] == "abc-123"
    made = [
        (await client.get("/livez", headers={"X-Request-Id": "no spaces"})).headers["x-request-id"] for _ in range(2)
    ]
    assert made[0] != made[1]
    assert all(len(value) == 32 for value in made)


async def test_errors_carry_the_id_too(client):
    assert (await client.get("/nope", headers={"X-Request-Id": "abc"})).headers["x-request-id"] == "abc"


async def test_what_the_client_calls_the_exchange_is_repeated(client):
    """By every answer, so that none can be taken for another's."""
    for path, status in (("/livez", 200), ("/v1/arrays", 200), ("/nope", 404), ("/v1/jobs/none", 404)):
        answer = await client.get(path, headers={"Gemmserve-Exchange": f"a-b_{status}"})
        assert (answer.status_code, answer.headers["gemmserve-exchange"]) == (status, f"a-b_{status}")
    for value in ("", "a b", "é".encode(), "x" * 65):
        answer = await client.get("/livez", headers={"Gemmserve-Exchange": value})
        assert "gemmserve-exchange" not in answer.headers


async def test_access_line(client, put, lines):
    array_id = await put(np.ones((4, 4), "f4"))
    lines.clear()
    answer = await client.get(
        f"/v1/arrays/{array_id}/data", headers={"X-Request-Id": "abc", "traceparent": PARENT, "Accept": "*/*"}
    )
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["method"], line["path"], line["status"]) == ("GET", f"/v1/arrays/{array_id}/data", 200)
    assert line["route"] == "/v1/arrays/{array_id}/data"
    assert (line["bytes_in"], line["bytes_out"]) == (0, len(answer.content))
    assert line["complete"]
    assert line["duration_ms"] > 0
    assert (line["request_id"], line["trace_id"]) == ("abc", "4bf92f3577b34da6a3ce929d0e0e4736")


@pytest.mark.parametrize(
    "value", ["", "nonsense", PARENT.replace("4", "0" * 1)[:20], "00-" + "0" * 32 + PARENT[35:], "ff" + PARENT[2:]]
)
async def test_malformed_traceparent_is_ignored(client, lines, value):
    assert (await client.get("/v1/usage", headers={"traceparent": value})).status_code == 200
    assert "trace_id" not in lines[-1]


async def test_health_is_quiet(client, lines):
    await client.get("/livez")
    assert [line["log_level"] for line in lines if line["event"] == "request"] == ["debug"]


async def test_security_headers(client):
    for path in ("/livez", "/nope"):
        headers = (await client.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1@evil.example", ""])
async def test_foreign_host(client, problem, spy, host):
    answer = await client.get("/v1/arrays", headers={"Host": host})
    problem(answer, 403, "host-not-allowed")


async def test_foreign_origin(client, problem):
    for origin in ("https://evil.example", "null"):
        problem(await client.post("/v1/jobs", json={}, headers={"Origin": origin}), 403, "origin-not-allowed")
    assert (await client.get("/livez", headers={"Origin": "http://localhost:3000"})).status_code == 200


async def test_405_lists_every_method_of_the_path(client, problem):
    for path, allowed in (
        ("/v1/arrays", "GET, HEAD, POST"),
        ("/v1/arrays/x", "DELETE, GET, HEAD"),
        ("/v1/arrays/x/data", "GET, HEAD"),
        ("/v1/gemm", "POST"),
    ):
        answer = await client.request("PATCH", path)
        problem(answer, 405, "method-not-allowed")
        assert answer.headers["allow"] == allowed


async def test_404_of_unknown_paths(client, problem):
    for path in ("http://127.0.0.1//", "/v1", "/v1/arrays/", "/v1/downloads", "/nowhere/", "/v1/gemm/x"):
        problem(await client.get(path), 404, "not-found")


@pytest.fixture
async def broken(app, lines):
    @app.get("/break")
    async def fail():
        raise RuntimeError("the secret of line 7")

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def test_500_tells_the_log_and_not_the_client(broken, problem, lines):
    answer = await broken.get("/break", headers={"X-Request-Id": "abc"})
    problem(answer, 500, "internal")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "abc"
    (line,) = [line for line in lines if line["event"] == "unexpected error"]
    assert line["exc_info"]
    assert line["request_id"] == "abc"


async def test_an_error_after_the_start_is_not_papered_over():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("late")

    class Silent:
        def request_done(self, *args, **fields):
            self.status = args[2]

    metrics = Silent()

    async def send(message):
        pass

    with pytest.raises(RuntimeError, match="late"):
        await Observe(app, metrics, AuditLog(None))(
            {"type": "http", "method": "GET", "path": "/", "headers": []}, None, send
        )
    assert metrics.status == 200


@pytest.fixture
def logging_state():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines(make_settings, capsys, monkeypatch, logging_state):
    configure(make_settings(log_json=True, log_level="info"))
    structlog.contextvars.bind_contextvars(request_id="abc")
    try:
        structlog.get_logger("x").info("hello", size=3)
        structlog.get_logger("x").debug("hidden")
        try:
            raise ValueError("inner")  # noqa: TRY301
        except ValueError:
            secret = "local value"  # noqa: F841
            structlog.get_logger("x").exception("failed")
        logging.getLogger("uvicorn.error").warning("from %s", "uvicorn", extra={"color_message": "x"})
        logging.getLogger("uvicorn.access").warning("twice")
    finally:
        structlog.contextvars.clear_contextvars()
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [record["event"] for record in records] == ["hello", "failed", "from uvicorn"]
    assert (records[0]["size"], records[0]["level"], records[0]["request_id"]) == (3, "info", "abc")
    assert records[1]["exception"][0]["exc_value"] == "inner"
    assert "local value" not in json.dumps(records)
    assert "color_message" not in records[2]


def test_console_lines(make_settings, capsys, logging_state):
    configure(make_settings(log_level="warning"))
    structlog.get_logger("x").info("hidden")
    structlog.get_logger("x").warning("shown", size=3)
    logging.getLogger("any").error("standard")
    text = capsys.readouterr().err
    assert "hidden" not in text
    assert "shown" in text
    assert "standard" in text
    assert sys.stderr is not None
