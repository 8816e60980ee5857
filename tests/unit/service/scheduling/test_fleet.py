"""Workers by what is asked about them: who is open, idle, of which class, and who has copies of what."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_service.executor.port import NodeLink, Worker, spec_adapter
from gemmserve_service.executor.protocol import Hello
from gemmserve_service.scheduling.fleet import Fleet

H200, A100 = KNOWN["H200"], KNOWN["A100"]


def greet(worker, spec, **fields):
    fields = {"pid": 1, "spec": spec_adapter().dump_python(spec, mode="json"), "verified_error": 0.0} | fields
    worker.greeted(Hello(worker=worker.id, **fields))


def operand(name, nbytes):
    return SimpleNamespace(info=SimpleNamespace(id=name, nbytes=nbytes))


@pytest.fixture
def workers():
    return [Worker(f"cuda:{i}") for i in range(4)]


@pytest.fixture
def fleet(workers):
    return Fleet(SimpleNamespace(workers=lambda: workers))


def ready(fleet, worker, spec=H200, **fields):
    greet(worker, spec, **fields)
    fleet.ready(worker)


def test_equal_devices_are_one_class(fleet, workers):
    for worker, spec in zip(workers, (H200, replace(H200), A100), strict=False):
        ready(fleet, worker, spec)
    assert workers[0].device_class == workers[1].device_class != workers[2].device_class
    assert workers[0].spec is workers[1].spec
    assert {worker.device_class for worker in fleet.representatives} == {each.device_class for each in workers[:3]}
    assert fleet.unknown, "the fourth has not said which device it has"
    ready(fleet, workers[3], DeviceSpec.cpu())
    assert not fleet.unknown
    assert len(fleet.representatives) == 3
    ready(fleet, workers[2])
    assert len(fleet.representatives) == 2, "it came back with another device"


def test_a_worker_that_is_gone_counts_no_more(fleet, workers):
    ready(fleet, workers[0], H200)
    ready(fleet, workers[1], A100, result_bytes=7)
    assert fleet.result_bytes == 7
    workers[1].ready = False
    fleet.lost(workers[1], 0)
    assert len(fleet.representatives) == 2, "it is expected back"
    fleet.gone(workers[1])
    assert [worker.id for worker in fleet.representatives] == ["cuda:0"]
    assert fleet.result_bytes == 0
    workers[0].ready = False
    fleet.lost(workers[0], 0)
    fleet.gone(workers[0])
    assert not fleet.representatives


def test_workers_come_and_go_and_keep_their_order(fleet, workers):
    """Those that come later are behind those that there are, whatever went between."""
    first, second, third, fourth = workers
    del workers[2:]
    ready(fleet, second)
    ready(fleet, first)
    first.ready = False
    fleet.lost(first, 0)
    fleet.gone(first)
    workers.remove(first)
    workers += [third, fourth]
    ready(fleet, fourth)
    ready(fleet, third)
    assert [fleet.take_open() for _ in range(4)] == [second, third, fourth, None]


def test_of_one_class_a_worker_of_this_host_stands_for_it(fleet, workers):
    workers[1].link = NodeLink("node", "10.0.0.1", None, 0)
    ready(fleet, workers[0])
    ready(fleet, workers[1])
    assert list(fleet.representatives) == [workers[0]]
    assert fleet.here
    workers[0].ready = False
    fleet.lost(workers[0], 0)
    assert not fleet.here


def test_workers_are_open_in_their_order_until_they_are_taken(fleet, workers):
    for worker in reversed(workers):
        ready(fleet, worker)
    assert [fleet.take_open() for _ in workers] == workers
    assert fleet.take_open() is None
    fleet.open(workers[2])
    fleet.open(workers[1])
    fleet.open(workers[1])
    assert [fleet.take_open() for _ in range(3)] == [workers[1], workers[2], None]


def test_a_lost_worker_is_neither_open_nor_idle_and_has_no_copies(fleet, workers):
    ready(fleet, workers[0])
    fleet.copies_changed(workers[0], ["x"], [])
    workers[0].ready = False
    fleet.lost(workers[0], 0)
    assert (fleet.take_open(), fleet.idle, fleet.others_have_copies(workers[1])) == (None, 0, False)
    fleet.open(workers[0])
    assert fleet.take_open() is None
    ready(fleet, workers[0])
    assert (fleet.take_open(), fleet.idle) == (workers[0], 1)


def test_who_has_a_copy_is_found_among_the_ready_workers_of_this_host(fleet, workers):
    for worker in workers[:3]:
        ready(fleet, worker)
    assert fleet.holder("x") is None
    fleet.copies_changed(workers[1], ["x"], [])
    assert fleet.holder("x") is workers[1]
    fleet.copies_changed(workers[2], ["x"], [])
    workers[1].ready = False
    fleet.lost(workers[1], 0)
    assert fleet.holder("x") is workers[2]
    fleet.copies_changed(workers[2], [], ["x"])
    assert fleet.holder("x") is None
    far = workers[0]
    far.link = SimpleNamespace()
    fleet.lost(far, 0)
    ready(fleet, far)
    fleet.copies_changed(far, ["x"], [])
    assert fleet.holder("x") is None


def test_room_for_results_is_that_of_the_device_that_has_most(fleet, workers):
    ready(fleet, workers[0], result_bytes=10)
    ready(fleet, workers[1], result_bytes=30)
    assert fleet.result_bytes == 30
    ready(fleet, workers[1], result_bytes=0)
    assert fleet.result_bytes == 10


class Copies(RuleBasedStateMachine):
    """Copies of arrays beside a model that asks every worker."""

    names = st.sampled_from("abcd")
    places = st.integers(0, 3)

    def __init__(self):
        super().__init__()
        self.workers = [Worker(str(i)) for i in range(4)]
        self.fleet = Fleet(SimpleNamespace(workers=lambda: self.workers))
        for worker in self.workers:
            ready(self.fleet, worker)
        self.held = [set() for _ in self.workers]

    @rule(place=places, came=st.sets(names), went=st.sets(names))
    def change(self, place, came, went):
        self.fleet.copies_changed(self.workers[place], came, went)
        self.held[place] = (self.held[place] | came) - went

    @rule(place=places)
    def restart(self, place):
        self.workers[place].ready = False
        self.fleet.lost(self.workers[place], 0)
        ready(self.fleet, self.workers[place])
        self.held[place] = set()

    @rule(name=names)
    def forget(self, name):
        self.fleet.forget_array(name)
        for held in self.held:
            held.discard(name)

    @invariant()
    def bytes_are_the_models(self):
        sizes = {"a": 1, "b": 10, "c": 100, "d": 1000}
        for wanted in ("a", "ab", "bcd", "dd"):
            operands = [operand(name, sizes[name]) for name in wanted]
            of_each = [sum(sizes[name] for name in wanted if name in held) for held in self.held]
            assert [self.fleet.copied(operands, worker) for worker in self.workers] == of_each
            assert self.fleet.most_copied(operands) == max(of_each)
        for place, worker in enumerate(self.workers):
            elsewhere = any(held for other, held in enumerate(self.held) if other != place)
            assert self.fleet.others_have_copies(worker) == elsewhere


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
