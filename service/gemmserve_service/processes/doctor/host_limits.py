"""The doctor's look at folders and limits: data directory, kernel cache, temporary files, /dev/shm, open files."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Final

import psutil

from gemmserve_kernels.device.compiler import CACHE_VARIABLE, cache_directory
from gemmserve_service.processes.doctor.machine import Finding
from gemmserve_service.runtime.open_files import OpenFiles
from gemmserve_service.runtime.tuning import cpu_count, transfer_processes
from gemmserve_service.store.extents.memfd import arena_ahead_bytes, arena_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gemmserve_service.processes.doctor.machine import Level, Machine
    from gemmserve_service.settings import Settings

_LITTLE: Final = 1 << 30
_SMALL_SHM: Final = 32 << 20  # half of what Docker gives a container unasked
_SHM: Final = "/dev/shm"  # noqa: S108 (looked at, not written)


def limits(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Every folder and limit."""
    yield from data_dir(settings.data_dir, machine)
    yield from kernel_cache(machine)
    yield from temporary(settings)
    yield from shared_memory(machine)
    yield from open_files(settings)
    yield from transfers(settings)


def data_dir(folder: Path, machine: Machine) -> Iterator[Finding]:
    """Whether the server can keep its arrays, and how much room there is."""
    existing = _existing(folder)
    if not _writable(existing):
        yield Finding("error", "data", f"{folder}: no permission to write {existing}", _write_advice(existing, machine))
        return
    free = shutil.disk_usage(existing).free
    level: Level = "note" if free < _LITTLE else "ok"
    advice = "a full disk refuses uploads and jobs with 507" if level == "note" else ""
    yield Finding(level, "data", f"{folder}: {free / 1e9:.1f} GB free", advice)


def kernel_cache(machine: Machine) -> Iterator[Finding]:
    """Whether compiled kernels can be kept."""
    folder = cache_directory()
    existing = _existing(folder)
    if not _writable(existing):
        text = f"{folder}: no permission to write {existing}: kernels are compiled again in every process"
        advice = f"{_write_advice(existing, machine)}; or set {CACHE_VARIABLE}"
        yield Finding("note", "kernels", text, advice)


def temporary(settings: Settings) -> Iterator[Finding]:
    """Whether there is a place for the control socket: a read-only root file system has none of its own."""
    try:
        folder = str(settings.runtime_dir) if settings.runtime_dir is not None else tempfile.gettempdir()
    except FileNotFoundError:
        folder = ""
    if not folder or (settings.runtime_dir is not None and not _writable(_existing(settings.runtime_dir))):
        text = f"no folder for the control socket can be written{': ' + folder if folder else ''}"
        advice = "with a read-only root file system give it --tmpfs /tmp, or set GEMMSERVE_RUNTIME_DIR"
        yield Finding("error", "temporary", text, advice)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """The size of /dev/shm: the server's own shared memory does not count against it, that of a driver may."""
    if not machine.exists(_SHM):
        return
    total = shutil.disk_usage(machine.path(_SHM)).total
    if total < _SMALL_SHM:
        advice = f"docker run --shm-size 256m; in Kubernetes an emptyDir of medium Memory at {_SHM}"
        yield Finding("note", "shm", f"{_SHM} has {total / (1 << 20):.0f} MiB, little for a device's driver", advice)


def open_files(settings: Settings) -> Iterator[Finding]:
    """Compare what the limit of open files allows with the connections that the server would take."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the server raises its soft limit to it
    files = OpenFiles.of(settings, hard)
    if files.connections < settings.max_connections:
        advice = (
            f"raise the hard limit to {files.wanted} or more (ulimit -Hn, LimitNOFILE, --ulimit nofile=16384), or "
            f"lower GEMMSERVE_MAX_CONNECTIONS from {settings.max_connections}"
        )
        yield Finding("note", "files", str(files), advice)
    else:
        yield Finding("ok", "files", str(files))


def transfers(settings: Settings) -> Iterator[Finding]:
    """Whether the transfer processes can run, and have processors to run on."""
    count, processors = transfer_processes(settings.transfer_processes), cpu_count()
    if not count:
        return
    if sys.platform != "linux":
        yield Finding("error", "transfers", "transfer processes need Linux", "set GEMMSERVE_TRANSFER_PROCESSES to 0")
    elif count >= processors:
        text = f"{count} transfer processes beside the front, and {processors} processors"
        yield Finding("note", "transfers", text, "fewer leave one to the front: GEMMSERVE_TRANSFER_PROCESSES")
    else:
        yield Finding("ok", "transfers", f"{count} processes move large bodies")


def arena(settings: Settings, devices: Sequence[str]) -> Iterator[Finding]:
    """How much memory results may take on their way from these devices to files, and whether it is there."""
    if all(device.startswith("cpu") for device in devices):
        return
    nbytes = arena_bytes(settings, devices)
    if not nbytes:
        yield Finding("note", "arena", "none: results go from devices to files", "set GEMMSERVE_HOST_ARENA_BYTES")
        return
    ahead = arena_ahead_bytes(settings, nbytes)
    text = f"{nbytes / 1e9:.1f} GB of memory for results on their way to files, {ahead / 1e9:.1f} GB registered ahead"
    available = psutil.virtual_memory().available
    if nbytes > available:
        advice = (
            f"only {available / 1e9:.1f} GB are free: give GEMMSERVE_HOST_ARENA_BYTES, or the process may be killed"
        )
        yield Finding("note", "arena", text, advice)
    else:
        yield Finding("ok", "arena", text)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _write_advice(folder: Path, machine: Machine) -> str:
    """Return the advice for making the folder writable."""
    if machine.container:
        return (
            f"the volume is another user's: on the machine, `chown -R {os.getuid()}:{os.getgid()}` its folder, "
            f"or start the container with --user {folder.stat().st_uid}"
        )
    return "choose another --data-dir" if folder.is_dir() else f"{folder} is no folder"
