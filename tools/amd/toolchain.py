"""AMD's run-time compiler (HIPRTC) and LLVM's disassembler on a machine without AMD hardware or software.

They come from Debian's packages (sid and experimental: ROCm 7.2), unpacked into a directory of their own; nothing is
installed, no root is needed. The libraries want a newer C library than this machine may have, which is among the
packages: a Python process is started through their own dynamic loader (see `command`).

Packages come from the archive that this machine's apt is set up for, or from $GEMMSERVE_DEBIAN_MIRROR. The directory is
$GEMMSERVE_AMD_COMPILER, or gemmserve/amd-compiler in the user's cache directory; what is there is taken as it is.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

MIRROR_VARIABLE: Final = "GEMMSERVE_DEBIAN_MIRROR"
DIRECTORY_VARIABLE: Final = "GEMMSERVE_AMD_COMPILER"
_COMPILER: Final = "amd-compiler"
_PACKAGES: Final = ("libhiprtc7", "libamdhip64-7", "libamd-comgr3")
_SUITES: Final = ("sid", "experimental")
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_STAMP: Final = "packages.txt"
_LOADER: Final = "ld-linux-x86-64.so.2"
_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"


class ToolchainError(RuntimeError):
    """The compiler cannot be had here; the message says what is missing."""


def directory(name: str = _COMPILER) -> Path:
    """Where the packages are unpacked."""
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return Path(chosen) if name == _COMPILER else Path(chosen).parent / name
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gemmserve" / name


def ensure(more: tuple[str, ...] = (), name: str = _COMPILER) -> Path:
    """The directory with the compiler in it, fetched unless it is there. Raises ToolchainError.

    `more`: packages beside it, in a directory of another `name`.
    """
    root = directory(name)
    if (root / _STAMP).is_file():
        return root
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise ToolchainError(f"AMD's compiler comes for x86-64 Linux, and this is {platform.machine()}")
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise ToolchainError(f"{tool} is missing: AMD's compiler comes from Debian's packages")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix="amd-compiler-") as folder:
        unpacked = _fetch(Path(folder), (*_PACKAGES, *more))
        if root.exists():
            shutil.rmtree(root)
        unpacked.rename(root)
    return root


def packages(root: Path) -> str:
    """Names and versions of what is in `root`, a line each."""
    return (root / _STAMP).read_text(encoding="utf-8")


def command(root: Path, *more: Path) -> list[str]:
    """The beginning of a command line that runs this Python with the libraries of `root`, and of the folders `more`."""
    loader = next(iter(sorted(root.rglob(_LOADER))), None)
    if loader is None:
        raise ToolchainError(f"{root} has no {_LOADER}: remove it, and it will be fetched again")
    python = str(Path(sys.executable).resolve())
    paths = ":".join(map(str, (root / _LIBRARIES, *more)))
    return [str(loader), "--library-path", paths, python, "-I", "-S"]


def library(root: Path, pattern: str) -> Path:
    """The one library of that name. Raises ToolchainError."""
    found = sorted((root / _LIBRARIES).glob(pattern))
    if not found:
        raise ToolchainError(f"{root} has no {pattern}: remove it, and it will be fetched again")
    return found[0]


def _mirror() -> str:
    """The Debian archive that apt is set up for."""
    if chosen := os.environ.get(MIRROR_VARIABLE):
        return chosen
    asked = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    found = [line.split()[-1] for line in lines if line.startswith("Debian ") and "security" not in line]
    if not found:
        found = _configured()
    if not found:
        raise ToolchainError(f"apt is set up for no Debian archive: set {MIRROR_VARIABLE} to the address of one")
    return found[0].rstrip("/")


def _configured() -> list[str]:
    """Addresses in apt's lists of sources, for a machine where apt has not fetched any index yet."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    words = [word for file in files if file.is_file() for word in file.read_text(encoding="utf-8").split()]
    schemes = ("http:", "https:", "file:", "mirror+")
    return [word for word in words if word.startswith(schemes) and word.rstrip("/").endswith("/debian")]


def _fetch(folder: Path, wanted: tuple[str, ...]) -> Path:
    """Downloads and unpacks into a directory below `folder`, by an apt that knows nothing but our two suites."""
    mirror = _mirror()
    for name in ("state/lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    signed = f" [signed-by={_KEYRING}]" if _KEYRING.is_file() else ""
    (folder / "status").write_text("")
    (folder / "sources.list").write_text("".join(f"deb{signed} {mirror} {suite} main\n" for suite in _SUITES))
    options = {
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        "APT::Get::List-Cleanup": "false",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Check-Valid-Until": "false",
        "Acquire::Check-Date": "false",
        "Acquire::Retries": "3",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    _run([*apt, "update"])
    _run([*apt, "--yes", "--download-only", "-t", _SUITES[-1], "install", *wanted])
    archives = sorted((folder / "cache/archives").glob("*.deb"))
    if not archives:
        raise ToolchainError("apt has downloaded nothing")
    root = folder / "root"
    for archive in archives:
        _run(["dpkg-deb", "--extract", str(archive), str(root)])
    names = [archive.name.removesuffix(".deb") for archive in archives]
    (root / _STAMP).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return root


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{words[0]} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
