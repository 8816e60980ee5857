"""The bridge on a stand-in for Ray: actors that are asked for, found again, lost, replaced and taken away."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from gemmserve_service.processes.ray.bridge import Bridge, driver_environment, fingerprint
from gemmserve_service.processes.ray.decisions import OWNED_S
from gemmserve_service.processes.ray.demand import Demand
from gemmserve_service.settings import Settings


class RayError(Exception):
    pass


class Ray:
    """The module: actors by name, of which only `room` run."""

    def __init__(self, room=100):
        self.room, self.actors, self.killed = room, {}, []
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(list_named_actors=lambda: list(self.actors))

    def remote(self, _):
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *a: self.make(options, *a)))

    def make(self, options, mark):
        name = options["name"]
        if name in self.actors:
            raise ValueError(name)
        self.actors[name] = actor = Actor(self, options, mark)
        return actor

    def get_actor(self, name):
        return self.actors[name]

    def wait(self, questions, *, num_returns, timeout):
        assert num_returns == len(questions)
        assert timeout
        answered = [each for each in questions if each.actor.runs]
        return answered, [each for each in questions if each not in answered]

    def get(self, question):
        if question.actor.dies:
            question.actor.restart()
            raise RayError
        if question.actor.gone or question.actor.away:
            raise RayError
        return question.answer()

    def kill(self, actor, *, no_restart):
        self.killed.append((actor.options["name"], no_restart))
        if no_restart:
            del self.actors[actor.options["name"]]
        else:
            actor.restart()


class Actor:
    def __init__(self, ray, options, mark):
        self.ray, self.options, self.mark, self.dies, self.deaf = ray, options, mark, False, False
        self.unowned_s, self.away = 0.0, False
        self.restart()
        self.look, self.take, self.stop = (
            SimpleNamespace(remote=each) for each in (self._look, self._take, self._stop)
        )

    def restart(self):
        self.phase, self.order, self.dies = "empty", None, False

    @property
    def runs(self):
        return self.gone or (not self.deaf and list(self.ray.actors.values()).index(self) < self.ray.room)

    @property
    def gone(self):
        return self not in self.ray.actors.values()

    def _look(self, fingerprint):
        if fingerprint == self.mark:
            self.unowned_s = 0.0
        return SimpleNamespace(actor=self, answer=lambda: {
            "phase": self.phase, "fingerprint": self.mark, "unowned_s": self.unowned_s, "node": "n", "pid": 1,
            "worker": 2 if self.order else None, "starts": 1, "status": None,
        })  # fmt: skip

    def _take(self, order):
        self.phase, self.order = "serving", order

    def _stop(self):
        self.phase = "stopping"


URL = "https://front:8443"


def settings(**given):
    return Settings(
        executor="ray", join_port=8443, ray_join_url=URL, **{"ray_jobs_per_worker": 1, "ray_idle_s": 0.0, **given}
    )


def make(ray, **given):
    return Bridge(ray, settings(**given), URL, "gs_secret")


def rounds(bridge, queued, count=4):
    for _ in range(count):
        bridge.round(SimpleNamespace(last=lambda: Demand(time.monotonic(), queued, 0)))


def phases(ray):
    return {name: actor.phase for name, actor in ray.actors.items()}


def test_actors_are_detached_and_one_has_one_gpu():
    ray = Ray()
    rounds(make(ray, ray_max_workers=2), queued=9)
    assert phases(ray) == {"worker-0": "serving", "worker-1": "serving"}
    options = ray.actors["worker-1"].options
    assert options == {"name": "worker-1", "lifetime": "detached", "max_restarts": -1, "num_cpus": 1.0, "num_gpus": 1}
    order = ray.actors["worker-1"].order
    assert order["arguments"] == [
        "-m", "gemmserve.cli", "worker", "--join", URL, "--device", "cuda:0", "--name", "ray-1"
    ]  # fmt: skip
    assert order["token"] == "gs_secret"


def test_workers_are_told_of_a_network_without_tls():
    ray = Ray()
    rounds(make(ray, join_insecure=True), queued=0)
    assert "--join-insecure" in ray.actors["worker-0"].order["arguments"]


def test_workers_on_processors():
    ray = Ray()
    rounds(make(ray, ray_device="cpu", ray_cpus=4), queued=0)
    assert ray.actors["worker-0"].options["num_gpus"] == 0
    assert ray.actors["worker-0"].options["num_cpus"] == 4
    assert ray.actors["worker-0"].order["threads"] == 4


def test_the_token_is_not_in_what_makes_an_actor():
    ray = Ray()
    rounds(make(ray), queued=0)
    assert "gs_secret" not in repr((ray.actors["worker-0"].options, ray.actors["worker-0"].mark))


def test_more_than_there_is_room_for_is_asked_for():
    """That is what an autoscaler adds nodes for."""
    ray = Ray(room=1)
    bridge = make(ray)
    rounds(bridge, queued=3)
    assert list(phases(ray).values()) == ["serving", "empty", "empty"]
    assert not ray.killed
    ray.room = 2
    rounds(bridge, queued=3)
    assert list(phases(ray).values()) == ["serving", "serving", "empty"]
    rounds(bridge, queued=2)
    assert list(phases(ray).values()) == ["serving", "serving"], "no longer asked for"


def test_what_is_not_needed_ends_and_is_then_taken_away():
    ray = Ray()
    bridge = make(ray, ray_min_workers=1)
    rounds(bridge, queued=2)
    rounds(bridge, queued=0)
    assert phases(ray) == {"worker-0": "serving", "worker-1": "stopping"}
    ray.actors["worker-1"].phase = "stopped"
    rounds(bridge, queued=0)
    assert phases(ray) == {"worker-0": "serving"}
    assert ray.killed == [("worker-1", True)]


def test_one_that_does_not_end_is_taken_away_in_the_end(monkeypatch):
    ray = Ray()
    monkeypatch.setattr("gemmserve_service.processes.ray.bridge._STOP_S", 0.0)
    bridge = make(ray, ray_min_workers=0, drain_s=0)
    rounds(bridge, queued=1)
    rounds(bridge, queued=0)
    assert phases(ray) == {}


def test_an_actor_that_died_serves_again():
    ray = Ray()
    bridge = make(ray)
    rounds(bridge, queued=0)
    ray.actors["worker-0"].dies = True
    rounds(bridge, queued=0)
    assert phases(ray) == {"worker-0": "serving"}
    assert not ray.killed


def test_one_that_is_gone_for_good_is_made_anew():
    ray = Ray()
    bridge = make(ray)
    rounds(bridge, queued=0)
    del ray.actors["worker-0"]
    rounds(bridge, queued=0)
    assert phases(ray) == {"worker-0": "serving"}


def test_a_silent_one_is_killed_once_and_serves_again(monkeypatch):
    ray = Ray()
    bridge = make(ray)
    rounds(bridge, queued=0)
    monkeypatch.setattr("gemmserve_service.processes.ray.decisions.SILENT_S", -1.0)
    ray.actors["worker-0"].deaf = True
    rounds(bridge, queued=0)
    assert ray.killed == [("worker-0", False)]
    monkeypatch.undo()
    ray.actors["worker-0"].deaf = False
    rounds(bridge, queued=0)
    assert phases(ray) == {"worker-0": "serving"}


def test_the_next_bridge_finds_them_and_doubles_none():
    ray = Ray()
    rounds(make(ray), queued=3)
    before = dict(ray.actors)
    rounds(make(ray, ray_idle_s=60.0), queued=0)
    assert ray.actors == before
    assert not ray.killed


@pytest.mark.parametrize(
    "other", [{"ray_device": "cpu"}, {"ray_cpus": 2.0}, {"ray_orphan_s": 61.0}, {"join_insecure": True}]
)
def test_those_of_other_settings_are_replaced(other):
    ray = Ray()
    rounds(make(ray), queued=2)
    for actor in ray.actors.values():
        actor.unowned_s = OWNED_S
    rounds(make(ray, **other), queued=2)
    assert len(phases(ray)) == 2
    assert set(phases(ray).values()) == {"serving"}
    assert sorted(name for name, _ in ray.killed) == ["worker-0", "worker-1"]


def test_a_second_server_leaves_the_first_ones_alone_and_says_so(caplog):
    ray = Ray()
    first, second = make(ray), make(ray, ray_device="cpu")
    rounds(first, queued=2)
    before = dict(ray.actors)
    for _ in range(3):
        rounds(second, queued=9)
        rounds(first, queued=2)
    second.remove_all()
    assert ray.actors == before
    assert not ray.killed
    assert caplog.text.count("another server keeps its workers in Ray's namespace gemmserve") == 1
    for actor in ray.actors.values():
        actor.unowned_s = OWNED_S  # the first one is gone
    rounds(second, queued=1)
    assert {actor.options["num_gpus"] for actor in ray.actors.values()} == {0}


def test_two_servers_that_begin_at_once_do_not_fight():
    ray = Ray()
    first, second = make(ray, ray_min_workers=2), make(ray, ray_min_workers=2, ray_device="cpu")
    first.round(SimpleNamespace(last=lambda: Demand(time.monotonic(), 0, 0)))
    del ray.actors["worker-1"]
    second.round(SimpleNamespace(last=lambda: Demand(time.monotonic(), 0, 0)))
    for _ in range(4):
        rounds(first, queued=0, count=1)
        rounds(second, queued=0, count=1)
    assert list(phases(ray).values()) == ["serving", "serving"]
    assert {actor.options["num_gpus"] for actor in ray.actors.values()} == {1}
    killed = list(ray.killed)
    for _ in range(4):
        rounds(first, queued=0, count=1)
        rounds(second, queued=0, count=1)
    assert ray.killed == killed


def test_one_that_died_while_it_stopped_is_another_one_afterwards(monkeypatch):
    ray = Ray()
    monkeypatch.setattr("gemmserve_service.processes.ray.bridge._STOP_S", 0.0)
    bridge = make(ray, ray_min_workers=1, drain_s=0.2)
    rounds(bridge, queued=2)
    rounds(bridge, queued=0, count=1)
    ray.actors["worker-1"].restart()
    rounds(bridge, queued=2, count=1)
    time.sleep(0.3)
    rounds(bridge, queued=2)
    assert phases(ray) == {"worker-0": "serving", "worker-1": "serving"}
    assert not ray.killed


def test_a_lost_one_has_its_order_in_the_same_round():
    ray = Ray()
    bridge = make(ray)
    rounds(bridge, queued=0)
    ray.actors["worker-0"].dies = True
    rounds(bridge, queued=0, count=1)
    assert phases(ray) == {"worker-0": "serving"}


def test_one_that_somebody_else_made_anew_is_found():
    ray = Ray()
    bridge = make(ray)
    rounds(bridge, queued=0)
    ray.actors["worker-0"] = other = Actor(ray, ray.actors["worker-0"].options, bridge.fingerprint)
    rounds(bridge, queued=0, count=1)
    assert other.phase == "serving"
    del ray.actors["worker-0"]
    rounds(bridge, queued=0, count=2)
    assert phases(ray) == {"worker-0": "serving"}


def test_rounds_follow_each_other_closely_while_an_actor_is_on_its_way(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("gemmserve_service.processes.ray.bridge.time", SimpleNamespace(monotonic=lambda: now[0]))
    ray = Ray()
    bridge = make(ray)
    slow = bridge.pause_s()
    first = SimpleNamespace(last=lambda: Demand(now[0], 0, 0))
    bridge.round(first)
    fast = bridge.pause_s()
    assert fast <= slow / 4
    bridge.round(first)
    now[0] += 60.0
    bridge.round(first)
    assert (phases(ray), bridge.pause_s()) == ({"worker-0": "serving"}, slow)
    ray.actors["worker-0"].away = True
    bridge.round(first)
    assert bridge.pause_s() == fast
    for _ in range(60):  # and then it has no room
        now[0] += 1.0
        bridge.round(first)
    assert bridge.pause_s() == slow


def test_a_server_gives_up_what_it_has_beside_another_one():
    ray = Ray()
    bridge = make(ray, ray_min_workers=3)
    rounds(bridge, queued=0)
    other = Actor(ray, {"name": "worker-0"}, "x")
    ray.actors = {
        "worker-0": other,
        "worker-1": ray.actors["worker-1"],
        "worker-9": Actor(ray, {"name": "worker-9"}, "x"),
    }
    ray.actors["worker-9"].deaf = True
    rounds(bridge, queued=9)
    assert phases(ray) == {"worker-0": "empty", "worker-1": "stopping", "worker-9": "empty"}
    bridge.remove_all()
    assert list(ray.actors) == ["worker-0", "worker-9"]


def test_other_actors_of_the_namespace_are_left_alone():
    ray = Ray()
    ray.actors["somebody"] = Actor(ray, {"name": "somebody"}, "x")
    bridge = make(ray)
    rounds(bridge, queued=0)
    bridge.remove_all()
    assert set(ray.actors) == {"somebody"}


def test_the_fingerprint_says_what_an_actor_was_made_for():
    one = fingerprint(settings(), URL, "gs_secret")
    assert one == fingerprint(settings(ray_min_workers=0), URL, "gs_secret")
    others = [fingerprint(settings(), "http://other:1", "gs_secret"), fingerprint(settings(), URL, "gs_other"),
              fingerprint(settings(ray_device="cpu"), URL, "gs_secret")]  # fmt: skip
    assert len({one, *others}) == 4


def test_rays_token_is_asked_for_and_losses_are_told_at_once_unless_the_operator_says_otherwise():
    given = {"RAY_AUTH_MODE": "token", "RAY_timeout_ms_task_wait_for_death_info": "0"}
    assert driver_environment({"HOME": "/h"}) == {**given, "HOME": "/h"}
    assert driver_environment({"RAY_AUTH_MODE": "disabled"}) == {**given, "RAY_AUTH_MODE": "disabled"}
