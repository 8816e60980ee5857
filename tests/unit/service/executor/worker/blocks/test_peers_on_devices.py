"""Two workers of a host at one large product, on the stand-in for CuPy: what comes up from the host, and from where the
rest comes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gemmserve_kernels.blocks.grid import shells
from gemmserve_service.store.extents.memfd import create_panel_table

SCRIPT = Path(__file__).parents[5] / "support" / "peer_panels_script.py"
N, SIDE = 512, 128
PANEL = SIDE * N * 4
ACROSS = N // SIDE
RNG = np.random.default_rng(3)
A, B = (RNG.integers(-8, 9, (N, N)).astype("f4") for _ in range(2))
EXACT = A @ B
"""Sums below 2^24: exact in float32, in any order."""


def turns(first):
    """Halves of the columns, that with the first one first."""
    halves = range(ACROSS // 2), range(ACROSS // 2, ACROSS)
    return halves[::-1] if first else halves


class Worker:
    def __init__(self, folder, device, panels, **told):
        told = {"n": N, "side": SIDE, "folder": str(folder), "device": device, "panels": panels, **told}
        variables = {
            "CUPY_ON_NUMPY_SHARED": str(folder / "memory"),
            "CUPY_ON_NUMPY_DEVICES": "2",
            "CUPY_ON_NUMPY_PEERS": str(told.pop("peers", 1)),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )

    def begin(self, rows, first=0, *, parent="t", result="d"):
        """Have it compute those rows of blocks as a wavefront from that column on."""
        columns = [column for pair in zip(*turns(first), strict=True) for column in pair]
        order = [rows[row] * ACROSS + columns[column] for row, column in shells(len(rows), ACROSS)]
        self.ask(step="run", order=order, parent=parent, result=result)

    def ask(self, **step):
        self.process.stdin.write(json.dumps(step) + "\n")
        self.process.stdin.flush()

    def said(self):
        line = self.process.stdout.readline()
        assert line, "it has ended"
        return json.loads(line)

    def forget(self, parent="t"):
        self.ask(step="forget", parent=parent)
        return self.said()

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "a").write_bytes(A.tobytes())
    (tmp_path / "b").write_bytes(B.tobytes())
    for name in "de":
        (tmp_path / name).write_bytes(np.full((N, N), np.nan, "f4").tobytes())
    return tmp_path


@pytest.fixture
def start(folder):
    """Workers, ready; ended afterwards."""
    fd = create_panel_table(2)
    made = []

    def start_them(*devices, **told):
        new = [Worker(folder, device, f"/proc/{os.getpid()}/fd/{fd}", **told) for device in devices]
        made.extend(new)
        for each in new:
            assert each.said()["step"] == "ready"
        return new

    yield start_them
    for each in made:
        each.kill()
        each.process.stdin.close()
        each.process.stdout.close()
    os.close(fd)


def bits(folder, name="d"):
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


RIGHT = hashlib.sha256(EXACT.tobytes()).hexdigest()


def test_each_panel_comes_up_once_for_both(folder, start) -> None:
    """Rows of A to one device each, and B once: to whichever is there first, from where the other copies it."""
    one, other = start(0, 1, kernel_s=0.01, piece_s=0.0003)
    for parent, result in (("t", "d"), ("u", "e")):  # the second finds nothing left of the first
        one.begin([0, 1], parent=parent, result=result)
        other.begin([2, 3], 2, parent=parent, result=result)
        said = [each.said() for each in (one, other)]
        assert [each["answers"] for each in said] == [["done"] * 8] * 2
        assert bits(folder, result) == RIGHT
        assert 8 * PANEL <= sum(each["uploaded"] for each in said) <= 9 * PANEL
        assert sum(each["uploaded"] + each["copied"] for each in said) == 12 * PANEL
        for each in (one, other):
            each.ask(step="forget", parent=parent)
        assert [each.said() for each in (one, other)] == [{"step": "forgot", "used": 0, "mapped": 0}] * 2


def test_without_a_way_between_devices_each_brings_all(folder, start) -> None:
    one, other = start(0, 1, peers=0)
    one.begin([0, 1])
    other.begin([2, 3], 2)
    said = [each.said() for each in (one, other)]
    assert [(each["uploaded"], each["copied"]) for each in said] == [(6 * PANEL, 0)] * 2
    assert bits(folder) == RIGHT


def test_a_device_that_comes_later_finds_all_of_it_there(folder, start) -> None:
    one, other = start(0, 1)
    one.begin([0, 1])
    assert one.said()["uploaded"] == 6 * PANEL
    other.begin([2, 3])
    said = other.said()
    assert (said["uploaded"], said["copied"]) == (2 * PANEL, 4 * PANEL)
    assert bits(folder) == RIGHT


def test_panels_come_from_a_fast_host_while_blocks_take_longer(folder, start) -> None:
    """Nothing of another device's is ever mapped, in the first product or the next."""
    one, other = start(0, 1, always=False, least_bytes=1, kernel_s=0.1)
    for parent, result in (("t", "d"), ("u", "e")):
        one.begin([0, 1], parent=parent, result=result)
        other.begin([2, 3], 2, parent=parent, result=result)
        said = [each.said() for each in (one, other)]
        assert [(each["uploaded"], each["copied"]) for each in said] == [(6 * PANEL, 0)] * 2
        assert bits(folder, result) == RIGHT


