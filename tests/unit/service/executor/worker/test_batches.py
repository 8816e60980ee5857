"""Batches: bits of single products, one task in the queue, and what a worker does with its parts."""

from __future__ import annotations

import itertools
import os
import socket
import threading

import numpy as np
import pytest
from works import form_of

from gemmserve_service.executor.protocol import (
    TO_FRONT,
    Cancel,
    Decoder,
    Part,
    RunBatch,
    Stop,
    Work,
    encode,
)
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.batches import Stack, parts_of
from gemmserve_service.executor.worker.health.monitor import Monitor
from gemmserve_service.executor.worker.host import backend
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.memory.mappings import Mappings
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Forms
from gemmserve_service.schemas import GemmParams, GemmReduceParams


class Memory:
    """One extent, in which arrays are placed."""

    def __init__(self, nbytes=1 << 22):
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, nbytes)
        path = f"/proc/self/fd/{self.fd}"
        self.rows = [("memory", path, nbytes, 0, None)]
        self.mappings = Mappings()
        self.buffer = self.mappings.of("memory", path, nbytes)
        self.end = 0

    def stack(self, arrays, *, gap=0, skew=0):
        """Arrays of one kind one behind the other, `gap` bytes apart."""
        places = []
        for array in arrays:
            self.end += skew + gap
            places.append((0, self.end) if array.nbytes else (-1, 0))
            order = "C" if array.flags.c_contiguous else "F"
            view = np.ndarray(array.shape, array.dtype, self.buffer, self.end, order=order)
            view[...] = array
            self.end += array.nbytes
        self.end += -self.end % 64
        return Stack(arrays[0].dtype.name, arrays[0].shape, order, places)

    def locate(self, row):
        """The bytes from where an extent begins."""
        name, path, capacity, start, _ = row
        return self.mappings.of(name, path, capacity)[start:]

    def read(self, stack):
        return [
            np.ndarray(stack.shape, stack.dtype, self.buffer, offset, order=stack.order).copy()
            for _, offset in stack.places
        ]


def part_of(params, algorithm, operands, results):
    """A part of a batch, of stacks by name."""
    places = [{name: stack.places for name, stack in side.items()} for side in (operands, results)]
    form = form_of(params, operands, results)
    return Part(form=form, algorithm=algorithm, operands=places[0], results=places[1])


@pytest.fixture
def memory():
    made = Memory()
    yield made
    made.mappings.clear()
    os.close(made.fd)


def random(rng, shape, dtype, order="C"):
    x = rng.standard_normal(shape)
    x = x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x
    return np.asarray(x.astype(dtype), order=order)


def single(params, operands, out):
    """The result of one product by `run`."""
    result = np.empty_like(out)
    CpuBackend().run(params, {name: HostArray(x) for name, x in operands.items()}, {"d": result})
    return result


CASES = [
    GemmParams(),
    GemmParams(trans_a="T", trans_b="N"),
    GemmParams(trans_a="C", trans_b="R", alpha=2 - 1j),
    GemmParams(alpha=0.5),
    GemmParams(compute="fp64"),
    GemmParams(beta=2),
    GemmParams(order="F"),
]


@pytest.mark.parametrize("layout", ["stacked", "apart", "shared", "askew"])
@pytest.mark.parametrize("dtype", ["complex64", "float32", "complex128", "float16"])
def test_every_product_has_its_own_bits(memory, dtype, layout, monkeypatch):
    if layout == "stacked":
        monkeypatch.setattr(backend, "_STACKED_BYTES", 1 << 13)  # several pieces
    rng = np.random.default_rng(3)
    for params, (m, k, n) in itertools.product(CASES, [(6, 5, 7), (40, 33, 29), (1, 8, 1)]):
        if (dtype[0] != "c" and params.alpha.imag) or (dtype == "float16" and params.compute == "fp64"):
            continue
        memory.end = 0
        count = 9
        a = [random(rng, (k, m) if params.trans_a in "TC" else (m, k), dtype) for _ in range(count)]
        b = [random(rng, (n, k) if params.trans_b in "TC" else (k, n), dtype) for _ in range(count)]
        c = [random(rng, (m, n), dtype) for _ in range(count)] if params.beta else None
        out = [np.empty((m, n), dtype, order=params.order) for _ in range(count)]
        gap = 64 if layout == "apart" else 0
        operands = {"a": memory.stack(a, gap=gap, skew=layout == "askew"), "b": memory.stack(b)}
        if layout == "shared":
            operands["b"] = operands["b"]._replace(places=[operands["b"].places[0]] * count)
            b = [b[0]] * count
        if layout == "apart":  # and in no order
            turned = operands["a"].places[::-1]
            operands["a"] = operands["a"]._replace(places=turned)
            a.reverse()
        if c is not None:
            operands["c"] = memory.stack(c)
        results = memory.stack(out)
        part = part_of(params=params, algorithm="numpy", operands=operands, results={"d": results})
        message = Work(task="t", extents=memory.rows, parts=[part], verify=True)
        done = Runner(CpuBackend()).run(message)
        assert done.kind == "done", done
        assert done.residual < 0.01
        for i, d in enumerate(memory.read(results)):
            given = {"a": a[i], "b": b[i]} | ({} if c is None else {"c": c[i]})
            assert d.tobytes() == single(params, given, out[i]).tobytes(), (params, i)


