"""Query strings and numbers that could be read in two ways."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_service.errors import ServiceError
from gemmserve_service.http.requests.queries import check_query

NUMBERS = ["+4", " 4 ", "+0", "4_0", "\N{ARABIC-INDIC DIGIT FOUR}", "0x4", "04", "4.", "1e", "", "-", "1,0"]
"""None of which JSON would take for a number."""


@pytest.mark.parametrize("query", [b"", b"a", b"a=1&b=1", b"a=1&A=2", b"&&", b"a=1&b=a%3D1"])
def test_taken(query):
    check_query(query)


@pytest.mark.parametrize("query", [b"a=1&a=1", b"a&a=2", b"a=1&b=2&%61=3", b"a+b=1&a%20b=2", b"=1&=2", b"&" * 64])
def test_refused(query):
    with pytest.raises(ServiceError):
        check_query(query)


@pytest.mark.parametrize(
    "path", ["/v1/arrays?limit=1&limit=2", "/v1/jobs/x?wait=1&%77ait=1", "/livez?x=1&x=1", "/v1/usage?all=0&all=1"]
)
async def test_a_parameter_given_twice(client, problem, path):
    document = problem(await client.get(path), 422, "parameter-invalid")
    assert "twice" in document["detail"]


async def test_a_parameter_of_a_product_given_twice(client, problem, form, npy):
    content, headers = form([("a", npy(np.eye(2))), ("b", npy(np.eye(2)))])
    answer = await client.post("/v1/gemm?timeout_s=1&timeout_s=1", content=content, headers=headers)
    problem(answer, 422, "parameter-invalid")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "/v1/arrays", "limit"),
        ("GET", "/v1/jobs", "limit"),
        ("GET", "/v1/jobs/job_01jd2w7m4h8k3n5p6q9r0s1t2v", "wait"),
        ("POST", "/v1/arrays", "ttl_s"),
        ("POST", "/v1/uploads", "ttl_s"),
        ("POST", "/v1/gemm", "timeout_s"),
        ("POST", "/v1/batch", "timeout_s"),
    ],
)
async def test_numbers_of_a_query(client, problem, method, path, name, number):
    problem(await client.request(method, path, params={name: number}), 422, "parameter-invalid")


@pytest.mark.parametrize("number", ["+0", " 0", "\N{ARABIC-INDIC DIGIT ZERO}", "00", "0_0"])
async def test_numbers_of_a_path(client, problem, number):
    answer = await client.put(f"/v1/uploads/upl_01jd2w7m4h8k3n5p6q9r0s1t2v/parts/{number}", content=b"")
    problem(answer, 422, "parameter-invalid")


@pytest.mark.parametrize("shape", ["+4", " 4 ", "4, 1", "\N{ARABIC-INDIC DIGIT FOUR}", "4_0", "4.0"])
async def test_numbers_of_a_shape(client, problem, shape):
    answer = await client.post(
        "/v1/arrays",
        params={"dtype": "float32", "shape": shape},
        content=bytes(16),
        headers={"Content-Type": "application/octet-stream"},
    )
    problem(answer, 400, "invalid-npy")


@pytest.mark.parametrize("value", ["4", "0.5", "1e2", "100.25"])
async def test_numbers_as_in_json(client, value):
    answer = await client.get("/v1/jobs/job_01jd2w7m4h8k3n5p6q9r0s1t2v", params={"wait": value})
    assert answer.status_code == 404
