"""/v1/batch: many products in one request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
import zipfile
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gemmserve.wire import ALGORITHM_HEADER, NPY, NPZ, format_npy_header
from gemmserve_service.errors import InvalidParameters, InvalidRequest, JobCancelled, TooLarge, describe
from gemmserve_service.http.answers.pieces import PiecesResponse, pieces
from gemmserve_service.http.headers.preferences import choose_media_type
from gemmserve_service.http.middleware.content_digests import digest_of
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.problems import NotAcceptable
from gemmserve_service.http.requests import batch_bodies
from gemmserve_service.http.requests.batch_items import StoredItems, parse_params
from gemmserve_service.http.requests.body import until_disconnect
from gemmserve_service.http.requests.strict_json import parse_object
from gemmserve_service.http.routes.common import caller_of, core_of, elements_header, server_timing
from gemmserve_service.http.routes.oneshot import OneShotQuery
from gemmserve_service.jobs.batch.run import Options, Outcome, inline_results, result_dtype, run_batch
from gemmserve_service.jobs.batch.task import Item
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import BatchRequest, GemmParams, GemmReduceParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_service.jobs.batch.task import Placed
    from gemmserve_service.jobs.core import Core

router = APIRouter(tags=["one-shot"], default_response_class=Response)

MAX_BODY: Final = 16 << 20
_SMALL_BODY: Final = 1 << 20
"""Bytes of the JSON."""
_READ_AT_ONCE: Final = 1 << 16
"""Bytes of a body that is read in the event loop's thread."""
FAILED_HEADER: Final = "Batch-Failed"
PROBLEMS_MEMBER: Final = "problems.json"

_PROBLEMS = (
    "malformed-json", "malformed-multipart", "invalid-request", "invalid-npy", "body-length", "not-acceptable",
    "digest-mismatch", "not-found", "gone", "array-lost", "length-required", "too-large", "unsupported-media-type",
    "parameter-invalid",
    "shape-mismatch", "dtype-unsupported", "compute-unsupported", "config-infeasible", "queue-full", "worker-crashed",
    "device-error", "not-ready", "draining", "timeout", "store-full", "quota-exceeded", "request-timeout",
)  # fmt: skip
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
        **doc.problems(*_PROBLEMS),
    },
    openapi_extra=doc.batch_body(BatchRequest, GemmParams, GemmReduceParams, example=_EXAMPLE),
)
async def batch(request: Request, query: Annotated[OneShotQuery, Query()]) -> Response:
    """Many products, each with the bits that it would have alone, in one exchange and one place in the queue.

    On stored arrays by JSON; or with the operands in the request, as stacks or as several .npy files in one part.
    """
    core = core_of(request)
    owner = caller_of(request).owner
    began = time.perf_counter()
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    with contextlib.ExitStack() as held:
        if media_type == "application/json":
            stored = await _stored_items(request, core, owner)
            asked = stored.envelope
            options = Options(
                asked.results, asked.verify, asked.priority, asked.timeout_s or query.timeout_s, asked.ttl_s
            )
            _check_accept(request, options)
            items = await stored.pin(core.store, held, owner)
            wait_s = core.settings.oneshot_timeout_s if options.timeout_s is None else options.timeout_s
            for pinned in stored.pins:  # it reads them where they lie together: in the store
                await core.scheduler.writes.wait_stored(pinned, wait_s)
        else:
            options = Options(timeout_s=query.timeout_s)
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


def _check_accept(request: Request, options: Options) -> None:
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
    boundary = batch_bodies.boundary_of(request)
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


async def _answer(request: Request, outcome: Outcome, count: int, options: Options, received_s: float) -> Response:
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
        parts = (_head(placed), view)
        size = sum(map(len, parts))
        headers |= await digest_of(request, lambda: parts, size=size)
        headers["Content-Disposition"] = f'attachment; filename="{name}.npy"'
        return PiecesResponse(
            pieces(parts, range(size)), length=size, headers=headers, media_type=NPY, release=outcome.release
        )
    headers |= await digest_of(request, lambda: _npz(members, problems))
    headers["Content-Disposition"] = 'attachment; filename="results.npz"'
    return PiecesResponse(
        _npz(members, problems), length=None, headers=headers, media_type=NPZ, release=outcome.release
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
        "timings": None if done is None else done.timings.model_dump(),
        "algorithm": None if done is None else done.algorithm,
        "residual": None if done is None else done.residual,
        "elements": None if done is None or done.elements is None else done.elements.model_dump(),
    }
    document = f'{{"items": [{", ".join(items)}], "arrays": [{", ".join(arrays)}], {json.dumps(rest)[1:]}'
    return Response(document, headers=headers, media_type="application/json")


def _head(placed: Placed) -> bytes:
    return format_npy_header(result_dtype(placed), placed.kind[1], fortran_order=placed.kind[2] == "F")


def _npz(members: dict[str, tuple[Placed, memoryview]], problems: dict[int, str]) -> Iterator[bytes | memoryview]:
    """An uncompressed .npz, and what is wrong with the other products as a member that `numpy.load` gives as bytes."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, (placed, view) in members.items():
            parts = (_head(placed), view)
            size = sum(map(len, parts))
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=size >= zipfile.ZIP64_LIMIT) as member:
                for piece in pieces(parts, range(size)):
                    member.write(piece)
                    if sink.held > _AT_ONCE:
                        yield sink.take()
        if problems:
            with archive.open(zipfile.ZipInfo(PROBLEMS_MEMBER), "w") as member:
                before = "{"
                for number, problem in problems.items():
                    member.write(f'{before}"{number}": {problem}'.encode("ascii"))
                    before = ", "
                    if sink.held > _AT_ONCE:
                        yield sink.take()
                member.write(b"}")
    yield sink.take()


_AT_ONCE: Final = 1 << 18


class _Sink(io.RawIOBase):
    """A file that cannot seek and gives away what was written."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.held = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        self.held += len(self._pieces[-1])
        return len(self._pieces[-1])

    def take(self) -> bytes:
        """Return what was written since the last call."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self.held = 0
        return taken
