"""/v1/batch: many products in one request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gemmserve.wire import ALGORITHM_HEADER, NPY, NPZ
from gemmserve_service.errors import InvalidParameters, InvalidRequest, JobCancelled, TooLarge, describe
from gemmserve_service.http.answers.pieces import Pieces, PiecesResponse, npz_pieces
from gemmserve_service.http.cells.redirects import check_makers
from gemmserve_service.http.headers.preferences import choose_media_type
from gemmserve_service.http.middleware.content_digests import digest_of
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.problems import NotAcceptable
from gemmserve_service.http.requests import batch_bodies
from gemmserve_service.http.requests.batch_items import StoredItems, parse_params
from gemmserve_service.http.requests.body import media_type_of, until_disconnect
from gemmserve_service.http.requests.multipart_decoder import boundary_of
from gemmserve_service.http.requests.strict_json import parse_object
from gemmserve_service.http.routes.common import caller_of, core_of, elements_header, server_timing
from gemmserve_service.http.routes.oneshot import PROBLEMS, OneShotQuery
from gemmserve_service.jobs.batch.run import Outcome, inline_results, run_batch
from gemmserve_service.jobs.batch.task import Item
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import BatchOptions, BatchRequest, GemmParams, GemmReduceParams
from gemmserve_service.store.record import npy_header

if TYPE_CHECKING:
    from gemmserve_service.jobs.core import Core

router = APIRouter(tags=["one-shot"], default_response_class=Response)

MAX_BODY: Final = 16 << 20
_SMALL_BODY: Final = 1 << 20
"""Bytes of the JSON."""
_READ_AT_ONCE: Final = 1 << 16
"""Bytes of a body that is read in the event loop's thread."""
FAILED_HEADER: Final = "Batch-Failed"

