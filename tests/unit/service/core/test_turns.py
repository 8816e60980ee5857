"""Long work in turns: others run in between, and a short piece of work asks for nothing."""

from __future__ import annotations

import asyncio

from gemmserve_service import turns


async def test_others_have_their_turn_when_it_is_due(monkeypatch):
    now = 0.0
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now)
    others = 0

    async def other():
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    mine = turns.Turns()
    for _ in range(100):
        await mine.pause()
    assert others == 0
    for _ in range(3):
        now += 0.01
        await mine.pause()
        await mine.pause()
    assert others == 3
    task.cancel()
