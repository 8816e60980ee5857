"""/v1/jobs and /v1/job-states: submit one or several, list, wait, watch, cancel."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Header, Query, Request
from pydantic import ConfigDict, Field, TypeAdapter
from starlette.responses import Response, StreamingResponse

from gemmserve.wire import IDEMPOTENCY_HEADER, MAX_JOBS
from gemmserve_kernels import ParameterInvalid
from gemmserve_service.errors import Gone, InvalidRequest, NotFound, ServiceError
from gemmserve_service.http.cells.redirects import check_ids
from gemmserve_service.http.headers.preferences import parse_prefer
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.requests.long_json import LONG, read_object, validate_each
from gemmserve_service.http.requests.queries import Number  # noqa: TC001 (pydantic resolves it at run time)
from gemmserve_service.http.requests.strict_json import parse_object, read_json, too_large, validate
from gemmserve_service.http.routes.common import (
    JobPath,
    PageQuery,
    ViewQuery,
    caller_of,
    core_of,
    page_headers,
    render,
    server_timing,
    view_of,
)
from gemmserve_service.jobs.forms.form import Ended
from gemmserve_service.jobs.forms.known_forms import MAX_CHARACTERS, elements
from gemmserve_service.jobs.live_jobs import LiveJob
from gemmserve_service.jobs.prepare import check_length, check_results
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import (
    STEP_OPS,
    VALUE,
    VIEW,
    AnyStep,
    GemmJob,
    GemmReduceJob,
    JobInfo,
    JobList,
    JobPage,
    JobRequest,
    JobState,
    JobStates,
    ProgramJob,
    SeveralJobs,
    StatesQuestion,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from gemmserve_service.http.headers.preferences import Preference
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.jobs.forms.form import AnyRequest, Asked
    from gemmserve_service.jobs.forms.known_forms import KnownForms

router = APIRouter(tags=["jobs"], default_response_class=Response)

MAX_BODY = 1 << 20
KEEP_ALIVE_S = 15.0
"""Proxies close a silent connection after 60 s (nginx's proxy_read_timeout); a quarter of that."""

_MAX_QUESTION: Final = 16 << 10
_QUESTION: Final = "a question for the states of jobs"

_REQUEST: TypeAdapter[GemmJob | GemmReduceJob | ProgramJob] = TypeAdapter(JobRequest)
_STEP: TypeAdapter[AnyStep] = TypeAdapter(Step)
_INFO: Final = TypeAdapter(JobInfo)
_AT_ONCE: Final = 32
_TAGS = (*STEP_OPS, "program", VALUE, VIEW)

_EXAMPLE_A = "arr_01jd2w7m4h8k3n5p6q9r0s1t2v"
_EXAMPLE_B = "arr_01jd2w7n5j9m4p6q7r0s1t2v3w"
_EXAMPLES: dict[str, dict[str, Any]] = {
    "gemm": {"op": "gemm", "a": _EXAMPLE_A, "b": _EXAMPLE_B, "alpha": [0, 1], "trans_a": "C"},
    "beamforming power": {
        "op": "gemm_reduce",
        "a": _EXAMPLE_A,
        "b": _EXAMPLE_B,
        "reduce": ["sumsq", "absmax"],
        "axis": "m",
    },
    "fourth power, and a peak": {
        "op": "program",
        "steps": [
            {"id": "x2", "op": "gemm", "a": _EXAMPLE_A, "b": _EXAMPLE_A},
            {"id": "x4", "op": "gemm", "a": "$x2", "b": "$x2"},
            {"id": "y", "op": "gemm_reduce", "a": "$x4", "b": _EXAMPLE_B, "reduce": "absmax"},
        ],
        "keep": ["x4", "y"],
    },
    "power of the real part, every other row": {
        "op": "gemm",
        "a": {"id": _EXAMPLE_A, "shape": [32, 64], "strides": [128, 1], "part": "real"},
        "b": {"id": _EXAMPLE_A, "shape": [64, 32], "strides": [1, 128], "part": "real"},
    },
    "several jobs": {
        "jobs": [
            {"op": "gemm", "a": _EXAMPLE_A, "b": _EXAMPLE_B},
            {"op": "gemm_reduce", "a": _EXAMPLE_A, "b": _EXAMPLE_B, "reduce": "absmax"},
        ]
    },
}
_EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "event": {"const": "job"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/JobInfo"},
        },
    },
}
_JOB_HEADERS = {"Server-Timing": "queue, h2d, kernel and d2h in milliseconds, once known"}


