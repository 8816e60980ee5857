"""Short tasks that waited go to a worker together: in the queue's order, each with its own fate."""

from __future__ import annotations

import asyncio
import string
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.errors import JobCancelled, JobFailed, WorkerCrashed
from gemmserve_service.executor.port import Worker
from gemmserve_service.executor.protocol import Done
from gemmserve_service.scheduling import placement
from gemmserve_service.scheduling import scheduler as scheduler_module
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmParams, Timings

A = np.ones((4, 4), "c8")


class Listener:
    def __init__(self) -> None:
        self.outcomes: dict[str, object] = {}
        self.requeues: list[str] = []

    def started(self, task):
        pass

    def progressed(self, task, share):
        pass

    def requeued(self, task):
        self.requeues.append(task.id)

    def ended(self, task, outcome):
        assert task.id not in self.outcomes, "told twice"
        self.outcomes[task.id] = outcome
        if isinstance(outcome, Done):
            task.close()


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def submit(store, put, listener):
    async def make_and_submit(scheduler, name, **fields):
        operands = {}
        for key in ("a", "b"):
            upload = await put(store, A, scratch=True)
            await upload.commit()
            operands[key] = store.pin_upload(upload)
        problem = products.build(GemmParams(), {"a": Operand.of(A), "b": Operand.of(A)})
        results = {"d": store.allocate(A.dtype, A.shape, "C", ttl_s=None, scratch=True)}
        task = Task(name, GemmParams(), problem, operands, results, listener, **fields)
        scheduler.submit(task)
        return task

    return make_and_submit


@pytest.fixture
def seconds(monkeypatch):
    """What each task is estimated at, by name; a microsecond where nothing else is said."""
    table: dict[str, float] = {}
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, __: table.get(task.id, 1e-6))
    return table


def last_group(fake):
    """Names of what was sent last."""
    return [run.task for run in fake.sent[-1][1]]


async def test_an_idle_worker_gets_a_task_at_once_and_what_gathered_then_goes_as_one(scheduler, fake, submit, store):
    sizes = []
    scheduler.group_sent = sizes.append
    await submit(scheduler, "a")
    assert last_group(fake) == ["a"]
    for name in "bcd":
        await submit(scheduler, name)
    assert len(fake.sent) == 1
    fake.done()
    assert last_group(fake) == ["b", "c", "d"]
    assert len(fake.sent) == 2
    assert sizes == [1, 3]
    for _ in range(3):
        fake.done()
    assert (scheduler.queued, scheduler.running, store.scratch_bytes) == (0, 0, 0)


async def test_a_group_keeps_the_queue_s_order(scheduler, fake, submit):
    await submit(scheduler, "runs")
    for name, owner, priority in (("a1", "a", 0), ("a2", "a", 5), ("a3", "a", 0), ("b1", "b", 0)):
        await submit(scheduler, name, owner=owner, priority=priority)
    fake.done()
    assert last_group(fake) == ["a2", "b1", "a1", "a3"]


async def test_owners_are_served_in_turn_within_a_group_and_each_pays_for_its_own(scheduler, fake, submit, seconds):
    await submit(scheduler, "runs", owner="x")
    for i in range(6):
        await submit(scheduler, f"flood{i}", owner="flood")
    await submit(scheduler, "one", owner="other")
    fake.done()
    assert last_group(fake).index("one") <= 1
    flows = scheduler.queue._flows
    before = {name: flows[name].tag for name in ("flood", "other")}
    for name in list(fake.running()):
        fake.owner.task_ended(fake.fleet["cpu"], Done(task=name, algorithm="numpy", timings=Timings(kernel_s=1.0)))
        if name == "flood0":
            assert flows["flood"].tag - before["flood"] == pytest.approx(1.0, abs=1e-3)
            assert flows["other"].tag - before["other"] in (pytest.approx(0.0), pytest.approx(1.0, abs=1e-3))


