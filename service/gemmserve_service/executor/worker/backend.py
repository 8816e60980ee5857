"""DeviceBackend: operations of a worker on its device, on host arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gemmserve_kernels import gemm, gemm_reduce
from gemmserve_service.products import options
from gemmserve_service.schemas import GemmParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np

    from gemmserve_kernels import DeviceSpec
    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.worker.batches import Products
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.programs import Value
    from gemmserve_service.schemas import GemmReduceParams, Timings

T = TypeVar("T")


class DeviceUnavailable(RuntimeError):  # noqa: N818 (says what is the case, as a sentence)
    """The device that a worker was started for cannot be used; restarting does not help."""


def go_on() -> None:
    """The checkpoint of those whom nobody stops."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An operand in host memory; `cache_id` names it where it is immutable, so that a device copy may be kept."""

    data: np.ndarray[Any, Any]
    cache_id: str | None = None


class Values(Protocol):
    """Values of a program while it runs."""

    away: bool
    """Whether results are made elsewhere than at their place, which `deliver` brings them to."""

    def load(self, operand: HostArray) -> Any:
        """A stored array."""

    def empty(self, value: Value) -> Any:
        """Room for a value that is no result."""

    def result(self, out: np.ndarray[Any, Any]) -> Any:
        """Room for a value that is one."""

    def run(
        self, params: GemmParams | GemmReduceParams, operands: Mapping[str, Any], made: Mapping[str, Any]
    ) -> Callable[[], float]:
        """Do a step, or start it; return a function that gives the seconds that it took, once it is over."""

    def deliver(self, value: Any, out: np.ndarray[Any, Any]) -> None:
        """Brings a result to its place."""

    def check(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, Any],
        made: Mapping[str, Any],
        what: str,
    ) -> Verdict:
        """Check what `run` has made; a wrong result is replaced."""

    def finish(self) -> Timings:
        """Waits for the end; seconds by phase, checks excluded."""


class DeviceBackend(Protocol):
    """One device."""

    spec: DeviceSpec
    cuts: bool
    """Whether large products are always computed in panels."""

    def spec_fields(self) -> dict[str, Any]:
        """`spec` as it travels."""

    def memory_used(self) -> int:
        """Bytes of device memory taken by this process."""

    def read_counts(self) -> Reading | None:
        """Read how elements of results were computed, up to what this thread has enqueued; None: it does not count."""

    def run(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None] = go_on,
    ) -> Timings:
        """Computes into `results`, every byte of them. Raises KernelError, DeviceError, MemoryError.

        `checkpoint` is called between parts of the work; what it raises ends it.
        """

    def run_many(self, products: Products, checkpoint: Callable[[], None] = go_on) -> Timings:
        """`run` for each of them, with the same bits. Those that are to be checked are where they are on a device."""

    def repeated(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, np.ndarray[Any, Any]],
        results: Mapping[str, np.ndarray[Any, Any]],
    ) -> Callable[..., None] | None:
        """`run` for small products that lie like this one, with the same bits: called with the operands and then the
        results. None: there is no shorter way.
        """

    def forget(self, array: str) -> None:
        """Drops what it keeps of an array that is gone."""

    def flush(self, arrays: Iterable[str | None]) -> None:
        """Returns when the bytes of those arrays are in host memory."""

    def run_program(self, run: Callable[[Values], T], checkpoint: Callable[[], None] = go_on) -> T:
        """Return what `run` returns, called with where the program's values are to live; called again, if memory ran
        out, with another place.
        """


def call(params: GemmParams | GemmReduceParams, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """The kernels' public function for `params`, on arrays of either library."""
    if isinstance(params, GemmParams):
        gemm(operands["a"], operands["b"], operands.get("c"), out=results["d"], **options(params))
    else:
        gemm_reduce(operands["a"], operands["b"], out=dict(results), **options(params))
