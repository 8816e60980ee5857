"""CpuBackend: NumPy and its BLAS in the place of a device, large products in panels."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from gemmserve_kernels import DeviceSpec, GemmProblem, Operand
from gemmserve_kernels.algorithms.cpu.gemm import one_call, run_gemm
from gemmserve_kernels.blocks.memory_plan import plan_memory
from gemmserve_kernels.device.interruption import interruptible, pieces
from gemmserve_service.executor.port import spec_adapter
from gemmserve_service.executor.worker.backend import call, go_on
from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots
from gemmserve_service.executor.worker.health.processor import open_processor
from gemmserve_service.executor.worker.host.blas import BlasThreads, flops_per_call
from gemmserve_service.executor.worker.host.values import HostValues
from gemmserve_service.executor.worker.panels import grid, plan_grid
from gemmserve_service.products import build
from gemmserve_service.schemas import GemmParams, GemmReduceParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_kernels.blocks.memory_plan import MemoryPlan
    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.worker.backend import HostArray, Values
    from gemmserve_service.executor.worker.batches import Products
    from gemmserve_service.executor.worker.blocks.panel_slots import Pin
    from gemmserve_service.schemas import DeviceHealth, StepParams

T = TypeVar("T")

_PANEL_FLOPS: Final = 1 << 30
"""Operations of a panel on a processor, a hundredth of a second on two: what a cancellation, or somebody else's small
product, waits for. Square panels of that size are a seventh slower than the whole product, and 7 % slower than panels
twice as large, beside which the 99th percentile of small products was 2.6 times that in peace (1.5 beside these)."""

_PANEL_BYTES: Final = 16 << 20
"""Bytes of a panel's operands and results, likewise: fresh pages of a file take 20 to 50 ms, for few operations too."""
_PANEL_PRODUCTS: Final = 1 << 17
"""Matrices of a batch in a panel: NumPy needs a fraction of a microsecond for each, however small."""

_REPEATED_ELEMENTS: Final = 1 << 21
"""Elements of a product that is reduced without a look at who wants the worker: some ten milliseconds."""

_PAGE: Final = 4096
_FILLED_BYTES: Final = 16 << 20
"""Bytes of a panel that are copied between two moments at which a product can be stopped."""

_STACKED_BYTES: Final = 8 << 20
"""Bytes of the operands and results of many small products between two looks whether anybody wants the worker."""
_STACKED_PRODUCTS: Final = 1024
"""Those products, at most: some have no bytes."""


