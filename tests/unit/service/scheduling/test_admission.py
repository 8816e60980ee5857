"""Who may join the queue, and what the others are told."""

from __future__ import annotations

import contextlib
import random

import pytest
from queued_tasks import QueuedTask, drain

from gemmserve_service.errors import QueueFull
from gemmserve_service.scheduling import admission
from gemmserve_service.scheduling.admission import Admission
from gemmserve_service.scheduling.fair_queue import FairQueue


@pytest.fixture
def queue():
    return FairQueue()


@pytest.fixture
def bound(make_settings, queue):
    return lambda **fields: Admission(make_settings(**fields), queue)


def join(admission, queue, owner="", nbytes=10):
    with admission.place(owner) as claim:
        claim(nbytes)
        queue.push(QueuedTask(owner, nbytes=nbytes))


def fill(admission, queue, owner="", nbytes=10):
    for count in range(100_000):
        try:
            join(admission, queue, owner, nbytes)
        except QueueFull:
            return count
    raise AssertionError("there is no bound")


def test_the_queue_is_bounded_and_without_keys_one_may_fill_it(bound, queue):
    doors = bound(max_queued_jobs=50)
    assert fill(doors, queue) == 50
    drain(queue, 1)
    join(doors, queue)


def test_tasks_that_are_being_prepared_count(bound, queue):
    doors = bound(max_queued_jobs=2, max_queued_bytes=100)
    with contextlib.ExitStack() as arriving:
        arriving.enter_context(doors.place(""))(60)
        second = arriving.enter_context(doors.place(""))
        with pytest.raises(QueueFull), doors.place(""):
            pass
        with pytest.raises(QueueFull, match="bytes"):
            second(60)
    with doors.place("") as claim:  # those left again
        claim(60)


def test_bytes_are_bounded_but_one_task_always_fits(bound, queue):
    doors = bound(max_queued_bytes=100)
    join(doors, queue, nbytes=1000)
    with pytest.raises(QueueFull, match="bytes of jobs are waiting"):
        join(doors, queue, nbytes=1)
    drain(queue)
    join(doors, queue, nbytes=60)
    join(doors, queue, nbytes=40)
    with pytest.raises(QueueFull):
        join(doors, queue, nbytes=1)


def test_a_flood_leaves_room_for_those_who_come_next(bound, queue):
    doors = bound(max_queued_jobs=10_000)
    assert fill(doors, queue, "flood") == 8000
    with pytest.raises(QueueFull, match="this key's"):
        join(doors, queue, "flood")
    assert [fill(doors, queue, f"key{i}") for i in range(3)] == [1600, 320, 64]
    join(doors, queue, "the last to come")
    drain(queue, 5000)
    assert fill(doors, queue, "key2") > 1000


def test_bytes_have_their_shares_too(bound, queue):
    doors = bound(max_queued_bytes=1000)
    assert fill(doors, queue, "flood", 10) == 80
    join(doors, queue, "other", 100)


def test_when_to_come_back_follows_the_measured_rate(bound, queue, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: clock[0])
    doors = bound(max_queued_jobs=1000)
    fill(doors, queue)
    assert doors.drain_rate == 0
    for _ in range(200):
        clock[0] += 0.25
        doors.ended()
    assert doors.drain_rate == pytest.approx(4)
    assert doors.retry_after_s() == 25  # a tenth of a thousand, four a second
    with pytest.raises(QueueFull) as full, doors.place(""):
        pass
    assert full.value.retry_after_s == 25
    drain(queue, 990)
    assert doors.retry_after_s() == 0.25  # a tenth of ten, four a second
    drain(queue, 10)
    assert doors.retry_after_s() == 0.05


def test_idle_times_are_no_drain_rate(bound, queue, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: clock[0])
    doors = bound()
    doors.ended()
    clock[0] += 3600  # nobody waited
    doors.ended()
    assert doors.drain_rate == 0


def test_steps_of_programs_leave_room_for_other_owners(bound):
    doors = bound(max_queued_steps=100)
    release = doors.take_steps("alice", 80)
    with pytest.raises(QueueFull, match="this key's"):
        doors.take_steps("alice", 5)
    doors.take_steps("bob", 16)
    doors.take_steps("carol", 1000, recovered=True)
    release()
    assert doors.steps == 1016


def test_several_that_fit_together_fit_one_by_one(bound, queue):
    """However their bytes are shared; and where one of them would not, they do not."""
    rng = random.Random(3)
    found = {True: 0, False: 0}
    for _ in range(2000):
        doors = bound(max_queued_bytes=1000)
        drain(queue, len(queue))
        for owner in ("me", "you"):
            with contextlib.suppress(QueueFull):
                join(doors, queue, owner, rng.randrange(1, 400))
        owner = rng.choice(["me", "you", ""])
        sizes = [rng.randrange(1, 150) for _ in range(rng.randrange(1, 8))]
        fits = doors.fits(owner, sum(sizes))
        found[fits] += 1
        if fits:
            with doors.place(owner, len(sizes)) as claim:
                for nbytes in sizes:
                    claim(nbytes)
            with doors.place(owner, len(sizes)) as claim:
                claim(sum(sizes))
    assert min(found.values()) > 200
