"""CPU time of the front for each durable job, by the number of workers: python -m benchmarks.service fleet.

The whole core runs (jobs, database, scheduler, store), without HTTP; its workers are entries of a list that answer
without computing. Two loads: `busy`, where every worker has a task and others wait, so that each answer makes room for
one; `idle`, where one job at a time finds all workers idle.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
from benchmarks.service.results import digest, write

from gemmserve_kernels.device.spec import KNOWN
from gemmserve_service.executor.port import Worker, spec_adapter
from gemmserve_service.executor.protocol import Done, Hello, RunBatch
from gemmserve_service.jobs.core import Core
from gemmserve_service.schemas import GemmJob, Timings
from gemmserve_service.settings import Settings

_SHAPE = (64, 64)
_BURST = 500  # jobs of one submission
_WARM = 500


class AnsweringExecutor:
    """Workers that answer the oldest task as soon as more than `held` are out."""

    def __init__(self, count: int, device: str) -> None:
        self._fleet = [Worker(f"{device}:{i}") for i in range(count)]
        self._spec = spec_adapter().dump_python(KNOWN[device], mode="json")
        self._out: deque[tuple[Worker, str]] = deque()
        self.held = 0
        self._answering = False

    async def start(self, owner):
        self._owner = owner
        for worker in self._fleet:
            worker.greeted(Hello(worker=worker.id, pid=1, spec=self._spec, verified_error=0.0, ahead=0))
            owner.worker_ready(worker)

    async def stop(self):
        self._out.clear()

    def workers(self):
        return self._fleet

    def send(self, worker, message):
        if isinstance(message, RunBatch):
            self._out += [(worker, work.task) for work in message.tasks]
            self.go_on()

    def go_on(self):
        """Answer what is too many, in turns of the loop."""
        if not self._answering and len(self._out) > self.held:
            self._answering = True
            asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self):
        self._answering = False
        worker, task = self._out.popleft()
        done = Done(task=task, algorithm="simt", timings=Timings(kernel_s=1e-3))
        self._owner.task_ended(worker, done)
        self.go_on()

    def kill(self, worker, reason):
        raise AssertionError(f"{worker.id}: {reason}")

    def forget(self, message):
        """Nothing is kept."""


async def _put(core):
    upload = core.store.allocate(np.dtype("complex64"), _SHAPE, "C", ttl_s=None)
    upload.write(bytes(upload.spec.nbytes))
    return await upload.commit()


async def measure(workers, jobs, *, busy, device="H200", warm=_WARM):
    """Return microseconds of CPU time a job."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), heartbeat_timeout_s=3600, max_grouped_jobs=1)
        executor = AnsweringExecutor(workers, device)
        core = Core(settings, executor)
        await core.start()
        try:
            a, b = await _put(core), await _put(core)
            job = GemmJob(op="gemm", a=a.id, b=b.id)

            async def run(count):
                if not busy:
                    for _ in range(count):
                        info, _ = await core.jobs.submit(job, waits=True)
                        await core.jobs.wait(info.id, 60)
                    return
                executor.held = workers
                last = None
                for start in range(0, count, _BURST):
                    infos, _ = await core.jobs.submit_many([job] * min(_BURST, count - start))
                    last = infos[-1]
                executor.held = 0
                executor.go_on()
                if last is not None:
                    await core.jobs.wait(last.id, 60)

            await run(warm)
            began = time.process_time()
            await run(jobs)
            return (time.process_time() - began) / max(jobs, 1) * 1e6
        finally:
            await core.stop()


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service fleet", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 256, 1000])
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3, help="of each, of which the least counts")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    rows = {}
    for _ in range(args.rounds):
        for workers in args.workers:
            for busy in (True, False):
                key = f"{'busy' if busy else 'idle'} {workers}"
                jobs = args.jobs if busy else args.jobs // 3
                found = asyncio.run(measure(workers, jobs, busy=busy))
                rows[key] = min(found, rows.get(key, found))
    for key, value in sorted(rows.items(), key=lambda row: (row[0].split()[0], int(row[0].split()[1]))):
        print(f"{key:12} {value:8.0f} us")
    if args.output:
        about = {"python": platform.python_version(), "cpus": os.cpu_count(), "jobs": args.jobs, "rounds": args.rounds}
        write(args.output, {"environment": about, "sources": digest(), "unit": "us of CPU time a job", "rows": rows})
