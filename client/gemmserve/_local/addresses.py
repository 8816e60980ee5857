"""Addresses of servers on this machine: `unix:/path/to.sock`, and `http+unix://` as other tools write it."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import unquote

from gemmserve import _errors

HTTP_BASE: Final = "http://localhost"
"""Base URL of requests by a Unix socket: a name that every server answers to."""

_PREFIXES: Final = ("http+unix://", "unix://", "unix:")


def socket_path(url: str) -> str | None:
    """The socket's path; None where `url` is of another kind. Raises ParameterInvalid for a path that cannot be one.

    `http+unix://%2Frun%2Fgemmserve.sock` has the path where a host would be, as in requests-unixsocket; the three other
    ways have it after the colon: `http+unix:///run/gemmserve.sock`, `unix:///run/gemmserve.sock`,
    `unix:/run/gemmserve.sock`.
    """
    text = url.strip()
    prefix = next((prefix for prefix in _PREFIXES if text.startswith(prefix)), None)
    if prefix is None:
        return None
    path = text.removeprefix(prefix)
    if "://" in prefix:
        path = unquote(path)
    path = os.path.expanduser(path)  # noqa: PTH111 (a Path would lose nothing here, and gain nothing)
    if not path or "\0" in path or path.endswith("/"):
        raise _errors.ParameterInvalid(f"{url!r} names no socket; write unix:/path/to.sock")
    return os.path.abspath(path)  # noqa: PTH100
