"""Which results of a device are written next: who is waited for, then the oldest, what is hidden last."""

from __future__ import annotations

import pytest

from gemmserve_service.executor.port import Worker
from gemmserve_service.scheduling.results import write_orders as module
from gemmserve_service.scheduling.results.write_orders import Urgency, WriteOrders
from gemmserve_service.store.pending import PendingResults, State

KEEP = 100
"""Bytes of results that the device may keep."""


@pytest.fixture
def orders():
    return WriteOrders(Worker("cuda:0", result_bytes=KEEP))


def results(orders, job, nbytes=10, urgency=None, due=5.0):
    pending = PendingResults(job, State.HELD, nbytes)
    orders.keep(pending)
    if urgency is not None:
        orders.offer(pending, urgency, due)
    return pending


def taken(orders, now=0.0, *, hurry=False):
    """What is ordered one after the other."""
    found = []
    while (pending := orders.next(now, hurry=hurry)) is not None:
        orders.ordered(pending)
        found.append(pending.job)
    return found


def test_who_is_waited_for_goes_at_once_and_others_when_they_are_due(orders):
    results(orders, "later", urgency=Urgency.NORMAL, due=9.0)
    results(orders, "hidden", urgency=Urgency.HIDDEN)
    results(orders, "wanted", urgency=Urgency.WAITED_FOR)
    assert taken(orders) == ["wanted"]
    assert orders.due == 9.0
    assert taken(orders, 8.9) == []
    assert taken(orders, 9.0) == ["later"]
    assert taken(orders, 1e9) == [], "for what nobody can see there is time"
    assert orders.due is None
    assert taken(orders, hurry=True) == ["hidden"]


def test_the_oldest_go_until_half_of_the_room_is_free_and_the_hidden_ones_last(orders):
    results(orders, "unrecorded", 20)
    results(orders, "hidden", 30, Urgency.HIDDEN)
    for number in range(3):
        results(orders, f"n{number}", 10, Urgency.NORMAL)
    assert orders.kept_bytes == 80
    assert taken(orders) == ["n0", "n1", "n2"]
    results(orders, "more", 20)
    assert taken(orders) == ["hidden"], "nothing else can go, and 70 of 100 bytes are too many"
    assert orders.kept_bytes == 40


def test_large_results_do_not_wait_behind_small_ones_that_are_due_later(orders, monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 20)
    results(orders, "small", 19, Urgency.NORMAL, due=5.0)
    large = results(orders, "large", 20, Urgency.NORMAL, due=3.0)
    assert orders.due == 3.0
    assert taken(orders, 2.9) == []
    assert taken(orders, 3.0) == ["large"]
    assert orders.due == 5.0
    orders.remove(large)
    again = results(orders, "again", 20, Urgency.NORMAL, due=4.0)
    orders.offer(again, Urgency.HIDDEN)
    assert orders.due == 5.0, "it is of another urgency now"
    assert taken(orders, 5.0) == ["small"]


def test_small_results_have_longer_while_the_device_computes(monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 20)
    worker = Worker("cuda:0", result_bytes=KEEP)
    orders = WriteOrders(worker, busy_s=7.0)
    results(orders, "small", 10, Urgency.NORMAL, due=1.0)
    worker.tasks["task"] = object()
    assert orders.due == 8.0
    assert taken(orders, 7.9) == []
    results(orders, "large", 20, Urgency.NORMAL, due=2.0)
    assert (orders.due, taken(orders, 2.0)) == (2.0, ["large"])
    worker.tasks.clear()
    assert orders.due == 1.0
    assert taken(orders, 1.0) == ["small"]
    worker.tasks["task"] = object()
    results(orders, "late", 10, Urgency.NORMAL, due=1.0)
    assert taken(orders, 8.0) == ["late"], "not for ever"
    results(orders, "wanted", 10, Urgency.WAITED_FOR)
    results(orders, "more", 60, Urgency.NORMAL, due=9.0)
    assert taken(orders, 8.0) == ["wanted", "more"], "neither who is waited for nor what takes the room"


def test_no_more_is_ordered_at_a_time_than_leaves_the_link_to_whom_is_waited_for(orders, monkeypatch):
    monkeypatch.setattr(module, "MAX_ORDERED_BYTES", 25)
    made = [results(orders, f"n{number}", 10, Urgency.NORMAL, 0.0) for number in range(5)]
    assert taken(orders, 1.0) == ["n0", "n1", "n2"]
    assert taken(orders, 1.0) == []
    orders.offer(made[4], Urgency.WAITED_FOR)
    assert taken(orders, 1.0) == ["n4"]
    for pending in (made[0], made[1]):
        orders.remove(pending)
    assert orders.ordered_bytes == 20
    assert taken(orders, 1.0) == ["n3"]


def test_many_small_ones_are_written_though_there_is_room(orders, monkeypatch):
    monkeypatch.setattr(module, "_MAX_KEPT", 3)
    for number in range(5):
        results(orders, f"n{number}", 1, Urgency.NORMAL)
    assert taken(orders) == ["n0", "n1"]


def test_what_is_offered_again_changes_its_place_and_keeps_its_time(orders):
    first = results(orders, "first", urgency=Urgency.NORMAL, due=3.0)
    results(orders, "second", urgency=Urgency.NORMAL, due=4.0)
    orders.offer(first, Urgency.HIDDEN, 100.0)
    assert orders.due == 4.0
    orders.offer(first, Urgency.WAITED_FOR)
    assert taken(orders) == ["first"]
    orders.offer(first, Urgency.NORMAL)
    assert taken(orders, 3.0) == [], "it is ordered already"


def test_what_is_gone_counts_no_more(orders):
    kept, gone = results(orders, "kept", urgency=Urgency.NORMAL), results(orders, "gone", urgency=Urgency.NORMAL)
    orders.ordered(gone)
    for pending in (kept, gone, gone):
        orders.remove(pending)
    assert (orders.kept_bytes, orders.ordered_bytes, orders.due) == (0, 0, None)
    assert taken(orders, 1e9, hurry=True) == []
