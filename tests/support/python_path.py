"""PYTHONPATH for processes that a test starts: their own folders, and then whatever this process was given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def python_path(*folders: Path) -> str:
    """Return it, `folders` first."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
