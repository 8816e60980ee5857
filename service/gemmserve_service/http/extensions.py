"""Extensions of the ASGI scope by which an app receives and sends large bodies without copies.

Keys of `scope["extensions"]` and the protocols of what is there. `protocol.body_receiver` implements them; middleware,
request bodies and answers use them where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.store.extents.extents import Place

RECEIVER: Final = "gemmserve.body_receiver"
"""Key in the ASGI scope's `extensions`, of a `Receiver`."""
SENDER: Final = "gemmserve.body_sender"
"""Key likewise, of a `Sender`."""


class Receiver(Protocol):
    """A request's body as an app finds it in its scope."""

    async def read_into(self, view: memoryview, patience_s: float) -> int:
        """Reads the body's next bytes to the start of `view`; returns how many came, when it is full, the body has
        ended, or `patience_s` have passed. Raises ClientDisconnect.
        """

    def movable(self, count: int) -> bool:
        """Whether a transfer process might be given the body's next `count` bytes just now."""

    async def move_into(self, place: Place, count: int, patience_s: float) -> int:
        """Like `read_into`, by a transfer process; 0 also when it is better not asked now: then read."""


class Sender(Protocol):
    """An answer's body as an app finds it in its scope."""

    on_bytes: Callable[[int], None]
    """Called with the number of bytes that went past ASGI; the middleware's to set."""

    def sendable(self, count: int) -> bool:
        """Return whether a transfer process might send the next `count` bytes of the answer just now."""

    async def send_from(self, place: Place, count: int, patience_s: float) -> int:
        """Send the answer's next bytes by a transfer process from `place`; return how many went.

        0: it is better not asked now. Raises ClientDisconnect.
        """

    def sent(self, count: int) -> None:
        """Count bytes of the answer that went through ASGI."""
