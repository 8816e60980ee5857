"""Builds a wheel of kernels compiled ahead of time: `python tools/kernel_wheel.py sm_90a [--out dist]`.

It holds the documented kernels of one architecture (`gemmserve_kernels.precompile`) and nothing else, is installed
beside gemmserve of the same version, without a network if need be, and is found by its entry point. Kernels are
compiled into the kernel cache, unless they are there: NVRTC is needed, no device. The wheel is pure (any Python, any
system) and reproducible: the same kernels make the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from gemmserve_kernels import precompile
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.shipped_kernels import ENTRY_POINTS

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every file in the wheel: the first that a zip archive can say."""


def build(arch: str, kernels: Sequence[Path], version: str, out: Path) -> Path:
    """Write the wheel of these files into the folder `out`; return its path. Raises OSError."""
    package = f"gemmserve_kernels_{arch}"
    info = f"{package}-{version}.dist-info"
    about = f'"""Kernels of gemmserve {version} for {arch}, compiled ahead of time."""\n'
    files: dict[str, bytes] = {f"{package}/__init__.py": about.encode()}
    files |= {f"{package}/{path.name}": path.read_bytes() for path in sorted(kernels)}
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
        f"Summary: Kernels of gemmserve for {arch}, compiled ahead of time\nLicense: Apache-2.0\n"
        f"Requires-Dist: gemmserve=={version}\n"
    ).encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tools/kernel_wheel.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = f"[{ENTRY_POINTS}]\n{arch} = {package}\n".encode()
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return wheel


def _digest(data: bytes) -> str:
    """Return a digest as RECORD has it (binary distribution format, PEP 427)."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("arch", choices=sorted(precompile.DEVICES), help="architecture")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("--first", type=int, metavar="N", help="only the likeliest kernels")
    chosen = parser.parse_args(arguments)
    sources = precompile.documented(chosen.arch)[: chosen.first]
    if precompile.compile_all(chosen.arch, sources):
        sys.exit(1)
    kernels = [path for source in sources if (path := compiler.compiled_file(source, chosen.arch)) is not None]
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    wheel = build(chosen.arch, kernels, version, chosen.out)
    print(f"{wheel}: {len(kernels)} kernels, {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
