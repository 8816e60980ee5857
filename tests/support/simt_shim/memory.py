"""Device memory of the shim: host pages between guard pages.

A block starts at an aligned address, as device allocations do, and is placed so that its end, rounded up to that
alignment, touches an inaccessible page; another one lies before it. What is left of the first and the last page is
filled with 0xff (NaN in every floating-point format): a stray read shows in the results and `damage()` finds a stray
write.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

PAGE = mmap.PAGESIZE
POISON = 0xFF

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def map_pages(nbytes: int) -> int:
    """The address of fresh zeroed pages, readable and writable; they take no memory until they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise MemoryError(f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(address)


def unmap_pages(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def forbid(address: int, nbytes: int) -> None:
    """Makes pages inaccessible."""
    if _libc.mprotect(address, nbytes, 0) != 0:
        raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")


class GuardedBlock:
    """`nbytes` of poisoned memory between guard pages, freed with the object."""

    def __init__(self, nbytes: int, alignment: int = 256) -> None:
        if PAGE % alignment:
            raise ValueError(f"an alignment that divides the page of {PAGE} bytes, not {alignment}")
        self.nbytes = nbytes
        inner = _round_up(max(nbytes, 1), PAGE)
        mapped = map_pages(inner + 2 * PAGE)
        self._finalizer = weakref.finalize(self, unmap_pages, mapped, inner + 2 * PAGE)
        forbid(mapped, PAGE)
        forbid(mapped + PAGE + inner, PAGE)
        self.address = mapped + PAGE + inner - _round_up(nbytes, alignment)
        self._first = mapped + PAGE
        self._inner = inner
        ctypes.memset(self._first, POISON, inner)

    def bytes(self) -> np.ndarray:
        """The block as a uint8 array that keeps it alive."""
        return np.asarray(_Exposed(self, self.address, self.nbytes))

    def damage(self) -> int | None:
        """The offset from the block's start of a byte around it that something has overwritten, or None."""
        whole = np.asarray(_Exposed(self, self._first, self._inner))
        before = self.address - self._first
        for start, stop in ((0, before), (before + self.nbytes, self._inner)):
            wrong = np.flatnonzero(whole[start:stop] != POISON)
            if wrong.size:
                return int(start + wrong[0]) - before
        return None


class _Exposed:
    """Shows memory to NumPy and keeps its owner alive as the array's base."""

    def __init__(self, owner: GuardedBlock, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class Stacks:
    """Stacks of fibers, each with a guard page below; they are shared by all modules and grow on demand."""

    def __init__(self, stack_bytes: int = 256 * 1024) -> None:
        self.stack_bytes = stack_bytes
        self.address = 0
        self._count = 0

    def reserve(self, count: int) -> None:
        if count <= self._count:
            return
        if self._count:
            unmap_pages(self.address, self._count * self.stack_bytes)
        self.address = map_pages(count * self.stack_bytes)
        self._count = count
        for i in range(count):
            forbid(self.address + i * self.stack_bytes, PAGE)
