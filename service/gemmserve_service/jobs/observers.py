"""Observers of the core, told of each change of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gemmserve_service.jobs.forms.form import Ended
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.schemas import JobInfo, JobState


class Observer(Protocol):
    """Called in the event loop; must not block."""

    def job_entered(self, job_id: str, op: str, state: JobState) -> None:
        """A durable job entered a state that is not final."""

    def job_ended(self, job: JobInfo | Ended | EndedJob, nbytes: int, flops: int) -> None:
        """A job entered `job.state`, which is final. `nbytes`, `flops`: of its problem."""
