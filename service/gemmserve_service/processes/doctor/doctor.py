"""Findings on versions, drivers, compilers, devices, the data directory, and a verified product on each device."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.processes.doctor.accelerators import drivers, libraries
from gemmserve_service.processes.doctor.host_limits import arena, limits
from gemmserve_service.processes.doctor.machine import Finding, Machine
from gemmserve_service.processes.doctor.tier import tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels import DeviceSpec
    from gemmserve_service.settings import Settings

_PACKAGES: Final = ("gemmserve", "numpy", "httpx", "fastapi", "uvicorn", "uvloop", "pydantic", "rich")


def examine(settings: Settings, machine: Machine | None = None) -> list[Finding]:
    """Examine everything; see Finding for what an error is."""
    from gemmserve_kernels import DeviceSpec

    machine = machine or Machine()
    accelerators = [f"{spec.kind}:{ordinal}" for ordinal, spec in enumerate(DeviceSpec.all())]
    return [
        *_versions(machine),
        *drivers(machine),
        *libraries(machine),
        *_cxx(machine),
        *limits(settings, machine),
        *arena(settings, accelerators if settings.device == "auto" else settings.device.split(",")),
        *tier(settings),
        *_devices(settings, accelerators),
    ]


def _versions(machine: Machine) -> Iterator[Finding]:
    where = ", in a container" if machine.container else ""
    text = f"{platform.python_version()} at {sys.executable}, {platform.platform()}{where}"
    yield Finding("ok", "python", text)
    versions = {name: machine.version(name) for name in _PACKAGES}
    yield Finding("ok", "packages", ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items()))


def _cxx(machine: Machine) -> Iterator[Finding]:
    """The C++ compilers: hipcc is CuPy's on ROCm, the others run the kernels on the CPU in the test suite."""
    found = [f"{name} at {path}" for name in ("hipcc", "g++", "clang++") if (path := machine.which(name))]
    if zig := machine.version("ziglang"):
        found.append(f"ziglang {zig}")
    text = ", ".join(found) or "none: needed by the test suite, and by CuPy on ROCm (hipcc)"
    yield Finding("ok" if found else "note", "c++", text)


def _devices(settings: Settings, accelerators: list[str]) -> Iterator[Finding]:
    for name in (*accelerators, "cpu"):
        yield from _verify(name, settings)


def _verify(device: str, settings: Settings) -> Iterator[Finding]:
    """A verified product on a device, and what memory it has for large ones."""
    from gemmserve_kernels import DeviceError
    from gemmserve_service.executor.worker.backend import DeviceUnavailable
    from gemmserve_service.executor.worker.checks.selftest import verified_error
    from gemmserve_service.executor.worker.open_backend import open_backend

    try:
        backend = open_backend(device, cache_share=0.0, memory_bytes=settings.device_memory_bytes)
        error = verified_error(backend)
    except (DeviceUnavailable, DeviceError, MemoryError) as failure:
        yield Finding("error", device, str(failure))
        return
    spec: dict[str, Any] = backend.spec_fields()
    modes = ", ".join(spec["compute_modes"])
    memory = spec["memory_bytes"] / (1 << 30)
    text = f"{spec['name']} ({spec['arch']}), {memory:.0f} GiB; modes {modes}; verified product, error {error:.1e}"
    yield Finding("ok", device, text)
    yield _large(device, backend.spec, backend.planned_bytes, settings.block_side)


def _large(device: str, spec: DeviceSpec, planned_bytes: int, side: int) -> Finding:
    """Say what a device's memory means for large products. `planned_bytes` 0: nothing bounds what they take of it."""
    from gemmserve_kernels.blocks.grid import GridRule
    from gemmserve_kernels.blocks.reach import reach_of

    budget = planned_bytes or spec.memory_bytes
    reach = reach_of(spec, budget, GridRule(side))
    whole = f"{budget / 1e9:.3g} GB for large products"
    if not reach.streamed:
        advice = "set GEMMSERVE_DEVICE_MEMORY_BYTES higher, or not at all"
        return Finding("note", device, f"{whole}: too little for a complex64 one of {side} x {side} x {side}", advice)
    lies = f"operands of n x n x n up to n = {reach.resident} lie there, " if reach.resident else ""
    text = f"{whole}: complex64 {lies}panels of larger ones stream through up to n = {reach.streamed}"
    return Finding("ok", device, text)
