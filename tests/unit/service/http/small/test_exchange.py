"""Small requests as connections bring them: in pieces, late, one behind the other, and given up."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import numpy as np
import pytest
import structlog
from raw_connection import Raw, closed, eventually

from gemmserve import Client
from gemmserve.wire import format_npy_header
from gemmserve_kernels import gemm, gemm_reduce
from gemmserve_service.http.small import base_exchange, exchange, product_exchange
from gemmserve_service.tenancy.keyring import create_key


@pytest.fixture
def raw(live):
    connections = [Raw(live)]
    yield connections[0]
    connections[0].close()


@pytest.fixture
def plain(form, npy, random_array):
    """A body with its headers, and what the answer's must be."""
    a, b = random_array((6, 5)), random_array((5, 7), seed=1)
    d = gemm(a, b)
    return *form([("a", npy(a)), ("b", npy(b))]), format_npy_header(d.dtype, d.shape) + d.tobytes()


def requests(lines):
    """The lines about requests that are over; another thread may be writing more."""
    return [line for line in tuple(lines) if line["event"] == "request"]


def test_what_the_client_library_sends_goes_this_way(live, random_array, counted):
    a, b = random_array((6, 5)), random_array((5, 7), seed=1)
    with Client(live.url) as client:
        assert np.array_equal(client.gemm(a, b), gemm(a, b))
        assert np.array_equal(client.gemm(a, b, timeout=20), gemm(a, b))
        assert np.array_equal(client.gemm_reduce(a, b, reduce="sum"), gemm_reduce(a, b, reduce="sum"))
    assert len(counted) == 3


def test_many_on_one_connection(raw, plain, counted):
    content, headers, expected = plain
    for _ in range(5):
        raw.send(content, headers)
        status, _, body = raw.answer()
        assert (status, body) == (200, expected)
    assert len(counted) == 5


def test_pipelined_requests_are_answered_in_their_order(raw, plain, counted):
    content, headers, expected = plain
    requests = [
        raw.head(content, headers, f"X-Request-Id: r{number}", **fields) + content
        for number, fields in enumerate([{}, {}, {"path": "/v1/nothing"}, {}, {"path": "/v1/gemm?timeout_s=9"}, {}])
    ]
    raw.socket.sendall(b"".join(requests))
    answers = [raw.answer() for _ in requests]
    assert [answer[1]["x-request-id"] for answer in answers] == [f"r{number}" for number in range(6)]
    assert [answer[0] for answer in answers] == [200, 200, 404, 200, 200, 200]
    assert all(body == expected for status, _, body in answers if status == 200)
    assert len(counted) == 5


def test_a_body_in_pieces(raw, plain):
    content, headers, expected = plain
    whole = raw.head(content, headers) + content
    for start in range(0, len(whole), 97):  # the first of them within the patience, or the common way: the same answer
        raw.socket.sendall(whole[start : start + 97])
    status, _, body = raw.answer()
    assert (status, body) == (200, expected)


def test_a_body_that_comes_late_is_the_app_s(live, raw, plain, counted, monkeypatch):
    monkeypatch.setattr(base_exchange, "PATIENCE_S", 0.02)
    content, headers, expected = plain
    path = live.connection_class.small
    for cut in (0, 100):
        assert eventually(lambda: not live.tasks)
        raw.socket.sendall(raw.head(content, headers) + content[:cut])
        assert eventually(lambda: path.gathered == 0 and live.tasks)  # handed over, and being read there
        raw.socket.sendall(content[cut:])
        status, _, body = raw.answer()
        assert (status, body) == (200, expected)
    assert not counted


def test_expect_100_continue(raw, plain):
    content, headers, expected = plain
    raw.socket.sendall(raw.head(content, headers, "Expect: 100-continue"))
    assert raw.answer()[0] == 100
    raw.socket.sendall(content)
    status, _, body = raw.answer()
    assert (status, body) == (200, expected)


