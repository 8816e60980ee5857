"""A core without HTTP: a store, a scheduler, or all of it, on a data directory of the test's own."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from gemmserve_kernels.device import DeviceSpec
from gemmserve_service.core import Core
from gemmserve_service.database import Database
from gemmserve_service.executor.base import Worker, spec_adapter
from gemmserve_service.executor.protocol import Done, Failed, Hello, Run, Written
from gemmserve_service.schemas import GemmJob, Timings
from gemmserve_service.settings import Settings
from gemmserve_service.store import ArrayStore


class FakeExecutor:
    """Workers that answer when the test says so; everything they are sent is kept."""

    def __init__(self, *names: str) -> None:
        self.fleet = {name: Worker(name) for name in names or ("cpu",)}
        self.sent: list[tuple[Worker, Run]] = []
        self.forgotten: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.killed: list[tuple[str, str]] = []
        self.told: list[tuple[str, object]] = []
        self.owner = None
        self.stopped = False
        self.interleaves = False
        self.ahead = 0
        self.defers = False

    async def start(self, owner):
        self.owner = owner
        for name in self.fleet:
            self.hello(name)

    async def stop(self):
        self.owner, self.stopped = None, True

    def workers(self):
        return list(self.fleet.values())

    def send(self, worker, task):
        self.sent.append((worker, task))

    def cancel(self, worker, task):
        self.cancelled.append((worker.id, task))

    def tell(self, worker, message):
        self.told.append((worker.id, message))

    def kill(self, worker, reason):
        self.killed.append((worker.id, reason))
        self.lose(worker.id)

    def forget(self, extent):
        self.forgotten.append(extent)

    def forget_array(self, array):
        self.forgotten.append(array)

    def hello(self, name="cpu"):
        worker = self.fleet[name]
        spec = spec_adapter().dump_python(DeviceSpec.cpu(), mode="json")
        hello = Hello(
            worker=name, pid=1, spec=spec, verified_error=1e-8, interleaves=self.interleaves, ahead=self.ahead,
            defers=self.defers,
        )  # fmt: skip
        worker.greeted(hello)
        self.owner.worker_ready(worker)

    def lose(self, name="cpu"):
        worker = self.fleet[name]
        worker.ready = False
        self.owner.worker_lost(worker)

    def running(self, name="cpu"):
        """Ids of the tasks that a worker has."""
        return list(self.fleet[name].tasks)

    def done(self, name="cpu", task=None, *, written=True):
        worker = self.fleet[name]
        task = task or self.running(name)[0]
        done = Done(task=task, algorithm="numpy", timings=Timings(kernel_s=0.001), written=written)
        self.owner.task_ended(worker, done)

    def written(self, task, name="cpu", *, lost=False):
        """The results of a task are in the store, or nobody is at them any more; or they are lost."""
        message = Written(lost=[task]) if lost else Written(tasks=[task])
        self.owner.results_written(self.fleet[name], message)

    def fail(self, name="cpu", task=None, slug="device-error", status=500):
        worker = self.fleet[name]
        task = task or self.running(name)[0]
        self.owner.task_ended(
            worker, Failed(task=task, slug=slug, status=status, title="Device error", detail="it broke")
        )


@pytest.fixture
def make_settings(tmp_path):
    def make(**fields):
        return Settings(**{"data_dir": tmp_path / "data", "max_array_bytes": 1 << 30, **fields})

    return make


@pytest.fixture
def settings(make_settings):
    return make_settings()


@pytest.fixture
async def database(settings):
    database = Database(settings.data_dir / "gemmserve.sqlite")
    await database.start()
    yield database
    await database.stop()


@pytest.fixture
async def make_store(database):
    stores = []

    async def make(settings):
        store = ArrayStore(settings, database)
        await store.start()
        store.finish_recovery()
        stores.append(store)
        return store

    yield make
    for store in stores:
        await store.stop()


@pytest.fixture
async def store(make_store, settings):
    return await make_store(settings)


@pytest.fixture
def fake():
    return FakeExecutor()


@pytest.fixture
def make_fake():
    return FakeExecutor


@pytest.fixture
async def make_core():
    """Cores that are stopped at the end of the test."""
    cores = []

    async def make(settings, executor=None):
        core = Core(settings, executor)
        await core.start()
        cores.append(core)
        return core

    yield make
    for core in cores:
        await core.stop()


@pytest.fixture
async def core(make_core, settings, fake):
    """A core whose worker answers when the test says so."""
    return await make_core(settings, fake)


@pytest.fixture
def put():
    """Stores an array."""

    async def store_array(store, array, *, ttl_s=None, scratch=False):
        order = "C" if array.flags.c_contiguous else "F"
        upload = await store.reserve(array.dtype, array.shape, order, ttl_s=ttl_s, scratch=scratch)
        upload.write(array.tobytes(order="A"))
        return upload if scratch else await upload.commit()

    return store_array


@pytest.fixture
def scratch(put):
    """Filled uploads for one-shot jobs."""

    async def make(store, **arrays):
        return {name: await put(store, array, scratch=True) for name, array in arrays.items()}

    return make


@pytest.fixture
def fetch():
    """A stored array as NumPy's."""

    def read(store, array_id):
        with store.pin(array_id) as pinned:
            info = pinned.info
            flat = np.frombuffer(bytes(pinned.view), info.dtype)
            return flat.reshape(info.shape, order=info.order)

    return read


@pytest.fixture
def gemm():
    def job(a, b, **fields):
        names = {name: array if isinstance(array, str) else array.id for name, array in (("a", a), ("b", b))}
        return GemmJob(op="gemm", **names, **fields)

    return job


@pytest.fixture
def eventually():
    """Waits until a condition holds."""

    async def wait(condition, within_s=30.0):
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"it did not happen within {within_s} s"
            await asyncio.sleep(0.002)
        return value

    return wait


@pytest.fixture
def held():
    """What a store holds beside its visible arrays: bytes in use, live scratch bytes, pins."""

    def measure(store):
        visible = sum(record.info.nbytes for record in store._catalog if record.state == "live")
        pins = sum(record.pins for record in store._catalog)
        return store.used_bytes - visible, store.scratch_bytes, pins

    return measure
