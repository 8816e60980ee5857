"""The backend of one CUDA or ROCm device, through CuPy."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmserve_kernels import DeviceSpec, Operand, read_element_counts
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.problem.errors import DeviceError, OutOfDeviceMemory
from gemmserve_service.executor.port import spec_adapter
from gemmserve_service.executor.worker.backend import DeviceUnavailable, HostArray, call, go_on
from gemmserve_service.executor.worker.batches import Products, sum_of
from gemmserve_service.executor.worker.checks import element_counts, verification
from gemmserve_service.executor.worker.cuda.batches import run_together
from gemmserve_service.executor.worker.cuda.copies import DeviceCopies, order_of
from gemmserve_service.executor.worker.cuda.out_of_memory import within_memory
from gemmserve_service.executor.worker.cuda.values import DeviceValues
from gemmserve_service.executor.worker.host.values import HostValues
from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
from gemmserve_service.executor.worker.panels import panels, plan_cut
from gemmserve_service.products import build
from gemmserve_service.schemas import Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np

    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.worker.backend import Values
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams

T = TypeVar("T")

_IS_HIP: Final = {"cuda": False, "rocm": True}

log = logging.getLogger(__name__)


class CupyBackend:
    """Operands go to the device (or are there already), results come back into their mapping, some of them later.

    Copies of arrays stay within the share of memory that settings give them.
    """

    cuts = False

    def __init__(self, kind: str, ordinal: int, cache_share: float, write_back_delay_s: float = 0.0) -> None:
        try:
            import cupy
        except ImportError as error:
            raise DeviceUnavailable(f"{kind}:{ordinal} needs CuPy: pip install 'gemmserve[{_extra(kind)}]'") from error
        if bool(cupy.cuda.runtime.is_hip) != _IS_HIP[kind]:
            raise DeviceUnavailable(f"the installed CuPy is not built for {kind}")
        try:
            count = cupy.cuda.runtime.getDeviceCount()
            if ordinal >= count:
                raise DeviceUnavailable(f"there is no {kind}:{ordinal}: the driver knows {count} devices")
            cupy.cuda.Device(ordinal).use()
            self.spec = DeviceSpec.of(ordinal)
        except (cupy.cuda.runtime.CUDARuntimeError, DeviceError) as error:
            raise DeviceUnavailable(f"{kind}:{ordinal} cannot be used: {error}") from error
        self.cupy = cupy
        self._ordinal = ordinal
        self.out_of_memory = (cupy.cuda.memory.OutOfMemoryError, OutOfDeviceMemory)
        self._streams: list[Any] = []
        self.copies = DeviceCopies(cupy, ordinal, self.spec, int(self.spec.memory_bytes * cache_share))
        self.write_queue = WriteQueue(self.copies, self.enter, delay_s=write_back_delay_s)

    def spec_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = spec_adapter().dump_python(self.spec, mode="json")
        return fields

    def memory_used(self) -> int:
        return int(self.cupy.get_default_memory_pool().total_bytes())

    def read_counts(self) -> Reading | None:
        return read_element_counts()

    def run(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None] = go_on,
    ) -> Timings:
        return within_memory(
            lambda: self.product(params, operands, results, checkpoint).run(),
            lambda count: self._run_panels(params, operands, results, checkpoint, count),
            self._make_room,
            self.out_of_memory,
        )

    def product(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None] = go_on,
        *,
        check: str | None = None,
    ) -> DeviceProduct:
        """A product to be taken through its stages, which raise what `run` raises, and `out_of_memory`.

        `check`: its results are checked on the device, and it is called this in the log.
        """
        return DeviceProduct(self, params, operands, results, checkpoint, check=check)

    def enter(self) -> None:
        """Gives the calling thread the device, and a stream of its own: memory is used again in its order alone."""
        self.cupy.cuda.Device(self._ordinal).use()
        stream = self.cupy.cuda.Stream(non_blocking=True)
        stream.use()
        self._streams.append(stream)

    def run_program(self, run: Callable[[Values], T], checkpoint: Callable[[], None] = go_on) -> T:
        """Values stay on the device; where it has too little memory left, they live on the host between steps."""
        for attempt in (0, 1):
            if attempt:
                self._make_room()
            try:
                with interruptible(checkpoint):
                    return run(DeviceValues(self.cupy, checkpoint, call=call, copies=self.copies))
            except self.out_of_memory as error:
                log.info("out of device memory within a program: %s", error)
        self._make_room()
        return run(HostValues(self, checkpoint))

    def call(self, params: GemmParams | GemmReduceParams, operands: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        """Enqueues a product of arrays of the device."""
        call(params, operands, made)

    def run_many(self, products: Products, checkpoint: Callable[[], None] = go_on) -> Timings:
        try:
            with interruptible(checkpoint):
                return run_together(self, products, checkpoint)
        except self.out_of_memory as error:
            log.info("out of device memory within a batch: %s", error)
        return sum_of([self.run(products.params, operands, results, checkpoint) for operands, results in products])

    def repeated(self, *_: object) -> None:
        """See `DeviceBackend`."""

    def forget(self, array: str) -> None:
        """Drops copies and prepared forms of an array that is gone."""
        self.copies.resident.forget(array)

    def flush(self, arrays: Iterable[str | None]) -> None:
        """Results among them that are on the device alone are written."""
        self.write_queue.flush(arrays)

    def _make_room(self) -> None:
        self.write_queue.flush()
        self.copies.resident.clear()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def usable(self) -> bool:
        """Whether the context survived the last error; a sticky one ends it for good."""
        try:
            self.cupy.cuda.Device().synchronize()
            self.cupy.zeros(1).sum().get()
        except Exception:
            return False
        return True

    def _run_panels(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
        count: int,
    ) -> Timings | None:
        """Run in about `count` panels, one on the device at a time; None if the product cannot be cut into so many."""
        problem = build(params, {name: Operand.of(operand.data) for name, operand in operands.items()})
        cut, fewer = plan_cut(problem, count), plan_cut(problem, count // 2)
        if cut is None or (fewer is not None and len(fewer) == len(cut)):
            return None
        log.info("out of device memory: computing %d panels along %s", len(cut), cut.axis)
        total = Timings()
        names = {id(operand.data): operand.cache_id for operand in operands.values()}
        arrays = {name: operand.data for name, operand in operands.items()}
        for some, outs in panels(problem, cut, arrays, results):
            # What is not cut keeps its name: one copy of it serves every panel, as long as it fits.
            parts = {name: HostArray(array, names.get(id(array))) for name, array in some.items()}
            spent = self.product(params, parts, outs, checkpoint).run()
            total = Timings(
                h2d_s=total.h2d_s + spent.h2d_s,
                kernel_s=total.kernel_s + spent.kernel_s,
                d2h_s=total.d2h_s + spent.d2h_s,
            )
        return total


class DeviceProduct:
    """One product on its way through a device, stage by stage, on the current stream of whoever calls the stage."""

    def __init__(
        self,
        backend: CupyBackend,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
        *,
        check: str | None = None,
    ) -> None:
        self.timings = Timings()
        self.verdict: Verdict | None = None
        """Verdict on the results, if they were to be checked, from when they are computed."""
        self.elements: Elements | None = None
        """Counts of the ways in which their elements were computed, likewise, where that depends on the data."""
        self._name = check
        self._cupy = backend.cupy
        self._copies = backend.copies
        self._params = params
        self._operands = operands
        self._results = results
        self._checkpoint = checkpoint
        self._there: dict[str, Any] | None = None
        self.made: dict[str, Any] = {}
        """The results on the device, from when they are computed until they are stored."""

    def load(self) -> None:
        """Brings the operands that are not there."""
        began = time.perf_counter()
        self._checkpoint()
        self._there = {name: self._copies.load(operand) for name, operand in self._operands.items()}
        self._cupy.cuda.get_current_stream().synchronize()
        self.timings.h2d_s += time.perf_counter() - began

    def compute(self) -> None:
        """Computes; the operands are let go."""
        cupy = self._cupy
        if self._there is None:
            self.load()
        self._checkpoint()
        assert self._there is not None
        there = self._copies.prepared(self._params, self._operands, self._there)
        made = {name: cupy.empty(out.shape, out.dtype, order=order_of(out)) for name, out in self._results.items()}
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        before = read_element_counts()
        start.record()
        call(self._params, there, made)
        stop.record()
        after = read_element_counts()
        stop.synchronize()
        self.timings.kernel_s += cupy.cuda.get_elapsed_time(start, stop) / 1e3
        self.elements = element_counts.between(before, after)
        if self._name is not None:
            self._check(self._name, self._there, made)
        self.made = made
        self.release()

    def _check(self, name: str, there: dict[str, Any], made: dict[str, Any]) -> None:
        """Check the results, before the operands are released and before the results are anywhere else."""
        began = time.perf_counter()
        self.verdict = verification.on_device(self._params, there, made, lambda plain: call(plain, there, made), name)
        self.timings.verify_s += time.perf_counter() - began

    def store(self) -> None:
        """Takes the results to the host."""
        self._checkpoint()
        began = time.perf_counter()
        for name, out in self._results.items():
            self._copies.store(self.made.pop(name), out)
        self.timings.d2h_s += time.perf_counter() - began

    def release(self) -> None:
        """Lets go of operands that were loaded ahead; `compute` brings them again."""
        self._there = None

    def run(self) -> Timings:
        """Run one stage after the other."""
        with interruptible(self._checkpoint):
            self.load()
            self.compute()
            self.store()
        return self.timings


def _extra(kind: str) -> str:
    return "rocm" if kind == "rocm" else "cuda13"
