"""Listening sockets of the supervisor: the ports, the Unix sockets, and in a private folder those of its children."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime.start_error import StartError
from gemmserve_service.runtime.unix_sockets import PATH_MAX, listen_unix

if TYPE_CHECKING:
    from contextlib import ExitStack

    from gemmserve_service.settings import Settings

_BACKLOG: Final = 2048


def listen(host: str, port: int) -> socket.socket:
    """A TCP port; 0 picks a free one. Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"cannot listen on {host}: {error.strerror}") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def listen_here(settings: Settings, stack: ExitStack) -> tuple[socket.socket | None, socket.socket | None]:
    """The Unix socket and the one for descriptors, where settings and system have them."""
    if settings.uds is None:
        return None, None
    # Here, and not above: they bring NumPy, which the supervisor has no other use for.
    from gemmserve.wire import DESCRIPTORS_SUFFIX
    from gemmserve_service.store.extents.memfd import memory_extents_supported

    mode = int(settings.uds_mode, 8)
    unix = listen_unix(settings.uds, mode, stack)
    if not memory_extents_supported():
        return unix, None
    beside = settings.uds.with_name(settings.uds.name + DESCRIPTORS_SUFFIX)
    return unix, listen_unix(beside, mode, stack, kind=socket.SOCK_SEQPACKET)


def runtime_folder(settings: Settings, stack: ExitStack) -> Path:
    """A private folder with a short path, whatever the data directory's is.

    Its name follows from the data directory, whose lock is held: what a killed server left is found and used again.
    """
    try:
        base = Path(tempfile.gettempdir()) if settings.runtime_dir is None else settings.runtime_dir
        return _private_folder(base, settings.data_dir, stack)
    except OSError as error:
        raise StartError(
            f"no folder for the control socket: {error.strerror or error}; set GEMMSERVE_RUNTIME_DIR, or give a "
            "container whose root file system is read-only --tmpfs /tmp"
        ) from error


def _private_folder(base: Path, data_dir: Path, stack: ExitStack) -> Path:
    tag = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
    folder = base / f"gemmserve-{os.getuid()}-{tag}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StartError(f"{folder} is not a private folder of this user: set GEMMSERVE_RUNTIME_DIR")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def control_socket(path: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """The socket that workers connect to, or of another kind for others. Raises StartError."""
    if len(os.fsencode(path)) > PATH_MAX:
        raise StartError(f"{path} is too long for a Unix socket ({PATH_MAX} bytes): set GEMMSERVE_RUNTIME_DIR")
    Path(path).unlink(missing_ok=True)
    control = socket.socket(socket.AF_UNIX, kind)
    control.bind(path)
    control.listen(_BACKLOG)
    return control


def transfer_socket(path: str) -> socket.socket:
    """The socket that transfer processes connect to. Raises StartError."""
    if sys.platform != "linux":
        raise StartError("transfer processes need Linux: set GEMMSERVE_TRANSFER_PROCESSES to 0")
    return control_socket(path, socket.SOCK_SEQPACKET)
