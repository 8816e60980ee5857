"""What is written of a job from its form is what pydantic writes of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from gemmserve_service.jobs.forms.form import (
    PLACES,
    Asked,
    Ended,
    Form,
    Fresh,
    moment,
    plain,
    record_text,
    record_texts,
    whole,
)
from gemmserve_service.schemas import JobInfo, JobRequest, JobState, Timings

A, B, C = ("arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "arr_01jd2w7n5j9m4p6q7r0s1t2v3w_7", "arr_01jd2w7p6k0n5q7r8s1t2v3w4x")
READ = TypeAdapter(JobRequest).validate_python
GEMM = {"op": "gemm", "a": A, "b": B}
REQUESTS = [
    GEMM,
    GEMM | {"b": A},
    GEMM | {"c": C, "beta": [0.5, -1e-7], "alpha": 1e22, "order": "F"},
    GEMM | {"c": A},
    GEMM | {"trans_a": "C", "config": {"block_m": 64, "algorithm": "simt"}, "compute": "fp64"},
    GEMM | {"name": "run-7/weights", "labels": {"run": "100 %d %% %s"}},
    GEMM | {"verify": True, "priority": -3, "timeout_s": 0.1, "ttl_s": 3600},
    {"op": "gemm_reduce", "a": A, "b": B},
    {"op": "gemm_reduce", "a": A, "b": B, "reduce": ["sumsq", "absmax"], "axis": "n", "return_c": True},
]


@pytest.mark.parametrize("fields", REQUESTS)
@pytest.mark.parametrize("microsecond", [0, 250_000, 123_456])
def test_a_job_is_written_as_without_its_form(fields, microsecond):
    request = READ(fields)
    form = Form(request)
    ids = tuple(fields[name] for name in form.operands)
    text = record_text(request)
    assert form.text(ids) == text
    assert form.asked(ids) == request
    assert plain(Asked(form, ids)) == plain(request) == request
    assert record_texts([request, Asked(form, ids)]) == [text, text]
    created = datetime(2026, 11, 28, 1, 2, 3, microsecond, tzinfo=UTC)
    job_id = "job_01jd2w7m4h8k3n5p6q9r0s1t2v"
    info = JobInfo(
        id=job_id, state=JobState.QUEUED, op=request.op, created_at=created, request=from_json(text), owner="me"
    )  # fmt: skip
    fresh = Fresh(form, ids, job_id, created, "me")
    assert (fresh.info(), fresh.info().owner, fresh.op) == (info, "me", request.op)
    assert moment(created) == to_json(created).decode()
    assert form.answer(fresh, {}, text) == info.model_dump_json()
    assert form.answer(fresh, {}, None) == info.model_dump_json(exclude={"request"})
    for estimated_s in (1e-06, 0.000203, 12.5, 3e7):
        changes = {"state": JobState.RUNNING, "attempt": 2, "started_at": created, "estimated_s": estimated_s}
        running = info.model_copy(update=changes)
        assert json.loads(form.answer(fresh, changes, text)) == running.model_dump(mode="json")
        assert json.loads(form.answer(fresh, changes, None)) == running.model_dump(mode="json", exclude={"request"})
    assert form.answer(fresh, {**changes, "share": 0.5}, text) is None
    timings = Timings(queue_s=1e-05, kernel_s=1 / 3, d2h_s=2e22)
    ended = Ended(
        fresh, 3, created, created + timedelta(seconds=1, microseconds=7), {"d": C}, timings, 'of "planes", %s'
    )
    fields = {
        "state": JobState.SUCCEEDED, "attempt": 3, "started_at": created, "finished_at": ended.finished_at,
        "result": {"d": C}, "timings": timings, "algorithm": 'of "planes", %s',
    }  # fmt: skip
    succeeded = info.model_copy(update=fields)
    assert whole(ended) == whole(succeeded) == succeeded
    assert ended.json() == succeeded.model_dump_json()
    assert ended.json(brief=True) == succeeded.model_dump_json(exclude={"request"})
    assert ended.timings_text == TypeAdapter(Timings).dump_json(timings).decode()
    shared = ("id", "op", "owner", "trace", "error", "residual", "mismatch", "elements", "steps", *fields)
    assert all(getattr(ended, name) == getattr(succeeded, name) for name in shared)


def test_jobs_of_a_form_share_nothing_that_changes():
    form = Form(READ(GEMM))
    first, second = (Fresh(form, ids, "job", datetime.now(UTC), "").info() for ids in ((A, B), (B, A)))
    assert (first.request["a"], second.request["a"]) == (A, B)
    assert form.request.a == PLACES[0]


@pytest.mark.parametrize(
    "fields",
    [
        GEMM | {"a": {"id": A}},
        GEMM | {"c": {"id": A, "offset": 1, "shape": [1], "strides": [1]}},
        GEMM | {"name": PLACES[0]},
        GEMM | {"labels": {"of": PLACES[1]}},
    ],
)
def test_what_has_no_form(fields):
    with pytest.raises(ValueError, match=r"view|exactly once"):
        Form(READ(fields))


def test_what_was_found_out_is_bounded():
    form = Form(READ(GEMM))
    for kinds in range(1000):
        form.remember(kinds, "found")
    assert form.known[999] == "found"
    assert len(form.known) < 100


def test_a_fresh_job_that_changes():
    form = Form(READ(GEMM))
    fresh = Fresh(form, (A, B), "job_01jd2w7m4h8k3n5p6q9r0s1t2v", datetime.now(UTC), "me", "00-1-2-01")
    changed = fresh.info({"state": JobState.RUNNING, "attempt": 1})
    assert changed == fresh.info().model_copy(update={"state": JobState.RUNNING, "attempt": 1})
    assert (changed.state, changed.trace, fresh.info().state) == (JobState.RUNNING, "00-1-2-01", JobState.QUEUED)
