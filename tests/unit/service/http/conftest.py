"""The real app around the real core, in this process: over ASGI, and over a socket where only that shows the point."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from spy_executor import SpyExecutor
from stepped_loop import SteppedLoop

from gemmserve_service.http.app import create_app
from gemmserve_service.http.server import Server, main_server
from gemmserve_service.http.small import base_exchange
from gemmserve_service.jobs.core import Core
from gemmserve_service.jobs.small import small_products
from gemmserve_service.settings import Settings
from gemmserve_service.tenancy.keyring import create_key


def _settings(folder, **fields):
    # One product in a thousand would be checked unasked, which its timings tell.
    given = {"data_dir": folder / "data", "max_array_bytes": 1 << 30, "verify_share": 0.0}
    return Settings(**given | fields)


@pytest.fixture
def make_settings(tmp_path):
    return partial(_settings, tmp_path)


@pytest.fixture
def settings(make_settings):
    return make_settings()


@pytest.fixture
def spy():
    return SpyExecutor()


@pytest.fixture
async def core(settings, spy):
    return Core(settings, spy)


@pytest.fixture
async def app(settings, core):
    app = create_app(settings, core)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app):
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client:
        yield client


@pytest.fixture
def make_key(settings, core):
    """make_key("alice", scopes=...) -> the key's text; in force at once."""

    def make(name="somebody", **fields):
        _, text = create_key(settings.data_dir, name, **fields)
        core.keyring.refresh()
        return text

    return make


@pytest.fixture
def as_(app, make_key):
    """as_("alice", scopes=...) -> a client with a key of its own, and the key's id."""
    clients = []

    def make(name="somebody", **fields):
        text = make_key(name, **fields)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://gemmserve.example",
            headers={"Authorization": f"Bearer {text}"},
            timeout=30,
        )
        client.key, client.key_id = text, text.split("_")[1]
        clients.append(client)
        return client

    return make


class LiveApp:
    """The app as it is served, in a thread of its own."""

    def __init__(self, settings: Settings, executor: SpyExecutor, loop_factory=None) -> None:
        self.executor = executor
        self._loop_factory = loop_factory
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.core: Core | None = None
        self.core_loop: asyncio.AbstractEventLoop | None = None
        self.app = None
        self._settings = settings
        self._started = threading.Event()
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.core_loop = asyncio.get_running_loop()
        self.core = Core(self._settings, self.executor)
        self.app = create_app(self._settings, self.core)
        self._server = main_server(self.app, self._settings)
        self._server.config.timeout_graceful_shutdown = 1
        serving = asyncio.ensure_future(self._server.serve([self.socket]))
        while not self._server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        self._started.set()
        await serving

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(60)

    def stop(self) -> None:
        if isinstance(self.core_loop, SteppedLoop) and self._thread.is_alive():
            self.call(self.core_loop.start_clock)  # uvicorn looks now and then whether it is to end
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(60)
        self.socket.close()
        assert not self._thread.is_alive(), "the app does not end"

    def stop_clock(self) -> None:
        """From here on no limit of a `SteppedLoop` passes but by `advance`."""
        self.call(self.core_loop.stop_clock)

    def advance(self, seconds: float) -> None:
        """Moves its clock on; what is due by then has been done when this returns."""
        self.call(lambda: self.core_loop.advance(seconds))
        for _ in range(2):  # what is due is found at the beginning of a turn and done in it
            self.call(lambda: None)

    @property
    def connection_class(self):
        return self._server.config.http_protocol_class

    @property
    def tasks(self) -> int:
        """Requests that the app is at."""
        return len(self._server.server_state.tasks)

    @property
    def stalled(self) -> int:
        """Connections whose client does not take what it is sent."""
        return len(self.connection_class.registry._stalled)

    @property
    def open_connections(self) -> list[asyncio.Protocol]:
        """Protocols of the connections; for `call`."""
        return list(self._server.server_state.connections)

    def call(self, function) -> None:
        """Has the app's thread call it, and waits."""
        done = threading.Event()
        self.core_loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(60)

    @property
    def connections(self) -> int:
        """Connections that it has taken."""
        return self.connection_class.registry.count

    def http(self) -> httpx.Client:
        """A client with patience."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(60)
        if receive_buffer is not None:  # before it is connected: so much may be under way to it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


@pytest.fixture
def serve(make_settings, spy):
    """serve(head_timeout_s=0.5) -> the app, live, under these settings; ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(*, loop_factory=None, **fields):
            live = LiveApp(make_settings(**fields), spy, loop_factory)
            live.start()
            stack.callback(live.stop)
            return live

        yield start


