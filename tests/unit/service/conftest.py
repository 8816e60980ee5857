"""A core without HTTP: a store, a scheduler, or all of it, on a data directory of the test's own.

Nothing here depends on how fast the machine is: time passes for the service's clock when a test says so (`later`), and
no worker of `FakeExecutor` is taken for hung.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inline_executor import InlineExecutor
from works import unpacked

from gemmserve_kernels import Operand
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_service import products
from gemmserve_service.executor.port import Worker, spec_adapter
from gemmserve_service.executor.protocol import Cancel, Done, Drop, Failed, Hello, RunBatch, Write, Written
from gemmserve_service.jobs.core import Core
from gemmserve_service.runtime import clock
from gemmserve_service.scheduling.scheduler import Scheduler
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import GemmJob, GemmParams, Timings
from gemmserve_service.settings import Settings
from gemmserve_service.store.array_store import ArrayStore
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.extents import extents
from gemmserve_service.store.extents.arena import Arena
from gemmserve_service.store.extents.memfd import create_arena

SQUARE = np.ones((4, 4), "c8")


class FakeExecutor:
    """Workers that answer when the test says so; everything they are sent is kept."""

    def __init__(self, *names: str) -> None:
        self.fleet = {name: Worker(name) for name in names or ("cpu",)}
        self.sent: list[tuple[Worker, list[Any]]] = []
        """Tasks of each message."""
        self.passing: list[str] = []
        """Tasks of prompt messages."""
        self.forgotten: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.killed: list[tuple[str, str]] = []
        self.told: list[tuple[str, object]] = []
        self.owner = None
        self.stopped = False
        self.interleaves = False
        self.ahead = 0
        self.express = False
        self.result_bytes = 0
        self.specs: dict[str, DeviceSpec] = {}
        """Devices of workers that have no processor."""

    async def start(self, owner):
        self.owner = owner
        for name in self.fleet:
            self.hello(name)

    async def stop(self):
        self.owner, self.stopped = None, True

    def workers(self):
        return list(self.fleet.values())

    def send(self, worker, message):
        if isinstance(message, RunBatch):
            self.sent.append((worker, unpacked(message)))
            self.passing += [work.task for work in message.tasks if message.prompt]
        elif isinstance(message, Cancel):
            self.cancelled.append((worker.id, message.task))
        else:
            self.told.append((worker.id, message))

    def kill(self, worker, reason):
        self.killed.append((worker.id, reason))
        self.lose(worker.id)

    def forget(self, message):
        self.forgotten += [*message.extents, *message.arrays, *message.parents]

    def hello(self, name="cpu"):
        worker = self.fleet[name]
        spec = spec_adapter().dump_python(self.specs.get(name, DeviceSpec.cpu()), mode="json")
        hello = Hello(
            worker=name, pid=1, spec=spec, verified_error=1e-8, interleaves=self.interleaves, ahead=self.ahead,
            result_bytes=self.result_bytes, express=self.express,
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

    def done(self, name="cpu", task=None, *, written=True, seconds=0.001):
        worker = self.fleet[name]
        task = task or self.running(name)[0]
        done = Done(task=task, algorithm="numpy", timings=Timings(kernel_s=seconds), written=written)
        self.owner.task_ended(worker, done)

    def written(self, task, name="cpu", *, lost=False):
        """The results of a task are in the store, or nobody is at them any more; or they are lost."""
        message = Written(lost=[task]) if lost else Written(tasks=[task])
        self.owner.results_written(self.fleet[name], message)

    def writes(self, name="cpu"):
        """Tasks whose results a worker was told to write, in order; and where, and how urgently, at last."""
        return {message.task: message for worker, message in self.told if worker == name and isinstance(message, Write)}

    def drops(self, name="cpu"):
        """Tasks whose results a worker was told that nobody needs."""
        told = [message for worker, message in self.told if worker == name and isinstance(message, Drop)]
        return [task for message in told for task in message.tasks]

    def write(self, task, array, name="cpu"):
        """Writes a task's result where the worker was told to, and says so; `array`: that, or several by id."""
        places = self.writes(name)[task].places
        arrays = array if isinstance(array, dict) else dict.fromkeys(places, array)
        for array_id, (_, path, nbytes, start, _) in places.items():
            with Path(path).open("r+b") as file:
                data = arrays[array_id].tobytes(order="A")
                assert start + len(data) <= nbytes
                file.seek(start)
                file.write(data)
        self.written(task, name)

    def fail(self, name="cpu", task=None, slug="device-error", status=500):
        worker = self.fleet[name]
        task = task or self.running(name)[0]
        self.owner.task_ended(
            worker, Failed(task=task, slug=slug, status=status, title="Device error", detail="it broke")
        )


