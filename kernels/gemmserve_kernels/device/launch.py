"""Launchers: what host code needs of a machine to run kernels, and CuPy as one.

`Launcher` is a port: `simt` computes arguments and calls it, whatever stands behind. `CupyLauncher` is the adapter for
CUDA and ROCm devices; the tests put a CPU emulation of the device language behind the same methods.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from gemmserve_kernels.device import compiler, driver
from gemmserve_kernels.device.element_counts import counters_of
from gemmserve_kernels.device.replay import Call, Clear, Launch
from gemmserve_kernels.problem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_kernels.device.replay import Program, Routine
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.tensor_map import Box, TensorMap

_UNASKED_SHARED: Final = 48 * 1024
"""Dynamic shared memory that a CUDA kernel gets without opting in (CUDA C++ programming guide)."""


_WORD_MASK: Final = (1 << 64) - 1
_WORD: Final = 8
_NOWHERE: Final = -1
"""No address."""
_WORKSPACE: Final = -2
"""Place of the workspace among the addresses of a run."""
_EARLY_FROM: Final = 90
"""Compute capability times 10 from which on a kernel may start before the one ahead has ended."""


class Launcher(Protocol):
    """Memory and launches of one device. Arrays are NumPy's, or have `shape`, `dtype` and byte `strides` as NumPy's."""

    @property
    def spec(self) -> DeviceSpec:
        """The device, as far as tiles depend on it."""

    @property
    def max_grid(self) -> int:
        """Blocks of one launch at most; more are launched in turns."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A C-contiguous array of arbitrary content, aligned to 16 bytes at least."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A C-contiguous array of zeros."""

    def pointer(self, array: Any) -> int:
        """Address of the array's first element."""

    def counters(self, elements: int) -> int:
        """Address of the device's `element_counts` counters, for a product with so many elements of results."""

    def tensor_map(self, box: Box, address: int) -> TensorMap:
        """Return the tensor map by which the copy engine finds boxes of the array at `address`. Raises DeviceError."""

    def launch(
        self,
        source: KernelSource,
        entry: str,
        *,
        grid: int,
        block: int,
        shared: int,
        params: ctypes.Structure,
        dependent: bool = False,
    ) -> None:
        """Enqueues `entry` of `source`: `grid` blocks of `block` threads, `shared` bytes, one structure by value.

        `dependent`: the kernel waits itself for the one ahead of it, and may be started before that has ended.
        """

    def call(self, routine: Routine, addresses: tuple[int, ...]) -> None:
        """Enqueues a routine of a library, on arrays at these addresses. Raises DeviceError."""


@dataclass(frozen=True)
class CupyLauncher:
    """The current CuPy device and stream."""

    spec: DeviceSpec
    max_grid: int = 2**31 - 1

    @classmethod
    def current(cls) -> CupyLauncher:
        """For the device that is current in this thread."""
        from gemmserve_kernels.device.spec import DeviceSpec

        return cls(DeviceSpec.current())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """See Launcher."""
        import cupy

        return cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """See Launcher."""
        import cupy

        return cupy.zeros(shape, dtype)

    def pointer(self, array: Any) -> int:
        """See Launcher."""
        return int(array.data.ptr)

    def counters(self, elements: int) -> int:
        """See Launcher."""
        import cupy

        return counters_of(cupy.cuda.runtime.getDevice()).add(elements)

    def tensor_map(self, box: Box, address: int) -> TensorMap:
        """See Launcher."""
        return box.encode(address)

    def launch(
        self,
        source: KernelSource,
        entry: str,
        *,
        grid: int,
        block: int,
        shared: int,
        params: ctypes.Structure,
        dependent: bool = False,
    ) -> None:
        """See Launcher. The kernel starts when what is ahead has ended."""
        import cupy

        del dependent  # what is ahead may be no kernel
        kernel = _loaded(source, entry, shared, self.spec.arch, cupy.cuda.runtime.getDevice())
        if self.spec.kind == "cuda":
            config = driver.LaunchConfig.of(grid, block, shared)
            config.stream = cupy.cuda.get_current_stream().ptr
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            code = driver.launcher()(ctypes.addressof(config), kernel.kernel.ptr, ctypes.addressof(pointers), None)
            driver.check(code, f"launch of {entry}")
            return
        # CuPy passes a structure by value as a NumPy scalar of its bytes.
        packed = np.frombuffer(bytes(params), dtype=f"V{ctypes.sizeof(params)}")
        kernel((grid,), (block,), (packed,), shared_mem=shared)

    def call(self, routine: Routine, addresses: tuple[int, ...]) -> None:
        """See Launcher."""
        routine.enqueue(addresses)

    def run(self, program: Program, addresses: Sequence[int]) -> None:
        """Enqueues all of `program`, its arguments at `addresses`."""
        self.ready(program).run(tuple(addresses))

    def ready(self, program: Program) -> Ready:
        """`program`, to be run on the device that is current now, any number of times."""
        import cupy

        if self.spec.kind != "cuda":
            return _Interpreted(self, program)
        return _replay(program, self.spec.arch, cupy.cuda.runtime.getDevice())


