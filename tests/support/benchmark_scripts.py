"""The modules of benchmarks/kernels, which are no package, and those of benchmarks/service, which nobody installs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "kernels"


def load(*names):
    """Those modules, in that order."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return [importlib.import_module(name) for name in names]


def load_service(*names):
    """Those modules of the package benchmarks.service, in that order."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return [importlib.import_module(f"benchmarks.service.{name}") for name in names]
