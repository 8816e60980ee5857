"""A product's stages, where they run on streams of several threads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.worker.backend import HostArray, go_on
from gemmserve_service.executor.worker.checks import verification
from gemmserve_service.executor.worker.cuda import backend as module
from gemmserve_service.executor.worker.cuda.backend import DeviceProduct
from gemmserve_service.schemas import GemmParams

A = np.arange(4.0).reshape(2, 2)


class Event:
    def record(self):
        pass

    def synchronize(self):
        pass


def test_a_check_that_is_cancelled_leaves_nothing_that_writes_to_the_results(monkeypatch):
    """They were allocated on the stream that computes; a second product in their place goes by that of the check."""
    log = []
    stream = SimpleNamespace(synchronize=lambda: log.append("waited"))
    cuda = SimpleNamespace(Event=Event, get_current_stream=lambda: stream, get_elapsed_time=lambda *_: 0.0)
    copies = SimpleNamespace(load=lambda operand: operand.data, prepared=lambda params, operands, there: there)
    backend = SimpleNamespace(cupy=SimpleNamespace(cuda=cuda, empty=np.empty), copies=copies)

    def cancelled(params, there, made, compute, name):
        compute(params)
        raise JobCancelled("the job was cancelled")

    monkeypatch.setattr(module, "call", lambda *_: log.append("enqueued"))
    monkeypatch.setattr(module, "read_element_counts", lambda: None)
    monkeypatch.setattr(module.element_counts, "between", lambda *_: None)
    monkeypatch.setattr(verification, "on_device", cancelled)
    operands = {"a": HostArray(A), "b": HostArray(A)}
    product = DeviceProduct(backend, GemmParams(), operands, {"d": np.zeros((2, 2))}, go_on, check="a product")
    product.load()
    product.compute()
    with pytest.raises(JobCancelled):
        product.finish()
    assert log == ["enqueued", "enqueued", "waited"]
