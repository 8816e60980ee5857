"""DeviceBackend: operations of a worker on its device, on host arrays."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import numpy as np

from gemmserve_kernels import DeviceSpec, GemmProblem, Operand, gemm, gemm_reduce
from gemmserve_kernels.algorithms.cpu.gemm import one_call, run_gemm
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_service.executor.port import spec_adapter
from gemmserve_service.executor.worker.host.blas import BlasThreads, flops_per_call
from gemmserve_service.executor.worker.panels import grid, plan_grid
from gemmserve_service.products import build, options
from gemmserve_service.schemas import GemmParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.worker.batches import Products
    from gemmserve_service.executor.worker.programs import Values
    from gemmserve_service.schemas import GemmReduceParams

T = TypeVar("T")

_PANEL_FLOPS: Final = 1 << 30
"""Operations of a panel on a processor, a hundredth of a second on two: what a cancellation, or somebody else's small
product, waits for. Square panels of that size are a seventh slower than the whole product, and 7 % slower than panels
twice as large, beside which the 99th percentile of small products was 2.6 times that in peace (1.5 beside these)."""

_PANEL_BYTES: Final = 16 << 20
"""Of a panel's operands and results, likewise: fresh pages of a file take 20 to 50 ms, however few the operations."""
_PANEL_PRODUCTS: Final = 1 << 17
"""Matrices of a batch in a panel: NumPy needs a fraction of a microsecond for each, however small."""

_REPEATED_ELEMENTS: Final = 1 << 21
"""Elements of a product that is reduced without a look at who wants the worker: some ten milliseconds."""

_STACKED_BYTES: Final = 8 << 20
"""Of the operands and results of many small products between two looks whether anybody wants the worker."""
_STACKED_PRODUCTS: Final = 1024
"""Those products, at most: some have no bytes."""


def go_on() -> None:
    """The checkpoint of those whom nobody stops."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An operand in host memory; `cache_id` names it where it is immutable, so that a device copy may be kept."""

    data: np.ndarray[Any, Any]
    cache_id: str | None = None


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


class CpuBackend:
    """NumPy and its BLAS, from mapping to mapping without a copy."""

    cuts = True

    def __init__(self) -> None:
        self.spec = DeviceSpec.cpu()
        self._threads = BlasThreads()

    def spec_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = spec_adapter().dump_python(self.spec, mode="json")
        return fields

    def memory_used(self) -> int:
        return 0

    def read_counts(self) -> Reading | None:
        return None

    def run(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None] = go_on,
    ) -> Timings:
        start = time.perf_counter()
        arrays = {name: operand.data for name, operand in operands.items()}
        checkpoint()
        # Within a panel, too: what is reduced is cut by the kernels alone.
        with (
            self._threads.limited(flops_per_call(params, arrays["a"], arrays["b"])),
            interruptible(checkpoint),
        ):
            for some, outs in _panels(params, arrays, results):
                call(params, some, outs)
                checkpoint()
        return Timings(kernel_s=time.perf_counter() - start)

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
        """Has no effect: it keeps nothing."""

    def flush(self, arrays: Iterable[str | None]) -> None:
        """Has no effect: they are in host memory."""

    def run_program(self, run: Callable[[Values], T], checkpoint: Callable[[], None] = go_on) -> T:
        from gemmserve_service.executor.worker.host.values import HostValues

        return run(HostValues(self, checkpoint))


def _repeated(
    params: GemmParams | GemmReduceParams, first: Mapping[str, Any], outs: Mapping[str, Any], *, aligned: bool
) -> Callable[..., None]:
    """`call` for arrays like the first ones, given one by one, operands and then results: looked at once.

    NumPy may warn there of what overflows.
    """
    if isinstance(params, GemmParams) and aligned:
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


def open_backend(device: str, cache_share: float, write_back_delay_s: float = 0.0) -> DeviceBackend:
    """The backend of "cpu", "cuda:0", "rocm:1". Raises DeviceUnavailable."""
    kind, _, ordinal = device.partition(":")
    if kind == "cpu":
        return CpuBackend()
    from gemmserve_service.executor.worker.cuda.backend import CupyBackend

    return CupyBackend(kind, int(ordinal), cache_share, write_back_delay_s)


class DeviceUnavailable(RuntimeError):  # noqa: N818 (says what is the case, as a sentence)
    """The device that a worker was started for cannot be used; restarting does not help."""