@pytest.mark.parametrize(
    ("costs", "groups"),
    [
        ({}, [["b", "c", "d", "e"]]),
        ({"c": 0.02}, [["b", "d", "e"], ["c"]]),  # a longer one goes alone, and short ones overtake it
        ({"b": 0.006, "c": 0.006, "d": 0.006}, [["e", "b"], ["c"], ["d"]]),
        ({"b": 5.0}, [["c", "d", "e"], ["b"]]),
    ],
)
async def test_a_group_is_short(scheduler, fake, submit, seconds, costs, groups):
    seconds.update(costs)
    await submit(scheduler, "a")
    for name in "bcde":
        await submit(scheduler, name)
    fake.done()
    for group in groups:
        assert last_group(fake) == group
        for _ in group:
            fake.done()


async def test_a_group_has_a_most_number_and_bytes(make_scheduler, fake, submit):
    scheduler = await make_scheduler(fake, max_grouped_jobs=3)
    await submit(scheduler, "a")
    tasks = [await submit(scheduler, name) for name in "bcdef"]
    tasks[4].__dict__["size"] = (1 << 30, 0)
    fake.done()
    assert last_group(fake) == ["b", "c", "d"]
    for _ in range(3):
        fake.done()
    assert last_group(fake) == ["e"]


async def test_idle_workers_share_what_there_is(make_scheduler, make_fake, submit):
    fake = make_fake("cuda:0", "cuda:1")
    scheduler = await make_scheduler(fake)
    fake.lose("cuda:0")
    fake.lose("cuda:1")
    for name in "abcd":
        await submit(scheduler, name)
    fake.fleet["cuda:1"].ready = True
    scheduler.fleet.ready(fake.fleet["cuda:1"])
    fake.hello("cuda:0")
    assert [len(fake.running(name)) for name in ("cuda:0", "cuda:1")] == [2, 2]


async def test_cancel_deadline_and_failure_touch_one_alone(scheduler, fake, submit, listener, store, eventually):
    await submit(scheduler, "runs")
    cancelled = await submit(scheduler, "cancelled")
    for name in ("fails", "good"):
        await submit(scheduler, name)
    await submit(scheduler, "late", timeout_s=0.05)
    fake.done()
    assert last_group(fake) == ["cancelled", "fails", "good", "late"]
    scheduler.cancel(cancelled)
    assert fake.cancelled == [("cpu", "cancelled")]
    await eventually(lambda: "late" in listener.outcomes)
    assert fake.cancelled[1:] == [("cpu", "late")]
    fake.fail(task="fails")
    assert fake.running() == ["cancelled", "good", "late"]
    for name in ("cancelled", "good", "late"):
        fake.done(task=name)
    assert isinstance(listener.outcomes["cancelled"], JobCancelled)
    assert isinstance(listener.outcomes["fails"], JobFailed)
    assert isinstance(listener.outcomes["good"], Done)
    assert store.scratch_bytes == 0


async def test_a_group_that_killed_a_worker_is_run_singly(make_scheduler, fake, submit, listener, store):
    scheduler = await make_scheduler(fake, max_attempts=3)
    await submit(scheduler, "runs")
    names = ["a", "poison", "b", "c"]
    for name in names:
        await submit(scheduler, name)
    fake.done()
    assert last_group(fake) == names
    fake.done(task="a")
    fake.lose()
    assert listener.requeues == ["poison", "b", "c"]
    await submit(scheduler, "new")
    fake.hello()
    for _ in range(20):
        running = fake.running()
        if not running:
            break
        assert len(running) == 1 or not {"poison", "b", "c"} & set(running), "a suspect takes nobody along"
        if "poison" in running:
            fake.lose()
            fake.hello()
        else:
            fake.done()
    assert isinstance(listener.outcomes.pop("poison"), WorkerCrashed)
    assert sorted(listener.outcomes) == ["a", "b", "c", "new", "runs"]
    assert all(isinstance(outcome, Done) for outcome in listener.outcomes.values())
    assert store.scratch_bytes == 0


@pytest.fixture
def now(monkeypatch):
    """The time that the scheduler goes by; it stands still."""
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: 10_000.0))
    return 10_000.0


