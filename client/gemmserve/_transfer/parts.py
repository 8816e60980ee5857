"""Large arrays in parts: an array that is received from several answers, one going on for another.

No I/O here; `_calls.arrays` decides what is sent, `_transport` sends it.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve import _errors
from gemmserve._transfer.bodies import NpyReceiver
from gemmserve._transport.digests import sha256_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve._transfer.arrays import AnyArray

PARTS_FROM: Final = 64 << 20
"""Bytes from which an array goes in parts: below, another request costs more than another connection brings."""

PART: Final = 32 << 20
"""Bytes of a part, unless the server takes less: what is sent again at most when a connection breaks."""

_MANY_PROCESSORS: Final = 8
"""From which on a server has processes for transfers unless it is told otherwise."""

_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)")
_ETAG: Final = re.compile(r'(?:W/)?"[!#-~]*"')


def pays_on_one_host() -> bool:
    """Whether parts are worth it where client and server share the processors: on two, whole arrays were faster."""
    return len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0]) >= _MANY_PROCESSORS


def divisible(array: AnyArray) -> bool:
    """Whether its bytes in memory are those that are sent, so that a part is a slice of them."""
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    return bool(contiguous and array.dtype == array.dtype.newbyteorder("<"))


def flat(array: AnyArray) -> memoryview:
    """The bytes of an array that is `divisible`, in its order."""
    return array.reshape(-1, order="A").view(np.uint8).data


def spans(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """[start, end) in pieces of `size`."""
    return [(low, min(low + size, end)) for low in range(start, end, size)]


class Download:
    """One array as it is received: by one answer, by several for parts of it, and by what follows broken ones."""

    def __init__(self, out: AnyArray | None = None) -> None:
        """`out`: see `NpyReceiver`."""
        self.out = out
        self.etag: str | None = None
        self.total: int | None = None
        """Bytes of the whole .npy file, once an answer has said so."""
        self.receiver: NpyReceiver | None = None
        self.sha256: bytes | None = None
        """The SHA-256 of the file, if an answer has said it."""
        self._hash = hashlib.sha256()
        self._hashed = 0  # bytes of the file
        self._came: dict[int, int] = {}
        self._hashing = threading.Lock()

    def came(self, start: int, stop: int) -> None:
        """The file's bytes [start, stop) are there: they are hashed once all before them are, by whichever thread finds
        them so. From any thread; takes half a second to one for each GB.
        """
        self._came[start] = stop
        while self._hashed in self._came and self._hashing.acquire(blocking=False):
            try:
                self._hash_on()
            finally:
                self._hashing.release()

    def _hash_on(self) -> None:
        assert self.receiver is not None
        while (stop := self._came.pop(self._hashed, None)) is not None:
            if not self._hashed:
                self._hash.update(self.receiver.header)
            self._hash.update(self.receiver.stored(self._hashed, stop))
            self._hashed = stop

    def check(self) -> None:
        """Compares what `came` with the digest, once all of it has. Raises CorruptAnswer."""
        if self._hash.digest() != self.sha256:
            raise _errors.CorruptAnswer("the array's bytes changed on their way: they have another SHA-256")

    def result(self) -> AnyArray:
        """The array, once all of its spans are full. Raises TransportError if the header did not come."""
        if self.receiver is None:
            raise _errors.TransportError("the answer ended before the array began")
        return self.receiver.array()


class Span:
    """Receives bytes [start, stop) of a .npy file into the array's memory, over as many answers as it takes.

    `stop` None: to the file's end. The first bytes of the file must come before others are asked for.
    """

    def __init__(self, download: Download, start: int, stop: int | None) -> None:
        self.download = download
        self._start = start
        self._stop = stop
        self.position = start
        """Position up to which the bytes have come."""

    def headers(self) -> dict[str, str]:
        """Return the headers of a request for what is missing."""
        if self.position == 0 and self._stop is None:
            return {}
        last = "" if self._stop is None else str(self._stop - 1)
        condition = {} if self.download.etag is None else {"If-Range": self.download.etag}
        return {"Range": f"bytes={self.position}-{last}", **condition}

    def answer(self, headers: Mapping[str, str]) -> Span:
        """Takes the answer to that request. Raises ProtocolError when it is none."""
        download = self.download
        length = headers.get("content-length") or ""
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range") or "")
        if found is None:
            # The whole file: nobody on the way knows ranges, or none was asked for.
            first, stop = 0, int(length) if length.isdecimal() else None
            total = stop
        else:
            first, stop, total = int(found[1]), int(found[2]) + 1, int(found[3])
        if first != self.position and first == self._start == 0:
            self.position = 0
            download.total = download.receiver = None
        beyond = found is not None and self._stop is not None and stop is not None and stop > self._stop
        if first != self.position or beyond or download.total not in {None, total}:
            raise _errors.ProtocolError(
                f"bytes {first} to {stop} of {total} came, {self.position} to {self._stop} of {download.total} were "
                "asked for"
            )
        if download.receiver is None:
            download.receiver = NpyReceiver(total, download.out)
        if _ETAG.fullmatch(etag := headers.get("etag") or ""):  # what is none cannot be sent back
            download.etag = etag
        if self._start == 0:  # what becomes known later comes too late: it is hashed from the beginning
            download.sha256 = sha256_of(headers.get("repr-digest")) or download.sha256
        download.total = total
        self._stop = stop
        return self

    def feed(self, piece: bytes | memoryview) -> None:
        if self._stop is not None and self.position + len(piece) > self._stop:
            raise _errors.ProtocolError("the answer is longer than it says")
        assert self.download.receiver is not None
        self.download.receiver.put(self.position, piece)
        self.position += len(piece)

    def place(self) -> memoryview:
        """Return the memory where the next bytes belong; empty while that is not known."""
        assert self.download.receiver is not None
        return self.download.receiver.memory(self.position, self._stop)

    def landed(self, count: int) -> None:
        """Record that `count` more bytes are there."""
        self.position += count

    def finish(self) -> int:
        """Return the position where the span ends. Raises TransportError when the answer broke off."""
        if self._stop is not None and self.position < self._stop:
            raise _errors.TransportError(f"the answer ended after {self.position} of {self._stop} bytes")
        return self.position


class Stretch:
    """Receives bytes [start, stop) of an array's bare data into `memory`, over as many answers as it takes."""

    def __init__(self, memory: memoryview, start: int) -> None:
        self._memory = memory
        self._start = start
        self._at = start  # position of the byte that comes next
        self.position = start
        """Position up to which the bytes have come."""
        self.stop = start + len(memory)

    def headers(self) -> dict[str, str]:
        """Return the headers of a request for what is missing."""
        return {"Range": f"bytes={self.position}-{self.stop - 1}"}

    def answer(self, headers: Mapping[str, str]) -> Stretch:
        """Takes the answer to that request, the whole array too where no range was honoured. Raises ProtocolError when
        it is none.
        """
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range") or "")
        self._at = 0 if found is None else int(found[1])
        if found is not None and self._at != self.position:
            raise _errors.ProtocolError(
                f"bytes {found[1]} to {found[2]} came, those from {self.position} were asked for"
            )
        return self

    def feed(self, piece: bytes | memoryview) -> None:
        low, high = max(self._at, self.position), min(self._at + len(piece), self.stop)
        if low < high:
            self._memory[low - self._start : high - self._start] = piece[low - self._at : high - self._at]
            self.position = high
        self._at += len(piece)

    def place(self) -> memoryview:
        """Return the memory where the next bytes belong; empty while those that come belong nowhere."""
        return self._memory[self.position - self._start :] if self._at == self.position else self._memory[:0]

    def landed(self, count: int) -> None:
        """Record that `count` more bytes are there."""
        self.position += count
        self._at += count

    def finish(self) -> int:
        """Return the position where the stretch ends. Raises TransportError when the answer broke off."""
        if self.position < self.stop:
            raise _errors.TransportError(f"the answer ended after {self.position} of {self.stop} bytes")
        return self.position
