"""A client in more than one process: forked after use, and pickled. Each child gets its own answers, and no error."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from live_server import LiveServer

SCRIPT = Path(forked.__file__)


def said(url: str, scenario: str, **environment: str) -> dict[str, int]:
    """What a scenario of `forked` counted."""
    folder = str(SCRIPT.parent)
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), url, scenario],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted.keys() == {"right"}, f"{counted}\n{done.stderr}"
    return counted


@pytest.mark.parametrize(
    "scenario",
    [
        "products", "products past Python", "arrays", "busy parent", "events", "awaited", "awaited while running",
        "descriptors",
    ],
)  # fmt: skip
def test_children_of_a_client_that_was_used(server: LiveServer, scenario: str) -> None:
    assert said(server.url, scenario)["right"] > forked.CHILDREN


def test_iterators_of_products(server: LiveServer) -> None:
    assert said(server.url, "iterators")["right"] == 24


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_pools_of_processes(server: LiveServer, method: str) -> None:
    assert said(server.url, method)["right"] == 7 * forked.ROUNDS + 13


@pytest.mark.skipif(importlib.util.find_spec("joblib") is None, reason="joblib is not installed")
def test_joblib(server: LiveServer) -> None:
    assert said(server.url, "joblib")["right"] == 6 * forked.ROUNDS + 12


def test_shared_memory(tmp_path: Path) -> None:
    socket = tmp_path / "g.sock"
    with LiveServer("--uds", str(socket), data_dir=tmp_path / "data"):
        assert said(f"unix:{socket}", "shared memory")["right"] == (forked.CHILDREN + 1) * (forked.ROUNDS + 2) + 1
