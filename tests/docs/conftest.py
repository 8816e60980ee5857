"""One live server for all pages of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from live_server import LiveServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(data_dir=tmp_path_factory.mktemp("data")) as live:
        yield live
