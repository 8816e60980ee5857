"""API keys from a file that somebody else writes: the secret of a container or a pod.

One key a line, as `gemmserve keys create` printed it; after it, if need be, its name and its scopes::

    gs_... lab
    gs_... dashboard read

What is behind a ``#`` is a comment. Each key is an owner of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve_service.tenancy.api_keys import KeyMalformed, KeyRecord, Scope, digest_of, key_id_of

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST: Final = 1 << 20
_FIELDS: Final = 3


class KeyFileError(RuntimeError):
    """The file cannot be read, or a line of it makes no sense; the message never quotes a key."""


def read_key_file(path: Path) -> dict[str, KeyRecord]:
    """The keys by id. Raises KeyFileError."""
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1).decode()
        created_at = path.stat().st_mtime
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"the key file {path} is not UTF-8 text") from error
    if len(text) > _LARGEST:
        raise KeyFileError(f"the key file {path} is larger than {_LARGEST} bytes")
    found: dict[str, KeyRecord] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            key_id, record = _record(fields, created_at)
        except ValueError as error:
            raise KeyFileError(f"the key file {path}, line {number}: {error}") from error
        if key_id in found:
            raise KeyFileError(f"the key file {path}, line {number}: a second key of the id {key_id}")
        found[key_id] = record
    return found


def _record(fields: list[str], created_at: float) -> tuple[str, KeyRecord]:
    """The key of one line. Raises ValueError."""
    if len(fields) > _FIELDS:
        raise ValueError("more than a key, its name and its scopes")
    text, name, scopes = [*fields, *["unnamed", "read,submit"][len(fields) - 1 :]]
    try:
        key_id = key_id_of(text)
    except KeyMalformed as error:
        raise ValueError(str(error)) from error
    known = {scope.value: scope for scope in Scope}
    if not all(each in known for each in scopes.split(",")):
        raise ValueError(f"unknown scopes; there are {', '.join(known)}")
    return key_id, KeyRecord(
        name=name,
        owner=key_id,
        sha256=digest_of(text),
        scopes=frozenset(known[each] for each in scopes.split(",")),
        created_at=created_at,
    )
