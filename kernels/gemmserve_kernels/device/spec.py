"""Properties of a device: the only place that asks the driver.

Everything else decides from a `DeviceSpec`, so that plans for any device can be made, and tested, on a machine that has
none. `KNOWN` holds the specs of devices that the plans are tested for.
"""

from __future__ import annotations

import os
import platform
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from gemmserve_kernels.problem.errors import DeviceError, OutOfDeviceMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

_CPU_MODES: Final = ("auto", "fp32", "fp64")
_TENSOR_MODES: Final = ("tf32", "1xtf32", "3xtf32", "3xfp16", "6xbf16", "9xbf16")
"""Modes of tensor cores from compute capability 8.0 on."""
_WGMMA_MODES: Final = ("3xfp16-3m", "ozaki")
"""Modes that have kernels for compute capability 9.0 alone."""
_MFMA_MODES: Final = dict.fromkeys(("gfx942", "gfx950", "gfx1100"), ("tf32", "3xfp16"))
"""Modes of AMD's matrix units beside plain arithmetic (`mfma.tile` says why gfx90a does not)."""
TENSOR_SPEED: Final = {"sm_80": 0.55, "sm_90a": 1.0, "sm_100": 1.0}
"""Tensor-core algorithms per multiprocessor, relative to an H200's: data-sheet rates of dense FP16 (NVIDIA A100, H100);
of a B200 the same is assumed, for mma.sync does not have its new units. On other architectures `auto` stays with plain
arithmetic: theirs are too slow for three products to pay."""

DOUBLE_SPEED: Final = {"sm_80": 0.35, "sm_90a": 1.0, "sm_100": 0.5}
"""Double precision per multiprocessor, relative to an H200's, by the data sheets; elsewhere it is 32 or 64 times slower
than single and nothing is gained by it."""


@dataclass(frozen=True)
class DeviceSpec:
    """A device as far as plans depend on it. Sizes in bytes; `sm_count` counts compute units (a CPU's cores).

    `arch` is what the compiler is told: "sm_90a", "gfx942"; "cpu" for a CPU. `shared_per_block` is the most that one
    block may opt into. `compute_modes` are those that this project has for the device.
    """

    kind: Literal["cpu", "cuda", "rocm"]
    name: str
    arch: str
    sm_count: int
    warp_size: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    memory_bytes: int
    l2_bytes: int
    compute_modes: tuple[str, ...]

    @cached_property
    def capability(self) -> int:
        """Ten times the CUDA compute capability: 90 for "sm_90a"; 0 where the device has none."""
        return int("".join(filter(str.isdigit, self.arch))) if self.kind == "cuda" else 0

    @property
    def has_mma(self) -> bool:
        """Whether it has mma.sync of TF32, bfloat16 and float64, and cp.async: compute capability 8.0 and later."""
        return self.capability >= 80

    @property
    def has_wgmma(self) -> bool:
        """Whether it has Hopper's wgmma, copy engine and clusters, which are in sm_90a alone."""
        return self.arch == "sm_90a"

    @classmethod
    @cache
    def cpu(cls) -> DeviceSpec:
        """The CPU: the cores that this process may use, the memory of the machine."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls("cpu", _cpu_name(), "cpu", _cores(), 1, 0, 0, 0, memory, 0, _CPU_MODES)

    @classmethod
    def current(cls) -> DeviceSpec:
        """The device that CuPy uses in this thread. Raises DeviceError where there is none."""
        cupy = _import_cupy()
        with device_errors():
            return cls.of(cupy.cuda.Device().id)

    @classmethod
    @cache
    def of(cls, ordinal: int) -> DeviceSpec:
        """The device of that number. Raises DeviceError where CuPy or the device is missing."""
        cupy = _import_cupy()
        with device_errors():
            properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        return _from_properties(properties, hip=bool(cupy.cuda.runtime.is_hip))

    @classmethod
    def all(cls) -> list[DeviceSpec]:
        """Every CUDA or ROCm device of this machine; none where CuPy or a driver is missing."""
        try:
            cupy = _import_cupy()
            with device_errors():
                return [cls.of(ordinal) for ordinal in range(cupy.cuda.runtime.getDeviceCount())]
        except DeviceError:
            return []


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what CuPy raises into DeviceError and OutOfDeviceMemory."""
    _import_cupy()
    try:
        yield
    except cupy_errors() as error:
        raise device_error(error) from error


@cache
def cupy_errors() -> tuple[type[Exception], ...]:
    """Return what CuPy raises where a device refuses: for an `except`, which asks only where something was raised."""
    cuda = _import_cupy().cuda
    return (
        cuda.memory.OutOfMemoryError,
        cuda.runtime.CUDARuntimeError,
        cuda.driver.CUDADriverError,
        cuda.compiler.CompileException,
    )


