"""Cold: state of an array whose bytes are in the tier alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from gemmserve_service.errors import ServiceError


@dataclass(eq=False)
class Cold:
    """Array that has no extent. For its bytes ask `Tier.bring_back`, or `Tier.read_range` for some of them."""

    leaving: asyncio.Future[None] | None = None
    """The write that puts on record that it has no extent any more, as long as that is under way."""
    fetch: asyncio.Future[None] | None = None
    """End of the transfer that brings it back, whoever asked first."""
    error: ServiceError | None = None
    """Error for which it could not be brought back, where trying again would not mend it."""
