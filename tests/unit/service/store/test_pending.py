"""The life of pending results: every state and event of the table, and what holds on every path through it."""

from __future__ import annotations

import itertools
import re

import pytest

from gemmserve_service.store import pending
from gemmserve_service.store.pending import Event, Instruction, State, handle_event

STARTS = (State.UNRECORDED, State.UNRECORDED_HOST, State.FOUND)
LINE = re.compile(r"^    ([A-Z_, ]{18})  ([A-Z_, ]{24})  ([A-Z_, ]{18}) ? ?([A-Z_, ]*)$")


def names(text):
    return [name for name in text.replace(",", " ").split() if name]


def documented():
    """The docstring's table: (state, event) -> (state, instructions)."""
    table, states = {}, []
    for line in pending.__doc__.splitlines():
        found = LINE.match(line.ljust(74))
        if found is None or not found[2].strip():
            continue
        named, events, (after,), instructions = map(names, found.groups())
        states = named or states
        for state, event in itertools.product(states, events):
            for each in ("HELD", "REQUESTED", "POSTPONED") if state == "ON_DEVICE" else (state,):
                table[State[each], Event[event]] = State[after], tuple(Instruction[name] for name in instructions)
    return table


def test_the_table_of_the_docstring_is_what_happens():
    table = documented()
    for state, event in itertools.product(State, Event):
        assert handle_event(state, event) == table.get((state, event), (state, ())), (state, event)


def paths():
    """Every state that can be reached, with the events that lead there, one path for each."""
    found = dict.fromkeys(STARTS, ())
    waiting = list(STARTS)
    while waiting:
        state = waiting.pop(0)
        for event in Event:
            after, _ = handle_event(state, event)
            if after not in found:
                found[after] = (*found[state], event)
                waiting.append(after)
    return found


def test_every_state_is_reached_and_leads_to_the_end():
    assert set(paths()) == set(State)
    leads = {State.SETTLED}
    for _ in State:
        leads |= {state for state in State if any(handle_event(state, event)[0] in leads for event in Event)}
    assert leads == set(State)


@pytest.mark.parametrize("event", Event)
def test_nothing_happens_after_the_end(event):
    assert handle_event(State.SETTLED, event) == (State.SETTLED, ())


TRANSITIONS = [(state, event, *handle_event(state, event)) for state, event in itertools.product(State, Event)]


def test_what_is_held_is_released_once_on_every_path():
    last = {Instruction.FREE, Instruction.RELEASE}
    for state, event, after, instructions in TRANSITIONS:
        assert bool(last & {*instructions}) == (after is State.SETTLED and state is not after), (state, event)


def test_a_place_that_a_lost_process_may_write_to_is_tainted_before_anything_else():
    for state, event, after, instructions in TRANSITIONS:
        if event is Event.WORKER_LOST and instructions:
            assert instructions[0] is Instruction.TAINT, state
        if state in {State.UNRECORDED_LOST, State.FOUND} and after is State.SETTLED:
            assert instructions[0] is Instruction.TAINT, event


def test_a_worker_is_told_only_what_concerns_results_that_it_has():
    told = {Instruction.WRITE_LATER, Instruction.WRITE_FIRST, Instruction.WRITE_LAST, Instruction.DROP}
    held = {State.UNRECORDED, State.HELD, State.REQUESTED, State.POSTPONED}
    for state, event, _, instructions in TRANSITIONS:
        assert not told & {*instructions} or state in held, (state, event)


def test_what_the_arena_has_is_shown_there_and_never_computed_again():
    for state, event, after, instructions in TRANSITIONS:
        assert (Instruction.SHOW in instructions) == (after is State.HOST is not state), (state, event)
        assert state is not State.HOST or after in {State.HOST, State.STORED, State.SETTLED}, event


def test_a_recomputation_is_cancelled_only_while_there_is_one():
    for state, event, after, instructions in TRANSITIONS:
        assert (Instruction.CANCEL in instructions) <= (state is State.RECOMPUTING), event
        assert (Instruction.RECOMPUTE in instructions) == (after is State.RECOMPUTING is not state), (state, event)


def test_an_unknown_reason_is_left_out():
    assert str(pending.lost("job_1")).endswith("computed again")
    assert str(pending.lost("job_1", "no operand")).endswith("computed again: no operand")
