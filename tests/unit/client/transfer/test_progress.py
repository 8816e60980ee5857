"""Bars for large transfers on a terminal, and silence everywhere else."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fake_service import serving

from gemmserve import AsyncClient, Client, JobInfo
from gemmserve._calls.flows import WATCHED_POLL_S
from gemmserve._transfer import progress
from gemmserve._transfer.progress import SHOW_FROM, Progress, watched

LARGE = SHOW_FROM // 8 + 1000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    """Stands for stderr. (Not by replacing sys.stderr in a fixture: pytest puts its own back before the test runs.)"""
    stream = Terminal()
    monkeypatch.setattr("gemmserve._transfer.progress.sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    return stream


@pytest.fixture(params=["rich", "plain"])
def style(request, monkeypatch) -> str:
    if request.param == "plain":
        for module in ("rich.progress", "rich.live"):
            monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
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
    async with AsyncClient(transport=httpx.MockTransport(service)) as client:
        await (await client.put(np.zeros(LARGE))).numpy()
    assert "sending" in terminal.getvalue()
    assert "receiving" in terminal.getvalue()


@pytest.fixture(params=["ZMQInteractiveShell", "TerminalInteractiveShell"])
def shell(request, monkeypatch) -> str:
    """Stands for IPython, in a notebook and elsewhere, without ipywidgets."""
    ipython = SimpleNamespace(get_ipython=type(request.param, (), {}))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=io.StringIO(), modules=sys.modules))
    return request.param


def test_a_notebook_is_watched_though_it_is_no_terminal(service, shell) -> None:
    with Client(transport=httpx.MockTransport(service)) as client:
        client.put(np.zeros(LARGE))
    assert ("sending" in progress.sys.stderr.getvalue()) == (shell == "ZMQInteractiveShell")


def test_a_plain_bar_says_what_is_left(monkeypatch) -> None:
    now = iter([100.0, 102.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    stream = Terminal()
    bar = progress._PlainBar("sending a", 400 << 20, stream)
    bar.advance(100 << 20)
    assert "100 of 400 MiB  50 MiB/s  0:06 left" in stream.getvalue()


def job(**fields) -> JobInfo:
    return JobInfo(**{"id": "job_000abc", "state": "running", "op": "gemm", **fields})


@pytest.mark.parametrize(
    ("info", "running_s", "text"),
    [
        (job(state="queued"), 0.0, "gemm 000abc  queued"),
        (job(compiling=True), 3.0, "gemm 000abc  waits for the compiler"),
        (job(estimated_s=40.0), 10.0, "gemm 000abc  [#####...............]  0:10, about 0:30 left"),
        (job(estimated_s=40.0), 41.0, "gemm 000abc  running for 0:41"),
        (job(estimated_s=40.0, progress=0.0), 10.0, "gemm 000abc  [#####...............]  0:10, about 0:30 left"),
        (
            job(estimated_s=40.0, progress=0.5),
            50.0,
            f"gemm 000abc  [{10 * '#'}{10 * '.'}]  50% in 0:50, about 0:20 left",
        ),
        (job(progress=0.999), 50.0, "gemm 000abc  [###################.]  100% in 0:50"),
        (job(), 3700.0, "gemm 000abc  running for 1:01:40"),
    ],
)
def test_a_job_s_line(info, running_s, text) -> None:
    assert progress.job_text(info, running_s) == text


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_job_that_is_waited_for_has_a_bar(service, terminal, style, monkeypatch, kind) -> None:
    """Every state that a poll brings is shown, and the line is cleared in the end."""
    drawn = threading.Event()
    text = progress.job_text
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "job_text", lambda *given: drawn.set() or text(*given))

    def poll(request):
        assert float(request.url.params["wait"]) <= WATCHED_POLL_S
        assert drawn.wait(60)

    with serving(service) as url:
        service.polls_until_done = 2
        if kind == "sync":
            with Client(url) as client:
                waiting = client.submit("gemm", np.eye(3), np.eye(3))
                service.script.append(poll)
                assert waiting.wait().state == "succeeded"
        else:
            async with AsyncClient(url) as client:
                waiting = await client.submit("gemm", np.eye(3), np.eye(3))
                service.script.append(poll)
                assert (await waiting.wait()).state == "succeeded"
    assert waiting.id[-6:] in terminal.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "gemmserve-bar"]


def test_a_job_has_no_bar_where_nobody_watches(service, terminal, monkeypatch) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with Client(transport=httpx.MockTransport(service)) as client:
        client.submit("gemm", np.eye(3), np.eye(3)).wait()
    assert terminal.getvalue() == ""
