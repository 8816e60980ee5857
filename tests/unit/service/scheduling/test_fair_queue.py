"""Fair sharing: what each owner gets, whatever the others do."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_tasks import QueuedTask, drain

from gemmserve_service.scheduling.fair_queue import FairQueue
from gemmserve_service.scheduling.tasks import SHORT_CLASSES, ServiceClass

PROMPT, EXPRESS, INTERACTIVE, BULK, LARGE = ServiceClass


def test_one_owner_s_tasks_go_by_priority_and_arrival():
    queue = FairQueue()
    for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 0)):
        queue.push(QueuedTask(name=name, priority=priority))
    assert [found.name for found in drain(queue)] == ["c", "a", "d", "b"]


def test_ten_thousand_tasks_of_one_owner_do_not_delay_another_s_one():
    queue = FairQueue()
    for _ in range(10_000):
        queue.push(QueuedTask("flood", 0.01))
    drain(queue, 100)
    queue.push(QueuedTask("other", 5.0))
    assert [found.owner for found in drain(queue, 2)].index("other") <= 1


def test_a_priority_is_no_way_past_other_owners():
    queue = FairQueue()
    for _ in range(10):
        queue.push(QueuedTask("pushy", 1, priority=100))
        queue.push(QueuedTask("modest", 1, priority=-100))
    assert Counter(found.owner for found in drain(queue, 10)) == {"pushy": 5, "modest": 5}


def test_shares_are_of_device_time_not_of_tasks():
    queue = FairQueue()
    for _ in range(1000):
        queue.push(QueuedTask("long", 10))
        queue.push(QueuedTask("short", 1))
    served = Counter()
    for found in drain(queue, 550):
        served[found.owner] += found.cost_s
    assert served["short"] == pytest.approx(served["long"], rel=0.05)


def test_shares_are_in_proportion_to_weights():
    queue = FairQueue()
    queue.weight_of = {"gold": 3.0, "tin": 1.0}.get
    for _ in range(400):
        queue.push(QueuedTask("gold"))
        queue.push(QueuedTask("tin"))
    served = Counter(found.owner for found in drain(queue, 400))
    assert served["gold"] == pytest.approx(300, abs=3)


def test_neither_credit_for_being_away_nor_a_penalty_for_having_been_alone():
    queue = FairQueue()
    for _ in range(100):
        queue.push(QueuedTask("alone"))
    drain(queue)  # a hundred seconds of the device while nobody else wanted it
    for _ in range(50):
        queue.push(QueuedTask("alone"))
        queue.push(QueuedTask("away"))
    served = Counter(found.owner for found in drain(queue, 20))
    assert abs(served["alone"] - served["away"]) <= 1


def test_who_comes_back_has_saved_nothing_up():
    queue = FairQueue()
    for _ in range(200):
        queue.push(QueuedTask("stays"))
    queue.push(QueuedTask("comes back"))
    drain(queue, 101)  # its one task, and a hundred of the other's while it was away
    for _ in range(50):
        queue.push(QueuedTask("comes back"))
    assert Counter(found.owner for found in drain(queue, 20))["stays"] >= 9


def test_what_a_task_really_took_is_what_its_owner_pays():
    queue = FairQueue()
    for _ in range(1000):
        queue.push(QueuedTask("liar", 0.1))  # takes ten times as long as was thought
        queue.push(QueuedTask("honest", 1))
    served = Counter()
    for _ in range(100):
        found = queue.take(lambda _: True)
        served[found.owner] += 1
        if found.owner == "liar":
            queue.charge("liar", 0.9)
    assert served["liar"] == pytest.approx(50, abs=2)


def test_what_a_worker_cannot_run_stays_in_its_place_and_lets_others_pass():
    queue = FairQueue()
    for name in ("x1", "y1", "x2", "y2"):
        queue.push(QueuedTask("a", name=name))
    queue.push(QueuedTask("b", name="x3"))
    assert queue.take(lambda found: found.name.startswith("y")).name == "y1"
    assert queue.take(lambda found: found.name == "nothing") is None
    assert len(queue) == 4
    assert {found.name for found in drain(queue, 2)} == {"x1", "x3"}
    assert [found.name for found in drain(queue)] == ["x2", "y2"]


def test_counts_and_bytes_by_owner():
    queue = FairQueue()
    kept, gone = QueuedTask("a", nbytes=7), QueuedTask("a", nbytes=5)
    for each in (kept, gone, QueuedTask("b", nbytes=1)):
        queue.push(each)
    assert (len(queue), queue.nbytes, queue.waiting("a"), queue.waiting_bytes("a"), queue.owners) == (3, 13, 2, 12, 2)
    queue.discard(gone)
    queue.discard(gone)
    assert (queue.waiting("a"), queue.waiting_bytes("a"), queue.nbytes) == (1, 7, 8)
    assert gone not in queue
    assert kept in queue
    drain(queue)
    assert (len(queue), queue.nbytes, queue.owners, queue.waiting("a"), queue.waiting("nobody")) == (0, 0, 0, 0, 0)


def test_owners_that_came_and_went_are_forgotten():
    queue = FairQueue()
    for i in range(5000):
        queue.push(QueuedTask(f"key{i}"))
        drain(queue)
        if i % 1000 == 999:
            queue.rest()
            assert len(queue._flows) == len(queue._heap) == 0
    queue.push(QueuedTask("waits"))
    queue.rest()
    assert len(queue) == len(drain(queue)) == 1


def test_what_is_owed_outlasts_a_pause_but_not_a_rest():
    for rest, first in ((False, "new"), (True, "old")):
        queue = FairQueue()
        queue.push(QueuedTask("old", 100))
        drain(queue)
        if rest:
            queue.rest()
        queue.push(QueuedTask("old", 1))
        queue.push(QueuedTask("new", 1))
        assert drain(queue, 1)[0].owner == first


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.01, 10), st.sampled_from(["push", "push", "take", "discard"])),
        max_size=200,
    )
)
def test_nobody_falls_behind_by_more_than_a_task_of_each(steps):
    """Whatever comes and goes: between two owners that both wait all the while, the service differs by no more than
    their largest tasks (theorem 1 of the paper: |Wf/rf - Wm/rm| <= lf/rf + lm/rm)."""
    queue, waiting = FairQueue(), []
    served, largest = Counter(), Counter()
    since = {}
    for owner, cost, what in steps:
        if what == "push":
            queue.push(each := QueuedTask(owner, cost))
            waiting.append(each)
        elif what == "discard" and waiting:
            queue.discard(waiting.pop(0))
        elif what == "take":
            found = queue.take(lambda _: True)
            assert (found is None) == (not waiting)
            if found is not None:
                waiting.remove(found)
                served[found.owner] += found.cost_s
                largest[found.owner] = max(largest[found.owner], found.cost_s)
        present = {each.owner for each in waiting}
        since = {pair: since.get(pair, dict(served)) for pair in itertools.combinations(sorted(present), 2)}
        for (f, m), before in since.items():
            gained = [served[who] - before.get(who, 0) for who in (f, m)]
            assert abs(gained[0] - gained[1]) <= largest[f] + largest[m] + 1e-9
    assert len(queue) == len(waiting)


def test_one_that_blocks_is_passed_by_none():
    queue = FairQueue()
    for name, owner in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        queue.push(QueuedTask(owner, name=name))
    asked = []

    def refuse(task):
        asked.append(task.name)
        return False

    assert queue.take(refuse, blocks=lambda _: True) is None
    assert asked == ["a1"]
    assert queue.take(lambda task: task.name != "a1", blocks=lambda _: True, heads=True).name == "b1"
    assert queue.take(lambda task: task.name != "a1", blocks=lambda _: True, heads=True) is None
    assert [queue.take(lambda _: True, blocks=lambda _: True).name for _ in range(2)] == ["a1", "a2"]
    assert queue.take(lambda _: True, blocks=lambda _: True) is None


def test_one_that_does_not_block_is_passed_by_its_owner_s_next_and_by_others():
    queue = FairQueue()
    for name, owner in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        queue.push(QueuedTask(owner, name=name))
    waiting = {"a1"}

    def take():
        return queue.take(lambda task: task.name not in waiting, blocks=lambda _: False).name

    assert [take(), take()] == ["a2", "b1"]
    waiting.clear()
    assert [take(), take()] == ["a1", "b2"], "in its old place"


def test_few_of_an_owner_are_passed_where_some_block():
    queue = FairQueue()
    for _ in range(1000):
        queue.push(QueuedTask("a", name="waits"))
    queue.push(QueuedTask("b", name="runs"))
    asked = []

    def runs(task):
        asked.append(task)
        return task.name == "runs"

    assert queue.take(runs, blocks=lambda _: False).name == "runs"
    assert len(asked) < 100
    assert len(queue) == 1000


def test_who_has_had_his_share_is_not_passed_where_some_block():
    queue = FairQueue()
    for cost in (100.0, 1e-4):
        queue.push(QueuedTask("a", cost, service_class=EXPRESS))
        queue.push(QueuedTask("a", name="bulk"))
    assert queue.take(lambda _: True, classes=(EXPRESS,)).cost_s == 100.0
    queue.push(QueuedTask("b", name="b's", service_class=EXPRESS))
    assert queue.take(lambda _: True, blocks=lambda _: False, classes=(EXPRESS,)).name == "b's", "a is behind b now"
    queue.charge("b", 1000.0, EXPRESS)
    queue.push(QueuedTask("b", name="b's", service_class=EXPRESS))
    assert queue.take(lambda _: True, blocks=lambda _: False, classes=(EXPRESS,)) is None


def test_a_short_task_overtakes_the_bulk_of_its_owner_s_work():
    queue = FairQueue()
    for _ in range(1000):
        queue.push(QueuedTask("a", 0.02, name="bulk"))
    drain(queue, 10)
    queue.push(QueuedTask("a", 1.0, name="one shot", service_class=INTERACTIVE))
    queue.push(QueuedTask("a", 1e-4, name="short", service_class=EXPRESS))
    assert [found.name for found in drain(queue, 3)] == ["short", "one shot", "bulk"]


def test_a_prompt_task_overtakes_the_express_ones_of_its_owner():
    queue = FairQueue()
    for _ in range(1000):
        queue.push(QueuedTask("a", 1e-4, name="express", service_class=EXPRESS))
    drain(queue, 500)
    queue.push(QueuedTask("a", 1e-5, name="prompt", service_class=PROMPT))
    assert [found.name for found in drain(queue, 2)] == ["prompt", "express"]
    queue.push(QueuedTask("a", 1e-5, name="prompt", service_class=PROMPT))
    queue.push(QueuedTask("a", 1e-4, name="urgent", priority=1, service_class=EXPRESS))
    assert [found.name for found in drain(queue, 3)] == ["urgent", "prompt", "express"]
    queue.push(QueuedTask("b", 1e-4, name="b's", service_class=EXPRESS))
    queue.push(QueuedTask("a", 1e-5, name="prompt", service_class=PROMPT))
    assert {found.name for found in drain(queue, 2)} == {"prompt", "b's"}, "another owner waits no longer for that"


def test_prompt_tasks_that_are_taken_for_themselves_are_not_counted():
    queue = FairQueue()
    for _ in range(10):
        queue.push(QueuedTask("a", 1e-4, name="express", service_class=EXPRESS))
        queue.push(QueuedTask("a", 1e-4, name="prompt", service_class=PROMPT))
    assert queue.prompts == 10
    assert [queue.take(lambda _: True, classes=(PROMPT,)).name for _ in range(5)] == ["prompt"] * 5
    assert [found.name for found in drain(queue, 3)] == ["prompt", "prompt", "express"]
    assert queue.prompts == 3
    queue.charge("a", 1.0, EXPRESS)
    queue.push(QueuedTask("b", 1e-4, name="b's", service_class=EXPRESS))
    assert queue.take(lambda _: True, classes=(PROMPT,)) is None, "another owner has had less"


@pytest.mark.parametrize("cost", [1e-6, 1e-3])
def test_express_tasks_are_not_starved_by_prompt_ones(cost):
    """One in three is theirs, however short the others are: most of the time that they take is no device's."""
    queue, served = FairQueue(), Counter()
    for _ in range(300):
        queue.push(QueuedTask("a", 1e-4, service_class=EXPRESS))
    for _ in range(300):
        while queue.waiting("a") < 600:
            queue.push(QueuedTask("a", cost, service_class=PROMPT))
        served[queue.take(lambda _: True, classes=SHORT_CLASSES).service_class] += 1
    assert served == {PROMPT: 200, EXPRESS: 100}


