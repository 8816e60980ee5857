"""POST /v2/models/{gemm,gemm_reduce}/infer: a one-shot product in the protocol's clothes.

The JSON is read first; then the space of each operand is reserved, and its binary data are received straight into it,
as the data of a form of /v1/gemm are. The result is sent from its extent. Copied are tensors in JSON, those out of and
into shared memory, and what is compressed.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from gemmserve.wire import ALGORITHM_HEADER, OCTET_STREAM
from gemmserve_service.errors import BodyTooLong, BodyTooShort, DescriptorRefused, InvalidRequest, TooLarge
from gemmserve_service.http.answers.coded import coded, worth_coding
from gemmserve_service.http.answers.pieces import Pieces, PiecesResponse
from gemmserve_service.http.headers.content_coding import DEFLATE, GZIP, chosen_coding, coding_of
from gemmserve_service.http.inference.messages import InferenceRequest, InferenceResponse
from gemmserve_service.http.inference.models import ModelPath, VersionPath, known_model
from gemmserve_service.http.inference.paths import INFER, VERSION
from gemmserve_service.http.inference.peers import check_same_user
from gemmserve_service.http.inference.tensors import MAX_JSON, answer_json, elements, read_inference
from gemmserve_service.http.middleware.content_digests import digest_of
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.requests.body import RequestBody
from gemmserve_service.http.requests.coded_body import CodedBody, check_coded_length, decoding
from gemmserve_service.http.requests.ingest import content_length
from gemmserve_service.http.requests.shared_memory import receive_shared
from gemmserve_service.http.routes.common import caller_of, core_of, elements_header, server_timing
from gemmserve_service.http.routes.oneshot import run_while_connected
from gemmserve_service.runtime.yielding import Turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gemmserve_service.http.inference.counts import Counts
    from gemmserve_service.http.inference.json_data import JsonMemory
    from gemmserve_service.http.inference.regions import Regions
    from gemmserve_service.http.inference.tensors import Inference, Input, Place
    from gemmserve_service.jobs.one_shot import OneShot
    from gemmserve_service.store.extents.shared_memory import Memory
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
"""Bytes of the JSON, where binary data follow it; in requests and answers."""

router = APIRouter(tags=["inference"], default_response_class=Response)

_ROUTE: Final = "/v2/models/{model}/infer"
_VERSION_ROUTE: Final = "/v2/models/{model}/versions/{version}/infer"
_PROBLEMS: Final = (
    "malformed-json", "invalid-request", "body-length", "length-required", "too-large", "unsupported-media-type",
    "parameter-invalid", "shape-mismatch", "dtype-unsupported", "compute-unsupported", "config-infeasible",
    "queue-full", "worker-crashed", "device-error", "not-ready", "draining", "timeout", "store-full", "quota-exceeded",
    "request-timeout", "digest-mismatch", "descriptor-refused", "not-found",
)  # fmt: skip
_DOCUMENTED: Any = {
    "responses": {
        200: doc.inference_answer(
            InferenceResponse,
            {HEADER_LENGTH: "bytes of the JSON, where binary data follow it", **doc.ONE_SHOT_HEADERS},
            example={
                "model_name": "gemm",
                "model_version": VERSION,
                "outputs": [{"name": "d", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}],
            },
        ),
        **doc.inference_errors(*_PROBLEMS),
    },
    "openapi_extra": doc.inference_body(
        InferenceRequest,
        HEADER_LENGTH,
        example={
            "parameters": {"alpha": 2},
            "inputs": [
                {"name": "a", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]},
                {"name": "b", "shape": [2, 2], "datatype": "FP32", "data": [[0.5, 0], [0, 0.5]]},
            ],
        },
    ),
}


@router.post(_ROUTE, summary="Infer", **_DOCUMENTED)
async def infer(request: Request, model: ModelPath) -> Response:
    """A product as an inference: inputs a, b and, of gemm, c; output d, of gemm_reduce one for each reduction, and c
    where `return_c` asks for it. The request's parameters are those of /v1/gemm and /v1/gemm-reduce. A client that
    hangs up cancels it.
    """
    return await _infer(request, known_model(model))


@router.post(_VERSION_ROUTE, summary="Infer by a version", **_DOCUMENTED)
async def infer_version(request: Request, model: ModelPath, version: VersionPath) -> Response:
    """As without a version: there is one."""
    return await _infer(request, known_model(model, version))


def _direct(model: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await _infer(request, model)

    return endpoint


DIRECT: Final = {path: _direct(model) for path, model in INFER.items()}
"""Endpoints for `direct_routes.DirectRoutes`: those above, of a request without a query."""
ROUTES: Final = {path: _VERSION_ROUTE if "/versions/" in path else _ROUTE for path in INFER}
"""Route of each."""


async def _infer(request: Request, model: str) -> Response:
    counts: Counts = request.app.state.inference_counts[model]
    began = time.perf_counter()
    try:
        done, answer = await _run(request, model, began)
    except BaseException:
        counts.failed(time.perf_counter() - began)
        raise
    counts.succeeded(time.perf_counter() - began, done.timings)
    return answer


async def _run(request: Request, model: str, began: float) -> tuple[OneShot, Response]:
    received = _Received(request, model)
    try:
        inference = await received.read()
        received_s = time.perf_counter() - began
        done = await run_while_connected(
            request,
            core_of(request),
            inference.params,
            received.operands,
            inference.timeout_s,
            inference.priority,
        )

        def release() -> None:
            done.release()
            received.written.close()

        try:
            await received.share(done.results)
            return done, await _answer(request, inference, done, began, received_s, release)
        except BaseException:
            done.release()
            raise
    except BaseException:
        received.written.close()
        raise
    finally:
        received.close()


class _Received:
    """A request's body, and the shared memory that it names."""

    def __init__(self, request: Request, model: str) -> None:
        self._request = request
        self._model = model
        self._core = core_of(request)
        self._owner = caller_of(request).owner
        self._regions: Regions = request.app.state.regions
        self._shared: dict[str, Memory] = {}
        """Memory for outputs."""
        self._turns = Turns()
        self.written = ExitStack()
        """Memory for the answer's numbers, which goes back when the answer is out, or there is none."""
        self.operands: dict[str, Upload] = {}

    async def read(self) -> Inference:
        """Reads all of it. Raises what is wrong with it, before space is taken where the JSON tells."""
        request = self._request
        length, head = content_length(request), _header_length(request)
        coding = coding_of(request.headers.getlist("content-encoding"))
        with ExitStack() as stack:
            body = RequestBody(request)
            if coding is not None:
                body = stack.enter_context(decoding(request, None, self._owner, coding))
            elif head is None:
                head = length
            most = min(length if coding is None else MAX_JSON, MAX_JSON, MAX_JSON if head is None else head)
            stack.enter_context(self._core.quotas.in_flight(self._owner, min(length, most)))
            memory: JsonMemory = request.app.state.json_memory
            stack.callback(memory.take_read(self._owner, most))
            text = await _read_json(body, head)
            inference = await read_inference(self._model, text, self._turns)
            if coding is None:
                _check_length(inference.binary_size, length - len(text))
            else:
                _check_length(inference.binary_size, None if head is not None else 0)
                check_coded_length(len(text) + inference.binary_size, length, coding)
            numbers = sum(math.prod(each.shape) for each in inference.outputs if not each.binary and each.place is None)
            self.written.callback(memory.take_written(self._owner, numbers))
            self._find_outputs(inference)
            for name, each in inference.inputs.items():
                await self._fill(name, each, body)
            if isinstance(body, CodedBody):
                await body.finish()
        inference.inputs.clear()  # their JSON is as long as they are, and they are in their places
        return inference

    def _find_outputs(self, inference: Inference) -> None:
        """Opens the memory of outputs. Raises DescriptorRefused, also for inputs of somebody who may not use any."""
        inputs, outputs = inference.inputs.values(), inference.outputs
        if any(each.place for each in inputs) or any(each.place for each in outputs):
            check_same_user(self._request)
        for output in outputs:
            if output.place is not None:
                self._shared[output.name] = self._memory(output.place, output.nbytes)

    def _memory(self, place: Place, nbytes: int) -> Memory:
        return self._regions.memory(self._owner, place.region, place.offset, nbytes)

    async def _fill(self, name: str, tensor: Input, body: RequestBody) -> None:
        declared, store = tensor.declared, self._core.store
        if tensor.place is not None:
            memory = self._memory(tensor.place, declared.nbytes)
            self.operands[name] = await receive_shared(memory, declared, store, scratch=True, owner=self._owner)
            return
        given = None if tensor.data is None else await elements(tensor, name, self._turns)
        upload = self.operands[name] = declared.reserve(store, scratch=True, owner=self._owner)
        if given is not None:
            upload.write(given.data)
        elif upload.nbytes and not await body.fill(upload.view, upload.advance, upload.place(0)):
            raise BodyTooShort(f"{name}: {upload.filled} of {upload.nbytes} bytes came")

    async def share(self, results: Mapping[str, Pinned]) -> None:
        """Writes the outputs that are wanted there into their shared memory. Raises DescriptorRefused."""
        for name, memory in self._shared.items():
            try:
                await memory.write(results[name].view)
            except OSError as error:  # it was cut short meanwhile, and there is no memory to make it longer
                raise DescriptorRefused(f"{name} cannot be written to shared memory: {error.strerror}") from None

    def close(self) -> None:
        """Gives everything back that nobody took over."""
        for upload in self.operands.values():
            upload.abort()
        for memory in self._shared.values():
            memory.close()


