"""Listening sockets with a path: made with their mode, put in the place of stale ones only, removed at the end;
and who is at the other end of a connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime.start_error import StartError

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

PATH_MAX: Final = 107
"""Bytes of a path: sun_path holds 108, the last of them 0."""

_BACKLOG: Final = 2048


def listen_unix(
    path: Path, mode: int, stack: ExitStack, *, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """A listening Unix socket at `path` with that mode; `stack` closes it and removes the path if it is still this one.

    What a killed server left there is replaced. Raises StartError when somebody listens there, when something else than
    a socket is there, and when the path is too long or cannot be made.
    """
    length = len(os.fsencode(path))
    if length > PATH_MAX:
        raise StartError(f"{path} is too long for a Unix socket: {length} bytes, and {PATH_MAX} fit")
    try:
        _clear(path, kind)
        listener = socket.socket(socket.AF_UNIX, kind)
        try:
            _bind(listener, path, mode)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartError(f"cannot listen on {path}: {error.strerror or error}") from error
    status = path.lstat()
    stack.callback(_remove, path, (status.st_dev, status.st_ino))
    stack.callback(listener.close)
    return listener


def peer_of(connection: socket.socket | None) -> tuple[int, int] | None:
    """Process and user at the other end of a Unix socket's connection; None of others, or if the system cannot say."""
    if connection is None or connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


def process_descriptor(pid: int) -> int | None:
    """A descriptor of the process, which no other can come to stand for; None: it is gone, or there are none (before
    Linux 5.3).
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _bind(listener: socket.socket, path: Path, mode: int) -> None:
    # Nobody else may connect before the mode is set: the umask decides what bind gives, whatever `mode` is.
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    path.chmod(mode)


def _clear(path: Path, kind: socket.SocketKind) -> None:
    """Removes a socket that nobody listens on. Raises StartError, OSError."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise StartError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)  # a server whose backlog is full is a server
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:  # EAGAIN, a socket of another kind, no permission: somebody's, in any case
            raise StartError(f"{path} belongs to another program: {error.strerror}") from error
    raise StartError(f"another server listens on {path}")


def _remove(path: Path, identity: tuple[int, int]) -> None:
    with contextlib.suppress(OSError):
        status = path.lstat()
        if (status.st_dev, status.st_ino) == identity:
            path.unlink()