class JobsQuery(PageQuery):
    """Filter of a listing of jobs."""

    state: JobState | None = Field(None, description="only jobs in this state")


class WaitQuery(ViewQuery):
    """Duration of a poll."""

    model_config = ConfigDict(allow_inf_nan=False)

    wait: Number = Field(
        0, ge=0, le=86_400, description="seconds to wait for a final state; the server's setting caps it"
    )


@router.post(
    "/v1/jobs",
    status_code=202,
    summary="Submit a job, or several",
    responses={
        202: doc.one_of(
            JobInfo,
            JobList,
            description="Accepted, durably.",
            headers={"Location": "the job's URL; of several there is none", "Preference-Applied": "RFC 7240"},
        ),
        200: doc.one_of(
            JobInfo,
            JobList,
            description="`Prefer: wait=N` and the job is final; of several, all of them.",
            headers={"Location": "the job's URL; of several there is none"} | _JOB_HEADERS,
        ),
        **doc.problems(
            "malformed-json", "invalid-request", "digest-mismatch", "not-found", "idempotency-conflict", "gone",
            "array-lost", "tier-unavailable", "too-large",
            "unsupported-media-type", "parameter-invalid", "shape-mismatch", "dtype-unsupported", "compute-unsupported",
            "config-infeasible", "program-too-large", "idempotency-mismatch", "queue-full", "not-ready", "draining",
            "store-full", "quota-exceeded", "request-timeout",
        ),
    },
    openapi_extra=doc.json_body(GemmJob, GemmReduceJob, ProgramJob, SeveralJobs, examples=_EXAMPLES),
)  # fmt: skip
async def submit(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias=IDEMPOTENCY_HEADER,
            min_length=1,
            max_length=255,
            description="sent again with the same body, the first job is answered; with another body 422",
        ),
    ] = None,
    prefer: Annotated[
        list[str] | None,
        Header(alias="Prefer", description="wait=N answers once the job is final, after N s at most; respond-async"),
    ] = None,
) -> Response:
    """Queues a product of stored arrays, or a program: steps that use each other's results. Shapes, types and the
    compute mode (of every step) are checked now; the answer comes after the job is on record, so it survives a crash
    of the server. A problem with a step names it: `step` its id, `pointer` the place in the request.

    Several jobs, `{"jobs": [...]}`, are accepted together, by one commit, or none of them is: a problem with one names
    it (`item` its number, `pointer` the place). The key is that of all of them, and the answer comes once all are final
    where one is waited for. A body has 1 MiB at most, a job among several 8 KiB.
    """
    body = await _body(request)
    return await answer(core_of(request), body, idempotency_key, parse_prefer(prefer or []), caller_of(request).owner)


async def answer(core: Core, body: bytes | bytearray, key: str | None, preference: Preference, owner: str) -> Response:
    """Queue the job, or jobs, that a JSON text asks for; return the answer, once they are final if `preference` is to
    wait. `key`: the Idempotency-Key. Raises ServiceError, KernelError.
    """
    forms = core.jobs.forms
    several, requests = await _known(forms, body) or await _read(forms, body, core.settings.max_program_steps)
    wait_s = granted_s(core, preference)
    lives, created = await core.jobs.accept(requests, key, owner, waits=wait_s > 0, several=several)
    headers = _applied(preference, wait_s)
    if not created:
        headers["Idempotent-Replayed"] = "true"
    if wait_s > 0:
        await core.jobs.wait_all(lives, wait_s)
    status = 200 if preference.wait_s is not None and all(live.over for live in lives) else 202
    if several:
        return _several(await _briefly(lives), status, headers)
    return _render_submitted(lives[0].info, status, headers)