async def test_time_that_a_lost_group_took_is_charged_once(scheduler, fake, submit, seconds, monkeypatch, now):
    await submit(scheduler, "runs")
    tasks = [await submit(scheduler, name) for name in "abcd"]
    fake.done()
    for task in tasks:
        task.began = now - 100
    fake.fleet["cpu"].answered = 0.0
    charged = []
    monkeypatch.setattr(scheduler.quotas, "charge_device", lambda owner, seconds: charged.append(seconds))
    fake.lose()
    assert sum(charged) == pytest.approx(100)


async def test_what_a_task_waited_for_in_its_group_counts_as_queueing(scheduler, fake, submit, listener):
    await submit(scheduler, "runs")
    await submit(scheduler, "a")
    task = await submit(scheduler, "b")
    fake.done()
    worker = fake.fleet["cpu"]
    fake.owner.task_ended(worker, Done(task="b", algorithm="numpy", timings=Timings(queue_s=50.0, kernel_s=0.001)))
    assert task.queue_s > 0
    assert listener.outcomes["b"].timings.queue_s == pytest.approx(50 + task.queue_s)


async def test_workers_drop_an_array_once_nobody_uses_it(scheduler, fake, store, put):
    info = await put(store, A)
    pinned = store.pin(info)
    await store.delete(info.id)
    assert info.id not in fake.forgotten
    pinned.release()
    await asyncio.sleep(0)
    assert info.id in fake.forgotten


async def test_workers_hear_once_of_all_arrays_that_are_deleted_together(scheduler, fake, store, put, monkeypatch):
    told = []
    monkeypatch.setattr(fake, "forget", told.append)
    ids = [(await put(store, A)).id for _ in range(3)]
    await store.delete_all(ids)
    await asyncio.sleep(0)
    assert [message.arrays for message in told] == [ids]


# -- ahead ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ahead(fake):
    """A worker that takes on two tasks before it has answered the first."""
    fake.ahead = 2
    return fake


async def test_a_worker_that_runs_several_at_once_is_sent_more_before_it_is_idle(
    ahead, scheduler, submit, seconds, store
):
    seconds.update(dict.fromkeys("abcdef", 0.1))
    for name in "abcdef":
        await submit(scheduler, name)
    assert [last.task for _, (last,) in ahead.sent] == ["a", "b", "c"]
    assert scheduler.running == 3
    ahead.done()
    assert [last.task for _, (last,) in ahead.sent] == ["a", "b", "c", "d"]
    for _ in range(5):
        ahead.done()
    assert (scheduler.queued, scheduler.running, store.scratch_bytes) == (0, 0, 0)


async def test_not_when_it_has_work_for_a_while(ahead, scheduler, submit, seconds):
    seconds.update({"a": 0.3, "b": 0.3, "c": 0.3})
    for name in "abc":
        await submit(scheduler, name)
    assert [last.task for _, (last,) in ahead.sent] == ["a", "b"]


async def test_idle_workers_come_first(make_scheduler, make_fake, submit, seconds):
    fake = make_fake("cuda:0", "cuda:1")
    fake.ahead = 2
    scheduler = await make_scheduler(fake)
    seconds.update(dict.fromkeys("abcdefgh", 0.1))
    for name in "abcdefgh":
        await submit(scheduler, name)
    assert [worker.id[-1] for worker, _ in fake.sent] == ["0", "1", "0", "0", "1", "1"]
    fake.done("cuda:0")
    fake.done("cuda:1")
    assert [worker.id[-1] for worker, _ in fake.sent[6:]] == ["0", "1"]


async def test_what_was_on_a_worker_that_is_lost_runs_alone_afterwards(ahead, scheduler, submit, seconds, listener):
    seconds.update(dict.fromkeys("abcd", 0.1))
    for name in "abcd":
        await submit(scheduler, name)
    assert len(ahead.sent) == 3
    ahead.lose()
    assert listener.requeues == ["a", "b", "c"]
    ahead.hello()
    assert [last.task for _, (last,) in ahead.sent[3:]] == ["a"]
    for name in "bcd":
        ahead.done()
        assert ahead.sent[-1][1][0].task == name
        assert scheduler.running == 1


