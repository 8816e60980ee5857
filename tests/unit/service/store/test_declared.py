"""What a .npy header declares, however it comes."""

from __future__ import annotations

import io

import numpy as np
import pytest

from gemmserve.wire import NpyError
from gemmserve_service.store.declared import read_npy_head

ARRAY = np.asfortranarray(np.arange(6, dtype=">c8").reshape(2, 3))


class Pieces:
    """A body that comes in pieces of `size` bytes."""

    def __init__(self, data, size):
        self._pieces = [data[start : start + size] for start in range(0, len(data), size)]

    async def piece(self):
        return self._pieces.pop(0) if self._pieces else b""


@pytest.fixture
def data():
    file = io.BytesIO()
    np.save(file, ARRAY)
    return file.getvalue()


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
async def test_in_pieces_of_any_size(data, size):
    declared, first = await read_npy_head(Pieces(data, size))
    assert (declared.dtype, declared.shape, declared.order, declared.nbytes) == (ARRAY.dtype, (2, 3), "F", ARRAY.nbytes)
    assert declared.byteswap
    assert data.startswith(declared.header + first)
    assert len(declared.header) == len(data) - ARRAY.nbytes


async def test_a_body_that_ends_within_the_header(data):
    with pytest.raises(NpyError, match="ends after 20 bytes"):
        await read_npy_head(Pieces(data[:20], 7))
