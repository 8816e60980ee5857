"""Tests of arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Arithmetic has one outcome: `make test` runs none of these again."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=0))


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """Skips where kernels cannot be compiled."""
    cupy = pytest.importorskip("cupy", reason="the CuPy wheel is not installed: no NVRTC")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