async def test_a_worker_that_is_lost_with_tasks_sent_ahead_is_paid_for_once(
    make_scheduler, fake, submit, seconds, monkeypatch, now
):
    fake.ahead = 3
    scheduler = await make_scheduler(fake)
    tasks = [await submit(scheduler, name, owner=name) for name in "abc"]
    assert [task.worker for task in tasks] == [fake.fleet["cpu"]] * 3
    for task in tasks:
        task.began = now - 100
    bills = {}
    monkeypatch.setattr(scheduler.quotas, "charge_device", lambda owner, spent: bills.update({owner: spent}))
    fake.lose()
    assert sum(bills.values()) == pytest.approx(100)
    assert bills.keys() == {"a", "b", "c"}


# -- express tasks beside others --------------------------------------------------------------------------------------


@pytest.fixture
async def lanes(fake, make_scheduler, seconds):
    """A worker that runs express tasks beside others; those whose names are capital letters are long."""
    fake.ahead, fake.express = 2, True
    seconds.update(dict.fromkeys(string.ascii_uppercase, 0.02))
    seconds.update(dict.fromkeys(string.ascii_lowercase, 0.004))
    return await make_scheduler(fake)


@pytest.mark.parametrize("kinds", ["eeLee", "LLeL", "eee", "LL", "eLLe", "L"])
def test_tasks_of_both_kinds_at_one_time_run_beside_each_other(kinds):
    worker = Worker("cpu", express=True)
    tasks = [SimpleNamespace(id=str(n), express=kind == "e", beside=False) for n, kind in enumerate(kinds)]
    met = set()
    for n, task in enumerate(tasks):
        if n == 3:
            assert worker.answers("0") is tasks[0]
            assert worker.answers("0") is None
        worker.sent(task)
        there = [other for other in tasks[: n + 1] if n < 3 or other is not tasks[0]]
        met |= {one.id for one in there for other in there if one.express != other.express}
        assert {each.id for each in tasks if each.beside} == met
        assert worker.mixed == (len({each.express for each in there}) == 2)
        assert [*worker.other_tasks] == [each for each in there if not each.express]
    assert worker.lose_tasks() == there
    assert not worker.tasks
    assert not worker.express_tasks


def names_of(fake):
    """The tasks' names of each message."""
    return [[run.task for run in group] for _, group in fake.sent]


def names(fake):
    return ["".join(run.task for run in group) for _, group in fake.sent]


async def test_express_tasks_are_sent_beside_long_ones(lanes, fake, submit):
    for name in "ABCDEF":
        await submit(lanes, name)
    assert names(fake) == ["A", "B", "C"]
    for name in "abcdef":
        await submit(lanes, name)
    assert names(fake)[3:] == ["a", "b", "c"]
    assert [run.express for _, (run,) in fake.sent] == [False] * 3 + [True] * 3
    fake.done(task="b")
    assert names(fake)[6:] == ["de"]
    fake.done(task="A")
    assert names(fake)[7:] == ["D"]
    while fake.running():
        fake.done()
    assert lanes.queued == 0


async def test_express_tasks_are_sent_as_long_as_those_that_are_there_are_soon_over(lanes, fake, submit, seconds):
    many = [f"t{number}" for number in range(24)]
    seconds.update(dict.fromkeys(many, 5e-4))
    for name in many:
        await submit(lanes, name)
    # A worker is at each for its own part of the time, too: three are less than 2 ms, the ahead of a long lane.
    assert len(fake.running()) == 3
    seconds.update(dict.fromkeys(many, 1e-6))
    fewer = [f"u{number}" for number in range(24)]
    while fake.running():
        fake.done()
    for name in fewer:
        await submit(lanes, name)
    assert len(fake.running()) == 10
    fake.done()
    assert [len(group) for group in names_of(fake)[-1:]] == [14], "what has gathered goes together"
    for _ in range(14):
        assert len(fake.running()) >= 10
        fake.done()
    while fake.running():
        fake.done()
    assert lanes.queued == 0


