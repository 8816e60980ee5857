"""Device specs: this machine's, and from the properties that a driver reports."""

from __future__ import annotations

import os

import pytest

from gemmserve_kernels import DeviceError, DeviceSpec
from gemmserve_kernels.device import spec

H200_PROPERTIES = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "sharedMemPerBlock": 49152,
    "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
    "regsPerBlock": 65536,
    "regsPerMultiprocessor": 65536,
    "totalGlobalMem": 141 << 30,
    "l2CacheSize": 60 << 20,
}
MI300X_PROPERTIES = {
    "name": b"AMD Instinct MI300X",
    "gcnArchName": b"gfx942:sramecc+:xnack-",
    "major": 9,
    "minor": 4,
    "multiProcessorCount": 304,
    "warpSize": 64,
    "sharedMemPerBlock": 65536,
    "regsPerBlock": 65536,
    "totalGlobalMem": 192 << 30,
    "l2CacheSize": 4 << 20,
}


def test_the_cpu_needs_no_driver():
    spec = DeviceSpec.cpu()
    assert (spec.kind, spec.arch) == ("cpu", "cpu")
    assert 1 <= spec.sm_count <= (os.cpu_count() or 1)
    assert spec.memory_bytes > 1 << 28
    assert spec.compute_modes == ("auto", "fp32", "fp64")
    assert spec is DeviceSpec.cpu()


def test_cuda_properties():
    assert spec._from_properties(H200_PROPERTIES, hip=False) == spec.KNOWN["H200"]


def test_hip_properties():
    found = spec._from_properties(MI300X_PROPERTIES, hip=True)
    assert (found.kind, found.arch, found.warp_size, found.shared_per_block) == ("rocm", "gfx942", 64, 65536)
    assert found.compute_modes == ("auto", "fp32", "fp64", "tf32", "3xfp16")


@pytest.mark.parametrize(("capability", "arch"), [(70, "sm_70"), (80, "sm_80"), (90, "sm_90a"), (120, "sm_120")])
def test_architectures(capability, arch):
    assert spec.cuda_arch(capability) == arch
    assert ("tf32" in spec.cuda_modes(capability)) == (capability >= 80)


def test_without_cupy_there_is_no_device(monkeypatch):
    def missing():
        raise DeviceError("CuPy cannot be used")

    monkeypatch.setattr(spec, "_import_cupy", missing)
    assert DeviceSpec.all() == []
    with pytest.raises(DeviceError):
        DeviceSpec.current()


def test_errors_of_cupy_are_typed():
    cupy = pytest.importorskip("cupy")
    from gemmserve_kernels import OutOfDeviceMemory

    with pytest.raises(OutOfDeviceMemory), spec.device_errors():
        raise cupy.cuda.memory.OutOfMemoryError(1 << 40, 0)
    with pytest.raises(DeviceError), spec.device_errors():
        raise cupy.cuda.runtime.CUDARuntimeError(700)
    with pytest.raises(ZeroDivisionError), spec.device_errors():
        raise ZeroDivisionError
