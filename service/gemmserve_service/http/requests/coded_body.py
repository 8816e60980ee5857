"""Bodies that come as zstd, gzip or deflate, decoded as a stream into the place of the array: a piece at a time, off
the event loop.

What a frame claims is never believed: a piece of output has a size that is set here, and the first byte past the array
ends it. Frames may follow one another, empty and skippable ones among them; of gzip they are called members.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import BodyTooLong, BodyTooShort, DigestMismatch, MalformedCoding, QuotaExceeded
from gemmserve_service.http.headers.content_coding import DEFLATE, GZIP, WINDOW_LOG, ZSTD, pool, zstd
from gemmserve_service.http.requests.body import RequestBody

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request

    from gemmserve_service.store.extents.extents import Place

_INPUT: Final = 1 << 17  # coded bytes of one step
_FIRST: Final = 1 << 13  # of a frame's first: what follows a short frame is copied
_OUTPUT: Final = 1 << 20  # decoded bytes of one step
_INLINE: Final = 1 << 16  # decoded bytes that come faster than a thread is woken; of one step as well
_MAX_FRAMES: Final = 10_000  # each costs some 10 microseconds, however little is in it
_MAX_BODIES: Final = 64  # at one time: each may keep a window of 8 MiB
_MAX_OF_ONE: Final = 16  # of them, of one key's owner
_SLACK: Final = 1 << 16  # bytes of headers, empty blocks and what else carries nothing

_open: Final[Counter[str]] = Counter()
"""Bodies that are being decoded, by owner."""


class CodedBody(RequestBody):
    """A `RequestBody` whose methods speak of the decoded bytes. To be used inside `decoding`.

    They raise MalformedCoding for what is not of that coding, or breaks off. `digest`: the SHA-256 that the coded bytes
    are to have (Content-Digest is that of what was sent).
    """

    def __init__(self, request: Request, digest: bytes | None, coding: str) -> None:
        super().__init__(request)
        self._coding = _CODINGS[coding]
        self._expected = digest
        self._hash = None if digest is None else hashlib.sha256()
        self._coded = memoryview(b"")
        self._position = 0
        self._hashed = True
        self._decoder: Any = None
        self._frames = 0

    async def piece(self) -> bytes:
        """The next decoded bytes; empty at the end."""
        target = memoryview(bytearray(_INLINE))
        return bytes(target[: await self._decode(target)])

    async def fill(self, view: memoryview, advance: Callable[[int], None], place: Place | None = None) -> bool:  # noqa: ARG002
        """Decodes into `view`; returns as for a plain body."""
        position = 0
        while position < len(view):
            count = await self._decode(view[position : position + _OUTPUT])
            if not count:
                return False
            position += count
            advance(count)
        return True

    async def finish(self) -> None:
        """Reads to the end, where no more bytes may be. Raises BodyTooLong, DigestMismatch."""
        if await self._decode(memoryview(bytearray(1))):
            raise BodyTooLong("the decoded body goes on after the bytes that its shape and dtype need")
        if self._hash is not None and self._hash.digest() != self._expected:
            raise DigestMismatch("Content-Digest names another SHA-256 than the coded body has")

    async def _decode(self, target: memoryview) -> int:
        """Decodes on until some bytes lie at the start of `target`; 0 at the body's end."""
        while True:
            if self._starved:
                self._coded, self._position, self._hashed = memoryview(await super().piece()), 0, False
                if not self._coded:
                    if self._decoder is not None:
                        raise MalformedCoding(f"the body ends within a {self._coding.name} frame")
                    return 0
            if len(target) <= _INLINE and self._frames <= 1:
                count = self._step(target)
            else:
                count = await asyncio.get_running_loop().run_in_executor(pool(), self._steps, target)
            if count:
                return count

    @property
    def _wanting(self) -> bool:
        """Whether it takes input; else there is output left of what it had."""
        return self._decoder is None or bool(self._decoder.needs_input)

    @property
    def _starved(self) -> bool:
        """Whether it goes on with the next piece of the body only."""
        return self._wanting and self._position == len(self._coded)

    def _steps(self, target: memoryview) -> int:
        """Runs steps until one has output, or no input is left: frames may hold nothing."""
        while not self._starved:
            if count := self._step(target):
                return count
        return 0

    def _step(self, target: memoryview) -> int:
        if self._hash is not None and not self._hashed:
            self._hash.update(self._coded)
        self._hashed = True
        size = (_INPUT if self._decoder is not None else _FIRST) if self._wanting else 0
        if self._decoder is None:
            self._frames += 1
            if self._frames > _MAX_FRAMES:
                raise MalformedCoding(f"the body has more than {_MAX_FRAMES} {self._coding.name} frames")
            self._decoder = self._coding.decoder()
        chunk = self._coded[self._position : self._position + size]
        self._position += len(chunk)
        try:
            found = self._decoder.decompress(chunk, max_length=len(target))
        except self._coding.error() as error:
            raise MalformedCoding(f"the body is no {self._coding.name} that is read here: {error}") from error
        target[: len(found)] = found
        if self._decoder.eof:
            self._position -= len(self._decoder.unused_data)  # the next frame
            self._decoder = None
        return len(found)


