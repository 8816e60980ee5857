"""OpenAPI parts that FastAPI cannot see for itself: binary and multipart bodies, problems and response headers."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gemmserve.wire import ALGORITHM_HEADER, ELEMENTS_HEADER, NPY, NPZ, OCTET_STREAM, PROBLEM
from gemmserve_service.http.inference.messages import (
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    RegionRegistration,
)
from gemmserve_service.http.openapi.code_samples import code_samples
from gemmserve_service.http.overview.schemas import Point
from gemmserve_service.http.problems import catalogue, statuses
from gemmserve_service.schemas import (
    BatchRequest,
    Deletion,
    GemmJob,
    GemmParams,
    GemmReduceJob,
    GemmReduceParams,
    JobList,
    Problem,
    ProgramJob,
    SeveralJobs,
    StatesQuestion,
)
from gemmserve_service.tenancy.identity import needed_scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fastapi import FastAPI
    from pydantic import BaseModel

Document = dict[str, Any]

_MODELS: Final = (
    GemmJob, GemmReduceJob, ProgramJob, SeveralJobs, JobList, GemmParams, GemmReduceParams, BatchRequest, Deletion,
    StatesQuestion, InferenceError, InferenceRequest, InferenceResponse, Point, Problem, RegionRegistration,
)  # fmt: skip
_SECURITY: Final[Document] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer gs_..., on servers with keys"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "the same key"},
}
BINARY: Final[Document] = {"type": "string", "format": "binary"}

TAGS: Final = [
    {"name": "arrays", "description": "Immutable arrays: uploaded once, multiplied many times."},
    {"name": "uploads", "description": "Large arrays in parts: resumable, several at a time."},
    {"name": "jobs", "description": "Products of stored arrays, queued, durable."},
    {"name": "one-shot", "description": "Operands in, result out, nothing kept."},
    {"name": "inference", "description": "One-shots by the Open Inference Protocol, version 2."},
    {"name": "service", "description": "Devices, use, health, metrics, problem types."},
]

DESCRIPTION: Final = """\
Complex, real and batched matrix products, and products that are reduced as they are formed, on this machine's device.

Arrays travel as `.npy` files (1.0 to 3.0, C or Fortran order, either endianness, never pickles) or as bare bytes.
A server with API keys wants one with each request: `Authorization: Bearer gs_...`.
Every answer repeats the request's `Gemmserve-Exchange`, so that a client knows it for its own.
Errors are RFC 9457 problems whose `type` is a stable slug; `GET /problems/{slug}` explains each.

The samples read the server's address and a key from the environment, and operands from `a.npy` and `b.npy`. `$A`, `$B`
and `$ARRAY` are ids of arrays, `$JOB` of a job, `$UPLOAD` of an upload, as the server answered them. Once, beforehand:

