"""Uploads: bytes land once, in order, and an array is published only when every one of them is there."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmserve_service.errors import BodyTooLong, BodyTooShort, DigestMismatch, StoreFull

CHUNKS = st.lists(st.integers(1, 700), min_size=1, max_size=20)


@given(cuts=CHUNKS, as_type=st.sampled_from([bytes, bytearray, memoryview]))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_pieces_of_any_size_land_in_place(store, fetch, cuts, as_type):
    array = np.random.default_rng(sum(cuts)).integers(0, 256, sum(cuts) * 4, np.uint8).view(np.float32)
    data = array.tobytes()
    upload = store.allocate(array.dtype, array.shape, "C", ttl_s=None)
    start = 0
    for cut in cuts:
        upload.write(as_type(data[start : start + 4 * cut]))
        start += 4 * cut
    info = await upload.commit()
    assert fetch(store, info.id).tobytes() == data


async def test_one_byte_too_many_is_refused_before_it_is_written(store, held):
    upload = store.allocate(np.dtype("f4"), (2,), "C", ttl_s=None)
    upload.write(b"12345678")
    with pytest.raises(BodyTooLong):
        upload.write(b"9")
    assert bytes(upload.view) == b"12345678"
    upload.abort()
    upload.abort()
    assert held(store) == (0, 0, 0)


@pytest.mark.parametrize("scratch", [False, True])
async def test_a_body_cut_short_gives_its_space_back(store, held, scratch):
    upload = store.allocate(np.dtype("f4"), (2,), "C", ttl_s=None, scratch=scratch)
    upload.write(b"1234567")
    with pytest.raises(BodyTooShort):
        await upload.commit()
    assert held(store) == (0, 0, 0)
    with pytest.raises(ValueError, match="closed"):
        upload.write(b"8")
    assert store.count == 0


async def test_the_digest_is_that_of_prefix_and_data(store, held):
    data, header = np.arange(1 << 20, dtype="f4").tobytes(), b"header"
    good = store.allocate(np.dtype("f4"), (1 << 20,), "C", ttl_s=None)
    good.write(data)
    await good.commit(hashlib.sha256(header + data).digest(), prefix=header)
    bad = store.allocate(np.dtype("f4"), (1 << 20,), "C", ttl_s=None)
    bad.write(data)
    with pytest.raises(DigestMismatch):
        await bad.commit(hashlib.sha256(data).digest(), prefix=header)
    assert held(store) == (0, 0, 0)
    assert store.count == 1


@pytest.mark.parametrize("dtype", ["f2", "f4", "c8", "c16", "i8"])
@pytest.mark.parametrize("count", [3, 40_000])
async def test_big_endian_data_are_turned_round_and_hashed_as_stored(store, fetch, dtype, count):
    array = (np.arange(count) * 1.25).astype(dtype)
    sent = array.astype(array.dtype.newbyteorder(">")).tobytes()
    upload = store.allocate(array.dtype, array.shape, "C", ttl_s=None, byteswap=True)
    upload.write(sent)
    info = await upload.commit(hashlib.sha256(sent).digest())
    np.testing.assert_array_equal(fetch(store, info.id), array)
    with store.pin(info.id) as pinned:
        assert await store.digests.of(pinned, npy=False) == hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0, 2)])
async def test_an_empty_array_needs_no_bytes(store, fetch, shape):
    info = await store.allocate(np.dtype("c8"), shape, "C", ttl_s=None).commit()
    assert (info.nbytes, info.shape) == (0, shape)
    assert fetch(store, info.id).shape == shape
    await store.delete(info.id)
    assert store.count == 0


async def test_a_row_that_cannot_be_written_leaves_nothing(store, database, held):
    upload = store.allocate(np.dtype("f4"), (4,), "C", ttl_s=None)
    upload.write(bytes(16))
    await database.write(lambda db: db.execute("ALTER TABLE arrays RENAME TO away"))
    with pytest.raises(sqlite3.OperationalError):
        await upload.commit()
    assert held(store) == (0, 0, 0)
    assert store.count == 0


async def test_a_caller_cancelled_while_the_row_is_written_leaves_nothing(store, database, held, eventually):
    upload = store.allocate(np.dtype("f4"), (4,), "C", ttl_s=None)
    upload.write(bytes(16))
    commit = asyncio.create_task(upload.commit())
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    await eventually(lambda: held(store) == (0, 0, 0))
    rows = await database.read(lambda db: db.execute("SELECT id FROM arrays").fetchall())
    assert rows == []


async def test_abort_stops_the_hash_and_frees_the_extent_for_the_next(store, held):
    upload = store.allocate(np.dtype("u1"), (32 << 20,), "C", ttl_s=None)
    upload.write(bytes(32 << 20))
    upload.abort()
    assert held(store) == (0, 0, 0)


async def test_reserving_costs_no_memory_and_too_much_is_refused(make_store, make_settings, held):
    store = await make_store(make_settings(max_array_bytes=1 << 20, max_store_bytes=1 << 20))
    store.allocate(np.dtype("u1"), (1 << 19,), "C", ttl_s=None)
    with pytest.raises(StoreFull):
        store.allocate(np.dtype("u1"), ((1 << 19) + 1,), "C", ttl_s=None)
    assert held(store) == (1 << 19, 0, 0)