@contextlib.contextmanager
def decoding(request: Request, digest: bytes | None, owner: str, coding: str) -> Iterator[CodedBody]:
    """The decoded body of a request of `owner`. Raises QuotaExceeded when too many are being decoded."""
    of_one = _MAX_OF_ONE if owner else _MAX_BODIES  # without keys everybody is one
    for limit, used in ((of_one, _open[owner]), (_MAX_BODIES, _open.total())):
        if used >= limit:
            raise QuotaExceeded(
                f"{used} bodies are being decoded; send it as it is, or later",
                retry_after_s=1.0,
                quota="coded_bodies",
                limit=limit,
                used=used,
            )
    _open[owner] += 1
    try:
        yield CodedBody(request, digest, coding)
    finally:
        _open[owner] -= 1
        if not _open[owner]:
            del _open[owner]


def check_coded_length(nbytes: int, length: int, coding: str) -> None:
    """Whether `length` coded bytes can be those of `nbytes`, before any space is taken.

    Raises BodyTooShort, BodyTooLong.
    """
    if nbytes > (length << _CODINGS[coding].expansion) + _SLACK:
        raise BodyTooShort(f"no {length} bytes of {coding} become the {nbytes} that are declared")
    if length > nbytes + (nbytes >> 7) + _SLACK:
        raise BodyTooLong(f"{length} bytes of {coding} are more than the {nbytes} that are declared can need")


class _Inflater:
    """zlib's decoder with the methods and attributes of zstd's and of the standard library's other ones."""

    def __init__(self, wbits: int) -> None:
        self._inflate = zlib.decompressobj(wbits)
        self.needs_input = True
        self.eof = False
        self.unused_data = b""

    def decompress(self, data: memoryview, max_length: int) -> bytes:
        """The next decoded bytes, `max_length` at most. Raises zlib.error."""
        found = self._inflate.decompress(self._inflate.unconsumed_tail + bytes(data), max_length)
        self.eof, self.unused_data = self._inflate.eof, self._inflate.unused_data
        # A full piece may have more behind it, though all input is taken.
        self.needs_input = len(found) < max_length
        return found


def _zstd_decoder() -> Any:
    module = zstd()
    return module.ZstdDecompressor(options={module.DecompressionParameter.window_log_max: WINDOW_LOG})


@dataclass(frozen=True)
class _Coding:
    """One coding: its decoder of one frame, what that raises, and log2 of the most bytes that a byte can become."""

    name: str
    decoder: Callable[[], Any]
    error: Callable[[], type[Exception]]
    expansion: int


_CODINGS: Final = {
    coding.name: coding
    for coding in (
        # A block of 4 bytes holds 128 KiB at most.
        _Coding(ZSTD, _zstd_decoder, lambda: zstd().ZstdError, 15),
        # 2 bits say 258 bytes again (RFC 1951): 1032 times at most.
        _Coding(GZIP, lambda: _Inflater(31), lambda: zlib.error, 11),
        _Coding(DEFLATE, lambda: _Inflater(15), lambda: zlib.error, 11),
    )
}
