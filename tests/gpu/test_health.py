"""Sensors of the device itself: that the driver knows it by the PCI bus id that CuPy gives, and tells what is so."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from gemmserve_service.executor.worker.health.amd import open_amd_smi  # noqa: E402 (cupy first)
from gemmserve_service.executor.worker.health.nvidia import open_nvml  # noqa: E402


def test_the_device_tells_how_it_is():
    hip = cupy.cuda.runtime.is_hip
    pytest.importorskip("amdsmi" if hip else "pynvml")
    read = (open_amd_smi if hip else open_nvml)(cupy.cuda.runtime.deviceGetPCIBusId(0))
    a = cupy.ones((4096, 4096), "float32")
    found = read()
    for _ in range(500):
        (a @ a)[0, 0].get()
        found = read()
        if found.utilisation:
            break
    assert found.utilisation is None or 0 < found.utilisation <= 1
    assert found.temperature_celsius is not None
    assert 0 < found.temperature_celsius < 120
    if found.power_watts is not None and found.power_limit_watts is not None:
        assert 0 < found.power_watts < 2 * found.power_limit_watts
    assert found.clock_hertz is None or 1e8 < found.clock_hertz < 1e10
