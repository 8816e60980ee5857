"""Folders of kernels that were compiled ahead of time, where a release, an image or a wheel ships some.

Files bear the names by which `compiler` looks them up, digests of what they were compiled from, and are loaded from
where they lie: a folder of another release is merely of no use.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

SEED_VARIABLE: Final = "GEMMSERVE_KERNEL_SEED"
"""Names folders with kernels compiled ahead of time, separated as in PATH; unset: there are none."""
ENTRY_POINTS: Final = "gemmserve.kernels"
"""Group of entry points whose values are packages that hold such kernels, as wheels of tools/kernel_wheel.py do."""

log = logging.getLogger(__name__)


def folders() -> tuple[Path, ...]:
    """Return the folders of $GEMMSERVE_KERNEL_SEED, then those of installed wheels."""
    named = os.environ.get(SEED_VARIABLE, "")
    return (*(Path(folder) for folder in named.split(os.pathsep) if folder), *_installed())


@cache
def _installed() -> tuple[Path, ...]:
    found: list[Path] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda each: each.name):
        try:
            found += map(Path, entry.load().__path__)
        except ImportError as error:
            log.warning("kernels of %s cannot be used: %s", entry.value, error)
    return tuple(found)
