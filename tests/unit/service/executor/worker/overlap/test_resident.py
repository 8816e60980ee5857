"""Products of what the device has, whose results stay there: begun behind each other, answered together, in order."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from keeping_devices import ROOM, WAIT_S, A, Front, Keeping, Made, Product, placing, squares
from staged_devices import until
from works import packed

from gemmserve_service.executor.protocol import Cancel, Drop, Stop, Write
from gemmserve_service.executor.worker import loop, pipeline
from gemmserve_service.executor.worker.backend import call
from gemmserve_service.executor.worker.overlap import resident
from gemmserve_service.executor.worker.overlap.overlap import Overlap
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.schemas import Elements, Timings


class Streaming(Keeping):
    """A device that is given products of what it has, and is done with them when `go` is set."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.begun = []
        """Threads that have begun such products."""
        self.finished = []
        self.order = []
        """What they did, in order."""
        self.fails = {}
        """What is raised by step."""

    def resident(self, params, operands, results):
        assert list(operands) == ["a", "b"]
        assert list(results) == ["d"]
        return Stream(self, params)


class Stream:
    def __init__(self, backend, params):
        self.backend, self.params = backend, params

    def resident(self, arrays):
        return self.backend.copies.resident.use(arrays)

    def begin(self, operands):
        self.backend.begun.append(threading.current_thread())
        self.backend.order.append("begin")
        if "begin" in self.backend.fails:
            raise self.backend.fails["begin"]
        made = np.empty((3, 3))
        call(self.params, {"a": operands[0].array, "b": operands[1].array}, {"d": made})
        return Begun(self.backend, {"d": Made(made)})


class Begun:
    def __init__(self, backend, made):
        self.backend, self.made = backend, made

    @property
    def over(self):
        return self.backend.go.is_set()

    def finish(self):
        self.backend.finished.append(threading.current_thread())
        self.backend.order.append("finish")
        assert self.backend.go.wait(WAIT_S)
        if "finish" in self.backend.fails:
            raise self.backend.fails["finish"]
        return Timings(kernel_s=1e-3), Elements(planned=9)


@pytest.fixture
def backend():
    return Streaming()


@pytest.fixture
def front(backend):
    front = Front(backend)
    yield front
    backend.go.set()
    front.end()


@pytest.fixture
def place(tmp_path):
    return placing(tmp_path)


@pytest.fixture
def product(place):
    """A square whose result stays, by an express task."""
    make = squares(place)
    return lambda operand, **fields: make(operand, **{"express": True, **fields})


@pytest.fixture
def there(front, backend, place, product):
    """An operand that the device has."""
    ref, _ = place(A, "a")
    front.send(product(ref, defer=False)[0])
    front.hear("done")
    backend.begun.clear()
    backend.order.clear()
    return ref


@pytest.fixture
def stage(monkeypatch):
    """Has something called at the begin of a stage of products that go the way of all others."""

    def at(name, what):
        method = getattr(Product, name)

        def noted(self):
            what(self)
            return method(self)

        monkeypatch.setattr(Product, name, noted)

    return at


def test_products_are_begun_behind_each_other_and_answered_together(front, backend, there, product, monkeypatch):
    monkeypatch.setattr(loop, "_MAX_HOLD_S", 3600.0)
    backend.go.clear()
    many = [product(there) for _ in range(3)]
    front.send(packed(*[message for message, _, _ in many[:2]]), many[2][0])
    until(lambda: len(backend.begun) == 3 and backend.finished)
    assert len(backend.finished) == 1, "the oldest alone is waited for"
    backend.go.set()
    first, *others = front.hear("done", "done", "done")
    assert [done.task for done in (first, *others)] == [message.task for message, _, _ in many]
    assert (first.written, first.algorithm, first.elements) == (False, "numpy", Elements(planned=9))
    assert first.timings.kernel_s == 1e-3
    assert set(backend.begun) == set(backend.finished) == {front.thread}, "no other thread was woken"
    for message, _, (places, view) in many:
        front.send(Write(task=message.task, places=places))
        assert front.written(1) == [message.task]
        np.testing.assert_array_equal(view, A @ A)


def test_of_many_those_that_are_over_are_answered_before_the_last_is_begun(front, backend, there, product, monkeypatch):
    monkeypatch.setattr(loop, "_MAX_HOLD_S", 0.0)
    many = [product(there)[0] for _ in range(ROOM)]
    front.send(packed(*many))
    assert [done.task for done in front.hear(*["done"] * ROOM)] == [message.task for message in many]
    assert set(backend.begun) == set(backend.finished) == {front.thread}
    assert backend.order[:4] == ["begin", "finish", "begin", "finish"]


