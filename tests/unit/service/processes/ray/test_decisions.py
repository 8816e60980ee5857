"""Decisions of the bridge to Ray: sizes by demand, steps from what is seen."""

from __future__ import annotations

import random

import pytest

from gemmserve_service.processes.ray.decisions import SILENT_S, STALE_S, Phase, Seen, Sizing, decide
from gemmserve_service.processes.ray.demand import Demand


def at(now, queued, running=0):
    return now, Demand(now, queued, running)


def test_growth_is_at_once_and_bounded():
    sizing = Sizing(1, 4, 8, 60)
    assert sizing.target(*at(0.0, 0), present=0) == 1
    assert sizing.target(*at(1.0, 8), present=1) == 1
    assert sizing.target(*at(2.0, 8, 1), present=1) == 2
    assert sizing.target(*at(3.0, 10_000), present=2) == 4


def test_an_end_comes_when_fewer_were_enough_for_idle_s():
    sizing = Sizing(0, 10, 1, 60)
    sizing.target(*at(0.0, 5), present=0)
    sizing.target(*at(30.0, 3), present=5)
    sizing.target(*at(40.0, 0), present=5)
    assert sizing.target(*at(59.0, 0), present=5) == 5
    assert sizing.target(*at(61.0, 0), present=5) == 3
    assert sizing.target(*at(89.0, 0), present=3) == 3
    assert sizing.target(*at(91.0, 0), present=3) == 0


def test_a_bridge_that_starts_again_takes_over_what_it_finds():
    sizing = Sizing(0, 10, 1, 60)
    assert sizing.target(*at(100.0, 0), present=6) == 6
    assert sizing.target(*at(161.0, 0), present=6) == 0


@pytest.mark.parametrize("demand", [None, Demand(0.0, 0, 0)])
def test_without_news_of_the_front_the_number_stays(demand):
    sizing = Sizing(1, 4, 1, 0)
    now = STALE_S + 1
    assert sizing.target(now, demand, present=3) == 3
    assert sizing.target(now + 100, demand, present=3) == 3
    assert sizing.target(now + 200, demand, present=0) == 1
    assert sizing.target(now + 300, demand, present=9) == 4


def test_missing_ones_are_made_in_free_numbers():
    steps = decide(3, [Seen(1, Phase.SERVING)])
    assert steps.make == (0, 2)
    assert not steps.order
    assert not steps.stop
    assert not steps.remove
    assert not steps.restart


def test_an_empty_actor_is_told_to_serve():
    assert decide(2, [Seen(0, Phase.EMPTY), Seen(1, Phase.SERVING)]).order == (0,)


def test_those_that_do_nothing_go_first():
    steps = decide(1, [Seen(0, Phase.UNHEARD), Seen(1, Phase.SERVING), Seen(2, Phase.SERVING), Seen(3, Phase.EMPTY)])
    assert sorted(steps.remove) == [0, 3]
    assert steps.stop == (2,)
    assert not steps.order
    assert not steps.make


def test_one_that_stops_keeps_its_number_and_counts_no_more():
    steps = decide(2, [Seen(0, Phase.SERVING), Seen(1, Phase.STOPPING)])
    assert steps.make == (2,)
    assert not steps.stop
    assert not steps.remove


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.FOREIGN])
def test_one_at_its_end_or_of_other_settings_is_removed_and_replaced(phase):
    steps = decide(1, [Seen(0, phase)])
    assert steps.remove == (0,)
    assert steps.make == (1,)


def test_a_silent_one_is_started_again_and_one_that_waits_for_room_is_not():
    silent = SILENT_S + 1
    steps = decide(2, [Seen(0, Phase.SERVING, silent), Seen(1, Phase.UNHEARD, silent)])
    assert steps.restart == (0,)
    assert not steps.make
    assert not steps.remove
    assert not steps.order


def test_any_cluster_comes_to_the_target():
    """Steps from anything that may be seen end with `target` workers that serve, and then do nothing."""
    rng = random.Random(21)
    for _ in range(300):
        target = rng.randrange(6)
        actors = {number: rng.choice(list(Phase)) for number in rng.sample(range(9), rng.randrange(9))}
        taken = {number for number, phase in actors.items() if phase is Phase.TAKEN}
        for _ in range(6):
            steps = decide(target, [Seen(number, phase) for number, phase in actors.items()])
            touched = steps.make + steps.order + steps.stop + steps.remove + steps.restart
            assert len(set(touched)) == len(touched), "two steps for one actor"
            assert not set(steps.make) & actors.keys()
            assert not set(touched) & taken, "another server's"
            for number in steps.remove:
                del actors[number]
            actors |= dict.fromkeys(steps.order, Phase.SERVING) | dict.fromkeys(steps.stop, Phase.STOPPING)
            actors |= dict.fromkeys(steps.make, Phase.EMPTY)
            actors = {n: Phase.STOPPED if p is Phase.STOPPING and n not in steps.stop else
                      Phase.EMPTY if p is Phase.UNHEARD else p for n, p in actors.items()}  # fmt: skip
        assert sorted(actors.values()) == [Phase.SERVING] * target + [Phase.TAKEN] * len(taken)
        assert decide(target, [Seen(number, phase) for number, phase in actors.items()]) == decide(0, [])
