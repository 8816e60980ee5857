"""Tiny products on a device with a shorter way for them: what goes it, what does not, what goes wrong."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from staged_devices import WAIT_S, A, AtOnce, NoRoomError, Short, Staged, until
from works import form_of, packed

from gemmserve_kernels.blocks.grid import DEFAULT_RULE, GridRule
from gemmserve_service.executor.protocol import Cancel, Kind
from gemmserve_service.executor.worker import unpack
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.schemas import Elements, GemmParams

STEPS = ["begin", "store", "over"]


def kept_nowhere(message, *, result=None, operands=None):
    """The message with ids of immutable arrays, of the result and of both operands, where they are given."""
    refs = {name: replace(ref, cache_id=operands) for name, ref in message.operands.items()}
    return replace(message, operands=refs, results={"d": replace(message.results["d"], cache_id=result)})


def test_a_tiny_product_goes_the_shorter_way_where_the_device_has_one(quick, task):
    backend, front = quick.backend, quick.front
    backend.there["a"], backend.counted = A, Elements(planned=9)
    for number, ids in enumerate([{"operands": "a", "result": "d"}, {"operands": "a"}, {}]):
        message, result = task(f"t{number}", 1.0, express=number > 1)
        front.send(kept_nowhere(message, **ids))
        (answer,) = front.answers(1)
        assert (answer.kind, answer.task, answer.algorithm, answer.written) == ("done", f"t{number}", "numpy", True)
        assert (answer.timings.kernel_s, answer.elements) == (2.0, Elements(planned=9))
        np.testing.assert_array_equal(result(), A @ A.T)
    assert quick.steps() == ["asked", *STEPS * 3], "the form is looked at once"
    assert list(backend.kept) == ["d"], "what has an id stays"


def test_who_asks_hears_of_a_task_on_the_shorter_way(task):
    """A device that hangs there is noticed by it."""
    backend = AtOnce()
    answers, seen = [], []
    overlap = Overlap(Runner(backend), backend, answers.append)
    before = overlap.at[1]
    backend.faults = {(1.0, "begin"): lambda: seen.append(overlap.at)}
    (work,) = packed(task("t", 1.0, express=True)[0]).tasks
    overlap.start(work)
    assert [answer.task for answer in answers] == ["t"]
    assert seen[0][0] == "t"
    assert seen[0][1] > before
    assert overlap.at[0] is None
    overlap.close()


@pytest.mark.parametrize("fields", [{"verify": True}, {"operands": "b"}, {"defer": True, "placeless": True}], ids=str)
def test_what_the_shorter_way_is_not_for(quick, task, fields):
    front = quick.front
    operands, placeless = fields.pop("operands", None), fields.pop("placeless", False)
    message, _ = task("t", 1.0, **{"express": True, **fields})
    message = kept_nowhere(message, operands=operands, result="d" if placeless else None)
    if placeless:
        ref = replace(message.results["d"], extent=None, path="", capacity=0, offset=0)
        message = replace(message, results={"d": ref})
    front.send(message)
    (answer,) = front.answers(1)
    assert answer.kind == "done"
    assert not {"begin", "over"} & set(quick.steps())
    assert "compute" in quick.steps()


def test_blocks_and_what_is_not_tiny_never_go_the_shorter_way(monkeypatch):
    backend = AtOnce()

    def found(shape=(100, 100), rule=DEFAULT_RULE, backend=backend):
        kind = Kind(dtype="float64", shape=shape, order="C")
        runner = Runner(backend, rule)
        return runner.tiny(runner.form(form_of(GemmParams(trans_b="T"), {"a": kind, "b": kind}, {"d": kind})))

    monkeypatch.setattr(unpack, "TINY", 3 * 80_000)
    assert isinstance(found(), Short)
    assert found(rule=GridRule(16)) is None, "it has blocks"
    assert found((100, 0)) is None
    assert found(backend=Staged()) is None
    monkeypatch.setattr(unpack, "TINY", 3 * 80_000 - 1)
    assert found() is None
    assert [stage for stage, _ in backend.log] == ["asked"]


def test_the_shorter_way_is_not_taken_beside_something_else(quick, task):
    backend, front = quick.backend, quick.front
    go_on = threading.Event()
    backend.faults = {(1.0, "compute"): lambda: go_on.wait(WAIT_S)}
    front.send(task("long", 1.0, verify=True)[0])
    until(lambda: ("load", 1.0) in backend.log)
    front.send(task("t", 2.0, express=True)[0])
    assert front.answers(1)[0].task == "t"
    go_on.set()
    front.answers(1)
    assert not {"begin", "over"} & set(quick.steps())


def test_a_product_without_room_on_the_shorter_way_goes_to_the_others(quick, task, computed_by):
    def full():
        raise NoRoomError

    backend, front = quick.backend, quick.front
    for step in ("begin", "over"):
        backend.faults = {(1.0, step): full}
        message, result = task(step, 1.0, express=True)
        front.send(message)
        assert [(answer.kind, answer.task) for answer in front.answers(1)] == [("done", step)]
        np.testing.assert_array_equal(result(), A @ A.T)
    assert quick.steps().count("compute") == 2


def test_prompt_messages_run_between_the_tasks_of_others_one_at_a_time(quick, task):
    backend, front = quick.backend, quick.front
    reached, go_on = threading.Event(), threading.Event()
    backend.faults = {(1.0, "begin"): lambda: (reached.set(), go_on.wait(WAIT_S))}
    results = {}

    def sent(*numbers):
        messages = [task(f"t{number}", float(number), express=True) for number in numbers]
        results.update(zip(numbers, [result for _, result in messages], strict=True))
        return packed(*[message for message, _ in messages])

    front.send(sent(1, 2, 3, 4))
    assert reached.wait(WAIT_S)
    front.send(sent(5), replace(sent(7, 8), prompt=True), replace(sent(9), prompt=True))
    go_on.set()
    answers = front.answers(8)
    order = [1, 7, 8, 2, 9, 3, 4, 5]
    assert [alpha for stage, alpha in backend.log if stage == "begin"] == order
    assert {(answer.task, answer.kind) for answer in answers} == {(f"t{number}", "done") for number in order}
    for number, result in results.items():
        np.testing.assert_array_equal(result(), number * (A @ A.T))
    front.send(replace(sent(6), prompt=True))
    assert front.answers(1)[0].task == "t6", "nothing else was there"


def test_what_was_begun_is_answered_though_the_front_says_no_more(quick, task):
    """The front's end of the conversation may be closed while tasks of a message are started."""
    backend, front = quick.backend, quick.front
    reached, go_on = threading.Event(), threading.Event()
    backend.faults = {(1.0, "begin"): lambda: (reached.set(), go_on.wait(WAIT_S))}
    front.send(packed(*[task(f"t{number}", float(number), express=True)[0] for number in (1, 2, 3)]))
    assert reached.wait(WAIT_S)
    front.near.shutdown(socket.SHUT_WR)
    go_on.set()
    assert {answer.task for answer in front.answers(3)} == {"t1", "t2", "t3"}


