"""CuPy's ROCm wheel with its libraries, as far as it goes without a device: `python -m amd.wheel`, or `make amd-cupy`.

Imports the wheel, has it compile kernels of ours through its binding of HIPRTC, the way they are compiled on a device,
and shows where it stops. The libraries that the wheel is linked with come from Debian's packages as the compiler does
(`toolchain`): 1 GB to fetch, 2 GB on disk. One is in no package, ROCm's tracer, of which CuPy wants two functions for
its profiler alone: a stand-in is compiled for these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from amd import kernels, toolchain

_LIBRARIES: Final = ("librocfft0", "libhipfft0", "librocsolver0")
_WHEEL: Final = "cupy-rocm-7-0>=14,<15"
_ROOT: Final = Path(__file__).parents[2]
_TRACER: Final = "libroctracer64.so.4"
_TRACER_SOURCE: Final = "int roctracer_start(void) { return -1; }\nint roctracer_stop(void) { return -1; }\n"
_TRACER_MAP: Final = "ROCTRACER_4.0 { global: roctracer_*; };\n"
_SAMPLES: Final = 3
"""Kernels of each architecture to compile: the last ones of the list, of matrix units where there are any."""


def _stand_in(folder: Path) -> None:
    """The tracer's two functions, which say that they have failed."""
    folder.mkdir(exist_ok=True)
    if (folder / _TRACER).is_file():
        return
    source, versions = folder / "tracer.c", folder / "tracer.map"
    source.write_text(_TRACER_SOURCE)
    versions.write_text(_TRACER_MAP)
    compiler = os.environ.get("CC", "cc")
    options = ["-shared", "-fPIC", f"-Wl,-soname,{_TRACER}", f"-Wl,--version-script={versions}"]
    subprocess.run([compiler, *options, str(source), "-o", str(folder / _TRACER)], check=True)


def _wheel(folder: Path) -> None:
    """The wheel and what it depends on, by pip."""
    if not (folder / "cupy").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", str(folder), _WHEEL], check=True)


def main() -> int:
    """0 where the wheel goes as far as it can without a device."""
    began = time.monotonic()
    try:
        root = toolchain.ensure(_LIBRARIES, "amd-cupy")
    except toolchain.ToolchainError as error:
        print(f"CuPy's libraries cannot be had: {error}", file=sys.stderr)
        return 2
    tracer, packages = root / "tracer", root / "wheel"
    _stand_in(tracer)
    _wheel(packages)
    fetched = time.monotonic() - began
    sources = [
        {"arch": arch, "label": case.label, "entry": case.entry, "name": case.source.name, "text": case.source.text}
        for arch in sorted(kernels.SPECS)
        for case in kernels.cases(arch)[-_SAMPLES:]
    ]
    paths = [str(packages), str(_ROOT / "kernels"), str(_ROOT / "tools")]
    done = subprocess.run(
        [*toolchain.command(root, tracer), str(Path(__file__).with_name("wheel_worker.py")), *paths],
        input=json.dumps(sources), text=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    print(f"CuPy's ROCm wheel: {seconds:.0f} s, {fetched:.0f} s of them to get it and its libraries")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
