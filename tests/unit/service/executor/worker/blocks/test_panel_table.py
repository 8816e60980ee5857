"""Table of panels: what another worker learns of a slot, and what locks keep it from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gemmserve_service.executor.worker.blocks.panel_table import MAX_SLOTS, Offer, PanelsFile, PanelTable
from gemmserve_service.store.extents.memfd import create_panel_table

OFFERS = [Offer(bytes([number]) * 64, 512 * number, 1000 + number) for number in range(3)]


@pytest.fixture
def path():
    fd = create_panel_table(3)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


@pytest.fixture
def tables(path):
    made = [PanelTable(PanelsFile(path, row), f"0000:0{row}:00.0") for row in range(2)]
    yield made
    for table in made:
        table.close()


def found(table, side="a", panel=7, parent="t"):
    return list(table.find(parent, side, panel))


def fill(table, slot, side="a", panel=7):
    assert table.retract(slot)
    table.coming(slot, side, panel)
    table.ready(slot)


def test_others_see_a_panel_from_when_it_is_under_way(tables) -> None:
    owner, other = tables
    generation = owner.begin("t", OFFERS)
    assert found(other) == []
    assert owner.retract(1)
    owner.coming(1, "a", 7)
    (coming,) = found(other)
    assert not coming.ready
    assert not other.lease(coming)
    owner.ready(1)
    (there,) = found(other)
    assert (there.row, there.slot, there.generation, there.bus_id) == (0, 1, generation, "0000:00:00.0")
    assert (there.offer, there.ready, there.process) == (OFFERS[1], True, os.getpid())
    assert found(other, "b") == found(other, panel=6) == found(other, parent="u") == []
    assert found(owner) == [], "one's own is none of others'"


def test_a_slot_that_is_read_is_not_filled_again(tables) -> None:
    owner, other = tables
    owner.begin("t", OFFERS)
    fill(owner, 1)
    (there,) = found(other)
    assert other.lease(there)
    assert not owner.retract(1)
    assert found(other) == [], "nobody else comes"
    assert other.lasts(there), "it is still what it was"
    other.release(there)
    assert owner.retract(1)
    fill(owner, 1)
    assert not other.lasts(there)
    assert not other.lease(there), "of the same panel, filled again: it is looked for again"
    assert other.lease(*found(other))


def test_a_lease_of_what_was_struck_out_is_none(tables) -> None:
    owner, other = tables
    owner.begin("t", OFFERS)
    fill(owner, 0)
    (there,) = found(other)
    assert owner.retract(0)
    assert not other.lease(there)
    assert owner.retract(0), "nothing is left locked"


@pytest.mark.parametrize("change", ["end", "begin", "renew"])
def test_another_generation_is_noticed(tables, change) -> None:
    owner, other = tables
    generation = owner.begin("t", OFFERS)
    fill(owner, 0)
    (there,) = found(other)
    assert other.lease(there)
    assert other.hold_mapping(there)
    assert owner.mapped(generation)
    {"end": owner.end, "renew": owner.renew, "begin": lambda: owner.begin("t", OFFERS)}[change]()
    assert not other.lasts(there)
    other.release(there)
    assert not other.lease(there)
    assert owner.mapped(generation)
    other.drop_mapping(0, generation)
    assert not owner.mapped(generation)
    assert not other.hold_mapping(there)
    assert not owner.mapped(generation)


@pytest.mark.parametrize("change", ["end", "renew"])
def test_memory_that_may_have_gone_is_not_mapped(tables, change) -> None:
    """A reader with a lease maps the memory after its owner has looked whether anybody has it mapped."""
    owner, other = tables
    generation = owner.begin("t", OFFERS)
    fill(owner, 0)
    (there,) = found(other)
    assert other.lease(there)
    {"end": owner.end, "renew": owner.renew}[change]()
    assert not owner.mapped(generation)
    assert not other.hold_mapping(there)


def test_a_worker_that_begins_again_has_nothing(tables, path) -> None:
    owner, other = tables
    owner.begin("t", OFFERS)
    fill(owner, 0)
    (there,) = found(other)
    assert other.lives(there)
    owner.close()
    assert not other.lives(there)
    assert not other.lease(there)
    tables[0] = again = PanelTable(PanelsFile(path, 0), "0000:00:00.0")
    assert found(other) == []
    assert again.begin("t", OFFERS) > there.generation
    fill(again, 0)
    assert not other.lease(there)
    assert other.lease(*found(other))


def test_a_row_is_one_workers(tables, path) -> None:
    with pytest.raises(BlockingIOError, match="row 0"):
        PanelTable(PanelsFile(path, 0), "0000:02:00.0")
    with pytest.raises(ValueError, match="row 3 of 3"):
        PanelTable(PanelsFile(path, 3), "0000:02:00.0")


def test_more_slots_than_a_row_has_are_not_shared(tables) -> None:
    owner, other = tables
    owner.begin("t", OFFERS * MAX_SLOTS)
    fill(owner, MAX_SLOTS - 1)
    assert len(found(other)) == 1


READER = """
import sys, time
from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile, PanelTable
path, what = sys.argv[1:]
table = PanelTable(PanelsFile(path, 2), "0000:02:00.0")
if what == "reads":
    (there,) = table.find("t", "a", 7)
    assert table.lease(there) and table.hold_mapping(there)
else:
    from gemmserve_service.executor.worker.blocks.panel_table import Offer
    table.begin("t", [Offer(bytes(64), 0, 1)])
    assert table.retract(0)
    table.coming(0, "a", 7)
    table.ready(0)
print("there", flush=True)
time.sleep(600)
"""


@pytest.fixture
def process(path):
    """Another worker, by what it does; killed at the end."""
    started = []

    def start(what):
        command = [sys.executable, "-c", READER, path, what]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "there\n"
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def test_a_killed_reader_holds_nothing(tables, process) -> None:
    owner, _ = tables
    generation = owner.begin("t", OFFERS)
    fill(owner, 0)
    reader = process("reads")
    assert not owner.retract(0)
    assert owner.mapped(generation)
    reader.kill()
    reader.wait()
    assert owner.retract(0)
    assert not owner.mapped(generation)


def test_a_killed_owner_is_noticed_by_who_reads(tables, process) -> None:
    _, other = tables
    owner = process("has")
    (there,) = found(other)
    assert other.lease(there)
    assert other.lasts(there)
    owner.send_signal(signal.SIGSTOP)
    assert other.lasts(there), "its memory stays"
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    assert not other.lasts(there), "before anybody has waited for it"
    assert not other.lives(there)
