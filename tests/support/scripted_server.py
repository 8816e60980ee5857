"""A small HTTP server in a thread that answers as a test wants it to."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


class ScriptedServer:
    """`answer(body, number)` gives the bytes of the whole answer to the request of that number (from 0). A context
    manager; `address` is where it listens. An answer of None closes the connection.
    """

    def __init__(self, answer):
        self._answer = answer
        self._numbers = iter(range(1 << 30))
        self._open = []

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = list(self._listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            while True:
                received = b""
                while b"\r\n\r\n" not in received:
                    piece = connection.recv(1 << 16)
                    if not piece:
                        return
                    received += piece
                head, _, body = received.partition(b"\r\n\r\n")
                length = LENGTH.search(head)
                while len(body) < (int(length[1]) if length else 0):
                    piece = connection.recv(1 << 20)
                    if not piece:
                        return
                    body += piece
                answer = self._answer(body, next(self._numbers))
                if answer is None:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                connection.sendall(answer)


def ok(body, *headers):
    """An answer 200 with that body."""
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + bytes(body)
