"""Requests whose head was seen before, byte for byte: they pass the parser by, and nobody can tell."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time

import numpy as np
import pytest
import structlog
from raw_connection import GET, Raw, closed, eventually, until

from gemmserve import Client
from gemmserve.wire import format_npy_header
from gemmserve_kernels import gemm
from gemmserve_service.http.protocol.protocol import State
from gemmserve_service.http.small import base_exchange, exchange, heads
from gemmserve_service.tenancy.keyring import create_key, revoke_key

pytestmark = pytest.mark.usefixtures("counted")  # for its patience: a slow machine must not decide the way


@pytest.fixture
def past(monkeypatch):
    """The requests that passed the parser by."""
    seen = []
    accept = exchange.SmallRequests.accept

    def note(*arguments):
        found = accept(*arguments)
        if found is not None and found.cycle is None:
            seen.append(found)
        return found

    monkeypatch.setattr(exchange.SmallRequests, "accept", note)
    return seen


@pytest.fixture
def products(form, npy, random_array):
    """Bodies of one size with the same headers, each with what its answer's body must be."""
    made = []
    for seed in range(3):
        a, b = random_array((6, 5), seed=seed), random_array((5, 7), seed=seed + 10)
        d = gemm(a, b)
        content, headers = form([("a", npy(a)), ("b", npy(b))])
        made.append((content, format_npy_header(d.dtype, d.shape) + d.tobytes()))
    return headers, made


@pytest.fixture
def warm(live, products):
    """A connection whose head is known: `warm.request(0)` is the bytes of a request for the first product."""
    headers, made = products
    connection = Raw(live)
    connection.request = lambda number: connection.head(made[number][0], headers) + made[number][0]
    connection.socket.sendall(connection.request(0))
    assert connection.answer()[::2] == (200, made[0][1])
    for _ in range(2):
        live.call(lambda: None)  # its line is written by then
    yield connection
    connection.close()


def known(live):
    return live.connection_class.small.heads._known


def test_the_second_one_on_any_connection(live, warm, products, past, counted):
    _, made = products
    for number in (1, 2, 0):
        warm.socket.sendall(warm.request(number))
        assert warm.answer()[::2] == (200, made[number][1])
    with contextlib.closing(Raw(live)) as other:
        other.socket.sendall(warm.request(1))
        assert other.answer()[::2] == (200, made[1][1])
    assert (len(past), len(counted), len(known(live))) == (4, 5, 1)


def test_it_is_in_the_middle_of_a_request_until_it_is_answered(live, warm, past):
    registry = live.connection_class.registry
    assert eventually(lambda: registry.idle == 1)
    live.executor.hold = True
    warm.socket.sendall(warm.request(1))
    assert eventually(lambda: len(past) == 1)
    assert (registry.count, registry.idle) == (1, 0)
    live.executor.release()
    assert warm.answer()[0] == 200
    assert eventually(lambda: registry.idle == 1)


def test_what_is_delivered_although_reading_is_paused_keeps_its_place(live, warm, products, past):
    _, made = products
    (protocol,) = live.connection_class.registry._idle

    def deliver() -> None:
        protocol.state = State.SMALL
        protocol.data_received(warm.request(1))
        protocol.data_received(warm.request(2))
        protocol._take_up()

    live.call(deliver)
    for number in (1, 2):
        assert warm.answer()[::2] == (200, made[number][1])
    assert len(past) == 2


def test_the_client_library_s_requests(live, past, random_array):
    a, b = random_array((6, 5)), random_array((5, 7), seed=1)
    with Client(live.url) as client:
        for _ in range(3):
            assert np.array_equal(client.gemm(a, b), gemm(a, b))
    assert len(past) == 2


def test_the_answer_is_the_same(live, warm, past):
    answers = []
    for way in (0, 1):
        if way == 0:
            live.call(known(live).clear)
        warm.socket.sendall(warm.request(0))
        status, headers, body = warm.answer()
        kept = {name: value for name, value in headers.items() if name not in {"x-request-id", "date", "server-timing"}}
        answers.append((status, list(kept.items()), body))
    assert answers[0] == answers[1]
    assert len(past) == 1


def test_in_pieces(warm, products, past):
    _, made = products
    whole = warm.request(1)
    head = whole.index(b"\r\n\r\n") + 4
    for cuts in ([head], [head + 1], [head, head + 50, len(whole) - 1], range(head, len(whole), 37)):
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            warm.socket.sendall(whole[start:end])
            time.sleep(0.001)  # so that most come one by one; what it is does not matter
        assert warm.answer()[::2] == (200, made[1][1])
    assert len(past) == 4


def test_pipelined(warm, products, past):
    _, made = products
    order = [0, 1, 2, 1, 0, 2, 2, 1]
    warm.socket.sendall(b"".join(map(warm.request, order)) + GET + warm.request(0) + warm.request(1)[:-9])
    for number in order:
        assert warm.answer()[::2] == (200, made[number][1])
    assert warm.answer()[0] == 200
    assert warm.answer()[::2] == (200, made[0][1])
    warm.socket.sendall(warm.request(1)[-9:])
    assert warm.answer()[::2] == (200, made[1][1])
    assert len(past) >= len(order)