def test_chunks_are_the_app_s(raw, plain, counted):
    content, headers, _ = plain
    head = raw.head(content, headers, "Transfer-Encoding: chunked").replace(
        f"Content-Length: {len(content)}\r\n".encode(), b""
    )
    raw.socket.sendall(head + b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n")
    status, _, body = raw.answer()
    assert (status, json.loads(body)["type"], len(counted)) == (411, "/problems/length-required", 0)


def test_a_connection_that_is_to_close(live, plain, counted):
    content, headers, expected = plain
    for version, further in (("1.0", ()), ("1.1", ("Connection: close",))):
        with contextlib.closing(Raw(live)) as raw:
            raw.send(content, headers, *further, version=version)
            status, sent, body = raw.answer()
            assert (status, sent["connection"], body) == (200, "close", expected)
            assert raw.answer() is None
    assert len(counted) == 2


def test_heads_that_are_refused(live, plain, counted):
    content, headers, _ = plain
    for method, further, status in (
        ("PUT", (), 405),
        ("HEAD", (), 405),
        ("BREW", (), 400),
        ("POST", (f"X-Long: {'x' * 40_000}",), 431),
        ("POST", ("Host: 127.0.0.1",), 400),
        ("POST", ("Content-Length: 7",), 400),
    ):
        with contextlib.closing(Raw(live)) as raw:
            with contextlib.suppress(OSError):  # it may have hung up by then
                raw.send(content, headers, *further, method=method)
            assert raw.answer(body=method != "HEAD")[0] == status, (method, further)
    assert not counted


def test_bodies_are_gathered_within_bounds(live, raw, plain, counted, monkeypatch):
    content, headers, expected = plain
    monkeypatch.setattr(exchange, "_MAX_GATHERED", len(content) - 1)
    raw.send(content, headers)
    assert (raw.answer()[2], len(counted)) == (expected, 0)
    monkeypatch.setattr(exchange, "_MAX_GATHERED", len(content))
    raw.send(content, headers)
    assert (raw.answer()[2], len(counted)) == (expected, 1)
    assert live.connection_class.small.gathered == 0


def test_who_hangs_up_in_the_middle_of_a_body_leaves_nothing(live, plain):
    content, headers, _ = plain
    with structlog.testing.capture_logs() as lines:
        for cut in (0, 50, len(content) - 1):
            connection = Raw(live)
            connection.socket.sendall(connection.head(content, headers) + content[:cut])
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        assert eventually(lambda: len(requests(lines)) == 3)
    assert {line["status"] for line in requests(lines)} == {499}
    assert eventually(lambda: live.connection_class.small.gathered == 0)
    assert eventually(lambda: live.core.store.scratch_bytes == 0)


def test_a_client_that_hangs_up_cancels_its_product(live, plain):
    content, headers, _ = plain
    live.executor.hold = True
    connections = [Raw(live) for _ in range(2)]
    for connection in connections:
        connection.send(content, headers)
    scheduler = live.core.scheduler
    assert eventually(lambda: scheduler.queued + scheduler.running == 2)
    with structlog.testing.capture_logs() as lines:
        for connection in connections:
            connection.close()
        assert eventually(lambda: scheduler.queued == 0 and len(requests(lines)) == 2)
    assert [line["status"] for line in requests(lines)] == [499, 499]
    live.executor.release()
    assert eventually(lambda: not scheduler.running and not live.core.store.scratch_bytes)
    value = live.app.state.metrics.registry.get_sample_value
    labels = {"op": "gemm", "algorithm": "none", "state": "cancelled"}
    assert eventually(lambda: value("gemmserve_jobs_total", labels) == 2)


def test_a_client_that_takes_nothing_is_sent_no_second_answer(live, form, npy, counted):
    """What it is owed is bounded by what fits into the sockets and one answer."""
    wide = [("a", npy(np.ones((360, 1), "c8"))), ("b", npy(np.ones((1, 360), "c8")))]  # a megabyte of an answer
    content, headers = form(wide)
    connection = Raw(live)
    sender = threading.Thread(target=lambda: [connection.send(content, headers) for _ in range(40)], daemon=True)
    sender.start()
    assert eventually(lambda: live.stalled and live.tasks)  # the next one waits in the app
    assert len(counted) < 30
    answers = [connection.answer() for _ in range(40)]
    assert {status for status, _, _ in answers} == {200}
    assert len({body for _, _, body in answers}) == 1
    sender.join(60)
    connection.close()


def test_a_server_that_ends_answers_first(serve, spy, plain, problem):
    content, headers, _ = plain
    live = serve()
    spy.hold = True
    connection = Raw(live)
    connection.send(content, headers)
    assert eventually(lambda: live.core.scheduler.queued + live.core.scheduler.running == 1)
    live.call(live.core.scheduler.drain)
    spy.release()
    assert connection.answer()[0] in {200, 503}
    connection.send(content, headers)
    assert connection.answer()[0] == 503
    connection.close()


def test_behind_a_proxy_the_audit_has_the_client_s_address(serve, tmp_path, plain, counted):
    live = serve(audit_log=tmp_path / "audit", trusted_proxies=["127.0.0.1"])
    key_id, text = create_key(live.core.settings.data_dir, "alice")
    assert eventually(lambda: key_id in live.core.keyring.current.keys)
    content, headers, _ = plain
    connection = Raw(live)
    connection.send(content, headers, f"X-Api-Key: {text}", "X-Forwarded-For: 203.0.113.9")
    assert connection.answer()[0] == 200
    connection.close()
    assert eventually(lambda: "/v1/gemm" in (tmp_path / "audit").read_text())  # written after the answer
    (line,) = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines() if "/v1/gemm" in line]
    assert (line["address"], len(counted)) == ("203.0.113.9", 1)


