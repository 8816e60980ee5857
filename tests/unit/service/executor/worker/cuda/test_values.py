"""Values of a program on a device: what is used by a step that is under way stays until that has ended."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_service.executor.worker.backend import HostArray, go_on
from gemmserve_service.executor.worker.cuda.values import DeviceValues
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.schemas import GemmParams

A = np.arange(4.0)


class Copy:
    """An array of the device."""


class Event:
    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.mark.parametrize("evicted", [False, True], ids=["kept", "evicted at once"])
def test_a_copy_that_others_may_drop_stays_while_a_step_uses_it(evicted):
    """Its memory belongs to the stream that it was allocated on, which would use it again before the step has ended."""
    resident = Residency(1 << 20)

    def load(operand):
        copy = resident.get(operand.cache_id, operand.data.nbytes, Copy)
        if evicted:
            resident.clear()
        return copy

    cupy = SimpleNamespace(cuda=SimpleNamespace(Event=Event, get_elapsed_time=lambda *_: 0.0))
    values = DeviceValues(cupy, go_on, call=lambda *_: None, copies=SimpleNamespace(load=load))
    copy = values.load(HostArray(A, "a"))
    alive = weakref.ref(copy)
    values.run(GemmParams(), {"a": copy}, {})
    del copy
    resident.clear()
    gc.collect()
    assert alive() is not None
    values.finish()
    gc.collect()
    assert alive() is None
