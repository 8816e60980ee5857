"""Tasks that wait for their kernels: compiled beside everything else, together, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemmserve_service.executor.worker.compilation import Compilation

WAIT_S = 60.0


class Compiler:
    """A backend whose kernels are names; those in `held` are compiled when they are let go."""

    def __init__(self):
        self.there = set()
        self.begun = []
        self.compiled = []
        self.held = {}

    def missing_kernels(self, params, operands, *, checked):
        if params is None:
            raise ValueError("no plan")
        return [name for name in (*params, *(["check"] if checked else [])) if name not in self.there]

    def compile_kernel(self, kernel):
        self.begun.append(kernel)
        if kernel in self.held:
            assert self.held[kernel].wait(WAIT_S)
        if kernel == "broken":
            raise RuntimeError("it does not compile")
        self.compiled.append(kernel)
        self.there.add(kernel)


def form(*kernels):
    return SimpleNamespace(params=kernels or None, operands={}, compiled=set())


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Stage:
    def __init__(self):
        self.backend = Compiler()
        self.told = []
        self.gone_on = {}
        self.compilation = Compilation(self.backend, lambda task, compiling: self.told.append((task, compiling)))

    def put(self, task, *forms, checked=False):
        self.compilation.put(task, forms, lambda seconds: self.gone_on.setdefault(task, seconds), checked=checked)


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    for event in stage.backend.held.values():
        event.set()
    stage.compilation.abandon()


def test_a_task_whose_kernels_are_there_does_not_wait(stage):
    known = form("a")
    stage.backend.there.add("a")
    stage.put("one", known)
    until(lambda: stage.gone_on)
    stage.put("two", known)  # in this thread
    assert stage.gone_on == {"one": 0.0, "two": 0.0}
    assert stage.told == []
    stage.put("checked", known, checked=True)
    until(lambda: "checked" in stage.gone_on)
    assert stage.backend.compiled == ["check"]


def test_others_pass_a_task_that_waits(stage):
    stage.backend.held["slow"] = threading.Event()
    slow = form("slow", "quick")
    stage.put("first", slow)
    until(lambda: stage.told == [("first", True)])
    stage.put("likewise", slow)
    stage.put("other", form("else"))
    until(lambda: "other" in stage.gone_on)
    until(lambda: "quick" in stage.backend.compiled)
    assert "first" not in stage.gone_on
    assert stage.compilation.at[0] == "first"
    stage.backend.held["slow"].set()
    stage.compilation.close()
    assert list(stage.gone_on) == ["other", "first", "likewise"]
    assert min(stage.gone_on.values()) > 0
    assert stage.backend.compiled.count("slow") == 1
    for task in ("first", "likewise"):
        assert [compiling for name, compiling in stage.told if name == task] == [True, False]
    assert stage.compilation.at[0] is None


def test_a_batch_waits_for_all_of_its_forms(stage):
    stage.put("batch", form("a"), form("b", "a"))
    stage.compilation.close()
    assert sorted(stage.backend.compiled) == ["a", "b"]
    assert stage.gone_on["batch"] > 0


def test_what_has_no_plan_or_does_not_compile_is_left_to_whoever_runs_it(stage):
    stage.put("no plan", form())
    stage.put("broken", form("broken", "whole"))
    stage.compilation.close()
    assert stage.gone_on.keys() == {"no plan", "broken"}
    assert stage.backend.compiled == ["whole"]


def test_nobody_waits_for_what_was_abandoned(stage):
    stage.backend.held["slow"] = threading.Event()
    stage.put("first", form("slow"))
    until(lambda: stage.backend.begun)
    stage.compilation.abandon()
    assert stage.compilation.at[0] is None
    stage.backend.held["slow"].set()
    until(lambda: stage.backend.compiled == ["slow"])
    assert stage.gone_on == {}
    assert stage.told == [("first", True)]


def test_a_product_that_waited_has_the_algorithm_and_the_bits_that_it_has_with_its_kernels_there(tmp_path):
    """By our own kernels on the CPU shim; another product passes it meanwhile."""
    script = Path(__file__).parents[4] / "support" / "compiled_later_script.py"
    environment = {**os.environ, "GEMMSERVE_KERNEL_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded too early"] == [], "it waited for every kernel that it took"
    assert found["cases"].keys() == {"plain", "tensor cores", "several kernels", "reduced"}
    for name, case in found["cases"].items():
        assert case["waited"] == [True, True, True], name
        assert case["passed"] == "beside", name
        planned, *recorded = case["algorithms"]
        assert recorded == [planned] * 2, name
        assert case["same kernels"], name
        assert case["same bits"], name
        assert case["warm waited"] == 0, name
        assert case.get("error", 0) < 1e-6, name
