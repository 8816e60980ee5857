from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
from join_front import JoinFront
from works import packed

from gemmserve_service.executor.agent.agent import Agent
from gemmserve_service.executor.protocol import ArrayRef, Hello, RunBatch
from gemmserve_service.executor.worker.unpack import Run
from gemmserve_service.runtime.handoff import AgentHandoff
from gemmserve_service.schemas import GemmParams
from gemmserve_service.settings import Settings


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture
async def front():
    async with JoinFront() as front:
        yield front


@pytest.fixture
def handoff():
    """Make what an agent is started with."""

    def make(front, **fields):
        given = {"memory_bytes": 64 << 20, "inline_bytes": 1 << 16, "device": "cpu", "name": "node"} | fields
        settings = Settings(drain_s=60)
        return AgentHandoff(settings=settings, pipe_fd=-1, join=front.url, **given)

    return make


@pytest.fixture
async def joined(handoff):
    """Have an agent with a real worker join a front; it is told to stop at the end, and must end with 0."""
    async with contextlib.AsyncExitStack() as stack:

        async def join(front, **fields):
            agent = Agent(handoff(front, **fields))
            running = asyncio.create_task(agent.run())

            async def end():
                agent.stop()
                assert await asyncio.wait_for(running, 120) == 0

            stack.push_async_callback(end)
            await front.hear(Hello)
            return agent

        yield join


@pytest.fixture
def product():
    """Make the message of a product of two arrays, whose bytes are at the front."""

    def make(front, a, b, *, task="t1", ids=("a", "b"), start=0, **fields):
        result = np.empty((a.shape[0], b.shape[1]), np.result_type(a, b))
        refs = {}
        for name, array, cache_id in (("a", a, ids[0]), ("b", b, ids[1]), ("d", result, f"{task}-d")):
            extent = f"x-{cache_id or task + name}"
            front.extents.setdefault(
                extent, bytearray(start) + bytearray(array.tobytes() if name != "d" else array.nbytes)
            )
            refs[name] = ArrayRef(
                extent=extent,
                path=f"/front/{extent}",
                capacity=start + array.nbytes,
                nbytes=array.nbytes,
                dtype=array.dtype.name,
                shape=array.shape,
                order="C",
                cache_id=cache_id,
            )
        d = refs.pop("d")
        run = Run(task, GemmParams(op="gemm"), "blas", refs, {"d": d}, **fields)
        (work,) = packed(run).tasks
        rows = [(name, path, capacity, start, array) for name, path, capacity, _, array in work.extents]
        message = RunBatch(tasks=[replace(work, extents=rows)])
        return message, lambda: np.frombuffer(front.extents[d.extent], result.dtype, offset=start).reshape(result.shape)

    return make


@pytest.fixture
def front_of():
    """Make a front that has nothing but a URL."""

    def make(url):
        front = type("Front", (), {})()
        front.url = url
        return front

    return make
