"""The queue as a few dicts: what `JobQueue` means, without SQL. Held to the same suite as the real one."""

from __future__ import annotations

import asyncio

from gemmserve_service.jobs.job_queue import NotOnRecord, Unfinished, brief, request_of
from gemmserve_service.schemas import JobState, ProgramJob

OPEN = {JobState.QUEUED, JobState.RUNNING}


class MemoryQueue:
    """Keeps everything until it is purged; nothing survives the process."""

    def __init__(self, database, store):
        self.database, self.store = database, store
        self.jobs, self.deadlines, self.crashes, self.keys = {}, {}, {}, {}

    def check_open(self):
        pass

    def insert(self, jobs, key, *, within_s=0.0):
        for job in jobs:
            parsed = request_of(job.request)
            given = parsed.model_dump(mode="json", exclude_unset=isinstance(parsed, ProgramJob))
            self.jobs[job.info.id] = job.info.model_copy(update={"request": given})
            self.deadlines[job.info.id] = job.deadline_at
        if key is not None:
            self.keys[key.owner, key.key] = key
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _update(self, info, **fields):
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        if self.jobs[info.id].state in OPEN:
            self.jobs[info.id] = self.jobs[info.id].model_copy(update=fields)
        return done

    def started(self, job_id, attempt, started_at):
        self._update(self.jobs[job_id], state=JobState.RUNNING, attempt=attempt, started_at=started_at)

    def requeued(self, info, crashes):
        self.crashes[info.id] = crashes
        return self._update(info, state=JobState.QUEUED, attempt=info.attempt, started_at=None)

    def begin(self):
        pass

    def stop(self):
        pass

    def finish(self, info, arrays, *, within_s=0.0):
        return asyncio.ensure_future(self._finish(info, arrays))

    def end(self, info, arrays, told, *, within_s=0.0):
        self.finish(info, arrays).add_done_callback(lambda done: told(done.exception()))

    async def _finish(self, info, arrays):
        def insert(db):
            self.store.insert_rows(db, arrays)

        if info.id not in self.jobs:
            raise NotOnRecord(info.id)
        await self.database.write(insert)
        ends = (
            "state",
            "attempt",
            "started_at",
            "finished_at",
            "result",
            "error",
            "timings",
            "algorithm",
            "residual",
            "steps",
        )
        self._update(info, **{name: getattr(info, name) for name in ends})

    async def succeeded(self, job_ids):
        infos = [self.jobs[job_id] for job_id in sorted(set(job_ids) & self.jobs.keys())]
        return [(info, request_of(info.request)) for info in infos if info.state == JobState.SUCCEEDED]

    async def set_error(self, job_id, error):
        self.jobs[job_id] = self.jobs[job_id].model_copy(update={"error": error})

    async def get(self, job_id):
        return self.jobs.get(job_id)

    async def page(self, *, state, limit, before, owner=""):
        chosen = [
            info
            for info in self.jobs.values()
            if (state is None or info.state == state)
            and (before is None or info.id < before)
            and owner in {"", info.owner}
        ]
        return [brief(info) for info in sorted(chosen, key=lambda info: info.id, reverse=True)[:limit]]

    async def recover(self):
        for info in self.jobs.values():
            self._update(info, state=JobState.QUEUED, started_at=None)
        unfinished = [
            Unfinished(info, request_of(info.request), self.deadlines[info.id], self.crashes.get(info.id, 0))
            for info in sorted(self.jobs.values(), key=lambda info: info.id)
            if info.state in OPEN
        ]
        return unfinished, sorted(self.keys.values(), key=lambda key: key.created_at)

    async def shift(self, seconds):
        moved = {job_id: at + seconds for job_id, at in self.deadlines.items() if at is not None}
        self.deadlines.update(moved)
        for job_id, info in self.jobs.items():
            if info.finished_at is not None:
                at = type(info.finished_at).fromtimestamp(
                    info.finished_at.timestamp() + seconds, info.finished_at.tzinfo
                )
                self.jobs[job_id] = info.model_copy(update={"finished_at": at})
        self.keys = {name: key._replace(created_at=key.created_at + seconds) for name, key in self.keys.items()}

    async def purge(self, *, jobs_before, keys_before):
        self.jobs = {
            job_id: info
            for job_id, info in self.jobs.items()
            if info.finished_at is None or info.finished_at.timestamp() >= jobs_before
        }
        self.keys = {name: key for name, key in self.keys.items() if key.created_at >= keys_before}
