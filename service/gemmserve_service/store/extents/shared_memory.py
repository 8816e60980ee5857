"""A piece of memory that a client shares: what may be trusted of it, and how bytes come out of it and go into it.

A memfd can be sealed. With F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE, which nobody can take back, neither its size
nor a byte of it changes any more: it may be mapped and used in place. Anything less is never mapped here, since its
owner could cut it short under a reader (SIGBUS) or change it: it is read once, by pread, into memory of our own.
Results go out by pwrite, or a device writes them, for which a worker registers a mapping that it does not touch. So
whatever a client does to its memory meanwhile, nobody but itself has the damage.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

from gemmserve_service.errors import DescriptorRefused

if TYPE_CHECKING:
    from collections.abc import Callable

_SEALED: Final = 0x2 | 0x4 | 0x8  # F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE of linux/fcntl.h
_F_GET_SEALS: Final = 1034
_STEP: Final = 64 << 20  # bytes of one call, which the end of the process may have to wait for
_SHARE: Final = 32 << 20
_MAX_THREADS: Final = 4
"""Threads that read or write one array, each as many bytes as `_SHARE` at least."""
_BLOCK: Final = 512  # of st_blocks, whatever the file system's is


class Memory:
    """A client's memory from `offset` on. It owns its descriptor until it is closed, or read, written or lent once."""

    def __init__(self, fd: int, offset: int, *, sealed: bool) -> None:
        self.offset = offset
        self.sealed = sealed
        """Whether it stays as it is for ever."""
        self._fd: int | None = fd

    @classmethod
    def examine(cls, fd: int, offset: int) -> Self:
        """The memory behind a descriptor. Raises DescriptorRefused, and then owns nothing.

        Memory alone has seals to ask for: of files, pipes and devices, which could make a reader wait, the call fails.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError:
            raise DescriptorRefused("the descriptor is no shared memory: make it with memfd_create") from None
        return cls(fd, offset, sealed=seals & _SEALED == _SEALED)

    def check_holds(self, nbytes: int) -> None:
        """Raises DescriptorRefused if fewer than `nbytes` are there."""
        there = max(os.fstat(self._descriptor).st_size - self.offset, 0)
        if there < nbytes:
            raise DescriptorRefused(f"the array has {nbytes} bytes, and the shared memory {there} from its offset on")

    def usable_in_place(self, nbytes: int) -> bool:
        """Whether its first `nbytes` may be mapped: sealed, and without holes, for which reading would take memory."""
        if not self.sealed or self.offset or not nbytes:
            return False
        try:
            return os.lseek(self._descriptor, 0, os.SEEK_HOLE) >= nbytes
        except OSError:  # a kind of memory that does not know its holes
            return False

    def takes(self, nbytes: int) -> bool:
        """Whether it has as many pages as `nbytes` take: those that the server's writing adds would be the server's
        memory. That they are not elsewhere whoever writes sees, which takes a millisecond for 100 MiB.
        """
        status = os.fstat(self._descriptor)
        return not self.offset and status.st_size >= nbytes and status.st_blocks * _BLOCK >= nbytes

    @property
    def name(self) -> str:
        """Name that no other memory has for as long as anybody has this one open."""
        status = os.fstat(self._descriptor)
        return f"{status.st_dev}:{status.st_ino}"

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, before `offset` and after."""
        return os.fstat(self._descriptor).st_size

    @property
    def writable(self) -> bool:
        """Whether the descriptor was passed for reading and writing: whoever passed it may change the memory."""
        return fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR

    def duplicate(self) -> int:
        """Return another descriptor of it, the caller's. Raises OSError."""
        return os.dup(self._descriptor)

    def lend(self) -> int:
        """The descriptor, the caller's from here on."""
        fd, self._fd = self._descriptor, None
        return fd

    async def read(self, view: memoryview) -> None:
        """Fills `view`. Raises DescriptorRefused if the memory ends too early."""
        await _in_thread(_read, self.lend(), view, self.offset)

    async def write(self, view: memoryview, *, whole: bool = False) -> None:
        """Writes `view` into it. Raises OSError where it cannot be, and if it is to be `whole` where it has holes."""
        await _in_thread(_write_whole if whole else _write, self.lend(), view, self.offset)

    def close(self) -> None:
        """Lets go of it; idempotent."""
        if self._fd is not None:
            os.close(self.lend())

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise ValueError("the memory is closed")
        return self._fd


def has_holes(fd: int, nbytes: int) -> bool:
    """Whether pages are missing among the first `nbytes` of a client's memory."""
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) < nbytes
    except OSError:  # a kind of memory that does not know its holes, as huge pages
        return False


async def _in_thread(work: Callable[[int, memoryview, int], None], fd: int, view: memoryview, offset: int) -> None:
    def run() -> None:
        try:
            work(fd, view, offset)
        finally:
            os.close(fd)

    # Shielded: a thread that has begun cannot be stopped, and one that has not must still close the descriptor. The
    # extent is handed to nobody else while the thread refers to it (`Extent.quiescent`).
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, run))


def _read(fd: int, view: memoryview, offset: int) -> None:
    _in_parts(_read_part, fd, view, offset)


def _write(fd: int, view: memoryview, offset: int) -> None:
    _in_parts(_write_part, fd, view, offset)


def _write_whole(fd: int, view: memoryview, offset: int) -> None:
    if has_holes(fd, offset + len(view)):
        raise OSError(errno.ENOSPC, "the shared memory has holes")
    _write(fd, view, offset)


def _in_parts(work: Callable[[int, memoryview, int], None], fd: int, view: memoryview, offset: int) -> None:
    """Work on what is large by several threads: a processor brings some 3 GB/s there. Raises what `work` raises, when
    all of them are done.
    """
    count = min(_MAX_THREADS, len(view) // _SHARE)
    if count <= 1:
        work(fd, view, offset)
        return
    share = -(-len(view) // count)
    parts: list[Future[None]] = []
    with ThreadPoolExecutor(count, "gemmserve-shared") as pool:
        for start in range(0, len(view), share):
            part = (fd, view[start : start + share], offset + start)
            try:
                parts.append(pool.submit(work, *part))
            except RuntimeError:  # no more threads; should one have come for it nevertheless, it does the same
                work(*part)
    try:
        while parts:
            parts.pop().result()
    finally:
        parts.clear()  # an error would hold them, and they the view, for as long as nobody looks for cycles


def _read_part(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done : done + _STEP]], offset + done)
        except OSError as error:  # opened for writing only
            raise DescriptorRefused(f"the shared memory cannot be read: {error.strerror}") from error
        if not count:
            raise DescriptorRefused("the shared memory ended within the array")
        done += count


def _write_part(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done : done + _STEP]], offset + done)