@pytest.fixture(scope="module")
def serve_all(tmp_path_factory):
    """The same for tests that leave the app as it was: ended with the module."""
    with contextlib.ExitStack() as stack:

        def start(**fields):
            live = LiveApp(_settings(tmp_path_factory.mktemp("served"), **fields), SpyExecutor())
            live.start()
            stack.callback(live.stop)
            return live

        yield start


@pytest.fixture
def serve_stepped(serve):
    """serve_stepped(head_timeout_s=0.5) -> the same, its clock standing still: see `LiveApp.advance`."""

    def start(**fields):
        live = serve(loop_factory=SteppedLoop, **fields)
        live.stop_clock()
        return live

    return start


@pytest.fixture
def live(serve):
    return serve()


@pytest.fixture
def npy():
    """An array as the bytes of a .npy file; `version` as numpy.lib.format knows it."""

    def encode(array, version=None):
        file = io.BytesIO()
        np.lib.format.write_array(file, np.asanyarray(array), version=version, allow_pickle=True)
        return file.getvalue()

    return encode


@pytest.fixture
def npy_header():
    """A .npy header that says whatever it is told."""

    def encode(text, version=(1, 0)):
        body = text.encode("latin-1") + b"\n"
        return b"\x93NUMPY" + bytes(version) + len(body).to_bytes(2 if version[0] == 1 else 4, "little") + body

    return encode


@pytest.fixture
def read_npy():
    return lambda data: np.load(io.BytesIO(data), allow_pickle=False)


@pytest.fixture
def form():
    """A multipart body and its content type; parts are (name, bytes)."""

    def encode(parts, boundary=b"XbX", close=True):
        body = b""
        for name, content in parts:
            body += (
                b"--"
                + boundary
                + b'\r\nContent-Disposition: form-data; name="%s"; filename="%s.npy"\r\n\r\n'
                % (
                    name.encode(),
                    name.encode(),
                )
            )
            body += content + b"\r\n"
        if close:
            body += b"--" + boundary + b"--\r\n"
        return body, {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"}

    return encode


@pytest.fixture
def put(client, npy):
    async def upload(array, **query):
        answer = await client.post(
            "/v1/arrays", params=query, content=npy(array), headers={"Content-Type": "application/x-npy"}
        )
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    return upload


@pytest.fixture
def problem():
    """Checks that an answer is a problem of that status and slug; returns the document."""

    def check(answer, status, slug):
        assert (answer.status_code, answer.headers.get("content-type")) == (status, "application/problem+json"), (
            answer.text[:500]
        )
        document = json.loads(answer.content)
        assert document["type"] == f"/problems/{slug}"
        assert document["status"] == status
        assert document["title"]
        assert document["detail"]
        return document

    return check


@pytest.fixture
def footprint(core):
    """Bytes that the service holds for arrays: reserved ones, scratch ones, and files on the disk."""

    def measure():
        folder = Path(core.settings.data_dir) / "extents"
        disk = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.exists() else 0
        return core.store.used_bytes + core.store.scratch_bytes + core.store.recycled_bytes + disk

    return measure


@pytest.fixture
def random_array():
    def make(shape, dtype="complex64", seed=0):
        generator = np.random.default_rng(seed)
        real = generator.standard_normal(shape)
        if np.dtype(dtype).kind == "c":
            return (real + 1j * generator.standard_normal(shape)).astype(dtype)
        return real.astype(dtype)

    return make


@pytest.fixture
def counted(monkeypatch):
    """How many requests took the short way as far as the queue. A client may pause between head and body for as long
    as it likes: else which way a request goes would be a matter of the machine's speed.
    """
    monkeypatch.setattr(base_exchange, "PATIENCE_S", 60.0)
    calls = []
    begin = small_products.begin

    def count(*args, **fields):
        calls.append(args)
        return begin(*args, **fields)

    monkeypatch.setattr(small_products, "begin", count)
    return calls
