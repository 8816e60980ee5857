"""What the OpenAPI document promises against what the running app does, over generated requests (schemathesis)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading

import httpx
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from inline_executor import InlineExecutor
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from gemmserve_service.http.app import create_app
from gemmserve_service.http.server import main_server
from gemmserve_service.jobs.core import Core
from gemmserve_service.settings import Settings
from gemmserve_service.tenancy.api_keys import Quota, Scope
from gemmserve_service.tenancy.keyring import create_key

DTYPES = ["<f2", "<f4", ">f8", "<c8", ">c16"]


@st.composite
def npy_files(draw):
    """Small arrays as .npy, of shapes that often fit each other."""
    shape = draw(st.lists(st.integers(0, 3), min_size=0, max_size=3))
    array = np.ones(shape, draw(st.sampled_from(DTYPES)))
    file = io.BytesIO()
    np.save(file, np.asfortranarray(array) if draw(st.booleans()) else array)
    data = file.getvalue()
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data


schemathesis.openapi.media_type("application/x-npy", npy_files())


@pytest.fixture(scope="module")
def service(request, tmp_path_factory):
    """The app as it is served, in a thread, on the CPU backend: its URL, and the headers that let one in."""
    options = Settings(
        data_dir=tmp_path_factory.mktemp("schema"),
        max_array_bytes=1 << 20,
        max_wait_s=0.05,
        verify_share=0,
        head_timeout_s=600,
        min_body_rate=0,
        keep_alive_s=600,
    )
    allowed = {}
    if request.param == "keys":
        # With quotas, so that their refusals are met too.
        quota = Quota(stored_bytes=1 << 20, inflight_bytes=1 << 20, queued_jobs=1000)
        _, key = create_key(options.data_dir, "schemathesis", scopes=list(Scope), quota=quota)
        allowed = {"Authorization": f"Bearer {key}"}
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    servers = []

    async def serve():
        server = main_server(create_app(options, Core(options, InlineExecutor())), options)
        server.config.timeout_graceful_shutdown = 1
        servers.append(server)
        serving = asyncio.ensure_future(server.serve([listener]))
        while not server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    with contextlib.closing(listener):
        assert started.wait(120)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", allowed
        servers[0].should_exit = True
        thread.join(120)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def existing(service):
    """Lets a generated request meet what exists: ids of arrays and jobs instead of invented ones.

    Without it nearly every answer would be 404, and the documents of successes would never be checked.
    """

    url, allowed = service
    http = httpx.Client(base_url=url, headers=allowed, timeout=120, trust_env=False)

    def put():
        query = {"dtype": "complex64", "shape": "2,2"}
        headers = {"Content-Type": "application/octet-stream"}
        return http.post("/v1/arrays", params=query, content=bytes(32), headers=headers).json()["id"]

    def submit():
        return http.post("/v1/jobs", json={"op": "gemm", "a": put(), "b": put()}).json()["id"]

    def begin():
        query = {"dtype": "float32", "shape": "3"}
        headers = {"Content-Type": "application/octet-stream", "Content-Length": "0"}
        return http.post("/v1/uploads", params=query, headers=headers).json()["id"]

    def adapt(case):
        if "upload_id" in case.path_parameters:
            case.path_parameters["upload_id"] = begin()
        if "array_id" in case.path_parameters:
            case.path_parameters["array_id"] = put()
        if "job_id" in case.path_parameters:
            case.path_parameters["job_id"] = submit()
        if case.path == "/v1/jobs" and isinstance(case.body, dict):
            case.body |= {name: put() for name in ("a", "b", "c") if case.body.get(name)}
        if case.path in {"/v1/arrays", "/v1/uploads"} and case.media_type == "application/x-npy":
            for name in ("dtype", "shape", "order"):
                case.query.pop(name, None)
            case.headers.pop("Content-Digest", None)

    with http:
        yield adapt


@pytest.fixture(scope="module")
def session(service):
    """Connections that are used again: a quarter of the time goes to new ones. Nothing but what a case says is sent."""
    with requests.Session() as kept:
        kept.headers.clear()
        kept.trust_env = False
        yield kept


def document():
    """The OpenAPI document of an app that never starts."""
    options = Settings()
    return create_app(options, Core(options, InlineExecutor())).openapi()


# Wrong data whose length is too much as well may be told that alone: 413 beside the statuses that schemathesis expects.
REFUSALS = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
schema = schemathesis.openapi.from_dict(
    document(),
    config=schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}}),
)
# That generated operands fit each other cannot be said in a schema: a well-formed request may still be 4xx.
UNSUITABLE = [positive_data_acceptance]


def under(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def check(service, existing, session, case):
    url, allowed = service
    session.cookies.clear()
    if case.meta.generation.mode is GenerationMode.POSITIVE:
        existing(case)
    case.call_and_validate(base_url=url, session=session, excluded_checks=UNSUITABLE, timeout=120, headers=allowed)


ENDLESS = "/v1/overview/stream"
"""Its answer goes on for as long as somebody listens."""
SLOW = ["/v1/jobs", "/v1/batch"]
"""Posted to, they have the largest schemas: what generates their bodies takes a quarter of a minute to make."""


@pytest.mark.parametrize("service", ["open"], indirect=True)
@schema.exclude(path=SLOW, method="POST").exclude(path=ENDLESS).parametrize()
@under(examples=25)
def test_the_document_is_true(service, existing, session, case):
    check(service, existing, session, case)


@pytest.mark.slow
@pytest.mark.parametrize("service", ["open"], indirect=True)
@schema.include(path=SLOW, method="POST").parametrize()
@under(examples=25)
def test_the_document_is_true_of_large_requests(service, existing, session, case):
    check(service, existing, session, case)


@pytest.mark.parametrize("service", ["keys"], indirect=True)
@schema.exclude(path=SLOW, method="POST").exclude(path=ENDLESS).parametrize()
@under(examples=5)
def test_the_document_is_true_with_keys(service, existing, session, case):
    """Fewer examples, and none of the largest: what lies behind the keys is the same."""
    check(service, existing, session, case)
