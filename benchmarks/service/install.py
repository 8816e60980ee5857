"""The rivals, each in a virtual environment of its own under .venv-rivals (which git ignores).

    python -m benchmarks.service install [triton litserve bentoml]

Only what is missing is installed; --upgrade installs anew. What cannot be installed is said and passed over: the run
says so too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.service.servers import ENVIRONMENTS

PACKAGES = {
    "triton": ("nvidia-pytriton", "tritonclient[http]"),
    "litserve": ("litserve", "numpy"),
    "bentoml": ("bentoml", "numpy"),
}


def base(name):
    """The Python to make an environment of. The python backend of tritonserver runs on the system's libpython, which
    has to fit the standard library that it finds."""
    system = Path("/usr/bin") / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(system) if name == "triton" and system.is_file() else sys.executable


def install(name, *, upgrade=False):
    """True if it is there afterwards."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if upgrade:
        shutil.rmtree(folder, ignore_errors=True)
    if (folder / "complete").is_file():
        return True
    print(f"{name}: {', '.join(PACKAGES[name])}", flush=True)
    # The system's Python may come without pip; this one's installs into the other environment.
    steps = (
        [base(name), "-m", "venv", "--without-pip", "--clear", str(folder)],
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *PACKAGES[name]],
    )
    for step in steps:
        if subprocess.run(step, check=False).returncode:
            print(f"{name} cannot be installed here", file=sys.stderr)
            return False
    (folder / "complete").touch()
    return True


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service install", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--upgrade", action="store_true", help="install them anew")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(PACKAGES):
        parser.error(f"no rival {', '.join(sorted(unknown))}")
    done = [install(name, upgrade=options.upgrade) for name in options.names or PACKAGES]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
