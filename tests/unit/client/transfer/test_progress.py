"""Bars for large transfers on a terminal, and silence everywhere else."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from gemmserve import Client
from gemmserve._transfer.progress import SHOW_FROM, Progress, watched

LARGE = SHOW_FROM // 8 + 1000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    """Stands for stderr. (Not by replacing sys.stderr in a fixture: pytest puts its own back before the test runs.)"""
    stream = Terminal()
    monkeypatch.setattr("gemmserve._transfer.progress.sys", SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture(params=["rich", "plain"])
def style(request, monkeypatch) -> str:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich.progress", None)  # as if it were not installed
    return request.param


def test_both_directions_are_drawn(service, terminal, style) -> None:
    with Client(transport=httpx.MockTransport(service)) as client:
        remote = client.put(np.zeros(LARGE))
        assert "sending" in terminal.getvalue()
        remote.numpy()
        assert "receiving" in terminal.getvalue()


def test_no_bar(service, terminal, monkeypatch) -> None:
    with Client(transport=httpx.MockTransport(service)) as client:
        client.put(np.zeros(1000)).numpy()
    with Client(transport=httpx.MockTransport(service), progress=False) as client:
        client.put(np.zeros(LARGE)).numpy()
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with Client(transport=httpx.MockTransport(service)) as client:
        client.put(np.zeros(LARGE)).numpy()
    assert terminal.getvalue() == ""


def test_a_plain_bar_cleans_up_after_itself(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = Terminal()
    pieces = watched([b"12", b"345"], Progress(enabled=True, stream=stream), "a", SHOW_FROM)
    assert stream.getvalue() == ""  # a transfer that never begins leaves no bar behind
    assert sum(map(len, pieces)) == 5
    assert stream.getvalue().endswith(" \r")
    assert "of 8 MiB" in stream.getvalue()


async def test_the_async_client_draws_too(service, terminal) -> None:
    from gemmserve import AsyncClient

    async with AsyncClient(transport=httpx.MockTransport(service)) as client:
        await (await client.put(np.zeros(LARGE))).numpy()
    assert "sending" in terminal.getvalue()
    assert "receiving" in terminal.getvalue()
