"""Tasks, a device whose products have stages, and its front."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from staged_devices import WAIT_S, A, AtOnce, Front, Staged

from gemmserve_service.executor.protocol import ArrayRef
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.schemas import GemmParams
from gemmserve_service.store.extents.extents import ExtentPool


@pytest.fixture
def place(tmp_path):
    """Puts an array where a worker finds it; returns the reference and the front's view of it."""
    pool = ExtentPool(tmp_path, keep_bytes=0)

    def make(array):
        extent = pool.take(array.nbytes)
        view = extent.view(array.nbytes)
        view[:] = array.tobytes()
        kind = {"dtype": array.dtype.name, "shape": array.shape, "order": "C", "nbytes": array.nbytes}
        return ArrayRef(
            extent=extent.file[0], path=extent.path, capacity=extent.file[1], offset=extent.start, **kind
        ), view

    return make


@pytest.fixture
def task(place):
    """task("name", 2.0) -> the message for 2 A A^T, and what reads its result."""

    def make(name, alpha, **fields):
        ref, _ = place(A)
        out, view = place(np.zeros((3, 3)))
        params = GemmParams(trans_b="T", alpha=alpha)
        message = Run(
            task=name, params=params, algorithm="numpy", operands={"a": ref, "b": ref}, results={"d": out}, **fields
        )
        return message, lambda: np.frombuffer(view).reshape(3, 3)

    return make


@pytest.fixture
def backend():
    return Staged()


@pytest.fixture
def front(backend):
    front = Front(backend)
    yield front
    front.end()


@pytest.fixture
def computed_by(backend):
    """Threads that have computed products, in the order of these."""
    names = []

    def note(stage, alpha, note=backend.note):
        if stage == "compute":
            names.append(threading.current_thread())
        note(stage, alpha)

    backend.note = note
    return names


@pytest.fixture
def quick():
    """A device with the shorter way, and its front."""
    backend = AtOnce()
    front = Front(backend)
    yield SimpleNamespace(backend=backend, front=front, steps=lambda: [stage for stage, _ in backend.log])
    front.end()


@pytest.fixture
def held(backend):
    """Holds the device up with the product of alpha 1, until it is called."""
    reached, go = threading.Event(), threading.Event()

    def hold():
        reached.set()
        go.wait(WAIT_S)

    backend.faults[(1.0, "compute")] = hold
    hold.reached, hold.go = reached, go.set
    yield hold
    go.set()
