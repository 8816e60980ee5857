"""OpenAPI parts that FastAPI cannot see for itself: binary and multipart bodies, problems and response headers."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gemmserve.wire import ALGORITHM_HEADER, ELEMENTS_HEADER, NPY, NPZ, OCTET_STREAM, PROBLEM
from gemmserve_service.http.problems import catalogue, statuses
from gemmserve_service.schemas import (
    BatchRequest,
    GemmJob,
    GemmParams,
    GemmReduceJob,
    GemmReduceParams,
    Problem,
    ProgramJob,
)
from gemmserve_service.tenancy.identity import needed_scope

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import UnionType

    from fastapi import FastAPI
    from pydantic import BaseModel

Document = dict[str, Any]

_MODELS: Final = (GemmJob, GemmReduceJob, ProgramJob, GemmParams, GemmReduceParams, BatchRequest, Problem)
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
    {"name": "service", "description": "Devices, use, health, metrics, problem types."},
]

DESCRIPTION: Final = """\
Complex, real and batched matrix products, and products that are reduced as they are formed, on this machine's device.

Arrays travel as `.npy` files (1.0 to 3.0, C or Fortran order, either endianness, never pickles) or as bare bytes.
A server with API keys wants one with each request: `Authorization: Bearer gs_...`.
Every answer repeats the request's `Gemmserve-Exchange`, so that a client knows it for its own.
Errors are RFC 9457 problems whose `type` is a stable slug; `GET /problems/{slug}` explains each.

```
curl -F a=@a.npy -F b=@b.npy http://127.0.0.1:8000/v1/gemm -o d.npy
```
"""


def model(schema: type[BaseModel] | UnionType, description: str, headers: Mapping[str, str] | None = None) -> Document:
    """A JSON answer of that model."""
    return {
        "model": schema,
        "description": description,
        **({"headers": header_documents(headers)} if headers else {}),
    }


def binary(description: str, *media_types: str, headers: Mapping[str, str] | None = None) -> Document:
    """An answer of bytes."""
    return {
        "description": description,
        "content": {media_type: {"schema": BINARY} for media_type in media_types},
        **({"headers": header_documents(headers)} if headers else {}),
    }


def header_documents(headers: Mapping[str, str]) -> Document:
    """Response headers by name -> description."""
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()}


def problems(*slugs: str) -> dict[int | str, Document]:
    """Error answers by status, each with the slugs it may carry and an example. Raises KeyError for an unknown slug."""
    known = catalogue()
    # Every route: an unexpected failure, and what `middleware` refuses before any route is found.
    by_status: dict[int, list[Document]] = defaultdict(list)
    for slug in (*slugs, "unauthorized", "forbidden", "host-not-allowed", "origin-not-allowed", "internal"):
        for status in statuses(slug) or {known[slug]["status"]}:
            by_status[status].append(known[slug] | {"status": status})
    return {status: _problem_document(status, group) for status, group in by_status.items()}


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
    return {
        "description": "\n\n".join(lines),
        "content": {PROBLEM: content},
        **({"headers": header_documents(headers)} if headers else {}),
    }


def _slug(document: Document) -> str:
    return re.split("[/#]", document["type"])[-1]


def json_body(*models: type[BaseModel], examples: Mapping[str, Document]) -> Document:
    """A JSON request body of one of the models, told apart by `op`."""
    references = [{"$ref": f"#/components/schemas/{schema.__name__}"} for schema in models]
    content = {
        "schema": {"oneOf": references},
        "examples": {name: {"value": value} for name, value in examples.items()},
    }
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


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
        "headers": header_documents(headers),
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
    return {
        "requestBody": {
            "required": True,
            "description": "With multipart, Content-Length must be sent.",
            "content": {
                "application/json": {
                    "schema": {"$ref": f"#/components/schemas/{request.__name__}"},
                    "example": example,
                },
                "multipart/form-data": {
                    "schema": form,
                    "encoding": encoding,
                    "example": {"params": {"op": "gemm", "trans_b": "C"}},
                },
            },
        }
    }


def array_body() -> Document:
    """An array as .npy or bare bytes."""
    return {
        "requestBody": {
            "required": True,
            "description": "The array; Content-Length must be sent.",
            "content": {NPY: {"schema": BINARY}, OCTET_STREAM: {"schema": BINARY}},
        }
    }


def multipart_body(params: type[BaseModel], *, operands: Mapping[str, str], example: Document) -> Document:
    """Parts a, b(, c) as .npy and `params` as JSON."""
    properties: Document = {name: {**BINARY, "description": text} for name, text in operands.items()}
    properties["params"] = {"$ref": f"#/components/schemas/{params.__name__}"}
    encoding: Document = {name: {"contentType": NPY} for name in operands}
    encoding["params"] = {"contentType": "application/json"}
    schema = {"type": "object", "required": ["a", "b"], "properties": properties, "additionalProperties": False}
    content = {"schema": schema, "encoding": encoding, "example": {"params": example}}
    return {
        "requestBody": {
            "required": True,
            "description": "Parts in any order; with `params` first, a mismatch is refused before the data are sent. "
            "Content-Length must be sent.",
            "content": {"multipart/form-data": content},
        }
    }


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
    # FastAPI's own shape of validation errors is never sent.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document
