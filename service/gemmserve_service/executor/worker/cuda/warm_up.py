"""Preparations of a device for first products: modules of kernels loaded, the vendor's BLAS called.

In a thread of its own, a little at a time, while the worker has had nothing to do for a while. Nothing is compiled.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels import GemmConfig, gemm
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.launch import used_kernels
from gemmserve_kernels.dispatch.kernels import kernels_of
from gemmserve_kernels.precompile import likely_cases
from gemmserve_service.executor.worker.cuda import recent_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gemmserve_kernels import DeviceSpec
    from gemmserve_kernels.bench.cases import Case
    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_service.executor.worker.cuda.idleness import Idleness

_RECORD_S: Final = 30.0
"""Seconds between two looks at whether there is something new to put on record."""
_BLAS_EXTENTS: Final = (64, 1024)
_DTYPES: Final = ("complex64", "float32", "complex128", "float64", "float16")

log = logging.getLogger(__name__)


class WarmUp:
    """Loading of kernels ahead: those that were used last, then those of likely products, as far as they are compiled
    or shipped.
    """

    def __init__(
        self, cupy: Any, spec: DeviceSpec, ordinal: int, enter: Callable[[], None], idleness: Idleness
    ) -> None:
        """`enter` is called once in the thread, before anything else. `idleness` says when tasks leave room for it."""
        self._cupy = cupy
        self._spec = spec
        self._ordinal = ordinal
        self._enter = enter
        self._idleness = idleness
        self._thread: threading.Thread | None = None
        self._step = threading.Lock()
        """Held during a step, which may have memory of the device."""
        self.over = False
        """Whether all steps were taken."""

    def begin(self) -> None:
        """Start, if that has not been done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gemmserve-warm-up", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        self._enter()
        began = time.monotonic()
        for step in self.steps():
            self._idleness.wait()
            with self._step:
                self._take(step)
        self.over = True
        log.info("kernels of likely products were loaded in %.1f s", time.monotonic() - began)
        recorded: list[tuple[KernelSource, str]] = []
        while True:
            recorded = self.record(recorded)
            time.sleep(_RECORD_S)

    @staticmethod
    def _take(step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            log.debug("not done ahead: %s", error)

    def yield_memory(self) -> bool:
        """Return when the step that is under way has ended, and has no memory of the device any more; False: there is
        none. No other begins while there is a task.
        """
        if not self._step.locked():
            return False
        with self._step:
            return True

    def steps(self) -> Iterator[Callable[[], object]]:
        """Return the steps, the likeliest to be of use first. Each takes milliseconds, but for a first call of the
        vendor's BLAS: a tenth of a second.
        """
        arch = self._spec.arch
        yield from (partial(self._load, [kernel]) for kernel in recent_kernels.read(arch))
        for number, extent in enumerate(_BLAS_EXTENTS):
            yield from (partial(self._call_blas, dtype, extent) for dtype in _DTYPES)
            if number == 0:
                yield from (partial(self._load_case, case) for case in likely_cases())

    def record(self, recorded: list[tuple[KernelSource, str]]) -> list[tuple[KernelSource, str]]:
        """Put the kernels that were used on record, if they are others than `recorded`; return them."""
        used = used_kernels()
        if used != recorded:
            try:
                recent_kernels.write(self._spec.arch, reversed(used))
            except OSError as error:
                log.debug("kernels that were used are not on record: %s", error)
        return used

    def _load_case(self, case: Case) -> None:
        self._load((each.source, each.entry) for each in kernels_of(case.problem(), self._spec))

    def _load(self, kernels: Iterable[tuple[KernelSource, str]]) -> None:
        for source, entry in kernels:
            if compiler.compiled_file(source, self._spec.arch) is not None:
                compiler.load(source, entry, self._spec.arch, self._ordinal)

    def _call_blas(self, dtype: str, extent: int) -> None:
        a, b = (self._cupy.empty((extent, extent), dtype) for _ in range(2))
        gemm(a, b, config=GemmConfig(algorithm="vendor"))
