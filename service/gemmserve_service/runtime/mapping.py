"""Mappings of files and shared memory that hold no descriptor.

Python's `mmap` keeps a duplicate of the descriptor for as long as its mapping lives (until 3.13, and unless told
otherwise from then on): ten thousand arrays would take ten thousand of the files that the process may open, which its
connections need. So the system's function is called here, and the mapping goes when the last view of it does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)  # Linux
_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final[Callable[..., int]] = _libc.mmap
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Part:
    """Some bytes of a mapping, which stays for as long as this does."""

    __slots__ = ("__array_interface__", "_whole")
    __array_interface__: dict[str, Any]

    def __init__(self, whole: Mapping, start: int, nbytes: int) -> None:
        """Writable; the bytes lie within the mapping."""
        address, readonly = whole.__array_interface__["data"]
        self._whole = whole
        self.__array_interface__ = whole.__array_interface__ | {"shape": (nbytes,), "data": (address + start, readonly)}

    def view(self, nbytes: int) -> memoryview:
        """The first `nbytes`. This object is referred to for as long as the view, or any view of it, lives."""
        return np.asarray(self).data[:nbytes]


class Mapping:
    """The first `nbytes` > 0 of a file, shared with whoever else has it open. The descriptor may be closed after."""

    __slots__ = ("__array_interface__", "__weakref__", "_address", "_unmap", "nbytes")
    __array_interface__: dict[str, Any]

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True, populate: bool = False) -> None:
        """`populate`: with all its pages at once. Raises OSError, and ValueError for a file that is shorter."""
        self._address: int | None = None
        self._unmap = _libc.munmap
        self.nbytes = nbytes
        if os.fstat(fd).st_size < nbytes:  # to touch what is not there would end the process
            raise ValueError(f"a mapping of {nbytes} bytes of a file that has fewer")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _mmap(None, nbytes, access, mmap.MAP_SHARED | (_POPULATE if populate else 0), fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address = address
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, not writable)}

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self.nbytes)

    def array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Its bytes. The mapping stays for as long as this, or any view of it, does."""
        return np.asarray(self)

    def view(self, nbytes: int) -> memoryview:
        """The first `nbytes`, likewise."""
        return self.array().data[:nbytes]


def most_mappings() -> int:
    """Mappings of arrays that a process should keep: a quarter of what the system allows it, 8192 at most.

    The rest is for libraries, drivers and what is in use beyond those.
    """
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_bytes())
    except (OSError, ValueError):  # another system
        allowed = 1 << 16
    return max(min(allowed // 4, 8192), 1)