def test_more_than_the_device_is_given_at_a_time_wait_for_the_oldest(front, backend, there, product, monkeypatch):
    monkeypatch.setattr(loop, "_MAX_HOLD_S", 3600.0)
    monkeypatch.setattr(pipeline, "_MOST_AHEAD", 2)
    many = [product(there)[0] for _ in range(ROOM)]
    backend.go.clear()
    front.send(packed(*many))
    until(lambda: backend.finished)
    assert len(backend.begun) == 2
    backend.go.set()
    assert [done.task for done in front.hear(*["done"] * len(many))] == [message.task for message in many]
    assert set(backend.begun) == set(backend.finished) == {front.thread}, "no other thread was woken"


def test_those_that_are_over_go_with_one_account_of_the_copies(front, backend, there, product):
    backend.go.clear()
    front.send(packed(*[product(there)[0] for _ in range(3)]))
    until(lambda: backend.finished)
    backend.go.set()
    kinds = [front.next().kind for _ in range(4)]
    while kinds[0] == "kept" == kinds[1]:  # of the first product
        kinds = [*kinds[1:], front.next().kind]
    assert kinds == ["kept", "done", "done", "done"]


def test_a_result_is_the_operand_of_the_next(front, backend, there, product):
    first, square, _ = product(there)
    front.send(first)
    front.hear("done")
    second, _, (places, view) = product(square)
    front.send(second)
    front.hear("done")
    assert len(backend.begun) == 2
    front.send(Write(task=second.task, places=places))
    front.hear("written")
    np.testing.assert_array_equal(view, A @ A @ A @ A)


@pytest.mark.parametrize(
    "fields", [{"verify": True}, {"express": False}, {"defer": False}, {"operand": None}, {"operand": "other"}], ids=str
)
def test_what_goes_the_way_of_all_others(front, backend, there, place, product, fields):
    if "operand" in fields:  # one that is kept nowhere, one that is not there
        there, _ = place(A, fields.pop("operand"))
    front.send(product(there, **fields)[0])
    front.hear("done")
    assert not backend.begun


def test_a_product_that_nobody_wants_is_not_begun(front, backend, there, product):
    message, _, _ = product(there)
    front.send(Cancel(task=message.task), message)
    assert front.hear("failed")[0].slug == "cancelled"
    assert not backend.begun


def test_answers_keep_the_order_of_the_tasks(front, backend, there, place, product, stage):
    """Behind one that has to be brought, and before one."""
    go_on, loading = threading.Event(), threading.Event()
    stage("load", lambda _: (loading.set(), go_on.wait(WAIT_S)))
    slow, _, _ = product(place(A, "b")[0])
    front.send(slow)
    assert loading.wait(WAIT_S)
    behind = [product(there)[0] for _ in range(2)]
    front.send(packed(*behind))
    assert not backend.begun
    go_on.set()
    assert [done.task for done in front.hear("done", "done", "done")] == [slow.task, *[each.task for each in behind]]
    front.send(Drop(tasks=[slow.task, *[each.task for each in behind]]))
    front.written(3)
    backend.go.clear()
    backend.begun.clear()
    before, after = product(there)[0], product(place(A, "c")[0])[0]
    front.send(packed(before, after))
    until(lambda: backend.begun)
    backend.go.set()
    assert [done.task for done in front.hear("done", "done")] == [before.task, after.task]


def test_messages_are_read_while_the_device_has_a_long_task(front, backend, there, product, stage):
    go_on, computing = threading.Event(), threading.Event()
    first, _, _ = product(there)
    front.send(first)
    front.hear("done")
    stage("finish", lambda product: (computing.set(), go_on.wait(WAIT_S)))
    long, _, _ = product(there, express=False)
    front.send(long)
    assert computing.wait(WAIT_S)
    backend.go.clear()
    message, _, _ = product(there)
    front.send(message)
    until(lambda: len(backend.begun) == 2)
    front.send(Drop(tasks=[first.task]))
    assert front.written(1) == [first.task]
    backend.go.set()
    assert front.hear("done")[0].task == message.task
    assert backend.finished[-1].name == "gemmserve-express-finish"
    go_on.set()
    assert front.hear("done")[0].task == long.task


def test_messages_are_read_while_a_product_takes_longer(front, backend, there, product, monkeypatch):
    monkeypatch.setattr(resident, "_SHORT", 3 * A.nbytes - 1)
    first, _, _ = product(there)
    front.send(first)
    front.hear("done")
    backend.go.clear()
    many = [product(there)[0] for _ in range(2)]
    front.send(packed(*many))
    until(lambda: len(backend.finished) == 2)
    front.send(Drop(tasks=[first.task]))
    assert front.written(1) == [first.task]
    backend.go.set()
    assert [done.task for done in front.hear("done", "done")] == [message.task for message in many]
    assert set(backend.begun) == {front.thread}
    assert {thread.name for thread in backend.finished} == {"gemmserve-express-finish"}