def granted_s(core: Core, preference: Preference) -> float:
    """Seconds for which a client that prefers to wait may."""
    return min(float(preference.wait_s or 0), core.settings.max_wait_s)


def accept_now(
    core: Core, text: str, key: str | None, owner: str, *, waits: bool
) -> tuple[Asked, LiveJob, asyncio.Future[Any]] | None:
    """A job that a JSON text asks for, and what is done once it is on record. None: nothing has happened; `answer` has
    more to do. Raises ServiceError, KernelError.
    """
    asked = core.jobs.forms.find(text) if len(text) <= MAX_CHARACTERS else None
    if asked is None:
        return None
    accepted = core.jobs.accept_now(asked, key, owner, waits=waits)
    return None if accepted is None else (asked, *accepted)


def waited_for(live: LiveJob, preference: Preference, wait_s: float) -> tuple[int, bytes, bytes]:
    """Return the answer to a job that was waited for so long at most: status, fields as lines, body."""
    info = live.shown
    more = f"location: /v1/jobs/{info.id}\r\npreference-applied: {preference.applied(wait_s)}\r\n"
    return 200 if info.state.final else 202, *_plain(info, more)


def seen(job: LiveJob | JobInfo | Ended, job_id: str) -> tuple[int, bytes, bytes]:
    """Return the answer to who looks at a job that is in memory, likewise. Raises NotFound."""
    if not isinstance(job, LiveJob):
        return 200, *_plain(job)
    if job.refused is not None:
        raise NotFound(f"no job {job_id}")
    return 200, *_plain(job.shown)


def _plain(info: JobInfo | Ended, more: str = "") -> tuple[bytes, bytes]:
    """Fields of an answer, `more` among them, as lines; and its body, a job."""
    body = info.json().encode() if isinstance(info, Ended) else _INFO.dump_json(info)
    timing = f"server-timing: {server_timing(info.timings)}\r\n" if info.timings else ""
    length = f"content-length: {len(body)}\r\ncontent-type: application/json\r\n"
    return f"cache-control: no-store\r\n{more}{timing}{length}".encode("ascii"), body


def accepted_json(asked: Asked, live: LiveJob) -> bytes:
    """The job as JSON."""
    return (_begun(live, asked.form.text(asked.ids)) or live.info.model_dump_json()).encode()


def _begun(live: LiveJob, text: str | None = None) -> str | None:
    """The job as JSON where no more has happened than that it runs; `text`: its request's, to be told too."""
    begun = live.begun
    return None if begun is None else begun[0].form.answer(*begun, text)


async def _plain_submit(request: Request) -> Response | None:
    keys = request.headers.getlist(IDEMPOTENCY_HEADER)
    if len(keys) > 1 or not all(0 < len(key) < 256 for key in keys):
        return None
    return await submit(request, keys[0] if keys else None, request.headers.getlist("prefer"))


DIRECT: Final = {"/v1/jobs": _plain_submit}
"""Routes for `direct_routes.DirectRoutes`."""


@router.get(
    "/v1/jobs",
    summary="List jobs",
    responses={
        200: doc.model(JobPage, "A page, newest first.", {"Link": 'the next page, rel="next"'}),
        **doc.problems("parameter-invalid", "invalid-request"),
    },
)
async def listing(request: Request, query: Annotated[JobsQuery, Query()]) -> Response:
    """The jobs there are, of the key's owner; `next_cursor` is null on the last page. Behind a router they are those of
    the cell that answers alone.
    """
    items, next_cursor = await core_of(request).jobs.list(
        state=query.state, limit=query.limit, cursor=query.cursor, owner=view_of(request, query)
    )
    return render(JobPage(items=items, next_cursor=next_cursor), headers=page_headers(request, query, next_cursor))


@router.get(
    "/v1/jobs/{job_id}",
    summary="A job's state",
    responses={
        200: doc.model(JobInfo, "The job now.", _JOB_HEADERS),
        **doc.problems("not-found", "gone", "parameter-invalid"),
    },
)
async def state(request: Request, job_id: JobPath, query: Annotated[WaitQuery, Query()]) -> Response:
    """The job; with `wait` once it is final, or as it is after that time."""
    return await look(core_of(request), job_id, query.wait, view_of(request, query))


