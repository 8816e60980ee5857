"""The audit: a JSON line for each change that a key made, and for each refusal: who, what, from where, what came of it.

Never a secret: paths without their query, ids of keys, and nothing of a request's headers or body.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import structlog

from gemmserve_service.tenancy.identity import looks

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Scope

    from gemmserve_service.tenancy.identity import Caller
    from gemmserve_service.tenancy.keyring import Keyring

# Somebody was turned away: no key, no scope, too slow, too much, too large a head, no room in a quota or the store.
_REFUSALS: Final = frozenset({401, 403, 408, 429, 431, 507})

log = logging.getLogger(__name__)


class AuditLog:
    """Writes the lines, to a file or to standard error; a lost line is said in the ordinary log, and stops nobody."""

    def __init__(self, path: Path | None) -> None:
        self._log = structlog.wrap_logger(
            _Lines(path),
            processors=[
                structlog.contextvars.merge_contextvars,  # the request's id
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.JSONRenderer(sort_keys=True),
            ],
            wrapper_class=structlog.BoundLogger,
        )

    def write(self, **fields: Any) -> None:
        """One line; None is left out."""
        self._log.msg("audit", **{name: value for name, value in fields.items() if value is not None})

    def request(
        self,
        scope: Scope,
        status: int,
        problem: str | None,
        location: str | None = None,
        **context: str,
    ) -> None:
        """Writes what became of a request, if that is for the audit. `problem`: the slug of what was answered."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        known = caller is not None and bool(caller.key_id)
        refused = status in _REFUSALS
        if not refused and (not known or scope["method"] == "OPTIONS" or looks(scope["method"], scope["path"])):
            return
        client = scope.get("client")
        self.write(
            **context,
            action=f"{scope['method'][:20]} {getattr(scope.get('route'), 'path', 'unmatched')}",
            path=scope["path"][:200],
            created=location,
            status=status or None,
            outcome="refused" if refused else "done" if 0 < status < 400 else "failed",
            problem=problem,
            key=caller.key_id if caller is not None and known else None,
            key_name=caller.name if caller is not None and known else None,
            owner=caller.owner if caller is not None and known else None,
            address=client[0] if client else None,
        )

    def keys_changed(self, before: Keyring, after: Keyring) -> None:
        """`KeyringWatch.on_change`: which keys were made and revoked, and whose limits changed."""
        for key_id, record in after.keys.items():
            known = before.keys.get(key_id)
            fields = {"key": key_id, "key_name": record.name, "owner": record.owner}
            if known is None:
                scopes = sorted(scope.value for scope in record.scopes)
                self.write(action="keys create", outcome="done", scopes=scopes, **fields)
            if record.revoked_at is not None and (known is None or known.revoked_at is None):
                self.write(action="keys revoke", outcome="done", **fields)
        for owner_id, owner in after.owners.items():
            if owner_id in before.owners and before.owners[owner_id] != owner:
                self.write(
                    action="keys set",
                    outcome="done",
                    owner=owner_id,
                    weight=owner.weight,
                    quota=owner.quota.model_dump(exclude_none=True),
                )


class _Lines:
    """The end of structlog's chain: appends each line whole, also after the file was moved away by a rotation."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1
        self._inode: tuple[int, int] | None = None

    def msg(self, line: str) -> None:
        try:
            data = line.encode("utf-8", "backslashreplace") + b"\n"
            if self._path is None:
                sys.stderr.write(data.decode())
            else:
                os.write(self._descriptor(self._path), data)
        except OSError:
            log.exception("a line of the audit could not be written: %s", line)

    def _descriptor(self, path: Path) -> int:
        try:
            status = path.stat()
            current = (status.st_dev, status.st_ino)
        except FileNotFoundError:
            current = None
        if self._fd < 0 or current != self._inode:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            status = os.fstat(self._fd)
            self._inode = (status.st_dev, status.st_ino)
        return self._fd