def _header_length(request: Request) -> int | None:
    """Bytes of the JSON; None: all there are. Raises InvalidRequest, TooLarge."""
    values = request.headers.getlist(HEADER_LENGTH)
    if not values:
        return None
    (value,) = values if len(values) == 1 else ("several",)
    if not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise InvalidRequest(f"{HEADER_LENGTH} {value[:40]!r} is not a number of bytes")
    return int(value)


async def _read_json(body: RequestBody, length: int | None) -> bytearray:
    """The first `length` bytes; None: all there are. Raises BodyTooShort, TooLarge."""
    if length is not None:
        if length > MAX_JSON:
            raise TooLarge(f"{length} bytes of JSON; {MAX_JSON} are the most, and tensors can be sent as binary data")
        text = bytearray(length)
        if length and not await body.fill(memoryview(text), lambda _: None):
            raise BodyTooShort(f"the body ends before the {length} bytes that {HEADER_LENGTH} says")
        return text
    text = bytearray()
    while piece := await body.piece():
        text += piece
        if len(text) > MAX_JSON:
            raise TooLarge(f"more than {MAX_JSON} bytes of JSON; tensors can be sent as binary data")
    return text


def _check_length(wanted: int, there: int | None) -> None:
    """Whether the binary data that the JSON tells of are there. Raises BodyTooShort, BodyTooLong."""
    if there is not None and there != wanted:
        detail = f"the JSON tells of {wanted} bytes of binary data, and {there} are behind it"
        raise (BodyTooShort if there < wanted else BodyTooLong)(detail)


