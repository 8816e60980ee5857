"""What a device counts of its products: from its readings to the job, its record and the metrics."""

from __future__ import annotations

import numpy as np
import pytest
from inline_executor import InlineExecutor

from gemmserve_kernels import ElementCounts
from gemmserve_kernels.device.element_counts import Reading
from gemmserve_service.executor.worker.checks import element_counts
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.http.metrics.metrics import Metrics
from gemmserve_service.schemas import Elements, GemmJob, JobInfo, ProgramJob


class Told(Reading):
    """A reading whose counts are known."""

    def __init__(self, *counts):
        super().__init__(0)
        self._counts = ElementCounts(*counts)

    def counts(self):
        return self._counts


class Counting(CpuBackend):
    """Counts of each product one element as wide, two as plain and the others as planned, or nothing."""

    def __init__(self, *, counts=True):
        super().__init__()
        self.at = Told(1000, 100, 10)
        self.counts = counts

    def read_counts(self):
        return self.at

    def run(self, params, operands, results, checkpoint=lambda: None):
        timings = super().run(params, operands, results, checkpoint)
        if self.counts:
            now, size = self.at.counts(), sum(out.size for out in results.values())
            self.at = Told(now.planned + size - 3, now.wide + 1, now.plain + 2)
        return timings


def test_the_difference_of_two_readings():
    first, second = Told(10, 5, 1), Told(30, 5, 2)
    assert element_counts.between(first, second) == Elements(planned=20, wide=0, plain=1)
    assert element_counts.between(first, first) is None
    assert element_counts.between(first, Told(10, 5, 1)) is None
    assert element_counts.between(None, None) is None


def test_shares():
    info = JobInfo(id="job_" + "0" * 26, state="succeeded", op="gemm", created_at="2026-01-01T00:00:00Z")
    assert (info.wide_share, info.fallback_share) == (None, None)
    told = info.model_copy(update={"elements": Elements(planned=12, wide=3, plain=1)})
    assert (told.wide_share, told.fallback_share) == (3 / 16, 1 / 16)
    assert told.model_dump()["wide_share"] == 3 / 16
    nothing = info.model_copy(update={"elements": Elements()})
    assert (nothing.wide_share, nothing.fallback_share) == (None, None)


@pytest.fixture
async def on(make_core, make_settings, put):
    """Runs a job of that many products of one 4 x 5 result on a backend that counts; returns it, core and metrics."""

    async def run(backend, request):
        executor = InlineExecutor()
        core = await make_core(make_settings(verify_share=0.0), executor)
        executor._runner.backend = backend
        metrics = Metrics(core)
        core.observers.append(metrics)
        a, b = await put(core.store, np.ones((4, 3))), await put(core.store, np.ones((3, 5)))
        info, _ = await core.jobs.submit(request(a.id, b.id))
        return await core.jobs.wait(info.id, 60), core, metrics

    return run


def routes(metrics):
    return {
        sample.labels["route"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "gemmserve_result_elements_total"
    }


async def test_a_job_is_told_recorded_and_counted(on):
    info, core, metrics = await on(Counting(), lambda a, b: GemmJob(op="gemm", a=a, b=b))
    assert info.elements == Elements(planned=17, wide=1, plain=2)
    assert (info.wide_share, info.fallback_share) == (1 / 20, 2 / 20)
    assert await core.jobs.queue.get(info.id) == info, "on record"
    (listed,), _ = await core.jobs.list(state=None, limit=1, cursor=None)
    assert listed.elements == info.elements
    assert routes(metrics) == {"planned": 17, "wide": 1, "plain": 2}


async def test_a_program_is_told_of_all_its_steps(on):
    def request(a, b):
        steps = [
            {"id": "x", "op": "gemm", "a": a, "b": b},
            {"id": "y", "op": "gemm", "a": "$x", "b": "$x", "trans_b": "T"},
        ]
        return ProgramJob(op="program", steps=steps)

    info, _, metrics = await on(Counting(), request)
    assert info.elements == Elements(planned=17 + 13, wide=2, plain=4)
    assert routes(metrics) == {"planned": 30, "wide": 2, "plain": 4}


@pytest.mark.parametrize("backend", [CpuBackend(), Counting(counts=False)], ids=["does not count", "has one way"])
async def test_where_there_is_nothing_to_tell(on, backend):
    info, core, metrics = await on(backend, lambda a, b: GemmJob(op="gemm", a=a, b=b))
    assert (info.elements, info.wide_share, info.fallback_share) == (None, None, None)
    assert await core.jobs.queue.get(info.id) == info
    assert routes(metrics) == {"planned": 0, "wide": 0, "plain": 0}
