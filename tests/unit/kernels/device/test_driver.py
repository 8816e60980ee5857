"""Graphs of launches: what the driver is told, by a driver of the test's that reads it as cuda.h lays it out."""

# ruff: noqa: N802 (the driver's own names)

from __future__ import annotations

import ctypes
import inspect
import struct

import pytest

from gemmserve_kernels.device import driver
from gemmserve_kernels.problem.errors import DeviceError

KERNEL = struct.Struct("=Q3I3II4xQQQQ")
"""CUDA_KERNEL_NODE_PARAMS_v2: func, grid, block, shared memory, kernelParams, extra, kern, ctx."""
FILL = struct.Struct("=QQIIQQ")
"""CUDA_MEMSET_NODE_PARAMS: dst, pitch, value, elementSize, width, height."""
CONTEXT, GRAPH, READY = 0xC0, 0x60, 0xE0 << 40
STREAM = 9 << 40


def word(address):
    return ctypes.c_uint64.from_address(address).value


def put(address, value):
    ctypes.c_uint64.from_address(address).value = value


class Driver:
    """What was called, with what stood in memory then; the next nodes are 1, 2, 3 ..."""

    def __init__(self):
        self.calls = []
        self.nodes = 0
        self.capturing = 0
        self.failing = None

    def function(self, name):
        def call(*arguments):
            if name == self.failing:
                return 700
            return getattr(self, name)(*arguments) or 0

        types = [ctypes.c_void_p] * len(inspect.signature(getattr(self, name)).parameters)
        made = ctypes.CFUNCTYPE(ctypes.c_int, *(driver._GRAPH_CALLS[name] or types))(call)
        # As a library's function: of an int that is no argument of a declared type half gets through.
        found = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(made, ctypes.c_void_p).value)
        found.kept = made
        return found

    def node(self, at):
        self.nodes += 1
        put(at, self.nodes)

    def cuGraphCreate(self, at, flags):
        put(at, GRAPH)

    def cuCtxGetCurrent(self, at):
        put(at, CONTEXT)

    def cuGraphAddKernelNode_v2(self, at, graph, dependencies, count, params):
        self.node(at)
        self.calls.append(("kernel", graph, count or 0, *KERNEL.unpack(ctypes.string_at(params, KERNEL.size))))

    def cuGraphAddMemsetNode(self, at, graph, dependencies, count, params, context):
        self.node(at)
        self.calls.append(("fill", graph, count or 0, context, *FILL.unpack(ctypes.string_at(params, FILL.size))))

    def cuGraphAddDependencies_v2(self, graph, before, after, edge, count):
        self.calls.append(("edge", word(before), word(after), ctypes.string_at(edge, 8), count))

    def cuGraphInstantiateWithFlags(self, at, graph, flags):
        put(at, READY)

    def cuGraphExecKernelNodeSetParams_v2(self, ready, node, params):
        self.calls.append(("set kernel", ready, node, KERNEL.unpack(ctypes.string_at(params, KERNEL.size))[8]))

    def cuGraphExecMemsetNodeSetParams(self, ready, node, params, context):
        self.calls.append(("set fill", ready, node, context, FILL.unpack(ctypes.string_at(params, FILL.size))[0]))

    def cuGraphLaunch(self, ready, stream):
        self.calls.append(("launch", ready, stream))

    def cuGraphExecDestroy(self, ready):
        self.calls.append(("destroy instance", ready))

    def cuGraphDestroy(self, graph):
        self.calls.append(("destroy", graph))

    def cuStreamIsCapturing(self, stream, at):
        self.calls.append(("capturing", stream))
        ctypes.c_int.from_address(at).value = self.capturing


@pytest.fixture
def told(monkeypatch):
    found = Driver()
    monkeypatch.setattr(driver, "_function", found.function)
    driver._graph_calls.cache_clear()
    monkeypatch.setattr(driver, "check", lambda code, what: (_ for _ in ()).throw(DeviceError(what)) if code else None)
    yield found
    driver._graph_calls.cache_clear()


