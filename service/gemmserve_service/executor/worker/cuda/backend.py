"""The backend of one CUDA or ROCm device, through CuPy."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmserve._install import pip_install
from gemmserve_kernels import DeviceSpec, Operand, read_element_counts
from gemmserve_kernels.blocks.memory_plan import plan_memory
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.compiler import waited_s
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.problem.errors import DeviceError, OutOfDeviceMemory
from gemmserve_service.executor.port import spec_adapter
from gemmserve_service.executor.worker.backend import DeviceUnavailable, HostArray, call, go_on
from gemmserve_service.executor.worker.batches import Products, sum_of
from gemmserve_service.executor.worker.blocks.panel_slots import PanelSlots
from gemmserve_service.executor.worker.blocks.panel_table import PanelTable
from gemmserve_service.executor.worker.blocks.panels_ahead import PanelsAhead
from gemmserve_service.executor.worker.blocks.peer_panels import PeerPanels
from gemmserve_service.executor.worker.checks import element_counts, verification
from gemmserve_service.executor.worker.cuda.batches import run_together
from gemmserve_service.executor.worker.cuda.copies import DeviceCopies, order_of
from gemmserve_service.executor.worker.cuda.forms.resident import ResidentProducts, resident_products
from gemmserve_service.executor.worker.cuda.forms.tiny import TinyProducts, tiny_products
from gemmserve_service.executor.worker.cuda.idleness import Idleness
from gemmserve_service.executor.worker.cuda.kernels import missing_kernels
from gemmserve_service.executor.worker.cuda.out_of_memory import within_memory
from gemmserve_service.executor.worker.cuda.peer_link import CupyPeerLink
from gemmserve_service.executor.worker.cuda.pinned_ring import CupyLink
from gemmserve_service.executor.worker.cuda.values import DeviceValues
from gemmserve_service.executor.worker.cuda.warm_up import WarmUp
from gemmserve_service.executor.worker.health.amd import open_amd_smi
from gemmserve_service.executor.worker.health.nvidia import open_nvml
from gemmserve_service.executor.worker.host.values import HostValues
from gemmserve_service.executor.worker.memory.deliveries import Deliveries
from gemmserve_service.executor.worker.memory.host_arena import HostArena
from gemmserve_service.executor.worker.memory.registered_mappings import RegisteredMappings
from gemmserve_service.executor.worker.memory.write_queue import WriteQueue
from gemmserve_service.executor.worker.panels import panels, plan_cut
from gemmserve_service.products import build
from gemmserve_service.schemas import GemmParams, GemmReduceParams, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from gemmserve_kernels.blocks.grid import Grid
    from gemmserve_kernels.blocks.memory_plan import MemoryPlan
    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_kernels.device.element_counts import Reading
    from gemmserve_service.executor.protocol import Kind
    from gemmserve_service.executor.worker.backend import Values
    from gemmserve_service.executor.worker.blocks.panel_slots import Pin, Side
    from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile
    from gemmserve_service.executor.worker.checks.verification import Verdict
    from gemmserve_service.executor.worker.memory.host_arena import ArenaFile
    from gemmserve_service.schemas import DeviceHealth, Elements, ProgramParams, StepParams

T = TypeVar("T")

_IS_HIP: Final = {"cuda": False, "rocm": True}

_EXPRESS_PRIORITY: Final = -5
"""Priority of a stream: lower numbers go first, and one below a device's lowest counts as that (CUDA runtime API,
cudaStreamCreateWithPriority)."""

_PLANNED_SHARE: Final = 0.9
"""Share of a device's memory that plans of large products count on: the rest is of the driver, of libraries, and of
what lies between allocations."""

_SWEEP_S: Final = 0.1
"""Seconds for which memory of the large product before is waited for that other devices have mapped."""
_UNMAPPED_S: Final = 1.0
"""Likewise, where memory is short."""

log = logging.getLogger(__name__)


@dataclass
class _Panels:
    """Panels of the large product that asked last, and bytes that are counted for it."""

    parent: str
    grid: Grid
    slots: PanelSlots | None = None
    reserved_bytes: int = 0

    def shrink(self, copies: DeviceCopies, *, least: bool) -> int:
        """See `PanelSlots.shrink`."""
        freed = 0 if self.slots is None else self.slots.shrink(least=least)
        self.reserved_bytes -= freed
        copies.resident.reserve(-freed)
        return freed

    def close(self, copies: DeviceCopies) -> None:
        """Let them go."""
        slots, self.slots = self.slots, None
        reserved, self.reserved_bytes = self.reserved_bytes, 0
        if slots is not None:
            slots.close()
        copies.resident.reserve(-reserved)


class CupyBackend:
    """Operands go to the device (or are there already), results come back into their mapping, some of them later.

    Copies of arrays stay within the share of memory that settings give them.
    """

    cuts = False

    def __init__(
        self,
        kind: str,
        ordinal: int,
        cache_share: float,
        arena: ArenaFile | None = None,
        *,
        memory_bytes: int | None = None,
        panels: PanelsFile | None = None,
    ) -> None:
        """`arena`: memory that results may go to. `memory_bytes`: of the device's that is used at most; None: all of
        it. `panels`: by which panels of large products are shared with other devices. Raises DeviceUnavailable.
        """
        try:
            import cupy
        except ImportError as error:
            raise DeviceUnavailable(f"{kind}:{ordinal} needs CuPy: {pip_install(_extra(kind))}") from error
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
        self.idleness = Idleness()
        """When tasks leave room for what is prepared ahead: told of each task."""
        self.arena = None if arena is None else self._open_arena(arena)
        """The arena, mapped, of which more and more is registered."""
        link = CupyLink(cupy, ordinal)
        self.registered = RegisteredMappings(link.register, link.unregister)
        """Memory of requests that copies go straight from and to."""
        available = self.spec.memory_bytes
        self.planned_bytes = int(available * _PLANNED_SHARE)
        """Bytes that large products may plan with."""
        if memory_bytes is not None and memory_bytes < available:
            available = memory_bytes
            self.planned_bytes = min(self.planned_bytes, memory_bytes)
            cupy.get_default_memory_pool().set_limit(size=memory_bytes)
        budget = int(available * cache_share)
        self.copies = DeviceCopies(cupy, ordinal, self.spec, budget, self.arena, self.registered)
        self.write_queue = WriteQueue(self.copies, self.enter)
        # ROCm's driver may follow pages that their owner takes away, and a device that writes there fault.
        find = self.write_queue.on_device
        self.deliveries = None if _IS_HIP[kind] else Deliveries(find, self.copies, link, self.enter)
        """Arrays that go straight to clients."""
        self._panels: _Panels | None = None
        self._panels_lock = threading.RLock()
        self._ahead = PanelsAhead(self.enter)
        self.peers = None if panels is None else self._open_peers(panels)
        """Ways to other devices of the host, if there may be any."""
        self.warm_up = WarmUp(cupy, self.spec, ordinal, self.enter, self.idleness)
        self._rooms = (
            self._drop_copies,
            lambda: self.warm_up.yield_memory() and self._drop_copies(),
            self._shrink_panels,
            self._vacate,
            lambda: self._shrink_panels(least=True),
            self._drop_panels,
        )

    def spec_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = spec_adapter().dump_python(self.spec, mode="json")
        return fields

    def memory_used(self) -> int:
        return int(self.cupy.get_default_memory_pool().total_bytes())

    def open_probe(self) -> Callable[[], DeviceHealth]:
        """See `health.monitor.Monitor`."""
        bus_id: str = self.cupy.cuda.runtime.deviceGetPCIBusId(self._ordinal)
        return open_amd_smi(bus_id) if self.spec.kind == "rocm" else open_nvml(bus_id)

    def read_counts(self) -> Reading | None:
        return read_element_counts()

    def run(
        self,
        params: StepParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None] = go_on,
    ) -> Timings:
        return within_memory(
            lambda: self.product(params, operands, results, checkpoint).run(),
            lambda count: self._run_panels(params, operands, results, checkpoint, count),
            self._rooms,
            self.out_of_memory,
        )

    def product(
        self,
        params: StepParams,
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

    def plan_blocks(self, grid: Grid) -> MemoryPlan:
        return plan_memory(grid, self.spec, self.planned_bytes)

    def open_panels(self, parent: str, grid: Grid) -> PanelSlots | None:
        with self._panels_lock:
            there = self._panels
            if there is not None and (there.parent, there.grid) == (parent, grid):
                return there.slots
            self._close_panels()
            plan = self.plan_blocks(grid)
            if not plan.fits:
                log.info("%d bytes of device memory for one pair of panels: they are not kept", plan.needed_bytes)
                self._panels = _Panels(parent, grid)
                return None
            self.copies.resident.reserve(plan.peak_bytes)
            if self.peers is not None:
                self.peers.sweep(_SWEEP_S)  # of the product before
            slots = None
            peers = self.peers
            share = None if peers is None else lambda memory: peers.share(parent, [(m.ptr, n) for m, n in memory])
            for make_room in (None, *self._rooms):
                if make_room is not None and not make_room():
                    continue
                try:
                    slots = PanelSlots(grid, plan, self.cupy.cuda.alloc, self._view, windows=plan.windows, share=share)
                    break
                except self.out_of_memory as error:
                    log.info("out of device memory for panels: %s", error)
            self._panels = _Panels(parent, grid, slots, plan.peak_bytes)
            return slots

    def bring_ahead(self, slots: PanelSlots, indices: Sequence[int], operand: Callable[[Side, int], HostArray]) -> None:
        slots.expect(indices, lambda side, index, array: self.copies.fill(array, operand(side, index)))
        self._ahead.follow(slots)

    def close_panels(self, parent: str) -> None:
        with self._panels_lock:
            if self._panels is not None and self._panels.parent == parent:
                self._close_panels()

    def _close_panels(self) -> None:
        there, self._panels = self._panels, None
        if there is not None:
            there.close(self.copies)

    def _view(self, memory: Any, layout: Operand) -> Any:
        strides = tuple(stride * layout.dtype.itemsize for stride in layout.strides)
        return self.cupy.ndarray(layout.shape, layout.dtype, memory, strides)

    def enter(self, *, express: bool = False) -> None:
        """Gives the calling thread the device, and a stream of its own: memory is used again in its order alone.

        `express`: blocks of its kernels go before those of others that have not begun.
        """
        self.cupy.cuda.Device(self._ordinal).use()
        stream = self.cupy.cuda.Stream(non_blocking=True, priority=_EXPRESS_PRIORITY if express else 0)
        stream.use()
        self._streams.append(stream)

    def missing_kernels(
        self, params: GemmParams | GemmReduceParams | ProgramParams, operands: Mapping[str, Kind], *, checked: bool
    ) -> list[KernelSource]:
        """See `compilation.CompilingBackend`."""
        return missing_kernels(params, operands, self.spec, checked=checked)

    def compile_kernel(self, kernel: KernelSource) -> None:
        """Likewise."""
        compiler.cubin_file(kernel, self.spec.arch)

    def run_program(self, run: Callable[[Values], T], checkpoint: Callable[[], None] = go_on) -> T:
        """Values stay on the device; where it has too little memory left, they live on the host between steps."""
        for make_room in (None, *self._rooms):
            if make_room is not None:
                checkpoint()
                if not make_room():
                    continue
            try:
                with interruptible(checkpoint):
                    return run(DeviceValues(self.cupy, checkpoint, call=call, copies=self.copies))
            except self.out_of_memory as error:
                log.info("out of device memory within a program: %s", error)
        checkpoint()
        self._drop_copies()
        return run(HostValues(self, checkpoint))

    def call(
        self,
        params: StepParams,
        operands: Mapping[str, Any],
        made: Mapping[str, Any],
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Enqueues a product of arrays of the device. `given`: see `call`."""
        call(params, operands, made, given)

    def tiny(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, Kind],
        results: Mapping[str, Kind],
    ) -> TinyProducts | None:
        """See `TinyBackend`."""
        return tiny_products(self, params, operands, results)

    def resident(
        self,
        params: GemmParams | GemmReduceParams,
        operands: Mapping[str, Kind],
        results: Mapping[str, Kind],
    ) -> ResidentProducts | None:
        """See `ResidentBackend`."""
        return resident_products(self, params, operands, results)

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
        self.write_queue.forget(array)

    def _open_arena(self, arena: ArenaFile) -> HostArena | None:
        link = CupyLink(self.cupy, self._ordinal)
        try:
            return HostArena(arena, link.register, link.enter, self.idleness.wait)
        except OSError as error:
            log.warning("the memory for results cannot be mapped: %s", error)
            return None

    def _open_peers(self, panels: PanelsFile) -> PeerPanels | None:
        link = CupyPeerLink(self.cupy, self._ordinal)
        try:
            return PeerPanels(PanelTable(panels, link.bus_id), link, always=panels.always)
        except (OSError, ValueError) as error:
            log.warning("panels are not shared with other devices: %s", error)
            return None

    def _drop_copies(self) -> bool:
        """Drop copies of arrays, which can be made again; panels of a large product stay."""
        self.copies.resident.clear()
        if self.peers is not None:
            self.peers.sweep(_UNMAPPED_S)
        self.cupy.get_default_memory_pool().free_all_blocks()
        return True

    def _shrink_panels(self, *, least: bool = False) -> bool:
        """Drop panels of a large product that no block uses now, half of them or all, and windows that it has to spare;
        False: there was nothing.
        """
        with self._panels_lock:
            freed = 0 if self._panels is None else self._panels.shrink(self.copies, least=least)
        return freed > 0 and self._drop_copies()

    def _vacate(self) -> bool:
        """Drop results, too, which are held in the memory of this process then; False: there was none."""
        return self.write_queue.vacate() and self._drop_copies()

    def _drop_panels(self) -> bool:
        """Keep no panels of the large product any more, the last resort: each of its blocks brings its own; False:
        there was none.
        """
        with self._panels_lock:
            if self._panels is None or self._panels.slots is None:
                return False
            self._panels.close(self.copies)
        return self._drop_copies()

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
        params: StepParams,
        operands: Mapping[str, HostArray],
        results: Mapping[str, np.ndarray[Any, Any]],
        checkpoint: Callable[[], None],
        count: int,
    ) -> Timings | None:
        """Run in about `count` panels, one on the device at a time; None if the product cannot be cut into so many, or
        it is none.
        """
        if not isinstance(params, GemmParams | GemmReduceParams):
            return None
        operands = {name: HostArray(operand.read(), operand.cache_id) for name, operand in operands.items()}
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
            total = sum_of([total, self.product(params, parts, outs, checkpoint).run()])
        return total


