"""Large products on a device, by blocks through planned memory: on the stand-in for CuPy, whose memory is bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.load.block_trace import last_product

SCRIPT = Path(__file__).parents[5] / "support" / "large_product_script.py"


@pytest.fixture(scope="module")
def all_cases():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def cases(all_cases):
    return [case for case in all_cases if case["case"] in {"plain", "turned", "added"}]


@pytest.fixture
def reductions(all_cases):
    return [case for case in all_cases if case["case"] == "reduced"]


def test_every_product_is_right(cases) -> None:
    """k = 512 roundings of float32, of sums below 150: an a-priori bound of 5e-3; a wrong element is off by more."""
    assert len(cases) == 25
    for case in cases:
        assert case["answers"] == ["done"], case["detail"]
        assert case["tasks"] == case["expected"]
        assert case["error"] < 5e-3


def test_bits_depend_on_the_product_alone(cases) -> None:
    """Not on the budget, the order, on whether copies overlap, or on memory that was short for a moment."""
    for name in ("plain", "turned", "added"):
        assert len({case["bits"] for case in cases if case["case"] == name and case["fits"]}) == 1


def test_what_is_uploaded_is_what_was_planned(cases) -> None:
    """With a quarter of what operands and result take, and with the least; C, which is read once, apart."""
    planned = [case for case in cases if case["fits"] and not case["failing"] and not case["shuffled"]]
    assert len(planned) == 18
    for case in planned:
        assert case["uploaded"] == case["planned"]


def test_memory_stays_within_the_budget_and_nothing_is_left(cases) -> None:
    for case in cases:
        assert case["peak"] <= case["budget"]
        assert case["used"] == 0
        assert not case["resident"]  # a block's window is no copy of the result


def test_no_window_goes_by_a_pageable_copy(cases) -> None:
    assert [case["pageable"] for case in cases if case["fits"] and not case["failing"]] == [0] * 21


def test_what_does_not_fit_is_tried(cases) -> None:
    (case,) = [case for case in cases if not case["fits"]]
    assert case["answers"] == ["done"]


def test_reductions_are_right_and_their_bits_depend_on_nothing_else(reductions) -> None:
    """Errors as above; of sums of 768 elements, in thirtieths, as many roundings as terms do not all add up."""
    assert len(reductions) == 6
    for case in reductions:
        assert case["answers"] == ["done"], case["detail"]
        assert case["tasks"] == (case["expected"] if case["blocks"] else 1)
        assert case["error"] < 5e-3
    assert len({case["bits"] for case in reductions}) == 1


def test_reductions_stream_as_they_were_planned(reductions) -> None:
    assert sum(case["streams"] for case in reductions) == 5
    for case in reductions:
        assert case["fits"]
        assert case["peak"] <= case["budget"]
        assert case["used"] == 0
        if not case["shuffled"] and not case["failing"]:
            assert case["uploaded"] == case["planned"]


def test_planes_are_made_in_strips_where_that_leaves_room_for_panels(all_cases) -> None:
    """With plenty at once; with too little for a panel more beside all planes in strips, and with less than a pair and
    its planes take. The bits are the same, and no more is taken or uploaded than was planned.
    """
    found = [case for case in all_cases if case["case"] == "stripped"]
    assert [case["strips"] > 1 for case in found] == [False, True, True]
    assert sum(found[1]["slots"]) > 2, "the panel more"
    for case in found:
        assert case["fits"]
        assert case["answers"] == ["done"]
        assert case["computed"] == [case["strips"]]
        assert case["prepared"] == case["strips"] * case["blocks"]
        assert case["peak"] <= case["budget"]
        assert case["uploaded"] == case["planned"]
    plain = {case["bits"] for case in all_cases if case["case"] == "plain" and case["fits"]}
    assert {case["bits"] for case in found} == plain


def test_panels_are_the_last_to_go_where_memory_is_short(all_cases) -> None:
    """A block that finds too little memory has copies dropped first, then half of the panels that no block uses, then
    all of these, and only then every panel, each of which is brought for its block alone from then on.
    """
    found = [case for case in all_cases if case["case"] == "short"]
    assert [case["count"] for case in found] == list(range(6))
    for case in found:
        assert case["answers"] == ["done"]
        assert case["calls"] == case["blocks"] + case["count"]
        assert case["used"] == 0
        assert case["peak"] <= case["budget"]
    assert len({case["bits"] for case in found}) == 1
    alone, copies, idle, least, none = (case["uploaded"] for case in found[1:])
    assert alone == copies == found[0]["planned"], "panels stay"
    assert copies < idle < least < none
    assert none > 0.9 * found[0]["pair"] * found[0]["blocks"]


def test_the_log_says_when_each_block_was_at_which_stage(all_cases) -> None:
    """At level debug: what the load test keeps of it."""
    case = next(case for case in all_cases if case["case"] == "short")
    lines = last_product(case["log"])
    blocks = {int(line.split()[1].rstrip(":")): line for line in lines if line.startswith("block")}
    assert list(blocks) == case["order"]
    for line in blocks.values():
        spans = [part.split() for part in line.partition(": ")[2].split(", ")]
        assert [stage for stage, _ in spans] == ["load", "compute", "finish", "store"]
        times = [float(time) for _, span in spans for time in span.split("-")]
        assert times == sorted(times)
    panels = [line.split()[1].rstrip(":") for line in lines if line.startswith("panel")]
    assert sorted(panels) == sorted(
        f"{side}{number}" for side, count in (("a", 5), ("b", 6)) for number in range(count)
    )
    assert case["h2d_s"] > 0
