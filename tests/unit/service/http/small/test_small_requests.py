"""Small one-shot bodies, which take a shorter way: the same answers as the longer one, whatever is sent."""

from __future__ import annotations

import json
import random
import re
import time

import httpx
import numpy as np
import pytest
import structlog
from raw_connection import Raw, eventually

from gemmserve_service.errors import QueueFull
from gemmserve_service.http.requests.multipart import MAX_PARAMS
from gemmserve_service.http.small import product_exchange
from gemmserve_service.jobs.small import small_products
from gemmserve_service.tenancy.api_keys import Quota
from gemmserve_service.tenancy.keyring import create_key

pytestmark = pytest.mark.usefixtures("counted")  # for its patience: these requests do go the short way

COMMON = {"Via": "1.1 a"}
"""A header that, given twice, sends a request the common way."""


@pytest.fixture
def http(live):
    with httpx.Client(base_url=live.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def both(http):
    """Posts a body the short way and the long way; both answers, without what differs each time."""

    def post(content, headers, path="/v1/gemm"):
        answers = []
        for further in ([], [*COMMON.items(), *COMMON.items()]):
            answer = http.post(path, content=content, headers=[*headers.items(), *further])
            kept = {
                name: re.sub(r"dur=[\d.]+", "", value)
                for name, value in answer.headers.items()
                if name not in {"x-request-id", "date"}
            }
            answers.append((answer.status_code, kept, answer.content))
        return answers

    return post


@pytest.mark.parametrize(
    ("path", "params", "c"),
    [
        ("/v1/gemm", None, False),
        ("/v1/gemm", {"alpha": [0, 1], "trans_a": "N", "order": "F"}, False),
        ("/v1/gemm", {"beta": 2}, True),
        ("/v1/gemm", {}, True),
        ("/v1/gemm-reduce", {"reduce": "argmax"}, False),
        ("/v1/gemm-reduce", {"reduce": ["sum"], "axis": "n"}, False),
        ("/v1/gemm?timeout_s=20", None, False),
    ],
)
def test_both_ways_answer_the_same(both, form, npy, random_array, counted, path, params, c):
    parts = [("a", npy(random_array((6, 5)))), ("b", npy(np.asfortranarray(random_array((5, 7), seed=1))))]
    parts += [("c", npy(random_array((6, 7))))] if c else []
    parts += [] if params is None else [("params", json.dumps(params).encode())]
    content, headers = form(parts)
    for _ in range(2):  # the second time the product is known
        short, long = both(content, headers, path)
        assert short == long
        assert short[0] == 200
    assert len(counted) == 2


def test_both_ways_refuse_the_same(both, form, npy, npy_header, random_array):
    a, b = ("a", npy(random_array((3, 4)))), ("b", npy(random_array((4, 2))))
    plain, headers = form([a, b])
    cases = [
        form([a])[0],
        form([a, ("b", npy(random_array((5, 2))))])[0],
        form([a, b, ("c", npy(random_array((3, 2)))), ("d", b"")])[0],
        form([a, b, ("params", b"{")])[0],
        form([a, b, ("params", b'{"alpha": "x"}')])[0],
        form([a, b, ("params", b'{"beta": 1}')])[0],
        form([a, ("b", b[1][:-8])])[0],
        form([a, ("b", b[1] + b"12345678")])[0],
        form([a, ("b", b"nothing")])[0],
        form([a, ("b", npy_header("{'descr': '<i4', 'fortran_order': False, 'shape': (4, 2), }") + bytes(32))])[0],
        form([a, ("b", npy(random_array((4, 2)).astype(">c8")))])[0],
        form([a, ("b", npy(np.empty((4, 0), "c8")))])[0],
        form([a, ("b", npy(random_array((4, 2)), version=(2, 0)))])[0],
        b"",
    ]
    chance = random.Random(7)
    for _ in range(60):
        broken = bytearray(plain)
        for _ in range(chance.choice((1, 1, 3))):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        cases.append(bytes(broken[: chance.choice((len(broken), len(broken), chance.randrange(len(broken))))]))
    seen = set()
    for content in cases:
        short, long = both(content, headers)
        assert short == long
        seen.add(short[0])
    assert seen >= {200, 400, 422}


def test_both_ways_let_in_the_same(both, form, npy):
    content, sent = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3)))])
    for headers, status in (
        ({"Accept": "text/html"}, 406),
        ({"Accept": "application/x-npy;q=0.5, */*;q=0.1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost:9"}, 200),
        ({"Gemmserve-Session": "nobody's"}, 422),
    ):
        short, long = both(content, {**sent, **headers})
        assert short == long
        assert short[0] == status, headers


