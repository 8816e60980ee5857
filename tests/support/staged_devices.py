"""Devices of the host whose products have stages, and the front that sends tasks to their worker."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import numpy as np
from works import encode

from gemmserve_service.executor.protocol import (
    TO_FRONT,
    Decoder,
)
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.backend import go_on
from gemmserve_service.executor.worker.health.monitor import Monitor
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.schemas import Timings

WAIT_S = 60
A = np.arange(12.0).reshape(3, 4)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class NoRoomError(Exception):
    """Memory ran out."""


class Staged(CpuBackend):
    """Products in stages on the host; `faults` = {(alpha, stage): what is called there}."""

    out_of_memory = (NoRoomError,)
    cuts = False

    def __init__(self):
        super().__init__()
        self.faults = {}
        self.log = []
        self.threads = set()
        self.at_once = 0
        self._loaded = set()

    def forget(self, array):
        self.log.append(("forget", array))

    def enter(self, *, express=False):
        self.threads.add((threading.current_thread().name, express))

    def product(self, params, operands, results, checkpoint=go_on, *, check=None):
        return Product(self, params, operands, results, checkpoint)

    def note(self, stage, alpha):
        self.log.append((stage, alpha))
        self.faults.get((alpha, stage), lambda: None)()


class Product:
    verdict = None
    elements = None

    def __init__(self, backend, params, operands, results, checkpoint):
        self.timings = Timings()
        self.backend, self.params, self.operands, self.results = backend, params, operands, results
        self.checkpoint = checkpoint
        self.loaded = False

    def load(self):
        self.checkpoint()
        self.backend.note("load", self.params.alpha.real)
        self.loaded = True

    def compute(self):
        if not self.loaded:
            self.load()
        self.checkpoint()
        self.backend.note("compute", self.params.alpha.real)

    def finish(self):
        pass

    def store(self):
        self.checkpoint()
        self.backend.note("store", self.params.alpha.real)
        self.backend.run(self.params, self.operands, self.results)

    def release(self):
        self.backend.log.append(("release", self.params.alpha.real))
        self.loaded = False


class Front:
    """The other end of a worker's connection."""

    def __init__(self, backend):
        self.near, self.far = socket.socketpair()
        self.near.settimeout(WAIT_S)
        self.runner = Runner(backend)
        self.decoder = Decoder()
        self.heard = []
        self.thread = threading.Thread(target=self._converse)
        self.thread.start()

    def _converse(self):
        with contextlib.suppress(OSError):
            loop._converse(self.far, self.runner, 3600, Monitor(None))

    def send(self, *messages):
        self.near.sendall(b"".join(encode(message) for message in messages))

    def answers(self, count):
        while len(self.heard) < count:
            data = self.near.recv(1 << 16)
            assert data, "the worker is gone"
            self.heard += [TO_FRONT.validate_json(body) for body in self.decoder.feed(data)]
        heard, self.heard = self.heard[:count], self.heard[count:]
        return heard

    def end(self):
        self.near.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.far.close()


class AtOnce(Staged):
    """With a shorter way for tiny products; `there`: what is on the device, by array."""

    def __init__(self):
        super().__init__()
        self.there = {}
        self.kept = {}
        self.counted = None

    def tiny(self, params, operands, results):
        self.note("asked", params.alpha.real)
        return Short(self, params, operands)


class Short:
    """What computes them, with a note of each step."""

    def __init__(self, backend, params, operands):
        self.backend, self.params, self.names = backend, params, list(operands)

    def resident(self, arrays):
        found = [self.backend.there.get(array) for array in arrays]
        return None if any(each is None for each in found) else found

    def begin(self, operands):
        self.backend.note("begin", self.params.alpha.real)
        a, b = (each.view(A.dtype).reshape(A.shape) if each.dtype == np.uint8 else each for each in operands)
        self.made = self.params.alpha.real * (a @ b.T)

    def store(self, name, memory):
        self.backend.note("store", self.params.alpha.real)
        memory[:] = self.made.reshape(-1).view(np.uint8)

    def finish(self, kept):
        self.backend.note("over", self.params.alpha.real)
        for name, array in kept.items():
            assert name == "d"
            self.backend.kept[array] = self.made
        return Timings(kernel_s=2.0), self.backend.counted
