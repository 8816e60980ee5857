"""The ring of pinned memory, on a link that copies late: as late as it may, or when somebody waits for it."""

from __future__ import annotations

import random
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from real_device import cupy_with_device

from gemmserve_kernels.device import driver
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.problem.errors import DeviceError
from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.worker.cuda.pinned_ring import CupyLink, Staging, flat


class LateStream:
    """Work in order; done when an event of it is waited for, or at `finish`."""

    def __init__(self):
        self.lock = threading.Lock()
        self.given = deque()
        self.done = 0
        self.count = 0

    def give(self, work):
        with self.lock:
            self.given.append(work)
            self.count += 1
            return self.count

    def finish(self, until=None):
        with self.lock:
            while self.given and (until is None or self.done < until):
                self.given.popleft()()
                self.done += 1


class LateEvent:
    def __init__(self):
        self.recorded = None

    def record(self, stream):
        self.recorded = stream, stream.count

    @property
    def done(self):
        stream, until = self.recorded
        return stream.done >= until

    def synchronize(self):
        stream, until = self.recorded
        stream.finish(until)


class LateLink:
    """A device whose memory is `memory`; its addresses are offsets."""

    def __init__(self, nbytes, broken_at=None):
        self.memory = np.zeros(nbytes, np.uint8)
        self.allocated = 0
        self.entered = {threading.get_ident()}
        self.broken_at = broken_at

    def pinned(self, nbytes):
        self.allocated += nbytes
        return np.full(nbytes, 0xEE, np.uint8)

    def upload(self, target, source, stream):
        self.check(target)
        stream.give(lambda: np.copyto(self.memory[target : target + source.size], source))

    def download(self, target, source, stream):
        self.check(source)
        stream.give(lambda: np.copyto(target, self.memory[source : source + target.size]))

    def check(self, address):
        assert threading.get_ident() in self.entered
        if self.broken_at is not None and address >= self.broken_at:
            raise RuntimeError("the link is broken")

    def event(self):
        return LateEvent()

    def enter(self):
        self.entered.add(threading.get_ident())


@pytest.fixture
def ring():
    rings = []

    def make(link, **options):
        rings.append(Staging(link, **options))
        return rings[-1]

    yield make
    for one in rings:
        one.close()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1000, 64 * 12])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives_there_and_back(ring, nbytes, threads):
    link = LateLink(nbytes + 32)
    staging = ring(link, threads=threads, slot_bytes=64)
    source = np.frombuffer(random.Random(nbytes).randbytes(nbytes), np.uint8)
    stream = LateStream()
    staging.to_device(16, source, stream)
    stream.finish()
    assert np.array_equal(link.memory[16 : 16 + nbytes], source)
    assert not link.memory[:16].any()
    assert not link.memory[16 + nbytes :].any()
    back = np.zeros(nbytes, np.uint8)
    staging.to_host(back, 16, stream)  # nobody finishes the stream: it waits itself
    assert np.array_equal(back, source)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "window",
    [
        (slice(3, 17), slice(5, 9)),  # several rows a piece
        (slice(0, 2), slice(None)),  # rows longer than a piece
        (slice(2, 3), slice(1, 40)),
        (slice(None, None, -2), slice(None, None, 3)),
    ],
)
def test_a_window_of_an_array_arrives_in_order_there_and_back(ring, window, threads):
    whole = np.arange(2 * 20 * 50, dtype=np.float32).reshape(2, 20, 50)
    part = whole[(slice(None), *window)]
    link = LateLink(part.nbytes + 32)
    staging = ring(link, threads=threads, slot_bytes=64)
    stream = LateStream()
    staging.lines_to_device(16, part, stream)
    stream.finish()
    assert link.memory[16 : 16 + part.nbytes].tobytes() == part.tobytes()
    assert not link.memory[:16].any()
    assert not link.memory[16 + part.nbytes :].any()
    result = np.zeros_like(whole)
    there = result[(slice(None), *window)]
    staging.lines_to_host(there, 16, stream)
    assert np.array_equal(there, part)
    assert np.count_nonzero(result) == np.count_nonzero(part)


def test_an_upload_follows_what_the_stream_was_given_before(ring):
    link = LateLink(256)
    staging = ring(link, threads=2, slot_bytes=64)
    stream = LateStream()
    stream.give(lambda: link.memory.fill(7))
    staging.to_device(0, np.full(100, 9, np.uint8), stream)
    stream.finish()
    assert link.memory[:100].tolist() == [9] * 100
    assert link.memory[100:].tolist() == [7] * 156


