"""When a device prepares what it keeps of an array."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.cuda import copies as device_copies
from gemmserve_service.schemas import GemmParams

A = np.ones((4, 4), "c8")
STREAM = SimpleNamespace(synchronize=lambda: None)
CUPY = SimpleNamespace(
    cuda=SimpleNamespace(get_current_stream=lambda: STREAM, runtime=SimpleNamespace(is_hip=True)),
)


@pytest.fixture
def prepared(monkeypatch):
    """What was prepared, by side."""
    sides = []

    def prepare(array, side, **options):
        sides.append(side)
        return SimpleNamespace(nbytes=array.nbytes, side=side)

    monkeypatch.setattr(device_copies, "prepare", prepare)
    monkeypatch.setattr(device_copies, "_takes_prepared", lambda *_: True)
    return sides


def multiply(copies, **names):
    """A product; which of its operands were prepared ones."""
    operands = {side: HostArray(A, names.get(side)) for side in ("a", "b")}
    there = {side: copies.resident.get(operand.cache_id, A.nbytes, lambda: A) for side, operand in operands.items()}
    found = copies.prepared(GemmParams(), operands, there)
    return [side for side, operand in found.items() if operand is not there[side]]


def test_what_comes_again_is_prepared_once(prepared):
    copies = device_copies.DeviceCopies(CUPY, 0, None, 100 * A.nbytes)
    assert [multiply(copies, a="x") for _ in range(4)] == [[], ["a"], ["a"], ["a"]]
    assert prepared == ["a"]
    assert multiply(copies) == []


def test_nothing_is_prepared_that_could_not_be_kept(prepared):
    copies = device_copies.DeviceCopies(CUPY, 0, None, 2 * A.nbytes - 1)
    assert [multiply(copies, a="x") for _ in range(4)] == [[]] * 4
    assert prepared == []


@pytest.mark.parametrize("cuts", [[(0, 128)], [(0, 100), (100, 28)]], ids=["in one piece", "in two"])
def test_small_arrays_go_in_the_streams_order(cuts):
    """Across parts of the arena that were registered by two calls a copy may be refused."""
    enqueued = []
    runtime = SimpleNamespace(
        is_hip=True, memcpyHostToDevice=1, memcpyDeviceToHost=2, memcpyAsync=lambda *call: enqueued.append(call)
    )
    stream = SimpleNamespace(ptr=7)  # nobody waits for it
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream, runtime=runtime))
    array, memory = SimpleNamespace(data=SimpleNamespace(ptr=1000)), np.zeros(128, np.uint8)
    arena = SimpleNamespace(cut=lambda address, nbytes: cuts if (address, nbytes) == (host, 128) else [])
    host = memory.ctypes.data
    copies = device_copies.DeviceCopies(cupy, 0, None, 1000, arena)
    copies.start_load(array, memory)
    copies.start_store(array, memory)
    assert enqueued == [
        *((1000 + start, host + start, count, 1, 7) for start, count in cuts),
        *((host + start, 1000 + start, count, 2, 7) for start, count in cuts),
    ]
    enqueued.clear()
    device_copies.DeviceCopies(cupy, 0, None, 1000).start_store(array, memory)
    assert enqueued == [(host, 1000, 128, 2, 7)]
