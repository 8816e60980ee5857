"""Processes that measure: the load generator and the drivers of the SDKs, spoken to by JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.service.servers import ONE_THREAD

ROOT = Path(__file__).parents[2]


class AgentError(Exception):
    """What the process reports instead of a measurement."""


class Agent:
    """A child that answers every command with one line. A context manager."""

    def __init__(self, *arguments, python=sys.executable):
        self._command = [python, *arguments]

    def __enter__(self):
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, limit_s=600.0, **command):
        """The answer. Raises AgentError."""
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise AgentError(f"{self._command[-1]} ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise AgentError(answer["error"])
        return answer


def load_generator():
    """The raw sockets' one."""
    return Agent("-m", "benchmarks.service.load")
