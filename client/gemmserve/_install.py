"""The command that adds an extra to this installation."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit


def pip_install(extras: str) -> str:
    """Return pip's command line for `extras`, such as "server,cli".

    It names what this installation was made from, the clone or the wheel, where pip has noted that (direct_url.json,
    PEP 610) and it is still there; otherwise it is for a shell in a clone: no package index has the project.
    """
    source = _source()
    if source is None:
        return f"pip install '.[{extras}]' (in a clone)"
    path, editable = source
    return f"pip install {'-e ' if editable else ''}{shlex.quote(f'{path}[{extras}]')}"


def _source() -> tuple[Path, bool] | None:
    """The folder or file that pip installed from, and whether as an editable one."""
    from importlib.metadata import (
        PackageNotFoundError,
        distribution,
    )  # for errors alone: it takes longer than all of this

    try:
        noted = json.loads(distribution("gemmserve").read_text("direct_url.json") or "{}")
        url = urlsplit(noted.get("url", ""))
        editable = noted.get("dir_info", {}).get("editable") is True
    except (PackageNotFoundError, ValueError, AttributeError):
        return None
    path = Path(unquote(url.path))
    return (path, editable) if url.scheme == "file" and path.exists() else None
