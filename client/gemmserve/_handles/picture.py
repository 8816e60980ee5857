"""Pictures of magnitudes: a matrix as a small PNG, without a library for images."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from gemmserve._transfer.arrays import AnyArray

_ANCHORS: Final = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Colours of the magnitudes from 0 to the largest: viridis at every quarter (S. van der Walt and N. Smith, 2015)."""
_NAN: Final = (214, 39, 40)


def magnitudes(sample: AnyArray) -> bytes:
    """Return |x| of a matrix as a PNG, one pixel an element: dark where it is 0, bright where it is largest; infinities
    are as bright as the largest, NaN is red. `sample`: two-dimensional, with at least one element, of any real or
    complex dtype.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.abs(sample.astype(np.complex128 if sample.dtype.kind == "c" else np.float64))
        finite = np.isfinite(size)
        largest = size[finite].max(initial=0.0)
        scaled = size / largest if largest else np.where(finite, 0.0, 1.0)
        levels = np.where(np.isnan(size), 255, 254 * np.clip(np.nan_to_num(scaled, nan=0.0), 0.0, 1.0))
    return _png(levels.astype(np.uint8))


def _png(levels: AnyArray) -> bytes:
    """An image of palette colours (W3C, Portable Network Graphics, third edition: colour type 3)."""
    rows, columns = levels.shape
    filtered = np.zeros((rows, columns + 1), np.uint8)  # each row begins with its filter: none
    filtered[:, 1:] = levels
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", _palette()),
        (b"IDAT", zlib.compress(filtered.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _palette() -> bytes:
    positions = np.linspace(0, len(_ANCHORS) - 1, 255)
    channels = [np.interp(positions, range(len(_ANCHORS)), channel) for channel in zip(*_ANCHORS, strict=True)]
    return np.stack(channels, axis=1).astype(np.uint8).tobytes() + bytes(_NAN)
