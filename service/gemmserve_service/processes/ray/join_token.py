"""Token with which workers join, from the file that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def read_token(path: Path | None) -> str | None:
    """Return the token; None without a file. Raises OSError, ValueError for a file with nothing in it."""
    if path is None:
        return None
    token = path.read_text("utf-8").strip()
    if not token:
        raise ValueError(f"{path} is empty")
    return token
