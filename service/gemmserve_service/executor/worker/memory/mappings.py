"""Mappings of the front's extents, kept open between tasks: a recycled extent comes with its pages faulted in."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_service.runtime.mapping import Mapping, most_mappings
from gemmserve_service.store.extents.extents import map_sealed

if TYPE_CHECKING:
    from gemmserve_service.executor.protocol import ArrayRef
    from gemmserve_service.executor.worker.memory.host_arena import HostArena
    from gemmserve_service.executor.worker.memory.registered_mappings import RegisteredMappings

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAX_MAPPINGS: Final = most_mappings()
_MEMORY: Final = "/proc/"
"""Beginning of the paths of memory, which has no name in a folder."""


class Mappings:
    """Extents by name, the least recently used dropped first. Every method may be called from any thread."""

    def __init__(self, arena: HostArena | None = None, registered: RegisteredMappings | None = None) -> None:
        """`arena`: memory that has a mapping already, which stays. `registered` is told of uses of requests' memory."""
        self._arena = arena
        self._registered = registered
        self._lock = threading.Lock()
        self._maps: OrderedDict[str, Bytes] = OrderedDict()

    def array(self, ref: ArrayRef, *, writable: bool = False) -> np.ndarray[Any, Any]:
        """The array that `ref` names, over the mapping itself. Raises OSError if the extent is gone."""
        dtype = np.dtype(ref.dtype)
        if ref.extent is None or ref.nbytes == 0:
            return np.empty(ref.shape, dtype, order=ref.order)
        mapping = self.of(ref.extent, ref.path, ref.capacity)
        array: np.ndarray[Any, Any] = np.ndarray(ref.shape, dtype, mapping, ref.offset, order=ref.order)
        array.flags.writeable = writable
        return array

    def of(self, extent: str, path: str, capacity: int) -> Bytes:
        """The mapping of an extent. Raises OSError if it is gone, ValueError if it is shorter."""
        if self._arena is not None and path == self._arena.path:
            return self._arena.memory
        with self._lock:
            mapping = self._maps.get(extent)
            if mapping is None:
                mapping = self._maps[extent] = _map(path, capacity)
                if len(self._maps) > _MAX_MAPPINGS:
                    self._drop(next(iter(self._maps)))
            else:
                self._maps.move_to_end(extent)
            if self._registered is not None and path.startswith(_MEMORY) and mapping.flags.writeable:
                self._registered.used(extent, mapping)
            return mapping

    def __contains__(self, extent: str) -> bool:
        """Whether an extent, of no arena, is mapped."""
        return extent in self._maps

    def forget(self, extents: list[str]) -> None:
        """Drops mappings of extents that are gone: their space is freed once nobody maps them."""
        with self._lock:
            for name in extents:
                self._drop(name)

    def clear(self) -> None:
        """Drops every mapping."""
        with self._lock:
            for name in list(self._maps):
                self._drop(name)

    def _drop(self, name: str) -> None:
        if self._registered is not None:
            self._registered.forget(name)
        self._maps.pop(name, None)


def _map(path: str, capacity: int) -> Bytes:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return Mapping(fd, capacity).array()
    except PermissionError:  # sealed: an operand in the memory of the client that sent it
        return map_sealed(path, capacity).array()
    finally:
        os.close(fd)
