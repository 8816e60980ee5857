"""A model and its one version: the same routes, documented alike, with the same answers."""

from __future__ import annotations

import pytest

from gemmserve_service.http.inference.paths import VERSION

PARTS = {"": "metadata", "/ready": "ready", "/config": "config", "/stats": "statistics"}


async def test_every_route_of_a_model_is_one_of_its_version(client) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    of_model = {path for path in paths if path.startswith("/v2/models/{model}") and "{version}" not in path}
    assert {path.removeprefix("/v2/models/{model}") for path in of_model} == {*PARTS, "/infer"}
    for part, name in PARTS.items():
        plain = paths[f"/v2/models/{{model}}{part}"]["get"]
        versioned = paths[f"/v2/models/{{model}}/versions/{{version}}{part}"]["get"]
        assert plain["responses"] == versioned["responses"]
        assert plain["operationId"].startswith(f"model_{name}_v2_")
        assert versioned["operationId"].startswith(f"version_{name}_v2_")
        assert plain["summary"] != versioned["summary"]
        assert versioned["description"] == "As without a version: there is one."
        assert plain["description"] not in {"", versioned["description"]}
        assert [each["name"] for each in versioned["parameters"]] == ["model", "version"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", ["gemm", "gemm_reduce"])
async def test_a_version_answers_as_its_model(client, model, part) -> None:
    plain = await client.get(f"/v2/models/{model}{part}")
    versioned = await client.get(f"/v2/models/{model}/versions/{VERSION}{part}")
    assert (plain.status_code, plain.content) == (versioned.status_code, versioned.content)
    assert plain.status_code == 200


@pytest.mark.parametrize("part", PARTS)
async def test_there_is_no_other_version_or_model(client, part) -> None:
    assert (await client.get(f"/v2/models/gemm/versions/2{part}")).status_code == 404
    assert (await client.get(f"/v2/models/simple{part}")).status_code == 404