@pytest.fixture
def make_settings(tmp_path):
    def make(**fields):
        # No worker is killed for its silence: those of `FakeExecutor` say nothing, however long a test takes.
        # One product in a thousand would be checked unasked.
        given = {
            "data_dir": tmp_path / "data",
            "max_array_bytes": 1 << 30,
            "heartbeat_timeout_s": 3600.0,
            "verify_share": 0.0,
        }
        return Settings(**given | fields)

    return make


@pytest.fixture
def own_files(monkeypatch):
    """Small arrays lie in files of their own, too, for tests that lose one, or count them."""
    monkeypatch.setattr("gemmserve_service.store.extents.extents._SMALL", 0)


@pytest.fixture
def settings(make_settings):
    return make_settings()


@pytest.fixture
def later(monkeypatch):
    """later(3600): so many seconds pass at once, by the service's clock and by the wall's."""
    ahead, steady = [0.0], clock._steady
    monkeypatch.setattr(clock, "_steady", lambda: steady() + ahead[0])
    shifted = {"time": lambda: time.time() + ahead[0]}
    monkeypatch.setattr(clock, "system", SimpleNamespace(**vars(time) | shifted))

    def pass_by(seconds):
        ahead[0] += seconds

    return pass_by


@pytest.fixture
def wall(monkeypatch):
    """Sets the machine's wall clock: `wall(+3600)`. Time passes when the test says so: `wall.wait(1)`."""

    class Wall:
        steady, shown = 1000.0, 1.8e9

        def __call__(self, seconds):
            self.shown += seconds

        def wait(self, seconds):
            self.steady += seconds
            self.shown += seconds

    wall = Wall()
    monkeypatch.setattr(clock, "_steady", lambda: wall.steady)
    monkeypatch.setattr(clock, "system", SimpleNamespace(time=lambda: wall.shown))
    monkeypatch.setattr(clock, "CLOCK", clock.Clock())
    return wall


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
def make_arena():
    """make_arena(nbytes) -> a function that returns the host arena as each new front has it."""
    fds = []

    def make(nbytes):
        fds.append(create_arena(nbytes))
        path = f"/proc/{os.getpid()}/fd/{fds[-1]}"
        return lambda *writers: Arena(path, nbytes, writers=writers)

    yield make
    for fd in fds:
        os.close(fd)


@pytest.fixture
def small_results_stay(monkeypatch):
    """Results of any size may stay on a device."""
    monkeypatch.setattr("gemmserve_service.scheduling.tasks.MIN_DEFERRED_BYTES", 1)


@pytest.fixture
def full_disk(monkeypatch):
    """full_disk(True): no file can be made; full_disk(False): they can again."""
    real, state = extents._allocate, {"full": False}

    def allocate(fd, capacity):
        if state["full"]:
            raise OSError(errno.ENOSPC, "no space left")
        real(fd, capacity)

    monkeypatch.setattr(extents, "_allocate", allocate)
    monkeypatch.setattr("gemmserve_service.store.spill._MIN_RETRY_S", 0.01)
    monkeypatch.setattr("gemmserve_service.scheduling.results.write_back._MIN_RETRY_S", 0.01)
    monkeypatch.setattr("gemmserve_service.scheduling.scheduler._ROOM_RETRY_S", 0.01)
    return lambda full: state.update(full=full)


