"""Tests of arithmetic, and kernels through NVRTC."""

from __future__ import annotations

from pathlib import Path

import pytest

TUNED = "sm_90a"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Arithmetic has one outcome: `make test` runs none of these again. Kernels that are compiled for another
    architecture than the one that they are tuned for are slow.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=0))
            if "nvrtc" in item.fixturenames and _architecture(item) != TUNED:
                item.add_marker(pytest.mark.slow)


def _architecture(item: pytest.Item) -> str:
    """Which one the test compiles for."""
    return item.callspec.params.get("arch", TUNED) if hasattr(item, "callspec") else TUNED


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """Skips where kernels cannot be compiled."""
    cupy = pytest.importorskip("cupy", reason="the CuPy wheel is not installed: no NVRTC")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"NVRTC cannot be loaded: {error}")