def test_panels_come_from_a_device_where_the_host_holds_this_one_up(folder, start) -> None:
    """From when a block was computed, and from the beginning of the next product of that grid."""
    one, other = start(0, 1, always=False, least_bytes=1, piece_s=0.1)
    one.begin([0, 1])
    assert one.said()["uploaded"] == 6 * PANEL
    other.begin([2, 3])
    said = other.said()
    assert 0 < said["copied"] < 4 * PANEL, "the first pair comes from the host"
    assert said["uploaded"] + said["copied"] == 6 * PANEL
    one.begin([0, 1], parent="u", result="e")
    one.said()
    other.begin([2, 3], parent="u", result="e")
    said = other.said()
    assert (said["uploaded"], said["copied"]) == (2 * PANEL, 4 * PANEL)
    assert bits(folder) == bits(folder, "e") == RIGHT


def test_another_product_has_none_of_its_panels(folder, start) -> None:
    one, other = start(0, 1)
    one.begin([0, 1])
    one.said()
    other.begin([2, 3], parent="u")
    assert other.said()["copied"] == 0


def test_a_device_killed_while_it_is_read_costs_that_panel_alone(folder, start) -> None:
    """What was being copied comes from the host, as does all that was there alone; so it is with whoever is killed as
    it reads, and each finds the other again.
    """
    (one,) = start(0)
    (other,) = start(1, stop_in_copy=0.5)
    one.begin([0, 1])
    one.said()
    other.begin([2, 3])
    assert other.said()["step"] == "copies"
    one.kill()
    while (said := other.said())["step"] == "copies":
        pass
    assert said["answers"] == ["done"] * 8
    assert said["uploaded"] == 6 * PANEL, "the panel that was copied as it ended, too"
    assert bits(folder) == RIGHT
    (one,) = start(0)
    one.begin([0, 1], result="e")
    said = one.said()
    assert (said["uploaded"], said["copied"]) == (2 * PANEL, 4 * PANEL)
    other.begin([2, 3], parent="u", result="e")
    other.said()
    one.begin([0, 1], parent="u", result="e")
    one.said()
    other.kill()
    assert one.forget("u") == {"step": "forgot", "used": 0, "mapped": 0}
    assert bits(folder, "e") == RIGHT


@pytest.mark.parametrize("panels", [2, 3, 5])
def test_slots_that_come_round_give_the_same_bits(folder, start, panels) -> None:
    """With memory for so few panels each is let go while the other device may read it."""
    budget = panels * PANEL + 2 * SIDE * SIDE * 4
    one, other = start(0, 1, budget=budget, kernel_s=0.005)
    for parent, result in (("t", "d"), ("u", "e")):
        one.begin([0, 1], parent=parent, result=result)
        other.begin([2, 3], parent=parent, result=result)
        said = [each.said() for each in (one, other)]
        assert [each["answers"] for each in said] == [["done"] * 8] * 2, said
        assert bits(folder, result) == RIGHT
        assert max(each["peak"] for each in said) <= budget
    for each in (one, other):
        each.ask(step="forget", parent="u")
    assert [each.said() for each in (one, other)] == [{"step": "forgot", "used": 0, "mapped": 0}] * 2
