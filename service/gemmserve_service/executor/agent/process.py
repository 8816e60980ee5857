"""The agent's process: logs, limits, and an event loop that runs it."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any

from gemmserve_service.executor.agent.agent import Agent
from gemmserve_service.runtime import logs
from gemmserve_service.runtime.tuning import (
    keep_freed_memory,
    keep_from_collector,
    raise_file_limit,
    share_interpreter,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.runtime.handoff import AgentHandoff


def run(handoff: AgentHandoff) -> int:
    """Run an agent until SIGTERM; return the exit status. Raises UsageError."""
    logs.configure(handoff.settings)
    raise_file_limit()
    keep_freed_memory()
    share_interpreter()
    agent = Agent(handoff)
    keep_from_collector()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(agent.run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    uvloop: Any = importlib.import_module("uvloop")
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