@pytest.fixture
def lossy_disk(monkeypatch):
    """lossy_disk(2): the next two fsyncs of extents' files fail, and their pages are gone."""
    real, left = os.fsync, [0]

    def fsync(fd):
        path = Path(f"/proc/self/fd/{fd}").resolve()
        if left[0] and path.is_file() and path.parent.name == "extents":
            left[0] -= 1
            path.write_bytes(bytes(path.stat().st_size))
            raise OSError(errno.EIO, "the disk fails")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)

    def fail(times):
        left[0] = times

    return fail


@pytest.fixture
async def make_core():
    """Cores that are stopped at the end of the test."""
    cores = []

    async def make(settings, executor=None, arena=None):
        core = Core(settings, executor or InlineExecutor(), arena)
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
async def real(make_core, settings):
    """A core that really multiplies."""
    return await make_core(settings)


@pytest.fixture
def idle(core, held, eventually):
    """Nothing is held any more."""

    async def check():
        await eventually(lambda: not core.jobs._live)
        assert held(core.store) == (0, 0, 0)
        assert (core.scheduler.queued, core.scheduler.running, core.scheduler.admissions.steps) == (0, 0, 0)

    return check


@pytest.fixture
def die():
    """Ends a core as SIGKILL would: what is committed stays, nothing else is tidied up."""

    async def kill(core):
        core.executor.owner = None
        await core.database.stop()
        core.scheduler.stop()
        writes = core.scheduler.writes
        writes._stopping.set()
        tasks = [
            *core.jobs._background._tasks,
            *core.store._background._tasks,
            *writes._background._tasks,
            *writes._spill._background._tasks,
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return kill


class Recorder:
    """Notes what it is told, and takes over what it is given."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.shares: list[tuple[str, float]] = []
        self.outcomes: dict[str, object] = {}

    def started(self, task):
        self.told.append(("started", task.id))

    def progressed(self, task, share):
        self.shares.append((task.id, share))

    def requeued(self, task):
        self.told.append(("requeued", task.id))

    def ended(self, task, outcome):
        assert task.id not in self.outcomes, "told twice"
        self.told.append(("ended", task.id))
        self.outcomes[task.id] = outcome
        if isinstance(outcome, Done):
            task.close()


@pytest.fixture
def listener():
    return Recorder()


@pytest.fixture
async def make_scheduler(store, make_settings):
    async def make(fake, **fields):
        scheduler = Scheduler(make_settings(**fields), store, fake)
        await fake.start(scheduler)
        return scheduler

    return make


@pytest.fixture
async def scheduler(make_scheduler, fake):
    return await make_scheduler(fake)


@pytest.fixture
def make_task(store, put, listener):
    async def make(name, params=None, **fields):
        params = params or GemmParams()
        operands = {}
        for key in ("a", "b"):
            upload = await put(store, SQUARE, scratch=True)
            await upload.commit()
            operands[key] = store.pin_upload(upload)
        problem = products.build(params, {"a": Operand.of(SQUARE), "b": Operand.of(SQUARE)})
        results = {"d": store.allocate(SQUARE.dtype, SQUARE.shape, "C", ttl_s=None, scratch=True)}
        return Task(name, params, problem, operands, results, listener, **fields)

    return make


@pytest.fixture
def submit(make_task):
    async def make_and_submit(scheduler, name, **fields):
        task = await make_task(name, **fields)
        scheduler.submit(task)
        return task

    return make_and_submit


@pytest.fixture
def put():
    """Stores an array."""

    async def store_array(store, array, *, ttl_s=None, scratch=False, **options):
        order = "C" if array.flags.c_contiguous else "F"
        upload = store.allocate(array.dtype, array.shape, order, ttl_s=ttl_s, scratch=scratch, **options)
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

    async def wait(condition, within_s=60.0):
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
