"""Products of resident operands on a device: what it is given, what is waited for, what is let go and used again."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels.planning.rates import shipped
from gemmserve_service.executor.protocol import Kind
from gemmserve_service.executor.worker.cuda.copies import form_key
from gemmserve_service.executor.worker.cuda.forms import resident as module
from gemmserve_service.executor.worker.cuda.forms.resident import resident_products
from gemmserve_service.executor.worker.memory.residency import Residency
from gemmserve_service.products import options
from gemmserve_service.schemas import Elements, GemmParams, Timings

H200 = shipped("nvidia-h200").spec
KIND = Kind(dtype="complex64", shape=(1024, 1024), order="C")
KINDS = {"a": KIND, "b": KIND}, {"d": KIND}
PLAIN = GemmParams(compute="fp32")
PLANES = GemmParams(compute="3xfp16")


class Array:
    """An array of the device."""

    def __init__(self, shape=(1024, 1024), dtype="complex64", order="C"):
        self.shape, self.dtype, self.order = shape, dtype, order


class Device:
    """Notes what it is told; a product takes three seconds, of which the compiler took `compiled_s`."""

    def __init__(self, monkeypatch):
        self.log, self.events, self.given = [], [], []
        self.compiled_s = 0.0
        self.refusal = None
        readings, waited = iter(range(100)), iter([0.0, 1.0] * 100)
        monkeypatch.setattr(module, "read_element_counts", lambda: next(readings))
        monkeypatch.setattr(module, "waited_s", lambda: next(waited) * self.compiled_s)
        monkeypatch.setattr(module.element_counts, "between", lambda *pair: Elements(planned=pair[1] - pair[0]))
        device = self

        class Event:
            done = False

            def __init__(self):
                device.events.append(self)

            def record(self):
                device.log.append(("record", self))

            def synchronize(self):
                device.log.append(("wait", self))
                self.done = True

        self.on_elapsed = lambda: None
        cuda = SimpleNamespace(Event=Event, get_elapsed_time=self.elapsed)
        self.resident = Residency(1 << 30)
        copies = SimpleNamespace(resident=self.resident, keeps_form=lambda nbytes, _: nbytes == 8 << 20)
        self.backend = SimpleNamespace(
            cupy=SimpleNamespace(cuda=cuda, ndarray=Array), copies=copies, call=self.call, spec=H200
        )

    def elapsed(self, start, stop):
        self.on_elapsed()
        self.log.append(("elapsed", start, stop))
        return 3e3

    def call(self, params, operands, made, given):
        self.log.append(("product", *operands.values()))
        self.given.append(given)
        if self.refusal is not None:
            raise self.refusal

    def products(self, params=PLAIN):
        return resident_products(self.backend, params, *KINDS)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_products_one_behind_the_other(device):
    a, b = Array(), Array()
    for name, array in (("a", a), ("b", b)):
        device.resident.put(name, array, 8 << 20)
    products = device.products()
    assert products.resident(["a", "c"]) is None
    first, second = (products.begin(products.resident(["a", "b"])) for _ in range(2))
    start, stop, *later = device.events
    assert device.log == [
        *[("record", start), ("product", a, b), ("record", stop)],
        *[("record", later[0]), ("product", a, b), ("record", later[1])],
    ], "nobody has waited"
    made = first.made["d"]
    assert (made.shape, made.dtype, made.order) == ((1024, 1024), np.complex64, "C")
    assert second.made["d"] is not made
    device.log.clear()
    assert not first.over
    assert first.finish() == (Timings(kernel_s=3.0), Elements(planned=1))
    assert device.log == [("wait", stop), ("elapsed", start, stop)]
    assert first.over
    assert device.given == [options(PLAIN)] * 2
    products.begin(products.resident(["a", "b"]))
    assert len(device.events) == 4, "events of what is over are used again"


def test_events_are_not_recorded_again_before_their_time_was_read(device):
    products = device.products()
    first = products.begin([Array(), Array()])
    # As another thread may, in the midst of that.
    device.on_elapsed = lambda: products.begin([Array(), Array()])
    first.finish()
    start, stop = device.events[:2]
    assert device.log[-1] == ("elapsed", start, stop)
    assert device.log.count(("record", start)) == 1, "the time was that of another product, which is under way"


def test_operands_are_in_use_until_the_product_is_over(device):
    operands = [Array(), Array()]
    begun = device.products().begin(operands)
    gone = [weakref.ref(each) for each in operands]
    del operands
    device.log.clear()
    assert all(each() is not None for each in gone)
    begun.finish()
    device.log.clear()
    assert all(each() is None for each in gone)


def test_what_was_prepared_is_used_and_what_is_to_be_is_left_to_others(device):
    for name in ("a", "b"):
        device.resident.put(name, Array(), 8 << 20)
    products = device.products(PLANES)
    assert len(products.resident(["a", "b"])) == 2, "one use is no reason to prepare it"
    assert products.resident(["a", "b"]) is None
    planes = {
        name: device.resident.get(name, 1, object, form=form_key(name, PLANES, "3xfp16")) for name in ("a", "b")
    }  # as whoever is asked then does
    assert products.resident(["a", "b"]) == list(planes.values())


def test_nothing_is_prepared_where_products_take_nothing_of_it(device):
    copy = Array()
    device.resident.put("a", copy, 8 << 20)
    for _ in range(3):
        assert device.products(PLAIN).resident(["a", "a"]) == [copy, copy]


def test_the_compilers_seconds_are_none_of_the_kernels(device):
    device.compiled_s = 2.0
    timings, _ = device.products().begin([Array(), Array()]).finish()
    assert (timings.compile_s, timings.kernel_s) == (2.0, 1.0)


def test_a_product_that_cannot_begin_leaves_nothing_that_reads_its_operands(device):
    device.refusal = MemoryError("no room")
    with pytest.raises(MemoryError):
        device.products().begin([Array(), Array()])
    (_, stop) = device.events
    assert device.log[-2:] == [("record", stop), ("wait", stop)]


def test_who_has_no_plan_hears_why_from_others(device):
    assert device.products(GemmParams()) is not None
    kinds = {"a": KIND, "b": Kind(dtype="complex64", shape=(3, 4), order="C")}
    assert resident_products(device.backend, PLAIN, kinds, {"d": KIND}) is None