async def look(core: Core, job_id: str, wait_s: float, owner: str) -> Response:
    """Return the job that `owner` sees: now, or once it is final, after `wait_s` at most. Raises NotFound."""
    wait_s = min(wait_s, core.settings.max_wait_s)
    info = await (core.jobs.wait(job_id, wait_s, owner=owner) if wait_s > 0 else core.jobs.get(job_id, owner=owner))
    return _render_job(info)


@router.post(
    "/v1/job-states",
    summary="States of several jobs",
    responses={
        200: doc.model(JobStates, "The jobs now."),
        **doc.problems(
            "other-cell", "malformed-json", "invalid-request", "too-large", "unsupported-media-type",
            "parameter-invalid",
        ),
    },
    openapi_extra=doc.json_body(
        StatesQuestion,
        examples={
            "now": {"ids": ["job_01jd2w7m4h8k3n5p6q9r0s1t2v", "job_01jd2w7n5j9m4p6q7r0s1t2v3w"]},
            "once the first is final": {
                "ids": ["job_01jd2w7m4h8k3n5p6q9r0s1t2v", "job_01jd2w7n5j9m4p6q7r0s1t2v3w"],
                "wait": 30,
            },
        },
    ),
)  # fmt: skip
async def several_states(request: Request, query: Annotated[ViewQuery, Query()]) -> Response:
    """The jobs as they are, in the order of their ids; with `wait` once the first of them is final, or after that time.
    By it a client that has many jobs hears of all that are done while it waits for the oldest; with `final` of those
    alone. It needs the scope read alone, and may be repeated.

    Of several cells each answers for its own jobs: ids that are all one other cell's are sent on to it (307), of mixed
    ones those of other cells come back as `elsewhere`.
    """
    core, owner = core_of(request), view_of(request, query)
    asked = parsed_question(await read_json(request, _MAX_QUESTION, _QUESTION))
    ids, elsewhere = check_ids(core.cells, request, asked.ids)
    return await answer_states(core, asked.model_copy(update={"ids": ids}), owner, elsewhere)


def parsed_question(body: bytes | bytearray) -> StatesQuestion:
    """The question. Raises MalformedJson, InvalidParameters, TooLarge."""
    if len(body) > _MAX_QUESTION:
        raise too_large(_MAX_QUESTION, _QUESTION)
    question: StatesQuestion = validate(StatesQuestion, parse_object(body))
    return question


async def answer_states(
    core: Core, question: StatesQuestion, owner: str, elsewhere: Sequence[str] = (), *, waits: bool = True
) -> Response:
    """Return the jobs that `owner` sees, once the first is final or was waited for; not `waits`: as they are."""
    ids = question.ids
    if question.wait > 0 and waits and ids:
        await core.jobs.wait_until_over(ids[0], min(question.wait, core.settings.max_wait_s), owner=owner)
    pieces: list[str] = []
    missing: list[str] = []
    turns = Turns()
    for number, job_id in enumerate(ids):
        job = _in_memory(core, job_id, owner)
        if job is None:
            with contextlib.suppress(NotFound, Gone):
                job = await core.jobs.get(job_id, owner=owner)
        if job is None:
            missing.append(job_id)
        elif _is_told(job, question, number):
            pieces.append(brief_json(job))
        await turns.pause()
    text = _states(pieces, missing, elsewhere)
    return Response(text, headers={"Cache-Control": "no-store"}, media_type="application/json")


def answer_states_now(core: Core, question: StatesQuestion, owner: str) -> bytes | None:
    """The same answer where all of the jobs are in memory; None: they are not."""
    pieces: list[str] = []
    for number, job_id in enumerate(question.ids):
        job = _in_memory(core, job_id, owner)
        if job is None:
            return None
        if _is_told(job, question, number):
            pieces.append(brief_json(job))
    return _states(pieces, (), ()).encode()


def _in_memory(core: Core, job_id: str, owner: str) -> LiveJob | JobInfo | Ended | None:
    job = core.jobs.in_memory(job_id, owner)
    return None if isinstance(job, LiveJob) and job.refused is not None else job


