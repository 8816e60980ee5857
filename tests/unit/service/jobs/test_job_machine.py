"""The life of jobs as a state machine: whatever happens in whatever order, each ends once and nothing stays held."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from job_fleet import NAMES, Fleet, History

from gemmserve_service.errors import ServiceError
from gemmserve_service.executor.protocol import Failed
from gemmserve_service.jobs.core import Core
from gemmserve_service.jobs.one_shot import OneShot
from gemmserve_service.schemas import ArrayView, GemmJob, GemmParams, GemmStep, JobState, ProgramJob
from gemmserve_service.settings import Settings
from gemmserve_service.store.extents.arena import Arena
from gemmserve_service.store.extents.memfd import create_arena

ARENA_BYTES = 4 << 12
"""Room for four results, each of which takes a page."""

pytestmark = pytest.mark.flaky(reruns=0)  # a job that is lost once is lost


class JobLife(RuleBasedStateMachine):
    jobs = Bundle("jobs")
    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.arena_fd = create_arena(ARENA_BYTES)
        self.small = mock.patch("gemmserve_service.scheduling.tasks.MIN_DEFERRED_BYTES", 1)
        self.small.start()
        self.settings = Settings(
            data_dir=Path(self.folder.name),
            write_back_delay_s=60.0,
            max_attempts=2,
            max_queued_jobs=6,
            heartbeat_timeout_s=3600,
            verify_share=0,
        )
        self.history = History()
        self.accepted = []
        self.owners = {}
        self.deleted = set()
        self.pending = []

    @initialize()
    def start(self):
        self.core = Core(self.settings, Fleet(), self.arena())
        self.core.observers.append(self.history)
        self.run(self.core.start())
        self.operand = self.run(self.put())

    def arena(self):
        """The host arena, as a new front has it."""
        return Arena(f"/proc/self/fd/{self.arena_fd}", ARENA_BYTES, writers=NAMES)

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 120))

    async def put(self, *, scratch=False, owner=""):
        upload = self.core.store.allocate(np.dtype("f4"), (4, 4), "C", ttl_s=None, scratch=scratch, owner=owner)
        upload.write(bytes(64))
        return upload if scratch else await upload.commit()

    async def settle(self):
        """Lets everything that is under way in the loop and in the database come to rest."""
        for _ in range(3):
            await self.core.database.write(lambda _: None)
            await asyncio.sleep(0)

    @rule(
        target=jobs,
        priority=st.integers(-1, 1),
        own_operand=st.booleans(),
        owner=st.sampled_from(["", "alice", "bob"]),
        timeout_s=st.sampled_from([None, 3600.0]),
        steps=st.sampled_from([0, 0, 2, 20]),  # long programs are checked in a thread
        by_view=st.booleans(),
    )
    def submit(self, priority, own_operand, owner, timeout_s, steps, by_view):
        own_operand = own_operand or bool(owner)

        async def submit():
            operand = await self.put(owner=owner) if own_operand else self.operand
            a = ArrayView(id=operand.id, offset=1, shape=(4, 4), strides=(3, 0)) if by_view else operand.id
            job = GemmJob(op="gemm", a=a, b=operand.id, priority=priority, timeout_s=timeout_s)
            if steps:
                names = [a, *(f"$s{n}" for n in range(1, steps))]
                chain = [GemmStep(op="gemm", id=f"s{n}", a=a, b=operand.id) for n, a in enumerate(names, 1)]
                job = ProgramJob(op="program", steps=chain, priority=priority, timeout_s=timeout_s)
            try:
                info, created = await self.core.jobs.submit(job, owner=owner)
            finally:
                if own_operand:
                    await self.core.store.delete(operand.id)  # its bytes stay as long as the job needs them
            assert created
            return info.id

        try:
            job_id = self.run(submit())
        except ServiceError as error:
            if error.slug != "queue-full":
                raise
            return multiple()
        self.accepted.append(job_id)
        self.owners[job_id] = owner
        return job_id

    @rule(target=jobs, job=jobs, delete=st.booleans())
    def submit_on_a_result(self, job, delete):
        """Submit a job on a result, which may be on a device alone, and which is perhaps deleted then."""

        async def submit():
            info = await self.core.jobs.get(job)
            array = (info.result or {"d": ""}).get("d", "")
            if not array or array in self.deleted:
                return None
            owner = self.owners[job]
            try:
                made, _ = await self.core.jobs.submit(GemmJob(op="gemm", a=array, b=array), owner=owner)
            except ServiceError as error:
                if error.slug not in {"queue-full", "array-lost"}:
                    raise
                made = None
            if delete:
                await self.core.store.delete(array)
                self.deleted.add(array)
            return None if made is None else (made.id, owner)

        found = self.run(submit())
        if found is None:
            return multiple()
        self.accepted.append(found[0])
        self.owners[found[0]] = found[1]
        return found[0]

    @rule(name=st.sampled_from(NAMES), lost=st.sampled_from([False, False, False, True]))
    def write(self, name, lost):
        async def write():
            self.core.executor.write(name, lost=lost)
            await self.settle()

        self.run(write())

    @rule(job=jobs)
    def download(self, job):
        """Somebody asks for a result, wherever it is, and does not wait for it."""

        async def read():
            info = await self.core.jobs.get(job)
            array = (info.result or {}).get("d")
            if array is None or array in self.deleted:
                return
            try:
                with self.core.store.pin(array) as pinned:
                    await self.core.scheduler.writes.wait_readable(pinned, 0)
                    assert len(pinned.view) == 64
            except ServiceError as error:
                assert error.slug in {"array-lost", "timeout"}, error.slug  # noqa: PT017
            await self.settle()

        self.run(read())

    @rule(within_s=st.sampled_from([0.0, 0.01]))
    def spill(self, within_s):
        """The host arena is emptied, as far as that goes in a moment."""

        async def spill():
            spill = self.core.scheduler.writes._spill
            spill.hurry()
            await asyncio.sleep(within_s)
            spill._hurry = False
            await self.settle()

        self.run(spill())

    @rule(target=requests)
    def one_shot(self):
        async def begin():
            operands = {"a": await self.put(scratch=True), "b": await self.put(scratch=True)}
            task = asyncio.ensure_future(self.core.jobs.run(GemmParams(), operands))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return task, operands

        task, operands = self.run(begin())
        if task.done():
            assert task.exception().slug == "queue-full"
            for upload in operands.values():
                upload.abort()
            return multiple()
        self.pending.append(task)
        return task

    @rule(request=requests)
    def hang_up(self, request):
        async def cancel():
            request.cancel()
            await asyncio.wait([request])

        self.run(cancel())

    @rule(job=jobs)
    def cancel(self, job):
        info = self.run(self.core.jobs.cancel(job))
        assert info.state.final

    @rule(job=jobs)
    def deadline(self, job):
        live = self.core.jobs._live.get(job)
        if live is not None:
            self.expire(live.task)

    @rule(name=st.sampled_from(NAMES))
    def deadline_while_running(self, name):
        for task in list(self.core.executor.fleet[name].tasks.values()):
            self.expire(task)

    def expire(self, task):
        async def expire():
            task.timeout_s = 1.0
            self.core.scheduler._expire(task)
            assert task.over
            await self.settle()

        self.run(expire())

    @rule(request=requests, name=st.sampled_from(NAMES))
    def hang_up_just_as_the_answer_comes(self, request, name):
        async def both():
            request.cancel()
            for task in list(self.core.executor.fleet[name].tasks):
                self.core.executor.done(self.core.executor.fleet[name], task)
            await asyncio.wait([request])
            await self.settle()

        self.run(both())

    @rule(name=st.sampled_from(NAMES), ok=st.booleans(), later=st.booleans())
    def answer(self, name, ok, later):
        async def answer():
            worker = self.core.executor.fleet[name]
            for task in list(worker.tasks)[:1]:
                if ok:
                    self.core.executor.done(worker, task, later=later)
                    continue
                reply = Failed(task=task, slug="device-error", status=500, title="Device error", detail="no")
                self.core.executor.owner.task_ended(worker, reply)
            await self.settle()

        self.run(answer())

    @rule(name=st.sampled_from(NAMES), back=st.booleans())
    def lose(self, name, back):
        async def lose():
            worker = self.core.executor.fleet[name]
            if worker.ready:
                self.core.executor.lose(worker)
            elif back:
                self.core.executor.hello(name)
            await self.settle()

        self.run(lose())

    @rule(name=st.sampled_from(NAMES))
    def hang(self, name):
        """The watchdog's finding: a process that had a task, or none, is killed."""

        async def kill():
            worker = self.core.executor.fleet[name]
            for task in worker.tasks.values():
                task.limit_s = -1.0
            if worker.ready and worker.tasks:
                self.core.scheduler.watchdog.look(time.monotonic())
                assert not worker.ready
                assert not worker.tasks
            await self.settle()

        self.run(kill())

    @rule()
    def restart(self):
        async def stop():
            await self.core.stop()
            for outcome in await asyncio.gather(*self.pending, return_exceptions=True):
                if isinstance(outcome, OneShot):
                    outcome.release()
            self.pending.clear()

        self.run(stop())
        self.start_again()

    @rule(during=st.lists(st.sampled_from(["submit", "answer", "lose", "cancel"]), max_size=3), job=jobs)
    def crash(self, during, job):
        """SIGKILL: what was committed stays. What happens while the writer's thread is stopped is gone."""

        async def die():
            core = self.core
            stopped, go_on = threading.Event(), threading.Event()
            core.database.write_soon(lambda _: (stopped.set(), go_on.wait(60)))
            await asyncio.to_thread(stopped.wait, 60)
            calls = [(what, asyncio.ensure_future(self.happen(what, job))) for what in (*during, "submit")]
            for _ in range(10):
                await asyncio.sleep(0)
            for what, call in calls:
                if what == "submit" and call.done() and not call.exception():
                    self.accepted.append(call.result().id)  # it was answered 202
                    self.owners[call.result().id] = ""
                call.cancel()
            core.executor.owner = None
            core.observers.clear()
            await core.scheduler.watchdog.stop()
            waiting = core.database._queue
            core.database._held.clear()
            while not waiting.empty():
                waiting.get_nowait()
            background = [
                *core.jobs._background._tasks,
                *core.store._background._tasks,
                *core.scheduler.writes._background._tasks,
                *core.scheduler.writes._spill._background._tasks,
            ]
            tasks = [*background, *self.pending, *(call for _, call in calls)]
            for task in tasks:
                task.cancel()
            core.scheduler.deadlines.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
            core.database._held.clear()
            while not waiting.empty():
                waiting.get_nowait()
            core.jobs._writes.clear()  # which nobody will end
            go_on.set()
            await core.database.stop()
            await core.stop()
            self.pending.clear()

        self.run(die())
        self.start_again()

    async def happen(self, what, job):
        worker = self.core.executor.fleet["cpu"]
        if what == "submit":
            request = GemmJob(op="gemm", a=self.operand.id, b=self.operand.id)
            return (await self.core.jobs.submit(request))[0]
        if what == "cancel":
            await self.core.jobs.cancel(job)
        if what == "answer":
            for task in list(worker.tasks):
                self.core.executor.done(worker, task, later=True)
        if what == "lose" and worker.ready:
            self.core.executor.lose(worker)
        return None

    def start_again(self):
        """A new process counts afresh: running jobs are queued again; no job that ended is anything but ended."""

        async def start():
            final = {job: states[-1] for job, states in self.history.states.items() if states[-1].final}
            for states in self.history.states.values():
                if states[-1] is JobState.RUNNING:
                    states.append(JobState.QUEUED)
            self.core = Core(self.settings, Fleet(), self.arena())
            self.core.observers.append(self.history)
            await self.core.start()
            for job_id in self.accepted:
                info = await self.core.jobs.get(job_id)
                assert info.state is final.get(job_id, info.state), "an end that was told is undone"

        self.run(start())

    @invariant()
    def accepted_jobs_are_known(self):
        for job_id in self.accepted:
            self.run(self.core.jobs.get(job_id))  # NotFound would be a lost job

    @invariant()
    def what_waits_and_runs_is_what_is_counted(self):
        if not hasattr(self, "core"):
            return
        scheduler, live = self.core.scheduler, self.core.jobs._live.values()
        waiting = list(scheduler.queue)
        assert scheduler.queue.nbytes == sum(task.queued_bytes for task in waiting)
        assert sum(scheduler.queue.waiting(owner) for owner in ("", "alice", "bob")) == len(waiting)
        assert {task for task in waiting if task.durable} == {
            job.task for job in live if job.task is not None and not job.task.over and job.task.worker is None
        } | {
            each.task
            for each in scheduler.writes._recomputations.values()
            if not each.task.over and each.task.worker is None
        }

    def teardown(self):
        async def finish():
            core = self.core
            for name in NAMES:
                if not core.executor.fleet[name].ready:
                    core.executor.hello(name)
            fleet = core.executor
            writes = core.scheduler.writes
            writes._hurry = True
            writes._spill.hurry()
            while (
                core.scheduler.running or core.scheduler.queued or writes.unwritten[0] or any(fleet.unwritten.values())
            ):
                writes._order_writes()
                for worker in fleet.workers():
                    for task in list(worker.tasks):
                        fleet.done(worker, task)
                    fleet.write(worker.id)
                await self.settle()
            await self.settle()
            infos = [await core.jobs.get(job_id) for job_id in self.accepted]
            for outcome in await asyncio.gather(*self.pending, return_exceptions=True):
                if isinstance(outcome, OneShot):
                    outcome.release()
                else:
                    assert isinstance(outcome, (asyncio.CancelledError, ServiceError)), outcome
            assert all(info.state.final for info in infos)
            for info in infos:
                assert (info.state is JobState.SUCCEEDED) == (info.result is not None)
                assert info.owner == self.owners[info.id]
                for array_id in (info.result or {}).values():
                    if array_id in self.deleted:
                        continue
                    assert (await core.store.info(array_id)).owner == info.owner
                    await core.store.delete(array_id)
            await core.store.delete(self.operand.id)
            await self.settle()
            assert (core.store.used_bytes, core.store.scratch_bytes, core.store.count) == (0, 0, 0)
            assert core.scheduler.admissions.steps == 0
            assert list(core.store._catalog) == []
            assert core.store._space.unplaced_bytes == 0
            assert core.store.arena.allocate(ARENA_BYTES) is not None, "all of it is free again"

        try:
            if hasattr(self, "core"):
                try:
                    self.run(finish())
                finally:
                    self.run(self.core.stop())
        finally:
            self.loop.close()
            self.small.stop()
            os.close(self.arena_fd)
            self.folder.cleanup()


JobLife.TestCase.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)
TestJobLife = JobLife.TestCase
