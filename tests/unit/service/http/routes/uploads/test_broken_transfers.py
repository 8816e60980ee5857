"""Uploads in parts over a socket: connections that break, that hang, and that trickle."""

from __future__ import annotations

import contextlib

import pytest
from raw_connection import until
from upload_parts import BARE, LARGE, digest, raw


@pytest.fixture
def app(serve):
    return serve()


@pytest.fixture
def http(app):
    with app.http() as http:
        yield http


def begin(http):
    query = {"dtype": "complex64", "shape": "512,1024"}
    return http.post("/v1/uploads", params=query, headers=BARE).headers["location"]


def send_some(app, url, count, *, more="", pass_time=lambda: None):
    """Promises all of the array, sends the first `count` bytes, and waits until they have landed."""
    connection = app.connect()
    connection.sendall(
        f"PUT {url}/parts/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
        f"Content-Length: {LARGE.nbytes}\r\n{more}\r\n".encode()
        + raw(LARGE)[:count]
    )
    record = app.core.uploads.get(url.split("/")[3], "")

    def come():
        pass_time()  # how much has landed is told now and then
        return any(one.received == count for one in record.parts)

    until(come)
    return connection, record


@pytest.mark.parametrize("checked", [False, True])
def test_what_came_before_a_connection_broke(app, http, checked):
    url, some = begin(http), 3 << 20
    more = f"Content-Digest: {digest(raw(LARGE))}\r\n" if checked else ""
    connection, record = send_some(app, url, some, more=more)
    connection.close()
    until(lambda: not record.parts)
    kept = 0 if checked else some
    assert http.get(url).json()["received"] == ([] if checked else [[0, some]])
    assert http.put(f"{url}/parts/{kept}", content=raw(LARGE)[kept:], headers=BARE).status_code == 204
    done = http.post(f"{url}/complete")
    assert done.status_code == 201
    with app.core.store.pin(done.json()["id"]) as pinned:
        assert bytes(pinned.view) == raw(LARGE)


def test_a_later_request_for_the_same_bytes_ends_one_that_hangs(app, http):
    url, some = begin(http), 2 << 20
    connection, record = send_some(app, url, some)
    with connection:
        assert http.get(url).json()["received"] == [], "GET disturbs nothing"
        assert http.put(f"{url}/parts/{some}", content=raw(LARGE)[some:], headers=BARE).status_code == 204
        assert not record.parts
        assert b" 409 " in connection.recv(1000).split(b"\r\n")[0]
    assert http.get(url).json()["received"] == [[0, LARGE.nbytes]], "what had come is lost"


def test_a_question_leaves_parts_alone(app, http):
    url, some = begin(http), 2 << 20
    connection, record = send_some(app, url, some)
    with connection:
        assert http.head(url).status_code == 200
        assert record.parts
        connection.sendall(raw(LARGE)[some:])
        assert b" 204 " in connection.recv(1000).split(b"\r\n")[0]
    assert http.post(f"{url}/complete").status_code == 201


@pytest.mark.parametrize("ends", ["complete", "cancel"])
def test_the_end_of_an_upload_ends_its_parts(app, http, ends):
    url = begin(http)
    assert http.put(f"{url}/parts/0", content=raw(LARGE), headers=BARE).status_code == 204
    connection, record = send_some(app, url, 1 << 20)
    with connection:
        if ends == "complete":
            assert http.post(f"{url}/complete").status_code == 201
        else:
            assert http.delete(url).status_code == 204
            assert app.core.store.used_bytes == 0
        assert not record.parts
        with contextlib.suppress(ConnectionError):  # it has its answer, and may be closed
            connection.sendall(b"x" * (1 << 20))  # too late for the array
        assert b" 409 " in connection.recv(1000).split(b"\r\n")[0]
    if ends == "complete":
        with app.core.store.pin(record.array_id) as pinned:
            assert bytes(pinned.view) == raw(LARGE)


def test_a_part_that_trickles(serve_stepped):
    window_s = 1e6  # of which what it takes for the bytes to come, a tenth at a time, is nothing
    app = serve_stepped(body_window_s=window_s)
    with app.http() as http:
        url = begin(http)
        connection, record = send_some(app, url, 1 << 20, pass_time=lambda: app.advance(0.1))
        with connection:
            app.advance(window_s)
            assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]
        until(lambda: not record.parts)
        assert http.get(url).json()["received"] == [[0, 1 << 20]]
