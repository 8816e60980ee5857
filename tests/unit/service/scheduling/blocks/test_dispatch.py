"""Dispatch of large products: what is cut, which devices a product's blocks are for, what a device cannot compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from block_jobs import SIDE, run, sent

from gemmserve_kernels import KernelError, Operand
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_service import products
from gemmserve_service.executor.port import NodeLink
from gemmserve_service.scheduling.blocks.blocks import BlockTask
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmParams


@pytest.fixture
def task(listener):
    def make(n):
        operand = Operand.contiguous((n, n), np.dtype("c8"))
        return Task("large", GemmParams(), products.build(GemmParams(), {"a": operand, "b": operand}), {}, {}, listener)

    return make


async def test_what_is_as_large_as_the_rule_says_is_cut(make_scheduler, fake, task):
    dispatch = (await make_scheduler(fake, block_side=SIDE)).blocks
    assert dispatch.divide(task(2 * SIDE)) is None  # 2^18 operations, of 2^19
    large = task(4 * SIDE)
    assert dispatch.divide(large) is large.blocks
    assert large.blocks.grid.count == 16


async def test_devices_of_one_class_are_chosen_for_a_product(make_scheduler, make_fake, task):
    fake = make_fake("w0", "w1")
    fake.specs = {"w0": DeviceSpec.cpu(), "w1": replace(DeviceSpec.cpu(), name="another processor")}
    dispatch = (await make_scheduler(fake, block_side=SIDE)).blocks
    blocks = dispatch.divide(task(4 * SIDE))
    suited = [worker for worker in fake.workers() if dispatch.suits(blocks, worker)]
    assert [worker.device_class for worker in suited] == [blocks.device_class]


async def test_a_block_that_a_device_cannot_compute_stays_where_it_was(make_scheduler, fake, task, monkeypatch):
    dispatch = (await make_scheduler(fake, block_side=SIDE)).blocks
    blocks = dispatch.divide(task(4 * SIDE))
    (worker,) = fake.workers()
    assert dispatch.suits(blocks, worker)
    refused = KernelError("not of that shape")
    plan = BlockTask.plan
    monkeypatch.setattr(BlockTask, "plan", lambda *_: refused)
    assert dispatch.take(blocks, worker) is refused
    assert (blocks.left, blocks.under_way) == (16, {})
    monkeypatch.setattr(BlockTask, "plan", plan)
    other = dispatch.divide(task(4 * SIDE))
    assert dispatch.suits(other, worker)
    taken = dispatch.take(other, worker)
    assert isinstance(taken, BlockTask)
    assert (other.left, list(other.under_way)) == (15, [taken.index])


@pytest.mark.parametrize(("algorithm", "chosen"), [(None, "cuda:0"), ("numpy", "cpu"), ("of no device", "cuda:0")])
async def test_what_is_computed_again_is_for_devices_that_have_its_algorithm(
    blocky, make_fake, large, monkeypatch, algorithm, chosen
):
    """Others would compute other bits than those that somebody may have read."""
    seconds = {"cpu": 1.0, "cuda:0": 0.1}
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, worker: seconds[worker.id])
    fake = make_fake("cpu", "cuda:0")
    fake.specs["cuda:0"] = KNOWN["H200"]
    scheduler = await blocky(fake)
    await large(scheduler, algorithm=algorithm)
    assert {worker.id for worker, _ in fake.sent} == {chosen}


# -- workers of other hosts


@pytest.fixture
def with_a_node(make_fake, monkeypatch):
    """A server with two workers of its own, and one that joined: `seconds` that a block takes on each of them."""
    fake = make_fake("cpu", "cpu:1", "node/cuda:0")
    fake.fleet["node/cuda:0"].link = NodeLink("node", "10.0.0.2", 1e9, 1 << 30)
    seconds = {"cpu": 1.0, "cpu:1": 1.0, "node/cuda:0": 0.1}
    monkeypatch.setattr(Estimates, "seconds", lambda _, task, worker: seconds[worker.id])
    return fake, seconds


async def test_a_large_product_goes_away_as_a_whole_where_that_is_so_much_faster(blocky, with_a_node, large):
    fake, _ = with_a_node
    scheduler = await blocky(fake)
    task = await large(scheduler)
    assert fake.running("node/cuda:0") == ["large"]
    assert (fake.running("cpu"), fake.running("cpu:1"), scheduler.queued) == ([], [], 0)
    fake.done("node/cuda:0")
    assert task.over


@pytest.mark.parametrize(
    ("node_s", "link"), [(0.45, 1e9), (0.1, 1e2)], ids=["not 1.2 times as fast as both", "a slow link"]
)
async def test_it_stays_where_that_does_not_pay(blocky, with_a_node, large, node_s, link):
    fake, seconds = with_a_node
    seconds["node/cuda:0"] = node_s
    fake.fleet["node/cuda:0"].link.bytes_s = link
    scheduler = await blocky(fake)
    task = await large(scheduler)
    assert fake.running("node/cuda:0") == []
    assert all(name.startswith("large/") for name in (*fake.running("cpu"), *fake.running("cpu:1")))
    run(fake)
    assert task.over


async def test_nobody_waits_for_a_worker_of_another_host_that_is_busy(blocky, with_a_node, large):
    fake, _ = with_a_node
    scheduler = await blocky(fake)
    first, second = await large(scheduler, "first"), await large(scheduler, "second")
    assert fake.running("node/cuda:0") == ["first"]
    assert {name.split("/")[0] for name in fake.running("cpu")} == {"second"}
    run(fake)
    assert first.over
    assert second.over


async def test_what_a_node_had_that_is_lost_is_cut_for_who_is_left(blocky, with_a_node, large):
    fake, seconds = with_a_node
    scheduler = await blocky(fake)
    task = await large(scheduler)
    seconds["node/cuda:0"] = 100.0
    fake.lose("node/cuda:0")
    assert task.blocks is not None
    run(fake)
    assert task.over
    assert sorted(index for index in sent(fake)) == list(range(16))
