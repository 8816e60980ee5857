"""When a device prepares what it keeps of an array."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels.device.spec import KNOWN
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
    monkeypatch.setattr(device_copies, "_prepared_by", lambda *_: "3xfp16")
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


def test_operands_are_prepared_as_their_product_takes_them(monkeypatch):
    """A large array once for other large ones, as residues, and once for small ones, as planes; residues take twice as
    much memory.
    """
    made, n = [], 4096

    def prepare(array, side, **options):
        made.append((side, options["compute"]))
        return SimpleNamespace(nbytes=array.nbytes)

    monkeypatch.setattr(device_copies, "prepare", prepare)
    large, small = np.broadcast_to(np.complex64(), (n, n)), np.broadcast_to(np.complex64(), (n, 256))
    copies = device_copies.DeviceCopies(CUPY, 0, KNOWN["H200"], 100 * large.nbytes)
    for other in (large, small, large, small):
        operands = {"a": HostArray(large, "x"), "b": HostArray(other)}
        for _ in range(2):
            there = {
                name: copies.resident.get(x.cache_id, x.data.nbytes, lambda x=x: x.data) for name, x in operands.items()
            }
            copies.prepared(GemmParams(), operands, there)
    assert made == [("a", "ozaki"), ("a", "3xfp16")]
    assert copies.keeps_form(33 * large.nbytes, "ozaki")
    assert not copies.keeps_form(34 * large.nbytes, "ozaki")
    assert copies.keeps_form(50 * large.nbytes, "3xfp16")


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
    enqueued.clear()
    copies.start_store(array, memory, 5000)
    assert enqueued == [(host + start, 6000 + start, count, 2, 7) for start, count in cuts]


SEGMENT = 1 << 12
"""Bytes of the arena that are registered by one call: no multiple of a row."""


class Runtime:
    """Driver that copies on the host, and knows what may be copied at once."""

    is_hip = True
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2  # noqa: N815

    def __init__(self, arena):
        self.arena = arena
        self.copies = []

    def memcpyAsync(self, target, source, nbytes, kind, stream):  # noqa: N802
        self._check(source if kind == 1 else target, nbytes)
        self.copies.append(nbytes)
        ctypes.memmove(target, source, nbytes)

    def memcpy2DAsync(self, target, target_pitch, source, source_pitch, width, height, kind, stream):  # noqa: N802
        host, pitch = (source, source_pitch) if kind == 1 else (target, target_pitch)
        self._check(host, (height - 1) * pitch + width)
        self.copies.append((width, height))
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def _check(self, host, nbytes):
        start = host - self.arena.memory.ctypes.data
        assert 0 <= start < self.arena.registered_bytes
        assert start // SEGMENT == (start + nbytes - 1) // SEGMENT, "across two parts"


@pytest.fixture
def device():
    """Copies with an arena of which all but the end is registered, and the driver below."""
    memory = np.zeros(64 * SEGMENT, np.uint8)
    start = memory.ctypes.data

    def cut(address, nbytes):
        position = 0
        while position < nbytes:
            count = min(SEGMENT - (address - start + position) % SEGMENT, nbytes - position)
            yield position, count
            position += count

    arena = SimpleNamespace(memory=memory, registered_bytes=60 * SEGMENT, cut=cut)
    arena.registered = lambda part: (
        part.ctypes.data - start >= 0 and (part.ctypes.data - start + part.size <= arena.registered_bytes)
    )
    arena.runtime = Runtime(arena)
    cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=7, synchronize=lambda: None), runtime=arena.runtime
    )
    copies = device_copies.DeviceCopies(SimpleNamespace(cuda=cuda), 0, None, 1000, arena)
    copies._staging = SimpleNamespace(
        to_device=lambda *_: arena.runtime.copies.append("ring"),
        to_host=lambda *_: arena.runtime.copies.append("ring"),
        lines_to_device=lambda *_: arena.runtime.copies.append("ring"),
        lines_to_host=lambda *_: arena.runtime.copies.append("ring"),
    )
    return copies, arena


class OnDevice:
    """Array of the device."""

    def __init__(self, shape, order="C"):
        self.array = np.zeros(shape, "f4", order)
        self.data = SimpleNamespace(ptr=self.array.ctypes.data)
        self.dtype, self.flags, self.strides = self.array.dtype, self.array.flags, self.array.strides


def in_arena(arena, shape, start):
    """An array there, of numbers that all differ."""
    count = shape[0] * shape[1]
    part = arena.memory[start : start + 4 * count].view("f4")
    part[:] = np.arange(count)
    return part.reshape(shape)


@pytest.mark.parametrize("order", ["C", "F"])
def test_operands_in_the_arena_go_straight(device, monkeypatch, order) -> None:
    """As results of earlier products do: whole, and windows of their rows, by parts that were registered at once."""
    monkeypatch.setattr(device_copies, "_DIRECT", 1)
    monkeypatch.setattr(device_copies, "_LINE", 100)
    copies, arena = device
    matrix = in_arena(arena, (230, 250), 388)
    for lines in (matrix, matrix[:, 30:200], matrix[60:120], matrix[7:110, 100:140], matrix[100:102, 5:200]):
        window = lines if order == "C" else lines.T
        array = OnDevice(window.shape, order)
        copies._upload(array, window)
        assert (array.array == window).all()
        assert "ring" not in arena.runtime.copies
        arena.runtime.copies.clear()
        array.array[...] *= -1
        copies.store(array, window)
        assert (array.array == window).all()
        assert "ring" not in arena.runtime.copies
        arena.runtime.copies.clear()


def test_the_ring_takes_what_is_not_registered_and_short_rows(device, monkeypatch) -> None:
    monkeypatch.setattr(device_copies, "_DIRECT", 1)
    monkeypatch.setattr(device_copies, "_LINE", 100)
    copies, arena = device
    elsewhere = np.ones((8, 300), "f4")
    beyond = in_arena(arena, (8, 300), 59 * SEGMENT)
    short = in_arena(arena, (8, 300), 0)[:, :20]
    for window in (elsewhere, elsewhere[:, :200], beyond, beyond[:, :200], short, short[:, ::2], short[::-1]):
        copies._upload(OnDevice(window.shape), window)
        copies.store(OnDevice(window.shape), window)
        assert arena.runtime.copies == ["ring", "ring"]
        arena.runtime.copies.clear()