def test_both_ways_refuse_the_same_queries(both, form, npy):
    content, headers = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3)))])
    for query in (
        "timeout_s=0",
        "timeout_s=1e9",
        "timeout_s=90000",
        "timeout_s=",
        "timeout_s=1&x=2",
        "x=1",
        "timeout_s=01",
        "timeout_s=1&timeout_s=1",
    ):
        short, long = both(content, headers, f"/v1/gemm?{query}")
        assert short == long
        assert short[0] in {400, 422}, query


@pytest.mark.parametrize("size", [MAX_PARAMS - 4, MAX_PARAMS, MAX_PARAMS + 1, 100_000])
def test_parameters_of_any_size(both, form, npy, size):
    text = b'{"alpha": 1' + b" " * (size - 12) + b"}"
    content, headers = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3))), ("params", text)])
    short, long = both(content, headers)
    assert short == long
    assert short[0] == (200 if size <= MAX_PARAMS else 413)


def test_a_large_result_of_a_small_body_goes_the_common_way(both, form, npy, counted):
    content, headers = form([("a", npy(np.ones((600, 1), "c8"))), ("b", npy(np.ones((1, 600), "c8")))])
    short, long = both(content, headers)
    assert short == long
    assert (short[0], len(counted)) == (200, 0)


@pytest.fixture
def make_key(live):
    """make_key("alice", scopes=...) -> an Authorization header; in force when it returns."""

    def make(name, **fields):
        key_id, text = create_key(live.core.settings.data_dir, name, **fields)
        assert eventually(lambda: key_id in live.core.keyring.current.keys)
        return {"Authorization": f"Bearer {text}"}

    return make


def test_a_key_s_quota_and_scope_hold_here_too(live, make_key, http, both, form, npy, random_array, problem, counted):
    alice = make_key("alice", quota=Quota(inflight_bytes=300))
    reader = make_key("reader", scopes=["read"])
    content, headers = form([("a", npy(random_array((8, 8)))), ("b", npy(random_array((8, 8))))])
    problem(http.post("/v1/gemm", content=content, headers=headers | alice), 429, "quota-exceeded")
    assert counted
    assert live.core.quotas.inflight_bytes("") == 0
    for sent, status in (({}, 401), (reader, 403), ({"Authorization": "Bearer gs_x"}, 401)):
        short, long = both(content, headers | sent)
        assert short == long
        assert short[0] == status
    assert len(counted) == 1