def test_short_tasks_share_what_is_theirs():
    """Prompt and express ones together have no more of a device than either alone."""
    queue, served = FairQueue(), Counter()
    for _ in range(200):
        queue.push(QueuedTask("a", 0.02))
    while served[BULK] < 1.0:
        for service_class in SHORT_CLASSES:
            queue.push(QueuedTask("a", 1e-3, service_class=service_class))
        found = queue.take(lambda _: True)
        served[found.service_class] += found.cost_s
    assert served[EXPRESS] + served[PROMPT] == pytest.approx(3 * served[BULK], abs=0.2)


def test_a_higher_priority_goes_before_a_shorter_task():
    queue = FairQueue()
    queue.push(QueuedTask("a", 0.02, name="urgent bulk", priority=1))
    queue.push(QueuedTask("a", 1e-4, name="short", service_class=EXPRESS))
    assert queue.take(lambda _: True, classes=(EXPRESS,)) is None
    assert [found.name for found in drain(queue)] == ["urgent bulk", "short"]


@pytest.mark.parametrize("classes", [tuple(ServiceClass), (EXPRESS,)])
def test_bulk_is_not_starved_by_short_tasks(classes):
    """A fifth of the device's time is bulk's, however many short tasks come; where those are taken for themselves,
    another lane takes what is left.
    """
    queue = FairQueue()
    for _ in range(200):
        queue.push(QueuedTask("a", 0.02))
    served = Counter()
    for _ in range(20_000):
        while queue.waiting("a") < 300:
            queue.push(QueuedTask("a", 1e-3, service_class=EXPRESS))
        found = queue.take(lambda _: True, classes=classes) or queue.take(lambda _: True, classes=(INTERACTIVE, BULK))
        served[found.service_class] += found.cost_s
        if served[BULK] > 3.0:
            break
    assert served[EXPRESS] == pytest.approx(3 * served[BULK], abs=0.5)


