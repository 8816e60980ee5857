"""One live server for the tests that leave it as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from browser import chromium, open_page  # noqa: F401 (fixtures)
from cells import Cells
from live_server import LiveServer
from proxies import found

from gemmserve import Client

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def lone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(data_dir=tmp_path_factory.mktemp("data")) as live:
        yield live


@pytest.fixture(scope="session")
def server(lone_server: LiveServer) -> LiveServer:
    return lone_server


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    """Two cells behind haproxy, for tests that leave them as they were."""
    if found("haproxy") is None:
        pytest.skip("haproxy is not installed")
    with Cells(tmp_path_factory.mktemp("cells")) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url) as connected:
        yield connected


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture
def random_complex(rng):
    """random_complex(3, 4): complex64, standard normal."""
    return lambda *shape: (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)
