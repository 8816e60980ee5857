"""Handoff from the supervisor to a child at its start: settings and inherited descriptors, as JSON on stdin."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 (pydantic resolves it at run time)
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from gemmserve_service.runtime.tuning import exit_with, keep_freed_memory, raise_file_limit
from gemmserve_service.settings import Settings  # noqa: TC001 (pydantic resolves it at run time)

if TYPE_CHECKING:
    from typing import Self


class _Handoff(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Settings
    pipe_fd: int
    """Its other end is the supervisor's alone: end of file means that the supervisor is gone."""

    @classmethod
    def receive(cls) -> Self:
        """Reads standard input to its end and prepares the process: limits, malloc, the supervisor's pipe."""
        handoff = cls.model_validate_json(sys.stdin.read())
        exit_with(handoff.pipe_fd)
        raise_file_limit()
        keep_freed_memory()
        return handoff


class FrontHandoff(_Handoff):
    """Handoff to the front process."""

    listen_fd: int
    side_fd: int | None = None
    """The second port's socket, where there is one."""
    unix_fd: int | None = None
    """The Unix socket, where there is one."""
    descriptors_fd: int | None = None
    """The socket beside it that takes shared memory."""
    transfer_fd: int | None = None
    """The socket that transfer processes connect to, where there are any."""
    control_fd: int
    join_fd: int | None = None
    """The socket of the port by which workers join, where there is one."""
    ready_fd: int
    """A pipe to the supervisor: "1" once the front answers and a worker is ready, "." every second besides."""
    demand_fd: int | None = None
    """A pipe to the bridge to Ray, where there is one: how many jobs wait and run, twice a second."""
    devices: list[str]
    arena_path: str | None = None
    """Path of the memory that results come to from devices (`store.extents.arena`), if there is any."""
    arena_bytes: int = 0
    arena_writers: list[str] = []
    """Ids of workers that an earlier front may have told to write there."""


class RayHandoff(_Handoff):
    """Handoff to the bridge to Ray."""

    demand_fd: int
    """The other end of the front's."""
    join_url: str
    """By which Ray's nodes reach the join port."""


class TransferHandoff(_Handoff):
    """Handoff to a transfer process."""

    name: str
    control_path: str


class WorkerHandoff(_Handoff):
    """Handoff to the worker of one device."""

    device: str
    control_path: str
    arena_path: str | None = None
    """Likewise."""
    arena_bytes: int = 0
    panels_path: str | None = None
    """Path of the table of panels that devices of this host have (`executor.worker.blocks.panel_table`), if they share
    any."""
    panels_row: int = 0
    """This device's row in it."""


class AgentHandoff(_Handoff):
    """Handoff to the agent of one device of a node that joins a front; with `pipe_fd` -1 it has no parent."""

    join: str
    """URL of the front's port for workers."""
    token: str | None = Field(None, repr=False)
    name: str
    """Name of the node."""
    device: str
    memory_bytes: int
    """Memory for operands and results on the node."""
    inline_bytes: int
    """Bytes of a task's results that go to the front with the answer."""
    insecure: bool = False
    """Whether it may join without TLS beyond loopback."""
    ca_file: Path | None = None
    """PEM file of the certificates that the front's is verified by; None: the system's."""
