"""Operands of a job that are in several cells: the job's cell is that of the largest, and has copies of the others.

A job that comes to another cell is sent on (307), by the same rule everywhere, so that it arrives. A copy is an array
of the same owner, with a life and an id of its own and a label that says of which array; jobs after the first use it
while it lasts. Whether its origin is still there is asked each time: an array that was deleted is no operand any more,
copied or not.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve.wire import RESULT_DTYPES
from gemmserve_service.errors import OtherCell
from gemmserve_service.jobs.compile_program import arrays_of
from gemmserve_service.runtime import clock
from gemmserve_service.runtime.ids import cell_of
from gemmserve_service.schemas import GemmJob, GemmReduceJob, ProgramJob, View
from gemmserve_service.store.record import Tags

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import ExitStack
    from typing import Any

    from gemmserve_service.jobs.cells.peers import Peers
    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.tenancy.cells import Cells

COPY_OF: Final = "gemmserve.copy-of"
"""Label of a copy: the id of the array in the other cell."""

_LIFE_S: Final = 3600.0
_LEAST_LIFE_S: Final = 60.0
"""Seconds that a copy must have left to be used again."""


class Operands:
    """Gathers the operands of one cell's jobs; belongs to the event loop's thread."""

    def __init__(self, cells: Cells, store: ArrayStore, peers: Peers) -> None:
        self._cells = cells
        self._store = store
        self._peers = peers
        self._running: dict[tuple[str, str], asyncio.Task[ArrayInfo]] = {}

    async def gather(
        self, requests: Sequence[GemmJob | GemmReduceJob | ProgramJob], owner: str, held: ExitStack
    ) -> Sequence[GemmJob | GemmReduceJob | ProgramJob]:
        """Return the jobs with copies in the place of other cells' arrays, which `held` keeps until it is closed.

        Raises OtherCell where the largest operand is in another cell; NotFound, Gone, ArrayLost, CellAway of an operand
        there; what `ArrayStore.allocate` raises for a copy.
        """
        named = {name for request in requests for name in _names(request)}
        away = {name: cell for name in sorted(named) if (cell := self._cells.elsewhere(name)) is not None}
        if not away:
            return requests
        here = [await self._store.info(name, owner=owner) for name in named if name not in away]
        there = await asyncio.gather(*(self._peers.info(cell, name, owner) for name, cell in away.items()))
        largest = max((*here, *there), key=lambda info: (info.nbytes, -cell_of(info.id)))
        cell = self._cells.elsewhere(largest.id)
        if cell is not None:
            detail = f"the largest operand, {largest.id} of {largest.nbytes} bytes, is in cell {cell}"
            raise OtherCell(detail, f"{self._cells.urls[cell]}/v1/jobs")
        copies: dict[str, str] = {}
        for info in there:
            copy = await self._copy(info, away[info.id], owner)
            held.enter_context(self._store.pin(copy.id, owner=owner))
            copies[info.id] = copy.id
        return [_renamed(request, copies) for request in requests]

    async def _copy(self, info: ArrayInfo, cell: int, owner: str) -> ArrayInfo:
        """Return a copy that has some time to live: one that is there, or a new one; several jobs wait for the same."""
        tags = Tags(None, {COPY_OF: info.id})
        for found in await self._store.select(owner=owner, tags=tags):
            # Whoever labels an array so has the shape and the type of the origin, or another array than he means.
            same = (found.dtype, found.shape, found.order) == (info.dtype, info.shape, info.order)
            if same and (found.expires_at is None or found.expires_at.timestamp() - clock.time() > _LEAST_LIFE_S):
                return found
        key = (owner, info.id)
        running = self._running.get(key)
        if running is None:
            # A task of its own: a client that hangs up must not free space that a thread still writes to.
            running = self._running[key] = asyncio.create_task(self._fetch(info, cell, owner, tags))
            running.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(running)

    async def _fetch(self, info: ArrayInfo, cell: int, owner: str, tags: Tags) -> ArrayInfo:
        left_s = math.inf if info.expires_at is None else info.expires_at.timestamp() - clock.time()
        await self._store.make_room(info.nbytes, owner)
        upload = self._store.allocate(
            np.dtype(RESULT_DTYPES[info.dtype]), info.shape, info.order,
            ttl_s=max(min(_LIFE_S, left_s), 1.0), owner=owner, tags=tags,
        )  # fmt: skip
        try:
            with self._store.quotas.in_flight(owner, info.nbytes):
                await self._peers.fetch(cell, info.id, owner, upload.view)
            upload.advance(info.nbytes)
            copy: Any = await upload.commit()
        except BaseException:
            upload.discard()
            raise
        made: ArrayInfo = copy
        return made

    async def stop(self) -> None:
        """Wait for what is being copied."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)


def _names(request: GemmJob | GemmReduceJob | ProgramJob) -> Iterator[str]:
    """Ids of the stored arrays that a job names."""
    if isinstance(request, ProgramJob):
        for _, _, _, name in arrays_of(request.steps):
            yield name
        return
    for field in _FIELDS:
        operand = getattr(request, field, None)
        if operand is not None:
            yield operand.id if isinstance(operand, View) else operand


def _renamed(
    request: GemmJob | GemmReduceJob | ProgramJob, copies: Mapping[str, str]
) -> GemmJob | GemmReduceJob | ProgramJob:
    """The same job with copies in the place of their origins."""
    if isinstance(request, ProgramJob):
        steps = [step.model_copy(update=_changes(step, step.operands, copies)) for step in request.steps]
        return request.model_copy(update={"steps": steps})
    return request.model_copy(update=_changes(request, _FIELDS, copies))


def _changes(model: Any, fields: Sequence[str], copies: Mapping[str, str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for field in fields:
        operand = getattr(model, field, None)
        if isinstance(operand, View) and operand.id in copies:
            changed[field] = operand.model_copy(update={"id": copies[operand.id]})
        elif isinstance(operand, str) and operand in copies:
            changed[field] = copies[operand]
    return changed


_FIELDS: Final = ("a", "b", "c")