```
export GEMMSERVE_SERVER=http://127.0.0.1:8000
export GEMMSERVE_API_KEY=               # gs_... where the server has keys
python -c 'import numpy as np; [np.save(name, np.eye(64, dtype="complex64")) for name in ("a.npy", "b.npy")]'
export A=$(gemmserve put a.npy) B=$(gemmserve put b.npy) ARRAY=$(gemmserve put a.npy)
```
"""


def model(schema: type[Any], description: str, headers: Mapping[str, str] | None = None) -> Document:
    """A JSON answer of that model."""
    return {"model": schema, "description": description, **_headers(headers)}


def one_of(*schemas: type[BaseModel], description: str, headers: Mapping[str, str]) -> Document:
    """A JSON answer of one of the models, each of them that of another answer or in `_MODELS`."""
    content = {"application/json": {"schema": {"oneOf": _references(schemas)}}}
    return {"description": description, "content": content, **_headers(headers)}


def binary(description: str, *media_types: str, headers: Mapping[str, str] | None = None) -> Document:
    """An answer of bytes."""
    content = {media_type: {"schema": BINARY} for media_type in media_types}
    return {"description": description, "content": content, **_headers(headers)}


def _headers(headers: Mapping[str, str] | None) -> Document:
    """Response headers by name -> description, if there are any."""
    documents = {name: {"description": text, "schema": {"type": "string"}} for name, text in (headers or {}).items()}
    return {"headers": documents} if documents else {}


def _request_body(content: Document, description: str) -> Document:
    return {"requestBody": {"required": True, "description": description, "content": content}}


def problems(*slugs: str) -> dict[int | str, Document]:
    """Error answers by status, each with the slugs it may carry and an example. Raises KeyError for an unknown slug."""
    return {status: _problem_document(status, group) for status, group in _by_status(slugs).items()}


def _by_status(slugs: Iterable[str]) -> dict[int, list[Document]]:
    known = catalogue()
    # Every route: an unexpected failure, and what `middleware` refuses before any route is found.
    by_status: dict[int, list[Document]] = defaultdict(list)
    for slug in (*slugs, "unauthorized", "forbidden", "host-not-allowed", "origin-not-allowed", "internal"):
        for status in statuses(slug) or {known[slug]["status"]}:
            by_status[status].append(known[slug] | {"status": status})
    return by_status


def inference_errors(*slugs: str) -> dict[int | str, Document]:
    """Error answers of the Open Inference Protocol by status, with an example of each. Raises KeyError for an unknown
    slug.
    """
    documents: dict[int | str, Document] = {}
    for status, group in _by_status(slugs).items():
        content = {
            "schema": {"$ref": f"#/components/schemas/{InferenceError.__name__}"},
            "examples": {_slug(each): {"value": {"error": each["detail"]}} for each in group},
        }
        documents[status] = _problem_document(status, group) | {"content": {"application/json": content}}
    return documents


def inference_body(request: type[BaseModel], length_header: str, *, example: Document) -> Document:
    """JSON, with or without binary data behind it."""
    parameters = [
        {
            "name": length_header,
            "in": "header",
            "description": "bytes of the JSON, where binary data follow it",
            "schema": {"type": "integer", "minimum": 0},
        },
        {
            "name": "Content-Encoding",
            "in": "header",
            "description": "gzip or deflate",
            "schema": {"type": "string", "enum": ["gzip", "deflate", "identity"]},
        },
    ]
    content = {
        "application/json": {"schema": _references([request])[0], "example": example},
        OCTET_STREAM: {"schema": BINARY},
    }
    return {"parameters": parameters, **_request_body(content, "Content-Length must be sent.")}


def inference_answer(answer: type[BaseModel], headers: Mapping[str, str], *, example: Document) -> Document:
    """JSON, with or without binary data behind it."""
    content = {
        "application/json": {"schema": _references([answer])[0], "example": example},
        OCTET_STREAM: {"schema": BINARY},
    }
    return {"description": "The outputs.", "content": content, **_headers(headers)}


def _problem_document(status: int, documents: list[Document]) -> Document:
    lines = [f"`{_slug(document)}`: {document['detail']}" for document in documents]
    content = {
        "schema": {"$ref": "#/components/schemas/Problem"},
        "examples": {_slug(document): {"value": document} for document in documents},
    }
    headers = {"Allow": "the methods there are"} if status == 405 else {}
    if status in {401, 403}:
        headers["WWW-Authenticate"] = "RFC 6750, where a key was wanted or lacks a scope"
    if status in {429, 503}:
        headers["Retry-After"] = "seconds after which another attempt makes sense"
    return {"description": "\n\n".join(lines), "content": {PROBLEM: content}, **_headers(headers)}


def _slug(document: Document) -> str:
    return re.split("[/#]", document["type"])[-1]


def digest_header(name: str, text: str) -> Document:
    """A request's field of RFC 9530."""
    schema = {"type": "string", "pattern": r"^sha-256=:[A-Za-z0-9+/]{43}=:$"}
    return {"name": name, "in": "header", "description": f"RFC 9530; sha-256 of {text} is checked", "schema": schema}


def json_body(*models: type[BaseModel], examples: Mapping[str, Document]) -> Document:
    """A JSON request body of one of the models, told apart by `op`."""
    content = {
        "schema": {"oneOf": _references(models)},
        "examples": {name: {"value": value} for name, value in examples.items()},
    }
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _references(models: Iterable[type[BaseModel]]) -> list[Document]:
    return [{"$ref": f"#/components/schemas/{each.__name__}"} for each in models]