def test_a_slot_is_not_filled_again_before_its_copy_is_over(ring):
    """The stream does nothing of its own accord, and a thread has two slots only."""
    link = LateLink(1 << 14)
    staging = ring(link, threads=1, slot_bytes=64)
    source = np.arange(1 << 14, dtype=np.uint16).view(np.uint8)[: 1 << 14]
    stream = LateStream()
    staging.to_device(0, source, stream)
    assert len(stream.given) <= 2
    stream.finish()
    assert np.array_equal(link.memory, source)


def test_memory_is_taken_once_and_as_it_is_needed(ring):
    link = LateLink(1 << 12)
    staging = ring(link, threads=4, slot_bytes=64)
    assert link.allocated == 0
    staging.to_device(0, np.zeros(64, np.uint8), LateStream())
    assert link.allocated == 2 * 64
    for _ in range(3):
        staging.to_device(0, np.zeros(1 << 12, np.uint8), LateStream())
    assert link.allocated == 4 * 2 * 64


def test_an_error_reaches_the_caller_and_the_ring_goes_on(ring):
    link = LateLink(1 << 12, broken_at=1000)
    staging = ring(link, threads=3, slot_bytes=64)
    out = np.zeros(1 << 12, np.uint8)
    with pytest.raises(RuntimeError, match="the link is broken"):
        staging.to_device(0, np.ones(1 << 12, np.uint8), LateStream())
    with pytest.raises(RuntimeError, match="the link is broken"):
        staging.to_host(out, 0, LateStream())
    link.broken_at = None
    link.memory[:] = 5
    kept = np.zeros(500, np.uint8)
    staging.to_host(kept, 0, LateStream())
    assert (kept == 5).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_can_be_interrupted(ring, threads, monkeypatch):
    """A link that is slow, or pages that come from a disk: nobody need wait for the last byte."""
    monkeypatch.setattr("gemmserve_service.executor.worker.cuda.pinned_ring._LOOK_S", 1e-3)
    link = LateLink(1 << 12)
    staging = ring(link, threads=threads, slot_bytes=64)
    held = threading.Event()
    upload = link.upload

    def slow(*arguments):
        assert held.wait(60)
        upload(*arguments)

    def stop():
        held.set()
        raise JobCancelled("nobody wants it")

    monkeypatch.setattr(link, "upload", slow)
    with interruptible(stop), pytest.raises(JobCancelled):
        staging.to_device(0, np.ones(1 << 12, np.uint8), LateStream())
    assert not link.memory.all()
    stream = LateStream()
    staging.to_device(0, np.full(1 << 12, 3, np.uint8), stream)
    stream.finish()
    assert (link.memory == 3).all(), "the ring goes on"


def test_both_directions_at_once(ring):
    link = LateLink(1 << 16)
    link.memory[: 1 << 15] = 3
    staging = ring(link, threads=2, slot_bytes=256)
    up, down = LateStream(), LateStream()
    out = np.zeros(1 << 15, np.uint8)

    def fetch():
        link.enter()
        staging.to_host(out, 0, down)

    other = threading.Thread(target=fetch)
    other.start()
    staging.to_device(1 << 15, np.full(1 << 15, 4, np.uint8), up)
    up.finish()
    other.join(60)
    assert (out == 3).all()
    assert (link.memory[1 << 15 :] == 4).all()


def test_a_copy_beside_one_in_the_other_direction_has_fewer_threads(ring, monkeypatch):
    link = LateLink(1 << 12)
    staging = ring(link, threads=4, slot_bytes=64)
    under_way, go_on = threading.Event(), threading.Event()
    download = link.download

    def held(*arguments):
        under_way.set()
        assert go_on.wait(60)
        download(*arguments)

    def fetch():
        link.enter()
        staging.to_host(out, 0, LateStream())

    monkeypatch.setattr(link, "download", held)
    out = np.zeros(64, np.uint8)
    other = threading.Thread(target=fetch)
    other.start()
    assert under_way.wait(60)
    before = link.allocated
    stream = LateStream()
    staging.to_device(0, np.full(1 << 12, 7, np.uint8), stream)
    assert link.allocated - before == 3 * 2 * 64
    go_on.set()
    other.join(60)
    stream.finish()
    assert (link.memory == 7).all()
    staging.to_device(0, np.zeros(1 << 12, np.uint8), LateStream())
    assert link.allocated - before == 4 * 2 * 64


