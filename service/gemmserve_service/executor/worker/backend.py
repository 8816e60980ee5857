"""DeviceBackend: operations of a worker on its device, on host arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from gemmserve_kernels import Operand, gemm, gemm_reduce
from gemmserve_service.products import build_operation, options
from gemmserve_service.schemas import GemmParams, GemmReduceParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from gemmserve_kernels import DeviceSpec
    from gemmserve_kernels.blocks.grid import Grid, Index
    from gemmserve_kernels.blocks.memory_plan import MemoryPlan
    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.protocol import Kind
    from gemmserve_service.executor.worker.batches import Products
    from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots, PanelUse, Side
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.programs import Value
    from gemmserve_service.schemas import Elements, StepParams, Timings, View

T = TypeVar("T")


class DeviceUnavailable(RuntimeError):  # noqa: N818 (says what is the case, as a sentence)
    """The device that a worker was started for cannot be used; restarting does not help."""


def go_on() -> None:
    """The checkpoint of those whom nobody stops."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An operand in host memory; `cache_id` names it where it is immutable, so that a device copy may be kept."""

    data: np.ndarray[Any, Any]
    """Its bytes; with `fetch` its shape, dtype and order alone."""
    cache_id: str | None = None
    fetch: Callable[[], np.ndarray[Any, Any]] | None = None
    """Function that brings its bytes to the host, of an operand that may be on the device alone. Raises OSError."""
    panel: PanelUse | None = None
    """Slot of the device that it belongs in, where it is a panel of a large product's operand."""
    part_of: tuple[str, Index] | None = None
    """Id of the immutable array that it is a part of, and which part, where it is one."""

    def read(self) -> np.ndarray[Any, Any]:
        """Return its bytes on the host. Raises OSError and MemoryError where they had to be brought there."""
        return self.data if self.fetch is None else self.fetch()


class Values(Protocol):
    """Values of a program while it runs."""

    away: bool
    """Whether results are made elsewhere than at their place, which `deliver` brings them to."""

    @property
    def under_way(self) -> int:
        """Steps that `run` has started and that may not be over."""

    def load(self, operand: HostArray) -> Any:
        """A stored array."""

    def view(self, value: Any, view: View) -> Any:
        """Elements of a value of this program; their conjugates in memory of their own."""

    def empty(self, value: Value) -> Any:
        """Room for a value that is no result."""

    def result(self, out: np.ndarray[Any, Any]) -> Any:
        """Room for a value that is one."""

    def run(self, params: StepParams, operands: Mapping[str, Any], made: Mapping[str, Any]) -> Callable[[], float]:
        """Do a step, or start it; return a function that gives the seconds that it took, once it is over."""

    def deliver(self, value: Any, out: np.ndarray[Any, Any]) -> None:
        """Brings a result to its place."""

    def check(
        self,
        params: StepParams,
        operands: Mapping[str, Any],
        made: Mapping[str, Any],
        what: str,
    ) -> Verdict:
        """Check what `run` has made; a wrong result is replaced."""

    def finish(self) -> Timings:
        """Waits for the end; seconds by phase, checks excluded."""


class TinyProduct(Protocol):
    """Tiny products of one form, which one thread computes from beginning to end, one after the other: `begin`,
    `store` for each result, `finish`, whatever the others raise.
    """

    def resident(self, arrays: Sequence[str]) -> Sequence[Any] | None:
        """Return the device's copies of these arrays; None: it has not got all of them."""

    def begin(self, operands: Sequence[Any]) -> None:
        """Have the device compute, from such copies or the bytes of arrays of the host, in the form's order."""

    def store(self, name: str, memory: np.ndarray[Any, Any]) -> None:
        """Have a result taken to memory of the host, its bytes."""

    def finish(self, kept: Mapping[str, str]) -> tuple[Timings, Elements | None]:
        """Wait until all that is done; return the seconds by phase, and how the elements were computed. `kept`: ids of
        results of which a copy stays on the device, if there is room.
        """


@runtime_checkable
class TinyBackend(Protocol):
    """Device that has a shorter way for tiny products: its method beyond `DeviceBackend`."""

    def tiny(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, Kind],
        results: Mapping[str, Kind],
    ) -> TinyProduct | None:
        """Return what computes tiny products of these arrays; None: they go the way of all others."""


class BegunProduct(Protocol):
    """A product that a device was given."""

    made: Mapping[str, Any]
    """The results on the device."""

    @property
    def over(self) -> bool:
        """Whether the device has done it."""

    def finish(self) -> tuple[Timings, Elements | None]:
        """Wait until it has, in any thread; return the seconds by phase, and how the elements were computed."""


class ResidentProduct(Protocol):
    """Products of one form whose operands are on the device and whose results stay there, one behind the other."""

    def resident(self, arrays: Sequence[str]) -> Sequence[Any] | None:
        """Return the device's copies of these arrays, in the form's order; None: it has not got all of them, or keeps
        something else that is made of them, and was not yet.
        """

    def begin(self, operands: Sequence[Any]) -> BegunProduct:
        """Have the device compute from such copies."""


@runtime_checkable
class ResidentBackend(Protocol):
    """Device that can be given such products: its method beyond `DeviceBackend`."""

    def resident(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, Kind],
        results: Mapping[str, Kind],
    ) -> ResidentProduct | None:
        """Return what computes products of these arrays; None: they go the way of all others."""


class DeviceBackend(Protocol):
    """One device."""

    spec: DeviceSpec
    cuts: bool
    """Whether large products are always computed in panels."""
    planned_bytes: int
    """Bytes of device memory that plans of large products count on."""

    def spec_fields(self) -> dict[str, Any]:
        """`spec` as it travels."""

    def memory_used(self) -> int:
        """Bytes of device memory taken by this process."""

    def read_counts(self) -> Reading | None:
        """Read how elements of results were computed, up to what this thread has enqueued; None: it does not count."""

    def run(
        self,
        params: StepParams,
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

    def plan_blocks(self, grid: Grid) -> MemoryPlan:
        """Return the device's way through a large product's blocks. Raises KernelError."""

    def open_panels(self, parent: str, grid: Grid) -> PanelSlots | None:
        """Return the slots of a large product's panels, those that there are where it is the last one that was asked
        for; None: there is no room for a pair of them.
        """

    def bring_ahead(self, slots: PanelSlots, indices: Sequence[int], operand: Callable[[Side, int], HostArray]) -> None:
        """Bring panels of blocks that will probably come, in that order, as soon as their slots are free."""

    def close_panels(self, parent: str) -> None:
        """Let go of that product's panels, if they are here."""

    def forget(self, array: str) -> None:
        """Drops what it keeps of an array that is gone."""

    def run_program(self, run: Callable[[Values], T], checkpoint: Callable[[], None] = go_on) -> T:
        """Return what `run` returns, called with where the program's values are to live; called again, if memory ran
        out, with another place.
        """


def call(
    params: StepParams,
    operands: Mapping[str, Any],
    results: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
) -> None:
    """The kernels' public function for `params`, or its operation, on arrays of either library. `given`: the
    `options` of a product, where they are known.
    """
    if isinstance(params, GemmParams):
        given = options(params) if given is None else given
        gemm(operands["a"], operands["b"], operands.get("c"), out=results["d"], **given)
    elif isinstance(params, GemmReduceParams):
        given = options(params) if given is None else given
        gemm_reduce(operands["a"], operands["b"], out=dict(results), **given)
    else:
        described = {name: Operand.of(array) for name, array in operands.items()}
        build_operation(params, described).run(operands, results)
