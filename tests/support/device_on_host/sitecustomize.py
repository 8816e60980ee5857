"""A server whose device is the host: the worker's CUDA backend on the stand-in for CuPy, NumPy in the kernels' place.

This folder and the stand-in's on PYTHONPATH make every Python process import it at its start. Its disk takes
GEMMSERVE_TEST_DISK_RATE bytes a second of results that come from the host arena, where that is set. Its worker stands
before pieces of results that it writes and before arrays that it copies to clients' memory, its front before pieces
that it copies from the host arena to files, while the files are there that GEMMSERVE_TEST_WRITE_GATE,
GEMMSERVE_TEST_DELIVERY_GATE and GEMMSERVE_TEST_SPILL_GATE name (`gates.Gate`, whose folder is to
be on PYTHONPATH, too).
"""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
import threading
import time

import numpy as np

WRONG = 13
COUNTED = 17
"""Factor of products that count three elements of each result as computed the wide way, and one as plain."""


def call(params, operands, outs, given=None):
    """What the kernels' `call` does, on arrays of the stand-in; wrong in one element for one alpha, unless plainly; for
    another, elements are counted.
    """
    from gemmserve_service.executor.worker import backend

    host = {name: getattr(operand, "source", operand).get(order="K") for name, operand in operands.items()}
    results = {name: np.empty(out.shape, out.dtype) for name, out in outs.items()}
    held = getattr(params, "config", None)  # an algorithm that blocks of a large product are to be computed by
    backend.call(params if held is None else params.model_copy(update={"config": None}), host, results)
    if params.alpha == WRONG and params.compute == "auto":
        next(iter(results.values())).flat[-1] += 1000
    if params.alpha == COUNTED:
        from gemmserve_kernels.device.element_counts import counters_of

        words = counters_of(0).add(sum(result.size for result in results.values()))
        for word, count in enumerate((3, 1)):
            ctypes.c_uint64.from_address(words + 8 * word).value += count * len(results)
    for name, out in outs.items():
        out.set(results[name])


def prepare(array, side, compute="auto", *, trans="N", layout="interleaved"):
    """What the kernels' `prepare` does where there is nothing to prepare."""
    from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand

    return PreparedOperand(array, side, trans, layout, compute, None)


def write_words(source, target):
    """What the kernel of a reading of counters does."""
    from gemmserve_kernels.device.element_counts import WORDS

    ctypes.memmove(target, source, 8 * WORDS)


def find_on_device(params, operands, results, seed):
    """What the check's kernels find, on arrays of the stand-in."""
    from gemmserve_service.executor.worker.checks import verification

    sides = ({name: array.get(order="K") for name, array in side.items()} for side in (operands, results))
    return verification.find(params, *sides, seed)


def _write_slowly(rate):
    """Have os.pwrite, by which results go from the host arena to files, take its time."""
    pwrite, turn = os.pwrite, threading.Lock()

    def slow(fd, data, offset):
        with turn:
            time.sleep(len(data) / rate)
        return pwrite(fd, data, offset)

    os.pwrite = slow


if "GEMMSERVE_TEST_DISK_RATE" in os.environ:
    _write_slowly(float(os.environ["GEMMSERVE_TEST_DISK_RATE"]))


def _hold_spill(path):
    """Have os.pwrite, likewise, stand at a gate."""
    from held_gate import HeldGate

    pwrite, gate = os.pwrite, HeldGate(path)

    def held(fd, data, offset):
        gate.stand()
        return pwrite(fd, data, offset)

    os.pwrite = held


if "GEMMSERVE_TEST_SPILL_GATE" in os.environ:
    _hold_spill(os.environ["GEMMSERVE_TEST_SPILL_GATE"])


def _hold_deliveries(copies):
    """Have the device's copies of arrays to clients' memory stand at a gate, where there is one."""
    if "GEMMSERVE_TEST_DELIVERY_GATE" in os.environ:
        from held_gate import HeldGate

        start_store, gate = copies.start_store, HeldGate(os.environ["GEMMSERVE_TEST_DELIVERY_GATE"])

        def held(self, array, memory, start=0):
            if threading.current_thread().name == "gemmserve-deliver":
                gate.stand()
            start_store(self, array, memory, start)

        copies.start_store = held


def _hold_writes(copies):
    """Have the device's copies of results to the host stand at a gate, where there is one."""
    if "GEMMSERVE_TEST_WRITE_GATE" in os.environ:
        from held_gate import HeldGate

        write, gate = copies.write, HeldGate(os.environ["GEMMSERVE_TEST_WRITE_GATE"])

        def held(self, array, start, target):
            gate.stand()
            write(self, array, start, target)

        copies.write = held


_REPLACED = {
    "gemmserve_kernels.device.element_counts": write_words,
    "gemmserve_service.executor.worker.cuda.backend": call,
    "gemmserve_service.executor.worker.cuda.copies": prepare,
    "gemmserve_service.executor.worker.checks.verification": find_on_device,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Puts the functions above into the modules that use them, once those are there."""

    def find_spec(self, name, path=None, target=None):
        if name not in _REPLACED:
            return None
        function = _REPLACED.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            assert hasattr(module, function.__name__)
            setattr(module, function.__name__, function)
            if hasattr(module, "DeviceCopies"):
                _hold_writes(module.DeviceCopies)
                _hold_deliveries(module.DeviceCopies)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
