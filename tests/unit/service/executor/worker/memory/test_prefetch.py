"""Copies that nobody has asked for yet: only where there is room, only while nobody waits, and not of what is gone."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.executor.protocol import ArrayRef
from gemmserve_service.executor.worker.memory import prefetch as module
from gemmserve_service.executor.worker.memory.prefetch import ArrayPrefetch, Prefetches
from gemmserve_service.executor.worker.memory.residency import Residency

DATA = np.arange(100, dtype=np.uint8)


class Copies:
    def __init__(self, budget):
        self.resident = Residency(budget)
        self.pieces = []

    def begin(self, data):
        return np.zeros_like(data)

    def extend(self, copy, data, start, stop):
        copy[start:stop] = data[start:stop]
        self.pieces.append((start, stop))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 40)


@pytest.fixture
def copies():
    return Copies(250)


def coming(copies, name="a"):
    ref = ArrayRef(extent="e", path="", capacity=100, nbytes=100, dtype="uint8", shape=(100,), order="C", cache_id=name)
    return ArrayPrefetch(ref, lambda: DATA, copies)


def kept(copies, name):
    return copies.resident.get(name, 100, lambda: None)


def test_it_comes_in_pieces_and_goes_on_after_those_who_waited(copies):
    it = coming(copies)
    answers = iter([False, True, False, False])
    assert not it.go_on(lambda: next(answers))
    assert copies.pieces == [(0, 40)]
    assert not copies.resident.holds("a")
    assert it.go_on(lambda: next(answers))
    assert copies.pieces == [(0, 40), (40, 80), (80, 100)]
    np.testing.assert_array_equal(kept(copies, "a"), DATA)


def test_nothing_goes_for_it_and_nothing_comes_twice(copies):
    copies.resident.put("x", object(), 151)
    assert coming(copies).go_on(lambda: False)
    assert copies.resident.holds("x")
    copies.resident.forget("x")
    copies.resident.put("a", DATA, 100)
    assert coming(copies).go_on(lambda: False)
    assert copies.pieces == []


def test_what_is_gone_does_not_come(copies):
    it = coming(copies)

    def gone():
        it.unwanted = bool(copies.pieces)
        return False

    assert it.go_on(gone)
    assert copies.pieces == [(0, 40), (40, 80)] or copies.pieces == [(0, 40)]
    assert not copies.resident.holds("a")


def test_one_at_a_time_in_their_order(copies):
    prefetches = Prefetches()
    assert not prefetches
    first, second = coming(copies, "a"), coming(copies, "b")
    prefetches.add(first)
    prefetches.add(second)
    assert prefetches.take() is first
    assert prefetches.take() is None
    prefetches.stopped(first, finished=False)
    assert prefetches.take() is first
    prefetches.drop(["a", None])
    assert first.unwanted
    prefetches.stopped(first, finished=False)
    assert prefetches.take() is second
    prefetches.add(coming(copies, "c"))
    prefetches.clear()
    assert second.unwanted
    prefetches.stopped(second, finished=False)
    assert prefetches.take() is None
