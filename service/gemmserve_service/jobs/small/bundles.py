"""Tasks whose arrays lie side by side in one extent of their own: reserved once, mapped once, given back once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_service.executor.protocol import Work
from gemmserve_service.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_kernels import Plan
    from gemmserve_service.executor.protocol import ExtentRow, Part
    from gemmserve_service.programs import Problem
    from gemmserve_service.scheduling.tasks import Listener
    from gemmserve_service.schemas import GemmParams, GemmReduceParams
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.extents.space import Room
    from gemmserve_service.store.upload import Upload

_ALIGNED: Final = 64  # where each array begins: a processor's cache line, and more than any vector load wants
_BYTES: Final = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class Slot:
    """An array in a bundle."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    nbytes: int
    offset: int


class Layout:
    """Gives each array its place, one after the other; `nbytes` is what they need together."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.largest = 0
        """Bytes of the largest array."""

    def place(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Slot:
        """The next array's place."""
        nbytes = math.prod(shape) * dtype.itemsize
        slot = Slot(name, dtype.newbyteorder("=").name, shape, order, nbytes, self.nbytes)
        self.nbytes += -(-nbytes // _ALIGNED) * _ALIGNED
        self.largest = max(self.largest, nbytes)
        return slot


def reserve(store: ArrayStore, nbytes: int, *, largest: int, owner: str) -> Upload:
    """An extent for a bundle of `nbytes` > 0, charged to its owner's bytes in flight.

    Raises TooLarge for an array of more bytes than the server takes; StoreFull, QuotaExceeded.
    """
    store.check_size(largest, scratch=True, owner=owner)
    store.quotas.check_bytes(owner, nbytes, scratch=True)
    return store.allocate(_BYTES, (nbytes,), "C", ttl_s=math.inf, scratch=True, owner=owner, granted=True)


class BundleTask(Task):
    """A task on a bundle; `operands` and `results` are empty."""

    def __init__(
        self,
        task_id: str,
        params: GemmParams | GemmReduceParams,
        problem: Problem,
        listener: Listener,
        *,
        room: Room,
        parts: Callable[[str], list[Part]],
        **fields: Any,
    ) -> None:
        """`parts`: of its message, by an algorithm; `fields` are those of `Task`."""
        super().__init__(task_id, params, problem, {}, {}, listener, **fields)
        self.room = room
        self._parts = parts

    def message(self, chosen: Plan, *, verify: bool) -> Work:
        """See `Task`."""
        extent = self.room.extent
        name, nbytes = extent.file
        rows: list[ExtentRow] = [(name, extent.path, nbytes, extent.start, None)]
        return Work(task=self.id, extents=rows, parts=self._parts(chosen.algorithm), verify=verify)

    def close(self, *, reusable: bool = True) -> None:
        """See `Task`; idempotent."""
        self.room.give_back(reusable=reusable)