def test_a_body_that_is_wrong_is_answered_as_the_first_time(live, warm, products, past, counted):
    _, made = products
    good = warm.request(0)
    for bad in (good.replace(b"NUMPY", b"NUMPX"), good.replace(b"--XbX\r\n", b"--XbY\r\n"), good[:-4] + b"\0" * 4):
        answers = []
        for way in (0, 1):
            if way == 0:
                live.call(known(live).clear)
            else:
                warm.socket.sendall(good)
                assert warm.answer()[::2] == (200, made[0][1])
            warm.socket.sendall(bad + GET)
            status, headers, body = warm.answer()
            answers.append((status, headers.get("content-type"), body))
            assert warm.answer()[0] == 200
        assert answers[0] == answers[1]
        assert answers[0][0] == 400
    assert len(past) == 3
    assert live.connection_class.small.gathered == 0


def test_a_body_that_comes_late_is_the_app_s(live, warm, products, past, counted, monkeypatch):
    monkeypatch.setattr(base_exchange, "PATIENCE_S", 0.02)
    _, made = products
    whole = warm.request(1)
    head = whole.index(b"\r\n\r\n") + 4
    for cut in (head, head + 100):
        assert eventually(lambda: not live.tasks)
        warm.socket.sendall(whole[:cut])
        assert eventually(lambda: live.connection_class.small.gathered == 0 and live.tasks)
        warm.socket.sendall(whole[cut:] + GET)
        assert warm.answer()[::2] == (200, made[1][1])
        assert warm.answer()[0] == 200
    assert (len(past), len(counted)) == (2, 1)


def test_who_hangs_up_leaves_nothing(live, warm, past):
    whole = warm.request(0)
    head = whole.index(b"\r\n\r\n") + 4
    with structlog.testing.capture_logs() as lines:
        for cut in (head, head + 10, len(whole) - 1):
            connection = Raw(live)
            connection.socket.sendall(whole[:cut])
            assert eventually(lambda: live.connection_class.small.gathered)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
            assert eventually(lambda: not live.connection_class.small.gathered)
        live.executor.hold = True
        connection = Raw(live)
        connection.socket.sendall(whole)
        scheduler = live.core.scheduler
        assert eventually(lambda: scheduler.queued + scheduler.running == 1)
        connection.close()
        assert eventually(lambda: sum(line["event"] == "request" for line in tuple(lines)) == 4)
    ended = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in ended] == [499] * 4
    assert [line["bytes_in"] for line in ended[:3]] == [0, 10, len(whole) - 1 - head]
    live.executor.release()
    assert eventually(lambda: not scheduler.running and not live.core.store.scratch_bytes)
    assert eventually(lambda: live.connections == 1)
    assert len(past) == 4


def test_a_key_that_is_revoked_is_no_key_any_more(serve, products, past):
    live = serve()
    folder = live.core.settings.data_dir
    key_id, text = create_key(folder, "alice")
    create_key(folder, "bob")
    live.call(live.core.keyring.refresh)
    headers, made = products
    with contextlib.closing(Raw(live)) as connection:
        for _ in range(2):
            connection.send(made[0][0], headers, f"X-Api-Key: {text}")
            assert connection.answer()[::2] == (200, made[0][1])
        assert len(past) == 1
        revoke_key(folder, key_id)
        live.call(live.core.keyring.refresh)
        connection.send(made[0][0], headers, f"X-Api-Key: {text}")
        status, _, body = connection.answer()
    assert (status, json.loads(body)["type"], len(past)) == (401, "/problems/unauthorized", 1)


def test_a_server_that_ends_answers_first(serve, spy, products, past):
    live = serve()
    headers, made = products
    with contextlib.closing(Raw(live)) as connection:
        connection.send(made[0][0], headers)
        assert connection.answer()[::2] == (200, made[0][1])
        spy.hold = True
        connection.send(made[1][0], headers)
        assert eventually(lambda: live.core.scheduler.queued + live.core.scheduler.running == 1)
        live._server.should_exit = True
        until(lambda: any(not each.stays for each in past))
        spy.release()
        status, fields, body = connection.answer()
        assert (status, fields["connection"], body) == (200, "close", made[1][1])
        assert connection.answer() is None


