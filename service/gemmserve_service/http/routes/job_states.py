"""/v1/job-states: states of several jobs at once, of which one may be waited for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from gemmserve_service.errors import Gone, NotFound
from gemmserve_service.http.cells.redirects import check_ids
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.requests.strict_json import parse_object, validate
from gemmserve_service.http.routes.common import ViewQuery, core_of, read_json, too_large, view_of
from gemmserve_service.http.routes.jobs import brief_json
from gemmserve_service.jobs.live_jobs import LiveJob
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import JobStates, StatesQuestion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.jobs.core import Core

router = APIRouter(tags=["jobs"], default_response_class=Response)

MAX_BODY: Final = 16 << 10
WHAT: Final = "a question for the states of jobs"


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
async def states(request: Request, query: Annotated[ViewQuery, Query()]) -> Response:
    """The jobs as they are, in the order of their ids; with `wait` once the first of them is final, or after that time.
    By it a client that has many jobs hears of all that are done while it waits for the oldest. It needs the scope read
    alone, and may be repeated.

    Of several cells each answers for its own jobs: ids that are all one other cell's are sent on to it (307), of mixed
    ones those of other cells come back as `elsewhere`.
    """
    core, owner = core_of(request), view_of(request, query)
    asked = parsed(await read_json(request, MAX_BODY, WHAT))
    ids, elsewhere = check_ids(core.cells, request, asked.ids)
    return await answer(core, ids, asked.wait, owner, elsewhere)


def parsed(body: bytes | bytearray) -> StatesQuestion:
    """The question. Raises MalformedJson, InvalidParameters, TooLarge."""
    if len(body) > MAX_BODY:
        raise too_large(MAX_BODY, WHAT)
    question: StatesQuestion = validate(StatesQuestion, parse_object(body))
    return question


async def answer(core: Core, ids: Sequence[str], wait_s: float, owner: str, elsewhere: Sequence[str] = ()) -> Response:
    """Return the jobs of those ids that `owner` sees, once the first is final, after `wait_s` at most."""
    if wait_s > 0:
        await core.jobs.wait_until_over(ids[0], min(wait_s, core.settings.max_wait_s), owner=owner)
    pieces: list[str] = []
    missing: list[str] = []
    turns = Turns()
    for job_id in ids:
        piece = _in_memory(core, job_id, owner)
        if piece is None:
            with contextlib.suppress(NotFound, Gone):
                piece = brief_json(await core.jobs.get(job_id, owner=owner))
        if piece is None:
            missing.append(job_id)
        else:
            pieces.append(piece)
        await turns.pause()
    return Response(_text(pieces, missing, elsewhere), headers={"Cache-Control": "no-store"}, media_type=_JSON)


def answer_now(core: Core, ids: Sequence[str], owner: str) -> bytes | None:
    """The same answer where all of the jobs are in memory; None: they are not."""
    pieces: list[str] = []
    for job_id in ids:
        piece = _in_memory(core, job_id, owner)
        if piece is None:
            return None
        pieces.append(piece)
    return _text(pieces, (), ()).encode()


_JSON: Final = "application/json"


def _in_memory(core: Core, job_id: str, owner: str) -> str | None:
    job = core.jobs.in_memory(job_id, owner)
    return None if job is None or (isinstance(job, LiveJob) and job.refused is not None) else brief_json(job)


def _text(pieces: Sequence[str], missing: Sequence[str], elsewhere: Sequence[str]) -> str:
    lists = [",".join(f'"{each}"' for each in ids) for ids in (missing, elsewhere)]
    return f'{{"jobs":[{",".join(pieces)}],"missing":[{lists[0]}],"elsewhere":[{lists[1]}]}}'
