"""Jobs go where their operands are, as long as that is worth the wait, and to those that compute as they ask."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_service.executor.protocol import Kept
from gemmserve_service.scheduling import links
from gemmserve_service.scheduling import placement as module
from gemmserve_service.schemas import JobState

A = np.arange(16.0).reshape(4, 4)


@pytest.fixture
def fake(make_fake):
    fake = make_fake("cuda:0", "cuda:1")
    fake.result_bytes = 1 << 20
    return fake


@pytest.fixture
def slow_link(monkeypatch):
    """Bringing the operands of a job elsewhere takes so long that nobody waits for the end of it."""
    monkeypatch.setattr(links, "DEFAULT_RATE", 1e-9)
    monkeypatch.setattr(module, "_MAX_WAIT_S", 3600.0)


def say(fake, name, *, came=(), went=(), used=0, budget=0):
    kept = Kept(came=list(came), went=list(went), used=used, budget=budget)
    fake.fleet[name].keeps(kept)
    fake.owner.copies_changed(fake.fleet[name], kept)


async def test_an_idle_device_that_has_the_operands_comes_first(core, fake, put, gemm, slow_link):
    a = await put(core.store, A)
    say(fake, "cuda:1", came=[a.id])
    for alpha in (1, 2):
        await core.jobs.submit(gemm(a, a, alpha=alpha))
    assert (len(fake.running("cuda:0")), len(fake.running("cuda:1"))) == (0, 1), "the second waits for it, too"
    fake.done("cuda:1")
    assert (len(fake.running("cuda:0")), len(fake.running("cuda:1"))) == (0, 1)
    fake.done("cuda:1")
    say(fake, "cuda:1", went=[a.id])
    await core.jobs.submit(gemm(a, a))
    assert len(fake.running("cuda:0")) == 1, "it has gone from there"


async def test_others_pass_one_that_waits(core, fake, put, gemm, slow_link):
    a, b = await put(core.store, A), await put(core.store, A)
    say(fake, "cuda:1", came=[a.id])
    await core.jobs.submit(gemm(a, a))
    waits, _ = await core.jobs.submit(gemm(a, a))
    other, _ = await core.jobs.submit(gemm(b, b))
    assert fake.running("cuda:0") == [other.id]
    fake.done("cuda:1")
    assert fake.running("cuda:1") == [waits.id]


async def test_nobody_waits_longer_than_bringing_the_operands_would_take(core, fake, put, gemm, monkeypatch):
    now, alarms = [0.0], []
    loop = SimpleNamespace(call_later=lambda delay_s, call: alarms.append((delay_s, call)) or alarms[-1])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    a = await put(core.store, A)
    monkeypatch.setattr(links, "DEFAULT_RATE", A.nbytes / 0.05)
    say(fake, "cuda:1", came=[a.id])
    await core.jobs.submit(gemm(a, a))
    late, _ = await core.jobs.submit(gemm(a, a))
    ((delay_s, look),) = alarms
    assert delay_s == pytest.approx(2 * 0.05), "it is both operands"
    now[0] += 0.09
    look()
    assert not fake.running("cuda:0")
    _, (delay_s, look) = alarms
    assert delay_s == pytest.approx(0.01), "a timer that comes too early is set again"
    now[0] += 0.02
    look()
    assert fake.running("cuda:0") == [late.id]


async def test_nobody_waits_for_a_device_that_is_gone_or_for_little(core, fake, put, gemm, slow_link, monkeypatch):
    a = await put(core.store, A)
    say(fake, "cuda:1", came=[a.id])
    fake.lose("cuda:1")
    await core.jobs.submit(gemm(a, a))
    assert len(fake.running("cuda:0")) == 1
    fake.done("cuda:0")
    fake.hello("cuda:1")
    assert not core.scheduler.fleet.others_have_copies(fake.fleet["cuda:0"]), "it began anew"
    monkeypatch.setattr(links, "DEFAULT_RATE", 1e12)
    say(fake, "cuda:1", came=[a.id])
    await core.jobs.submit(gemm(a, a))
    assert len(fake.running("cuda:0")) == 1


async def test_a_result_that_one_device_alone_has_is_used_there_whatever_others_have(core, fake, put, gemm, slow_link):
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done("cuda:0", written=False)
    square = (await core.jobs.wait(info.id, 60)).result["d"]
    say(fake, "cuda:1", came=[a.id])
    cube, _ = await core.jobs.submit(gemm(square, a))
    assert fake.running("cuda:0") == [cube.id]


async def test_arrays_that_are_gone_are_nowhere(core, fake, put):
    a = await put(core.store, A)
    say(fake, "cuda:1", came=[a.id])
    await core.store.delete(a.id)
    assert not core.scheduler.fleet.others_have_copies(fake.fleet["cuda:0"])


async def test_what_is_computed_again_goes_to_who_computes_it_in_the_same_way(core, fake, put, gemm, monkeypatch):
    """A device that takes another algorithm is not asked, unless no other is left."""
    fake.specs["cuda:1"] = replace(DeviceSpec.cpu(), name="another")
    fake.lose("cuda:1")
    fake.hello("cuda:1")
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    fake.done("cuda:0", written=False)
    assert (await core.jobs.wait(info.id, 60)).state == JobState.SUCCEEDED
    real = core.scheduler.placement.plan

    def plan(task, worker):
        chosen = real(task, worker)
        return chosen if worker.id == "cuda:1" or task.algorithm is None else type(chosen)("another")

    monkeypatch.setattr(core.scheduler.placement, "plan", plan)
    fake.lose("cuda:1")
    fake.lose("cuda:0")
    fake.hello("cuda:0")
    assert not fake.running("cuda:0")
    fake.hello("cuda:1")
    assert len(fake.running("cuda:1")) == 1
    monkeypatch.setattr(core.scheduler.placement, "plan", lambda task, worker: type(real(task, worker))("another"))
    fake.lose("cuda:1")
    assert len(fake.running("cuda:0")) == 1


async def test_what_is_written_is_estimated_like_what_is_multiplied(make_core, make_settings, fake, gemm):
    """A product without terms: no operations, and gigabytes of zeros. Others may pass it, and it passes nobody."""
    core = await make_core(make_settings(max_array_bytes=1 << 34), fake)
    tall, wide = [
        (await core.store.allocate(np.dtype("f8"), shape, "C", ttl_s=None).commit()).id
        for shape in ((1 << 14, 0), (0, 1 << 14))
    ]
    info, _ = await core.jobs.submit(gemm(tall, wide))
    task = core.jobs._live[info.id].task
    worker = task.worker
    assert task.problem.flops() == 0
    assert core.scheduler.estimates.seconds(task, worker) > module._LONG_S
    assert task.cost_s > module._LONG_S
    assert not core.scheduler.placement.may_interleave(task, worker)


async def test_it_is_the_link_of_the_device_that_would_be_brought_them(core, fake, put, gemm, monkeypatch):
    alarms = []
    loop = SimpleNamespace(call_later=lambda delay_s, call: alarms.append(delay_s))
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    monkeypatch.setattr(links.Links, "rate", lambda _, worker: {"cuda:0": A.nbytes / 0.05, "cuda:1": 1e-9}[worker.id])
    a = await put(core.store, A)
    say(fake, "cuda:1", came=[a.id])
    await core.jobs.submit(gemm(a, a))
    await core.jobs.submit(gemm(a, a))
    assert alarms[-1] == pytest.approx(2 * 0.05)
