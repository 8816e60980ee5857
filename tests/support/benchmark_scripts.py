"""The modules of benchmarks/kernels, which are no package."""

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
