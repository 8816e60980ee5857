"""Regions of system shared memory (POSIX) that clients have registered: by name, each its owner's.

A region is opened when it is registered, and stays open: a client that unlinks it, or makes another of that name, has
its tensors where they were. It is never mapped here, for its client could cut it short under a reader (SIGBUS): tensors
are read out of it by pread and written into it by pwrite (`store.extents.shared_memory`); if it is too short by then,
that request fails.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import DescriptorRefused, NotFound
from gemmserve_service.http.inference.messages import RegionStatus
from gemmserve_service.store.extents.shared_memory import Memory

if TYPE_CHECKING:
    from gemmserve_service.http.inference.messages import RegionRegistration

_FOLDER: Final = b"/dev/shm/"
_MAX_OF_ONE: Final = 64  # regions of one owner
_MAX_NAME: Final = 255  # bytes: NAME_MAX


@dataclass(frozen=True)
class _Region:
    status: RegionStatus
    fd: int


class Regions:
    """Every region; belongs to the event loop's thread."""

    def __init__(self, limit: int) -> None:
        """`limit`: regions of all owners together."""
        self._limit = limit
        self._regions: dict[tuple[str, str], _Region] = {}

    def register(self, owner: str, name: str, wanted: RegionRegistration) -> None:
        """Opens the region. Raises DescriptorRefused: it is not there, too short, another user's, or one too many."""
        if (owner, name) in self._regions:
            raise DescriptorRefused(f"shared memory region {name[:80]!r} is registered already; unregister it first")
        held = sum(1 for other, _ in self._regions if other == owner)
        if held >= _MAX_OF_ONE or len(self._regions) >= self._limit:
            raise DescriptorRefused(f"too many shared memory regions are registered; this owner has {held}")
        fd = _open(wanted.key)
        try:
            _check(fd, wanted)
        except BaseException:
            os.close(fd)
            raise
        status = RegionStatus(name=name, key=wanted.key, offset=wanted.offset, byte_size=wanted.byte_size)
        self._regions[owner, name] = _Region(status, fd)

    def unregister(self, owner: str, name: str | None = None) -> None:
        """Closes a region of `owner`, or all of them; nothing for one that there is not."""
        for key in [key for key in self._regions if key[0] == owner and name in {None, key[1]}]:
            os.close(self._regions.pop(key).fd)

    def status(self, owner: str, name: str | None = None) -> list[RegionStatus]:
        """One of the owner's regions, or all of them. Raises NotFound for one that there is not."""
        if name is None:
            return [region.status for (other, _), region in self._regions.items() if other == owner]
        region = self._regions.get((owner, name))
        if region is None:
            raise NotFound(f"no shared memory region {name[:80]!r} is registered")
        return [region.status]

    def memory(self, owner: str, name: str, offset: int, nbytes: int) -> Memory:
        """`nbytes` of a region from `offset` on, the caller's to close. Raises DescriptorRefused."""
        region = self._regions.get((owner, name))
        if region is None:
            raise DescriptorRefused(f"no shared memory region {name[:80]!r} is registered")
        if offset + nbytes > region.status.byte_size:
            raise DescriptorRefused(
                f"{nbytes} bytes from byte {offset} on go past the {region.status.byte_size} of region {name[:80]!r}"
            )
        memory = Memory(os.dup(region.fd), region.status.offset + offset, sealed=False)
        try:
            memory.check_holds(nbytes)
        except BaseException:
            memory.close()
            raise
        return memory

    def close(self) -> None:
        """Closes every region."""
        for region in self._regions.values():
            os.close(region.fd)
        self._regions.clear()


def _open(key: str) -> int:
    """A descriptor of the POSIX shared memory object `key`. Raises DescriptorRefused."""
    name = key.lstrip("/")  # as shm_open does
    try:
        encoded = os.fsencode(name)
        if not name or "/" in name or "\0" in name or name in {".", ".."} or len(encoded) > _MAX_NAME:
            raise DescriptorRefused(f"{key[:80]!r} is no name of shared memory: a slash, then a name without one")
        # A link would lead elsewhere, and to open a pipe could wait.
        return os.open(_FOLDER + encoded, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except UnicodeEncodeError:
        raise DescriptorRefused("the name of shared memory is no text") from None
    except OSError as error:
        raise DescriptorRefused(f"the shared memory {key[:80]!r} cannot be opened: {error.strerror}") from None


def _check(fd: int, wanted: RegionRegistration) -> None:
    """Whether what was opened is memory of the server's user and long enough. Raises DescriptorRefused."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise DescriptorRefused(f"{wanted.key[:80]!r} is no shared memory of the server's own user")
    if wanted.offset + wanted.byte_size > found.st_size:
        raise DescriptorRefused(
            f"{wanted.byte_size} bytes from byte {wanted.offset} on go past the {found.st_size} bytes of "
            f"{wanted.key[:80]!r}"
        )