class CpuBackend:
    """NumPy and its BLAS, from mapping to mapping without a copy."""

    cuts = True

    def __init__(self, memory_bytes: int | None = None) -> None:
        """`memory_bytes`: what a large product's panels may take; None: no more than they need."""
        self.spec = DeviceSpec.cpu()
        self.planned_bytes = 0 if memory_bytes is None else memory_bytes
        self._panels: tuple[str, PanelSlots] | None = None
        self._threads = BlasThreads()

    def spec_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = spec_adapter().dump_python(self.spec, mode="json")
        return fields

    def memory_used(self) -> int:
        return 0

    def open_probe(self) -> Callable[[], DeviceHealth]:
        """See `health.monitor.Monitor`."""
        return open_processor()

    def read_counts(self) -> Reading | None:
        return None

    def run(
        self,
        params: StepParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None] = go_on,
    ) -> Timings:
        start = time.perf_counter()
        checkpoint()
        if not any(array.size for array in results.values()):  # of which there may be any number
            return Timings(kernel_s=time.perf_counter() - start)
        pins: list[Pin] = []
        try:
            arrays = {name: _array(operand, pins, checkpoint) for name, operand in operands.items()}
            h2d_s = time.perf_counter() - start if pins else 0.0
            self._run(params, arrays, results, checkpoint)
        finally:
            for pin in pins:
                pin.release()
        return Timings(h2d_s=h2d_s, kernel_s=time.perf_counter() - start - h2d_s)

    def _run(
        self,
        params: StepParams,
        arrays: dict[str, Any],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
    ) -> None:
        if not isinstance(params, GemmParams | GemmReduceParams):
            with interruptible(checkpoint):
                call(params, arrays, results)
            return
        # Within a panel, too: what is reduced is cut by the kernels alone.
        with (
            self._threads.limited(flops_per_call(params, arrays["a"], arrays["b"])),
            interruptible(checkpoint),
        ):
            for some, outs in _panels(params, arrays, results):
                call(params, some, outs)
                checkpoint()

    def plan_blocks(self, grid: Grid) -> MemoryPlan:
        return plan_memory(grid, self.spec, self.planned_bytes)

    def open_panels(self, parent: str, grid: Grid) -> PanelSlots | None:
        if self._panels is not None and self._panels[0] == parent and self._panels[1].grid == grid:
            return self._panels[1]
        self._panels = None  # before others are made
        slots = PanelSlots(grid, self.plan_blocks(grid), _pages, _view)
        self._panels = parent, slots
        return slots

    def bring_ahead(self, *_: object) -> None:
        """See `DeviceBackend`: panels lie where they are copied from."""

    def close_panels(self, parent: str) -> None:
        if self._panels is not None and self._panels[0] == parent:
            self._panels = None

    def run_many(self, products: Products, checkpoint: Callable[[], None] = go_on) -> Timings:
        start = time.perf_counter()
        params = products.params
        first, results = products.first()
        if not _is_small(first, results):
            for operands, results in products:
                self.run(params, operands, results, checkpoint)
            return Timings(kernel_s=time.perf_counter() - start)
        checkpoint()
        each = sum(array.nbytes for array in (*first.values(), *results.values()))
        step = min(max(1, _STACKED_BYTES // max(1, each)), _STACKED_PRODUCTS)
        with self._threads.limited(flops_per_call(params, first["a"], first["b"])), interruptible(checkpoint):
            stacks = products.stacks() if isinstance(params, GemmParams) and params.layout != "planar" else None
            if stacks is not None:
                for low in range(0, len(products), step):
                    call(params, *({name: x[low : low + step] for name, x in side.items()} for side in stacks))
                    checkpoint()
                return Timings(kernel_s=time.perf_counter() - start)
            run = _repeated(params, first, results, aligned=products.aligned())
            columns, outs = products.columns()
            rows = zip(*columns.values(), *outs.values(), strict=True)
            with np.errstate(all="ignore"):
                for number, row in enumerate(rows, 1):
                    run(*row)
                    if number % step == 0:
                        checkpoint()
        return Timings(kernel_s=time.perf_counter() - start)

    def repeated(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, np.ndarray[Any, Any]],
        results: Mapping[str, np.ndarray[Any, Any]],
    ) -> Callable[..., None] | None:
        # What a reduction does not return is formed all the same, and nobody is asked meanwhile whether to go on.
        formed = 0 if isinstance(params, GemmParams) else operands["a"].size * operands["b"].size
        if formed > _REPEATED_ELEMENTS or not _is_small(operands, results):
            return None
        flops = flops_per_call(params, operands["a"], operands["b"])
        aligned = all(array.flags.aligned for array in (*operands.values(), *results.values()))
        product = _repeated(params, operands, results, aligned=aligned)

        def run(*row: np.ndarray[Any, Any]) -> None:
            with self._threads.limited(flops), np.errstate(all="ignore"):
                product(*row)

        return run

    def forget(self, array: str) -> None:
        """Do nothing: no copies are kept."""

    def run_program(self, run: Callable[[Values], T], checkpoint: Callable[[], None] = go_on) -> T:
        return run(HostValues(self, checkpoint))


_IN_ORDER: Final = (("a", "b"), ("a", "b", "c"))
"""Names of operands as the kernels take them one by one; a request may name them in another order."""


def _array(operand: HostArray, pins: list[Pin], checkpoint: Callable[[], None]) -> np.ndarray[Any, Any]:
    """Return an operand where it is, or a panel in its slot, whose pin is added to `pins`."""
    if operand.panel is None:
        return operand.data

    def fill(array: np.ndarray[Any, Any]) -> None:
        for source, target in zip(pieces(operand.data, _FILLED_BYTES), pieces(array, _FILLED_BYTES), strict=True):
            np.copyto(target, source)

    with interruptible(checkpoint):
        # A block may begin while another one of this thread stands still, so nobody waits.
        pins.append(operand.panel.take(fill, waits=False))
    array: np.ndarray[Any, Any] = pins[-1].array
    return array


def _pages(nbytes: int) -> np.ndarray[Any, Any]:
    """Return memory that begins with a page, as mappings do."""
    memory = np.empty(nbytes + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + nbytes]


def _view(memory: np.ndarray[Any, Any], layout: Operand) -> np.ndarray[Any, Any]:
    strides = tuple(stride * layout.dtype.itemsize for stride in layout.strides)
    return np.ndarray(layout.shape, layout.dtype, memory, 0, strides)


def _repeated(
    params: GemmParams | GemmReduceParams, first: Mapping[str, Any], outs: Mapping[str, Any], *, aligned: bool
) -> Callable[..., None]:
    """`call` for arrays like the first ones, given one by one, operands and then results: looked at once.

    NumPy may warn there of what overflows.
    """
    if isinstance(params, GemmParams) and aligned and tuple(first) in _IN_ORDER:
        problem = build(params, {name: Operand.of(array) for name, array in first.items()})
        assert isinstance(problem, GemmProblem)
        multiply = one_call(problem, first["a"], first["b"], outs["d"])
        if multiply is not None and "c" not in first:
            return multiply
        if "c" in first:
            return lambda a, b, c, d: run_gemm(problem, a, b, c, d)
        return lambda a, b, d: run_gemm(problem, a, b, None, d)
    names, count = (*first, *outs), len(first)
    return lambda *row: call(
        params, dict(zip(names[:count], row[:count], strict=True)), dict(zip(names[count:], row[count:], strict=True))
    )


def _is_small(arrays: Mapping[str, np.ndarray[Any, Any]], results: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    """Whether the product is one panel, by upper bounds: to build the problem takes longer than a small product does.

    Of operands without elements the results may be as large as any.
    """
    a, b = arrays["a"], arrays["b"]
    nbytes = sum(array.nbytes for array in (*arrays.values(), *results.values()))
    if 8 * a.size * b.size > _PANEL_FLOPS or nbytes > _PANEL_BYTES:
        return False
    return a.ndim == b.ndim == 2 or math.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])) <= _PANEL_PRODUCTS


def _panels(
    params: GemmParams | GemmReduceParams, arrays: dict[str, Any], results: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Operands and results of each panel; of small products, everything."""
    if _is_small(arrays, results):
        yield arrays, results
        return
    problem = build(params, {name: Operand.of(array) for name, array in arrays.items()})
    count = max(
        -(-problem.flops() // _PANEL_FLOPS), -(-problem.nbytes() // _PANEL_BYTES), -(-problem.batch // _PANEL_PRODUCTS)
    )
    yield from grid(problem, plan_grid(problem, count), arrays, results)