def test_line_count_and_audit(serve, tmp_path, form, npy, monkeypatch):
    live = serve(audit_log=tmp_path / "audit")
    key_id, text = create_key(live.core.settings.data_dir, "alice")
    assert eventually(lambda: key_id in live.core.keyring.current.keys)
    content, headers = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3)))])
    headers |= {"X-Api-Key": text, "X-Request-Id": "abc", "traceparent": f"00-{'4' * 32}-{'5' * 16}-01"}
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        answer = httpx.post(f"{live.url}/v1/gemm", content=content, headers=headers, trust_env=False)
        assert answer.status_code == 200
        assert eventually(lambda: any(line["event"] == "request" for line in tuple(lines)))
    (line,) = [line for line in lines if line["event"] == "request"]
    assert line["duration_ms"] > 0
    assert {name: value for name, value in line.items() if name not in {"duration_ms", "log_level"}} == {
        "event": "request", "request_id": "abc", "trace_id": "4" * 32, "parent_id": "5" * 16, "method": "POST",
        "path": "/v1/gemm", "route": "/v1/gemm", "status": 200, "bytes_in": len(content),
        "bytes_out": len(answer.content), "complete": True, "key": key_id,
    }  # fmt: skip
    assert answer.headers["x-request-id"] == "abc"
    assert eventually(lambda: "/v1/gemm" in (tmp_path / "audit").read_text())
    audit = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    (entry,) = [line for line in audit if line.get("action") == "POST /v1/gemm"]
    assert (entry["key"], entry["status"], entry["outcome"], entry["request_id"]) == (key_id, 200, "done", "abc")
    value = live.app.state.metrics.registry.get_sample_value
    request = {"route": "/v1/gemm", "method": "POST", "status": "200"}
    job = {"op": "gemm", "algorithm": "numpy", "state": "succeeded"}
    assert eventually(lambda: value("gemmserve_http_requests_total", request) == 1)
    assert eventually(lambda: value("gemmserve_jobs_total", job) == 1)
    assert eventually(lambda: value("gemmserve_http_sent_bytes_total") == len(answer.content))


def test_phases_add_up(http, form, npy):
    content, headers = form([("a", npy(np.eye(64, dtype="c8"))), ("b", npy(np.eye(64, dtype="c8")))])
    began = time.perf_counter()
    answer = http.post("/v1/gemm", content=content, headers=headers)
    seen_ms = (time.perf_counter() - began) * 1e3
    phases = dict(re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]))
    assert list(phases) == ["receive", "queue", "h2d", "kernel", "d2h", "handover"]
    assert float(phases["kernel"]) > 0
    assert float(phases["handover"]) > 0
    assert sum(map(float, phases.values())) < seen_ms


def test_the_queue_s_limit_and_the_deadline(live, http, spy, form, npy, problem, monkeypatch, counted):
    content, headers = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3)))])
    scheduler = live.core.scheduler
    spy.hold = True
    problem(http.post("/v1/gemm?timeout_s=0.2", content=content, headers=headers), 504, "timeout")
    waiting = Raw(live)
    waiting.send(content, headers)
    assert eventually(lambda: scheduler.queued)

    def full(*_):
        raise QueueFull("full", retry_after_s=7)

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.admissions, "_check", full)
        answer = http.post("/v1/gemm", content=content, headers=headers)
        problem(answer, 429, "queue-full")
        assert answer.headers["retry-after"] == "7"
    waiting.close()
    assert eventually(lambda: scheduler.queued == 0)
    spy.release()
    assert eventually(lambda: not live.core.store.scratch_bytes)
    assert len(counted) == 3
    assert http.post("/v1/gemm", content=content, headers=headers).status_code == 200


def test_an_unexpected_error_is_told_to_the_log_alone(live, http, form, npy, problem, monkeypatch):
    content, headers = form([("a", npy(np.eye(3))), ("b", npy(np.eye(3)))])

    def fail(*_, **__):
        raise RuntimeError("the secret of line 7")

    with structlog.testing.capture_logs() as lines, monkeypatch.context() as patch:
        patch.setattr(small_products, "begin", fail)
        answer = http.post("/v1/gemm", content=content, headers=headers)
        problem(answer, 500, "internal")
        assert "secret" not in answer.text
    assert [line["exc_info"].args for line in lines if line["event"] == "unexpected error"] == [
        ("the secret of line 7",)
    ]
    with structlog.testing.capture_logs() as lines, monkeypatch.context() as patch:
        patch.setattr(product_exchange, "server_timing", fail)
        answer = http.post("/v1/gemm", content=content, headers=headers)
        problem(answer, 500, "internal")
        assert "secret" not in answer.text
        assert any(line["event"] == "unexpected error" for line in lines)
    assert http.post("/v1/gemm", content=content, headers=headers).status_code == 200
    assert eventually(lambda: not live.core.store.scratch_bytes)
