"""The front's side of the workers' socket, against hand-made workers and the real one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from standing import stand_still
from works import unpacked

from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_service.executor.local import LocalExecutor
from gemmserve_service.executor.port import spec_adapter
from gemmserve_service.executor.protocol import TO_WORKER, Beat, Cancel, Decoder, Done, Failed, Hello, RunBatch, encode
from gemmserve_service.runtime.handoff import WorkerHandoff
from gemmserve_service.schemas import DeviceHealth, GemmParams, JobState, Timings

A = np.arange(36.0).reshape(6, 6)


class HandMadeWorker:
    """Speaks the protocol, word for word as the test wants it."""

    def __init__(self, path):
        self.path = path
        self.decoder = Decoder()

    async def connect(self, name="cpu", hello=True):
        self.reader, self.writer = await asyncio.open_unix_connection(self.path)
        if hello:
            spec = spec_adapter().dump_python(DeviceSpec.cpu(), mode="json")
            self.say(Hello(worker=name, pid=1, spec=spec, verified_error=1e-8))
        return self

    def say(self, message):
        self.writer.write(message if isinstance(message, bytes) else encode(message))

    async def hear(self):
        while True:
            data = await asyncio.wait_for(self.reader.read(1 << 16), 60)
            if not data:
                return None
            for body in self.decoder.feed(data):
                message = TO_WORKER.validate_json(body)
                return unpacked(message)[0] if isinstance(message, RunBatch) else message

    def close(self):
        self.writer.close()


@pytest.fixture
def path(tmp_path):
    # The test's own folder may be too deep for a Unix socket.
    with contextlib.chdir(tmp_path):
        yield "control"


@pytest.fixture
def listener(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        yield listener


@pytest.fixture
async def core(make_core, settings, listener):
    return await make_core(settings, LocalExecutor(socket.socket(fileno=os.dup(listener.fileno())), ["cpu"]))


@pytest.fixture
async def worker(core, path, eventually):
    worker = await HandMadeWorker(path).connect()
    await eventually(lambda: core.ready()[0])
    yield worker
    worker.close()


def fill(ref, array):
    """What a worker does to a result."""
    with Path(ref.path).open("r+b") as file:
        file.seek(ref.offset)
        file.write(array.tobytes())


def mappings_of(pid, name):
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if name in line]


async def submitted(core, put, gemm):
    a = await put(core.store, A)
    return (await core.jobs.submit(gemm(a, a)))[0]


async def test_nothing_is_ready_before_a_hello(core, path, eventually):
    assert not core.ready()[0]
    worker = await HandMadeWorker(path).connect(hello=False)
    worker.say(Done(task="t", algorithm="numpy", timings=Timings()))
    assert await worker.hear() is None  # an answer before hello ends the connection
    assert not core.ready()[0]
    stranger = await HandMadeWorker(path).connect("cuda:9")
    assert await stranger.hear() is None
    assert core.devices()[0].state == "starting"
    assert not core.executor._accepted


async def test_a_task_goes_out_and_its_answer_comes_back(core, worker, put, gemm, fetch):
    info = await submitted(core, put, gemm)
    run = await worker.hear()
    assert run.task == info.id
    assert (run.operands["a"].dtype, run.operands["a"].shape) == ("float64", (6, 6))
    out = run.results["d"]
    fill(out, A @ A)
    worker.say(Done(task=run.task, algorithm="numpy", timings=Timings(), memory_used=77))
    done = await core.jobs.wait(info.id, 60)
    assert done.state == JobState.SUCCEEDED
    np.testing.assert_array_equal(fetch(core.store, done.result["d"]), A @ A)
    assert core.devices()[0].memory_used == 77


async def test_answers_that_come_together_all_count_whatever_comes_behind_them(core, worker, put, gemm, eventually):
    a = await put(core.store, A)
    ids = [(await core.jobs.submit(gemm(a, a)))[0].id for _ in range(4)]
    (first,) = [await worker.hear()]
    assert first.task == ids[0]
    worker.say(encode(Done(task=ids[0], algorithm="numpy", timings=Timings())) + encode(Beat()))
    assert (await worker.hear()).task == ids[1]  # and with it the others, which had gathered
    together = [encode(Done(task=each, algorithm="numpy", timings=Timings())) for each in ids[1:]]
    last, _ = await core.jobs.submit(gemm(a, a))
    worker.say(b"".join(together) + b"\0\0\0\4oops")
    ends = [await core.jobs.wait(each, 60) for each in ids]
    assert {end.state for end in ends} == {JobState.SUCCEEDED}
    await eventually(lambda: not core.ready()[0])
    assert (await core.jobs.get(last.id)).state == JobState.QUEUED


@pytest.mark.parametrize(
    "nonsense",
    [b"\0\0\0\4oops", b"\xff\xff\xff\xff", encode(Done(task="t", algorithm="n", timings=Timings()))[:-1] + b"!"],
)
async def test_nonsense_ends_the_connection_and_the_job_runs_again(core, worker, put, gemm, path, nonsense):
    info = await submitted(core, put, gemm)
    await worker.hear()
    worker.say(nonsense)
    assert await worker.hear() is None
    assert (await core.jobs.get(info.id)).state == JobState.QUEUED
    second = await HandMadeWorker(path).connect()
    run = await second.hear()
    second.say(Failed(task=run.task, slug="s", status=500, title="T", detail="d"))
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.attempt) == (JobState.FAILED, 2)
    second.close()


async def test_a_hello_before_the_old_end_was_noticed(core, worker, put, gemm, path):
    info = await submitted(core, put, gemm)
    await worker.hear()
    successor = await HandMadeWorker(path).connect()
    run = await successor.hear()
    assert run.task == info.id
    assert await worker.hear() is None
    successor.say(Failed(task=run.task, slug="s", status=500, title="T", detail="d"))
    assert (await core.jobs.wait(info.id, 60)).attempt == 2
    assert core.devices()[0].restarts == 1
    successor.close()


async def test_the_front_leaves_the_socket_to_the_next_one(core, worker, path, settings, listener):
    await core.stop()
    assert (await worker.hear()).kind == "stop"
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(path)  # the path and its write_queue are still there
    waiting.close()


async def test_workers_hear_which_extents_are_gone(make_core, make_settings, listener, path, eventually, put):
    executor = LocalExecutor(socket.socket(fileno=os.dup(listener.fileno())), ["cpu"])
    core = await make_core(make_settings(recycle_bytes=0), executor)
    worker = await HandMadeWorker(path).connect()
    await eventually(lambda: core.ready()[0])
    info = await put(core.store, A)
    name = core.store._catalog.get(info.id).extent.file[0]
    await core.store.delete(info.id)
    assert (await worker.hear()).extents == [name]
    worker.close()


# -- the real worker ------------------------------------------------------------------------------------------------


@pytest.fixture
def start_worker(settings, path):
    """The process, as the supervisor starts it; it ends with the pipe."""
    reading, writing = os.pipe()
    processes = []

    def start():
        handoff = WorkerHandoff(
            settings=settings, pipe_fd=reading, device="cpu", control_path=str(Path(path).absolute())
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "gemmserve_service.executor.worker"],
            stdin=subprocess.PIPE,
            pass_fds=(reading,),
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        process.stdin.write(handoff.model_dump_json().encode())
        process.stdin.close()
        processes.append(process)
        return process

    yield start
    os.close(writing)
    os.close(reading)
    for process in processes:
        assert process.wait(60) in {0, -signal.SIGKILL}


async def test_the_real_worker_multiplies_survives_its_front_and_ends_with_the_pipe(
    core, start_worker, put, gemm, fetch, scratch, make_core, settings, listener, eventually
):
    worker = start_worker()
    await eventually(lambda: core.ready()[0])
    info = await submitted(core, put, gemm)
    done = await core.jobs.wait(info.id, 60)
    np.testing.assert_array_equal(fetch(core.store, done.result["d"]), A @ A)
    one = await core.jobs.run(GemmParams(alpha=2), await scratch(core.store, a=A, b=A))
    np.testing.assert_array_equal(np.frombuffer(one.results["d"].view, "f8").reshape(6, 6), 2 * A @ A)
    one.release()
    await core.stop()
    second = await make_core(settings, LocalExecutor(socket.socket(fileno=os.dup(listener.fileno())), ["cpu"]))
    await eventually(lambda: second.ready()[0])
    assert worker.poll() is None
    assert not mappings_of(worker.pid, "memfd:gemmserve")  # the first front's memory is let go
    one = await second.jobs.run(GemmParams(), await scratch(second.store, a=A, b=A))
    one.release()


async def test_the_real_worker_killed(core, start_worker, put, gemm, eventually):
    worker = start_worker()
    await eventually(lambda: core.ready()[0])
    await asyncio.to_thread(stand_still, worker.pid)
    info = await submitted(core, put, gemm)
    worker.kill()
    await eventually(lambda: not core.ready()[0])
    assert (await core.jobs.get(info.id)).state == JobState.QUEUED
    start_worker()
    done = await core.jobs.wait(info.id, 60)
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 2)


async def test_a_worker_that_is_cancelled_hears_of_it(core, worker, put, gemm):
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    assert (await worker.hear()).task == info.id
    await core.jobs.cancel(info.id)
    message = await worker.hear()
    assert (message.kind, message.task) == ("cancel", info.id)


async def test_beats_are_signs_of_life_and_of_progress(core, worker, put, gemm, eventually):
    a = await put(core.store, A)
    info, _ = await core.jobs.submit(gemm(a, a))
    device = core.executor.workers()[0]
    await core.scheduler.watchdog.stop()  # which would find that it had been silent for long
    device.heard = device.moved = 0.0
    worker.say(Beat(task=info.id, progress=0))
    await eventually(lambda: device.heard)
    assert device.moved == 0.0
    worker.say(Beat(task=info.id, progress=1, share=0.5, registered=4096, prepares=True))
    await eventually(lambda: device.moved)
    assert device.registered_bytes == 4096
    assert device.prepares
    assert (await core.jobs.get(info.id)).progress == 0.5
    worker.say(Beat())
    await eventually(lambda: not device.prepares)


async def test_a_hung_process_is_killed_and_its_job_runs_elsewhere(core, path, put, gemm, eventually):
    """The real worker, stopped: killed by the descriptor of its process, whatever may have taken its number."""
    process, handoff = None, WorkerHandoff(settings=core.settings, pipe_fd=0, device="cpu", control_path=path)

    def spawn():
        read, write = os.pipe()
        started = subprocess.Popen(
            [sys.executable, "-m", "gemmserve_service.executor.worker"], stdin=subprocess.PIPE, pass_fds=[read]
        )
        started.stdin.write(handoff.model_copy(update={"pipe_fd": read}).model_dump_json().encode())
        started.stdin.close()
        os.close(read)
        return started, write

    process, pipe = spawn()
    try:
        await eventually(lambda: core.ready()[0])
        await asyncio.to_thread(stand_still, process.pid)
        a = await put(core.store, A)
        info, _ = await core.jobs.submit(gemm(a, a))
        device = core.executor.workers()[0]
        await eventually(lambda: device.tasks)
        core.scheduler.watchdog._last_look = None  # time passes faster here than for whoever was stopped himself
        core.scheduler.watchdog.look(device.heard + core.settings.heartbeat_timeout_s + 1)
        assert not core.ready()[0]
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
        os.close(pipe)
        process, pipe = spawn()
        finished = await core.jobs.wait(info.id, 60)
        assert (finished.state, finished.attempt) == (JobState.SUCCEEDED, 2)
    finally:
        process.kill()
        process.wait()
        os.close(pipe)


async def test_a_worker_that_reads_late_is_sent_everything_in_order(core, worker):
    """What goes past the transport while the socket takes it, and what is left to it once that is full."""
    (one,) = core.executor.workers()
    names = [f"{number}_{'x' * (number * 977 % 60_000)}" for number in range(200)]
    for name in names:
        core.executor.send(one, Cancel(task=name))
    found = []
    while len(found) < len(names):
        data = await asyncio.wait_for(worker.reader.read(1 << 16), 60)
        found += [TO_WORKER.validate_json(body).task for body in worker.decoder.feed(data)]
    assert found == names
    core.executor.send(one, Cancel(task="last"))  # straight to the socket again
    assert (await worker.hear()).task == "last"


async def test_nothing_is_written_past_a_connection_that_is_gone(core, worker, eventually):
    (one,) = core.executor.workers()
    link = core.executor._links["cpu"]
    worker.close()
    await eventually(lambda: not core.ready()[0])
    assert link._socket == -1
    link.write(b"nobody reads this")
    core.executor.send(one, Cancel(task="t"))


async def test_what_a_devices_sensors_say_is_its_last_word(core, worker, eventually):
    warm = DeviceHealth(utilisation=0.5, temperature_celsius=40.0, warnings=("Xid 79",))
    worker.say(Beat(health=warm))
    await eventually(lambda: core.devices()[0].health == warm)
    worker.say(Beat())
    worker.say(Beat(registered=1))
    await eventually(lambda: core.executor.workers()[0].registered_bytes == 1)
    assert core.devices()[0].health == warm, "nothing new is no news"
    worker.close()
    await eventually(lambda: not core.ready()[0])
    assert core.devices()[0].health == DeviceHealth(), "a worker that is gone knows nothing"
