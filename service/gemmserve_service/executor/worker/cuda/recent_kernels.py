"""Kernels that were used last on an architecture, on record in the cache, so that the next process loads them first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.device.compiler import KernelSource, cache_directory, publish

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST: Final = 256
"""Kernels on record: those of some fifty kinds of products."""


def _file_name(arch: str) -> str:
    return f"recent-{arch}.json"


def read(arch: str) -> list[tuple[KernelSource, str]]:
    """Return source and entry of each, the latest first; none where the record cannot be read."""
    try:
        document = json.loads((cache_directory() / _file_name(arch)).read_text(encoding="utf-8"))
        return [
            (KernelSource(each["name"], tuple((str(key), str(value)) for key, value in each["defines"])), each["entry"])
            for each in document
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write(arch: str, used: Iterable[tuple[KernelSource, str]]) -> None:
    """Put these on record before those that are there, for all processes that share the cache: of two that write at the
    same time, one's additions may be lost. Raises OSError.
    """
    kept = list(dict.fromkeys((*used, *read(arch))))[:_MOST]
    document = [{"name": source.name, "defines": source.defines, "entry": entry} for source, entry in kept]
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    publish(directory, _file_name(arch), json.dumps(document).encode())
