"""Ids: their order, and the cell in them."""

from __future__ import annotations

import re

import pytest

from gemmserve_service.runtime import ids


@pytest.fixture
def at(monkeypatch):
    """at([ms, ...]): the clock's next readings."""

    def reading(times):
        left = iter(times)
        monkeypatch.setattr(ids, "_last_ms", 0)
        monkeypatch.setattr(ids, "_time", "")
        monkeypatch.setattr(ids.time, "time_ns", lambda: next(left) * 10**6)

    return reading


def test_ids_of_one_process_are_in_the_order_of_their_making(at):
    at([1_000_005, 1_000_004, 1_000_006])  # it is set back once
    made = [ids.new_id("arr") for _ in range(3)]
    assert made[1][4:14] == made[0][4:14] < made[2][4:14]


@pytest.mark.parametrize("cell", [0, 7])
def test_the_first_id_of_a_moment_is_between_those_before_and_those_from_then_on(at, cell):
    moments = [10**12 - 1, 10**12, 10**12 + 1]
    at(moments)
    before, then, later = [ids.new_id("job", cell) for _ in moments]
    assert before < ids.first_id("job", 1e9) < then < ids.first_id("job", 1e9 + 0.001) < later
    assert ids.first_id("job", -1e12) == ids.first_id("job", 0.0) < before
    assert ids.first_id("job", 1e12) > later


@pytest.mark.parametrize("prefix", ["arr", "job", "upl"])
def test_cell_0_leaves_its_number_out(prefix):
    assert re.fullmatch(rf"{prefix}_[0-9a-hjkmnp-tv-z]{{26}}", ids.new_id(prefix))
    assert ids.cell_of(ids.new_id(prefix)) == 0


@pytest.mark.parametrize("cell", [1, 9, 10, 255])
def test_the_cell_is_read_from_the_id(cell):
    made = ids.new_id("arr", cell)
    assert made.endswith(f"_{cell}")
    assert ids.cell_of(made) == cell


def test_ids_of_all_cells_together_sort_by_time(at):
    at(range(10**12, 10**12 + 100))
    made = [ids.new_id("arr", cell % 3) for cell in range(100)]
    assert sorted(made) == made


@pytest.mark.parametrize("text", ["", "arr_1", "arr_01jd2w7m4h8k3n5p6q9r0s1t2v_0", "arr_01jd2w7m4h8k3n5p6q9r0s1t2v_01",
                                  "arr_01jd2w7m4h8k3n5p6q9r0s1t2v_7/data", "x_7"])  # fmt: skip
def test_what_is_no_id_is_cell_0s(text):
    assert ids.cell_of(text) == 0
