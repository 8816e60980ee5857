"""One keep-alive connection that sends prebuilt requests without blocking and receives answers in memory of its own."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.service.http1 import LARGEST_HEAD, AnswerError, parse_head

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST_SINK = 256 << 20
"""A longer body is received round and round in so much memory; its last bytes are there at the end."""
SAMPLE = 64
SEND_PIECE = 1 << 20


@dataclass
class Exchange:
    """A request and what is known of its answer.

    `parts`: the request's bytes, sent in order and never joined; the same memory may occur more than once.
    `expected`: the last bytes of the answer's body; complex64, compared by value. `after`: given the body, a further
    exchange that is not timed (tidying up), or None.
    """

    parts: list[memoryview]
    status: int = 200
    expected: memoryview | None = None
    body_length: int | None = None
    after: Callable[[bytes], Exchange | None] | None = None
    upload: int = field(init=False)

    def __post_init__(self):
        self.parts = [memoryview(part).cast("B") for part in self.parts]
        if sum(map(len, self.parts)) <= SEND_PIECE:  # one call of send
            self.parts = [memoryview(b"".join(self.parts))]
        self.upload = sum(map(len, self.parts))


def connect(address, timeout=30.0):
    """A socket to (host, port) or to a path."""
    if isinstance(address, str):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(timeout)
        connected.connect(address)
    else:
        connected = socket.create_connection(tuple(address), timeout)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setblocking(False)
    return connected


class Connection:
    """At most one exchange at a time. `advance` does what can be done without waiting; True once the answer is whole.

    Afterwards `head` is the answer's; `check` compares the body.
    """

    def __init__(self, address):
        self.address = address
        self.socket = connect(address)
        self.intended = self.freed = 0
        self.timed = True
        self._first = bytearray(LARGEST_HEAD)
        self._sink = memoryview(bytearray(LARGEST_HEAD))
        self.exchange = None

    def fileno(self):
        return self.socket.fileno()

    def reconnect(self):
        """Anew, after an answer that closes."""
        self.socket.close()
        self.socket = connect(self.address)

    def begin(self, exchange, *, timed=True):
        """Makes it ready; nothing is sent yet."""
        self.exchange, self.timed = exchange, timed
        self.head = None
        self._part = self._offset = self._held = self._received = 0

    @property
    def sending(self):
        """Whether bytes of the request are left."""
        return self._part < len(self.exchange.parts)

    def advance(self):
        """Sends and receives as far as it goes. Raises AnswerError, OSError."""
        if self.sending:
            self.send()
        whole = self._receive()
        if whole and self.sending:
            raise AnswerError(f"answered {self.head.status} before the request was sent: {self.body()[:200]!r}")
        return whole

    def send(self):
        """As much of the request as the socket takes. Raises OSError."""
        parts = self.exchange.parts
        while self._part < len(parts):
            part = parts[self._part]
            try:
                self._offset += self.socket.send(part[self._offset : self._offset + SEND_PIECE])
            except BlockingIOError:
                return
            if self._offset == len(part):
                self._part, self._offset = self._part + 1, 0

    def _receive(self):
        while True:
            if self.head is None:
                target = memoryview(self._first)[self._held :]
            else:
                left = self.head.length - self._received
                if not left:
                    return True
                start = self._received % len(self._sink)
                target = self._sink[start : start + left]
            try:
                count = self.socket.recv_into(target)
            except BlockingIOError:
                return False
            if not count:
                raise AnswerError("the connection was closed before the answer was whole")
            if self.head is None:
                self._held += count
                self._parse()
            else:
                self._received += count

    def _parse(self):
        self.head = parse_head(bytes(self._first[: self._held]))
        if self.head is None:
            return
        if len(self._sink) < min(self.head.length, LARGEST_SINK):
            self._sink = memoryview(bytearray(min(self.head.length, LARGEST_SINK)))
        rest = self._held - self.head.size
        if rest > self.head.length:
            raise AnswerError(f"{rest - self.head.length} bytes past the end of the answer")
        self._sink[:rest] = memoryview(self._first)[self.head.size : self._held]
        self._received = rest

    def body(self):
        """The answer's body as far as it has come; not for bodies past LARGEST_SINK."""
        return bytes(self._sink[: self._received])

    def check(self, *, full=False):
        """Compares status, length and one sample of the body, or all of it. Raises AnswerError."""
        exchange, head = self.exchange, self.head
        if head.status != exchange.status:
            raise AnswerError(f"status {head.status}: {self.body()[:300]!r}")
        if exchange.body_length is not None and head.length != exchange.body_length:
            raise AnswerError(f"a body of {head.length} bytes instead of {exchange.body_length}")
        if exchange.expected is None:
            return
        nbytes = len(exchange.expected)
        start = head.length - nbytes
        if start < 0:
            raise AnswerError(f"a body of {head.length} bytes, a result of {nbytes} was expected")
        first = max(0, head.length - len(self._sink) - start)  # what a ring has overwritten
        if not full:
            first += random.randrange(max(1, (nbytes - first - SAMPLE) // 8 + 1)) * 8
        self._compare(start, first, nbytes if full else min(nbytes, first + SAMPLE))

    def _compare(self, start, first, stop):
        at = (start + first) % len(self._sink)
        whole = len(self._sink) - at
        got = bytes(self._sink[at : at + stop - first])
        if stop - first > whole:
            got += bytes(self._sink[: stop - first - whole])
        want = bytes(self.exchange.expected[first:stop])
        if got != want and not np.array_equal(np.frombuffer(got, np.complex64), np.frombuffer(want, np.complex64)):
            raise AnswerError(f"wrong bytes in the result between {first} and {stop}")
