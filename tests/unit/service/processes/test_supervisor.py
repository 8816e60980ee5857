"""The supervisor: who may start, when children start again, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from live_server import LiveServer, until
from standing import stand_still

from gemmserve_service.processes import datadir, devices, listeners, supervisor
from gemmserve_service.runtime.start_error import StartError
from gemmserve_service.settings import Settings
from gemmserve_service.store.extents.memfd import PANEL_ROW_BYTES

HOST = "127.71.83.2"
"""Where no other server of a test listens, so that none can take a port that has just become free."""


def ended(tmp_path, *arguments, **environment):
    command = [sys.executable, "-m", "gemmserve.cli", "serve", "--device", "cpu", "--data-dir", str(tmp_path)]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


# -- back-off -------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    return now


def test_a_child_that_keeps_dying_is_started_less_and_less_often(clock):
    child = supervisor._Child("front", object)
    delays = []
    for _ in range(10):
        child.start()
        child.ended(1)
        delays.append(child.delay)
        assert child.due == clock[0] + child.delay
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]
    assert child.failures == 10
    child.start()
    clock[0] += 3600
    child.ended(-9)
    assert (child.delay, child.failures) == (0, 0)


def test_a_device_that_is_missing_is_looked_for_once_a_minute(clock):
    child = supervisor._Child("worker cuda:0", object)
    child.start()
    child.ended(os.EX_UNAVAILABLE)
    assert child.delay == 60


def test_a_process_that_the_system_does_not_give_is_asked_for_again(clock, capsys):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    child = supervisor._Child("front", refuse)
    child.start()
    assert child.process is None
    assert child.due > clock[0]
    assert "temporarily unavailable" in capsys.readouterr().err


def test_reasons():
    assert devices.reason(3) == "status 3"
    assert devices.reason(-signal.SIGKILL) == "signal SIGKILL"


# -- the lock -------------------------------------------------------------------------------------------------------


def test_the_lock_waits_for_what_a_killed_server_left(tmp_path, monkeypatch):
    (tmp_path / "lock").write_text("999999999\n")  # no such process
    script = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    waits = []

    def wait(seconds):
        """While somebody waits for the lock, the child ends."""
        waits.append(seconds)
        if len(waits) == 3:
            child.stdin.close()
            child.wait()

    assert child.stdout.readline()
    monkeypatch.setattr(datadir, "time", SimpleNamespace(monotonic=lambda: 0.02 * len(waits), sleep=wait))
    with contextlib.ExitStack() as stack:
        datadir.lock(tmp_path, stack)
        assert len(waits) == 3
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    child.stdout.close()


def test_the_lock_gives_up_after_a_while_and_at_once_when_the_owner_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(datadir, "_WAIT_S", 0.1)
    with (tmp_path / "lock").open("w+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("999999999\n")
        held.flush()
        with contextlib.ExitStack() as stack, pytest.raises(StartError, match="another server"):
            datadir.lock(tmp_path, stack)
        held.seek(0)
        held.write(f"{os.getpid()}\n     ")
        held.flush()
        monkeypatch.setattr(datadir, "_WAIT_S", 1e9)
        with contextlib.ExitStack() as stack, pytest.raises(StartError, match=f"pid {os.getpid()}"):
            datadir.lock(tmp_path, stack)


def test_a_data_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with contextlib.ExitStack() as stack, pytest.raises(StartError, match="cannot be used"):
        datadir.lock(tmp_path / "file" / "data", stack)


def test_a_runtime_folder_of_others_is_refused(make_settings, tmp_path):
    settings = make_settings(runtime_dir=tmp_path / "run")
    with contextlib.ExitStack() as stack:
        folder = listeners.runtime_folder(settings, stack)
        folder.chmod(0o755)
        with pytest.raises(StartError, match="GEMMSERVE_RUNTIME_DIR"):
            listeners.runtime_folder(settings, stack)
    assert not folder.exists()


def test_a_socket_path_too_long_is_refused():
    with pytest.raises(StartError, match="too long"):
        listeners.control_socket("/tmp/" + "x" * 200)


def test_devices_that_are_named(monkeypatch):
    assert supervisor._devices("cuda:0,cuda:1", "local") == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert supervisor._devices("auto", "local") == ["cpu"]
    assert supervisor._devices("auto", "ray") == [], "Ray gives this machine's to others"
    assert supervisor._devices("cuda:0", "ray") == ["cuda:0"]


# -- workers that Ray keeps -------------------------------------------------------------------------------------------


def ray_settings(tmp_path, **given):
    return Settings(data_dir=tmp_path, executor="ray", join_port=0, ray_join_url="http://127.0.0.1:1", **given)


def test_ray_that_is_not_there_is_a_start_error(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"gemmserve\[server,ray\]"):
        supervisor._check_ray(ray_settings(tmp_path))
    supervisor._check_ray(Settings(data_dir=tmp_path))


def test_a_token_that_cannot_be_read_is_a_start_error(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(StartError, match="token"):
        supervisor._check_ray(ray_settings(tmp_path, ray_token_file=tmp_path / "none"))
    supervisor._check_ray(ray_settings(tmp_path))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"executor": "ray", "ray_join_url": "http://f:1"}, "join_port"),
        ({"executor": "ray", "join_port": 1}, "ray_join_url"),
        ({"ray_min_workers": 9}, "ray_max_workers"),
    ],
)
def test_settings_of_ray_that_make_no_sense(given, reason):
    with pytest.raises(ValueError, match=reason):
        Settings(**given)


# -- memory for results ---------------------------------------------------------------------------------------------


def test_memory_for_results_lasts_as_long_as_the_supervisor():
    with ExitStack() as stack:
        path, nbytes = supervisor._arena(1 << 21, stack)
        found = Path(path).stat()
        assert nbytes == found.st_size == 1 << 21
        assert found.st_blocks == 0, "it takes memory as it is written"
    assert not Path(path).exists()


def test_a_server_without_accelerators_has_no_memory_for_results(monkeypatch, capsys):
    with ExitStack() as stack:
        assert supervisor._arena(0, stack) == (None, 0)

        def refuse(nbytes):
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(supervisor, "create_arena", refuse)
        assert supervisor._arena(1 << 21, stack) == (None, 0)
    assert "Too many open files" in capsys.readouterr().err


def test_devices_share_a_table_of_panels_as_long_as_the_supervisor_lives(monkeypatch, capsys):
    with ExitStack() as stack:
        path = supervisor._panel_table(2, stack)
        assert Path(path).stat().st_size == 2 * PANEL_ROW_BYTES
    assert not Path(path).exists()

    def refuse(rows):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(supervisor, "create_panel_table", refuse)
    with ExitStack() as stack:
        assert supervisor._panel_table(2, stack) is None
    assert "Too many open files" in capsys.readouterr().err


def test_a_front_is_told_who_may_still_write_for_the_one_before(make_settings, monkeypatch):
    """Those workers that run when it starts: one that starts later was told nothing by another front."""
    handoffs = []
    monkeypatch.setattr(supervisor, "_spawn", lambda module, text, fds, environment: handoffs.append(json.loads(text)))
    some = SimpleNamespace(fileno=lambda: 0)
    one = supervisor._Supervisor(
        make_settings(),
        0,
        some,
        *[None] * 4,
        Path("/run"),
        some,
        None,
        0,
        ["cuda:0", "cuda:1"],
        "/proc/1/fd/9",
        7,
        "/proc/1/fd/8",
    )
    one.workers[0].process = object()
    for _ in range(2):
        one._spawn_front()
    one._spawn_worker("cuda:1")
    for fd in (*one.pipe, *one.ready):
        os.close(fd)
    assert [handoff["arena_writers"] for handoff in handoffs[:2]] == [[], ["cuda:0"]]
    assert {(handoff["arena_path"], handoff["arena_bytes"]) for handoff in handoffs} == {("/proc/1/fd/9", 7)}
    assert (handoffs[-1]["panels_path"], handoffs[-1]["panels_row"]) == ("/proc/1/fd/8", 1)


# -- real processes -------------------------------------------------------------------------------------------------


def test_a_second_server_and_a_taken_port(tmp_path):
    with LiveServer(data_dir=tmp_path / "one") as server:
        second = ended(tmp_path / "one", "--port", "0")
        assert second.returncode == 1
        message = f"gemmserve: another server (pid {server.process.pid}) uses the data directory {tmp_path / 'one'}\n"
        assert second.stderr == message
        port = server.url.rsplit(":", 1)[1]
        third = ended(tmp_path / "two", "--port", port)
        assert third.returncode == 1
        assert third.stderr == f"gemmserve: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
        with server.http() as http:
            assert http.get("/readyz").status_code == 200


def test_a_second_signal_does_not_wait(tmp_path):
    with LiveServer(data_dir=tmp_path, environment={"GEMMSERVE_DRAIN_S": "3600"}) as server, server.http() as http:
        answer = http.post(
            "/v1/arrays",
            params={"dtype": "float32", "shape": "4,4"},
            headers={"Content-Type": "application/octet-stream"},
            content=bytes(64),
        )
        a = answer.json()["id"]
        stand_still(server.workers()[0].pid)  # the job runs for ever
        job_id = http.post("/v1/jobs", json={"op": "gemm", "a": a, "b": a}).json()["id"]
        until(lambda: http.get(f"/v1/jobs/{job_id}").json()["state"] == "running")
        server.process.send_signal(signal.SIGINT)
        until(lambda: http.get("/readyz").status_code == 503)
        server.terminate(signal.SIGINT)  # raises where it goes on waiting
        assert server.returncode == 0


def _ended(process: psutil.Process) -> bool:
    """Whether a process has closed its files; its memory, with the environment that marks it, goes well before them."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_after_kill_9_everything_is_gone_at_once_and_the_port_is_free(tmp_path):
    with LiveServer("--host", HOST, data_dir=tmp_path) as server:
        processes = server.processes()
        assert len(processes) == 3
        port = int(server.url.rsplit(":", 1)[1])
        server.process.kill()
        until(lambda: all(_ended(process) for process in processes))
        server.terminate()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))


def test_a_worker_that_is_left_over_keeps_the_next_server_out(tmp_path):
    def free():
        with (tmp_path / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with LiveServer(data_dir=tmp_path) as server:
        worker = stand_still(server.workers()[0].pid)  # as one in the middle of a call to its driver
        server.process.kill()
        until(lambda: len(server.processes()) == 1)
        assert not free()
        worker.resume()
        until(free)
        server.terminate()


def test_nowhere_for_the_control_socket_is_said(tmp_path):
    """A read-only root file system without a temporary folder, or a runtime folder that is none."""
    (tmp_path / "file").touch()
    settings = Settings(data_dir=tmp_path / "data", runtime_dir=tmp_path / "file", port=0)
    with ExitStack() as stack, pytest.raises(StartError, match="GEMMSERVE_RUNTIME_DIR"):
        listeners.runtime_folder(settings, stack)
