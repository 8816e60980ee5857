"""Dispatch of large products: what is cut, which devices a product's blocks are for, what a device cannot compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gemmserve_kernels import KernelError, Operand
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_service import products
from gemmserve_service.scheduling.blocks.blocks import BlockTask
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmParams

SIDE = 16


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
