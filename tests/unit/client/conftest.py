"""A fake service in memory, clients that talk to it without sleeping, and the real app on a socket."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from fake_service import FakeService
from inline_executor import InlineExecutor

from gemmserve import AsyncClient, Client, RetryPolicy
from gemmserve._calls.flows import Flows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class Clock:
    """Time that passes only in pauses; `slept` lists them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def async_sleep(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def client(service: FakeService, clock: Clock) -> Iterator[Client]:
    with Client(transport=httpx.MockTransport(service)) as connected:
        connected._flows = Flows(RetryPolicy(), clock=clock, uniform=lambda _, high: high)
        connected._io._sleep = clock.sleep
        yield connected


@pytest.fixture
async def async_client(service: FakeService, clock: Clock) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(transport=httpx.MockTransport(service)) as connected:
        connected._flows = Flows(RetryPolicy(), clock=clock, uniform=lambda _, high: high)
        connected._io._sleep = clock.async_sleep
        yield connected


@pytest.fixture(params=["sync", "async"])
def connected(request, client, async_client) -> Client | AsyncClient:
    """A client of either kind."""
    return client if request.param == "sync" else async_client


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def random_complex(rng):
    """random_complex(3, 4): complex64, standard normal."""
    return lambda *shape: (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)


@pytest.fixture(scope="session")
def app_url(tmp_path_factory) -> Iterator[str]:
    """The real app, with the CPU backend in a thread, on a socket of its own."""
    import uvicorn

    from gemmserve_service.http.app import create_app
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.settings import Settings

    settings = Settings(data_dir=tmp_path_factory.mktemp("data"), verify_share=0)
    config = uvicorn.Config(
        create_app(settings, Core(settings, InlineExecutor())), port=0, log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the app did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
