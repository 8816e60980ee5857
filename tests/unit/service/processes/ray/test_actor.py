"""The actor, without Ray: its worker is started, started again, told to end; one that nobody needs leaves."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from gemmserve_service.processes.ray import actor as module
from gemmserve_service.processes.ray.actor import TOKEN_VARIABLE, WorkerActor, reachable

# Says its token and its arguments, and ends by SIGTERM with 0.
WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(sys.argv[1], "a") as file:
    print(os.environ.get("{variable}"), os.environ.get("OPENBLAS_NUM_THREADS"), file=file, flush=True)
{then}
"""


def order(log, then="time.sleep(600)", *, token="gs_secret", orphan_s=600.0):
    script = WORKER.format(variable=TOKEN_VARIABLE, then=then)
    return {"arguments": ["-c", script, str(log)], "join_url": "http://127.0.0.1:9", "token": token, "threads": 2,
            "orphan_s": orphan_s}  # fmt: skip


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def actor():
    made = WorkerActor("f", leave=lambda: None)
    yield made
    made.stop()
    until(lambda: made.look("f")["phase"] == "stopped")


def test_a_worker_is_started_once_and_its_token_is_not_in_its_command(actor, tmp_path):
    assert actor.look("f")["phase"] == "empty"
    actor.take(order(tmp_path / "log"))
    actor.take(order(tmp_path / "other"))
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
    report = actor.look("f")
    assert (report["phase"], report["starts"], report["fingerprint"]) == ("serving", 1, "f")
    assert (tmp_path / "log").read_text() == "gs_secret 2\n"
    assert b"gs_secret" not in Path(f"/proc/{report['worker']}/cmdline").read_bytes()
    assert not (tmp_path / "other").exists()


def test_a_token_of_the_nodes_own_is_not_used(actor, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "of somebody else")
    monkeypatch.setenv(TOKEN_VARIABLE + "_FILE", "of somebody else")
    wanted = order(tmp_path / "log", token=None)
    wanted["arguments"][1] += f"\nprint(os.environ.get({TOKEN_VARIABLE + '_FILE'!r}), file=open(sys.argv[1], 'a'))"
    wanted["arguments"][1] = wanted["arguments"][1].replace("time.sleep(600)", "")
    actor.take(wanted)
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("\n") >= 2)
    assert (tmp_path / "log").read_text().splitlines()[:2] == ["None 2", "None"]


def test_it_says_how_long_no_bridge_of_its_own_looked(actor):
    time.sleep(0.2)
    assert actor.look("other")["unowned_s"] >= 0.2
    first = actor.look("f")["unowned_s"]
    assert first == 0.0
    assert actor.look("other")["unowned_s"] > 0.0


def test_a_lost_worker_is_started_again(actor, tmp_path):
    actor.take(order(tmp_path / "log"))
    until(lambda: actor.look("f")["worker"] is not None)
    os.kill(actor.look("f")["worker"], signal.SIGKILL)
    until(lambda: actor.look("f")["starts"] == 2)
    assert actor.look("f")["status"] == -signal.SIGKILL


def test_one_that_is_refused_is_not_started_again_at_once(actor, tmp_path):
    actor.take(order(tmp_path / "log", f"sys.exit({os.EX_NOPERM})"))
    until(lambda: actor.look("f")["status"] == os.EX_NOPERM)
    assert (actor.look("f")["phase"], actor.look("f")["starts"], actor.look("f")["worker"]) == ("serving", 1, None)


def test_stop_is_sigterm_and_then_the_end(tmp_path):
    actor = WorkerActor("f", leave=lambda: None)
    actor.take(order(tmp_path / "log"))
    until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
    actor.stop()
    actor.stop()
    until(lambda: actor.look("f")["phase"] == "stopped")
    assert actor.look("f")["status"] == 0
    actor.take(order(tmp_path / "log"))
    assert actor.look("f")["starts"] == 1


def test_stop_before_an_order():
    actor = WorkerActor("f", leave=lambda: None)
    actor.stop()
    assert actor.look("f")["phase"] == "stopped"


@pytest.mark.parametrize("front", [False, True])
def test_without_bridge_and_front_it_leaves(monkeypatch, tmp_path, front):
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    left = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        actor = WorkerActor("f", leave=lambda: left.append(True))
        wanted = order(tmp_path / "log", orphan_s=0.5)
        wanted["join_url"] = f"http://127.0.0.1:{listener.getsockname()[1] if front else 9}"
        asked = []
        monkeypatch.setattr(module, "reachable", lambda url: bool(asked.append(url)) or front)
        actor.take(wanted)
        until(lambda: left or len(asked) > 20)
        assert bool(left) is not front
        assert set(asked) == {wanted["join_url"]}
    actor.stop()
    until(lambda: actor.look("f")["phase"] == "stopped")


def test_reachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reachable(f"http://127.0.0.1:{port}")
    assert not reachable(f"https://127.0.0.1:{port}")