def batch_answer(*, headers: Mapping[str, str]) -> Document:
    """Results in the answer, or their ids."""
    by_id = {
        "type": "object",
        "required": ["items"],
        "properties": {
            "items": {
                "type": "array",
                "description": "one entry a product, in the order of the request",
                "items": {
                    "type": "object",
                    "required": ["state"],
                    "properties": {
                        "state": {"enum": ["succeeded", "failed"]},
                        "result": {"type": "object", "additionalProperties": {"type": "string"}},
                        "error": {"$ref": "#/components/schemas/Problem"},
                    },
                },
            },
            "result": {
                "type": ["object", "null"],
                "description": "with packed results: by name, the array that holds them all",
                "additionalProperties": {"type": "string"},
            },
            "arrays": {
                "type": "array",
                "description": "the stored results",
                "items": {"$ref": "#/components/schemas/ArrayInfo"},
            },
            "timings": {"anyOf": [{"$ref": "#/components/schemas/Timings"}, {"type": "null"}]},
            "algorithm": {"type": ["string", "null"]},
            "residual": {"type": ["number", "null"]},
            "elements": {"anyOf": [{"$ref": "#/components/schemas/Elements"}, {"type": "null"}]},
        },
    }
    return {
        "description": "Inline results: a .npy with the products along its first axis where all are alike and none "
        "failed; else an uncompressed .npz of `d_0`, `d_1` ... (`<result>_<number>`), with the problems of those that "
        "failed in its member `problems.json`, by number. Stored results: their ids.",
        "content": {NPY: {"schema": BINARY}, NPZ: {"schema": BINARY}, "application/json": {"schema": by_id}},
        **_headers(headers),
    }


def batch_body(request: type[BaseModel], *params: type[BaseModel], example: Document) -> Document:
    """Items on stored arrays as JSON, or operands as multipart."""
    operand = {
        **BINARY,
        "description": "a .npy file, or several one behind the other: one file of three dimensions or more is a stack "
        "along its first axis, one matrix is used by every product",
    }
    properties: Document = dict.fromkeys(("a", "b", "c"), operand)
    properties["params"] = {"oneOf": [{"$ref": f"#/components/schemas/{each.__name__}"} for each in params]}
    form = {"type": "object", "required": ["a", "b"], "properties": properties, "additionalProperties": False}
    encoding: Document = {name: {"contentType": NPY} for name in ("a", "b", "c")}
    encoding["params"] = {"contentType": "application/json"}
    sent = {"schema": form, "encoding": encoding, "example": {"params": {"op": "gemm", "trans_b": "C"}}}
    named = {"schema": {"$ref": f"#/components/schemas/{request.__name__}"}, "example": example}
    content = {"application/json": named, "multipart/form-data": sent}
    return _request_body(content, "With multipart, Content-Length must be sent.")


def array_body() -> Document:
    """An array as .npy or bare bytes."""
    content = {NPY: {"schema": BINARY}, OCTET_STREAM: {"schema": BINARY}}
    return _request_body(content, "The array; Content-Length must be sent.")


def multipart_body(params: type[BaseModel], *, operands: Mapping[str, str], example: Document) -> Document:
    """Parts a, b(, c) as .npy and `params` as JSON."""
    properties: Document = {name: {**BINARY, "description": text} for name, text in operands.items()}
    properties["params"] = {"$ref": f"#/components/schemas/{params.__name__}"}
    encoding: Document = {name: {"contentType": NPY} for name in operands}
    encoding["params"] = {"contentType": "application/json"}
    schema = {"type": "object", "required": ["a", "b"], "properties": properties, "additionalProperties": False}
    content = {"schema": schema, "encoding": encoding, "example": {"params": example}}
    text = "Parts in any order; with `params` first, a mismatch is refused before the data are sent. "
    return _request_body({"multipart/form-data": content}, text + "Content-Length must be sent.")


ONE_SHOT_HEADERS: Final = {
    "Server-Timing": "queue, h2d, kernel and d2h in milliseconds, and receive, the time that the body took",
    ALGORITHM_HEADER: "which algorithm formed the product",
    "Content-Digest": "RFC 9530, sha-256: where Want-Content-Digest asks for it; that of the request is checked",
    ELEMENTS_HEADER: "planned, wide and plain: how many elements of results were computed in which way; absent where "
    "there is one way only",
}
RESULT_TYPES: Final = (NPY, NPZ)


def install(app: FastAPI) -> None:
    """Replaces `app.openapi` with one that knows the models of hand-documented bodies."""

    def openapi() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _build(app: FastAPI) -> Document:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in _MODELS], ref_template="#/components/schemas/{model}"
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in definitions["$defs"].items():
        schemas.setdefault(name, schema)
    document["components"]["securitySchemes"] = _SECURITY
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            # Any of them, or none: a server without keys wants none.
            public = needed_scope(method.upper(), path) is None
            operation["security"] = [] if public else [*({name: []} for name in _SECURITY), {}]
            if samples := code_samples().get((method.upper(), path)):
                operation["x-codeSamples"] = samples
    # FastAPI's own shape of validation errors is never sent.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document