def _is_told(job: LiveJob | JobInfo | Ended, question: StatesQuestion, number: int) -> bool:
    if not number or not question.final:
        return True
    return job.over if isinstance(job, LiveJob) else job.state.final


def _states(pieces: Sequence[str], missing: Sequence[str], elsewhere: Sequence[str]) -> str:
    lists = [",".join(f'"{each}"' for each in ids) for ids in (missing, elsewhere)]
    return f'{{"jobs":[{",".join(pieces)}],"missing":[{lists[0]}],"elsewhere":[{lists[1]}]}}'


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="Watch a job",
    responses={
        200: {
            "description": "Server-sent events: `event: job`, `data:` a JobInfo, one for the state now and one for "
            "each change; ends after a final state.",
            "content": {"text/event-stream": {"schema": _EVENT}},
        },
        204: {"description": "Last-Event-ID is the final event's: there is nothing more."},
        **doc.problems("not-found", "gone", "parameter-invalid"),
    },
)
async def events(
    request: Request,
    job_id: JobPath,
    query: Annotated[ViewQuery, Query()],
    last_event_id: Annotated[
        str | None, Header(alias="Last-Event-ID", description="of the event that came last; any value is accepted")
    ] = None,
) -> Response:
    """Every event is a whole JobInfo, so after a reconnect the state now is all that was missed."""
    core, owner = core_of(request), view_of(request, query)
    info = await core.jobs.get(job_id, owner=owner)
    if info.state.final and last_event_id == _event_id(info):
        # The HTML standard: 204 tells an EventSource to stop reconnecting.
        return Response(status_code=204)
    return StreamingResponse(
        _event_stream(core.jobs.events(job_id, owner=owner)),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.delete(
    "/v1/jobs/{job_id}",
    summary="Cancel a job",
    responses={200: doc.model(JobInfo, "The job now."), **doc.problems("not-found", "gone", "parameter-invalid")},
)
async def cancel(request: Request, job_id: JobPath, query: Annotated[ViewQuery, Query()]) -> Response:
    """Cancels a job that is not final; one that is stays as it is, and its results stay too."""
    return _render_job(await core_of(request).jobs.cancel(job_id, owner=view_of(request, query)))


def _applied(preference: Preference, wait_s: float) -> dict[str, str]:
    applied = preference.applied(wait_s)
    return {"Preference-Applied": applied} if applied else {}


def _render_submitted(info: JobInfo, status: int, headers: dict[str, str]) -> Response:
    return _render_job(info, status, {"Location": f"/v1/jobs/{info.id}", **headers})


def _render_job(info: JobInfo, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    timing = {"Server-Timing": server_timing(info.timings)} if info.timings else {}
    return render(info, status, {**(headers or {}), **timing})


def _several(pieces: Sequence[str], status: int, headers: dict[str, str]) -> Response:
    content = f'{{"jobs":[{",".join(pieces)}]}}'
    return Response(content, status, {"Cache-Control": "no-store", **headers}, media_type="application/json")


async def _briefly(lives: Sequence[LiveJob]) -> Sequence[str]:
    """The jobs as JSON, each as `brief_json` has it."""
    pieces: list[str] = []
    async for some in Turns().slices(lives):
        pieces += [brief_json(live) for live in some]
    return pieces


def brief_json(job: LiveJob | JobInfo | Ended) -> str:
    """The job as JSON, without its request: whoever asks has it, and it is half of what there is to say."""
    if isinstance(job, LiveJob):
        begun = _begun(job)
        if begun is not None:
            return begun
        job = job.shown
    return job.json(brief=True) if isinstance(job, Ended) else job.model_dump_json(exclude={"request"})


def _parse(text: str) -> GemmJob | GemmReduceJob | ProgramJob:
    """The job that a JSON text asks for. Raises ServiceError."""
    request: GemmJob | GemmReduceJob | ProgramJob = validate(_REQUEST, parse_object(text.encode()), tags=_TAGS)
    return request


async def _known(forms: KnownForms, body: bytes | bytearray) -> tuple[bool, Sequence[AnyRequest]] | None:
    """Whether several jobs are asked for, and those; None: they are not plain, or something is wrong with them, and
    `_read` says what.
    """
    try:
        text = body.decode("ascii")
    except UnicodeDecodeError:
        return None
    asked = forms.find(text) if len(body) <= MAX_CHARACTERS else None
    if asked is not None:
        return False, (asked,)
    turns = Turns()
    requests: list[AnyRequest] = []
    found: dict[str, AnyRequest] = {}
    try:
        for element in elements(text, MAX_JOBS):
            request = found.get(element)
            if request is None:
                request = forms.find(element)
                if request is None:
                    request = _parse(element)
                    if isinstance(request, ProgramJob):
                        return None
                    forms.learn(element, _parse)
                    await turns.pause()
                found[element] = request
            requests.append(request)
            if len(requests) % _AT_ONCE == 0:
                await turns.pause()
    except (ServiceError, ValueError):
        return None
    return True, requests


async def _read(forms: KnownForms, body: bytes | bytearray, max_steps: int) -> tuple[bool, Sequence[AnyRequest]]:
    """Likewise, of any JSON."""
    asked = await _parsed(body, max_steps)
    if isinstance(asked, SeveralJobs):
        return True, asked.jobs
    if len(body) <= MAX_CHARACTERS:
        forms.learn(body.decode(), _parse)
    return False, (asked,)


async def _parsed(body: bytes | bytearray, max_steps: int) -> GemmJob | GemmReduceJob | ProgramJob | SeveralJobs:
    """The job, or jobs, that the JSON asks for. Of a long text each step, or job, is looked at by itself, and others
    have their turns.
    """
    checks = {"steps": check_length, "keep": check_results, "jobs": _check_count}

    def kept(check: Callable[[int, int], None]) -> Callable[[int, Any], Any]:
        def keep(number: int, element: Any) -> Any:
            check(number + 1, max_steps)
            return element

        return keep

    if len(body) < LONG:
        document = parse_object(body)
        for name, check in checks.items():
            listed = document.get(name)
            if isinstance(listed, list):  # before they are looked at one by one
                check(len(listed), max_steps)
    else:
        turns = Turns()
        document = await read_object(body, {name: kept(check) for name, check in checks.items()}, turns)
        if document.get("op") == "program" and isinstance(document.get("steps"), list):
            document["steps"] = await validate_each(_STEP, document["steps"], "steps", turns, tags=_TAGS)
        if isinstance(document.get("jobs"), list):
            document["jobs"] = await validate_each(_REQUEST, document["jobs"], "jobs", turns, tags=_TAGS)
    kind: Any = SeveralJobs if "jobs" in document else _REQUEST
    asked: GemmJob | GemmReduceJob | ProgramJob | SeveralJobs = validate(kind, document, tags=_TAGS)
    return asked


def _check_count(jobs: int, _: int) -> None:
    if jobs > MAX_JOBS:
        raise ParameterInvalid(f"{jobs} jobs in one request; {MAX_JOBS} are the most", "jobs")


async def _body(request: Request) -> bytearray:
    """A JSON body of bounded size."""
    body = await read_json(request, MAX_BODY, "a job")
    if not body:
        raise InvalidRequest("the body is empty; a job is a JSON object")
    return body


def _event_id(info: JobInfo) -> str:
    return f"{info.attempt}.{info.state.value}"


async def _event_stream(changes: AsyncIterator[JobInfo]) -> AsyncIterator[bytes]:
    """Events as text/event-stream, with a comment whenever nothing has happened for a while."""
    upcoming: asyncio.Task[JobInfo | None] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(_next(changes))
            done, _ = await asyncio.wait([upcoming], timeout=KEEP_ALIVE_S)
            if not done:
                yield b": still here\n\n"
                continue
            info, upcoming = upcoming.result(), None
            if info is None:
                return
            yield f"id: {_event_id(info)}\nevent: job\ndata: {info.model_dump_json()}\n\n".encode()
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait([upcoming])
        close = getattr(changes, "aclose", None)
        if close is not None:
            await close()


async def _next(changes: AsyncIterator[JobInfo]) -> JobInfo | None:
    return await anext(changes, None)
