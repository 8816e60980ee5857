"""The load generator: histograms, parsing, framing, what it counts and what it refuses."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
from benchmark_scripts import load_service
from scripted_server import ScriptedServer, ok

histogram, http1, exchanges, connection, loops = load_service("histogram", "http1", "exchanges", "connection", "loops")

SMALL = exchanges.Work("product", 4)


def frame_answer(body, _number=0):
    """What rivals/asgi_app.py gives, computed by its own module."""
    return ok(frame_module().answer(body))


def frame_module():
    import importlib.util

    path = exchanges.__file__.replace("exchanges.py", "rivals/frame.py")
    spec = importlib.util.spec_from_file_location("rival_frame", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loop(server, exchange, clients=1):
    return loops.Loop(server.address, exchange, clients)


# ---- histograms


def test_percentiles_are_within_three_digits_of_the_exact_ones() -> None:
    found = histogram.empty()
    values = np.random.default_rng(0).lognormal(13, 1.5, 5000).astype(int)
    for value in values:
        found.record_value(int(value))
    for percentile in (50, 90, 99, 99.9):
        exact = np.sort(values)[round(percentile * 50) - 1] / 1e6
        assert histogram.at(found, percentile) == pytest.approx(exact, rel=2e-3)
    summary = histogram.summary(found)
    assert summary["count"] == 5000
    assert summary["p99_9_ms"] == histogram.at(found, 99.9)
    assert summary["max_ms"] == pytest.approx(values.max() / 1e6, rel=2e-3)


def test_merging_counts_every_round() -> None:
    texts = []
    for base in (1_000_000, 100_000_000):
        found = histogram.empty()
        for i in range(100):
            found.record_value(base + i)
        texts.append(histogram.encoded(found))
    whole = histogram.merged(texts)
    assert whole.get_total_count() == 200
    assert histogram.at(whole, 25) == pytest.approx(1, rel=2e-3)
    assert histogram.at(whole, 75) == pytest.approx(100, rel=2e-3)


def test_a_curve_ends_at_the_slowest() -> None:
    found = histogram.empty()
    for milliseconds in range(1, 101):
        found.record_value(milliseconds * 1_000_000)
    points = histogram.curve(found)
    assert points[0] == (1.0, pytest.approx(1, rel=2e-3))
    assert points[-1] == (pytest.approx(100), pytest.approx(99, rel=2e-2))
    assert histogram.curve(histogram.empty()) == []
    assert histogram.summary(histogram.empty()) == {"count": 0}


# ---- heads


def test_a_head_is_parsed_once_it_is_whole() -> None:
    data = b"HTTP/1.1 201 Created\r\ncontent-LENGTH:  7\r\nConnection: close\r\nServer-Timing: q;dur=1\r\n\r\nbo"
    assert http1.parse_head(data[:-4]) is None
    head = http1.parse_head(data)
    assert (head.status, head.length, head.size, head.closes) == (201, 7, len(data) - 2, True)
    assert head.server_timing == "q;dur=1"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"x" * http1.LARGEST_HEAD,
    ],
)
def test_other_heads_are_refused(data) -> None:
    with pytest.raises(http1.AnswerError):
        http1.parse_head(data)


def test_a_204_needs_no_length() -> None:
    assert http1.parse_head(b"HTTP/1.1 204 No Content\r\n\r\n").length == 0


def test_server_timing_adds_up_by_name() -> None:
    text = 'receive;dur=1.5, kernel;desc="a";dur="2", kernel;dur=0.25, cache'
    assert http1.server_timing(text) == {"receive": 1.5, "kernel": 2.25}
    assert http1.server_timing("") == {}


# ---- what is sent


def body_of(exchange):
    return b"".join(exchange.parts).partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("work", [SMALL, exchanges.Work("axpy", 40_000)], ids=lambda work: work.operation)
def test_multipart_holds_the_operands_as_npy(work) -> None:
    made = exchanges.exchange("gemmserve", work)
    head = b"".join(made.parts).partition(b"\r\n\r\n")[0].decode()
    body = body_of(made)
    assert f"Content-Length: {len(body)}" in head
    arrays = exchanges.operands(work)
    for part in body.split(f"--{exchanges.BOUNDARY}".encode())[2:-1]:
        fields, _, data = part.partition(b"\r\n\r\n")
        name = fields.split(b'name="')[1][:1].decode()
        assert np.array_equal(np.load(io.BytesIO(data)), arrays[name])
    assert np.array_equal(np.frombuffer(made.expected, np.complex64), arrays["d"].ravel())


@pytest.mark.parametrize("operation", ["product", "axpy", "echo"])
def test_the_rivals_compute_what_is_expected(operation) -> None:
    work = exchanges.Work(operation, 8)
    made = exchanges.exchange("frame", work)
    answer = bytes(frame_module().answer(body_of(made)))
    assert np.array_equal(np.frombuffer(answer, np.complex64), np.frombuffer(made.expected, np.complex64))
    assert len(answer) == work.down


def test_a_long_upload_repeats_the_same_memory() -> None:
    work = exchanges.Work("upload", (exchanges.LARGEST_OPERAND // 8) * 2 + 5)
    made = exchanges.exchange("gemmserve", work)
    assert made.upload == work.up + len(made.parts[0])
    assert len({part.obj is made.parts[1].obj for part in made.parts[1:]}) == 1


def test_what_a_server_lacks_is_a_lookup_error() -> None:
    with pytest.raises(LookupError):
        exchanges.exchange("multipart", exchanges.Work("echo", 8))


# ---- loops


def test_a_closed_loop_counts_its_exchanges() -> None:
    with ScriptedServer(lambda body, n: frame_answer(body)) as server:
        running = loop(server, exchanges.exchange("frame", SMALL), clients=3)
        running.warm_up()
        outcome = running.closed(60, most=20)
        running.close()
    assert outcome.latencies.get_total_count() == 20
    assert outcome.document()["errors"] == {}


def test_a_closed_loop_whose_time_is_over_before_it_begins_counts_one_exchange_of_each() -> None:
    with ScriptedServer(lambda body, n: frame_answer(body)) as server:
        running = loop(server, exchanges.exchange("frame", SMALL), clients=2)
        outcome = running.closed(0)
        running.close()
    assert outcome.latencies.get_total_count() == 2


def test_an_open_loop_charges_the_wait_for_a_stalled_server() -> None:
    """One answer that takes 0.4 s delays those that were to begin meanwhile, and they count that delay."""
    stall = threading.Event()

    def answer(body, number):
        if number == 11:  # the first is the warm-up
            stall.wait(0.4)
        return frame_answer(body)

    with ScriptedServer(answer) as server:
        running = loop(server, exchanges.exchange("frame", SMALL))
        running.warm_up()
        outcome = running.open(rate=100, seconds=0.5)
        running.close()
    assert outcome.latencies.get_total_count() == 50
    assert histogram.at(outcome.latencies, 50) >= 100  # 30 were to begin in the stall's first 0.3 s


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"\0" * 128),
        ok(b""),
        b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\n\r\n",
        ok(b"\0" * 128) + b"more",
        None,
    ],
    ids=["wrong", "short", "500", "no length", "left over", "closed"],
)
def test_a_wrong_answer_ends_the_measurement(answer) -> None:
    with ScriptedServer(lambda body, n: answer) as server:
        running = loop(server, exchanges.exchange("frame", SMALL))
        with pytest.raises(http1.AnswerError):
            running.warm_up()
        running.close()


def test_errors_under_load_are_counted_and_not_timed() -> None:
    refused = b"HTTP/1.1 429 Later\r\nContent-Length: 0\r\n\r\n"
    with ScriptedServer(lambda body, n: refused if n % 2 else frame_answer(body)) as server:
        running = loop(server, exchanges.exchange("frame", SMALL))
        running.warm_up()
        outcome = running.closed(60, most=10)
        running.close()
    assert outcome.errors == {"429": 5}
    assert outcome.latencies.get_total_count() == 5


def test_an_answer_that_closes_is_followed_by_a_new_connection() -> None:
    product = exchanges.bytes_of(exchanges.operands(SMALL)["d"])
    with ScriptedServer(lambda body, n: ok(product, "Connection: close")) as server:
        running = loop(server, exchanges.exchange("frame", SMALL))
        running.warm_up()
        assert running.closed(60, most=3).latencies.get_total_count() == 3
        running.close()


def test_tidying_up_is_done_and_not_timed() -> None:
    seen = []

    def answer(body, number):
        seen.append(body)
        return ok(b"{}")

    def after(_body):
        return connection.Exchange([http1.request("POST", "/", length=4), b"tidy"])

    made = connection.Exchange([http1.request("POST", "/", length=4), b"work"], after=after)
    with ScriptedServer(answer) as server:
        running = loop(server, made)
        outcome = running.closed(60, most=3)
        running.close()
    assert outcome.latencies.get_total_count() == 3
    assert seen == [b"work", b"tidy"] * 3


def test_a_longer_body_than_the_memory_is_compared_at_its_end(monkeypatch) -> None:
    monkeypatch.setattr(connection, "LARGEST_SINK", 1 << 17)
    data = exchanges.bytes_of(np.arange(40_000, dtype=np.complex64))
    wrong = bytearray(data)
    wrong[-8:] = b"\xff" * 8
    request = http1.request("GET", "/")
    for body, fits in ((bytes(data), True), (bytes(wrong), False)):
        made = connection.Exchange([request], expected=data)
        with ScriptedServer(lambda _, n, body=body: ok(body)) as server:
            running = loop(server, made)
            if fits:
                running.warm_up()
            else:
                with pytest.raises(http1.AnswerError):
                    running.warm_up()
            running.close()
