"""Launchers: what host code needs of a machine to run kernels, and CuPy as one.

`Launcher` is a port: `simt` computes arguments and calls it, whatever stands behind. `CupyLauncher` is the adapter for
CUDA and ROCm devices; the tests put a CPU emulation of the device language behind the same methods.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from gemmserve_kernels.device import compiler, driver
from gemmserve_kernels.device.element_counts import counters_of
from gemmserve_kernels.device.replay import Call, Clear, Launch
from gemmserve_kernels.device.tensor_map import MAP_BYTES
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
            places = (ctypes.addressof(config), kernel.kernel.ptr, ctypes.addressof(pointers))
            driver.check(driver.launcher()(*map(driver.argument, places), None), f"launch of {entry}")
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
    """A program whose kernels are loaded on one CUDA device. Their arguments are kept as they were handed over the last
    few times, one `_Block` for each: a run at other addresses writes those words of the oldest block that count from an
    address which is another one now. So nothing is written where results take turns between two places.

    From the third run on, several steps are enqueued at once, as a graph for each block and stream (launches of one
    graph do not overlap), in which only kernels are set anew that such words belong to. A program that calls a library
    is enqueued step by step.
    """

    _MAX_MAPS: Final = 512
    """Tensor maps that are kept of one place: results of a stream of products are some hundred arrays until they are
    deleted."""
    _SINGLY: Final = 2
    """Runs before graphs are made: much is run once."""
    _MAX_STREAMS: Final = 4
    """Streams that get graphs."""
    _BLOCKS: Final = 2
    """Sets of addresses that are kept."""
    _GRAPH_FROM: Final = 2
    """Steps from which on they are enqueued as a graph."""

    def __init__(self, program: Program, arch: str, device: int) -> None:
        import cupy

        self._cuda = cupy.cuda  # looked up once: calls that come again are short
        self._launch = driver.launcher()
        self._elements = program.elements
        self._workspace = program.workspace
        self._device = device
        self._lock = Lock()
        self._nowhere = (_NOWHERE,) * (program.arguments + 2)
        self._places = [_places(program, number) for number in range(1, len(self._nowhere) + 1)]
        self._numbers = tuple(range(len(self._nowhere)))
        self._users = [_users(program, number) for number in range(1, len(self._nowhere) + 1)]
        kernels = [_Kernel.of(step, arch, device) if isinstance(step, Launch) else None for step in program.steps]
        self._configs = [kernel.config for kernel in kernels if kernel is not None]
        self._stream = 0
        self._blocks = deque(_Block(program, kernels, self._nowhere) for _ in range(self._BLOCKS))
        self._singly = self._SINGLY
        self._streams: dict[int, driver.Stream] = {}
        no_graph = len(program.steps) < self._GRAPH_FROM or any(isinstance(step, Call) for step in program.steps)
        self._most_streams = 0 if no_graph else self._MAX_STREAMS

    def run(self, addresses: tuple[int, ...]) -> None:
        """See Ready."""
        # Given back when this returns: what uses it is ahead, on this stream, of whatever gets it next.
        memory = self._cuda.alloc(self._workspace) if self._workspace else None
        workspace = 0 if memory is None else memory.ptr
        counters = counters_of(self._device).add(self._elements) if self._elements else 0
        stream = self._cuda.get_current_stream().ptr
        now = (*addresses, workspace, counters)
        with self._lock:
            block = self._block(now)
            if self._singly:
                self._singly -= 1
            elif self._most_streams:
                known = self._streams.get(stream) or self._new_stream(stream)
                if known is not None and not known.is_capturing():
                    graph = block.graphs.get(stream) or self._new_graph(block, stream)
                    if graph is not None:
                        graph.run(known, workspace)
                        return
            self._enqueue(block, stream, workspace)

    def _block(self, now: tuple[int, ...]) -> _Block:
        """The block of arguments at these addresses: the one that was written longest ago, where none is."""
        blocks = self._blocks
        for block in blocks:
            if block.now == now:
                return block
        blocks.rotate()
        self._move(blocks[0], now)
        return blocks[0]

    def _move(self, block: _Block, now: tuple[int, ...]) -> None:
        """Writes what counts from addresses that are others than the block's. Raises DeviceError."""
        words, before = block.words, block.now
        block.now = self._nowhere  # should an encoding fail, everything is written again
        for number in self._numbers:
            address = now[number]
            if address != before[number]:
                places, maps = self._places[number]
                for at, offset in places:
                    words[at] = address + offset
                for where, box, offset, known in maps:
                    words[where] = known.get(address + offset) or self._new_map(box, address + offset, known)
                if block.graphs:
                    for graph in block.graphs.values():
                        graph.stale.update(self._users[number])
        block.now = now

    def _new_map(self, box: Box, address: int, known: dict[int, Any]) -> Any:
        if len(known) >= self._MAX_MAPS:
            known.clear()
        found = known[address] = np.array(box.encode(address & _WORD_MASK).words, np.uint64).view(np.int64).data
        return found

    def _enqueue(self, block: _Block, stream: int, workspace: int) -> None:
        """One launch after another."""
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        for step in block.steps:
            if isinstance(step, Clear):
                code = driver.filler()(workspace + step.offset, 0, step.nbytes, stream)
                driver.check(code, "clearing memory")
            elif isinstance(step, Call):
                step.routine.enqueue(tuple(block.words[step.word : step.word + step.count].tolist()))
            elif code := self._launch(*step.arguments):
                driver.check(code, f"launch of {step.kernel.entry}")

    def _new_stream(self, handle: int) -> driver.Stream | None:
        """A stream that gets graphs; None where there are enough of them."""
        if len(self._streams) >= self._most_streams:
            return None
        made = self._streams[handle] = driver.Stream(handle)
        return made

    def _new_graph(self, block: _Block, stream: int) -> _Graph | None:
        """A graph for `stream`; None where the driver makes none."""
        try:
            made = block.graphs[stream] = _Graph(block)
        except DeviceError:  # one launch after another does as well, and says what else is wrong with the device
            self._most_streams = 0
            return None
        return made


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A kernel of a program and how it is launched; its argument begins at `word`. `loaded`: it must stay so."""

    entry: str
    loaded: Any
    config: driver.LaunchConfig
    word: int

    @classmethod
    def of(cls, launch: Launch, arch: str, device: int) -> _Kernel:
        """The kernel of a launch. Raises what its compilation raises."""
        loaded = _loaded(launch.source, launch.entry, launch.shared, arch, device)
        early = launch.dependent and int("".join(filter(str.isdigit, arch))) >= _EARLY_FROM
        config = driver.LaunchConfig.of(launch.grid, launch.block, launch.shared, dependent=early)
        return cls(launch.entry, loaded, config, launch.word)


@dataclass(frozen=True, eq=False)
class _Step:
    """A kernel with its argument, to which `pointer` is the address of a pointer. `arguments`: those of the driver's
    launch.
    """

    kernel: _Kernel
    pointer: int
    arguments: tuple[Any, ...]


class _Block:
    """Words of the arguments of a program's kernels at the addresses `now`, and the graphs that read them by stream."""

    def __init__(self, program: Program, kernels: Sequence[_Kernel | None], nowhere: tuple[int, ...]) -> None:
        """`kernels`: one for each step that is a launch. `nowhere`: addresses that are yet to be written."""
        self.now = nowhere
        self.graphs: dict[int, _Graph] = {}
        kept = program.words.view(np.int64).copy()  # those that no address is added to stay as they are
        self.words = kept.data
        self._pointers = (ctypes.c_void_p * len(kernels))()
        self.steps: list[Clear | Call | _Step] = []
        for number, (step, kernel) in enumerate(zip(program.steps, kernels, strict=True)):
            if not isinstance(step, Launch):
                self.steps.append(step)
            elif kernel is not None:
                self._pointers[number] = kept.ctypes.data + _WORD * kernel.word
                pointer = ctypes.addressof(self._pointers) + ctypes.sizeof(ctypes.c_void_p) * number
                places = (ctypes.addressof(kernel.config), kernel.loaded.kernel.ptr, pointer)
                self.steps.append(_Step(kernel, pointer, (*map(driver.argument, places), None)))


