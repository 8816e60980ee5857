"""The keys of one data directory: `keys.json`, written by `gemmserve keys`, watched by the server.

A file of its own, not the database: the front is the database's only writer, and keys are made and revoked beside a
running server and without one. Each change is made under a lock and takes the file's place whole, by rename.

Beside it there may be keys in a file that somebody else writes, a container's secret (`read_key_file`): they hold for
as long as they are in there, unless `keys.json` knows the same key and says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from gemmserve_service.tenancy.api_keys import (
    KeyMalformed,
    KeyRecord,
    Owner,
    Quota,
    Scope,
    digest_of,
    key_id_of,
    new_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FILE: Final = "keys.json"
_LOCK: Final = "keys.lock"
_MAX_KEY_FILE_BYTES: Final = 1 << 20
_MAX_FIELDS: Final = 3
_POLL_S: Final = 0.3  # how soon a revoked key stops working; a stat costs microseconds

log = logging.getLogger(__name__)


class KeyringError(RuntimeError):
    """The key file cannot be read, or says something that makes no sense."""


class UnknownKey(KeyringError):  # noqa: N818 (says what is the case)
    """Id that no key or owner has."""


class Keyring(BaseModel):
    """Every key that was ever made, revoked ones too: their ids stay taken, and the server stays closed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    keys: dict[str, KeyRecord] = {}
    owners: dict[str, Owner] = {}

    @property
    def closed(self) -> bool:
        """Whether requests need a key: from the first key on, also when all of them are revoked or expired."""
        return bool(self.keys)

    def weight(self, owner_id: str) -> float:
        """The share of an owner beside others; 1 for those without a record."""
        owner = self.owners.get(owner_id)
        return 1.0 if owner is None else owner.weight

    def quota(self, owner_id: str) -> Quota:
        """The limits of an owner; none for those without a record."""
        owner = self.owners.get(owner_id)
        return _UNLIMITED if owner is None else owner.quota


_UNLIMITED: Final = Quota()


def read_keyring(data_dir: Path, keys_file: Path | None = None) -> Keyring:
    """The keys of a data directory, and of `keys_file`; empty where there are none. Raises KeyringError."""
    stored = _read_stored(data_dir)
    if keys_file is None:
        return stored
    given = read_key_file(keys_file)
    owners = {record.owner: Owner(name=record.name) for record in given.values()}
    return Keyring(keys=given | stored.keys, owners=owners | stored.owners)


def _read_stored(data_dir: Path) -> Keyring:
    path = data_dir / FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Keyring()
    except OSError as error:
        raise KeyringError(f"{path} cannot be read: {error.strerror}") from error
    try:
        keyring = Keyring.model_validate_json(text)
    except ValidationError as error:
        raise KeyringError(f"{path} makes no sense: {error.errors()[0]['msg']}") from error
    if keyring.version != 1:
        raise KeyringError(f"{path} has version {keyring.version}, this program reads version 1")
    return keyring


def read_key_file(path: Path) -> dict[str, KeyRecord]:
    """Keys by id from a file that somebody else writes: the secret of a container or a pod. Raises KeyringError.

    One key a line, as `gemmserve keys create` printed it; after it, if need be, its name and its scopes::

        gs_... lab
        gs_... dashboard read

    What is behind a ``#`` is a comment. Each key is an owner of its own. No message quotes a key.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_KEY_FILE_BYTES + 1).decode()
        created_at = path.stat().st_mtime
    except OSError as error:
        raise KeyringError(f"the key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyringError(f"the key file {path} is not UTF-8 text") from error
    if len(text) > _MAX_KEY_FILE_BYTES:
        raise KeyringError(f"the key file {path} is larger than {_MAX_KEY_FILE_BYTES} bytes")
    found: dict[str, KeyRecord] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            key_id, record = _record(fields, created_at)
        except ValueError as error:
            raise KeyringError(f"the key file {path}, line {number}: {error}") from error
        if key_id in found:
            raise KeyringError(f"the key file {path}, line {number}: a second key of the id {key_id}")
        found[key_id] = record
    return found


def _record(fields: list[str], created_at: float) -> tuple[str, KeyRecord]:
    """The key of one line. Raises ValueError."""
    if len(fields) > _MAX_FIELDS:
        raise ValueError("more than a key, its name and its scopes")
    text, name, scopes = [*fields, *["unnamed", "read,submit"][len(fields) - 1 :]]
    try:
        key_id = key_id_of(text)
    except KeyMalformed as error:
        raise ValueError(str(error)) from error
    known = {scope.value: scope for scope in Scope}
    if not all(each in known for each in scopes.split(",")):
        raise ValueError(f"unknown scopes; there are {', '.join(known)}")
    if Scope.WORKER in scopes.split(",") and scopes != Scope.WORKER:
        raise ValueError("a key of the scope worker has no other")
    return key_id, KeyRecord(
        name=name,
        owner=key_id,
        sha256=digest_of(text),
        scopes=frozenset(known[each] for each in scopes.split(",")),
        created_at=created_at,
    )


def create_key(
    data_dir: Path,
    name: str,
    *,
    scopes: Iterable[Scope] = (Scope.READ, Scope.SUBMIT),
    expires_at: float | None = None,
    owner: str | None = None,
    weight: float | None = None,
    quota: Quota | None = None,
) -> tuple[str, str]:
    """Makes a key; returns its id and its text, which nobody can learn again.

    `owner`: the id of an owner whose arrays and jobs the key shall share (to follow one that expires, or to read only);
    else the key is an owner of its own. `weight` and `quota` are the owner's. Raises KeyringError, UnknownKey.
    """
    with _changing(data_dir) as (keyring, save):
        key_id, text = new_key()
        while key_id in keyring.keys:
            key_id, text = new_key()
        if owner is not None and owner not in keyring.owners:
            raise UnknownKey(f"no owner {owner}: owners have ids, which `gemmserve keys list` shows")
        known = keyring.owners[owner] if owner is not None else Owner(name=name)
        update = {"weight": weight, "quota": quota}
        changed = known.model_copy(update={field: value for field, value in update.items() if value is not None})
        owner_id = key_id if owner is None else owner
        record = KeyRecord(
            name=name,
            owner=owner_id,
            sha256=digest_of(text),
            scopes=frozenset(scopes),
            created_at=time.time(),
            expires_at=expires_at,
        )
        save(keyring.keys | {key_id: record}, keyring.owners | {owner_id: changed})
    return key_id, text


def revoke_key(data_dir: Path, key_id: str) -> KeyRecord:
    """Ends a key, for good; a second time changes nothing. Raises UnknownKey, KeyringError."""
    with _changing(data_dir) as (keyring, save):
        record = keyring.keys.get(key_id)
        if record is None:
            which = "of that id" if key_id.startswith("gs_") else key_id  # a whole key stays secret
            raise UnknownKey(f"no key {which}; `gemmserve keys list` shows the ids")
        if record.revoked_at is None:
            record = record.model_copy(update={"revoked_at": time.time()})
            save(keyring.keys | {key_id: record}, keyring.owners)
        return record


def change_owner(data_dir: Path, owner_id: str, *, weight: float | None, quota: dict[str, float | None]) -> Owner:
    """Changes an owner's weight (None: as it is) and the limits named in `quota`. Raises UnknownKey, KeyringError."""
    with _changing(data_dir) as (keyring, save):
        owner = keyring.owners.get(owner_id)
        if owner is None:
            raise UnknownKey(f"no owner {owner_id}: owners have ids, which `gemmserve keys list` shows")
        limits = Quota.model_validate(owner.quota.model_dump() | quota)
        changed = owner.model_copy(update={"quota": limits} | ({} if weight is None else {"weight": weight}))
        save(keyring.keys, keyring.owners | {owner_id: changed})
        return changed


