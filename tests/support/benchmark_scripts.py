"""The modules of benchmarks/kernels, which are no package, and of the packages beside it, which nobody installs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "kernels"
STAND_IN = ROOT / "tests" / "support" / "cupy_on_numpy"


def on_stand_in(script, *arguments, **variables):
    """Runs a script in a process of its own where NumPy is in CuPy's place."""
    environment = {**os.environ, "CUPY_ON_NUMPY_L2_MIB": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("client", "kernels"))
    command = [sys.executable, str(STAND_IN / "run.py"), str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


def load(*names):
    """Those modules, in that order."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return [importlib.import_module(name) for name in names]


def load_service(*names):
    """Those modules of the package benchmarks.service, in that order."""
    return load_package("benchmarks.service", *names)


def load_package(package, *names):
    """Those modules of a package below benchmarks, in that order."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return [importlib.import_module(f"{package}.{name}") for name in names]
