"""Objects of the tier: an array each, and its record beside it, by the library obstore (S3, GCS, Azure, a folder).

`arrays/<id>` holds the bytes, `arrays/<id>.json` the record, `server.json` the name of the data directory whose objects
these are. An object is written once and read in chunks, each of which has a SHA-256 of its own: what comes back is
compared before anybody sees it. Everything here blocks, and belongs into threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from gemmserve_service.errors import ArrayCorrupt, TierUnavailable
from gemmserve_service.store.tier.cold import TierUnusableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_T = TypeVar("_T")

CHUNK: Final = 8 << 20
"""Bytes of a chunk: what is compared by one digest, and the least that is read. It is part of the format."""
DIGEST_BYTES: Final = 32
_RETRY_AFTER_S: Final = 5.0
_OWNER: Final = "server.json"
_FOLDER: Final = "arrays"
_OBJECT: Final = re.compile(rf"{_FOLDER}/(arr_[0-9a-z]{{26}}(?:_[1-9][0-9]{{0,2}})?)(?:\.json)?")
"""Names of objects that are an array's, or the record beside it."""
_STAGED: Final = re.compile(r"arr_[0-9a-z_]+(?:\.json)?#[0-9]+")
"""Names of files that become such an object of a folder when they are whole."""
_PARTS_AT_ONCE: Final = 4
_MAX_MESSAGE: Final = 200
_CLIENT: Final = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}
_RETRIES: Final = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}