async def test_a_group_s_time_counts_the_worker_s_own(make_scheduler, fake, submit, seconds):
    fake.ahead, fake.express = 2, True
    scheduler = await make_scheduler(fake, max_grouped_jobs=1000)
    for number in range(200):
        await submit(scheduler, f"t{number}")
    while fake.running():
        fake.done()
    assert max(map(len, names_of(fake))) == 49, "10 ms, of 0.2 ms and a little each"
    assert scheduler.queued == 0


@pytest.mark.parametrize(
    ("result_bytes", "there", "sizes"),
    [(1 << 30, "ab", [4]), (1 << 30, "a", [3, 1]), (0, "ab", [1] * 4)],
    ids=["all stays", "operands are brought", "results are taken"],
)
async def test_a_group_s_bytes_are_those_that_move(
    make_scheduler, fake, store, put, listener, seconds, monkeypatch, result_bytes, there, sizes
):
    monkeypatch.setattr(placement, "_MAX_GROUP_BYTES", 6 << 20)
    fake.ahead, fake.express, fake.result_bytes = 2, True, result_bytes
    scheduler = await make_scheduler(fake)
    arrays = {"a": np.zeros((1 << 10, 1 << 8), "c8"), "b": np.zeros((1 << 8, 1 << 10), "c8")}  # 2 MiB
    infos = {name: await put(store, array) for name, array in arrays.items()}
    scheduler.fleet.copies_changed(fake.fleet["cpu"], [infos[name].id for name in there], [])
    problem = products.build(GemmParams(), {name: Operand.of(array) for name, array in arrays.items()})
    for number in range(7):
        seconds[f"t{number}"] = 5e-4
        operands = {name: store.pin(info) for name, info in infos.items()}
        results = {"d": store.allocate(np.dtype("c8"), (1 << 10, 1 << 10), "C", ttl_s=None)}  # 8 MiB
        scheduler.submit(Task(f"t{number}", GemmParams(), problem, operands, results, listener))
    while fake.running():
        fake.done()
    assert [len(group) for group in names_of(fake)] == [1, 1, 1, *sizes]


async def test_long_tasks_are_sent_beside_express_ones(lanes, fake, submit):
    for name in "abcdABCD":
        await submit(lanes, name)
    assert names(fake) == ["a", "b", "c", "A", "B", "C"]


async def test_a_single_product_that_somebody_waits_for_comes_before_what_is_queued(lanes, fake, submit):
    for name in "ABCDE":
        await submit(lanes, name)
    await submit(lanes, "Z", durable=False)
    fake.done()
    assert names(fake)[3:] == ["Z"]


@pytest.fixture
async def grouped(lanes, fake, submit):
    """The worker has ten express tasks; as many of the same owner wait."""
    for number in range(20):
        await submit(lanes, f"t{number}")
    assert len(fake.running()) == 10
    return lanes


async def test_a_prompt_task_is_sent_between_the_express_ones_that_a_worker_has(grouped, fake, submit):
    await submit(grouped, "one shot", durable=False)
    await submit(grouped, "waited for", waited_for=True)
    assert fake.passing == ["one shot", "waited for"]
    await submit(grouped, "another's", owner="b", durable=False)
    assert fake.passing[2:] == ["another's"]
    for number in range(12):
        await submit(grouped, f"p{number}", durable=False)
    assert len(fake.passing) == 10, "0.2 ms each and a little, up to 2 ms"
    fake.done(task="one shot")
    assert len(fake.passing) == 11
    while fake.running():
        fake.done()
    assert grouped.queued == 0


async def test_what_is_urgent_or_no_single_product_is_not_passed_or_does_not_pass(grouped, fake, submit, seconds):
    await submit(grouped, "urgent", priority=1)
    await submit(grouped, "one shot", durable=False)
    assert fake.passing == []
    seconds["long"] = 0.02
    await submit(grouped, "long", durable=False, priority=1)
    await submit(grouped, "express", priority=2)
    assert fake.passing == []


