"""Folders of agents: one's own goes with it, one of an agent that was killed with the next agent's start."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemmserve_service.executor.agent.own_folder import PREFIX, OwnFolder

KILLED = """
import os, signal
from gemmserve_service.executor.agent.own_folder import OwnFolder
(OwnFolder().path / "control.sock").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_gone_when_it_is_closed(temporary):
    folder = OwnFolder()
    assert (folder.path.stat().st_mode & 0o777, folder.path.parent) == (0o700, temporary)
    (folder.path / "control.sock").touch()
    folder.close()
    assert list(temporary.iterdir()) == []


def test_one_of_a_killed_agent_goes_with_the_next_start(temporary):
    killed = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(temporary)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    folder = OwnFolder()
    assert not left.exists()
    assert folder.path.is_dir()
    folder.close()


def test_that_of_a_living_agent_and_what_is_no_folder_stay(temporary):
    other = temporary / f"{PREFIX}file"
    other.touch()
    first, second = OwnFolder(), OwnFolder()
    assert first.path.is_dir()
    assert second.path.is_dir()
    assert first.path != second.path
    first.close()
    second.close()
    assert list(temporary.iterdir()) == [other]


def test_without_locks_there_is_a_folder_all_the_same(temporary, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = OwnFolder(), OwnFolder()
    assert first.path != second.path
    assert "cannot be locked" in caplog.text
    assert set(temporary.iterdir()) == {first.path, second.path}, "nobody knows whose they are"
    first.close()
    second.close()
    assert list(temporary.iterdir()) == []


def test_one_that_is_taken_for_a_left_one_is_not_used(temporary, monkeypatch):
    """Another agent comes between its making and its lock."""
    locked, taken = fcntl.flock, []

    def late(folder, how):
        if not taken:
            taken.append(Path(f"/proc/self/fd/{folder}").resolve())
            taken[0].rmdir()
        locked(folder, how)

    monkeypatch.setattr(fcntl, "flock", late)
    folder = OwnFolder()
    assert folder.path != taken[0]
    assert folder.path.is_dir()
    folder.close()
