"""Time that is left to a probe."""

from __future__ import annotations

from gemmserve_service.processes.probe.amounts import FULL, QUICK, Deadline


def test_deadlines() -> None:
    assert Deadline(600).allows(10)
    assert not Deadline(600).allows(601)
    assert not Deadline(-1).allows(0)
    assert Deadline(-1).left_s < 0
    late = Deadline(-1)
    late.put_off(600)
    assert late.allows(500)


def test_quick_is_less() -> None:
    assert QUICK.seconds < FULL.seconds
    assert QUICK.copied_bytes < FULL.copied_bytes
    assert max(QUICK.first_extents) < max(FULL.first_extents)
