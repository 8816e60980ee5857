"""Brings the kernels that were compiled ahead of time into the kernel cache, where a release or an image ships some.

Their names are digests of what they were compiled from, so files from several releases lie side by side in a cache that
lives longer than any of them: what is missing is copied, and nothing is ever replaced.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from gemmserve_kernels.device.compiler import cache_directory

SEED_VARIABLE: Final = "GEMMSERVE_KERNEL_SEED"
"""Names the folder with kernels compiled ahead of time; unset: there is none."""


def seed_cache() -> int:
    """Copies the kernels of $GEMMSERVE_KERNEL_SEED that the cache lacks; returns how many. Raises OSError where the
    cache cannot be written, or the seed cannot be read.
    """
    named = os.environ.get(SEED_VARIABLE)
    if not named:
        return 0
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    present = {path.name for path in cache.iterdir()}
    missing = [path for path in Path(named).glob("*.cubin") if path.name not in present]
    for path in missing:
        _copy(path, cache)
    return len(missing)


def _copy(source: Path, folder: Path) -> None:
    """Whole or not at all, whoever else does the same."""
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".cubin")
    os.close(handle)
    try:
        shutil.copyfile(source, temporary)
        Path(temporary).replace(folder / source.name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
