"""Tiny products of one form on a device: in which order the device is given what, and what is reported."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels.planning.rates import shipped
from gemmserve_service.executor.protocol import Kind
from gemmserve_service.executor.worker.cuda.forms import tiny as module
from gemmserve_service.executor.worker.cuda.forms.tiny import TinyProducts, tiny_products
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.products import options
from gemmserve_service.schemas import Elements, GemmParams, Timings

A = np.arange(4.0).reshape(2, 2)
KIND = Kind(dtype="float64", shape=(2, 2), order="C")
SQUARE = Kind(dtype="complex64", shape=(64, 64), order="C")
KINDS = {"a": KIND, "b": KIND}, {"d": KIND}
H200 = shipped("nvidia-h200").spec


class OnDevice:
    """An array of the device: NumPy's, but no such array."""

    def __init__(self, shape, dtype, order="C"):
        self.values = np.empty(shape, dtype, order)
        self.nbytes = self.values.nbytes


def on_device(values):
    array = OnDevice(values.shape, values.dtype)
    array.values[...] = values
    return array


class Device:
    """Notes what it is told; a product takes three seconds, the copies half a one; of a product the compiler took
    `compiled_s`."""

    def __init__(self, monkeypatch):
        self.log = []
        self.compiled_s = 0.0
        self.failure = self.refusal = None
        self.given = []
        self.made = []
        readings = iter(range(100))
        waited = iter([0.0, 1.0] * 100)
        monkeypatch.setattr(module, "read_element_counts", lambda: next(readings))
        monkeypatch.setattr(module, "waited_s", lambda: next(waited) * self.compiled_s)
        monkeypatch.setattr(module.element_counts, "between", lambda *pair: Elements(planned=pair[1] - pair[0]))
        device = self

        class Event:
            made = 0

            def __init__(self):
                Event.made += 1
                self.number = Event.made

            def record(self):
                device.log.append(f"event {self.number}")

            def synchronize(self):
                device.log.append(f"waited for {self.number}")
                if device.failure is not None:
                    raise device.failure

        cuda = SimpleNamespace(
            Event=Event,
            get_elapsed_time=lambda start, stop: (
                1e3 * {(1, 2): 0.25, (2, 3): 3.0, (3, 4): 0.5}[start.number, stop.number]
            ),
        )
        copies = SimpleNamespace(resident=Residency(1 << 20), start_load=self.load, start_store=self.store)
        self.backend = SimpleNamespace(
            cupy=SimpleNamespace(cuda=cuda, ndarray=OnDevice), copies=copies, call=self.call, spec=H200
        )
        self.resident = copies.resident

    def load(self, array, memory):
        self.log.append("load")
        array.values[...] = memory.view(array.values.dtype).reshape(array.values.shape)

    def store(self, array, memory):
        self.log.append("store")
        memory[:] = array.values.reshape(-1).view(np.uint8)

    def call(self, params, operands, made, given):
        self.log.append("product")
        if self.refusal is not None:
            raise self.refusal
        self.given.append(given)
        self.made.append(weakref.ref(made["d"]))
        np.matmul(operands["a"].values, operands["b"].values, out=made["d"].values)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def bytes_of(array):
    return array.reshape(-1).view(np.uint8)


def computed(products, operands, **kept):
    """The result of a product, and what is said of it."""
    out = np.zeros((2, 2))
    products.begin(operands)
    products.store("d", bytes_of(out))
    return out, *products.finish(kept)


def test_products_of_resident_operands_one_after_the_other(device):
    products = TinyProducts(device.backend, GemmParams(), *KINDS)
    device.resident.put("a", on_device(A), 32)
    assert products.resident(["a", "b"]) is None
    for number in range(2):
        result, timings, counted = computed(products, products.resident(["a", "a"]), d=f"d{number}")
        assert timings == Timings(kernel_s=3.0, d2h_s=0.5)
        assert counted == Elements(planned=1)
        np.testing.assert_array_equal(result, A @ A)
        assert device.log == ["event 2", "product", "event 3", "store", "event 4", "waited for 4"], "once"
        device.log.clear()
        np.testing.assert_array_equal(device.resident.peek(f"d{number}").values, A @ A)
    assert device.resident.used == 3 * 32
    assert device.given == [options(GemmParams())] * 2


def test_operands_that_are_kept_nowhere_are_brought_before_the_kernels_time_begins(device):
    products = TinyProducts(device.backend, GemmParams(), *KINDS)
    device.resident.put("a", on_device(A), 32)
    (copy,) = products.resident(["a"])
    result, timings, _ = computed(products, [copy, bytes_of(2 * A)])
    assert device.log == ["event 1", "load", "event 2", "product", "event 3", "store", "event 4", "waited for 4"]
    assert timings == Timings(h2d_s=0.25, kernel_s=3.0, d2h_s=0.5)
    np.testing.assert_array_equal(result, 2 * A @ A)
    assert device.resident.used == 32, "nothing more is kept"
    assert computed(products, [copy, copy])[1].h2d_s == 0.0


def test_what_is_not_kept_is_let_go(device):
    products = TinyProducts(device.backend, GemmParams(), *KINDS)
    operands = [on_device(A), bytes_of(A).copy()]
    memory = np.zeros(32, np.uint8)
    products.begin(operands)
    products.store("d", memory)
    gone = [weakref.ref(each) for each in (*operands, memory)]
    del operands, memory
    assert all(each() is not None for each in gone), "the device is at them"
    products.finish({})
    assert all(each() is None for each in gone)
    assert all(array() is None for array in device.made)


def test_the_compilers_seconds_are_none_of_the_kernels(device):
    device.compiled_s = 2.0
    _, timings, _ = computed(TinyProducts(device.backend, GemmParams(), *KINDS), [bytes_of(A), bytes_of(A)])
    assert (timings.compile_s, timings.kernel_s) == (2.0, 1.0)


def test_a_product_that_failed_leaves_nothing_to_the_next_one(device):
    products = TinyProducts(device.backend, GemmParams(), *KINDS)
    device.failure = RuntimeError("an illegal memory access")
    products.begin([bytes_of(A), bytes_of(A)])
    with pytest.raises(RuntimeError, match="illegal"):
        products.finish({"d": "d"})
    assert not device.resident.holds("d")
    device.failure = None
    result, _, _ = computed(products, [bytes_of(2 * A), bytes_of(A)])
    np.testing.assert_array_equal(result, 2 * A @ A)


def test_a_product_that_cannot_begin_leaves_nothing_that_reads_its_operands(device):
    device.refusal = MemoryError("no room")
    products = TinyProducts(device.backend, GemmParams(), *KINDS)
    with pytest.raises(MemoryError):
        products.begin([bytes_of(A), bytes_of(A)])
    assert device.log[-3:] == ["product", "event 4", "waited for 4"]


@pytest.mark.parametrize(
    ("kind", "params", "there"),
    [
        (SQUARE, GemmParams(), True),
        (SQUARE, GemmParams(compute="fp32"), True),
        (SQUARE, GemmParams(compute="3xfp16"), True),
        (SQUARE, GemmParams(compute="3xfp16-3m"), False),
        (Kind(dtype="complex128", shape=(64, 64), order="C"), GemmParams(compute="tf32"), False),
        (Kind(dtype="complex64", shape=(64, 32), order="C"), GemmParams(), False),
    ],
    ids=["auto", "plain", "planes of one launch", "prepared operands", "no such mode", "no such product"],
)
def test_what_has_no_shorter_way(device, kind, params, there):
    made = tiny_products(device.backend, params, {"a": kind, "b": kind}, {"d": kind})
    assert (made is not None) == there
