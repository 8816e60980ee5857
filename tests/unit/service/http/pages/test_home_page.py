"""The page at /, and that the pages need nothing from elsewhere and stay where the API is."""

from __future__ import annotations

import re

import httpx
import numpy as np
import pytest

from gemmserve_service.http.middleware.access import SidePort
from gemmserve_service.http.overview.schemas import (
    Failure,
    FailureProblem,
    Memory,
    Overview,
    OverviewDevice,
    OwnerQueue,
    Residency,
    Running,
    Space,
)
from gemmserve_service.http.pages import home_page
from gemmserve_service.jobs.core import Unready

PAGES = ("/", "/docs")


def links(text):
    return set(re.findall(r'(?:href|src)="([^"#]+)', text))


@pytest.mark.parametrize("path", PAGES)
async def test_pages_load_nothing_from_elsewhere(client, path):
    answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not re.search(r"<style|<script(?! type=\"module\" src=)|\sstyle=|\son\w+=", answer.text), "nothing inline"
    assert not [link for link in links(answer.text) if ":" in link or link.startswith("/")], "a proxy may add a prefix"


async def test_home_leads_to_what_is_there(client):
    text = (await client.get("/")).text
    assert 'Server <span class="pill ok">ready</span>' in text
    pages = {link for link in links(text) if not link.startswith("static/")}
    assert pages == {"./", "docs", "openapi.json", "problems", "readyz", "metrics"}
    for link in links(text):
        assert (await client.get(f"/{link}")).status_code == 200, link


async def test_home_says_why_nothing_can_run_and_what_to_do(client, core, monkeypatch):
    monkeypatch.setattr(core, "unready", lambda: [Unready("no worker <yet>", "Ask `gemmserve doctor` & wait.")])
    text = (await client.get("/")).text
    assert 'Server <span class="pill bad">not ready</span>' in text
    why = "<strong>no worker &lt;yet&gt;</strong>: Ask <code>gemmserve doctor</code> &amp; wait."
    assert why in text
    core.scheduler.drain()
    assert 'Server <span class="pill warn">draining</span>' in (await client.get("/")).text


async def test_tables_are_there_without_scripts(client, put):
    """Also after a failure whose words are somebody's: they stay text."""
    wide = await put(np.ones((2, 3)))
    kept = await put(np.ones((3, 2)))
    request = {"op": "program", "steps": [{"id": "x", "op": "solve", "a": "$s", "b": "$s"}]}
    request["steps"].insert(0, {"id": "s", "op": "gemm", "a": kept, "b": wide})
    job = (await client.post("/v1/jobs", json=request, headers={"Prefer": "wait=30"})).json()
    assert job["state"] == "failed"
    text = (await client.get("/")).text
    devices = re.search(r'<div id="devices">(.*?)</div>', text)[1]
    assert "<caption>Devices: memory, load and what runs on them</caption>" in devices
    assert devices.count('scope="col"') == 7
    assert ">ready</td>" in devices
    assert "Nothing waits, nothing runs." in text
    failures = re.search(r'<div id="failures">(.*?)</div>', text)[1]
    assert "Singular matrix: step x: the matrix is singular" in failures


def test_what_others_wrote_stays_text():
    hostile = '<img src=x onerror="alert(1)">'
    problem = FailureProblem(type="/problems/internal", title=hostile, status=500, detail=hostile)
    running = Running(id="job_1", kind="gemm", what=hostile, since=0.0, owner=hostile)
    device = OverviewDevice(
        index=0, id=hostile, name=hostile, backend="cpu", state=hostile, memory_bytes=None, memory_used_bytes=0,
        resident_bytes=None, health=[hostile], running=[running],
    )  # fmt: skip
    overview = Overview(
        time=1.0, version="1", started=0.0, state="ready", ready=True, reasons=[], devices=[device],
        queue=[OwnerQueue(owner=hostile, queued=1, running=1, oldest=0.0)],
        memory=Memory(
            resident=Residency(bytes=0, limit=0, hits=0, misses=0), arena=None, store=Space(bytes=0, limit=None)
        ),
        failures=[Failure(time=0.0, job=None, owner=hostile, kind=hostile, problem=problem, remedy=hostile)],
    )  # fmt: skip
    text = home_page.render(hostile, hostile, [Unready(hostile, hostile)], overview=overview, keys=False, metrics=True)
    assert "<img src=x" not in text
    assert 'onerror="' not in text
    assert text.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;") >= 12


class TestKeys:
    """A server with keys says nothing of its work to those without one."""

    async def test_tables_wait_for_a_key(self, client, make_key, put):
        make_key()
        text = (await client.get("/")).text
        assert 'data-keys="true"' in text
        assert 'Server <span class="pill ok">ready</span>' in text
        assert re.search(r'<section data-live class="card" aria-labelledby="devices-title" hidden>', text)
        assert '<div id="devices"></div>' in text
        assert "<table" not in text


class TestSecondPort:
    """As in containers, where the metrics have a port of their own."""

    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(metrics_port=9464)

    async def test_pages_stay_where_the_metrics_leave(self, app, client):
        for path in (*PAGES, "/openapi.json", "/problems", "/readyz"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/metrics")).status_code == 404
        assert "metrics" not in links((await client.get("/")).text)
        transport = httpx.ASGITransport(app=SidePort(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as side:
            for path in (*PAGES, "/openapi.json", "/metrics", "/readyz"):
                assert (await side.get(path)).status_code == 200, path
            text = (await side.get("/")).text
            assert "metrics" in links(text)
            assert "<script" not in text, "there is no API to ask"
            assert "<table" not in text, "it may be open to more people than the API"
            for link in links(text):
                assert (await side.get(f"/{link}")).status_code == 200, link