class Objects:
    """Objects below one address. Credentials come from the environment, as obstore reads them."""

    def __init__(self, address: str) -> None:
        """`address`: s3://bucket/prefix, gs://, az:// or file:///folder. Raises TierUnusableError."""
        self._folder = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else None
        try:
            self._obstore: Any = import_module("obstore")
            stores: Any = import_module("obstore.store")
        except ImportError as error:
            raise TierUnusableError(
                "GEMMSERVE_TIER needs the library obstore: pip install 'gemmserve[tier]'"
            ) from error
        try:
            if self._folder is not None:
                self._store = stores.from_url(address, mkdir=True)
            else:
                plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"}  # options go before that variable
                options = _CLIENT | ({"allow_http": True} if plain else {})
                self._store = stores.from_url(address, client_options=options, retry_config=_RETRIES)
        except Exception as error:
            raise TierUnusableError(f"the tier {address} cannot be opened: {_said(error)}") from error
        self._errors = (self._obstore.exceptions.BaseError, OSError)

    def put(
        self, array_id: str, view: memoryview, record: Mapping[str, Any], stopped: Callable[[], bool] = lambda: False
    ) -> bytes:
        """Write an array, and its record behind it. Return the digests of its chunks. `stopped`: whether to give up.

        Raises TierUnavailable, also where a folder keeps less than it was given: on a network file system a write that
        failed may be known to nobody. Then neither counts.
        """
        digests: list[bytes] = []

        def chunks() -> Iterator[memoryview]:
            for start in range(0, len(view), CHUNK):
                if stopped():
                    raise TierUnavailable("the server is shutting down", retry_after_s=_RETRY_AFTER_S)
                chunk = view[start : start + CHUNK]
                digests.append(hashlib.sha256(chunk).digest())
                yield chunk

        def write() -> None:
            name = _name(array_id)
            if 0 < len(view) <= CHUNK:
                self._obstore.put(self._store, name, next(chunks()), use_multipart=False)
            elif len(view):
                self._obstore.put(self._store, name, chunks(), chunk_size=CHUNK, max_concurrency=_PARTS_AT_ONCE)
            beside = {"version": 1, **record, "chunk": CHUNK, "sha256": [each.hex() for each in digests]}
            self._obstore.put(self._store, _record_name(array_id), json.dumps(beside).encode())

        if self._folder is not None:
            self._check_there()  # of a file system that is no longer mounted the folder can be written to all the same
        self._try("written to", write)
        if self._folder is not None and len(view):
            kept = self._try("read from", lambda: self._size(_name(array_id))) or 0
            if kept != len(view):
                raise TierUnavailable(
                    f"the tier keeps {kept} of the {len(view)} bytes that it was given", retry_after_s=_RETRY_AFTER_S
                )
        return b"".join(digests)

    def read(self, array_id: str, digests: bytes, nbytes: int, number: int) -> memoryview:
        """Return chunk `number` of an array of `nbytes`. Raises TierUnavailable, ArrayCorrupt."""
        start = number * CHUNK
        length = min(CHUNK, nbytes - start)

        def fetch() -> memoryview | None:
            try:
                return memoryview(self._obstore.get_range(self._store, _name(array_id), start=start, length=length))
            except FileNotFoundError:
                return None
            except self._obstore.exceptions.GenericError:
                kept = self._size(_name(array_id))
                if kept is None or kept > start:
                    raise
                return memoryview(b"")  # it was cut short: of a range behind the end stores say that they refuse it

        found = self._try("read from", fetch)
        if found is None:
            self._check_there()
            raise ArrayCorrupt(f"array {array_id} is no longer in the tier: somebody deleted its object")
        if hashlib.sha256(found).digest() != split(digests)[number]:
            raise ArrayCorrupt(f"the bytes of array {array_id} that came back from the tier are not those it was given")
        return found

    def delete(self, array_id: str) -> None:
        """Delete an array's record and bytes, as far as they are there. Raises TierUnavailable."""

        def remove() -> None:
            for name in (_record_name(array_id), _name(array_id)):
                with contextlib.suppress(FileNotFoundError):
                    self._obstore.delete(self._store, name)

        self._try("deleted from", remove)

    def ids(self) -> Iterator[set[str]]:
        """Ids of arrays of which there is an object, some at a time; objects of other names are somebody else's. Raises
        TierUnavailable.
        """
        stream = self._try("listed in", lambda: iter(self._obstore.list(self._store, _FOLDER, chunk_size=1000)))
        while (page := self._try("listed in", lambda: next(stream, None))) is not None:
            yield {found[1] for each in page if (found := _OBJECT.fullmatch(each["path"]))}

    def record(self, array_id: str) -> dict[str, Any] | None:
        """Return the record beside an array, None if there is none that can be read. Raises TierUnavailable."""
        found = self._content(_record_name(array_id))
        try:
            record = None if found is None else json.loads(found)
        except (ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) and record.get("version") == 1 else None

    def claim(self, server: str, *, adopt: bool, used: bool = False) -> None:
        """Have the tier be that data directory's. `adopt`: also one that is another's, who has lost it. `used`: rows of
        that directory name objects already.

        Raises TierUnusableError where it is another's. Where it is nobody's, too, if rows name objects, which are
        elsewhere then, or if there are arrays: a server writes its name before its first, so these are of one whose
        name was lost, and are not to be collected. Raises TierUnavailable.

        What writes to a folder have left that were killed goes: none is under way before this has returned.
        """
        content = json.dumps({"server": server}).encode()

        def create() -> bool:
            try:
                self._obstore.put(self._store, _OWNER, content, mode="create")
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        found = self._content(_OWNER)
        if found is None and not adopt and used:
            raise TierUnusableError(
                f"the tier has no {_OWNER}, and this data directory has arrays in a tier: look at GEMMSERVE_TIER, or "
                "at whether the file system is mounted; set GEMMSERVE_TIER_ADOPT to begin anew there"
            )
        if found is None and not adopt and any(self.ids()):
            raise TierUnusableError(
                f"the tier holds arrays and no {_OWNER}, which says whose they are: give the server a prefix of its "
                "own, or set GEMMSERVE_TIER_ADOPT where they are its own"
            )
        if found is None and not self._try("written to", create):
            found = self._content(_OWNER) or b""
        if found not in (None, content):
            if not adopt:
                raise TierUnusableError(
                    "the tier holds arrays of another data directory: give each server a prefix of its own, or set "
                    "GEMMSERVE_TIER_ADOPT where that directory is lost"
                )
            self._try("written to", lambda: self._obstore.put(self._store, _OWNER, content))
        self._try("deleted from", self._tidy)

    def owner(self) -> str | None:
        """Return the name of the data directory whose tier it is; None: nobody's yet. Raises TierUnavailable."""
        found = self._content(_OWNER)
        try:
            return None if found is None else str(json.loads(found)["server"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""

    def _tidy(self) -> None:
        """Remove `arr_...#1`, which no listing shows: a file that would have become an object."""
        folder = None if self._folder is None else self._folder / _FOLDER
        if folder is not None and folder.is_dir():
            for path in folder.iterdir():
                if _STAGED.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _check_there(self) -> None:
        """Raise TierUnavailable where the tier as such is missing: a file system that is not mounted, a bucket that was
        emptied. What is not in it is not gone for that reason.
        """
        if self._try("read from", lambda: self._size(_OWNER)) is None:
            raise TierUnavailable(
                f"the tier has no {_OWNER} any more: it is empty, or not mounted", retry_after_s=_RETRY_AFTER_S
            )

    def _size(self, name: str) -> int | None:
        try:
            return int(self._obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None

    def _content(self, name: str) -> bytes | None:
        def fetch() -> bytes | None:
            try:
                return bytes(self._obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

        return self._try("read from", fetch)

    def _try(self, done: str, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except self._errors as error:
            raise TierUnavailable(
                f"nothing could be {done} the tier: {_said(error)}", retry_after_s=_RETRY_AFTER_S
            ) from None


def split(digests: bytes) -> Sequence[bytes]:
    """Return the digests of the chunks."""
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def _name(array_id: str) -> str:
    return f"{_FOLDER}/{array_id}"


def _record_name(array_id: str) -> str:
    return f"{_FOLDER}/{array_id}.json"


def _said(error: BaseException) -> str:
    """The first line of an error: what follows are the library's own structures."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_MAX_MESSAGE]
