"""Workers that do what a state machine says, and the states that it may see jobs in."""

from __future__ import annotations

from works import unpacked

from gemmserve_kernels import DeviceSpec
from gemmserve_service.executor.port import Worker, spec_adapter
from gemmserve_service.executor.protocol import Cancel, Done, Hello, RunBatch, Written
from gemmserve_service.schemas import JobState, Timings

ALLOWED = {
    JobState.QUEUED: {JobState.RUNNING, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED},
    JobState.RUNNING: set(JobState) - {JobState.RUNNING},
}
NAMES = ("cpu", "cuda:0")


class Fleet:
    """Workers that do what the machine says."""

    def __init__(self):
        self.fleet = {name: Worker(name) for name in NAMES}
        self.owner = None
        self.may_wait = set()
        """Tasks whose results may be written later."""
        self.unwritten = {name: [] for name in NAMES}
        """Tasks whose results a device has and the store has not."""

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
        else:
            assert {*message.first, *message.last, *message.drop} <= set(self.unwritten[worker.id])

    def _run(self, worker, batch):
        messages = unpacked(batch)
        sent = [message.task for message in messages]
        for message in messages:
            for ref in getattr(message, "operands", {}).values():
                record = None if ref.cache_id is None else self.catalog.get(ref.cache_id)
                assert record is None or record.pending is None or record.pending.holder == worker.id
        self.may_wait |= {message.task for message in messages if getattr(message, "defer", False)}
        assert list(worker.tasks) == sent, "one task or one group at a time"

    def kill(self, worker, reason):
        self.lose(worker)

    def lose(self, worker):
        worker.ready = False
        self.unwritten[worker.id].clear()
        self.owner.worker_lost(worker)

    def done(self, worker, task, *, later=False):
        """A worker answers; `later`: before it has written the results, if it may."""
        later = later and task in self.may_wait
        if later:
            self.unwritten[worker.id].append(task)
        self.owner.task_ended(worker, Done(task=task, algorithm="numpy", timings=Timings(), written=not later))

    def write(self, name, *, lost=False):
        """A worker writes the oldest result that it has, or loses it."""
        if self.unwritten[name]:
            tasks = [self.unwritten[name].pop(0)]
            self.owner.results_written(self.fleet[name], Written(lost=tasks) if lost else Written(tasks=tasks))

    def forget(self, message):
        pass

    def hello(self, name):
        spec = spec_adapter().dump_python(DeviceSpec.cpu(), mode="json")
        self.fleet[name].greeted(Hello(worker=name, pid=1, spec=spec, verified_error=0, defers=True))
        self.owner.worker_ready(self.fleet[name])


class History:
    """Keeps every state that a job was seen in."""

    def __init__(self):
        self.states = {}

    def job_changed(self, job, nbytes, flops):
        states = self.states.setdefault(job.id, [])
        if states:
            assert job.state in ALLOWED[states[-1]], (states, job.state)
        states.append(job.state)
