"""I/O on several event loops."""

from __future__ import annotations

import asyncio

from fake_service import FakeService, serving

from gemmserve import AsyncClient


def test_one_client_in_several_event_loops() -> None:
    service = FakeService()
    with serving(service) as url:
        client = AsyncClient(url)

        async def work() -> None:
            await asyncio.gather(*[client.health() for _ in range(3)])

        for _ in range(3):
            asyncio.run(work())
        assert len(client._io._pools) == 1  # those of loops that have ended are gone
    assert len(service.requests) == 9
