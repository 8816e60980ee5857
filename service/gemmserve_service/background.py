"""Work that nobody awaits: what goes wrong with it is in the log at least."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)


def report(done: asyncio.Future[Any]) -> None:
    """A callback for what has ended."""
    if not done.cancelled() and done.exception() is not None:
        log.error("background work failed", exc_info=done.exception())
