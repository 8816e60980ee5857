"""Kernels that tasks need and nobody has compiled yet: compiled beside everything else, before the tasks are run.

A task waits for the very kernels by which it would run had they been there, so its bits are the same. All of a task's
are compiled at the same time, and other tasks pass it meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gemmserve_service.executor.protocol import Kind
    from gemmserve_service.executor.worker.unpack import Form
    from gemmserve_service.schemas import GemmParams, GemmReduceParams, ProgramParams

    Params = GemmParams | GemmReduceParams | ProgramParams

_THREADS: Final = min(8, os.cpu_count() or 1)
_PATIENCE_S: Final = 600.0
"""Seconds for which one kernel may take the compiler before the worker no longer claims that it gets on; the longest
took 45 on a busy processor."""

log = logging.getLogger(__name__)


@runtime_checkable
class CompilingBackend(Protocol):
    """Device whose kernels are compiled: its methods beyond `DeviceBackend`, called in any thread."""

    def missing_kernels(self, params: Params, operands: Mapping[str, Kind], *, checked: bool) -> Sequence[Any]:
        """Return the kernels of products like this that are not compiled. Raises what planning raises."""

    def compile_kernel(self, kernel: Any) -> None:
        """Compile one of them. Raises DeviceError."""


@dataclass(eq=False)
class _Wait:
    """Tasks that wait for the same kernels."""

    forms: tuple[Form, ...]
    checked: bool
    tasks: dict[str, tuple[float, Callable[[float], None]]] = field(default_factory=dict)
    """When each came (time.perf_counter), and what is called when its kernels are there."""
    kernels: int = 0
    """Kernels that are still being compiled."""
    compiles: bool = False
    """Whether there were any."""


class Compilation:
    """Tasks whose kernels are looked for and compiled, in threads of its own.

    `tell(task, compiling)` is called in one of them when a task begins to wait for the compiler, and when it no longer
    does.
    """

    def __init__(self, backend: CompilingBackend, tell: Callable[[str, bool], None]) -> None:
        self._backend = backend
        self._tell = tell
        self._changed = threading.Condition()
        self._waits: dict[tuple[tuple[int, ...], bool], _Wait] = {}
        self._moved = time.monotonic()
        self._pool = ThreadPoolExecutor(_THREADS, "gemmserve-compile")

    @property
    def at(self) -> tuple[str | None, int]:
        """The task that has waited for longest, and a number that grows while the compiler is not given up."""
        with self._changed:
            oldest = next((task for wait in self._waits.values() for task in wait.tasks), None)
        return oldest, int(min(time.monotonic(), self._moved + _PATIENCE_S))

    def put(self, task: str, forms: Sequence[Form], go_on: Callable[[float], None], *, checked: bool) -> None:
        """Call `go_on` once the kernels of products of these forms are there, at once where they are known to be: with
        the seconds for which the task has waited for the compiler. A kernel that cannot be compiled is left to whoever
        runs the product.
        """
        if all(checked in form.compiled for form in forms):
            go_on(0.0)
            return
        key = tuple(map(id, forms)), checked
        with self._changed:
            wait = self._waits.get(key)
            fresh = wait is None
            if wait is None:
                wait = self._waits[key] = _Wait(tuple(forms), checked)
            wait.tasks[task] = time.perf_counter(), go_on
            compiles = wait.compiles
        if fresh:
            self._pool.submit(self._look, key, wait)
        elif compiles:
            self._tell(task, True)

    def abandon(self) -> None:
        """Forget the tasks: nobody wants them any more."""
        with self._changed:
            self._waits.clear()
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Returns when no task waits any more."""
        with self._changed:
            while self._waits:
                self._changed.wait()
        self._pool.shutdown(wait=False)  # after `abandon` it may be compiling what nobody wants

    def _look(self, key: tuple[tuple[int, ...], bool], wait: _Wait) -> None:
        missing: dict[Any, None] = {}
        for form in wait.forms:
            try:
                found = self._backend.missing_kernels(form.params, form.operands, checked=wait.checked)
            except Exception as error:
                log.debug("no plan, as whoever runs it will say: %s", error)
            else:
                missing.update(dict.fromkeys(found))
        with self._changed:
            wait.kernels, wait.compiles = len(missing), bool(missing)
            self._moved = time.monotonic()
            tasks = list(wait.tasks)
        if not missing:
            self._go_on(key, wait)
            return
        log.info("%d kernels have to be compiled for task %s", len(missing), ", ".join(tasks))
        for task in tasks:
            self._tell(task, True)
        for kernel in missing:
            self._pool.submit(self._compile, kernel, key, wait)

    def _compile(self, kernel: Any, key: tuple[tuple[int, ...], bool], wait: _Wait) -> None:
        try:
            self._backend.compile_kernel(kernel)
        except Exception as error:
            log.debug("not compiled, as whoever runs it will say: %s", error)
        with self._changed:
            wait.kernels -= 1
            self._moved = time.monotonic()
            over = not wait.kernels
        if over:
            self._go_on(key, wait)

    def _go_on(self, key: tuple[tuple[int, ...], bool], wait: _Wait) -> None:
        # What comes while these are handed on comes behind them.
        while True:
            with self._changed:
                if self._waits.get(key) is not wait:
                    return
                tasks, wait.tasks = wait.tasks, {}
                if not tasks:
                    for form in wait.forms:
                        form.compiled.add(wait.checked)
                    del self._waits[key]
                    self._changed.notify_all()
                    return
            for task, (came, go_on) in tasks.items():
                if wait.compiles:
                    self._tell(task, False)
                go_on(time.perf_counter() - came if wait.compiles else 0.0)
