"""A connection to an app, for what no client library sends."""

from __future__ import annotations

import contextlib
import json
import time

GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def upload_head(nbytes, **headers):
    """Return the head of an upload of so many bare bytes."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return (
        "POST /v1/arrays?dtype=float64&shape=" + str(nbytes // 8) + " HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {nbytes}\r\n" + "".join(f"{x}\r\n" for x in lines)
    ).encode() + b"\r\n"


class Raw:
    """Connection to a `LiveApp`; requests are sent as they are told, answers are read one by one."""

    def __init__(self, live) -> None:
        self.port = live.port
        self.socket = live.connect()
        self._file = self.socket.makefile("rb")

    def head(self, content, headers, *further, method="POST", path="/v1/gemm", version="1.1"):
        lines = [f"{method} {path} HTTP/{version}", f"Host: 127.0.0.1:{self.port}", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, *further, "", ""]).encode()

    def send(self, content, headers, *further, **fields):
        self.socket.sendall(self.head(content, headers, *further, **fields) + content)

    def answer(self, *, body=True):
        """Status, headers and body of the next one; None at the end."""
        line = self._file.readline()
        if not line:
            return None
        headers = {}
        while (field := self._file.readline()) not in {b"\r\n", b""}:
            name, _, value = field.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers, self._file.read(int(headers.get("content-length", 0)) if body else 0)

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def eventually(condition, within_s=60.0):
    """Whether that becomes true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def until(condition, within_s=60.0):
    """Waits for something that another thread does."""
    assert eventually(condition, within_s), "it did not happen"


def read_all(connection):
    """What comes until the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def closed(connection):
    """Waits for the other side to close; whether it did so without a word."""
    return read_all(connection) == b""


def answer_of(data):
    """Status, headers and problem of a whole answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    assert int(headers["content-length"]) == len(body)
    return int(lines[0].split()[1]), headers, json.loads(body)
