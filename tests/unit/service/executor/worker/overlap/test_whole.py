"""Programs and batches beside products: the same way, memory that runs out, cancellations."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from staged_devices import WAIT_S, A, until
from works import form_of, packed

from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.executor.protocol import (
    Cancel,
    Forget,
    Part,
    RunBatch,
    Work,
)
from gemmserve_service.executor.worker import loop
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.schemas import GemmParams, ProgramParams


def test_a_check_and_a_program_go_the_same_way(front, task, place):
    checked, _ = task("checked", 1.0, verify=True)
    whole, _ = task("whole", 1.0)
    out, view = place(np.zeros((3, 3)))
    step = {"id": "x", "op": "gemm", "a": "arr_" + "0" * 26, "b": "arr_" + "0" * 26, "trans_b": "T"}
    program = dataclasses.replace(
        whole,
        params=ProgramParams(steps=[step]),
        operands={"arr_" + "0" * 26: whole.operands["a"]},
        results={"x": out},
    )
    front.send(checked, program)
    first, second = front.answers(2)
    assert (first.kind, second.kind) == ("done", "done"), (first, second)
    assert first.residual < 1e-14
    np.testing.assert_array_equal(np.frombuffer(view).reshape(3, 3), A @ A.T)


@pytest.mark.parametrize("times", [1, 2])
def test_a_program_that_others_left_too_little_memory_runs_again_alone(front, backend, task, place, times):
    """In its lane, and then with nothing in the other."""
    tries = []

    def run_program(run, checkpoint):
        tries.append(len(tries))
        if len(tries) <= times:
            raise OutOfDeviceMemory("others hold it")
        return CpuBackend.run_program(backend, run, checkpoint)

    backend.run_program = run_program
    whole, _ = task("whole", 1.0)
    out, view = place(np.zeros((3, 3)))
    name = "arr_" + "0" * 26
    step = {"id": "x", "op": "gemm", "a": name, "b": name, "trans_b": "T"}
    program = dataclasses.replace(
        whole,
        params=ProgramParams(steps=[step]),
        operands={name: whole.operands["a"]},
        results={"x": out},
    )
    after, result = task("after", 2.0)
    front.send(program, after)
    assert [(answer.kind, answer.task) for answer in front.answers(2)] == [("done", "whole"), ("done", "after")]
    assert tries == list(range(times + 1))
    np.testing.assert_array_equal(np.frombuffer(view).reshape(3, 3), A @ A.T)
    np.testing.assert_array_equal(result(), 2 * A @ A.T)


@pytest.mark.parametrize("express", [False, True])
def test_a_program_that_is_cancelled_while_memory_runs_out_is_not_run_again(front, backend, task, place, held, express):
    tries, runner = [], front.runner

    def run_program(run, checkpoint):
        tries.append(len(tries))
        front.send(Cancel(task="whole"))
        until(lambda: runner.is_cancelled("whole"))
        raise OutOfDeviceMemory("others hold it")

    backend.run_program = run_program
    before, _ = task("before", 1.0)
    front.send(before)
    assert held.reached.wait(WAIT_S)
    if not express:
        held.go()
    whole, _ = task("whole", 2.0, express=express)
    out, _ = place(np.zeros((3, 3)))
    name = "arr_" + "0" * 26
    step = {"id": "x", "op": "gemm", "a": name, "b": name, "trans_b": "T"}
    params = ProgramParams(steps=[step])
    front.send(dataclasses.replace(whole, params=params, operands={name: whole.operands["a"]}, results={"x": out}))
    until(lambda: tries)
    held.go()
    answers = {answer.task: answer for answer in front.answers(2)}
    assert (answers["whole"].kind, answers["whole"].slug) == ("failed", "cancelled")
    assert tries == [0]
    assert not runner.is_cancelled("whole"), "its cancellation is forgotten"


def test_one_thread_alone_reads_what_the_front_sends(front, place, monkeypatch):
    """A batch is run whole, in a thread of its own, and looks between its parts whether it is cancelled."""
    monkeypatch.setattr(loop, "_LOOK_S", 0.0)
    readers = set()
    take = loop._Line._take

    def noting(line, *flags):
        readers.add(threading.current_thread())
        return take(line, *flags)

    monkeypatch.setattr(loop._Line, "_take", noting)
    ref, _ = place(A)
    out, view = place(np.zeros((50, 3, 3)))
    rows = [(each.extent, each.path, each.capacity, each.offset, None) for each in (ref, out)]
    one = SimpleNamespace(dtype="float64", shape=(3, 3), order="C")
    parts = [
        Part(
            form=form_of(GemmParams(trans_b="T", alpha=number), {"a": ref, "b": ref}, {"d": one}),
            algorithm="numpy",
            operands={"a": [(0, 0)], "b": [(0, 0)]},
            results={"d": [(1, 72 * number)]},
        )
        for number in range(50)
    ]
    front.send(RunBatch(tasks=[Work(task="batch", extents=rows, parts=parts)]))
    for _ in range(20):
        front.send(Forget(extents=["e" * 1000]))
    (answer,) = front.answers(1)
    assert answer.kind == "done", answer
    np.testing.assert_array_equal(np.frombuffer(view).reshape(50, 3, 3)[49], 49 * A @ A.T)
    assert readers <= {front.thread}


def test_an_express_batch_whose_memory_runs_out_runs_again_in_its_turn(front, backend, task, held):
    tries = []

    def run_many(products, checkpoint):
        tries.append(threading.current_thread().name)
        if len(tries) == 1:
            raise OutOfDeviceMemory("others hold it")
        return CpuBackend.run_many(backend, products, checkpoint)

    backend.run_many = run_many
    first, (second, result) = task("t1", 1.0), task("t2", 2.0, express=True)
    front.send(first[0])
    assert held.reached.wait(WAIT_S)
    batch = packed(second)
    (work,) = batch.tasks
    front.send(RunBatch(tasks=[replace(work, parts=[*work.parts, *work.parts])]))
    until(lambda: tries)
    held.go()
    assert {answer.task for answer in front.answers(2)} == {"t1", "t2"}
    assert tries[0] == "gemmserve-express-compute"
    assert set(tries[1:]) == {"gemmserve-compute"}
    np.testing.assert_array_equal(result(), 2 * A @ A.T)