@pytest.mark.parametrize("why", ["not express", "joined", "nothing to pass", "prompt alone", "suspect"])
async def test_a_prompt_task_goes_the_ordinary_way(make_scheduler, fake, submit, seconds, why):
    fake.ahead, fake.express = 2, why != "not express"
    if why == "joined":
        fake.fleet["cpu"].link = SimpleNamespace(bytes_s=1e9)
    scheduler = await make_scheduler(fake)
    if why == "suspect":
        await submit(scheduler, "suspect")
        fake.lose()
        fake.hello()
        assert fake.running() == ["suspect"]
    durable = why != "prompt alone"
    for number in range(0 if why == "nothing to pass" else 20):
        await submit(scheduler, f"t{number}", durable=durable)
    await submit(scheduler, "one shot", durable=False)
    assert fake.passing == []
    while fake.running():
        fake.done()
    assert scheduler.queued == 0


async def test_express_tasks_get_on_beside_any_number_of_prompt_ones(grouped, fake, submit):
    """The worker runs one of those that were sent to pass behind each of the others."""
    express = [f"t{number}" for number in range(20)]
    done = prompts = 0
    while done < len(express):
        while grouped.queue.prompts < 5:
            await submit(grouped, f"p{prompts}", durable=False)
            prompts += 1
        running = fake.running()
        passing = [name for name in running if name in fake.passing]
        others = [name for name in running if name not in fake.passing]
        for name in (others[:1], passing[:1]):
            for each in name:
                fake.done(task=each)
                done += each in express
        assert prompts < 100, "those that came first wait for ever"
    assert prompts > 15, "nor do the others wait for them"


async def test_two_owners_share_a_device_where_one_has_express_tasks_and_the_other_long_ones(
    lanes, fake, submit, seconds
):
    for number in range(30):
        seconds[f"long{number}"] = 0.02
        await submit(lanes, f"long{number}", owner="lara")
    for number in range(150):
        seconds[f"short{number}"] = 0.004
        await submit(lanes, f"short{number}", owner="emil")
    spent = {"long": 0.0, "short": 0.0}
    # The device computes no more than two express tasks beside each long one, and they wait for that.
    while lanes.queue.waiting("lara") and lanes.queue.waiting("emil"):
        running = fake.running()
        short = [name for name in running if name.startswith("short")][:2]
        for name in (*short, *[name for name in running if name.startswith("long")][:1]):
            fake.done(task=name, seconds=0.03)
            spent[name.rstrip("0123456789")] += seconds[name]
    assert 0.4 < spent["short"] / sum(spent.values()) < 0.6, spent
    while fake.running():
        fake.done()
    assert lanes.queued == 0


async def test_long_tasks_of_others_do_not_wait_for_express_ones_that_cannot_run(lanes, fake, submit, seconds):
    for number in range(8):
        seconds[f"long{number}"] = 0.4
        await submit(lanes, f"long{number}", owner="lara")
    held = lanes.placement.able
    lanes.placement.able = lambda task, worker: task.owner != "emil" and held(task, worker)
    for number in range(8):
        seconds[f"short{number}"] = 0.004
        await submit(lanes, f"short{number}", owner="emil")
    for _ in range(8):
        running = fake.running()
        assert running
        fake.done(task=running[0])
    assert lanes.queue.waiting("lara") == 0


async def test_a_task_that_lost_a_worker_goes_alone_and_waits_for_no_stream_of_express_ones(lanes, fake, submit):
    await submit(lanes, "a")
    fake.lose()
    for name in "bAcBdC":
        await submit(lanes, name)
    fake.hello()
    sent = names(fake)[1:]
    while "a" not in sent:
        assert len(fake.running()) <= 1, "nothing is sent ahead while it waits"
        fake.done()
        sent = names(fake)[1:]
    assert fake.running() == ["a"]
    fake.done()
    assert len(fake.running()) > 1


async def test_the_lease_of_a_long_task_is_not_renewed_by_express_ones(lanes, fake, submit):
    await submit(lanes, "A")
    worker = fake.fleet["cpu"]
    began = worker.moved
    for name in "abc":
        await submit(lanes, name)
        fake.done(task=name)
    assert worker.moved == began
    await submit(lanes, "B")
    fake.done(task="A")
    assert worker.moved > began
