"""Digests that nobody waits for: they give way to bodies, and deleted arrays are not hashed."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_service.store.hashing import idle_hashing
from gemmserve_service.store.hashing.idle_hashing import LazyHashes
from gemmserve_service.store.hashing.running_hash import RunningHash, hash_pool

MIB = 1 << 20
SLICE = 4 * MIB


class Traffic(LazyHashes):
    """With bodies that come in as fast as the test says."""

    fast = False

    @property
    def busy(self):
        return self.fast


@pytest.fixture
def pool():
    with hash_pool() as threads:
        yield threads


@pytest.fixture
async def hashes():
    found = {}
    lazy = Traffic(lambda name, running: found.update({name: running.data_digest().hex()}))
    lazy.found = found
    yield lazy
    await lazy.stop()


def full(pool, data):
    running = RunningHash(pool, memoryview(data))
    running.reach(len(data))
    return running


async def test_each_digest_is_found_in_its_turn(hashes, pool, eventually):
    arrays = {name: bytes([number]) * (number * MIB) for number, name in enumerate("abc", 1)}
    for name, data in arrays.items():
        hashes.add(name, full(pool, data))
    await eventually(lambda: len(hashes.found) == 3)
    assert hashes.found == {name: hashlib.sha256(data).hexdigest() for name, data in arrays.items()}
    assert list(hashes.found) == ["a", "b", "c"]


async def test_one_slice_a_time_while_bodies_come_in(pool):
    data = bytes(3 * SLICE)
    running = full(pool, data)
    await running.work(lambda: True)
    assert running._done == SLICE
    await running.work(lambda: False)
    assert running.over
    assert running.data_digest() == hashlib.sha256(data).digest()


async def test_bodies_that_never_cease_do_not_starve_it(hashes, pool, eventually):
    hashes.fast = True
    hashes.add("a", full(pool, bytes(SLICE + 1)))
    await eventually(lambda: "a" in hashes.found)


async def test_small_arrays_do_not_pile_up_meanwhile(hashes, pool, eventually):
    """A slice of them between two pauses, not one."""
    hashes.fast = True
    for number in range(200):
        hashes.add(str(number), full(pool, bytes(100)))
    await eventually(lambda: len(hashes.found) == 200)


async def test_what_is_deleted_before_its_turn_is_let_go_of_at_once(hashes, pool):
    hashes.fast = True
    data = bytearray(SLICE)
    hashes.add("a", full(pool, data))
    hashes.drop("a")
    data.clear()  # BufferError while anybody has a view of it
    hashes.drop("a")
    hashes.drop("unknown")


async def test_after_a_time_without_work_it_goes_on(hashes, pool, eventually):
    for name in ("a", "b"):
        hashes.add(name, full(pool, b"x" * MIB))
        await eventually(lambda name=name: name in hashes.found)


async def test_what_a_digest_was_checked_for_is_not_waited_for(hashes, pool):
    running = full(pool, b"x" * MIB)
    await running.finish()
    hashes.fast = True
    hashes.add("a", running)
    assert hashes.found == {"a": hashlib.sha256(b"x" * MIB).hexdigest()}


def test_only_what_comes_fast_counts_as_traffic(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(idle_hashing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lazy = LazyHashes({}.__setitem__)
    lazy.moved(MIB)
    assert not lazy.busy
    lazy.moved(SLICE)
    assert lazy.busy
    now[0] += 1
    assert not lazy.busy


async def test_the_extent_of_a_deleted_array_serves_the_next_one(store, put, eventually, monkeypatch):
    """Though its digest was never found: otherwise every other upload would meet pages that nobody has touched."""
    monkeypatch.setattr("gemmserve_service.store.hashing.idle_hashing._LONGEST_WAIT_S", 3600.0)
    monkeypatch.setattr("gemmserve_service.store.hashing.idle_hashing._LULL_S", 3600.0)
    data = np.zeros(8 * MIB, np.uint8).view(np.float32)
    first = await put(store, data)
    name = store._catalog.get(first.id).extent.name
    assert store.hashes.busy  # the upload itself
    await store.delete(first.id)
    await eventually(lambda: store.recycled_bytes > 0)
    second = await put(store, data)
    assert store._catalog.get(second.id).extent.name == name
