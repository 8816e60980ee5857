"""A node's command: one agent in the process itself, or several that end with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import psutil
import pytest
from join_front import JoinFront
from live_server import until

from gemmserve_service.executor.protocol import Hello
from gemmserve_service.processes import devices, node


@contextlib.asynccontextmanager
async def command(front, *arguments, **variables):
    """The command, joined to a front; killed at the end, if it is there still."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"} | variables
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gemmserve.cli",
        "worker",
        "--join",
        front.url,
        "--name",
        "node",
        *arguments,
        env=environment,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def gone(processes):
    """Return once all of them are."""

    def lives(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    await asyncio.to_thread(until, lambda: not any(map(lives, processes)))


@pytest.mark.parametrize("names", [["cpu"], ["cpu:0", "cpu:1"]])
async def test_an_agent_for_each_device_until_sigterm(names):
    async with JoinFront() as front, command(front, "--device", ",".join(names)) as process:
        for _ in names:
            await front.hear(Hello)
        assert {hello.worker for hello in front.hellos} == {f"node/{name}" for name in names}
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        await gone(children)


async def test_a_killed_command_takes_all_with_it():
    async with JoinFront() as front, command(front, "--device", "cpu:0,cpu:1") as process:
        for _ in range(2):
            await front.hear(Hello)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 4
        process.kill()
        await gone(children)


@pytest.mark.parametrize("device", ["cpu", "cpu:0,cpu:1"])
async def test_a_refused_token_ends_it(tmp_path, device):
    file = tmp_path / "token"
    file.write_text("secret\n")
    async with JoinFront(refuse="token") as front:
        async with command(front, "--device", device, "--token-file", str(file)) as process:
            assert await asyncio.wait_for(process.wait(), 60) == os.EX_NOPERM
        assert {join.token for join in front.joins} == {"secret"}


async def test_no_token_goes_to_other_hosts_in_the_clear():
    front = JoinFront()
    front.__class__ = type("Elsewhere", (JoinFront,), {"url": "http://192.0.2.1:8443"})
    async with command(front, "--device", "cpu", GEMMSERVE_JOIN_TOKEN="secret") as process:
        assert await asyncio.wait_for(process.wait(), 60) == 2


def test_devices(monkeypatch):
    assert node.devices_of("cpu:0,cpu:1") == ["cpu:0", "cpu:1"]
    monkeypatch.setattr(node, "accelerators", lambda: ["cuda:0", "cuda:1"])
    assert node.devices_of("auto") == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(node, "accelerators", list)
    assert node.devices_of("auto") == ["cpu"]
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert devices.accelerators() == []
