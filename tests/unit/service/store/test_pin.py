"""Holds on arrays: the .npy file that one is."""

from __future__ import annotations

import io

import numpy as np
import pytest


@pytest.mark.parametrize("order", ["C", "F"])
async def test_npy_parts_are_a_file(store, put, order):
    array = np.asarray(np.arange(12, dtype="c8").reshape(3, 4), order=order)
    info = await put(store, array)
    with store.pin(info.id) as pinned:
        header, view = pinned.npy_parts()
        assert header == pinned.npy_header
        assert np.array_equal(np.load(io.BytesIO(header + bytes(view))), array)


async def test_a_pin_that_is_released_holds_nothing(store, put):
    info = await put(store, np.ones(3, "f4"))
    pinned = store.pin(info.id)
    pinned.release()
    pinned.release()
    with pytest.raises(ValueError, match="released"):
        pinned.share()
