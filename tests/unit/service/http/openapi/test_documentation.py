"""The OpenAPI document: whole, self-consistent, with examples that the service itself accepts."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from gemmserve_service.http.inference.messages import InferenceError, InferenceResponse, RegionRegistration
from gemmserve_service.http.inference.tensors import read_inference
from gemmserve_service.http.requests.strict_json import validate
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import (
    GemmJob,
    GemmParams,
    GemmReduceJob,
    GemmReduceParams,
    JobRequest,
    ProgramJob,
    SeveralJobs,
)

# DESIGN, section 3, without what later issues own.
ROUTES = {
    ("/v1/arrays", "get"), ("/v1/arrays", "post"), ("/v1/arrays/{array_id}", "get"),
    ("/v1/arrays/{array_id}", "delete"), ("/v1/deletions", "post"), ("/v1/arrays/{array_id}/sample", "get"),
    ("/v1/arrays/{array_id}/data", "get"), ("/v1/arrays/{array_id}/data", "head"), ("/v1/jobs", "get"),
    ("/v1/jobs", "post"), ("/v1/jobs/{job_id}", "get"), ("/v1/jobs/{job_id}", "delete"), ("/v1/job-states", "post"),
    ("/v1/uploads", "post"), ("/v1/uploads/{upload_id}", "get"), ("/v1/uploads/{upload_id}", "delete"),
    ("/v1/uploads/{upload_id}/parts/{offset}", "put"), ("/v1/uploads/{upload_id}/complete", "post"),
    ("/v1/jobs/{job_id}/events", "get"), ("/v1/gemm", "post"), ("/v1/gemm-reduce", "post"),
    ("/v1/batch", "post"), ("/v1/devices", "get"), ("/v1/overview", "get"), ("/v1/overview/stream", "get"),
    ("/v1/usage", "get"), ("/v1/cells", "get"),
    ("/healthz", "get"), ("/livez", "get"), ("/readyz", "get"), ("/metrics", "get"),
    ("/problems", "get"), ("/problems/{slug}", "get"),
    ("/v2", "get"), ("/v2/health/live", "get"), ("/v2/health/ready", "get"), ("/v2/models/stats", "get"),
    ("/v2/repository/index", "post"), ("/v2/systemsharedmemory/status", "get"),
    ("/v2/systemsharedmemory/unregister", "post"), ("/v2/systemsharedmemory/region/{name}/status", "get"),
    ("/v2/systemsharedmemory/region/{name}/register", "post"),
    ("/v2/systemsharedmemory/region/{name}/unregister", "post"),
    *(
        (f"/v2/models/{{model}}{version}{what}", "post" if what == "/infer" else "get")
        for version in ("", "/versions/{version}")
        for what in ("", "/ready", "/config", "/stats", "/infer")
    ),
}  # fmt: skip


@pytest.fixture
async def document(client):
    return (await client.get("/openapi.json")).json()


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def nodes(node):
    yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(child)


async def test_every_route_is_there(document):
    assert {(path, method) for path, method, _ in operations(document)} == ROUTES


async def test_every_reference_leads_somewhere(document):
    references = {node["$ref"] for node in nodes(document) if isinstance(node, dict) and "$ref" in node}
    models = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references <= models
    assert models - references == set(), "models that nothing refers to"


async def test_every_operation_is_described(document):
    for path, method, operation in operations(document):
        assert operation["summary"], (path, method)
        assert operation["description"], (path, method)
        for status, response in operation["responses"].items():
            assert response["description"], (path, method, status)
            if int(status) >= 400 and method != "head":
                expected = "application/json" if path.startswith("/v2") else "application/problem+json"
                assert list(response["content"]) == [expected], (path, method, status)
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (path, method, parameter["name"])


async def test_error_examples_carry_their_status(document):
    for path, method, operation in operations(document):
        for status, response in operation["responses"].items():
            for slug, example in (
                response.get("content", {}).get("application/problem+json", {}).get("examples", {}).items()
            ):
                assert example["value"]["type"].rpartition("/")[2] == slug, (path, method)
                assert str(example["value"]["status"]) == status


async def test_body_examples_are_valid(document):
    job = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    adapter = TypeAdapter(JobRequest | SeveralJobs)
    models = {type(validate(adapter, example["value"])) for example in job["examples"].values()}
    assert models == {GemmJob, GemmReduceJob, ProgramJob, SeveralJobs}
    for path, model in (("/v1/gemm", GemmParams), ("/v1/gemm-reduce", GemmReduceParams)):
        content = document["paths"][path]["post"]["requestBody"]["content"]["multipart/form-data"]
        assert isinstance(validate(model, content["example"]["params"]), model)


async def test_inference_examples_are_valid(document):
    operation = document["paths"]["/v2/models/{model}/infer"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    inference = await read_inference("gemm", bytearray(json.dumps(example).encode()), Turns())
    assert inference.outputs[0].shape == (1, 2)
    answer = operation["responses"]["200"]["content"]["application/json"]["example"]
    assert InferenceResponse.model_validate(answer).outputs[0].shape == [1, 2]
    for error in operation["responses"]["422"]["content"]["application/json"]["examples"].values():
        assert InferenceError.model_validate(error["value"]).error
    region = document["paths"]["/v2/systemsharedmemory/region/{name}/register"]["post"]["requestBody"]
    for example in region["content"]["application/json"]["examples"].values():
        assert validate(RegionRegistration, example["value"]).byte_size


async def test_scalars_are_numbers_or_pairs(document):
    alpha = document["components"]["schemas"]["GemmParams"]["properties"]["alpha"]
    assert alpha["default"] == 1
    assert [option["type"] for option in alpha["anyOf"]] == ["number", "array"]


async def test_one_document_per_app(client, app, document):
    assert app.openapi() is app.openapi()
    assert (await client.get("/openapi.json")).json() == document
