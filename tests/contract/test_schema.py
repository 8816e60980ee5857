"""What the OpenAPI document promises against what the running app does, over generated requests (schemathesis)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading

import numpy as np
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from gemmserve_service.app import create_app
from gemmserve_service.core import Core
from gemmserve_service.settings import Settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

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
def url(tmp_path_factory):
    """The app under uvicorn in a thread, on the CPU backend."""
    options = Settings(data_dir=tmp_path_factory.mktemp("schema"), max_array_bytes=1 << 20, max_wait_s=0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    servers = []

    async def serve():
        server = uvicorn.Server(
            uvicorn.Config(create_app(options, Core(options)), log_config=None, timeout_graceful_shutdown=1)
        )
        servers.append(server)
        serving = asyncio.ensure_future(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    with contextlib.closing(listener):
        assert started.wait(20)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        servers[0].should_exit = True
        thread.join(20)


def document():
    """The OpenAPI document of an app that never starts."""
    options = Settings()
    return create_app(options, Core(options)).openapi()


schema = schemathesis.openapi.from_dict(document())
# That generated operands fit each other cannot be said in a schema: a well-formed request may still be 4xx.
UNSUITABLE = [positive_data_acceptance]


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_document_is_true(url, case):
    case.call_and_validate(base_url=url, excluded_checks=UNSUITABLE, timeout=20)
