"""Door: what links and data connections ask of the executor behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.executor.join_protocol import Join
    from gemmserve_service.executor.joined.assignments import File
    from gemmserve_service.executor.joined.link import Link
    from gemmserve_service.executor.port import ExecutorOwner
    from gemmserve_service.executor.protocol import Hello


@dataclass(slots=True)
class JoinCounts:
    """Counts since the front's start."""

    joined: int = 0
    """Links that workers joined by."""
    lost: int = 0
    """Links of ready workers that ended."""
    refused: int = 0
    """Workers that were not let in."""
    fetched_bytes: int = 0
    """Bytes of operands that nodes were sent."""
    returned_bytes: int = 0
    """Bytes of results that came from nodes."""
    stale_results: int = 0
    """Results that were refused: the work was somebody else's by then."""


class Door(Protocol):
    """Side of the executor that connections see, in the event loop's thread."""

    counts: JoinCounts
    owner: ExecutorOwner | None

    def joins(self, link: Link, join: Join) -> None:
        """Let a worker in, or refuse it."""

    def greets(self, link: Link, hello: Hello) -> None:
        """Take in a worker's hello. Raises ValueError for one that makes no sense."""

    def disconnected(self, link: Link) -> None:
        """Note that a link has ended."""

    def link_of(self, secret: str) -> Link | None:
        """Return the live link of a secret."""

    def had_link(self, secret: str) -> bool:
        """Whether it is the secret of a link that has ended."""

    def memory(self, file: File) -> memoryview:
        """Return the bytes of a file of the store. Raises OSError, ValueError."""

    def write(self, file: File, start: int, piece: memoryview, *, by_file: bool) -> None:
        """Write bytes to a file of the store; `by_file`: without mapping it. Raises OSError, ValueError."""

    def soon(self, callback: Callable[[], None]) -> None:
        """Have something go on in the next turn of the event loop."""
