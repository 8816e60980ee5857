"""Answers that go out as zstd, gzip or deflate, coded as they are sent, a piece at a time, off the event loop.

At level 1: zstd codes at some hundred MiB/s what it shortens, and what it does not shorten goes as it is.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.http.answers.pieces import Pieces
from gemmserve_service.http.headers.content_coding import DEFLATE, GZIP, ZSTD, pool, zstd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from gemmserve_service.http.answers.pieces import Buffer

_LEVEL: Final = 1
_SAMPLES: Final = 3
_SAMPLE: Final = 1 << 17  # bytes
_WORTH: Final = 7 / 8  # of the bytes; of random mantissas zstd saves a thirteenth, for five times the time
_MIN_BYTES: Final = 1 << 10  # bytes that it is done for
_WINDOW_BITS: Final = {GZIP: 31, DEFLATE: 15}  # zlib's numbers of the formats, windows of 32 KiB


async def worth_coding(data: memoryview, coding: str = ZSTD) -> bool:
    """Whether an array's bytes get an eighth shorter, by three samples of them: always the same for one array."""
    if len(data) < _MIN_BYTES:
        return False
    return await asyncio.get_running_loop().run_in_executor(pool(), _shorter, data, coding)


async def coded(parts: Sequence[Buffer], coding: str = ZSTD) -> AsyncIterator[bytes]:
    """The concatenated parts as one frame, with a checksum."""
    compressor = _compressor(coding)
    loop = asyncio.get_running_loop()
    for piece in Pieces(parts, range(sum(map(len, parts)))):
        if found := await loop.run_in_executor(pool(), compressor.compress, piece):
            yield found
    yield await loop.run_in_executor(pool(), compressor.flush)


def _compressor(coding: str) -> Any:
    if coding != ZSTD:
        return zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[coding])
    module = zstd()
    parameter = module.CompressionParameter
    return module.ZstdCompressor(options={parameter.compression_level: _LEVEL, parameter.checksum_flag: 1})


def _compressed(data: memoryview, coding: str) -> int:
    compressor = _compressor(coding)
    return len(compressor.compress(data)) + len(compressor.flush())


def _shorter(data: memoryview, coding: str) -> bool:
    step = max((len(data) - _SAMPLE) // (_SAMPLES - 1), 1)
    starts = range(0, max(len(data) - _SAMPLE, 0) + 1, step)
    samples = [data[start : start + _SAMPLE] for start in starts]
    return sum(_compressed(sample, coding) for sample in samples) <= _WORTH * sum(map(len, samples))
