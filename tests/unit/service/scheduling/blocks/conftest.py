"""Large products, and a scheduler that cuts them."""

from __future__ import annotations

import numpy as np
import pytest
from block_jobs import SIDE

from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmParams


@pytest.fixture
def squares(store, put):
    """An n x n matrix of ones, and two operands like it."""

    async def make(n):
        square = np.ones((n, n), "c8")
        operands = {}
        for key in ("a", "b"):
            upload = await put(store, square, scratch=True)
            await upload.commit()
            operands[key] = store.pin_upload(upload)
        return square, operands

    return make


@pytest.fixture
def make_large(store, squares, listener):
    """A product of n x n matrices, of (n / SIDE)^2 blocks."""

    async def make(name, n=64, **fields):
        square, operands = await squares(n)
        problem = products.build(GemmParams(), {key: Operand.of(square) for key in operands})
        results = {"d": store.allocate(square.dtype, square.shape, "C", ttl_s=None, scratch=True)}
        return Task(name, GemmParams(), problem, operands, results, listener, **fields)

    return make


@pytest.fixture
def large(make_large):
    async def make_and_submit(scheduler, name="large", n=64, **fields):
        task = await make_large(name, n, **fields)
        scheduler.submit(task)
        return task

    return make_and_submit


@pytest.fixture
async def blocky(make_scheduler):
    async def make(fake, **fields):
        return await make_scheduler(fake, **{"block_side": SIDE, **fields})

    return make
