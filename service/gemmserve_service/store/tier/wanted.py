"""Wanted: a request for arrays that somebody needs at one time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.store.pin import Pinned


@dataclass(eq=False)
class Wanted:
    """Arrays that somebody needs together: they come back together, or wait together for room.

    What is there stays until each pin has been used or released.
    """

    pins: Sequence[Pinned]
    granted: bool = False
    """Whether there was room for them, so that they come."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Ends when all of them are there, or with the error of one."""

    @property
    def held(self) -> bool:
        """Whether somebody waits for them, or is about to use them."""
        return any(pinned.held and not pinned.used for pinned in self.pins)