def made():
    graph = driver.Graph()
    graph.add_fill(0x1000, 48)
    graph.add_kernel(driver.LaunchConfig.of(7, 64, 100), 0xF1, 0xA1)
    graph.add_kernel(driver.LaunchConfig.of(5, 32, 0, dependent=True), 0xF2, 0xA2)
    graph.finish()
    return graph


def test_kernels_and_fills_one_after_another(told):
    made()
    after, early = bytes(8), bytes((1, 0, 1, 0, 0, 0, 0, 0))
    assert told.calls[:5] == [
        ("fill", GRAPH, 0, CONTEXT, 0x1000, 0, 0, 1, 48, 1),
        ("kernel", GRAPH, 0, 0xF1, 7, 1, 1, 64, 1, 1, 100, 0xA1, 0, 0, 0),
        ("edge", 1, 2, after, 1),
        ("kernel", GRAPH, 0, 0xF2, 5, 1, 1, 32, 1, 1, 0, 0xA2, 0, 0, 0),
        ("edge", 2, 3, early, 1),
    ]


def test_setting_anew_and_launching(told):
    graph = made()
    del told.calls[:]
    graph.set_fill(0, 0x2000)
    graph.set_kernel(2)
    graph.launch(driver.Stream(STREAM))
    graph.launch(driver.Stream(0))
    launches = [("launch", READY, STREAM), ("launch", READY, None)]
    assert told.calls == [("set fill", READY, 1, CONTEXT, 0x2000), ("set kernel", READY, 3, 0xA2), *launches]


def test_what_is_dropped_is_destroyed(told):
    graph = made()
    del told.calls[:]
    del graph
    assert sorted(told.calls) == [("destroy", GRAPH), ("destroy instance", READY)]


@pytest.mark.parametrize(
    "name", ["cuGraphInstantiateWithFlags", "cuGraphAddKernelNode_v2", "cuGraphAddDependencies_v2"]
)
def test_what_the_driver_refuses_is_an_error(told, name):
    told.failing = name
    with pytest.raises(DeviceError):
        made()


def test_errors_of_what_is_enqueued(told):
    graph = made()
    told.failing = "cuGraphLaunch"
    graph.set_kernel(1)
    with pytest.raises(DeviceError):
        graph.launch(driver.Stream(0))
    told.failing = "cuGraphExecKernelNodeSetParams_v2"
    with pytest.raises(DeviceError):
        graph.set_kernel(1)


def test_streams_that_record(told):
    stream = driver.Stream(STREAM)
    assert not stream.is_capturing()
    assert told.calls[-1] == ("capturing", STREAM)
    told.capturing = 1
    assert stream.is_capturing()
    told.capturing, told.failing = (
        0,
        "cuStreamIsCapturing",
    )  # a stream that an other one's recording forbids to be asked
    assert stream.is_capturing()
    assert not driver.Stream(0).is_capturing()


def test_a_driver_without_graphs(monkeypatch):
    def function(name):
        raise DeviceError(f"the CUDA driver has no {name}")

    monkeypatch.setattr(driver, "_function", function)
    driver._graph_calls.cache_clear()
    try:
        with pytest.raises(DeviceError, match="too old"):
            driver.Graph()
        assert driver.Stream(STREAM).is_capturing()
    finally:
        driver._graph_calls.cache_clear()


def test_an_allocation_is_found_by_an_address_in_it(monkeypatch):
    def find(start, nbytes, address):
        start._obj.value, nbytes._obj.value = address.value - 512, 1 << 40
        return 0

    monkeypatch.setattr(driver, "_function", {"cuMemGetAddressRange_v2": find}.get)
    assert driver.allocation_of((1 << 47) + 512) == (1 << 47, 1 << 40)
