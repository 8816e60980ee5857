"""/v1/gemm and /v1/gemm-reduce: operands in, result out, nothing kept."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gemmserve.wire import ALGORITHM_HEADER, NPY, NPZ
from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.http.answers.pieces import Pieces, PiecesResponse, npz_pieces
from gemmserve_service.http.headers.preferences import choose_media_type
from gemmserve_service.http.middleware.content_digests import digest_of
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.problems import NotAcceptable
from gemmserve_service.http.requests.body import until_disconnect
from gemmserve_service.http.requests.multipart import OneShotForm
from gemmserve_service.http.requests.queries import Number  # noqa: TC001 (pydantic resolves it at run time)
from gemmserve_service.http.requests.shared_memory import SharedRequest
from gemmserve_service.http.requests.strict_json import one_shot_params
from gemmserve_service.http.routes.common import caller_of, core_of, elements_header, server_timing
from gemmserve_service.schemas import GemmParams, GemmReduceParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.jobs.core import Core
    from gemmserve_service.jobs.one_shot import OneShot
    from gemmserve_service.store.declared import Declared
    from gemmserve_service.store.upload import Upload

router = APIRouter(tags=["one-shot"], default_response_class=Response)

PROBLEMS: Final = (
    "malformed-json", "malformed-multipart", "invalid-request", "invalid-npy", "body-length", "not-acceptable",
    "length-required", "too-large", "unsupported-media-type", "parameter-invalid", "shape-mismatch",
    "dtype-unsupported", "compute-unsupported", "config-infeasible", "queue-full", "worker-crashed", "device-error",
    "not-ready", "draining", "timeout", "store-full", "quota-exceeded", "request-timeout", "digest-mismatch",
)  # fmt: skip
"""Problems of operands that come with the request, and of their products."""


class OneShotQuery(BaseModel):
    """Time that the client is ready to wait."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    timeout_s: Number | None = Field(
        None, gt=0, le=86_400, description="deadline for queue and run, in seconds; default: the server's setting"
    )


@router.post(
    "/v1/gemm",
    summary="Multiply once",
    responses={
        200: doc.binary("D as a .npy file.", NPY, headers=doc.ONE_SHOT_HEADERS),
        **doc.problems(*PROBLEMS, "descriptor-refused"),
    },
    openapi_extra=doc.multipart_body(
        GemmParams,
        operands={"a": "A, a .npy file", "b": "B, a .npy file", "c": "C, a .npy file"},
        example={"alpha": 2, "trans_b": "C"},
    ),
)
async def gemm(request: Request, query: Annotated[OneShotQuery, Query()]) -> Response:
    """D = alpha * op(A) * op(B) + beta * C. A client that hangs up cancels the product."""
    return await _one_shot(request, GemmParams, ("a", "b", "c"), query.timeout_s)


@router.post(
    "/v1/gemm-reduce",
    summary="Multiply and reduce once",
    responses={
        200: doc.binary(
            "The reduction as a .npy file; several results as an uncompressed .npz, one member each.",
            NPY,
            NPZ,
            headers=doc.ONE_SHOT_HEADERS,
        ),
        **doc.problems(*PROBLEMS, "descriptor-refused"),
    },
    openapi_extra=doc.multipart_body(
        GemmReduceParams,
        operands={"a": "A, a .npy file", "b": "B, a .npy file"},
        example={"reduce": ["sumsq", "absmax"], "axis": "m"},
    ),
)
async def gemm_reduce(request: Request, query: Annotated[OneShotQuery, Query()]) -> Response:
    """D[b, j] = reduce over i of (op(A)[b] op(B)[b])[i, j]; the product itself is never stored."""
    return await _one_shot(request, GemmReduceParams, ("a", "b"), query.timeout_s)


async def _plain_gemm(request: Request) -> Response:
    return await _one_shot(request, GemmParams, ("a", "b", "c"), None)


async def _plain_reduce(request: Request) -> Response:
    return await _one_shot(request, GemmReduceParams, ("a", "b"), None)


