"""A device whose results may stay there, in memory of the host, and the front that sends tasks to its worker."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from dataclasses import replace

import numpy as np
from works import encode

from gemmserve_service.executor.protocol import TO_FRONT, ArrayRef, Decoder
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.backend import HostArray, call, go_on
from gemmserve_service.executor.worker.checks.verification import Verdict
from gemmserve_service.executor.worker.health.monitor import Monitor
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams, Timings
from gemmserve_service.store.extents.extents import ExtentPool

WAIT_S = 60
A = np.arange(9.0).reshape(3, 3)
ROOM = 4
"""Results that may be unwritten."""


class Made:
    """An array of the "device"."""

    def __init__(self, array):
        self.array = array
        self.nbytes = array.nbytes


class Copies:
    """The "device" is memory of its own."""

    def __init__(self):
        self.resident = Residency(-(-ROOM * A.nbytes * 4 // 3))

    def write(self, value, start, target):
        target[:] = value.array.reshape(-1).view(np.uint8)[start : start + target.size]

    def mark(self):
        return object()

    def wait(self, mark):
        pass

    def fetch(self, value):
        return value.array.copy()


class Keeping(CpuBackend):
    out_of_memory = (MemoryError,)
    cuts = False
    checks = False
    """Whether it checks its products itself."""
    wrong = False
    """Whether it then finds them wrong."""

    def __init__(self):
        super().__init__()
        self.copies = Copies()
        self.write_queue = WriteQueue(self.copies, lambda: None)
        self.full = lambda: False
        """Whether the device has no memory for a product now."""

    def enter(self, *, express=False):
        pass

    def forget(self, array):
        self.copies.resident.forget(array)
        self.write_queue.forget(array)

    def run(self, params, operands, results, checkpoint=go_on):
        """All at once, on the host, with as much of the device's memory as there is."""
        self.write_queue.vacate()
        self.copies.resident.clear()
        read = {name: HostArray(operand.read(), operand.cache_id) for name, operand in operands.items()}
        return super().run(params, read, results, checkpoint)

    def product(self, params, operands, results, checkpoint=go_on, *, check=None):
        return Product(self, params, operands, results, check if self.checks else None)


class Product:
    verdict = None
    elements = None

    def __init__(self, backend, params, operands, results, check):
        self.timings = Timings()
        self.backend, self.params, self.operands, self.results = backend, params, operands, results
        self.check = check
        self.made = {}

    def load(self):
        if self.backend.full():
            raise MemoryError("the device is full")
        resident = self.backend.copies.resident
        self.there = {
            name: resident.get(
                operand.cache_id, operand.data.nbytes, lambda operand=operand: Made(operand.read().copy())
            )
            for name, operand in self.operands.items()
        }

    def compute(self):
        if self.backend.full():
            raise MemoryError("the device is full")
        made = {name: np.empty_like(out) for name, out in self.results.items()}
        call(self.params, {name: value.array for name, value in self.there.items()}, made)
        self.made = {name: Made(array) for name, array in made.items()}
        if self.check is not None:
            assert self.check.startswith("task t")
            self.verdict = Verdict(1e-15, 0.5 if self.backend.wrong else None, self.backend.wrong)

    def finish(self):
        pass

    def store(self):
        for name, out in self.results.items():
            out[...] = self.made[name].array

    def release(self):
        pass


class Front:
    """The other end of the connection."""

    def __init__(self, backend):
        self.near, self.far = socket.socketpair()
        self.near.settimeout(WAIT_S)
        self.decoder = Decoder()
        self.heard = []
        self.thread = threading.Thread(target=self._converse, args=(Runner(backend),))
        self.thread.start()

    def _converse(self, runner):
        with contextlib.suppress(OSError):
            loop._converse(self.far, runner, 3600, Monitor(None))

    def send(self, *messages):
        self.near.sendall(b"".join(encode(message) for message in messages))

    def next(self):
        """The next message."""
        while not self.heard:
            data = self.near.recv(1 << 16)
            assert data, "the worker is gone"
            self.heard += [TO_FRONT.validate_json(body) for body in self.decoder.feed(data)]
        return self.heard.pop(0)

    def hear(self, *kinds, skip=("kept",)):
        """The next messages of those kinds."""
        found = []
        while len(found) < len(kinds):
            message = self.next()
            if message.kind == kinds[len(found)]:
                found.append(message)
            else:
                assert message.kind in skip, message
        return found

    def hear_both(self, *kinds):
        """The next message of each kind, in any order."""
        found = {}
        while len(found) < len(kinds):
            message = self.next()
            if message.kind != "kept":
                assert message.kind in kinds, message
                found[message.kind] = message
        return [found[kind] for kind in kinds]

    def written(self, count):
        """The next tasks whose results were written: several may be told of at once."""
        tasks = []
        while len(tasks) < count:
            tasks += self.hear("written")[0].tasks
        return tasks

    def end(self):
        self.near.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.far.close()


def placing(folder):
    """Return what puts an array into a store, as an array's reference and the front's view of its place."""
    pool = ExtentPool(folder, keep_bytes=0)

    def make(array, cache_id):
        extent = pool.take(array.nbytes)
        view = np.frombuffer(extent.view(array.nbytes)).reshape(array.shape)
        view[...] = array
        ref = ArrayRef(
            extent=extent.file[0], path=extent.path, capacity=extent.file[1], offset=extent.start, nbytes=array.nbytes,
            dtype=array.dtype.name, shape=array.shape, order="C", cache_id=cache_id,
        )  # fmt: skip
        return ref, view

    return make


def squares(place):
    """Return what makes the message of a square, the reference of its result, and where that goes (`Write.places`),
    with a view of it.
    """
    numbers = itertools.count(1)

    def make(operand, **fields):
        number = next(numbers)
        array = f"r{number}"
        there, view = place(np.zeros((3, 3)), array)
        out = there
        if fields.setdefault("defer", True):
            out = replace(there, extent=None, path="", capacity=0, offset=0)
        message = Run(
            task=f"t{number}", params=GemmParams(), algorithm="numpy", operands={"a": operand, "b": operand},
            results={"d": out}, **fields,
        )  # fmt: skip
        return message, out, ({array: (there.extent, there.path, there.capacity, there.offset, None)}, view)

    return make
