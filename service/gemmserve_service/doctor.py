"""What is here: versions, drivers, compilers, devices, the data directory, and a verified product on each device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_service.settings import Settings

_PACKAGES: Final = ("gemmserve", "numpy", "httpx", "fastapi", "uvicorn", "uvloop", "pydantic", "rich")
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy")
_LITTLE: Final = 1 << 30

Level = Literal["ok", "note", "error"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it."""

    level: Level
    subject: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok   ", "note": "note ", "error": "ERROR"}[self.level]
        advice = f"\n        {self.advice}" if self.advice else ""
        return f"{mark} {self.subject:<12} {self.text}{advice}"

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def examine(settings: Settings) -> list[Finding]:
    """Looks at everything; an "error" is what keeps a server from running here."""
    return [
        *_versions(),
        *_driver(),
        *_compilers(),
        *_cxx(),
        *_data_dir(settings.data_dir),
        *_devices(),
    ]


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    versions = {name: _version(name) for name in _PACKAGES}
    yield Finding("ok", "packages", ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> Iterator[Finding]:
    found = False
    if shutil.which("nvidia-smi"):
        found = True
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603 (fixed arguments)
        if answer.returncode:
            yield Finding("note", "nvidia", "nvidia-smi fails: " + (answer.stdout + answer.stderr).strip())
        for line in answer.stdout.splitlines() if not answer.returncode else []:
            yield Finding("ok", "nvidia", line)
    if Path("/dev/kfd").exists():
        found = True
        if os.access("/dev/kfd", os.R_OK | os.W_OK):
            yield Finding("ok", "amd", "/dev/kfd can be used")
        else:
            advice = "add this user to the groups render and video"
            yield Finding("note", "amd", "no permission on /dev/kfd", advice)
    if not found:
        yield Finding("note", "driver", "no NVIDIA or AMD driver: products run on the CPU")
        return
    if importlib.util.find_spec("cupy") is None:
        extra = "cuda13 (or cuda12, for a driver before 580)" if shutil.which("nvidia-smi") else "rocm"
        yield Finding("note", "cupy", "not installed: the device is not used", f"install the extra gemmserve[{extra}]")


def _cxx() -> Iterator[Finding]:
    """The C++ compilers: hipcc is CuPy's on ROCm, the others run the kernels on the CPU in the test suite."""
    found = [f"{name} at {path}" for name in ("hipcc", "g++", "clang++") if (path := shutil.which(name))]
    if zig := _version("ziglang"):
        found.append(f"ziglang {zig}")
    text = ", ".join(found) or "none: needed by the test suite, and by CuPy on ROCm (hipcc)"
    yield Finding("ok" if found else "note", "c++", text)


def _compilers() -> Iterator[Finding]:
    cupy_name = next((name for name in _CUPY if _version(name)), None)
    if cupy_name is None:
        yield Finding("note", "cupy", "not installed: needed for CUDA and ROCm devices only")
        return
    try:
        from cupy.cuda import nvrtc

        version = ".".join(map(str, nvrtc.getVersion()))
    except (ImportError, RuntimeError, OSError) as error:
        yield Finding("error", "nvrtc", f"{cupy_name} {_version(cupy_name)}: {error}", "reinstall the CUDA extra")
        return
    yield Finding("ok", "nvrtc", f"{version}, through {cupy_name} {_version(cupy_name)}")


def _data_dir(folder: Path) -> Iterator[Finding]:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("error", "data", f"{folder}: no permission to write {existing}", "choose another --data-dir")
        return
    free = shutil.disk_usage(existing).free
    level: Level = "note" if free < _LITTLE else "ok"
    yield Finding(level, "data", f"{folder}: {free / 1e9:.1f} GB free")


def _devices() -> Iterator[Finding]:
    from gemmserve_kernels import DeviceSpec

    names = [f"{spec.kind}:{ordinal}" for ordinal, spec in enumerate(DeviceSpec.all())]
    for name in (*names, "cpu"):
        yield _verify(name)


def _verify(device: str) -> Finding:
    from gemmserve_kernels import DeviceError
    from gemmserve_service.worker.device import DeviceUnavailable, open_backend
    from gemmserve_service.worker.selftest import verified_error

    try:
        backend = open_backend(device, cache_share=0.0)
        error = verified_error(backend)
    except (DeviceUnavailable, DeviceError, MemoryError) as failure:
        return Finding("error", device, str(failure))
    spec: dict[str, Any] = backend.spec_fields()
    modes = ", ".join(spec["compute_modes"])
    memory = spec["memory_bytes"] / (1 << 30)
    text = f"{spec['name']} ({spec['arch']}), {memory:.0f} GiB; modes {modes}; verified product, error {error:.1e}"
    return Finding("ok", device, text)
