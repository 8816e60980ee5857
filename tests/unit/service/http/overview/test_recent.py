"""The sample of times and the last failures: bounded, whoever fails how often."""

from __future__ import annotations

import random
import sys

import pytest

from gemmserve_service.errors import JobTimeout, describe
from gemmserve_service.http.overview import recent as module
from gemmserve_service.http.overview.recent import SAMPLE, Recent
from gemmserve_service.jobs.one_shot import EndedJob
from gemmserve_service.runtime.clock import now
from gemmserve_service.schemas import JobInfo, JobState, Timings

ERROR = describe(JobTimeout("the deadline passed")).problem()


def ended(seconds, state=JobState.SUCCEEDED):
    return EndedJob("job_1", "gemm", "", state, Timings(kernel_s=seconds))


def failed(owner="", detail="x", state=JobState.EXPIRED):
    return EndedJob("job_1", "gemm", owner, state, error=ERROR.model_copy(update={"detail": detail}))


def test_up_to_so_many_all_are_taken() -> None:
    recent = Recent()
    for number in range(SAMPLE):
        recent.job_ended(ended(number), 0, 0)
    assert [timings.kernel_s for timings in recent.take_sample()] == list(range(SAMPLE))
    assert recent.take_sample() == []


def test_of_more_each_has_the_same_chance() -> None:
    """Sample of 512 out of 4,096 jobs: an eighth of each quarter, within six deviations of the mean."""
    recent = Recent()
    recent._random = random.Random(7).random
    total = 8 * SAMPLE
    for number in range(total):
        recent.job_ended(ended(number), 0, 0)
    sample = [timings.kernel_s for timings in recent.take_sample()]
    assert len(sample) == len(set(sample)) == SAMPLE
    for quarter in range(4):
        count = sum(quarter * total / 4 <= number < (quarter + 1) * total / 4 for number in sample)
        deviation = (SAMPLE * 1 / 4 * 3 / 4 * 7 / 8) ** 0.5
        assert abs(count - SAMPLE / 4) <= 6 * deviation


def test_failures_newest_first(monkeypatch) -> None:
    moments = iter(range(1000))
    monkeypatch.setattr(module.clock, "time", lambda: float(next(moments)))
    recent = Recent()
    recent.job_ended(failed("alice", "one"), 0, 0)
    recent.job_ended(failed("bob", "two", JobState.FAILED), 0, 0)
    recent.job_ended(failed("alice", "three"), 0, 0)
    assert [each.problem.detail for each in recent.failures(None)] == ["three", "two", "one"]
    assert [each.problem.detail for each in recent.failures("alice")] == ["three", "one"]
    assert recent.failures("carol") == []
    assert {each.job for each in recent.failures(None)} == {None}, "nobody can ask for those of a single request"


def test_of_a_job_on_record_the_id_is_told() -> None:
    recent = Recent()
    job_id = "job_01jd2w7m4h8k3n5p6q9r0s1t2v"
    recent.job_ended(JobInfo(id=job_id, state=JobState.FAILED, op="gemm", created_at=now(), error=ERROR), 0, 0)
    assert [each.job for each in recent.failures(None)] == [job_id]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED])
def test_what_did_not_fail_is_no_failure(state) -> None:
    recent = Recent()
    recent.job_ended(ended(1.0, state), 0, 0)
    recent.job_ended(EndedJob("job_1", "gemm", "", state), 0, 0)
    assert recent.failures(None) == []


def test_nobodys_failures_push_out_anothers() -> None:
    recent = Recent()
    recent.job_ended(failed("alice", "mine"), 0, 0)
    for number in range(1000):
        recent.job_ended(failed("bob", str(number)), 0, 0)
    assert [each.problem.detail for each in recent.failures("alice")] == ["mine"]
    assert [each.problem.detail for each in recent.failures("bob")][:2] == ["999", "998"]
    assert len(recent.failures("bob")) == len(recent.failures(None)) == 20
    for number in range(1000):
        recent.job_ended(failed(f"owner {number}"), 0, 0)
    assert len(recent._failures) == 64


def test_an_end_costs_one_call() -> None:
    """Function calls of Python, which no noise touches: the hot path has this one more, whether the sample is full."""
    recent, job, counted = Recent(), ended(1.0), []
    for _ in range(2 * SAMPLE):
        sys.setprofile(lambda _, event, __: counted.append(event))
        try:
            recent.job_ended(job, 0, 0)
        finally:
            sys.setprofile(None)
        assert counted.count("call") == 1
        counted.clear()