@contextlib.contextmanager
def _changing(data_dir: Path) -> Iterator[tuple[Keyring, Callable[[dict[str, KeyRecord], dict[str, Owner]], None]]]:
    """The keys as they are, and what writes them changed; nobody else changes them meanwhile."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(data_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyringError(f"the data directory {data_dir} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)

        def save(keys: dict[str, KeyRecord], owners: dict[str, Owner]) -> None:
            _replace(data_dir, Keyring(keys=keys, owners=owners))

        yield _read_stored(data_dir), save
    finally:
        os.close(fd)


def _replace(data_dir: Path, keyring: Keyring) -> None:
    fd, temporary = tempfile.mkstemp(prefix=FILE, suffix=".new", dir=data_dir)  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write(keyring.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(data_dir / FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class KeyringWatch:
    """The keys in memory, no older than a fraction of a second.

    What cannot be read changes nothing: the last good keys stay in force, and so they do when the file is gone, for a
    server that had keys must not fall open. `on_change(before, after)` hears of each change.
    """

    def __init__(self, data_dir: Path, keys_file: Path | None = None) -> None:
        self.data_dir, self.keys_file = data_dir, keys_file
        self._paths = [data_dir / FILE] if keys_file is None else [data_dir / FILE, keys_file]
        self.current = Keyring()
        self.on_change: list[Callable[[Keyring, Keyring], None]] = []
        self._signatures: list[tuple[int, int, int] | None] = [None] * len(self._paths)
        self._failure: tuple[object, str] | None = None
        """Signatures of files that could not be read, and why, as was said last."""
        self._task: asyncio.Task[None] | None = None

    def quota(self, owner_id: str) -> Quota:
        """The limits of an owner, as they are now."""
        return self.current.quota(owner_id)

    def weight(self, owner_id: str) -> float:
        """The share of an owner beside others, as it is now."""
        return self.current.weight(owner_id)

    async def start(self) -> None:
        """Reads the keys and goes on watching. Raises KeyringError."""
        self._signatures = [_signature(path) for path in self._paths]
        self.current = read_keyring(self.data_dir, self.keys_file)
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="keyring")

    async def stop(self) -> None:
        """Watches no longer; the keys stay in force."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def refresh(self) -> None:
        """Look at the files now."""
        signatures = [_signature(path) for path in self._paths]
        if signatures == self._signatures:
            return
        self._signatures, before_them = signatures, self._signatures
        for path, was, now in zip(self._paths, before_them, signatures, strict=True):
            if now is None and was is not None:
                log.error("%s is gone; the keys that it held stay in force until the server ends", path)
                return
        try:
            changed = read_keyring(self.data_dir, self.keys_file)
        except KeyringError as error:
            # To be read again: what was in the way (their owner, no open file left) may go without a change of theirs.
            self._signatures = before_them
            if (failure := (signatures, str(error))) != self._failure:
                self._failure = failure
                log.exception("the keys as they were stay in force")
            return
        self._failure = None
        # What is in no file any more has ended, and the server stays closed, also where it was the last key.
        ended = {key_id: _ended(record) for key_id, record in self.current.keys.items() if key_id not in changed.keys}
        changed = changed.model_copy(update={"keys": ended | changed.keys})
        before, self.current = self.current, changed
        for callback in self.on_change:
            callback(before, changed)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                self.refresh()
            except OSError:
                log.exception("the key file cannot be looked at; the keys stay in force")


def _ended(record: KeyRecord) -> KeyRecord:
    return record if record.revoked_at is not None else record.model_copy(update={"revoked_at": time.time()})


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file does; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
