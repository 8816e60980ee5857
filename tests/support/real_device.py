"""CuPy where there is a device for it, in tests that are marked `gpu` and stand beside others."""

from __future__ import annotations

from typing import Any

import pytest


def cupy_with_device() -> Any:
    """Return CuPy; skip the test where it is not installed, or finds no device."""
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no device: {error}")
    return cupy