def device_error(error: Exception) -> DeviceError | OutOfDeviceMemory:
    """Return the error of ours for one of `cupy_errors`."""
    return (OutOfDeviceMemory if isinstance(error, cupy_errors()[0]) else DeviceError)(str(error))


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CuPy cannot be used: {error}") from error
    return cupy


def _from_properties(properties: dict[str, Any], *, hip: bool) -> DeviceSpec:
    """From `cudaGetDeviceProperties` as CuPy returns it."""
    name = properties["name"].decode()
    shared = int(properties["sharedMemPerBlock"])
    capability = 10 * int(properties["major"]) + int(properties["minor"])
    arch = properties["gcnArchName"].decode().partition(":")[0] if hip else cuda_arch(capability)
    return DeviceSpec(
        kind="rocm" if hip else "cuda",
        name=name,
        arch=arch,
        sm_count=int(properties["multiProcessorCount"]),
        warp_size=int(properties["warpSize"]),
        shared_per_block=max(shared, int(properties.get("sharedMemPerBlockOptin", 0))),
        shared_per_sm=max(shared, int(properties.get("sharedMemPerMultiprocessor", 0))),
        registers_per_sm=int(properties.get("regsPerMultiprocessor", 0)) or int(properties["regsPerBlock"]),
        memory_bytes=int(properties["totalGlobalMem"]),
        l2_bytes=int(properties["l2CacheSize"]),
        compute_modes=rocm_modes(arch) if hip else cuda_modes(capability),
    )


def cuda_arch(capability: int) -> str:
    """The architecture for the compiler, from ten times the compute capability; 9.0 takes its own features."""
    return "sm_90a" if capability == 90 else f"sm_{capability}"


def cuda_modes(capability: int) -> tuple[str, ...]:
    """The compute modes on CUDA, from ten times the compute capability."""
    tensor = _TENSOR_MODES if capability >= 80 else ()
    return (*_CPU_MODES, *tensor, *(_WGMMA_MODES if capability == 90 else ()))


def rocm_modes(arch: str) -> tuple[str, ...]:
    """The compute modes on ROCm, from the architecture's name ("gfx942")."""
    return (*_CPU_MODES, *_MFMA_MODES.get(arch, ()))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


def cuda_device(name: str, capability: int, sms: int, shared_kib: int, memory_gib: int, l2_mib: int) -> DeviceSpec:
    """Return a CUDA device by its data sheet; `capability`: ten times the compute capability, `shared_kib`: of a
    multiprocessor.
    """
    # The block's share is 1 KiB below the multiprocessor's (CUDA C++ programming guide, compute capabilities).
    return DeviceSpec(
        "cuda",
        name,
        cuda_arch(capability),
        sms,
        32,
        (shared_kib - 1) * _KIB,
        shared_kib * _KIB,
        65536,
        memory_gib * _GIB,
        l2_mib * _MIB,
        cuda_modes(capability),
    )


def _rocm(
    name: str, arch: str, units: int, warp: int, shared_kib: int, registers: int, memory_gib: int, l2_mib: int
) -> DeviceSpec:
    shared = shared_kib * _KIB
    modes = rocm_modes(arch)
    return DeviceSpec(
        "rocm", name, arch, units, warp, shared, shared, registers, memory_gib * _GIB, l2_mib * _MIB, modes
    )


KNOWN: Final = {
    "A100": cuda_device("NVIDIA A100", 80, 108, 164, 80, 40),
    "H100": cuda_device("NVIDIA H100", 90, 132, 228, 80, 50),
    "H200": cuda_device("NVIDIA H200", 90, 132, 228, 141, 60),
    "B200": cuda_device("NVIDIA B200", 100, 148, 228, 180, 126),
    "RTX5090": cuda_device("NVIDIA GeForce RTX 5090", 120, 170, 100, 32, 96),
    # 512 KiB of vector registers a compute unit; MI250X's two dies are devices of their own; the L2 is one die's
    # (CDNA 2, 3 and 4 white papers). RDNA 3: 192 KiB of registers for each of two vector units.
    "MI250X": _rocm("AMD Instinct MI250X", "gfx90a", 110, 64, 64, 131072, 64, 8),
    "MI300X": _rocm("AMD Instinct MI300X", "gfx942", 304, 64, 64, 131072, 192, 4),
    "MI355X": _rocm("AMD Instinct MI355X", "gfx950", 256, 64, 160, 131072, 288, 4),
    "RX7900XTX": _rocm("AMD Radeon RX 7900 XTX", "gfx1100", 96, 32, 64, 98304, 24, 6),
}
"""Data-sheet values, for plans without the device."""
