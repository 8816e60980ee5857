"""Mappings of the front's extents, kept open between tasks: a recycled extent comes with its pages faulted in."""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from gemmserve_service.executor.protocol import ArrayRef

_MOST: Final = 1024  # of the 65,530 mappings that Linux allows a process by default


class Mappings:
    """Extents by name, the least recently used dropped first."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def array(self, ref: ArrayRef, *, writable: bool = False) -> np.ndarray[Any, Any]:
        """The array that `ref` names, over the mapping itself. Raises OSError if the extent is gone."""
        dtype = np.dtype(ref.dtype)
        if ref.extent is None or ref.nbytes == 0:
            return np.empty(ref.shape, dtype, order=ref.order)
        mapping = self._maps.get(ref.extent)
        if mapping is None:
            mapping = self._maps[ref.extent] = _map(ref.path, ref.capacity)
            if len(self._maps) > _MOST:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(ref.extent)
        flat = np.frombuffer(mapping, dtype, count=math.prod(ref.shape))
        flat.flags.writeable = writable
        return flat.reshape(ref.shape, order=ref.order)

    def forget(self, extents: list[str]) -> None:
        """Drops mappings of extents that are gone: their space is freed once nobody maps them."""
        for name in extents:
            self._maps.pop(name, None)

    def clear(self) -> None:
        """Drops every mapping."""
        self._maps.clear()


def _map(path: str, capacity: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, capacity)
    finally:
        os.close(fd)
