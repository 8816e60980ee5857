"""Mappings of requests' memory that the device's driver knows: copies from and to them go straight over the link.

The front recycles the memory of one-shot products, so a mapping that is used a second time will be used again: its
pages are registered then, once, which takes as long as one or two copies through the ring of pinned memory. Files
cannot be registered (`cuda.pinned_ring` says why).
"""

from __future__ import annotations

import bisect
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MIN_BYTES: Final = 1 << 20  # below which a copy through the driver's own staging is as fast
_MAX_BYTES: Final = 256 << 20  # of one mapping: other calls of the driver may wait while it is registered

log = logging.getLogger(__name__)


class RegisteredMappings:
    """The mappings that are registered, by name. Every method may be called from any thread that uses the device."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """`register(address, nbytes)` makes pages known to the driver, `unregister(address)` ends that. What the first
        raises ends the registering of mappings for good; copies go other ways then.
        """
        self._register = register
        self._unregister = unregister
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        """Mappings that were used once."""
        self._known: dict[str, Bytes] = {}
        self._starts: list[int] = []
        """Addresses of the registered mappings, ascending."""
        self._ends: dict[int, int] = {}
        self._stuck: list[Bytes] = []
        """Mappings that the driver has not let go of: they stay."""
        self._possible = True

    def used(self, name: str, memory: Bytes) -> None:
        """Note a use of a mapping of memory; the second one has it registered."""
        if name in self._known or not _MIN_BYTES <= memory.size <= _MAX_BYTES or not self._possible:
            return
        with self._lock:
            if name not in self._seen:
                self._seen.add(name)
            elif name not in self._known:
                self._add(name, memory)

    def forget(self, name: str) -> None:
        """End the registration of a mapping that is about to be dropped; no copy is under way."""
        with self._lock:
            self._seen.discard(name)
            memory = self._known.pop(name, None)
            if memory is None:
                return
            start = memory.ctypes.data
            del self._starts[bisect.bisect_left(self._starts, start)]
            del self._ends[start]
            try:
                self._unregister(start)
            except Exception as error:
                # Other pages at its address would be taken for these.
                self._stuck.append(memory)
                log.warning("a mapping could not be unregistered: %s", error)

    def clear(self) -> None:
        """End the registration of all."""
        for name in [*self._known, *self._seen]:
            self.forget(name)

    def covers(self, memory: Bytes) -> bool:
        """Whether a device can copy straight from and to those bytes."""
        with self._lock:
            address = memory.ctypes.data
            position = bisect.bisect_right(self._starts, address) - 1
            return position >= 0 and address + memory.size <= self._ends[self._starts[position]]

    def _add(self, name: str, memory: Bytes) -> None:
        start = memory.ctypes.data
        try:
            self._register(start, memory.size)
        except Exception as error:
            self._possible = False
            log.warning("memory of requests cannot be registered: %s", error)
            return
        self._known[name] = memory
        bisect.insort(self._starts, start)
        self._ends[start] = start + memory.size
