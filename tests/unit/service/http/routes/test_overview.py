"""/v1/overview through the app: its form, its rights, its query."""

from __future__ import annotations

import pytest

from gemmserve_service.http.overview.schemas import Overview
from gemmserve_service.tenancy.api_keys import Scope


async def test_it_is_what_the_document_says(client):
    answer = await client.get("/v1/overview?history=true")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    found = Overview.model_validate_json(answer.content)
    assert found.history is not None
    assert found.history.step == 5
    assert len(found.history.series.utilisation) == len(found.devices)
    assert (await client.get("/v1/overview")).json()["history"] is None


@pytest.mark.parametrize(("accepted", "coding"), [("gzip, br", "gzip"), ("identity", None), ("gzip;q=0", None)])
async def test_the_history_is_coded_where_that_is_accepted(client, accepted, coding):
    answer = await client.get("/v1/overview?history=true", headers={"Accept-Encoding": accepted})
    assert (answer.headers.get("content-encoding"), answer.headers["vary"]) == (coding, "Accept-Encoding")
    assert Overview.model_validate_json(answer.content).history is not None
    answer = await client.get("/v1/overview", headers={"Accept-Encoding": accepted})
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("query", ["history=perhaps", "other=1", "history=true&history=true"])
async def test_queries_that_make_no_sense(client, problem, query):
    problem(await client.get(f"/v1/overview?{query}"), 422, "parameter-invalid")


async def test_it_needs_a_key_that_may_read(app, client, as_, problem):
    reader, submitter = as_("reader", scopes=[Scope.READ]), as_("submitter", scopes=[Scope.SUBMIT])
    for path in ("/v1/overview", "/v1/overview/stream"):
        problem(await client.get(path, headers={"Host": "gemmserve.example"}), 401, "unauthorized")
        problem(await submitter.get(path), 403, "forbidden")
    assert (await reader.get("/v1/overview")).status_code == 200


async def test_devices_and_metrics_tell_what_sensors_say(client, spy):
    from gemmserve_service.schemas import DeviceHealth

    spy.workers()[0].health = DeviceHealth(utilisation=0.5, power_watts=612.4, warnings=("Xid 79",))
    (device,) = (await client.get("/v1/devices")).json()["devices"]
    assert device["health"]["utilisation"] == 0.5
    assert device["health"]["warnings"] == ["Xid 79"]
    text = (await client.get("/metrics")).text
    assert 'gemmserve_device_utilisation_ratio{device="cpu"} 0.5' in text
    assert 'gemmserve_device_power_watts{device="cpu"} 612.4' in text
    assert 'gemmserve_device_warnings{device="cpu"} 1.0' in text
    assert 'gemmserve_device_temperature_celsius{device="cpu"}' not in text, (
        "a figure that there is none of has no gauge"
    )
