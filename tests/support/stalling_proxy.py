"""A TCP proxy before a server's join port, that stands still when a test wants: a link that is cut and tells nobody.

What is on its way then is neither lost nor refused: it waits, and arrives when the link is whole again. So an upload of
a worker that was given up comes to the server late, which no network promises and every network may do.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from dataclasses import dataclass
from typing import Self

_REQUEST = re.compile(rb"(GET|PUT) (/internal/[!-~]+) HTTP/1\.1\r\n")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_OVERLAP = 512
_PIECE = 1 << 16


@dataclass(frozen=True)
class Seen:
    """A request of an agent for data, or an answer to one."""

    connection: int
    text: str
    """Method and path, or the status."""


class StallingProxy:
    """Forwards to a port of this machine, in threads. `seen`: requests for data and answers, without TLS."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._whole = threading.Event()
        self._whole.set()
        self._stall_at: bytes | None = None
        self._stalling: int | None = None
        """Connection by which it stands still when `_left` more bytes have come."""
        self._left = 0
        self.stalled = threading.Event()
        """Set once it stands still by `stall_at`."""
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._connections = 0
        self.seen: list[Seen] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._whole.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Stands still, both ways, from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """Goes on, with what waited first."""
        self._whole.set()

    def stall_at(self, text: bytes, *, after: int = 0) -> None:
        """Stands still when the agent next sends `text`, with `after` bytes from its beginning on forwarded, in as many
        pieces as they come in.
        """
        self.stalled.clear()
        self._left = after
        self._stall_at = text

    def statuses(self, path: str) -> list[int]:
        """The statuses of what was asked of paths that begin so, on whichever connection."""
        asked: dict[int, list[str]] = {}
        found = []
        for each in list(self.seen):
            if not each.text.isdigit():
                asked.setdefault(each.connection, []).append(each.text.split()[1])
            elif asked.get(each.connection) and asked[each.connection].pop(0).startswith(path):
                found.append(int(each.text))
        return found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                agent, _ = self._listener.accept()
                self._connections += 1
                threading.Thread(target=self._forward, args=(agent, self._connections), daemon=True).start()

    def _forward(self, agent: socket.socket, number: int) -> None:
        self._whole.wait()
        with agent, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            with self._lock:
                self._sockets |= {agent, server}
                closed = self._closed
            if not closed:
                down = threading.Thread(target=self._pump, args=(server, agent, number, _STATUS), daemon=True)
                down.start()
                self._pump(agent, server, number, _REQUEST)
                down.join()
            with self._lock:
                self._sockets -= {agent, server}

    def _pump(self, source: socket.socket, sink: socket.socket, number: int, pattern: re.Pattern[bytes]) -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                tail = self._note(tail, data, number, pattern)
                if pattern is _REQUEST and self._stall_at is not None and (at := data.find(self._stall_at)) >= 0:
                    self._stall_at, self._stalling = None, number
                    self._left += at
                if pattern is _REQUEST and self._stalling == number:
                    first = min(len(data), self._left)
                    sink.sendall(data[:first])
                    data = data[first:]
                    self._left -= first
                    if data or not self._left:
                        self._stalling = None
                        self._whole.clear()
                        self.stalled.set()
                self._whole.wait()
                sink.sendall(data)
        self._whole.wait()  # nor does an end arrive while the link is cut
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _note(self, tail: bytes, data: bytes, number: int, pattern: re.Pattern[bytes]) -> bytes:
        """Put down the heads that `data` completes; returns what the next may begin with."""
        text, end = tail + data, 0
        for found in pattern.finditer(text):
            self.seen.append(Seen(number, b" ".join(found.groups()).decode()))
            end = found.end()
        return text[max(end, len(text) - _OVERLAP) :]