DIRECT: Final = {"/v1/gemm": _plain_gemm, "/v1/gemm-reduce": _plain_reduce}
"""Routes for `direct_routes.DirectRoutes`: the routes above, of a request without a query."""


async def _one_shot(
    request: Request,
    kind: type[GemmParams | GemmReduceParams],
    names: tuple[str, ...],
    timeout_s: float | None,
) -> Response:
    if choose_media_type(request.headers.get("accept"), (NPY, NPZ)) is None:
        raise NotAcceptable(f"the result is {NPY}, several are {NPZ}")
    core = core_of(request)
    began = time.perf_counter()
    owner = caller_of(request).owner
    shared = SharedRequest(request, owner)
    form = OneShotForm(
        core.store,
        names=names,
        check=lambda text, declared: _check(one_shot_params(kind, text), declared),
        owner=owner,
        shared=shared,
    )
    try:
        await form.read(request)
        received_s = time.perf_counter() - began
        params = one_shot_params(kind, form.params)
        done = await run_while_connected(request, core, params, form.operands, timeout_s)
        return await _answer(request, done, began, received_s, shared)
    finally:
        form.abort()
        shared.close()


def _check(params: GemmParams | GemmReduceParams, declared: Mapping[str, Declared]) -> None:
    """Refuses, before the data are read, operands that cannot be multiplied. Raises KernelError."""
    needed = {"a", "b", "c"} if isinstance(params, GemmParams) and params.beta else {"a", "b"}
    if needed <= declared.keys():
        operands = {
            name: Operand.contiguous(part.shape, part.dtype.newbyteorder("="), part.order)
            for name, part in declared.items()
        }
        products.build(params, operands)


async def run_while_connected(
    request: Request,
    core: Core,
    params: GemmParams | GemmReduceParams,
    operands: dict[str, Upload],
    timeout_s: float | None,
    priority: int = 0,
) -> OneShot:
    """Runs the job, which takes `operands` over; cancels it when the client hangs up. Raises ClientDisconnect then."""
    run = asyncio.ensure_future(
        core.jobs.run(params, operands, timeout_s=timeout_s, owner=caller_of(request).owner, priority=priority)
    )
    hangup = asyncio.ensure_future(until_disconnect(request.receive))
    ended = False
    try:
        await asyncio.wait([run, hangup], return_when=asyncio.FIRST_COMPLETED)
        ended = run.done()
    finally:
        hangup.cancel()
        if not ended:
            run.add_done_callback(_give_back)  # of a caller who is cancelled it may have ended in this very turn
            run.cancel()
            await asyncio.wait([run])
    if not ended:
        raise ClientDisconnect
    return run.result()


def _give_back(run: asyncio.Future[OneShot]) -> None:
    """Give back the results of a job that nobody waits for any more."""
    if not run.cancelled() and run.exception() is None:
        run.result().release()


async def _answer(request: Request, done: OneShot, began: float, received_s: float, shared: SharedRequest) -> Response:
    """The result as .npy, several as .npz; the extents are given back when the last byte is out."""
    headers = {
        "Server-Timing": server_timing(done.timings, received_s, time.perf_counter() - began),
        ALGORITHM_HEADER: done.algorithm,
        **elements_header(done.elements),
        "Cache-Control": "no-store",
    }
    try:
        if len(done.results) == 1:
            ((name, result),) = done.results.items()
            answer = await shared.answer(result, headers)
            if answer is not None:
                done.release()
                return answer
            parts = result.npy_parts()
            size = sum(map(len, parts))
            headers |= await digest_of(request, lambda: parts, size=size)
            headers["Content-Disposition"] = f'attachment; filename="{name}.npy"'
            return PiecesResponse(
                Pieces(parts, range(size), result.extent),
                length=size,
                headers=headers,
                media_type=NPY,
                release=done.release,
            )
        files = {name: result.npy_parts() for name, result in done.results.items()}
        headers |= await digest_of(request, lambda: npz_pieces(files))
        headers["Content-Disposition"] = 'attachment; filename="results.npz"'
        return PiecesResponse(npz_pieces(files), length=None, headers=headers, media_type=NPZ, release=done.release)
    except BaseException:
        done.release()
        raise
