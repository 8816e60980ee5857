"""Digests of stored arrays: worked out when first asked for, once for all who ask, and on record after that."""

from __future__ import annotations

import asyncio
import hashlib
import threading

import numpy as np
import pytest

from gemmserve_service.errors import NotFound
from gemmserve_service.store import digests
from gemmserve_service.store.record import npy_header

ARRAY = np.arange(3_000_000, dtype="f4")
HEADER = npy_header("float32", ARRAY.shape, "C")
SHA256 = hashlib.sha256(ARRAY.tobytes()).hexdigest()


async def find(store, info, *, npy=False):
    with store.pin(info.id) as pinned:
        return await store.digests.of(pinned, npy=npy)


@pytest.fixture
def passes(monkeypatch):
    """Passes over an array's bytes: how many began, and a gate that holds them up."""
    gate = threading.Event()
    gate.began = 0
    run = digests._hash

    def held(*args):
        gate.began += 1
        gate.wait(60)
        return run(*args)

    monkeypatch.setattr(digests, "_hash", held)
    yield gate
    gate.set()


async def test_it_is_null_until_asked_for_and_on_record_then(store, database, put):
    info = await put(store, ARRAY)
    assert (await store.info(info.id)).sha256 is None
    assert await find(store, info) == SHA256
    assert await find(store, info, npy=True) == hashlib.sha256(HEADER + ARRAY.tobytes()).hexdigest()
    assert (await store.info(info.id)).sha256 == SHA256
    await database.write(lambda _: None)
    row = await database.read(lambda db: db.execute("SELECT sha256, npy_sha256 FROM arrays").fetchone())
    assert tuple(row) == (SHA256, store.digests.known(info.id, npy=True))


async def test_those_who_ask_meanwhile_share_one_pass(store, put, passes):
    info = await put(store, ARRAY)
    asking = [asyncio.ensure_future(find(store, info, npy=number % 2 > 0)) for number in range(6)]
    await asyncio.sleep(0)
    asking.pop(0).cancel()  # the others' goes on
    passes.set()
    assert set((await asyncio.gather(*asking))[1::2]) == {SHA256}
    assert passes.began == 1


async def test_the_last_asker_s_end_is_that_of_the_pass(store, put, passes, eventually):
    info = await put(store, ARRAY)
    asking = asyncio.ensure_future(find(store, info))
    await eventually(lambda: passes.began)
    asking.cancel()
    await asyncio.wait([asking])
    await store.delete(info.id)
    passes.set()
    await eventually(lambda: store.recycled_bytes > 0)
    assert not store.digests._running


async def test_a_deletion_ends_it(store, put, passes, eventually):
    info = await put(store, ARRAY)
    asking = [asyncio.ensure_future(find(store, info)) for _ in range(2)]
    await eventually(lambda: passes.began)
    await store.delete(info.id)
    for each in asking:
        with pytest.raises(NotFound):
            await each
    passes.set()
    await eventually(lambda: store.used_bytes == 0)


async def test_what_was_checked_while_it_came_is_known(store):
    for prefix in (b"", HEADER):
        upload = store.allocate(ARRAY.dtype, ARRAY.shape, "C", ttl_s=None)
        upload.write(ARRAY.tobytes())
        expected = hashlib.sha256(prefix + ARRAY.tobytes())
        info = await upload.commit(expected.digest(), prefix=prefix)
        assert store.digests.known(info.id, npy=bool(prefix)) == expected.hexdigest()
        assert store.digests.known(info.id, npy=not prefix) is None


async def test_an_empty_array_s(store, put):
    info = await put(store, np.empty((0, 3)))
    assert await find(store, info) == hashlib.sha256().hexdigest()