class DeviceProduct:
    """One product on its way through a device, stage by stage, on the current stream of whoever calls the stage."""

    def __init__(
        self,
        backend: CupyBackend,
        params: StepParams,
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
        self._pins: list[Pin] = []
        """Panels among them."""
        self._forms: dict[str, Any] = {}
        """Operands as the kernels read them, until the device has."""
        self._enqueued: tuple[Any, Any, Reading | None, Reading | None, float] | None = None
        """Events around the product on its stream, readings of the counters, and seconds between the events for which
        the compiler was waited for."""
        self.made: dict[str, Any] = {}
        """The results on the device, from when they are enqueued until they are stored."""
        self._windows: dict[str, tuple[PanelSlots, Any]] = {}
        """Memory of those that are windows of a large product's result."""

    def load(self) -> None:
        """Brings the operands that are not there. Waits for panels' slots until products that came before let go."""
        self._bring(waits=True)

    def _bring(self, *, waits: bool = False) -> None:
        """See `load`; without waiting for whoever may come behind this one, panels take memory beside the slots."""
        self._checkpoint()
        try:
            self._there = {name: self._load(operand, waits) for name, operand in self._operands.items()}
        except BaseException:
            self.release()
            raise

    def _load(self, operand: HostArray, waits: bool) -> Any:
        """Return an operand on the device; of a panel the seconds for which it came count, whoever waited for it."""
        began = time.perf_counter()
        if operand.panel is None:
            found = self._copies.load(operand)
            self.timings.h2d_s += time.perf_counter() - began
            return found
        pin = self._copies.load_panel(operand, operand.panel, waits=waits)
        self._pins.append(pin)
        self.timings.h2d_s += pin.seconds
        return pin.array

    def compute(self) -> None:
        """Enqueue the product on the current stream; the operands are loaded first, if they are not there."""
        cupy = self._cupy
        if self._there is None:
            self._bring()
        self._checkpoint()
        assert self._there is not None
        there = self._there
        if isinstance(self._params, GemmParams | GemmReduceParams):
            there = self._copies.prepared(self._params, self._operands, there)
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        before = read_element_counts()
        waited = waited_s()
        try:
            made = {name: self._empty(name, out) for name, out in self._results.items()}
            start.record()
            call(self._params, there, made)
            stop.record()
        except BaseException:
            if self._windows:  # what was enqueued may still write to them
                cupy.cuda.get_current_stream().synchronize()
                self._give_windows()
            raise
        self._enqueued = start, stop, before, read_element_counts(), waited_s() - waited
        self._forms = there
        self.made = made

    def _empty(self, name: str, out: np.ndarray[Any, Any]) -> Any:
        """Return memory for a result on the device: a block's in a window of its product's, if one is ready."""
        panel = next((operand.panel for operand in self._operands.values() if operand.panel is not None), None)
        if panel is None or (memory := panel.slots.take_window(out.nbytes)) is None:
            return self._cupy.empty(out.shape, out.dtype, order=order_of(out))
        self._windows[name] = panel.slots, memory
        return self._cupy.ndarray(out.shape, out.dtype, memory, order=order_of(out))

    def _give_windows(self) -> None:
        for slots, memory in self._windows.values():
            slots.give_window(memory)
        self._windows.clear()

    def finish(self) -> None:
        """Wait for the product, in any thread, and check it where that was asked for; the operands are let go."""
        assert self._enqueued is not None
        start, stop, before, after, compile_s = self._enqueued
        stop.synchronize()
        self.timings.compile_s += compile_s
        kernel_s = max(self._cupy.cuda.get_elapsed_time(start, stop) / 1e3 - compile_s, 0.0)
        self.timings.kernel_s += kernel_s
        if self._pins:
            self._pins[0].computed(kernel_s)
        self.elements = element_counts.between(before, after)
        self._enqueued, self._forms = None, {}
        if self._name is not None:
            if self._there is None:  # somebody needed their memory meanwhile
                self._bring()
            assert self._there is not None
            self._check(self._name, self._there, self.made)
        self.release()

    def _check(self, name: str, there: dict[str, Any], made: dict[str, Any]) -> None:
        """Check the results, before the operands are released and before the results are anywhere else."""
        began = time.perf_counter()
        try:
            self.verdict = verification.on_device(
                self._params, there, made, lambda plain: call(plain, there, made), name
            )
        except BaseException:
            # A product in plain arithmetic may still write to results whose memory is that of the stream that computes,
            # which uses it again as soon as it is let go.
            self._cupy.cuda.get_current_stream().synchronize()
            raise
        self.timings.verify_s += time.perf_counter() - began

    def store(self) -> None:
        """Takes the results to the host."""
        self._checkpoint()
        began = time.perf_counter()
        for name, out in self._results.items():
            self._copies.store(self.made.pop(name), out)
        self._give_windows()
        self.timings.d2h_s += time.perf_counter() - began

    def release(self) -> None:
        """Lets go of operands that were loaded ahead; `compute`, or a check, brings them again."""
        self._there = None
        for pin in self._pins:
            pin.release()
        self._pins.clear()

    def run(self) -> Timings:
        """Run one stage after the other."""
        try:
            with interruptible(self._checkpoint):
                self._bring()
                self.compute()
                self.finish()
                self.store()
        finally:
            self.release()
        return self.timings


def _extra(kind: str) -> str:
    return "rocm" if kind == "rocm" else "cuda13"
