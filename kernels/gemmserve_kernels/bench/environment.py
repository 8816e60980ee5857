"""Environment of a measurement: published figures carry it."""

from __future__ import annotations

import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gemmserve_kernels.device.spec import DeviceSpec


def environment(spec: DeviceSpec | None) -> dict[str, Any]:
    """Device, driver and library versions; None for a server, of which only this side is known."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    if spec is None:
        return found
    found |= {"device": spec.name, "arch": spec.arch, "kind": spec.kind}
    if spec.kind == "cpu":
        return found | {"cores": spec.sm_count, "blas": _blas()}
    import cupy

    runtime = cupy.cuda.runtime
    return found | {
        "cupy": cupy.__version__,
        "driver": _driver() or runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "blas": f"{'rocBLAS' if runtime.is_hip else 'cuBLAS'} {_vendor_version(cupy)}",
        "sm_count": spec.sm_count,
        "memory_bytes": spec.memory_bytes,
    }


def _driver() -> str | None:
    """The NVIDIA kernel module's version, such as 580.159.04; None where it does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return driver_version(text)


def driver_version(text: str) -> str | None:
    """From the first line of /proc/driver/nvidia/version, which also names the processor (x86_64) and has a date."""
    found = re.search(r"Kernel Module.*?\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def _vendor_version(cupy: Any) -> int:
    from cupy.cuda import cublas

    return int(cublas.getVersion(cupy.cuda.device.get_cublas_handle()))


def _blas() -> str:
    """Name and version of NumPy's BLAS, as its build recorded them."""
    config = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"] if config else {}
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
