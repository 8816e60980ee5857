"""Products of little that make much: extents of 0, 1 and 2^40, which no count of operations tells from nothing.

A worker comes by its checkpoint at least every tenth of a second of its own time, whatever the shapes are.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmserve_kernels import Operand
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.freivalds import Finding
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_service.errors import JobCancelled
from gemmserve_service.executor.worker.backend import HostArray
from gemmserve_service.executor.worker.checks.verification import find
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.products import build, build_step, outputs
from gemmserve_service.schemas import (
    CholeskyStep,
    GemmParams,
    GemmReduceParams,
    HerkStep,
    InvStep,
    SolveStep,
)

HUGE = 1 << 40
MOST_BYTES = 48 << 20
MOST_FLOPS = 1 << 31
MOST_FORMED = 1 << 24
BETWEEN_LOOKS_S = 0.1
SLACK = 10
"""What a machine may be slower than ours: the faults that this is to find took minutes."""


class Looks:
    """A checkpoint that notes how much of its thread's time passes between two calls."""

    def __init__(self, most=math.inf):
        self.longest_s = 0.0
        self.count = 0
        self.most = most
        self.last = time.thread_time()

    def __call__(self):
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self.last)
        self.last = now
        self.count += 1
        if self.count > self.most:
            raise JobCancelled("enough")


@pytest.fixture(scope="module")
def backend():
    backend = CpuBackend()
    # One thread: others of the BLAS wait by spinning, which would count as this thread's time.
    backend._threads.most = 1
    with backend._threads.limited(0):
        yield backend


def prepared(params, shapes, dtype="f4"):
    """Operands, and results that hold anything but zeros."""
    arrays = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
    problem = build(params, {name: Operand.of(array) for name, array in arrays.items()})
    results = {name: np.full(shape, 77, kind, order) for name, (shape, kind, order) in outputs(problem).items()}
    return problem, arrays, results


def run(backend, params, arrays, results, look):
    operands = {name: HostArray(array) for name, array in arrays.items()}
    backend.run(params, operands, results, look)
    look()


def reduction(axis="m", reduce="sum", **more):
    return GemmReduceParams(reduce=reduce, axis=axis, **more)


@pytest.mark.parametrize("axis", ["m", ["m", "batch"]])
def test_a_reduction_of_nothing_is_nothing_however_long(backend, axis):
    """459 bytes of a request kept a worker for minutes."""
    names = ["sum", "mean", "sumsq", "max", "min", "absmax", "absmin", "argmax", "argmin"]
    shapes = {"a": (HUGE, 0), "b": (0, 4)} if axis == "m" else {"a": (HUGE, 3, 0), "b": (0, 4)}
    params = reduction(axis, names)
    _, arrays, results = prepared(params, shapes)
    look = Looks()
    began = time.thread_time()
    run(backend, params, arrays, results, look)
    assert time.thread_time() - began < SLACK * BETWEEN_LOOKS_S
    for name in names:
        assert results[name].tolist() == [0] * 4, name
    assert find(params, arrays, results, seed=1).residual == 0
    results["max"][2] = 1
    assert find(params, arrays, results, seed=1).residual == math.inf


@pytest.mark.parametrize(
    ("step", "shapes"),
    [
        (GemmParams(), {"a": (HUGE, 0, 4), "b": (4, 0)}),
        (reduction("m"), {"a": (HUGE, 3, 4), "b": (4, 0)}),
        (SolveStep(id="x", op="solve", a="$a", b="$b"), {"a": (HUGE, 0, 0), "b": (HUGE, 0, 1)}),
        (InvStep(id="x", op="inv", a="$a", assume="lower"), {"a": (HUGE, 0, 0)}),
        (CholeskyStep(id="x", op="cholesky", a="$a"), {"a": (HUGE, 0, 0)}),
        (HerkStep(id="x", op="herk", a="$a"), {"a": (HUGE, 0, 4)}),
    ],
    ids=lambda each: getattr(each, "op", ""),
)
def test_any_number_of_empty_results_is_made_and_checked_at_once(backend, step, shapes):
    """Checks kept 16 bytes for each of 2^40 matrices without elements, until the machine had no memory left."""
    arrays = {name: np.broadcast_to(np.float64(1), shape) for name, shape in shapes.items()}
    computation = build_step(step, {name: Operand.of(array) for name, array in arrays.items()})
    results = {name: np.empty(shape, dtype) for name, (shape, dtype, _) in outputs(computation).items()}
    look = Looks(most=100)
    run(backend, step, arrays, results, look)
    with interruptible(look):
        assert find(step, arrays, results, seed=1) == Finding(0.0, 0.0)


def test_what_is_written_is_work(backend):
    """No operations, and a quarter of a gigabyte: it is cut like any other, and stops where it is told to."""
    params = GemmParams()
    _, arrays, results = prepared(params, {"a": (8192, 0), "b": (0, 8192)})
    look = Looks()
    run(backend, params, arrays, results, look)
    assert not results["d"].any()
    assert look.longest_s < SLACK * BETWEEN_LOOKS_S
    assert look.count > 15
    results["d"][:] = 77
    with pytest.raises(JobCancelled):
        run(backend, params, arrays, results, Looks(most=5))
    assert (results["d"] == 77).mean() > 0.5