class _Graph:
    """The steps of a block as a graph; none of them calls a library. `stale`: numbers of those whose addresses are
    others than it was given.
    """

    def __init__(self, block: _Block) -> None:
        self.stale: set[int] = set()
        self._steps = block.steps
        self._graph = driver.Graph()
        for step in block.steps:
            if isinstance(step, Clear):
                self._graph.add_fill(block.now[_WORKSPACE] + step.offset, step.nbytes)
            elif isinstance(step, _Step):
                self._graph.add_kernel(step.kernel.config, step.kernel.loaded.kernel.ptr, step.pointer)
        self._graph.finish()

    def run(self, stream: driver.Stream, workspace: int) -> None:
        """Enqueues it. Raises DeviceError; what was not set then is the next time."""
        if self.stale:
            for number in self.stale:
                step = self._steps[number]
                if isinstance(step, Clear):
                    self._graph.set_fill(number, workspace + step.offset)
                else:
                    self._graph.set_kernel(number)
            self.stale.clear()
        self._graph.launch(stream)


def _users(program: Program, number: int) -> tuple[int, ...]:
    """Return the numbers of the steps of a program to which the address of base `number` matters."""
    found = []
    for place, step in enumerate(program.steps):
        if isinstance(step, Clear):
            used = number == program.arguments + 1
        else:
            end = step.word + -(-ctypes.sizeof(step.kind) // _WORD)
            used = bool((program.bases[step.word : end] == number).any())
            used |= any(step.word <= each.word < end and each.base == number for each in program.maps)
        if used:
            found.append(place)
    return tuple(found)


_MapPlace = tuple[slice, "Box", int, dict[int, Any]]


def _places(program: Program, number: int) -> tuple[tuple[tuple[int, int], ...], tuple[_MapPlace, ...]]:
    """Return the words that count from base `number`, each with what is to be added, and the tensor maps that do, each
    with those that were made for it, by address.
    """
    signed = program.words.view(np.int64)  # what is added may be negative
    words = tuple((int(at), int(signed[at])) for at in np.flatnonzero(program.bases == number))
    maps: list[_MapPlace] = []
    for place in program.maps:
        if place.base == number:
            where = slice(place.word, place.word + MAP_BYTES // _WORD)
            maps.append((where, place.box, place.offset, {}))
    return words, tuple(maps)
