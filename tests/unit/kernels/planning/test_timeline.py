"""A worker's way through blocks, followed from event to event: times that can be said without it."""

from __future__ import annotations

import math

import pytest

from gemmserve_kernels.blocks.memory_plan import Upload
from gemmserve_kernels.planning.rates import Way
from gemmserve_kernels.planning.timeline import Pace, timeline

WAY = Way(up=1.0, down=2.0)
"""A panel of 10 bytes goes up in 10 s, a window of 4 goes down in 2 s."""


def uploads(*rows):
    return [Upload("a", number, 0, after, before, 10) for number, (after, before) in enumerate(rows)]


def test_one_block_is_what_it_is_made_of() -> None:
    assert timeline(uploads((-1, 0)), [7.0], 4, WAY, pace=Pace()) == pytest.approx(10 + 7 + 2)


def test_panels_come_under_products_and_windows_go_under_them() -> None:
    """Three panels of 10 s one after the other; each block begins when its panel is there, products being shorter."""
    there = uploads((-1, 0), (-1, 1), (-1, 2))
    assert timeline(there, [7.0] * 3, 4, WAY, pace=Pace()) == pytest.approx(30 + 7 + 2)
    assert timeline(there, [12.0] * 3, 4, WAY, pace=Pace()) == pytest.approx(10 + 36 + 2)


def test_a_panel_waits_for_the_block_that_has_its_slot() -> None:
    """Block 0 is computed at 15, then the panel of block 2 comes: at 25, when block 1 has been over for 5 s."""
    assert timeline(uploads((-1, 0), (0, 2)), [5.0] * 3, 4, WAY, pace=Pace()) == pytest.approx(25 + 5 + 2)


def test_without_panels_ahead_each_is_asked_for_by_a_block_that_was_sent() -> None:
    """Block 2 is sent when block 0 is at the host and answered, at 10 + 20 + 2 + 1: its panel comes then."""
    there = uploads((-1, 0), (-1, 2))
    late = timeline(there, [20.0, 1.0, 1.0], 4, WAY, pace=Pace(sent=2, ahead=0, answer_s=1.0))
    assert late == pytest.approx(33 + 10 + 1 + 2)
    assert timeline(there, [20.0, 1.0, 1.0], 4, WAY, pace=Pace(sent=2, ahead=1, answer_s=1.0)) < late


def test_one_block_at_a_time_goes_to_the_host_before_the_next_begins() -> None:
    assert timeline(uploads((-1, 0)), [5.0] * 3, 4, WAY, pace=Pace(sent=1, answer_s=1.0)) == pytest.approx(
        10 + 3 * (5 + 2) + 2 * 1
    )


def test_both_ways_share_the_host_s_memory() -> None:
    """From 11 s on the window and the second panel, which has 9 bytes left, are at a share of 1.5 / 3 of their rates:
    the window is down at 15, the panel, with 7 bytes left, up at 22.
    """
    there = uploads((-1, 0), (-1, 1))
    assert timeline(there, [1.0, 1.0], 4, WAY, both=1.5, pace=Pace()) == pytest.approx(22 + 1 + 2)
    assert timeline(there, [1.0, 1.0], 4, WAY, both=math.inf, pace=Pace()) == pytest.approx(20 + 1 + 2)
