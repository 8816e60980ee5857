"""A durable job as long as it is in memory: what its watchers are told, and what it holds until its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import contextlib

    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import JobInfo


@dataclass(eq=False)
class LiveJob:
    """A durable job that is not final, or was not when somebody began to watch it."""

    history: list[JobInfo]
    held: contextlib.ExitStack
    """What is given back at its end."""
    task: Task | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its end is on record. Not `changed`: that one stays set when the server drains."""
    refused: Exception | None = None
    """Why the job itself could not be put on record: nobody was told that it was accepted."""

    @property
    def info(self) -> JobInfo:
        """The job now."""
        return self.history[-1]

    @property
    def size(self) -> tuple[int, int]:
        """Bytes and operations of its problem, once that is known."""
        return (0, 0) if self.task is None else self.task.size

    def change(self, info: JobInfo) -> None:
        """From now on it is that; whoever watches it is told."""
        self.history.append(info)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
