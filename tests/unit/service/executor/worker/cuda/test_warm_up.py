"""Preparations of a device: in which order, when, and what is put on record. The device is a list."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import sources
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_service.executor.worker.cuda import recent_kernels, warm_up
from gemmserve_service.executor.worker.cuda.idleness import Idleness
from gemmserve_service.executor.worker.cuda.warm_up import WarmUp

WAIT_S = 60.0
RECENT = KernelSource("gemm", (("RECENT", "1"),)), "gemm_kernel"
CUPY = SimpleNamespace(empty=np.empty)


@pytest.fixture
def done(monkeypatch, tmp_path):
    """What was loaded, and the vendor's products; everything is compiled but what is in `missing`."""
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    found = SimpleNamespace(loaded=[], blas=[], missing=set())
    monkeypatch.setattr(compiler, "compiled_file", lambda source, _: None if source in found.missing else "a file")
    monkeypatch.setattr(compiler, "load", lambda source, entry, *_: found.loaded.append((source, entry)))
    monkeypatch.setattr(warm_up, "gemm", lambda a, b, config: found.blas.append((a.dtype.name, config.algorithm)))
    return found


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_was_used_last_is_loaded_first_and_then_the_likeliest(done):
    spec = KNOWN["H200"]
    recent_kernels.write(spec.arch, [RECENT])
    for step in itertools.islice(WarmUp(CUPY, spec, 0, lambda: None, Idleness()).steps(), 12):
        step()
    assert done.loaded[0] == RECENT
    assert done.blas == [(dtype, "vendor") for dtype in ("complex64", "float32", "complex128", "float64", "float16")]
    likely = sources(Case(m=1024, n=1024, k=1024), spec, every=False)
    assert likely <= {source for source, _ in done.loaded}


def test_nothing_is_compiled(done):
    recent_kernels.write("sm_90a", [RECENT])
    done.missing.add(RECENT[0])
    next(WarmUp(CUPY, KNOWN["H200"], 0, lambda: None, Idleness()).steps())()
    assert done.loaded == []


def test_it_waits_while_there_are_tasks_and_goes_on_after_a_failure(done, monkeypatch):
    entered, ran, busy, idleness = threading.Event(), [], threading.Event(), Idleness()
    subject = WarmUp(CUPY, KNOWN["H200"], 0, entered.set, idleness)

    def fails():
        raise RuntimeError("no memory")

    monkeypatch.setattr(WarmUp, "steps", lambda _: iter([fails, lambda: ran.append(1)]))
    monkeypatch.setattr(WarmUp, "record", lambda _, recorded: recorded)
    busy.set()
    asked = []

    def is_busy():
        asked.append(1)
        return busy.is_set()

    idleness.follow(is_busy)
    subject.begin()
    until(lambda: len(asked) > 2)
    assert entered.is_set()
    assert ran == []
    assert not subject.over
    subject.begin()  # the next front
    busy.clear()
    until(lambda: subject.over)
    assert ran == [1]


def test_who_needs_memory_waits_for_the_step_that_has_some(done, monkeypatch):
    subject = WarmUp(CUPY, KNOWN["H200"], 0, lambda: None, Idleness())
    assert not subject.yield_memory()
    begun, go = threading.Event(), threading.Event()

    def step():
        begun.set()
        go.wait(WAIT_S)

    monkeypatch.setattr(WarmUp, "steps", lambda _: iter([step]))
    monkeypatch.setattr(WarmUp, "record", lambda _, recorded: recorded)
    subject.begin()
    assert begun.wait(WAIT_S)
    waited = []
    waiting = threading.Thread(target=lambda: waited.append(subject.yield_memory()))
    waiting.start()
    waiting.join(0.05)
    assert waited == []
    go.set()
    waiting.join(WAIT_S)
    assert waited == [True]
    until(lambda: subject.over)
    assert not subject.yield_memory()


def test_what_was_used_is_on_record(done, monkeypatch):
    used = [RECENT]
    monkeypatch.setattr(warm_up, "used_kernels", lambda: list(used))
    subject = WarmUp(CUPY, KNOWN["H200"], 0, lambda: None, Idleness())
    recorded = subject.record([])
    assert recent_kernels.read("sm_90a") == [RECENT]
    later = KernelSource("gemm", (("LATER", "1"),)), "gemm_kernel"
    used.append(later)
    subject.record(recorded)
    assert recent_kernels.read("sm_90a") == [later, RECENT]
    monkeypatch.setattr(recent_kernels, "write", lambda *_: pytest.fail("there is nothing new"))
    assert subject.record(used) == used