def test_stacks_are_found_where_they_are(memory):
    x = [np.ones((3, 4), "f4") for _ in range(3)]

    def found(**stacks):
        part = part_of(params=GemmParams(), algorithm="numpy", operands=stacks, results={"d": memory.stack(x)})
        (products,) = parts_of(Work(task="t", extents=memory.rows, parts=[part]), Forms(CpuBackend()), memory.locate)
        return products.stacks()

    stacked, apart = memory.stack(x), memory.stack(x, gap=64)
    operands, results = found(a=stacked, b=apart)
    assert operands["b"].strides == (112, 16, 4)
    assert not operands["a"].flags.writeable
    assert results["d"].flags.writeable
    backwards = stacked._replace(places=stacked.places[::-1])
    shared = stacked._replace(places=stacked.places[:1] * 3)
    uneven = stacked._replace(places=[*stacked.places[:2], (0, stacked.places[2][1] + 64)])
    for other in (backwards, shared, uneven, memory.stack(x, skew=1)):
        assert found(a=stacked, b=other) is None


def test_empty_products_and_reductions(memory):
    a = [np.empty((0, 4), "f8")] * 2
    b = [np.ones((4, 3))] * 2
    empty = Stack("float64", (0, 3), "C", [(-1, 0)] * 2)
    parts = [
        part_of(
            params=GemmParams(),
            algorithm="numpy",
            operands={"a": memory.stack(a), "b": memory.stack(b)},
            results={"d": empty},
        )
    ]
    x = [random(np.random.default_rng(i), (5, 4), "complex64") for i in range(3)]
    y = [random(np.random.default_rng(9 + i), (4, 6), "complex64") for i in range(3)]
    sums = memory.stack([np.zeros(6, "f4")] * 3)
    parts.append(
        part_of(
            params=GemmReduceParams(reduce="sumsq"),
            algorithm="numpy",
            operands={"a": memory.stack(x), "b": memory.stack(y)},
            results={"sumsq": sums},
        )
    )
    done = Runner(CpuBackend()).run(Work(task="t", extents=memory.rows, parts=parts))
    assert done.kind == "done", done
    for i, found in enumerate(memory.read(sums)):
        np.testing.assert_allclose(found, (abs(x[i] @ y[i]) ** 2).sum(0), rtol=1e-4)


def test_a_cancelled_batch_stops_between_its_products(memory, monkeypatch):
    monkeypatch.setattr(loop, "_LOOK_S", 0.0)
    near, far = socket.socketpair()

    class Backend(CpuBackend):
        ran = 0

        def run(self, params, operands, results, checkpoint):
            checkpoint()
            Backend.ran += 1
            near.sendall(encode(Cancel(task="t")))
            return super().run(params, operands, results)

    monkeypatch.setattr(backend, "_PANEL_FLOPS", 1)  # each product by itself
    a = memory.stack([np.ones((4, 4))] * 5)
    results = {"d": memory.stack([np.ones((4, 4))] * 5)}
    part = part_of(params=GemmParams(), algorithm="numpy", operands={"a": a, "b": a}, results=results)
    with near, far:
        near.sendall(encode(RunBatch(tasks=[Work(task="t", extents=memory.rows, parts=[part])])))
        thread = threading.Thread(target=loop._converse, args=(far, Runner(Backend()), 3600, Monitor(None)))
        thread.start()
        near.settimeout(60)
        (answer,) = [TO_FRONT.validate_json(body) for body in Decoder().feed(near.recv(1 << 16))]
        near.sendall(encode(Stop()))
        thread.join(60)
        assert not thread.is_alive()
    assert (answer.kind, answer.slug) == ("failed", "cancelled")
    assert Backend.ran == 1