async def _answer(
    request: Request,
    inference: Inference,
    done: OneShot,
    began: float,
    received_s: float,
    release: Callable[[], None],
) -> Response:
    """The outputs; `release` is called when the last byte is out."""
    results = done.results
    text = await answer_json(inference, results, Turns())
    binary = [results[each.name] for each in inference.outputs if each.binary]
    parts: tuple[bytes | memoryview, ...] = (text, *(pinned.view for pinned in binary))
    size = sum(map(len, parts))
    headers = {
        "Server-Timing": server_timing(done.timings, received_s, time.perf_counter() - began),
        ALGORITHM_HEADER: done.algorithm,
        **elements_header(done.elements),
        "Cache-Control": "no-store",
        "Vary": "Accept-Encoding",
        **({HEADER_LENGTH: str(len(text))} if binary else {}),
    }
    media_type = OCTET_STREAM if binary else "application/json"
    coding = await _coding(request, max(parts, key=len))
    if coding is not None:
        headers["Content-Encoding"] = coding
        content = coded(parts, coding)
        return PiecesResponse(content, length=None, headers=headers, media_type=media_type, release=release)
    headers |= await digest_of(request, lambda: parts, size=size)
    return PiecesResponse(
        Pieces(parts, range(size), binary[-1].extent if binary else None),
        length=size,
        headers=headers,
        media_type=media_type,
        release=release,
    )


async def _coding(request: Request, sample: bytes | memoryview) -> str | None:
    """The coding that the answer is sent in, if the client takes one and it is worth it by `sample`."""
    accepted = ", ".join(request.headers.getlist("accept-encoding"))
    for coding in (GZIP, DEFLATE):
        verdict = chosen_coding(accepted, coding)
        if verdict == "must" or (verdict == "may" and await worth_coding(memoryview(sample), coding)):
            return coding
    return None
