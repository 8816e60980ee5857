"""A command that dies with its parent, however that died."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil

from gemmserve_service.processes.ray.actor import LAUNCH

PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "{LAUNCH}", str(os.getpid()), sys.executable, "-c",
    "import time; print('here', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_kill_of_the_parent_takes_the_command_along():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child.pid) and child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_parent_that_is_gone_already():
    done = subprocess.run(
        [sys.executable, "-m", LAUNCH, str(os.getppid()), sys.executable, "-c", "print('ran')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (os.EX_TEMPFAIL, "")


def test_the_commands_status_is_its_own():
    done = subprocess.run(
        [sys.executable, "-m", LAUNCH, str(os.getpid()), sys.executable, "-c", "raise SystemExit(7)"], check=False
    )
    assert done.returncode == 7
