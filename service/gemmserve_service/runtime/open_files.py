"""Sharing of the files that the front may open: connections, memory of requests, and what it needs itself.

Stored arrays take none, however many there are (`mapping`).
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_service.settings import Settings

_OWN: Final = 256  # databases, logs, workers, files that are opened for a moment; some fifty were counted
_CONNECTIONS: Final = 0.75  # of what is left, at most; the others are pieces of memory, past which there are files
_MAX_MEMORY: Final = 8192


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Shares of the front's uses in a limit of open files."""

    limit: int
    connections: int
    """Connections at one time."""
    memory: int
    """Pieces of memory for operands and results of requests; what goes beyond them lies in files, which need none."""
    wanted: int
    """The least limit that would allow what settings ask for."""

    @classmethod
    def of(cls, settings: Settings, limit: int | None = None) -> OpenFiles:
        """Shares `limit` out; None: this process's, as it is now."""
        if limit is None:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        own = _OWN + settings.max_shared_descriptors
        wanted = own + int(settings.max_connections / _CONNECTIONS) + 1
        if limit == resource.RLIM_INFINITY:
            return cls(limit, settings.max_connections, _MAX_MEMORY, wanted)
        left = max(limit - own, limit // 4, 2)
        connections = max(min(settings.max_connections, int(left * _CONNECTIONS)), 1)
        return cls(limit, connections, min(left - connections, _MAX_MEMORY), wanted)

    def __str__(self) -> str:
        limit = "no limit of open files" if self.limit == resource.RLIM_INFINITY else f"at most {self.limit} open files"
        return (
            f"{limit}: {self.connections} connections, {self.memory} operands and results of requests in memory "
            "(others in files), any number of stored arrays"
        )