_EXAMPLE: Final = {
    "params": {"op": "gemm", "trans_b": "C"},
    "items": [
        {"a": "arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "b": "arr_01jd2w7n5j9m4p6q7r0s1t2v3w"},
        {"a": "arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "b": "arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "alpha": [0, 1]},
    ],
    "results": "packed",
}


@router.post(
    "/v1/batch",
    summary="Multiply many",
    responses={
        200: doc.batch_answer(
            headers=doc.ONE_SHOT_HEADERS | {FAILED_HEADER: "how many products failed; absent where none did"}
        ),
        **doc.problems(*PROBLEMS, "other-cell", "not-found", "gone", "array-lost", "array-corrupt", "tier-unavailable"),
    },
    openapi_extra=doc.batch_body(BatchRequest, GemmParams, GemmReduceParams, example=_EXAMPLE),
)
async def batch(request: Request, query: Annotated[OneShotQuery, Query()]) -> Response:
    """Many products, each with the bits that it would have alone, in one exchange and one place in the queue.

    On stored arrays of one cell by JSON; or with the operands in the request, as stacks or as several .npy files in one
    part.
    """
    core = core_of(request)
    owner = caller_of(request).owner
    began = time.perf_counter()
    media_type = media_type_of(request)
    with contextlib.ExitStack() as held:
        if media_type == "application/json":
            stored = await _stored_items(request, core, owner)
            options: BatchOptions = stored.envelope
            if options.timeout_s is None:
                options = options.model_copy(update={"timeout_s": query.timeout_s})
            _check_accept(request, options)
            wait_s = core.settings.oneshot_timeout_s if options.timeout_s is None else options.timeout_s
            readable = partial(core.scheduler.writes.wait_readable, timeout_s=wait_s)
            away: dict[str, int] = {}
            if core.cells.urls:
                makers = await stored.makers(core.cells.elsewhere)
                check_makers(core.cells, request, set(makers.values()))
                away = {name: cell for name, cell in makers.items() if cell is not None}
            items = await stored.pin(
                core.store, held, owner, readable, partial(core.store.bring_back, timeout_s=wait_s), away
            )
        else:
            options = BatchOptions(timeout_s=query.timeout_s)
            _check_accept(request, options)
            items = await _sent(request, core, held, owner)
        received_s = time.perf_counter() - began
        kept = held.pop_all()
    try:
        outcome = await run_batch(core, items, options, kept, partial(until_disconnect, request.receive), owner=owner)
    except JobCancelled:  # by the client alone, whose connection is gone
        raise ClientDisconnect from None
    try:
        return await _answer(request, outcome, len(items), options, received_s)
    except BaseException:
        outcome.release()
        raise


async def _plain_batch(request: Request) -> Response:
    return await batch(request, OneShotQuery())


DIRECT: Final = {"/v1/batch": _plain_batch}
"""Routes for `direct_routes.DirectRoutes`."""


def _check_accept(request: Request, options: BatchOptions) -> None:
    if options.results == "inline" and choose_media_type(request.headers.get("accept"), (NPY, NPZ)) is None:
        raise NotAcceptable(f"results are {NPY} or {NPZ}")


async def _stored_items(request: Request, core: Core, owner: str) -> StoredItems:
    """Read what the JSON asks for. A large one comes into space of the store's, where it counts, and is read where it
    lies: unfinished ones would take the memory otherwise, and a copy would take others' time.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > _SMALL_BODY:
        if int(declared) > MAX_BODY:
            raise TooLarge(f"the JSON of a batch has at most {MAX_BODY} bytes")
        upload = await batch_bodies.receive_whole(request, core.store, core.settings, owner)
        try:
            return await StoredItems.read(upload.view, core.settings)
        finally:
            upload.abort()
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _SMALL_BODY:
            raise TooLarge(f"JSON that is sent without a Content-Length has at most {_SMALL_BODY} bytes")
    if not body:
        raise InvalidRequest("the body is empty; a batch is a JSON object")
    return await StoredItems.read(body, core.settings)


async def _sent(request: Request, core: Core, held: contextlib.ExitStack, owner: str) -> list[Any]:
    """Products whose operands are in the body."""
    hint = "a batch is application/json or multipart/form-data"
    boundary = boundary_of(request.headers.get("content-type", ""), hint)
    most = core.settings.max_batch_items
    upload = await batch_bodies.receive_whole(request, core.store, core.settings, owner)
    held.callback(upload.abort)
    text, arrays = await batch_bodies.cut(upload.view, boundary, most)
    params = parse_params({} if text is None else parse_object(text))
    if arrays.get("c") and isinstance(params, GemmReduceParams):
        raise InvalidParameters("gemm_reduce has no c")
    arrays = await batch_bodies.align(upload, arrays)

    def read() -> list[Any]:
        count, operands = batch_bodies.operands(upload, arrays, planar=params.layout == "planar", most=most)
        return [Item(params, "", {name: each[i] for name, each in operands.items()}) for i in range(count)]

    return read() if len(upload.view) < _READ_AT_ONCE else await asyncio.to_thread(read)


async def _answer(request: Request, outcome: Outcome, count: int, options: BatchOptions, received_s: float) -> Response:
    """Others have their turns meanwhile: every product may have a problem of its own."""
    headers = {"Cache-Control": "no-store"}
    if outcome.done is not None:
        headers["Server-Timing"] = server_timing(outcome.done.timings, received_s)
        headers[ALGORITHM_HEADER] = outcome.done.algorithm
        headers |= elements_header(outcome.done.elements)
    if outcome.failures:
        headers[FAILED_HEADER] = str(len(outcome.failures))
    if options.results != "inline":
        return await _ids_answer(outcome, count, headers)
    problems = await _problems(outcome)
    members = inline_results(outcome) if outcome.packed is not None else {}
    uniform = outcome.packed is not None and outcome.packed.uniform is not None
    if uniform and len(members) == 1:
        ((name, (placed, view)),) = members.items()
        parts = (npy_header(*placed.kind), view)
        size = sum(map(len, parts))
        headers |= await digest_of(request, lambda: parts, size=size)
        headers["Content-Disposition"] = f'attachment; filename="{name}.npy"'
        return PiecesResponse(
            Pieces(parts, range(size)), length=size, headers=headers, media_type=NPY, release=outcome.release
        )
    files = {name: (npy_header(*placed.kind), view) for name, (placed, view) in members.items()}
    headers |= await digest_of(request, lambda: npz_pieces(files, problems))
    headers["Content-Disposition"] = 'attachment; filename="results.npz"'
    return PiecesResponse(
        npz_pieces(files, problems), length=None, headers=headers, media_type=NPZ, release=outcome.release
    )


async def _problems(outcome: Outcome) -> dict[int, str]:
    """Return the problem of each product that failed, as JSON, by the product's number."""
    found: dict[int, str] = {}
    turns = Turns()
    for number in sorted(outcome.failures):
        found[number] = json.dumps(describe(outcome.failures[number]).problem().model_dump(exclude_none=True))
        await turns.pause()
    return found


async def _ids_answer(outcome: Outcome, count: int, headers: dict[str, str]) -> Response:
    """Ids of stored results."""
    results: dict[int, dict[str, str]] = {}
    for (number, name), array_id in outcome.array_of.items():
        results.setdefault(number, {})[name] = array_id
    problems = await _problems(outcome)
    items: list[str] = []
    arrays: list[str] = []
    turns = Turns()
    for number in range(count):
        if number in problems:
            items.append(f'{{"state": "failed", "error": {problems[number]}}}')
        else:
            result = f', "result": {json.dumps(results[number])}' if number in results else ""
            items.append(f'{{"state": "succeeded"{result}}}')
        await turns.pause()
    for info in outcome.infos:
        arrays.append(info.model_dump_json())
        await turns.pause()
    done = outcome.done
    rest = {
        "result": outcome.arrays or None,
        "timings": None if done is None else asdict(done.timings),
        "algorithm": None if done is None else done.algorithm,
        "residual": None if done is None else done.residual,
        "elements": None if done is None or done.elements is None else done.elements.model_dump(),
    }
    document = f'{{"items": [{", ".join(items)}], "arrays": [{", ".join(arrays)}], {json.dumps(rest)[1:]}'
    return Response(document, headers=headers, media_type="application/json")
