"""Uploaded arrays go to a device that has room for them, so that the first job on them finds them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.protocol import ArrayRef, Prefetch

if TYPE_CHECKING:
    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.extents.extents import Extent

_MIN_BYTES: Final = 1 << 18  # bytes below which it takes longer to talk about a copy than to make it


class Prefetcher:
    """Tells workers of new arrays. Which of them it can take a worker decides: what it says of its room is old."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def stored(self, info: ArrayInfo, extent: Extent | None) -> None:
        """An array was uploaded."""
        if extent is None or info.nbytes < _MIN_BYTES:
            return
        roomy = [worker for worker in self._executor.workers() if _room(worker) >= info.nbytes]
        if roomy:
            worker = max(roomy, key=_room)
            name, capacity = extent.file
            ref = ArrayRef(
                extent=name,
                path=extent.path,
                capacity=capacity,
                nbytes=info.nbytes,
                dtype=info.dtype,
                shape=info.shape,
                order=info.order,
                cache_id=info.id,
                offset=extent.start,
            )
            self._executor.send(worker, Prefetch(array=ref))


def _room(worker: Worker) -> int:
    """Bytes that its device could keep without anything having to go."""
    if not worker.ready or worker.kept is None:
        return -1
    return worker.kept.budget - worker.kept.used
