"""A request for arrays holds them until each pin is used or released."""

from __future__ import annotations

from types import SimpleNamespace

from gemmserve_service.store.tier.wanted import Wanted


async def test_held_until_each_pin_is_used_or_released():
    pins = [SimpleNamespace(held=True, used=False) for _ in range(2)]
    wanted = Wanted(pins)
    assert wanted.held
    pins[0].used = True
    assert wanted.held
    pins[1].held = False
    assert not wanted.held
    assert not Wanted([]).held
