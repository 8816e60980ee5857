"""Settings every test shares: a home folder of their own, bounded BLAS threads, no proxy to this machine, hypothesis
profiles, a reason on every skipped device test.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator

KEPT = {"GEMMSERVE_KERNEL_CACHE", "GEMMSERVE_TEST_WORKERS"}
"""What tests heed of the machine's variables: see `joined_workers` for the second."""


def _leave_home() -> None:
    """Take the user's settings, keys and data out of this process's environment, and so out of its children's.

    Compiled kernels may come from where the machine has them: their names are digests of their sources.
    """
    os.environ.setdefault("CUPY_CACHE_DIR", str(Path.home() / ".cupy" / "kernel_cache"))
    for name in list(os.environ):
        if name.startswith(("XDG_", "GEMMSERVE_")) and name not in KEPT:
            del os.environ[name]
    home = tempfile.mkdtemp(prefix="gemmserve-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ["HOME"] = home


if "PYTEST_XDIST_WORKER" not in os.environ:  # else it has been done: workers inherit the environment
    _leave_home()

# TEST_HTTP_LIBRARY=httpx2 has the client's tests run with that, and what they call httpx is it then.
os.environ["GEMMSERVE_HTTP_LIBRARY"] = os.environ.get("TEST_HTTP_LIBRARY", "httpx")
if os.environ["GEMMSERVE_HTTP_LIBRARY"] == "httpx2":
    import httpx2

    httpx2.alias_httpx()

# Whatever proxy this machine has is not for the servers that tests start.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), "127.0.0.1", "localhost"]))

settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _device_missing() -> str | None:
    """Why no GPU test can run here, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"cupy is not installed: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no device: {error}"
    return None if count else "no device"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Sends a process's counts of second tries at once.

    pytest-rerunfailures has two short messages a test for them. By Nagle's algorithm the second one waits for the
    acknowledgement of the first, 40 ms, which is longer than most tests take.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A million objects that are collected stay: no garbage collection looks through them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and (reason := _device_missing()):
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
