"""Work in stages: in order, one ahead, alone where it must be, and every piece told of its end."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from gemmserve_service.executor.worker.pipeline import Pipeline

WAIT_S = 60
STAGES = ("load", "compute", "finish", "store")


class Work:
    """Notes what happens to it; `at` = {stage: what is called there}."""

    def __init__(self, name, log, **at):
        self.name = name
        self.log = log
        self.at = at

    def _stage(self, stage):
        self.log.append(f"{stage} {self.name}")
        self.at.get(stage, lambda: None)()
        self.log.append(f"{stage} {self.name} over")

    def load(self):
        self._stage("load")

    def compute(self):
        self._stage("compute")

    def finish(self):
        self._stage("finish")

    def store(self):
        self._stage("store")


@pytest.fixture
def pipeline():
    one = Pipeline()
    yield one
    one.close()


@pytest.fixture
def ended():
    return []


@pytest.fixture
def put(pipeline, ended):
    def put(work):
        pipeline.put(work, lambda work, error: ended.append((work.name, error)))

    return put


def test_every_stage_in_order(pipeline, put, ended):
    log = []
    for name in range(5):
        put(Work(name, log))
    pipeline.drain()
    assert ended == [(name, None) for name in range(5)]
    for stage in STAGES:
        assert [line for line in log if line.startswith(stage) and "over" not in line] == [
            f"{stage} {name}" for name in range(5)
        ]
    for name in range(5):
        mine = [line for line in log if str(name) in line]
        assert mine == [f"{stage} {name}{over}" for stage in STAGES for over in ("", " over")]


def test_four_at_once_and_no_more_than_one_ahead(pipeline, put, ended):
    """Store 0, finish 1, compute 2 and load 3 meet; 5 is not loaded before 3 is computed."""
    meet = threading.Barrier(4)
    computed = threading.Event()
    log = []

    def join():
        meet.wait(WAIT_S)

    put(Work(0, log, store=join))
    put(Work(1, log, finish=join))
    put(Work(2, log, compute=join))
    put(Work(3, log, load=join, compute=lambda: computed.wait(WAIT_S)))
    put(Work(4, log))
    put(Work(5, log))
    meet_over = threading.Event()
    threading.Timer(0.2, meet_over.set).start()
    meet_over.wait(WAIT_S)
    assert "load 5" not in log
    computed.set()
    pipeline.drain()
    assert [name for name, _ in ended] == [0, 1, 2, 3, 4, 5]
    assert log.index("load 5") > log.index("compute 3 over")


def test_one_is_computed_behind_the_one_that_is_waited_for_and_no_more(pipeline, put, ended):
    finishing, go_on = threading.Event(), threading.Event()
    computed, log = threading.Event(), []
    put(Work(0, log, finish=lambda: (finishing.set(), go_on.wait(WAIT_S))))
    assert finishing.wait(WAIT_S)
    put(Work(1, log, compute=computed.set))
    put(Work(2, log))
    assert computed.wait(WAIT_S)
    assert "compute 2" not in log
    go_on.set()
    pipeline.drain()
    assert [name for name, _ in ended] == [0, 1, 2]
    assert log.index("compute 2") > log.index("finish 0 over")


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_ends_one_piece(pipeline, put, ended, stage):
    def fail():
        raise ValueError("no")

    log = []
    put(Work(0, log))
    put(Work(1, log, **{stage: fail}))
    put(Work(2, log))
    pipeline.drain()
    assert [(name, type(error)) for name, error in ended] == [(0, type(None)), (1, ValueError), (2, type(None))]
    later = {f"{after} 1" for after in STAGES[STAGES.index(stage) + 1 :]}
    assert not later & set(log)


@pytest.mark.parametrize("stage", STAGES)
def test_alone_means_alone(pipeline, put, ended, stage):
    log, seen = [], []
    moving = 0
    lock = threading.Lock()

    class Counted(Work):
        def _stage(self, stage):
            nonlocal moving
            with lock:
                moving += 1
            super()._stage(stage)
            with lock:
                moving -= 1

    def run(behind):
        seen.append((moving, [work.name for work in behind]))

    works = [Counted(name, log) for name in range(8)]
    works[3].at = {stage: lambda: pipeline.alone(works[3], run)}
    for work in works:
        put(work)
    pipeline.drain()
    assert [name for name, _ in ended] == list(range(8))
    ((others, behind),) = seen
    assert others == 1  # itself
    assert behind == sorted(behind)
    assert all(name > 3 for name in behind)
    assert log.index(f"{stage} 3 over") > log.index("store 2 over")


def test_two_that_want_to_be_alone_do_not_wait_for_each_other(pipeline, put, ended):
    log, order = [], []
    both = threading.Barrier(2)

    def alone(work):
        both.wait(WAIT_S)
        pipeline.alone(work, lambda behind: order.append(work.name))

    first, second = Work(0, log), Work(1, log)
    first.at = {"compute": lambda: alone(first)}
    second.at = {"load": lambda: alone(second)}
    put(first)
    put(second)
    put(Work(2, log))
    pipeline.drain()
    assert order == [0, 1]
    assert [name for name, _ in ended] == [0, 1, 2]


def test_an_error_while_alone_ends_one_piece(pipeline, put, ended):
    def fail(behind):
        raise MemoryError

    log = []
    work = Work(0, log)
    work.at = {"compute": lambda: pipeline.alone(work, fail)}
    put(work)
    put(Work(1, log))
    pipeline.drain()
    assert [(name, type(error)) for name, error in ended] == [(0, MemoryError), (1, type(None))]


def test_what_is_under_way_and_how_it_begins(ended):
    entered = []
    gate = threading.Event()
    pipeline = Pipeline(lambda: entered.append(threading.current_thread().name))
    works = [Work(name, [], compute=lambda: gate.wait(WAIT_S)) for name in range(3)]
    for work in works:
        pipeline.put(work, lambda work, error: ended.append(work.name))
    assert pipeline.under_way == works
    gate.set()
    pipeline.close()
    assert pipeline.under_way == []
    assert ended == [0, 1, 2]
    assert sorted(entered) == ["gemmserve-compute", "gemmserve-finish", "gemmserve-load", "gemmserve-store"]


def test_any_mixture_ends(ended):
    chance = random.Random(3)
    pipeline = Pipeline()
    log = []
    for name in range(300):
        work = Work(name, log)
        for stage in STAGES:
            if chance.random() < 0.1:
                work.at[stage] = lambda work=work: pipeline.alone(work, lambda behind: None)
        pipeline.put(work, lambda work, error: ended.append((work.name, error)))
    pipeline.close()
    assert ended == [(name, None) for name in range(300)]


class Threads(Work):
    """Notes which thread does what."""

    def __init__(self, name, log, *, loaded=False, prompt=False, brief=False, short=False, **at):
        super().__init__(name, log, **at)
        self.loaded, self.prompt, self.brief, self.short = loaded, prompt, brief, short

    def _stage(self, stage):
        self.log.append((self.name, stage, threading.current_thread().name.removeprefix("gemmserve-")))
        self.at.get(stage, lambda: None)()


@pytest.fixture
def short(ended):
    pipeline = Pipeline(
        loaded=lambda work: work.loaded,
        prompt=lambda work: work.prompt,
        brief=lambda work: work.brief,
        short=lambda work: work.short,
    )
    yield pipeline
    pipeline.close()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("brief", [False, True])
def test_one_thread_does_what_takes_no_time(short, ended, loaded, prompt, brief):
    log = []
    work = Threads(0, log, loaded=loaded, prompt=prompt, brief=brief)
    short.put(work, lambda work, error: ended.append((work.name, error)))
    short.drain()
    finishes = "compute" if prompt else "finish"
    assert log == [
        (0, "load", "compute" if loaded else "load"),
        (0, "compute", "compute"),
        (0, "finish", finishes),
        (0, "store", finishes if brief else "store"),
    ]
    assert ended == [(0, None)]


def test_nobody_passes_what_is_being_loaded_or_stored(short, ended):
    log = []
    loading, storing, go_on = threading.Event(), threading.Event(), threading.Event()

    def end(work, error):
        ended.append(work.name)

    stored = Threads(0, log, store=lambda: (storing.set(), go_on.wait(WAIT_S)))
    short.put(stored, end)
    assert storing.wait(WAIT_S)
    short.put(Threads(1, log, loaded=True, prompt=True, brief=True), end)  # its turn to be stored comes
    short.put(Threads(2, log, load=lambda: (loading.set(), go_on.wait(WAIT_S))), end)
    assert loading.wait(WAIT_S)
    short.put(Threads(3, log, loaded=True, prompt=True, brief=True), end)
    assert ended == []
    go_on.set()
    short.drain()
    assert ended == [0, 1, 2, 3]
    assert (1, "load", "compute") in log
    assert (1, "store", "compute") not in log
    assert (3, "load", "load") in log


def test_one_thread_does_all_of_short_work_that_is_alone_and_no_other(short, ended):
    log, computing, go_on = [], threading.Event(), threading.Event()

    def end(work, error):
        ended.append(work.name)

    short.put(Threads(0, log, short=True), end)
    short.drain()
    assert {thread for _, _, thread in log} == {"compute"}
    log.clear()
    short.put(Threads(1, log, short=True, compute=lambda: (computing.set(), go_on.wait(WAIT_S))), end)
    assert computing.wait(WAIT_S)
    loaded = threading.Event()
    short.put(Threads(2, log, short=True, load=loaded.set), end)
    assert loaded.wait(WAIT_S), "while the first is computed"
    go_on.set()
    short.drain()
    assert ended == [0, 1, 2]
    assert (2, "load", "load") in log
    assert (1, "finish", "finish") in log, "the next one is computed meanwhile"


def test_who_has_short_work_may_do_it_itself_while_nothing_is_under_way(short, ended):
    log = []

    def run(work):
        return short.run(work, lambda work, error: ended.append((work.name, error)))

    assert run(Threads(0, log, short=True))
    assert log == [(0, stage, threading.current_thread().name) for stage in STAGES]
    error = ValueError("no")
    assert run(Threads(1, log, short=True, finish=lambda: (_ for _ in ()).throw(error)))
    assert ended == [(0, None), (1, error)]
    assert short.under_way == []
    assert not run(Threads(2, log))
    computing, go_on = threading.Event(), threading.Event()
    short.put(
        Threads(3, log, compute=lambda: (computing.set(), go_on.wait(WAIT_S))), lambda work, _: ended.append(work)
    )
    assert computing.wait(WAIT_S)
    assert not run(Threads(4, log, short=True))
    go_on.set()
    short.drain()
    assert run(Threads(5, log, short=True))


@pytest.mark.parametrize("loaded", [False, True])
def test_what_comes_meanwhile_waits_for_who_does_it_itself(short, ended, loaded):
    log, go_on = [], threading.Event()

    def end(work, error):
        ended.append(work.name)

    def come():
        assert [work.name for work in short.under_way] == [0]
        for name in (1, 2):
            short.put(Threads(name, log, short=True, loaded=loaded), end)
        assert not go_on.wait(0.05)

    assert short.run(Threads(0, log, short=True, compute=come), end)
    short.drain()
    assert ended == [0, 1, 2]
    computes = [(name, thread) for name, stage, thread in log if stage == "compute"]
    assert computes == [(0, threading.current_thread().name), (1, "compute"), (2, "compute")]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="switches are counted by Linux")
def test_short_work_wakes_one_thread_and_no_other(ended):
    """Each thread that is woken for nothing competes for the interpreter with the one that has something to do."""
    threads = {}
    pipeline = Pipeline(
        lambda: threads.setdefault(
            threading.current_thread().name.removeprefix("gemmserve-"), threading.get_native_id()
        ),
        short=lambda work: work.short,
    )
    try:
        for name in range(200):
            pipeline.put(Threads(name, [], short=True), lambda work, error: ended.append(work.name))
            pipeline.drain()
            if name == 0:
                began = switches(threads)
        woken = {name: count - began[name] for name, count in switches(threads).items()}
    finally:
        pipeline.close()
    assert ended == list(range(200))
    assert max(woken[name] for name in ("load", "finish", "store")) <= 20, woken


def switches(threads):
    """How often each thread has slept."""
    texts = {name: Path(f"/proc/self/task/{number}/status").read_text() for name, number in threads.items()}
    return {name: int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for name, text in texts.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_on_the_short_way(short, ended, stage):
    def fail():
        raise ValueError("no")

    log = []
    for name in range(3):
        work = Threads(name, log, loaded=True, prompt=True, brief=True, **({stage: fail} if name == 1 else {}))
        short.put(work, lambda work, error: ended.append((work.name, type(error))))
    short.drain()
    assert ended == [(0, type(None)), (1, ValueError), (2, type(None))]
    assert tuple(entry[1] for entry in log if entry[0] == 1) == STAGES[: STAGES.index(stage) + 1]


def test_any_mixture_of_ways_ends_in_order(short, ended):
    chance = random.Random(4)
    log = []
    for name in range(400):
        work = Threads(name, log, **{way: chance.random() < 0.5 for way in ("loaded", "prompt", "brief", "short")})
        for stage in STAGES:
            if chance.random() < 0.1:
                work.at[stage] = lambda work=work: short.alone(work, lambda behind: None)
        short.put(work, lambda work, error: ended.append((work.name, error)))
        if chance.random() < 0.2:
            short.drain()
    short.drain()
    assert ended == [(name, None) for name in range(400)]
    for stage in STAGES:
        assert [entry[0] for entry in log if entry[1] == stage] == list(range(400))


class Begun(Threads):
    """Work that a device is given; `over`: whether it has done it."""

    def __init__(self, name, log, *, over=True, **at):
        super().__init__(name, log, loaded=True, brief=True, **at)
        self.over = over


@pytest.fixture
def light(ended):
    pipeline = Pipeline(
        loaded=lambda work: work.loaded, brief=lambda work: work.brief, light=lambda work: isinstance(work, Begun)
    )
    yield pipeline
    pipeline.close()


def test_who_has_work_may_begin_several_pieces_and_settle_those_that_are_over(light, ended):
    log, works = [], []

    def end(work, error):
        ended.append((work.name, error))

    error = ValueError("no")
    works = [Begun(0, log, over=False), Begun(1, log), Begun(2, log, over=False), Begun(3, log)]
    works[1].at["compute"] = lambda: (_ for _ in ()).throw(error)
    assert not light.begun
    for work in works:
        assert light.begin(work, end, settles=True)
    assert [entry[:2] for entry in log] == [(work.name, stage) for work in works for stage in ("load", "compute")]
    assert light.begun
    assert light.under_way == works
    assert ended == []
    assert light.settle(lambda work: work.over)
    assert ended == [(0, None), (1, error)], "the oldest in any case"
    assert light.settle(lambda work: work.over)
    assert [name for name, _ in ended] == [0, 1, 2, 3]
    assert not light.begun
    assert not light.settle(lambda work: work.over)
    assert light.idle
    assert {thread for _, _, thread in log} == {threading.current_thread().name}


def test_who_does_not_wait_settles_what_is_over(light, ended):
    works = [Begun(name, [], over=name == 1) for name in range(3)]
    for work in works:
        assert light.begin(work, lambda work, _: ended.append(work.name), settles=True)
    assert not light.settle(lambda work: work.over, wait=False)
    assert ended == []
    works[0].over = True
    assert light.settle(lambda work: work.over, wait=False)
    assert ended == [0, 1]
    assert light.begun
    assert light.settle(lambda work: work.over)
    assert ended == [0, 1, 2]


def test_nothing_is_begun_before_what_came_first(light, ended):
    log, computing, go_on = [], threading.Event(), threading.Event()

    def end(work, error):
        ended.append(work.name)

    light.put(Threads(0, log, compute=lambda: (computing.set(), go_on.wait(WAIT_S))), end)
    assert computing.wait(WAIT_S)
    assert not light.begin(Begun(1, log), end, settles=True)
    light.put(Threads(1, log), end)
    assert not light.begin(Begun(2, log), end, settles=True)
    go_on.set()
    light.drain()
    assert light.begin(Begun(2, log), end, settles=True)
    assert ended == [0, 1]
    light.settle(lambda work: work.over)
    assert ended == [0, 1, 2]


def test_threads_of_the_stages_finish_what_was_begun_before_other_work(light, ended):
    log = []

    def end(work, error):
        ended.append(work.name)

    for name in range(3):
        assert light.begin(Begun(name, log), end, settles=True)
    light.put(Threads(3, log), end)
    light.drain()
    assert ended == [0, 1, 2, 3]
    assert not light.settle(lambda work: work.over)
    for name in range(4, 6):
        assert light.begin(Begun(name, log), end, settles=True)
    light.leave()
    light.drain()
    assert light.begin(Begun(6, log), end, settles=True)
    light.close()
    assert ended == list(range(7))
    assert {thread for name, stage, thread in log if stage == "finish" and name != 3} == {"finish"}


def test_who_begins_work_may_leave_it_to_the_threads_of_the_stages(light, ended):
    log = []

    def end(work, error):
        ended.append(work.name)

    for name in range(4):
        assert light.begin(Begun(name, log), end, settles=name % 2 == 0)
    light.drain()
    assert ended == [0, 1, 2, 3]
    assert {thread for name, stage, thread in log if stage == "compute"} == {threading.current_thread().name}
    finish = {thread for name, stage, thread in log if stage == "finish"}
    assert finish == {"finish"}
    assert not light.begun


def test_what_was_begun_behind_work_that_is_being_finished_is_left_to_its_thread(light, ended):
    log, finishing, go_on = [], threading.Event(), threading.Event()

    def end(work, error):
        ended.append(work.name)

    light.put(Threads(0, log, finish=lambda: (finishing.set(), go_on.wait(WAIT_S))), end)
    assert finishing.wait(WAIT_S)
    assert light.begin(Begun(1, log), end, settles=True), "the device has nothing else to begin with"
    assert not light.settle(lambda work: work.over)
    go_on.set()
    light.drain()
    assert ended == [0, 1]
    assert (1, "finish", "finish") in log


def test_who_wants_to_be_alone_waits_for_what_was_begun(light, ended):
    log, alone = [], []
    wants = Threads(2, log)
    wants.at["load"] = lambda: light.alone(wants, lambda behind: alone.append(list(ended)))
    for name in range(2):
        assert light.begin(Begun(name, log), lambda work, error: ended.append(work.name), settles=True)
    light.put(wants, lambda work, error: ended.append(work.name))
    light.drain()
    assert alone == [[0, 1]]


def test_light_work_is_computed_ahead_and_no_other(light, ended):
    log, finishing, go_on = [], threading.Event(), threading.Event()

    def end(work, error):
        ended.append(work.name)

    light.put(Begun(0, log, finish=lambda: (finishing.set(), go_on.wait(WAIT_S))), end)
    assert finishing.wait(WAIT_S)
    computed = threading.Event()
    for name in range(1, 4):
        light.put(Begun(name, log, compute=computed.set if name == 3 else lambda: None), end)
    assert computed.wait(WAIT_S)
    light.put(Threads(4, log, loaded=True), end)
    assert not go_on.wait(0.05)
    assert (4, "compute", "compute") not in log
    go_on.set()
    light.drain()
    assert ended == list(range(5))


def test_no_more_than_some_are_begun_ahead(light, ended, monkeypatch):
    monkeypatch.setattr("gemmserve_service.executor.worker.pipeline._MOST_AHEAD", 2)
    log = []
    begun = [light.begin(Begun(name, log), lambda *_: None, settles=True) for name in range(3)]
    assert begun == [True, True, False]
    light.settle(lambda work: work.over)
    assert light.idle


def test_any_mixture_with_work_that_is_begun_ends_in_order(light, ended):
    chance = random.Random(5)
    log = []

    def end(work, error):
        ended.append((work.name, error))

    for name in range(600):
        if chance.random() < 0.7:
            work = Begun(name, log, over=chance.random() < 0.5)
            if not light.begin(work, end, settles=chance.random() < 0.7):
                light.put(work, end)
        else:
            work = Threads(name, log, loaded=chance.random() < 0.5, brief=chance.random() < 0.5)
            if chance.random() < 0.2:
                work.at["compute"] = lambda work=work: light.alone(work, lambda behind: None)
            light.put(work, end)
        if chance.random() < 0.5:
            light.settle(lambda work: work.over)
        if chance.random() < 0.1:
            light.drain()
    light.drain()
    assert ended == [(name, None) for name in range(600)]
    for stage in STAGES:
        assert [entry[0] for entry in log if entry[1] == stage] == list(range(600))