@pytest.mark.parametrize("reduce", [["sum"], ["argmax", "absmin", "sumsq"]])
def test_a_reduced_axis_is_no_hiding_place(backend, reduce):
    """It is never cut into panels; the kernels look within it."""
    params = reduction("m", reduce)
    _, arrays, results = prepared(params, {"a": (1 << 22, 1), "b": (1, 16)})
    with pytest.raises(JobCancelled):
        run(backend, params, arrays, results, Looks(most=5))
    look = Looks()
    run(backend, params, arrays, results, look)
    assert look.longest_s < SLACK * BETWEEN_LOOKS_S
    if reduce == ["sum"]:
        assert results["sum"].tolist() == [1 << 22] * 16


def test_long_sums_are_made_in_parts(backend):
    params = GemmParams()
    k = 1 << 22
    _, arrays, results = prepared(params, {"a": (1, k), "b": (k, 1)}, "f8")
    look = Looks()
    run(backend, params, arrays, results, look)
    assert results["d"].item() == k
    assert look.count > 16


def test_small_products_are_repeated_without_a_look_only_where_they_are_small(backend):
    def repeated(params, shapes):
        _, arrays, results = prepared(params, shapes)
        return backend.repeated(params, arrays, results)

    assert repeated(GemmParams(), {"a": (64, 64), "b": (64, 64)}) is not None
    assert repeated(GemmParams(), {"a": (4096, 0), "b": (0, 4096)}) is None
    assert repeated(reduction(), {"a": (64, 64), "b": (64, 8)}) is not None
    assert repeated(reduction(), {"a": (8192, 1), "b": (1, 8192)}) is None


@pytest.mark.parametrize(
    ("a", "b"),
    [((6 << 20, 1), (1, 1)), ((1, 1), (1, 6 << 20)), ((1 << 20, 1, 1), (1, 1)), ((1, 6 << 20), (6 << 20, 1))],
    ids=["rows", "columns", "batch", "terms"],
)
def test_a_check_looks_however_thin_the_product_is(a, b):
    params = GemmParams()
    _, arrays, results = prepared(params, {"a": a, "b": b}, "f8")
    results["d"][:] = a[-1]
    look = Looks()
    with interruptible(look):
        found = find(params, arrays, results, seed=1)
    look()
    assert (found.residual, found.excess, found.element.excess) == (0, 0, 0)
    assert look.longest_s < SLACK / 2 * BETWEEN_LOOKS_S
    assert look.count > 50
    with interruptible(Looks(most=20)), pytest.raises(JobCancelled):
        find(params, arrays, results, seed=1)


EXTENTS = st.sampled_from([0, 0, 1, 1, 2, 3, 64, 1000, 1 << 20, 1 << 22, HUGE])
LEADS = st.lists(st.sampled_from([1, 2, 1 << 10, 1 << 20, HUGE, 0]), max_size=2)


@st.composite
def products(draw):
    lead = tuple(draw(LEADS))
    m, n, k = draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    shared = draw(st.booleans())
    shapes = {"a": (*lead, m, k), "b": (k, n) if shared else (*lead, k, n)}
    dtype = draw(st.sampled_from(["f2", "f4", "c16"]))
    if draw(st.booleans()):
        return GemmParams(order=draw(st.sampled_from("CF")), alpha=draw(st.sampled_from([1, 2]))), shapes, dtype
    axis = [draw(st.sampled_from("mn")), *draw(st.sampled_from([[], ["batch"]]))]
    reduce = draw(st.sampled_from([["sum"], ["sumsq"], ["sum", "argmax", "absmin"]]))
    return reduction(axis, reduce, return_c=draw(st.booleans())), shapes, dtype


def admitted(params, shapes, dtype):
    """Whether a test has the memory and the time for it; of what is not formed there may be any number."""
    if any(math.prod(shape) * np.dtype(dtype).itemsize > MOST_BYTES for shape in shapes.values()):
        return False
    try:
        problem = build(
            params, {name: Operand.contiguous(shape, np.dtype(dtype), "C") for name, shape in shapes.items()}
        )
    except KernelError:
        return False
    formed = problem.batch * problem.m * problem.n if problem.k else 0
    return problem.nbytes() <= MOST_BYTES and problem.flops() <= MOST_FLOPS and formed <= MOST_FORMED


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(products().filter(lambda product: admitted(*product)))
def test_a_worker_looks_whatever_the_shapes(backend, product):
    params, shapes, dtype = product
    _, arrays, results = prepared(params, shapes, dtype)
    look = Looks()
    run(backend, params, arrays, results, look)
    assert look.longest_s < SLACK * BETWEEN_LOOKS_S
