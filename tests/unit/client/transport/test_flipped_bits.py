"""One bit flipped anywhere in an answer: what was asked for comes, or a GemmserveError, and nothing else.

The answers are a server's, over a socket, with every byte of them changed in turn: what parses them is all of the
client's own and of its HTTP library.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import gemmserve
from gemmserve import Client, RetryPolicy
from gemmserve._calls import arrays as array_flows
from gemmserve._transfer import parts
from gemmserve._transfer.arrays import npy_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BITS = (0, 4, 7)
"""Bits of each byte that flip: the lowest, one of the middle, and the one that leaves ASCII."""

ARRAY = np.arange(1.0, 25.0).reshape(4, 6)
FILE = npy_header(ARRAY) + ARRAY.tobytes()
HALF = len(FILE) - 96
ARRAY_ID = "arr_0123456789abcdef"
ETAG = '"0123456789abcdef"'


def digest(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def answer(status: str, body: bytes, *fields: str) -> bytes:
    """An answer whose exchange is filled in when it is sent."""
    exchange = ("Gemmserve-Exchange: {exchange}", "X-Request-Id: r1")
    head = (f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(body)}", *exchange, *fields, "", "")
    return "\r\n".join(head).encode() + body


def info() -> bytes:
    return json.dumps({
        "id": ARRAY_ID, "dtype": "float64", "shape": [4, 6], "order": "C", "nbytes": ARRAY.nbytes, "state": "ready",
        "created_at": "2026-01-01T00:00:00Z", "expires_at": None, "sha256": None, "name": None, "labels": {},
    }).encode()  # fmt: skip


class Server:
    """Gives one answer to each connection, and closes it. `respond` takes the request's head."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.respond: Callable[[str], bytes] = lambda _head: b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):  # a client that has gone
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(1 << 16)
            if not piece:
                return
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        left = (int(length[1]) if length else 0) - len(body)
        while left > 0:
            left -= len(connection.recv(left))
        connection.sendall(self.respond(head.decode("latin-1")))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def named(head: str, text: bytes) -> bytes:
    exchange = re.search(r"(?i)gemmserve-exchange: (\S+)", head)
    assert exchange
    return text.replace(b"{exchange}", exchange[1].encode())


def flips(text: bytes) -> Iterator[tuple[int, int]]:
    """Every byte, each with some of its bits."""
    return ((at, bit) for at in range(len(text)) for bit in BITS)


def flipped(text: bytes, at: int, bit: int) -> bytes:
    return text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :]


def outcomes(server: Server, text: bytes, call: Callable[[Client], object], right: object) -> int:
    """Every flip of `text` in turn. Returns how many still gave what is right; asserts that no other gave anything."""
    came = 0
    spoilt = None
    inner = server.respond

    def respond(head: str) -> bytes:
        whole = inner(head)
        return named(head, flipped(text, *spoilt) if spoilt and whole == text else whole)

    server.respond = respond
    with Client(server.url, digests="always", retry=RetryPolicy(attempts=1), timeout=1, progress=False) as one:
        assert np.array_equal(call(one), right)
        for spoilt in flips(text):
            try:
                found = call(one)
            except gemmserve.GemmserveError:
                continue
            assert np.array_equal(found, right), (spoilt, text[max(0, spoilt[0] - 30) : spoilt[0] + 10])
            came += 1
    server.respond = inner
    return came


def test_of_a_part_of_an_array(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_flows, "PARTS_FROM", 1)
    for module in (array_flows, parts):
        monkeypatch.setattr(module, "PART", HALF)
    fields = ("Content-Type: application/x-npy", f"ETag: {ETAG}", f"Repr-Digest: {digest(FILE)}")

    def part(low: int, high: int) -> bytes:
        place = f"Content-Range: bytes {low}-{high - 1}/{len(FILE)}"
        return answer("206 Partial Content", FILE[low:high], place, *fields)

    first, second = part(0, HALF), part(HALF, len(FILE))

    document = answer("200 OK", info(), "Content-Type: application/json", f"Content-Digest: {digest(info())}")

    def respond(head: str) -> bytes:
        if "/data" not in head.partition("\n")[0]:
            return document
        asked = re.search(r"(?i)range: bytes=(\d+)-", head)
        return second if asked and int(asked[1]) == HALF else first

    def fetched(client: Client) -> object:
        array = client.array(ARRAY_ID)
        assert array.shape == ARRAY.shape  # so that it is known to be large
        return array.numpy()

    for text in (first, second):
        server.respond = respond
        came = outcomes(server, text, fetched, ARRAY)
        assert came > 20  # of flips that nobody needs to notice: reason phrases, letters' case, fields' names


def test_of_a_document(server: Server) -> None:
    document = json.dumps({"used": 12345, "names": ["one", "two"]}).encode()
    text = answer("200 OK", document, "Content-Type: application/json", f"Content-Digest: {digest(document)}")
    server.respond = lambda _head: text
    assert outcomes(server, text, lambda one: json.dumps(one.usage()), json.dumps(json.loads(document))) > 20


def test_of_what_confirms_an_upload(server: Server) -> None:
    body = info()
    checked = "Gemmserve-Checked-Digest: " + digest(FILE)
    text = answer("201 Created", body, "Content-Type: application/json", f"Content-Digest: {digest(body)}", checked)
    server.respond = lambda _head: text
    assert outcomes(server, text, lambda one: one.put(ARRAY).id, ARRAY_ID) > 20


def test_a_body_that_nobody_compared_is_an_error(server: Server) -> None:
    body = info()
    fields = ("Content-Type: application/json", f"Content-Digest: {digest(body)}")
    other = f"Gemmserve-Checked-Digest: {digest(FILE[:-1])}"
    with Client(server.url, digests="always", retry=RetryPolicy(attempts=1), progress=False) as client:
        for confirmation in ((), (other,)):
            text = answer("201 Created", body, *fields, *confirmation)
            server.respond = lambda head, text=text: named(head, text)
            with pytest.raises(gemmserve.ProtocolError, match="does not confirm"):
                client.put(ARRAY)
