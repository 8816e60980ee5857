"""PNG files with a palette, as the client's pictures are, read back."""

from __future__ import annotations

import struct
import zlib

import numpy as np


def levels(png: bytes) -> np.ndarray:
    """The pixels of a PNG file with a palette, each chunk checked."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length) == (zlib.crc32(kind + data),)
        chunks[kind] = data
        at += 12 + length
    columns, rows, depth, colour, *others = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colour, others) == (8, 3, [0, 0, 0])
    assert len(chunks[b"PLTE"]) == 3 * 256
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(rows, columns + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]
