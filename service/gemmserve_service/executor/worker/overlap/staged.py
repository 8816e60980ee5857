"""A device whose products have stages, as a worker that overlaps them sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from gemmserve_service.executor.worker.backend import HostArray
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams, Timings


class StagedProduct(Protocol):
    """One product on its way through a device."""

    timings: Timings
    made: Mapping[str, Any]
    """The results on the device, from when they are computed until they are stored; of backends with a write_queue."""
    verdict: Verdict | None
    """Verdict on the results, if they were to be checked and the device could, from when they are computed."""
    elements: Elements | None
    """Counts of the ways in which their elements were computed, likewise, where that depends on the data."""

    def load(self) -> None:
        """Brings the operands."""

    def compute(self) -> None:
        """Have the device compute; brings the operands first, if they are not there."""

    def finish(self) -> None:
        """Wait until it has; the operands are let go."""

    def store(self) -> None:
        """Takes the results to the host."""

    def release(self) -> None:
        """Lets go of operands that were loaded ahead."""


@runtime_checkable
class OverlappingBackend(Protocol):
    """Device that computes in stages: its methods beyond `DeviceBackend`."""

    out_of_memory: tuple[type[BaseException], ...]

    def enter(self, *, express: bool = False) -> None:
        """Makes the calling thread one that uses the device, on a stream of its own; of high priority for `express`."""

    def product(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
        *,
        check: str | None,
    ) -> StagedProduct:
        """A product to be taken through its stages; `check`: what it is called, where it is to be checked on the
        device, if that can be.
        """
