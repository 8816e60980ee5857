"""A TCP proxy that does to connections what bad networks, and bad boxes on the way, do: by chance, from a seed."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Faults:
    """How often each happens: a share of segments, of connections for `close`.

    `cut`: the connection is reset, what is on its way lost. `delay`: a segment waits. `double`: it goes twice. `flip`:
    a bit of it changes. `split`: it goes in two, with a pause between. `close`: ends are told in the wrong order:
    to the sender first, before the last segment is through, or of one direction only.
    """

    cut: float = 0.0
    delay: float = 0.0
    double: float = 0.0
    flip: float = 0.0
    split: float = 0.0
    close: float = 0.0


KINDS = ("cut", "delay", "double", "flip", "split", "close")

_LONGEST_S = 0.05
_EARLY = 0.05


class FaultyProxy:
    """A context manager; connect to `url`. `did` counts what was done, by kind and direction ("flip up")."""

    def __init__(self, url: str, faults: Faults, seed: int) -> None:
        target = urlsplit(url)
        self._target = (target.hostname, target.port)
        self.faults = faults
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.did: Counter[str] = Counter()
        self.connections = 0

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            still = list(self._open)
        for one in still:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(60)

    def _start(self, work, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                self._start(self._forward, client, random.Random(self._chance.random()))

    def _forward(self, client: socket.socket, chance: random.Random) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            try:
                down = threading.Thread(
                    target=self._pump, args=(server, client, random.Random(chance.random()), "down"), daemon=True
                )
                down.start()
                self._pump(client, server, random.Random(chance.random()), "up")
                down.join()
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pump(self, source: socket.socket, sink: socket.socket, chance: random.Random, way: str) -> None:
        """One direction, to its end."""
        faults = self.faults
        wrongly = chance.random() < faults.close
        with contextlib.suppress(OSError):
            while data := source.recv(chance.choice((1 << 9, 1 << 12, 1 << 16))):
                if chance.random() < faults.cut:
                    self._note("cut", way)
                    for one in (source, sink):  # a reset, not an end: SO_LINGER with no time
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        one.shutdown(socket.SHUT_RD)
                    break
                if wrongly and chance.random() < _EARLY:
                    self._note("close", way)
                    source.shutdown(socket.SHUT_WR)  # the sender is told of an end before what it has sent is through
                    self._send(sink, data, chance, way)
                    break
                self._send(sink, data, chance, way)
        ends = [(sink, socket.SHUT_WR)]
        if wrongly:
            self._note("close", way)
            ends = chance.choice([
                [(source, socket.SHUT_RDWR), (sink, socket.SHUT_RDWR)],  # both, the wrong one first
                [(source, socket.SHUT_WR), (sink, socket.SHUT_WR)],
                [(sink, socket.SHUT_RDWR)],
            ])  # fmt: skip
        for one, how in ends:
            with contextlib.suppress(OSError):
                one.shutdown(how)

    def _send(self, sink: socket.socket, data: bytes, chance: random.Random, way: str) -> None:
        faults = self.faults
        if chance.random() < faults.delay:
            self._note("delay", way)
            time.sleep(chance.uniform(0, _LONGEST_S))
        if chance.random() < faults.flip:
            self._note("flip", way)
            at = chance.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        if chance.random() < faults.split:
            self._note("split", way)
            at = chance.randrange(len(data))
            sink.sendall(data[:at])
            time.sleep(chance.uniform(0, _LONGEST_S / 10))
            data = data[at:]
        sink.sendall(data)
        if chance.random() < faults.double:
            self._note("double", way)
            sink.sendall(data)

    def _note(self, kind: str, way: str) -> None:
        with self._lock:
            self.did[f"{kind} {way}"] += 1