class Ready(Protocol):
    """A program made ready for one device."""

    def run(self, addresses: tuple[int, ...]) -> None:
        """Enqueues it on the current stream, its arguments at `addresses`; that device must be the current one."""


@dataclass(frozen=True)
class _Interpreted:
    """A program launched step by step."""

    launcher: CupyLauncher
    program: Program

    def run(self, addresses: tuple[int, ...]) -> None:
        """See Ready."""
        self.program.run(self.launcher, addresses)


_used: Final[dict[tuple[KernelSource, str], None]] = {}


def used_kernels() -> list[tuple[KernelSource, str]]:
    """Return the kernels, source and entry, that this process has launched, in the order of their first launches."""
    return list(_used)


@lru_cache(maxsize=1024)
def _loaded(source: KernelSource, entry: str, shared: int, arch: str, device: int) -> Any:
    """The kernel, allowed to take that much shared memory."""
    kernel = compiler.load(source, entry, arch, device)
    _used[source, entry] = None
    if arch.startswith("sm_") and shared > _UNASKED_SHARED and kernel.max_dynamic_shared_size_bytes < shared:
        kernel.max_dynamic_shared_size_bytes = shared
    return kernel


@lru_cache(maxsize=1024)
def _replay(program: Program, arch: str, device: int) -> _Replay:
    return _Replay(program, arch, device)


class _Replay:
    """A program whose kernels are loaded on one CUDA device. Their arguments are kept as they were handed over last:
    before the next run only those words are written that count from an address which is another one now.

    From the third run on, several steps are enqueued at once, as a graph for each stream (launches of one graph do not
    overlap), in which only kernels are set anew that such words belong to. To set one and launch a graph takes as long
    as to launch a kernel. Routines of libraries are called every time, and launches beside them are made one by one.
    """

    _MAX_MAPS: Final = 512
    """Tensor maps that are kept: results of a stream of products are some hundred arrays until they are deleted."""
    _SINGLY: Final = 2
    """Runs before graphs are made: much is run once."""
    _MAX_GRAPHS: Final = 4

    def __init__(self, program: Program, arch: str, device: int) -> None:
        import cupy

        self._cuda = cupy.cuda  # looked up once: calls that come again are short
        self._elements = program.elements
        self._workspace = program.workspace
        self._device = device
        self._lock = Lock()
        self._maps: dict[tuple[Box, int], Any] = {}
        self._stream = 0
        self._bases = [_NOWHERE] * (program.arguments + 2)
        self._now: tuple[int, ...] = ()
        kept = np.array(program.words)  # those that no address is added to stay as they are
        self._words = kept.data
        self._places = [_places(program, number) for number in range(1, len(self._bases) + 1)]
        launches = [step for step in program.steps if isinstance(step, Launch)]
        self._pointers = (ctypes.c_void_p * len(launches))(*(kept.ctypes.data + 8 * launch.word for launch in launches))
        self._configs: list[driver.LaunchConfig] = []
        self._kernels: list[Any] = []  # their modules must stay loaded
        self._steps: list[Clear | Call | tuple[str, int, int, int]] = []
        for step in program.steps:
            self._steps.append(self._ready(step, arch, device) if isinstance(step, Launch) else step)
        self._users = [_users(program, number) for number in range(1, len(self._bases) + 1)]
        self._singly = self._SINGLY
        self._graphs: dict[int, _Graph] = {}
        calls = any(isinstance(step, Call) for step in self._steps)
        self._most_graphs = self._MAX_GRAPHS if len(self._steps) > 1 and not calls else 0

    def _ready(self, launch: Launch, arch: str, device: int) -> tuple[str, int, int, int]:
        """Name, and the addresses of configuration, function and argument pointer."""
        kernel = _loaded(launch.source, launch.entry, launch.shared, arch, device)
        early = launch.dependent and int("".join(filter(str.isdigit, arch))) >= _EARLY_FROM
        config = driver.LaunchConfig.of(launch.grid, launch.block, launch.shared, dependent=early)
        pointer = ctypes.addressof(self._pointers) + ctypes.sizeof(ctypes.c_void_p) * len(self._configs)
        self._configs.append(config)
        self._kernels.append(kernel)
        return launch.entry, ctypes.addressof(config), kernel.kernel.ptr, pointer

    def run(self, addresses: tuple[int, ...]) -> None:
        """See Ready."""
        # Given back when this returns: what uses it is ahead, on this stream, of whatever gets it next.
        memory = self._cuda.alloc(self._workspace) if self._workspace else None
        workspace = 0 if memory is None else memory.ptr
        counters = counters_of(self._device).add(self._elements) if self._elements else 0
        stream = self._cuda.get_current_stream().ptr
        with self._lock:
            now = (*addresses, workspace, counters)
            if now != self._now:
                self._now = ()  # should an encoding fail, everything is looked at again
                for number, address in enumerate(now):
                    if address != self._bases[number]:
                        self._move(number, address)
                self._now = now
            if self._singly:
                self._singly -= 1
            elif self._most_graphs and not driver.is_capturing(stream):
                graph = self._graphs.get(stream) or self._new_graph(stream)
                if graph is not None:
                    graph.run(stream, now, self._users)
                    return
            self._enqueue(stream, workspace)

    def _enqueue(self, stream: int, workspace: int) -> None:
        """One launch after another."""
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        launch = driver.launcher()
        for step in self._steps:
            if isinstance(step, Clear):
                code = driver.filler()(workspace + step.offset, 0, step.nbytes, stream)
                driver.check(code, "clearing memory")
                continue
            if isinstance(step, Call):
                step.routine.enqueue(tuple(self._words[step.word : step.word + step.count].tolist()))
                continue
            name, config_at, function, pointer = step
            if code := launch(config_at, function, pointer, None):
                driver.check(code, f"launch of {name}")

    def _new_graph(self, stream: int) -> _Graph | None:
        """A graph for `stream`; None where there are enough of them, or the driver makes none."""
        if len(self._graphs) >= self._most_graphs:
            return None
        steps = [step for step in self._steps if not isinstance(step, Call)]  # of which there are none
        try:
            made = self._graphs[stream] = _Graph(steps, self._configs, self._now)
        except DeviceError:  # one launch after another does as well, and says what else is wrong with the device
            self._most_graphs = 0
            return None
        return made

    def _move(self, number: int, address: int) -> None:
        """Writes what counts from base `number`, which is at `address` now. Raises DeviceError."""
        words, (places, maps) = self._words, self._places[number]
        self._bases[number] = _NOWHERE  # should an encoding fail, everything is written again
        for at, offset in places:
            words[at] = (address + offset) & _WORD_MASK
        for at, box, offset in maps:
            encoded = self._map(box, (address + offset) & _WORD_MASK)
            words[at : at + len(encoded)] = encoded
        self._bases[number] = address

    def _map(self, box: Box, address: int) -> Any:
        key = (box, address)
        if (found := self._maps.get(key)) is None:
            if len(self._maps) >= self._MAX_MAPS:
                self._maps.clear()
            found = self._maps[key] = np.array(box.encode(address).words, np.uint64).data
        return found


