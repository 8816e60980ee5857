"""Makes the project's own virtual environment, or finds that it is already right and returns at once.

Standard library only: this runs before anything is installed. `make` calls it; by hand:
``python3 tools/environment.py .venv --extras dev``. What is installed follows from `pyproject.toml`, the extras
asked for, and the machine: the CUDA or ROCm extra where there is a driver, the `ziglang` wheel where tests need a C++
compiler and none is there. A stamp file holds a digest of all that, so a second run installs nothing and needs no
network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ACCELERATORS = ("cuda12", "cuda13", "rocm")
STAMP = "gemmserve-environment.json"

# Oldest Linux driver of each CUDA major version: NVIDIA, CUDA compatibility guide, "minor version compatibility".
CUDA13_DRIVER, CUDA12_DRIVER = 580, 525


def nvidia_driver(proc_version: str | None, smi_output: str | None) -> int | None:
    """The NVIDIA driver's major version, from /proc/driver/nvidia/version or nvidia-smi's text; None: no driver."""
    if proc_version and (found := re.search(r"Kernel Module(?: for \S+)?\s+(\d+)\.\d+", proc_version)):
        return int(found[1])
    if smi_output and (found := re.search(r"^\s*(\d+)\.\d+", smi_output)):
        return int(found[1])
    return None


def accelerator_extra(driver: int | None, *, kfd: bool) -> str | None:
    """The extra for the device that this machine has, or None for a CPU."""
    if driver is not None and driver >= CUDA13_DRIVER:
        return "cuda13"
    if driver is not None and driver >= CUDA12_DRIVER:
        return "cuda12"
    return "rocm" if kfd and driver is None else None


def detected_accelerator() -> str | None:
    """`accelerator_extra` of this machine."""
    proc = Path("/proc/driver/nvidia/version")
    smi = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        smi = answer.stdout if answer.returncode == 0 else None
    return accelerator_extra(
        nvidia_driver(proc.read_text() if proc.exists() else None, smi), kfd=Path("/dev/kfd").exists()
    )


def has_cxx_compiler() -> bool:
    """Whether a C++ compiler is on the path (or named by CXX)."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))


def fingerprint(constraints: Path | None) -> str:
    """Digest of what decides the installed versions, apart from the list of extras."""
    digest = hashlib.sha256(f"{ROOT} {sys.version_info[:2]}".encode())
    for path in (ROOT / "pyproject.toml", constraints):
        if path is not None:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def usable(venv: Path) -> bool:
    """Whether `venv` is a working environment of this Python version in this place (a moved one is not)."""
    probe = "import sys, pip; print(sys.prefix, *sys.version_info[:2])"
    try:
        answer = subprocess.run([venv / "bin" / "python", "-c", probe], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return answer.stdout.strip() == f"{venv} {sys.version_info[0]} {sys.version_info[1]}"


def read_stamp(venv: Path, wanted_fingerprint: str) -> tuple[set[str], set[str]]:
    """The extras that are installed and those that could not be, as the stamp of this fingerprint says."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return set(), set()
    return (
        (set(stamp["extras"]), set(stamp["failed"])) if stamp["fingerprint"] == wanted_fingerprint else (set(), set())
    )


def create(venv: Path) -> None:
    """Makes `venv` with this interpreter, or exits with a message that says what to install."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file is what tells an older Python so)
        sys.exit(f"gemmserve needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable})")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    print(f"environment: {venv} with Python {version}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", venv], capture_output=True, text=True, check=False)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        sys.exit(
            f"{made.stdout}{made.stderr}\nPython {version} could not make a virtual environment. On Debian and Ubuntu:"
            f" apt install python{version}-venv; elsewhere install Python's venv and ensurepip modules,"
            " or name another interpreter: make PYTHON=/path/to/python3"
        )


def pip_install(venv: Path, extras: set[str], packages: list[str], constraints: Path | None) -> bool:
    """Installs the project, editable, with `extras`; True when pip succeeded.

    Modules are compiled to bytecode when they are first imported, which most modules of large packages never are.
    """
    command: list[str | Path] = [
        venv / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    if constraints is not None:
        command += ["--constraint", constraints]
    project = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    print(f"environment: installing gemmserve[{','.join(sorted(extras))}] {' '.join(packages)}".rstrip(), flush=True)
    return subprocess.run([*command, "--editable", project, *packages], check=False).returncode == 0


def prepare(venv: Path, extras: set[str], constraints: Path | None) -> None:
    """Brings `venv` to hold at least `extras` and what the machine asks for; exits with a message on failure."""
    if not usable(venv):
        create(venv)
    current = fingerprint(constraints)
    present, failed = read_stamp(venv, current)
    found = None if extras & set(ACCELERATORS) else detected_accelerator()
    detected = {found} - failed if found else set()
    if present and extras | detected <= present:
        return
    wanted = extras | present
    packages = [] if "dev" not in wanted or has_cxx_compiler() else ["ziglang"]
    if detected and not pip_install(venv, wanted | detected, packages, constraints):
        print(f"environment: {', '.join(detected)} could not be installed; going on with the CPU alone", flush=True)
        failed |= detected
        detected = set()
    if not detected and not pip_install(venv, wanted, packages, constraints):
        sys.exit("environment: pip could not install gemmserve; its message is above")
    stamp = {"fingerprint": current, "extras": sorted(wanted | detected), "failed": sorted(failed)}
    (venv / STAMP).write_text(json.dumps(stamp))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    parser.add_argument("--extras", default="", help="comma-separated extras of pyproject.toml")
    parser.add_argument("--constraints", type=Path, help="a pip constraints file")
    options = parser.parse_args()
    prepare(options.venv.absolute(), {extra for extra in options.extras.split(",") if extra}, options.constraints)


if __name__ == "__main__":
    main()
