"""Makes the lock files of the images again: `make lock`, or `python tools/lock.py` where uv is installed.

Each file under deploy/locks holds every package of its extras, direct or not, at one version with the hashes of its
files, for every Python that the project supports. The versions follow pyproject.toml and .ci/constraints.txt.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "locks"
EXTRAS = {
    "cpu": ("server", "cli"),
    "cuda13": ("server", "cli", "cuda13"),
    "ray": ("server", "cli", "ray"),
    "rocm": ("server", "cli", "rocm"),
}
"""Lock file by the extras that it is for."""
TRACING = "deploy/locks/tracing.in"
"""What the images have besides."""
BUILD = "build"
"""The lock of what makes the wheel: pyproject.toml's build-system, and pip."""


def lock(name: str, *sources: str) -> None:
    """Writes one lock file. Exits with uv's message where the requirements cannot be met."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--constraint", ".ci/constraints.txt"]
    done = subprocess.run(
        [*command, "--output-file", str(FOLDER / f"{name}.txt"), *sources], cwd=ROOT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{name}: uv could not lock it; its message is above")
    print(f"deploy/locks/{name}.txt")


def main() -> None:
    """Command line."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, extras in EXTRAS.items():
        lock(name, "pyproject.toml", TRACING, *(f"--extra={extra}" for extra in extras))
    lock(BUILD, "deploy/locks/build.in")


if __name__ == "__main__":
    main()
