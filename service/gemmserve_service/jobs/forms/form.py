"""Form of a job: all of it but the ids of its operands, which are stored arrays. What is written of a job, on record
and in answers, is made of a text with places for the ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pydantic_core import from_json, to_json

from gemmserve_service.schemas import GemmJob, GemmReduceJob, JobInfo, JobState, ProgramJob, Timings
from gemmserve_service.store.record import NO_TAGS, Tags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Ids = tuple[str, ...]
"""Ids of operands: of a, b, and c where there is one."""

PLACES: Final = tuple(f"arr_{digit * 26}" for digit in "012")
"""Ids that no array has: the time in them is long past, or to come."""
_MAX_KNOWN: Final = 64
_BEGUN: Final = frozenset({"state", "attempt", "estimated_s", "started_at"})
_AT: Final = datetime(2001, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
_MARKS: Final[dict[str, Any]] = {
    "state": JobState.RUNNING,
    "attempt": 1234567,
    "estimated_s": 7654321.0,
    "started_at": _AT + timedelta(days=1),
}
_JOB: Final = f"job_{'0' * 26}"


def moment(at: datetime) -> str:
    """A moment in UTC as pydantic writes it."""
    return to_json(at).decode()


_MARKED: Final = (_JOB, "running", "1234567", "7654321.0", moment(_AT), moment(_AT + timedelta(days=1)))
"""Texts of an answer in whose places others come: id, and what changes when a job begins to run."""
_ENDED: Final[dict[str, Any]] = {
    "state": JobState.SUCCEEDED,
    "attempt": 1234567,
    "started_at": _AT + timedelta(days=1),
    "finished_at": _AT + timedelta(days=2),
    "result": {"d": PLACES[0][:-1] + "3"},
    "timings": Timings(queue_s=7654321.0),
    "algorithm": "an algorithm of this form",
}
_ENDED_MARKED: Final = (
    _JOB, "1234567", *(moment(_AT + timedelta(days=days)) for days in range(3)),
    *(to_json(_ENDED[name]).decode() for name in ("result", "timings", "algorithm")),
)  # fmt: skip
"""The same of one that has succeeded."""


class Form:
    """Common part of jobs that differ by their operands alone. Raises ValueError where an operand is a view, or
    the name of a result looks like an id.
    """

    def __init__(self, request: GemmJob | GemmReduceJob) -> None:
        names = ["a", "b", *(["c"] if isinstance(request, GemmJob) and request.c is not None else [])]
        if not all(isinstance(getattr(request, name), str) for name in names):
            raise ValueError("an operand is a view")
        self.operands = tuple(names)
        """Names of the operands."""
        self.request: GemmJob | GemmReduceJob = request.model_copy(update=dict(zip(names, PLACES, strict=False)))
        """A job of this form, on operands that there are not."""
        self.tags = Tags(request.name, request.labels) if request.name is not None or request.labels else NO_TAGS
        text = record_text(self.request)
        order = sorted(range(len(names)), key=lambda place: text.find(PLACES[place]))
        self._text = _with_places(text, *(PLACES[place] for place in order))
        self._order = itemgetter(*order) if order != sorted(order) else None
        self._fields: dict[str, Any] = from_json(text)
        info = JobInfo(id=_JOB, state=JobState.QUEUED, op=request.op, created_at=_AT, request=self._fields)
        self._info = info
        head, found, tail = info.model_copy(update=_MARKS).model_dump_json().partition(text)
        if not found or text in tail:
            raise ValueError("the request is not in the answer exactly once")
        self._head = _with_places(head, *_MARKED)
        self._tail = tail
        self._brief = _with_places(info.model_copy(update=_MARKS).model_dump_json(exclude={"request"}), *_MARKED)
        whole_end = info.model_copy(update=_ENDED)
        ended, found, self._ended_tail = whole_end.model_dump_json().partition(text)
        self._ended_head = _with_places(ended, *_ENDED_MARKED)
        self._ended_brief = _with_places(whole_end.model_dump_json(exclude={"request"}), *_ENDED_MARKED)
        self.known: dict[object, Any] = {}
        """Findings of `prepare` about jobs of this form, by the kinds of their operands."""

    def remember(self, kinds: object, found: object) -> None:
        """Keep what was found out about operands of those kinds."""
        if len(self.known) >= _MAX_KNOWN:
            self.known.clear()
        self.known[kinds] = found

    def text(self, ids: Ids) -> str:
        """The job on those operands as it goes on record (`record_text`)."""
        return self._text % (ids if self._order is None else self._order(ids))

    def asked(self, ids: Ids) -> GemmJob | GemmReduceJob:
        """The job on those operands."""
        return self.request.model_copy(update=dict(zip(self.operands, ids, strict=True)))

    def info(self, job: Fresh, changes: Mapping[str, Any]) -> JobInfo:
        """The job as somebody sees it: see `Fresh.info`."""
        fields = self._fields.copy()
        fields.update(zip(self.operands, job.ids, strict=True))
        own = {
            "id": job.id, "created_at": job.created_at, "request": fields, "owner": job.owner, "trace": job.trace
        }  # fmt: skip
        return self._info.model_copy(update={**own, **changes})

    def answer(self, job: Fresh, changes: Mapping[str, Any], text: str | None) -> str | None:
        """Return `Fresh.info` as JSON, with the request, if its text is given. None: other fields have changed than
        those of a job that begins to run.
        """
        if not changes.keys() <= _BEGUN:
            return None
        estimated_s, started_at = changes.get("estimated_s"), changes.get("started_at")
        shown = (
            job.id,
            changes.get("state", JobState.QUEUED),
            changes.get("attempt", 0),
            "null" if estimated_s is None else repr(estimated_s),
            moment(job.created_at),
            "null" if started_at is None else moment(started_at),
        )
        return self._brief % shown if text is None else f"{self._head % shown}{text}{self._tail}"

    def answer_ended(self, job: Ended, *, brief: bool) -> str:
        """Return `Ended.info` as JSON; `brief`: without the request."""
        fresh = job.fresh
        shown = (
            job.id,
            job.attempt,
            moment(fresh.created_at),
            moment(job.started_at),
            moment(job.finished_at),
            job.result_text,
            job.timings_text,
            _quoted(job.algorithm),
        )
        if brief:
            return self._ended_brief % shown
        return f"{self._ended_head % shown}{self.text(fresh.ids)}{self._ended_tail}"


class Fresh(NamedTuple):
    """A job that waits and has not changed yet: its `JobInfo` is made when somebody wants to see it."""

    form: Form
    ids: Ids
    id: str
    created_at: datetime
    owner: str
    trace: str = ""

    @property
    def op(self) -> Literal["gemm", "gemm_reduce"]:
        """Operation."""
        return self.form.request.op

    def info(self, changes: Mapping[str, Any] | None = None) -> JobInfo:
        """The job, with other values of some fields."""
        return self.form.info(self, changes or {})


@dataclass(slots=True, eq=False)
class Ended:
    """A job of a form that has succeeded, with nothing to be said but what is said of each: fields of its `JobInfo`, as
    record, observers and answers need them. The whole one is made when somebody wants to see it.
    """

    fresh: Fresh
    attempt: int
    started_at: datetime
    finished_at: datetime
    result: dict[str, str]
    timings: Timings
    algorithm: str
    id: str = field(init=False)
    op: Literal["gemm", "gemm_reduce"] = field(init=False)
    result_text: str = field(init=False)
    """The result as JSON."""
    timings_text: str = field(init=False)
    """The timings likewise."""
    state: JobState = JobState.SUCCEEDED
    error: None = None
    residual: None = None
    mismatch: None = None
    elements: None = None
    steps: None = None

    def __post_init__(self) -> None:
        self.id, self.op = self.fresh.id, self.fresh.op
        self.result_text = to_json(self.result).decode()
        self.timings_text = to_json(self.timings).decode()

    @property
    def owner(self) -> str:
        """The one that the job is of."""
        return self.fresh.owner

    @property
    def trace(self) -> str:
        """Traceparent."""
        return self.fresh.trace

    def info(self) -> JobInfo:
        """The job."""
        names = ("state", "attempt", "started_at", "finished_at", "result", "timings", "algorithm")
        return self.fresh.info({name: getattr(self, name) for name in names})

    def json(self, *, brief: bool = False) -> str:
        """The job as JSON; `brief`: without its request."""
        return self.fresh.form.answer_ended(self, brief=brief)


def whole(job: JobInfo | Ended) -> JobInfo:
    """Return the job as anybody may see it."""
    return job.info() if isinstance(job, Ended) else job


class Asked(NamedTuple):
    """A job as it was asked for."""

    form: Form
    ids: Ids


AnyRequest = GemmJob | GemmReduceJob | ProgramJob | Asked


def plain(request: AnyRequest) -> GemmJob | GemmReduceJob | ProgramJob:
    """Return the request without a form."""
    return request.form.asked(request.ids) if isinstance(request, Asked) else request


def record_texts(requests: Sequence[AnyRequest]) -> list[str]:
    """Return `record_text` of each."""
    return [
        request.form.text(request.ids) if isinstance(request, Asked) else record_text(request) for request in requests
    ]


def record_text(request: GemmJob | GemmReduceJob | ProgramJob) -> str:
    """Return a request as it goes on record, and as an Idempotency-Key's digest knows it.

    Of a program what was left out stays out: a thousand steps would be many times as long. So do the name and labels
    of results that have none.
    """
    if isinstance(request, ProgramJob):
        return request.model_dump_json(exclude_unset=True)
    if request.name is None and not request.labels:
        return request.model_dump_json(exclude={"name", "labels"})
    return request.model_dump_json()


@lru_cache(64)
def _quoted(name: str) -> str:
    """The name as JSON."""
    return to_json(name).decode()


def _with_places(text: str, *values: str) -> str:
    """The text as a format, a place in the stead of each value, in that order. Raises ValueError where one is not in it
    exactly once.
    """
    made, rest = "", text
    for value in values:
        head, found, rest = rest.partition(value)
        if not found or text.count(value) != 1:
            raise ValueError(f"{value!r} is not in the text exactly once")
        made += head.replace("%", "%%") + "%s"
    return made + rest.replace("%", "%%")