def test_an_error_on_the_shorter_way_is_answered(quick, task):
    def wrong():
        raise ValueError("no")

    backend, front = quick.backend, quick.front
    backend.faults = {(1.0, "over"): wrong}
    front.send(task("t", 1.0, express=True)[0])
    (answer,) = front.answers(1)
    assert (answer.kind, answer.task, answer.status) == ("failed", "t", 500)
    message, _ = task("gone", 2.0, express=True)
    ref = replace(message.results["d"], extent="gone", path=message.results["d"].path + "-gone")
    front.send(replace(message, results={"d": ref}))
    (answer,) = front.answers(1)
    assert (answer.kind, answer.task) == ("failed", "gone")
    assert backend.log[-2:] == [("begin", 2.0), ("over", 2.0)], "nothing is left on the device"
    front.send(task("after", 3.0, express=True)[0])
    assert front.answers(1)[0].kind == "done"


def test_a_product_that_nobody_wants_is_not_computed_on_the_shorter_way(quick, task):
    quick.front.send(Cancel(task="t"))
    quick.front.send(task("t", 1.0, express=True)[0])
    (answer,) = quick.front.answers(1)
    assert (answer.kind, answer.slug) == ("failed", "cancelled")
    assert not {"begin", "compute"} & set(quick.steps())