def test_a_connection_that_is_idle_is_closed_in_its_time(serve_stepped, products, past):
    live = serve_stepped(keep_alive_s=5.0)
    headers, made = products
    connection = Raw(live)
    for _ in range(4):  # the timer of the first answer comes while others are long done
        connection.send(made[0][0], headers)
        assert connection.answer()[::2] == (200, made[0][1])
        live.advance(3.0)
    assert (len(past), live.connections) == (3, 1)
    live.advance(1.0)
    assert live.connections == 1
    live.advance(1.5)
    assert closed(connection.socket)
    connection.close()
    late = Raw(live)  # the first thing on this one passes the parser by
    head = b"".join(next(iter(known(live))))
    late.socket.sendall(head + made[0][0])
    assert late.answer()[0] == 200
    assert len(past) == 4
    live.advance(5.5)
    assert closed(late.socket)
    late.close()


def test_heads_that_are_not_kept(live, products, past):
    headers, made = products
    content, expected = made[0]
    for version, further in (
        ("1.0", ()),
        ("1.1", ("Connection: close",)),
        ("1.1", ("Expect: 100-continue",)),
        ("1.1", (f"X-Long: {'x' * 2100}",)),
        ("1.1", ("Via: 1.1 a", "Via: 1.1 a")),
    ):
        for _ in range(2):
            with contextlib.closing(Raw(live)) as connection:
                connection.send(content, headers, *further, version=version)
                answer = connection.answer()
                if answer[0] == 100:
                    answer = connection.answer()
                assert answer[::2] == (200, expected), further
    assert not known(live)
    assert not past


def test_those_seen_last_are_kept(live, products, monkeypatch):
    monkeypatch.setattr(heads, "_MAX_KEPT", 3)
    headers, made = products
    with contextlib.closing(Raw(live)) as connection:
        for number in (0, 1, 2, 0, 3):
            connection.send(made[0][0], headers, f"X-Number: {number}")
            assert connection.answer()[0] == 200
    assert [head.fields[b"x-number"] for head in known(live).values()] == [b"2", b"0", b"3"]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_in_whatever_pieces(live, warm, products, monkeypatch, seed):
    """Answers come in the order of the requests, each its own, by whichever way they went."""
    monkeypatch.setattr(base_exchange, "PATIENCE_S", 0.002)
    _, made = products
    chance = random.Random(seed)
    kinds = {
        **{number: (warm.request(number), 200, made[number][1]) for number in range(3)},
        "wrong": (warm.request(0).replace(b"NUMPY", b"NUMPX"), 400, None),
        "other": (GET, 200, None),
        "none": (warm.head(b"12345678", {}, path="/v1/nothing") + b"12345678", 404, None),
        "late": (warm.request(1).replace(b"/v1/gemm ", b"/v1/gemm?timeout_s=9 "), 200, made[1][1]),
    }
    order = chance.choices([*kinds], [5, 5, 5, 1, 1, 1, 2], k=30)
    data = b"".join(kinds[kind][0] for kind in order)
    cuts = sorted(chance.sample(range(1, len(data)), chance.choice([0, 5, 40])))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        warm.socket.sendall(data[start:end])
        if chance.random() < 0.3:
            time.sleep(chance.choice([0.0005, 0.004]))
    for kind in order:
        status, _, body = warm.answer()
        assert status == kinds[kind][1], kind
        assert kinds[kind][2] in {None, body}, kind
    assert eventually(lambda: live.connection_class.small.gathered == 0 and not live.core.store.scratch_bytes)


def test_what_a_client_calls_an_exchange_is_repeated_and_makes_no_head_a_new_one(live, products, past):
    """Whichever way a request goes: by the parser first, past it from then on, and to the app where it is wrong."""
    headers, made = products
    with contextlib.closing(Raw(live)) as connection:
        for number, name in enumerate(["first", "x" * 64, "A-z_09", "last"]):
            connection.send(made[0][0], headers, f"Gemmserve-Exchange: {name}")
            status, fields, body = connection.answer()
            assert (status, fields["gemmserve-exchange"], body) == (200, name, made[0][1])
            assert len(past) == number
        connection.send(made[0][0].replace(b"NUMPY", b"NUMPX"), headers, "Gemmserve-Exchange: wrong")
        status, fields, _ = connection.answer()
        assert (status, fields["gemmserve-exchange"]) == (400, "wrong")
        connection.send(made[0][0], headers)
        assert "gemmserve-exchange" not in connection.answer()[1]
    assert len(known(live)) == 2


@pytest.mark.parametrize(
    "further",
    [
        ("Gemmserve-Exchange: ",), ("Gemmserve-Exchange: a b",), (f"Gemmserve-Exchange: {'x' * 65}",),
        ("Gemmserve-Exchange: a", "Gemmserve-Exchange: b"),
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_answered_as_by_the_app(live, warm, products, further):
    """Also where a head that is known has a name in its place."""
    headers, made = products
    with contextlib.closing(Raw(live)) as connection:
        for _ in range(2):
            connection.send(made[0][0], headers, "Gemmserve-Exchange: good")
            assert connection.answer()[1]["gemmserve-exchange"] == "good"
            connection.send(made[0][0], headers, *further)
            status, fields, body = connection.answer()
            assert (status, body) == (200, made[0][1])
            assert fields.get("gemmserve-exchange") in {None, "a"}
