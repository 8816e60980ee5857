"""What tests of uploads in parts send."""

from __future__ import annotations

import base64
import hashlib

import numpy as np

A = (np.arange(60 * 1000) % 251).astype("c8").reshape(60, 1000)
LARGE = (np.arange(1 << 19) % 997).astype("c8").reshape(512, 1024)
"""4 MiB."""
BARE = {"Content-Type": "application/octet-stream"}
NPY = {"Content-Type": "application/x-npy"}


def digest(data):
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def raw(array):
    return array.tobytes(order="A")


class Body:
    """A request's body that is there at once."""

    def __init__(self, data):
        self._data = memoryview(data)

    async def piece(self):
        piece, self._data = self._data, self._data[:0]
        return piece

    def unread(self, piece):
        self._data = memoryview(piece)

    async def fill(self, view, advance, place=None):
        view[:] = self._data[: len(view)]
        advance(len(view))
        return True
