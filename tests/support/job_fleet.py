"""Workers that do what a state machine says, and the states that it may see jobs in."""

from __future__ import annotations

from works import unpacked

from gemmserve_kernels import DeviceSpec
from gemmserve_service.executor.port import Worker, spec_adapter
from gemmserve_service.executor.protocol import Cancel, Done, Hello, RunBatch, Write, Written
from gemmserve_service.schemas import JobState, Timings

ALLOWED = {
    JobState.QUEUED: {JobState.RUNNING, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED},
    JobState.RUNNING: set(JobState) - {JobState.RUNNING},
}
NAMES = ("cpu", "cuda:0")
RESULT_BYTES = 256
"""Bytes of results that a device may keep: when it has more than half of that, the oldest are written."""


class Fleet:
    """Workers that do what the machine says."""

    def __init__(self):
        self.fleet = {name: Worker(name) for name in NAMES}
        self.owner = None
        self.may_wait = set()
        """Tasks whose results may be written later."""
        self.must_wait = set()
        """Those of them whose results have no place yet."""
        self.unwritten = {name: [] for name in NAMES}
        """Tasks whose results a device has and the store has not."""
        self.ordered = {name: set() for name in NAMES}
        """Those of them that it was told to write, or to drop."""

    async def start(self, owner):
        self.owner = owner
        self.catalog = owner.writes._store._catalog
        for name in NAMES:
            self.hello(name)

    async def stop(self):
        self.owner = None

    def workers(self):
        return list(self.fleet.values())

    def send(self, worker, message):
        assert worker.ready
        if isinstance(message, RunBatch):
            self._run(worker, message)
        elif isinstance(message, Cancel):
            assert message.task in worker.tasks
        elif isinstance(message, Write):
            assert message.task in self.unwritten[worker.id]
            assert message.places
            self.ordered[worker.id].add(message.task)
        else:
            assert set(message.tasks) <= set(self.unwritten[worker.id])
            self.ordered[worker.id].update(message.tasks)

    def _run(self, worker, batch):
        messages = unpacked(batch)
        sent = [message.task for message in messages]
        for message in messages:
            for ref in getattr(message, "operands", {}).values():
                record = None if ref.cache_id is None else self.catalog.get(ref.cache_id)
                pending = None if record is None else record.pending
                assert pending is None or pending.readable or pending.holder == worker.id
        waiting = [message for message in messages if getattr(message, "defer", False)]
        self.may_wait.update(message.task for message in waiting)
        self.must_wait.update(
            message.task for message in waiting if any(ref.extent is None for ref in message.results.values())
        )
        assert list(worker.tasks) == sent, "one task or one group at a time"

    def kill(self, worker, reason):
        self.lose(worker)

    def lose(self, worker):
        worker.ready = False
        self.unwritten[worker.id].clear()
        self.ordered[worker.id].clear()
        self.owner.worker_lost(worker)

    def done(self, worker, task, *, later=False):
        """A worker answers; `later`: before it has written the results, if it may."""
        later = (later and task in self.may_wait) or task in self.must_wait
        if later:
            self.unwritten[worker.id].append(task)
        self.owner.task_ended(worker, Done(task=task, algorithm="numpy", timings=Timings(), written=not later))

    def write(self, name, *, lost=False):
        """A worker writes the oldest result that it was told to write, or loses it."""
        if self.ordered[name]:
            tasks = [next(task for task in self.unwritten[name] if task in self.ordered[name])]
            self.unwritten[name].remove(tasks[0])
            self.ordered[name].discard(tasks[0])
            self.owner.results_written(self.fleet[name], Written(lost=tasks) if lost else Written(tasks=tasks))

    def forget(self, message):
        pass

    def hello(self, name):
        spec = spec_adapter().dump_python(DeviceSpec.cpu(), mode="json")
        self.fleet[name].greeted(Hello(worker=name, pid=1, spec=spec, verified_error=0, result_bytes=RESULT_BYTES))
        self.owner.worker_ready(self.fleet[name])


class History:
    """Keeps every state that a job was seen in."""

    def __init__(self):
        self.states = {}

    def job_ended(self, job, nbytes, flops):
        assert job.state.final
        self.job_entered(job.id, job.op, job.state)

    def job_entered(self, job_id, op, state):
        states = self.states.setdefault(job_id, [])
        if states:
            assert state in ALLOWED[states[-1]], (states, state)
        states.append(state)
