"""status and top: one screen of what the server says, and the terminal as it was afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys

import httpx
import pytest

USAGE = {
    "owner": None, "arrays": 3, "store_bytes": 5 << 20, "max_store_bytes": 1 << 30, "jobs_queued": 2,
    "max_queued_jobs": 100, "jobs_running": 1,
    "quotas": {
        "stored_bytes": {"used": 5 << 20, "limit": 10 << 20}, "queued_jobs": {"used": 2, "limit": None},
        "device_seconds_per_day": {"used": 12.25, "limit": None},
    },
}  # fmt: skip
DEVICE = {
    "id": "cuda:0", "spec": {"name": "H200"}, "state": "ready", "jobs_running": 1, "memory_used": 3 << 30,
    "memory_total": 140 << 30, "restarts": 0,
}  # fmt: skip


@pytest.fixture
def busy(service):
    """The fake service with a device, use, and a job of either state."""
    service.admin = True

    def usage(request, _body):
        if "all" not in request.url.params:
            return httpx.Response(200, json=USAGE)
        if not service.admin:
            return httpx.Response(403, json={"type": "/problems/forbidden", "status": 403})
        owners = [USAGE | {"owner": "k1"}, USAGE | {"owner": "k2", "jobs_running": 7}]
        return httpx.Response(200, json=USAGE | {"owners": owners})

    def jobs(request, _body, *_):
        state = request.url.params["state"]
        info = {
            "id": f"job_{state:0>26}", "state": state, "op": "gemm", "created_at": "2025-01-02T03:04:05Z",
            "estimated_s": 2.5 if state == "running" else None,
        }  # fmt: skip
        return httpx.Response(200, json={"items": [info], "next_cursor": None})

    health = {"status": "ok", "version": "0.1.0", "uptime_s": 61.0}
    service._get_healthz = lambda *_: httpx.Response(200, json=health)
    service._get_v1_usage = usage
    service._get_v1_devices = lambda *_: httpx.Response(200, json={"devices": [DEVICE]})
    service._get_v1_jobs = jobs
    return service


def test_status(cli, busy, url) -> None:
    done = cli("status")
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[:5] == [
        f"server   {url}  gemmserve 0.1.0, ready, up 1:01",
        "queue    2 of 100 jobs wait, 1 run",
        "store    3 arrays, 5.0 MiB of 1.0 GiB",
        "today    12.2 s of devices",
        "quota    stored bytes: 5.24288e+06 of 1.04858e+07",
    ]
    assert lines[-1].split() == ["cuda:0", "ready", "1", "3.0", "GiB", "of", "140.0", "GiB", "0", "H200"]


def test_status_tells_what_sensors_say(cli, busy) -> None:
    health = {
        "utilisation": 0.87, "power_watts": 612.4, "power_limit_watts": 700.0, "temperature_celsius": 61.0,
        "warnings": ["throttled: the power limit is reached"],
    }  # fmt: skip
    silent = DEVICE | {"id": "cuda:1", "health": dict.fromkeys(health) | {"warnings": []}}
    busy._get_v1_devices = lambda *_: httpx.Response(200, json={"devices": [DEVICE | {"health": health}, silent]})
    *_, heads, first, second, warning = cli("status").out.splitlines()
    assert heads.split()[3:6] == ["USE", "POWER", "TEMP"]
    assert first.split()[3:10] == ["87%", "612", "of", "700", "W", "61", "°C"]
    assert second.split()[:4] == ["cuda:1", "ready", "1", "3.0"]
    assert warning == "cuda:0: throttled: the power limit is reached"


def test_status_of_a_server_that_takes_no_work(cli, busy) -> None:
    busy.ready = False
    done = cli("status", "--json")
    assert done.status == 1
    found = json.loads(done.out)
    assert (found["ready"], found["devices"], found["usage"]) == (False, [DEVICE], USAGE)


def test_top_where_nobody_watches_is_one_snapshot(cli, busy) -> None:
    text = cli("top").out
    assert "k2     7" in text
    assert "BUSY" not in text
    assert text.splitlines()[-2].split()[1:4] == ["gemm", "running", "2.5"]
    assert text.splitlines()[-1].split()[1:3] == ["gemm", "queued"]
    busy.admin = False
    assert "k2" not in cli("top").out


@pytest.mark.parametrize("interval", ["0", "nan", "1e9"])
def test_top_wants_a_time_that_makes_sense(cli, interval) -> None:
    assert cli("top", "--interval", interval).status == 2


def test_top_in_a_terminal(busy, url) -> None:
    """It draws on the second screen, again and again, until q is pressed."""
    terminal, other = pty.openpty()
    environment = {**os.environ, "GEMMSERVE_SERVER": url}
    command = [sys.executable, "-m", "gemmserve", "top", "--interval", "0.1"]
    with subprocess.Popen(command, env=environment, stdin=other, stdout=other, stderr=other) as child:
        os.close(other)
        seen = b""
        while seen.count(b"BUSY") < 3:
            seen += os.read(terminal, 4096)
        os.write(terminal, b"xq")
        with contextlib.suppress(OSError):  # Linux: the other side is closed
            while piece := os.read(terminal, 4096):
                seen += piece
    os.close(terminal)
    assert child.returncode == 0
    assert b"100%" in seen
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
    assert seen.endswith(b"\x1b[?25h\x1b[?1049l")
