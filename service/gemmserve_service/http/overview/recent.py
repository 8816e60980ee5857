"""Recent ends of jobs: the times of a sample of them, and the last failures."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.jobs.one_shot import EndedJob
from gemmserve_service.runtime import clock
from gemmserve_service.schemas import JobState

if TYPE_CHECKING:
    from gemmserve_service.jobs.forms.form import Ended
    from gemmserve_service.schemas import JobInfo, Problem, Timings

SAMPLE: Final = 512
"""Jobs of which the times of one step of the history are taken: the 99th percentile is the sixth largest then."""
_FAILURES: Final = 20
"""Failures of one owner that are kept: so nobody's push out another's."""
_OWNERS: Final = 64
"""Owners whose failures are kept, those that failed last."""


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A job that failed or expired."""

    time: float
    """Seconds since 1970."""
    job: str | None
    """Id; None for a product of a single request, which nobody can ask for."""
    owner: str
    kind: str
    problem: Problem


class Recent:
    """An observer of jobs (`jobs.observers.Observer`), called in the event loop for each end of a job."""

    def __init__(self) -> None:
        self._sample: list[Timings] = []
        self._seen = 0
        self._random = random.Random().random  # noqa: S311 (which jobs are in a sample is no secret)
        self._failures: OrderedDict[str, deque[FailedJob]] = OrderedDict()

    def job_entered(self, job_id: str, op: str, state: JobState) -> None:
        """Do nothing: a job is of interest here when it ends."""

    def job_ended(self, job: JobInfo | Ended | EndedJob, nbytes: int, flops: int) -> None:  # noqa: ARG002
        """Take its times into the sample, each job with the same chance (Vitter's algorithm R, ACM TOMS 11, 1985); and
        its problem, if it has failed.
        """
        if job.timings is not None:
            self._seen += 1
            if self._seen <= SAMPLE:
                self._sample.append(job.timings)
            elif (place := int(self._random() * self._seen)) < SAMPLE:
                self._sample[place] = job.timings
        elif job.error is not None and job.state in {JobState.FAILED, JobState.EXPIRED}:
            self._failed(job, job.error)

    def take_sample(self) -> list[Timings]:
        """Return the times of jobs that ended since the last call."""
        sample, self._sample, self._seen = self._sample, [], 0
        return sample

    def failures(self, owner: str | None) -> list[FailedJob]:
        """Return the last ones, newest first: an owner's, or everybody's (None)."""
        if owner is not None:
            found = list(self._failures.get(owner, ()))
        else:
            found = [each for kept in self._failures.values() for each in kept]
        return sorted(found, key=lambda each: each.time, reverse=True)[:_FAILURES]

    def _failed(self, job: JobInfo | Ended | EndedJob, problem: Problem) -> None:
        kept = self._failures.setdefault(job.owner, deque(maxlen=_FAILURES))
        self._failures.move_to_end(job.owner)
        if len(self._failures) > _OWNERS:
            self._failures.popitem(last=False)
        job_id = None if isinstance(job, EndedJob) else job.id
        kept.append(FailedJob(clock.time(), job_id, job.owner, job.op, problem))