class _Graph:
    """The steps of a replay as a graph, and the addresses that its kernels have been given. `now`: those that the words
    of their arguments hold.
    """

    def __init__(
        self,
        steps: Sequence[Clear | tuple[str, int, int, int]],
        configs: Sequence[driver.LaunchConfig],
        now: tuple[int, ...],
    ) -> None:
        self._graph = driver.Graph()
        self._steps = steps
        self._now = now
        left = iter(configs)
        for step in steps:
            if isinstance(step, Clear):
                self._graph.add_fill(now[_WORKSPACE] + step.offset, step.nbytes)
            else:
                _, _, function, pointer = step
                self._graph.add_kernel(next(left), function, pointer)
        self._graph.finish()

    def run(self, stream: int, now: tuple[int, ...], users: Sequence[int]) -> None:
        """Enqueues it. `users`: for each of `now`, the steps that it matters to, a bit for each. Raises DeviceError."""
        before = self._now
        if now != before:
            self._now = ()  # should one fail, all are set the next time
            moved = 0
            if before:
                for address, earlier, of_base in zip(now, before, users, strict=True):
                    if address != earlier:
                        moved |= of_base
            else:
                moved = -1
            for number, step in enumerate(self._steps):
                if moved >> number & 1:
                    if isinstance(step, Clear):
                        self._graph.set_fill(number, now[_WORKSPACE] + step.offset)
                    else:
                        self._graph.set_kernel(number)
            self._now = now
        self._graph.launch(stream)


def _users(program: Program, number: int) -> int:
    """Return the steps of a program to which the address of base `number` matters, a bit for each."""
    found = 0
    for place, step in enumerate(program.steps):
        if isinstance(step, Clear):
            used = number == program.arguments + 1
        else:
            end = step.word + -(-ctypes.sizeof(step.kind) // _WORD)
            used = bool((program.bases[step.word : end] == number).any())
            used |= any(step.word <= each.word < end and each.base == number for each in program.maps)
        found |= used << place
    return found


def _places(program: Program, number: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, Box, int], ...]]:
    """Return the words that count from base `number`, each with what is to be added, and the tensor maps that do."""
    words = tuple((int(at), int(program.words[at])) for at in np.flatnonzero(program.bases == number))
    maps = tuple((place.word, place.box, place.offset) for place in program.maps if place.base == number)
    return words, maps