def test_memory_of_an_array_in_one_piece():
    array = np.arange(24, dtype=np.complex64).reshape(2, 3, 4)
    assert np.shares_memory(flat(array), array)
    assert flat(array).tobytes() == array.tobytes()
    assert flat(np.asfortranarray(array)).tobytes() == array.tobytes(order="F")
    assert flat(array[:, 1:]) is None
    assert flat(array[:0]).size == 0
    assert flat(np.array(5.0)).size == 8


@pytest.mark.gpu
def test_on_a_device(ring):
    cupy = cupy_with_device()
    staging = ring(CupyLink(cupy, 0), threads=4, slot_bytes=1 << 16)
    source = np.random.default_rng(0).integers(0, 256, (1 << 20) + 77, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    device = cupy.zeros(source.size, cupy.uint8)
    cupy.cuda.Device().synchronize()
    staging.to_device(device.data.ptr, source, stream)
    stream.synchronize()
    assert np.array_equal(device.get(), source)
    back = np.zeros_like(source)
    staging.to_host(back, device.data.ptr, stream)
    assert np.array_equal(back, source)


class Calls:
    """The driver's quick calls, which answer what they are told to."""

    def __init__(self, **codes):
        self.codes, self.made = codes, []

    def __getattr__(self, name):
        def call(*arguments):
            self.made.append((name, *arguments))
            return self.codes.get(name, 0)

        return call


EVENT = SimpleNamespace(ptr=7, synchronize=lambda: None)
STREAM = SimpleNamespace(ptr=9)


def quick_link(monkeypatch, calls, *, hip=False):
    monkeypatch.setattr(driver, "quick_calls", lambda: calls)
    cuda = SimpleNamespace(runtime=SimpleNamespace(is_hip=hip), Event=lambda **_: EVENT)
    return CupyLink(SimpleNamespace(cuda=cuda), 0)


def test_copies_and_events_keep_the_interpreter(monkeypatch):
    calls = Calls()
    link = quick_link(monkeypatch, calls)
    piece = np.zeros(5, np.uint8)
    link.upload(100, piece, STREAM)
    link.download(piece, 200, STREAM)
    event = link.event()
    event.record(STREAM)
    assert event.done
    event.synchronize()
    assert calls.made == [
        ("to_device", 100, piece.ctypes.data, 5, 9),
        ("to_host", piece.ctypes.data, 200, 5, 9),
        ("record", 7, 9),
        ("query", 7),
    ]


def test_an_event_that_is_not_over_is_no_error(monkeypatch):
    assert not quick_link(monkeypatch, Calls(query=driver.NOT_READY)).event().done


@pytest.mark.parametrize("call", ["to_device", "to_host", "record", "query"])
def test_a_call_that_the_driver_refuses(monkeypatch, call):
    monkeypatch.setattr(driver, "_function", lambda name: lambda *_: 0)
    link = quick_link(monkeypatch, Calls(**{call: 700}))
    piece = np.zeros(5, np.uint8)
    with pytest.raises(DeviceError, match="error 700 of the CUDA driver"):
        {
            "to_device": lambda: link.upload(0, piece, STREAM),
            "to_host": lambda: link.download(piece, 0, STREAM),
            "record": lambda: link.event().record(STREAM),
            "query": lambda: link.event().done,
        }[call]()


def test_another_driver_s_calls_are_cupy_s(monkeypatch):
    """ROCm's, and where there is no library of that name."""
    assert quick_link(monkeypatch, Calls(), hip=True).event() is EVENT
    assert quick_link(monkeypatch, None).event() is EVENT


def test_an_event_that_is_over_is_not_waited_for(ring):
    """To wait gives the interpreter up, even where there is nothing to wait for."""
    link = LateLink(1 << 12)
    waited = []

    class Watched(LateEvent):
        def synchronize(self):
            waited.append(self)
            super().synchronize()

    link.event = Watched
    staging = ring(link, threads=1, slot_bytes=64)
    stream = LateStream()
    give = stream.give

    def at_once(work):
        count = give(work)
        stream.finish()
        return count

    stream.give = at_once
    staging.to_device(0, np.arange(1 << 10, dtype=np.uint16).astype(np.uint8), stream)
    assert waited == []
