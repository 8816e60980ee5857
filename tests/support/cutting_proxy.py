"""A TCP proxy that breaks connections after so many bytes in either direction."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Self
from urllib.parse import urlsplit


class CuttingProxy:
    """Forwards to `url`. `cuts`: for one connection after the other (bytes up, bytes down), None for no limit.

    `reset`: what is on its way is lost, too; else everything that was forwarded arrives, and a client whose upload is
    cut hears of it when the server has: it does not ask how far it has come while the server is still reading.
    """

    def __init__(self, url: str, cuts: list[tuple[int | None, int | None]], *, reset: bool = False) -> None:
        self._reset = reset
        target = urlsplit(url)
        self._target = (target.hostname, target.port)
        self._cuts = cuts
        self._lock = threading.Lock()
        self.connections = 0
        self.cut = 0
        self.up = self.down = 0
        """Bytes that were forwarded."""

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    limits = self._cuts.pop(0) if self._cuts else (None, None)
                    self.connections += 1
                threading.Thread(target=self._forward, args=(client, limits), daemon=True).start()

    def _forward(self, client: socket.socket, limits: tuple[int | None, int | None]) -> None:
        """One connection, both ways. The sockets are closed when both ways are through: not while one is read."""
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            down = threading.Thread(target=self._pump, args=(server, client, limits[1], False), daemon=True)
            down.start()
            self._pump(client, server, limits[0], True)
            down.join()

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int | None, up: bool) -> None:
        passed = 0
        ends = (socket.SHUT_RDWR, source, sink)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if limit is not None and passed + len(data) > limit:
                    self._pass(sink, data[: limit - passed], up)
                    if up and not self._reset:
                        ends = (socket.SHUT_WR, sink)  # the server closes, and then the client's side is, too
                    with self._lock:
                        self.cut += 1
                    for one in (source, sink) if self._reset else ():
                        # A reset, not an end: SO_LINGER with no time.
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        ends = (socket.SHUT_RD, source, sink)
                    break
                self._pass(sink, data, up)
                passed += len(data)
        how, *sockets = ends
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(how)

    def _pass(self, sink: socket.socket, data: bytes, up: bool) -> None:
        sink.sendall(data)
        with self._lock:
            if up:
                self.up += len(data)
            else:
                self.down += len(data)