@pytest.mark.parametrize("known", [False, True])
def test_a_server_that_ends_while_a_request_is_handed_over_closes_behind_its_answer(live, raw, plain, counted, known):
    """`known`: whether its head was seen before, so that it came past the parser."""
    content, headers, expected = plain
    if known:
        raw.send(content, headers)
        assert raw.answer()[2] == expected
    wrong = content.replace(b'name="b"', b'name="z"')
    raw.socket.sendall(raw.head(wrong, headers) + wrong[:100])
    assert eventually(lambda: live.connection_class.small.gathered)
    live.call(lambda: [connection.shutdown() for connection in live.open_connections])
    raw.socket.sendall(wrong[100:])
    status, sent, body = raw.answer()
    assert (status, sent.get("connection"), json.loads(body)["status"]) == (422, "close", 422)
    assert raw.answer() is None
    assert len(counted) == known


@pytest.mark.parametrize("known", [False, True])
def test_a_result_that_cannot_be_described_is_answered_once(live, raw, plain, counted, monkeypatch, known):
    content, headers, expected = plain

    def broken(_):
        raise RuntimeError("broken")

    with structlog.testing.capture_logs() as lines:
        if known:
            raw.send(content, headers)
            assert raw.answer()[2] == expected
        with monkeypatch.context() as patch:
            patch.setattr(product_exchange, "elements_header", broken)
            raw.send(content, headers)
            status, sent, body = raw.answer()
        assert (status, sent["content-type"], json.loads(body)["status"]) == (500, "application/problem+json", 500)
        raw.send(content, headers)
        assert raw.answer()[2] == expected
        assert eventually(lambda: len(requests(lines)) == 2 + known)
    assert [line["status"] for line in requests(lines)][known:] == [500, 200]
    assert eventually(lambda: live.core.store.scratch_bytes == 0)


def test_an_answer_that_cannot_be_written_breaks_the_connection_and_is_counted(live, raw, plain, monkeypatch):
    content, headers, _ = plain

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(live.connection_class, "reply", broken)
    with structlog.testing.capture_logs() as lines:
        raw.send(content, headers)
        assert closed(raw.socket)
        assert eventually(lambda: requests(lines))
    assert [line["status"] for line in requests(lines)] == [499]
    assert eventually(lambda: live.core.store.scratch_bytes == 0 and live.connections == 0)