def test_what_finds_no_room_waits_and_messages_are_read(front, backend, there, product):
    many = [product(there) for _ in range(ROOM + 1)]
    front.send(packed(*[message for message, _, _ in many[:ROOM]]))
    front.hear(*["done"] * ROOM)
    assert len(backend.begun) == ROOM
    front.send(many[-1][0])
    front.send(Write(task=many[0][0].task, places=many[0][2][0]))
    last, written = front.hear_both("done", "written")
    assert (last.task, written.tasks) == (many[-1][0].task, [many[0][0].task])
    assert len(backend.begun) == ROOM


def test_room_is_kept_for_what_is_begun(front, backend, there, product):
    backend.go.clear()
    many = [product(there) for _ in range(ROOM + 1)]
    front.send(packed(*[message for message, _, _ in many]))
    until(lambda: len(backend.begun) == ROOM and backend.finished)
    backend.go.set()
    front.hear(*["done"] * ROOM)
    assert len(backend.begun) == ROOM
    front.send(Write(task=many[0][0].task, places=many[0][2][0]))
    assert front.hear_both("done", "written")[0].task == many[-1][0].task


@pytest.mark.parametrize("step", ["begin", "finish"])
def test_what_failed_keeps_no_room(front, backend, there, product, step):
    backend.fails[step] = ValueError("no")
    for _ in range(ROOM + 1):
        front.send(product(there)[0])
        front.hear("failed")
    backend.fails.clear()
    backend.begun.clear()
    front.send(packed(*[product(there)[0] for _ in range(ROOM)]))
    front.hear(*["done"] * ROOM)
    assert len(backend.begun) == ROOM


def test_a_product_without_memory_goes_to_the_long_ones(front, backend, there, product):
    backend.fails["begin"] = MemoryError("the device is full")
    message, _, (places, view) = product(there)
    front.send(message)
    assert front.hear("done")[0].task == message.task
    assert len(backend.begun) == 1
    front.send(Write(task=message.task, places=places))
    front.hear("written")
    np.testing.assert_array_equal(view, A @ A)


@pytest.mark.parametrize("step", ["begin", "finish"])
def test_an_error_is_the_answer_of_its_product_alone(front, backend, there, product, step):
    front.send(product(there)[0])
    front.hear("done")
    backend.fails[step] = ValueError("no")
    message, _, _ = product(there)
    front.send(message)
    (failed,) = front.hear("failed")
    assert (failed.task, failed.status) == (message.task, 500)
    assert backend.write_queue.nbytes == A.nbytes
    backend.fails.clear()
    message, _, _ = product(there)
    front.send(message)
    assert front.hear("done")[0].task == message.task


@pytest.mark.parametrize("stops", [False, True])
def test_a_front_that_goes_or_stops(backend, place, product, stops):
    front = Front(backend)
    ref, _ = place(A, "a")
    front.send(product(ref, defer=False)[0])
    front.hear("done")
    backend.go.clear()
    messages = [product(ref)[0] for _ in range(2)]
    front.send(packed(*messages))
    until(lambda: backend.finished)
    if stops:
        front.send(Stop())
        backend.go.set()
        assert [done.task for done in front.hear("done", "done")] == [message.task for message in messages]
    threading.Timer(0.05, backend.go.set).start()
    front.end()
    assert backend.write_queue.nbytes == 0


def test_who_asks_hears_of_a_product_that_is_under_way(backend, place, product):
    """A device that hangs there is noticed by it."""
    answers = []
    overlap = Overlap(Runner(backend), backend, answers.append)
    ref, _ = place(A, "a")
    backend.copies.resident.put("a", Made(A), A.nbytes)
    (work,) = packed(product(ref)[0]).tasks
    steps = overlap.at[1]
    assert not overlap.begun
    overlap.start(work)
    assert overlap.begun
    assert (overlap.at[0], answers) == (work.task, [])
    assert overlap.at[1] > steps
    assert overlap.settle()
    assert [answer.task for answer in answers] == [work.task]
    assert overlap.at[0] is None
    assert not overlap.begun
    assert not overlap.settle()
    overlap.close()


def test_a_tiny_product_is_answered_behind_those_that_are_under_way(backend, place, product):
    class Tiny:
        def resident(self, arrays):
            return [Made(A)] * len(arrays)

        def begin(self, operands):
            pass

        def store(self, name, memory):
            memory[:] = A.view(np.uint8).reshape(-1)

        def finish(self, kept):
            return Timings(), None

    backend.tiny = lambda *_: Tiny()
    answers = []
    overlap = Overlap(Runner(backend), backend, lambda answer: answers.append(answer.task))
    ref, _ = place(A, "a")
    backend.copies.resident.put("a", Made(A), A.nbytes)
    message, _, _ = product(ref)
    tiny, _, (_, view) = product(replace(ref, cache_id="b"), defer=False)
    for work in packed(message, tiny).tasks:
        overlap.start(work)
    assert answers == [message.task, tiny.task]
    np.testing.assert_array_equal(view, A)
    overlap.close()
