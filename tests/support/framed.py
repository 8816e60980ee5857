"""Results on the device between bytes that nobody may touch."""

from __future__ import annotations

import numpy as np

_PATTERN = 0xA5


class Framed:
    """A CuPy array of `shape` that begins `shift` elements past an aligned address, its rows (columns in order "F")
    `gap` elements longer than what is used; all around and in between is a pattern."""

    def __init__(self, shape, dtype, *, shift=1, gap=3, order="C"):
        import cupy

        dtype = np.dtype(dtype)
        *lead, rows, columns = shape
        line, lines = (columns, rows) if order == "C" else (rows, columns)
        pitch = line + gap
        matrix = pitch * lines + gap
        steps = (pitch, 1) if order == "C" else (1, pitch)
        outer = [matrix * int(np.prod(lead[axis + 1 :], dtype=int)) for axis in range(len(lead))]
        self.strides = tuple(step * dtype.itemsize for step in (*outer, *steps))
        self.shape, self.dtype, self.first = tuple(shape), dtype, shift * dtype.itemsize
        count = matrix * int(np.prod(lead, dtype=int)) + shift + 64
        self.memory = cupy.full(count * dtype.itemsize, _PATTERN, cupy.uint8)
        self.array = cupy.ndarray(self.shape, dtype, self.memory.data + self.first, self.strides)

    def fill(self, values):
        """Puts values into the elements."""
        import cupy

        self.array[...] = cupy.asarray(values)
        return self

    def get(self):
        """The elements on the host, after a look at what is around them."""
        host = self.memory.get()
        view = np.ndarray(self.shape, self.dtype, host.data, self.first, self.strides)
        found = view.copy()
        view[...] = np.frombuffer(bytes([_PATTERN]) * self.dtype.itemsize, self.dtype)[0]
        assert (host == _PATTERN).all(), "something was written beside the result"
        return found
