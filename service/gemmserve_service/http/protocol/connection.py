"""Connection: one connection as its parts see it; the base of `protocol.HttpProtocol`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState

    from gemmserve_service.http.protocol.asgi_cycle import AsgiCycle
    from gemmserve_service.http.protocol.response_writer import FlowControl
    from gemmserve_service.http.transfer.pool import TransferPool

Body = tuple[bytes | memoryview, ...]
"""Body of an answer, in pieces."""


class Connection(asyncio.Protocol, ABC):
    """Attributes and calls that its parts use; belongs to the event loop's thread."""

    config: uvicorn.Config
    server_state: ServerState
    app_state: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    scheme: str
    address: str
    """Key by which connections are counted: the client's address or user."""
    counted: bool
    """Whether the registry counts it."""
    lost: bool
    transfers: TransferPool | None
    """The transfer processes, where there are any."""

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Whether an idle connection owes something: a first request, the rest of a head, the rest of a body."""

    @property
    @abstractmethod
    def alone(self) -> bool:
        """Whether no other connection is in the middle of a request, or has just been."""

    @abstractmethod
    def read_on(self) -> None:
        """Read on, unless requests wait in the queue: only the last one's body can be incomplete."""

    @abstractmethod
    def answered(self, cycle: AsgiCycle) -> None:
        """Go on: the answer to the first request in the queue is complete."""

    @abstractmethod
    def body_left(self, cycle: AsgiCycle) -> int:
        """Return how many bytes of the body of `cycle` are still in the socket; 0 where their number is unknown."""

    @abstractmethod
    def body_received(self, count: int) -> None:
        """Count bytes of the body that were received past the parser."""

    @abstractmethod
    def hand_over(self, data: bytes) -> None:
        """Give the parser, and then the app, a request that was to pass them by, as it came so far."""

    @abstractmethod
    def hand_over_cycle(self, cycle: AsgiCycle, data: bytes) -> None:
        """Give the app a request that was to pass it by, of whose body `data` have come."""

    @abstractmethod
    def reply(self, exchange: Any, status: bytes, head: bytes, body: Body) -> None:
        """Send a whole answer of a small request and go on to the next one."""

    @abstractmethod
    def drop(self) -> None:
        """Close a connection that is idle, for the sake of another."""

    @abstractmethod
    def too_slow(self) -> None:
        """End a connection whose head, rest of a body or next request did not come in time."""
