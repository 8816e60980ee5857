"""Pieces, .npz on the fly, and the release of what was pinned."""

from __future__ import annotations

import asyncio
import io
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve.wire import PIECE
from gemmserve_service.http.answers.pieces import Pieces, PiecesResponse, npz_pieces
from gemmserve_service.store.record import npy_header


def pinned(array):
    order = "C" if array.flags.c_contiguous else "F"
    info = SimpleNamespace(dtype=array.dtype.name, shape=array.shape, order=order)
    view = memoryview(array.ravel(order=order)).cast("B")
    header = npy_header(info.dtype, info.shape, info.order)
    return SimpleNamespace(info=info, view=view, npy_header=header, npy_parts=lambda: (header, view))


@given(st.lists(st.binary(max_size=50), max_size=4), st.integers(0, 200), st.integers(0, 200))
def test_pieces_are_the_slice(parts, start, stop):
    whole = b"".join(parts)
    span = range(min(start, len(whole)), max(min(start, len(whole)), min(stop, len(whole))))
    assert b"".join(Pieces([memoryview(part) for part in parts], span)) == whole[span.start : span.stop]


def test_pieces_are_bounded_and_where_they_lie():
    data = bytearray(3 * PIECE + 5)
    sent = list(Pieces([b"head", memoryview(data)], range(4 + len(data))))
    assert max(map(len, sent)) == PIECE
    assert [np.frombuffer(piece, "u1").ctypes.data for piece in sent[1:]] == [
        np.frombuffer(data, "u1").ctypes.data + start for start in range(0, len(data), PIECE)
    ]


def test_npz_is_numpys():
    arrays = {"sum": np.arange(5.0), "c": np.ones((300, 600), "c8"), "empty": np.zeros((0, 3), "f4")}
    data = b"".join(npz_pieces({name: pinned(array).npy_parts() for name, array in arrays.items()}))
    loaded = np.load(io.BytesIO(data))
    assert list(loaded) == list(arrays)
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_STORED}
    assert archive.testzip() is None


def test_npz_past_four_gigabytes_says_so(monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    array = np.arange(1000.0)
    loaded = np.load(io.BytesIO(b"".join(npz_pieces({"x": pinned(array).npy_parts()}))))
    assert np.array_equal(loaded["x"], array)


async def _respond(send, receive, released, count=5):
    content = (b"x" * 10 for _ in range(count))
    response = PiecesResponse(content, length=10 * count, media_type="a/b", release=lambda: released.append(True))
    await response({"type": "http", "method": "GET"}, receive, send)


async def _never():
    await asyncio.Event().wait()


async def test_release_follows_the_last_piece():
    released, sent = [], []

    async def send(message):
        assert not released
        sent.append(message)

    await _respond(send, _never, released)
    assert released == [True]
    assert b"".join(message.get("body", b"") for message in sent) == b"x" * 50
    assert sent[-1]["more_body"] is False


async def test_a_client_that_hangs_up_stops_it():
    released, sent = [], []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await _respond(send, receive, released, count=1000)
    assert released == [True]
    assert len(sent) < 10


async def test_release_survives_a_broken_transport():
    released = []

    async def send(message):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await _respond(send, _never, released)
    assert released == [True]
