"""Memory that can be passed to a server on this machine, and NumPy arrays in it.

A block is a memfd and its mapping. Fresh pages cost more than copying into them, so blocks whose arrays are gone serve
again. A frozen block is sealed: neither its size nor its bytes can change any more, for anybody, so the server may
compute on it where it lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import threading
import weakref
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve._transfer.arrays import is_fortran

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve._transfer.arrays import AnyArray

_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE of linux/fcntl.h
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14

LIMIT_BYTES: Final = 2 << 30
"""Memory that a client uses for transfers on its own account: four results of 8192 x 8192 complex64, say, of which a
program holds some. No measurement behind the figure."""

KEPT_BYTES: Final = 1 << 30
"""Memory of it that a client keeps for the next transfers while no array lies there."""

MAX_BLOCKS: Final = 128
"""Blocks of it at most: each takes a descriptor, of which a process has some thousand."""

MAX_OPERAND_BYTES: Final = 128 << 20
"""Bytes of the largest operand that is copied into such memory: larger ones go by the socket."""

MAX_RESULT_BYTES: Final = 1 << 30
"""Bytes of the largest result that goes into such memory: no device of a server copies more at a time."""

_forks = 0
_results_lock = threading.Lock()
_results: weakref.WeakSet[Block] = weakref.WeakSet()
"""Blocks that hold results: ordinary arrays to whoever has them, which no fork makes shared ones."""


def _forking() -> None:
    """Holds the lock over the fork, so that a child does not find it taken by a thread that it has not."""
    global _forks
    _results_lock.acquire()
    _forks += 1
    for block in _results:
        with contextlib.suppress(OSError):  # no memory for another mapping: then it stays shared
            block.part()
    _results.clear()


def _forked() -> None:
    _results_lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forking, after_in_parent=_forked, after_in_child=_forked)


def supported() -> bool:
    """Linux has memfds with seals."""
    return hasattr(os, "memfd_create") and hasattr(os, "MFD_ALLOW_SEALING")


class Block:
    """A memfd, mapped. Raises OSError where the system has no more memory or descriptors."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sealed = False
        self.shareable = True
        """Whether the mapping still shows the memfd's own pages."""
        self.mapped_elsewhere = False
        """Whether a server has had it mapped, for a device that wrote a result there: perhaps it cannot be sealed."""
        self.fd = os.memfd_create("gemmserve-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, capacity)
            address = _map(self.fd, capacity, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = address
        self.forks = _forks
        # All pages at once, which is cheaper than one fault after the other; and so they are counted as ours.
        _populate(address, capacity)

    def __del__(self) -> None:
        if "address" in self.__dict__:  # else the constructor has closed it
            _libc().munmap(self.address, self.capacity)
            os.close(self.fd)

    @property
    def reusable(self) -> bool:
        """Whether its memory is this process's alone: since a fork another may still look at it."""
        return self.shareable and not self.sealed and self.forks == _forks

    def array(self, shape: Sequence[int], dtype: np.dtype[Any], order: str, pool: Pool | None) -> AnyArray:
        """An array at the block's start; when it and every view of it are gone, the block returns to `pool`."""
        lease = _Lease(self)
        if pool is not None:
            weakref.finalize(lease, pool.give, self).atexit = False
        flat = np.asarray(lease)[: math.prod(shape) * dtype.itemsize]
        return flat.view(dtype).reshape(tuple(shape), order="F" if order == "F" else "C")

    def own(self) -> None:
        """Its arrays are the program's own: they are parted from those of a child when one is forked."""
        with _results_lock:
            _results.add(self)

    def part(self) -> None:
        """Make the mapping at the address a private copy (page by page, when it is written): arrays that lie there
        keep working and are no longer seen through the descriptor, nor by a process that is forked after this.
        Raises OSError.
        """
        _map_privately(self.address, self.capacity, self.fd)
        self.shareable = False

    def seal(self) -> None:
        """Makes the memory unchangeable, parted from its arrays. Raises OSError if another process has it mapped for
        writing too.
        """
        import fcntl  # not everywhere, and this module is imported everywhere

        self.part()
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)

    def frozen(self) -> Block:
        """A block for reading over the same, sealed memory."""
        twin = Block.__new__(Block)
        twin.capacity, twin.sealed, twin.shareable, twin.forks = self.capacity, True, True, _forks
        twin.mapped_elsewhere = False
        # Before Linux 6.7 a mapping by a descriptor that may write counts as one that writes.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            address = _map(fd, self.capacity, mmap.PROT_READ, mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        twin.fd, twin.address = fd, address
        _libc().madvise(address, self.capacity, _POPULATE_READ)  # else each page as it is read
        return twin


class _Lease:
    """Owner that an array in a block refers to."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.__array_interface__ = {
            "version": 3,
            "shape": (block.capacity,),
            "typestr": "|u1",
            "data": (block.address, block.sealed),
        }


class Pool:
    """Blocks that wait for their next use; safe to share between threads.

    What a client uses on its own account is limited: past that, fresh pages would cost more than the socket does.
    Nothing is made, and nothing goes, while the lock is held, for it takes long: so the dropped are handed around.
    """

    def __init__(self, limit: int = LIMIT_BYTES, kept: int = KEPT_BYTES) -> None:
        """`limit`: bytes on the client's own account. `kept`: bytes of all blocks that wait."""
        self.limit = limit
        self.kept = kept
        self._lock = threading.Lock()
        self._free: list[Block] = []  # the longest unused first
        self._own: weakref.WeakSet[Block] = weakref.WeakSet()
        self._making: list[int] = []
        """Capacities of blocks that are being made on the client's own account."""
        self._returned: deque[Block] = deque()  # a finalizer may run at any moment, also while the lock is held
        self._closed = False

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes` > 0 for somebody who asks for one, and may seal it. Raises OSError."""
        dropped: list[Block] = []
        with self._lock:
            self._collect(dropped)
            found = self._taken([block for block in self._fitting(nbytes) if not block.mapped_elsewhere])
            if found is not None:
                self._own.discard(found)
                return found
        dropped.clear()
        return Block(_rounded(nbytes))

    def spare(self, nbytes: int) -> Block | None:
        """The same for the client's own account; None where that is beyond the limit. Raises OSError."""
        capacity = _rounded(nbytes)
        dropped: list[Block] = []
        with self._lock:
            self._collect(dropped)
            found = self._taken(self._fitting(nbytes))
            if found is not None or not self._room_for(capacity, self._free):
                return found
            while not self._room_for(capacity, ()):
                self._drop_oldest(dropped)
            self._making.append(capacity)
        dropped.clear()
        block = None
        try:
            block = Block(capacity)
        finally:
            with self._lock:
                self._making.remove(capacity)
                if block is not None:
                    self._own.add(block)
        return block

    def has_room(self, nbytes: int) -> bool:
        """Whether `spare` would find that many, now."""
        with self._lock:
            waiting = [block for block in (*self._free, *self._returned) if block.reusable]
            capacity = _rounded(nbytes)
            fits = any(nbytes <= block.capacity <= 2 * capacity for block in waiting)
            return fits or self._room_for(capacity, waiting)

    def give(self, block: Block) -> None:
        """Takes a block back, or lets it go."""
        if block.reusable and not self._closed:
            self._returned.append(block)
            with contextlib.suppress(IndexError):  # another thread has come for them
                while sum(each.capacity for each in tuple(self._returned)) > self.kept:  # nobody has for a while
                    self._returned.popleft()

    @property
    def kept_bytes(self) -> int:
        """Memory that waits."""
        dropped: list[Block] = []
        with self._lock:
            self._collect(dropped)
            return sum(block.capacity for block in self._free)

    def close(self) -> None:
        """Lets everything go."""
        self._closed = True
        with self._lock:
            dropped, self._free = self._free, []
        dropped.clear()
        self._returned.clear()

    # -- with the lock held -----------------------------------------------------------------------------------------

    def _room_for(self, capacity: int, going: Sequence[Block]) -> bool:
        """Whether there may be another block on the client's own account once those have gone."""
        gone = set(going)
        return self._within([block.capacity for block in self._own if block not in gone] + [*self._making, capacity])

    def _within(self, capacities: Sequence[int]) -> bool:
        return sum(capacities) <= self.limit and len(capacities) <= MAX_BLOCKS

    def _fitting(self, nbytes: int) -> list[Block]:
        return [block for block in self._free if nbytes <= block.capacity <= 2 * _rounded(nbytes)]

    def _taken(self, fitting: list[Block]) -> Block | None:
        block = min(fitting, key=lambda each: each.capacity, default=None)
        if block is not None:
            self._free.remove(block)
        return block

    def _collect(self, dropped: list[Block]) -> None:
        """Have what was returned among what waits, and no more of that than may."""
        while self._returned:
            block = self._returned.popleft()
            self._free.append(block)
            self._own.add(block)
        dropped += (block for block in self._free if not block.reusable)
        self._free = [block for block in self._free if block.reusable]
        while self._free and (
            sum(each.capacity for each in self._free) > self.kept
            or not self._within([*(block.capacity for block in self._own), *self._making])
        ):
            self._drop_oldest(dropped)

    def _drop_oldest(self, dropped: list[Block]) -> None:
        block = self._free.pop(0)
        self._own.discard(block)
        dropped.append(block)


def find(array: AnyArray) -> tuple[Block, int] | None:
    """The block that holds all of a contiguous little-endian array, and where in it; None for other arrays."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    if not isinstance(base, _Lease) or not base.block.shareable or not contiguous:
        return None
    if array.dtype != array.dtype.newbyteorder("<"):
        return None
    return base.block, array.__array_interface__["data"][0] - base.block.address


def empty(shape: Sequence[int], dtype: np.dtype[Any], order: str, pool: Pool) -> AnyArray:
    """An array to be filled, as numpy.empty's. Raises OSError."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(tuple(shape), dtype, order="F" if order == "F" else "C")
    return pool.take(nbytes).array(shape, dtype, order, pool)


def freeze(array: AnyArray, pool: Pool) -> AnyArray:
    """A read-only array with the same elements in sealed memory; that of `empty` is taken over, other is copied.

    Raises OSError.
    """
    if not array.nbytes:
        return array.copy(order="A")
    order = "F" if is_fortran(array) else "C"
    found = find(array)
    if found is not None and found[0].sealed:
        return array
    if found is not None and found[1] == 0 and found[0].reusable and not found[0].mapped_elsewhere:
        try:
            found[0].seal()
            return found[0].frozen().array(array.shape, array.dtype, order, None)
        except OSError:  # a process that shares the mapping, say
            pass
    block = pool.take(array.nbytes)
    native = array.dtype.newbyteorder("<")
    np.copyto(block.array(array.shape, native, order, None), array)
    block.seal()
    return block.frozen().array(array.shape, native, order, None)


def _rounded(nbytes: int) -> int:
    """Whole pages, at most an eighth more than asked for, so that blocks of nearly equal size serve each other."""
    step = max(mmap.PAGESIZE, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step


@cache
def _libc() -> Any:
    """The system's functions: Python's own hold up its other threads while pages are filled, or given back, and its
    mappings each keep a descriptor.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _map(fd: int, length: int, access: int, flags: int, address: int | None = None) -> int:
    """Return where a file is mapped. Raises OSError."""
    found: int = _libc().mmap(address, length, access, flags, fd, 0)
    if found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return found


def _populate(address: int, length: int) -> None:
    """Fill all pages of a mapping. Raises OSError where there is no memory for them."""
    while _libc().madvise(address, length, _POPULATE_WRITE):
        error = ctypes.get_errno()
        if error == errno.EINVAL:  # an older Linux
            np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))[:: mmap.PAGESIZE] = 0
            return
        if error != errno.EINTR:
            raise OSError(error, "madvise")


def _map_privately(address: int, length: int, fd: int) -> None:
    """Puts a private mapping of `fd` in the place of a shared one. Raises OSError."""
    _map(fd, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, address)