def test_short_tasks_of_one_owner_do_not_keep_the_device_from_another():
    queue = FairQueue()
    for _ in range(500):
        queue.push(QueuedTask("short", 1e-3, service_class=EXPRESS))
        queue.push(QueuedTask("bulk", 0.02))
    served = Counter()
    for _ in range(300):
        found = queue.take(lambda _: True, classes=(EXPRESS,)) or queue.take(lambda _: True, classes=(BULK,))
        served[found.owner] += found.cost_s
    assert served["short"] <= served["bulk"] + 0.1


tasks_of_classes = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(list(ServiceClass)), st.integers(-1, 1), st.floats(1e-4, 1.0)),
    max_size=30,
)


@given(tasks_of_classes, st.randoms(use_true_random=False))
def test_every_task_is_taken_once_and_in_order_of_arrival_within_its_class(given_tasks, chance):
    queue = FairQueue()
    tasks = [
        QueuedTask(owner, cost, priority=priority, service_class=service_class)
        for owner, service_class, priority, cost in given_tasks
    ]
    for task in tasks:
        queue.push(task)
    taken = []
    while len(queue):
        classes = chance.choice([tuple(ServiceClass), SHORT_CLASSES, (INTERACTIVE, BULK, LARGE)])
        blocks = chance.choice([None, lambda _: True, lambda _: False])
        found = queue.take(lambda _: True, blocks=blocks, classes=classes)
        if found is not None:
            taken.append(found)
    assert sorted(map(id, taken)) == sorted(map(id, tasks))
    for owner, service_class in itertools.product("ab", ServiceClass):
        line = [task.order for task in taken if (task.owner, task.service_class) == (owner, service_class)]
        assert line == sorted(line)
    assert queue.nbytes == 0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=30),
    st.lists(st.sampled_from(["oldest", "discard", "take", "again"]), max_size=60),
    st.randoms(use_true_random=False),
)
def test_the_oldest_is_known_whatever_comes_and_goes(given_tasks, steps, chance):
    queue, waiting, gone = FairQueue(), [], []
    for owner, submitted in given_tasks:
        waiting.append(QueuedTask(owner, submitted=submitted))
        queue.push(waiting[-1])
    for step in (*steps, "oldest"):
        if step == "oldest":
            alive = {task.owner for task in waiting}
            assert set(queue.waiting_owners()) == alive
            for owner in "ab":
                expected = min((task.submitted for task in waiting if task.owner == owner), default=None)
                assert queue.oldest(owner) == expected
        elif step == "again" and gone:  # its worker was lost
            waiting.append(gone.pop(chance.randrange(len(gone))))
            queue.push(waiting[-1])
        elif step == "discard" and waiting:
            gone.append(waiting.pop(chance.randrange(len(waiting))))
            queue.discard(gone[-1])
        elif step == "take" and waiting:
            gone.append(queue.take(lambda _: True))
            waiting.remove(gone[-1])


def test_tasks_that_have_gone_are_not_kept_for_the_sake_of_the_oldest():
    queue = FairQueue()
    queue.push(QueuedTask())
    for _ in range(3000):
        task = QueuedTask()
        queue.push(task)
        queue.discard(task)
    (flow,) = queue._flows.values()
    assert len(flow.arrivals) < 600
    assert queue.oldest("") is not None
