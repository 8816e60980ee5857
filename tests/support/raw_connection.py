"""A connection to an app, for what no client library sends."""

from __future__ import annotations

import time


class Raw:
    """Of a `LiveApp`; requests are sent as they are told, answers are read one by one."""

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


def eventually(condition, within_s=30.0):
    """Whether that becomes true."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
