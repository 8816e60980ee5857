"""Memory that is a file (memfd): whether there is such, and the host arena's. The supervisor loads this."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime.tuning import host_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gemmserve_service.settings import Settings

PANEL_ROW_BYTES: Final = 96 << 10
"""Bytes of a device's row in the table of panels (`executor.worker.blocks.panel_table`)."""
_LARGE_PAGE: Final = 2 << 20
_SHARE: Final = 4  # of the machine's memory, unless settings say otherwise
_AHEAD_SHARE: Final = 8  # likewise


def memory_extents_supported() -> bool:
    """Linux has memfd and /proc, through which a worker opens one."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").exists()


def arena_bytes(settings: Settings, devices: Iterable[str]) -> int:
    """Return the bytes of an arena for these devices; 0: there is to be none."""
    if all(device.startswith("cpu") for device in devices) or not memory_extents_supported():
        return 0
    wanted = host_memory() // _SHARE if settings.host_arena_bytes is None else settings.host_arena_bytes
    return wanted // _LARGE_PAGE * _LARGE_PAGE


def arena_ahead_bytes(settings: Settings, nbytes: int) -> int:
    """Return how many of an arena's `nbytes` a worker touches and registers before any is used."""
    bound = host_memory() // _AHEAD_SHARE if settings.arena_ahead_bytes is None else settings.arena_ahead_bytes
    return min(nbytes, bound)


def create_memory(nbytes: int, name: str = "gemmserve") -> int:
    """Return the descriptor of a new memfd, which takes memory as it is written. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def shares_panels(settings: Settings, devices: Sequence[str]) -> bool:
    """Return whether devices of this host may share panels of large products."""
    able = sum(device.startswith("cuda") for device in devices) > 1
    return able and settings.peer_copies != "never" and memory_extents_supported()


def create_panel_table(rows: int) -> int:
    """Return the descriptor of an empty table of panels. Raises OSError."""
    return create_memory(rows * PANEL_ROW_BYTES, "gemmserve-panels")


def create_arena(nbytes: int) -> int:
    """Return the descriptor of an arena's memory. Raises OSError."""
    return create_memory(nbytes, "gemmserve-arena")
