"""Programs that are not taken: refused by name, and nothing of them stays."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from program_requests import powers, program, step

from gemmserve_kernels.problem.errors import ParameterInvalid, ShapeMismatch
from gemmserve_service.errors import NotFound, ProgramTooLarge, QueueFull, StepInvalid, StoreFull, TooLarge, describe
from gemmserve_service.runtime.ids import new_id

A = (np.arange(64.0).reshape(8, 8) / 64 + 1j).astype("c8")


@pytest.fixture
async def a(core, put):
    return await put(core.store, A)


async def test_what_is_refused_leaves_nothing(core, a, put, idle):
    narrow = await put(core.store, np.ones((8, 3), "c8"))
    cases = [
        (powers(new_id("arr")), NotFound, 404),
        (program(step("x", a, a), step("y", "$x", new_id("arr"))), NotFound, 404),
        (program(step("x", a, narrow), step("y", "$x", "$x")), ShapeMismatch, 422),
        (program(step("x", a, a), step("y", "$z", a)), ParameterInvalid, 422),
        (program(step("x", a, a), step("y", "$x", a, compute="ozaki")), None, 422),
    ]
    for request, cause, status in cases:
        with pytest.raises(StepInvalid) as caught:
            await core.jobs.submit(request, idempotency_key="k")
        assert cause is None or isinstance(caught.value.cause, cause)
        assert describe(caught.value).status == status
        assert caught.value.step in {"x1", "y"}
        await idle()
    assert (await core.jobs.list(state=None, limit=9, cursor=None))[0] == []


async def test_huge_values_cost_nothing(make_core, make_settings, fake, put, held, monkeypatch):
    real = os.posix_fallocate

    def allocate(fd, offset, length):
        """Fail as a disk that is not as large as that, however large this machine's is."""
        if length >= 1 << 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    core = await make_core(make_settings(max_array_bytes=1 << 40), fake)
    column = await put(core.store, np.ones((1 << 20, 1), "f4"))
    outer = step("outer", column, column, trans_b="T")
    with pytest.raises(StepInvalid) as caught:
        await core.jobs.submit(program(outer, step("y", "$outer", column)))
    assert isinstance(caught.value.cause, TooLarge)
    core = await make_core(make_settings(max_array_bytes=1 << 50, data_dir=core.settings.data_dir / "other"), fake)
    column = await put(core.store, np.ones((1 << 20, 1), "f4"))
    outer |= {"a": column.id, "b": column.id}

    with pytest.raises(ProgramTooLarge, match="bytes of values"):
        await core.jobs.submit(program(outer, step("y", "$outer", column)))
    with pytest.raises(StoreFull):  # as a result it is refused by the disk
        await core.jobs.submit(program(outer))
    assert held(core.store) == (0, 0, 0)


async def test_too_many_steps(make_core, make_settings, fake, put):
    core = await make_core(make_settings(max_program_steps=3), fake)
    a = await put(core.store, A)
    await core.jobs.submit(powers(a, 3))
    with pytest.raises(ParameterInvalid, match="at most 3"):
        await core.jobs.submit(powers(a, 4))


async def test_no_room_for_a_result(make_core, make_settings, fake, put, held):
    core = await make_core(make_settings(max_store_bytes=A.nbytes * 3 - 1), fake)
    a = await put(core.store, A)
    with pytest.raises(StoreFull):
        await core.jobs.submit(powers(a, keep=["x1", "x3"]))
    await core.jobs.submit(powers(a, keep=["x3"]))
    assert core.scheduler.admissions.steps == 3
    fake.fail()


async def test_steps_that_wait_are_bounded(make_core, make_settings, fake, put, eventually):
    core = await make_core(make_settings(max_queued_steps=10), fake)
    a = await put(core.store, A)
    first, _ = await core.jobs.submit(powers(a, 20))  # one always fits
    with pytest.raises(QueueFull):
        await core.jobs.submit(powers(a, 1))
    fake.done()
    await core.jobs.wait(first.id, 60)
    assert core.scheduler.admissions.steps == 0
    for _ in range(2):
        await core.jobs.submit(powers(a, 5))
    with pytest.raises(QueueFull) as caught:
        await core.jobs.submit(powers(a, 1))
    assert caught.value.retry_after_s >= 1
