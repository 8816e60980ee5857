"""Products worked out once and repeated with other addresses: what keeps the host's share of a product small.

The host code of an algorithm runs against a `LaunchRecorder` that stands in for a device: arrays are `RecordedArray`s
with made-up addresses, launches are kept. It runs twice, with different addresses: what differs between the two records
is an address and says whose. The `Program` that comes of it is one block of kernel arguments, one block of memory for
all that the product allocates, and the launches in their order, routines of libraries among them. To run it again takes
the arrays' addresses and nothing else.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.device.tensor_map import Box

_SPACE: Final = 1 << 48
"""Recorded array number i lies at (i + 1) * _SPACE, and (i + 1) * _STEP further on in the second run."""
_STEP: Final = 1 << 28
_COUNTERS: Final = 0xFFFF
"""The number, from 1 on, of what stands for the device's element counters: the last that an address has room for."""
_WORD: Final = 8
ALIGNMENT: Final = 512
"""Bytes to which every array of the workspace is aligned, as CuPy's own are."""
_MARK: Final = 0xA17E_5EED_0B0C_5EED
"""First word of what stands for a tensor map."""


@dataclass(frozen=True)
class RecordedArray:
    """An array that is not there: what an array says of itself, and a made-up address."""

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    address: int

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, index: Any) -> RecordedArray:
        """A view, by integers and slices of step 1."""
        picks = index if isinstance(index, tuple) else (index,)
        address, shape, strides = self.address, [], []
        for pick, extent, stride in zip(picks, self.shape, self.strides, strict=False):
            if isinstance(pick, slice):
                start, stop, step = pick.indices(extent)
                if step != 1:
                    raise IndexError("slices of a recorded array have step 1")
                shape.append(max(0, stop - start))
                strides.append(stride)
                address += start * stride
            else:
                address += (range(extent)[pick]) * stride
        rest = len(picks)
        return RecordedArray(
            self.number, (*shape, *self.shape[rest:]), self.dtype, (*strides, *self.strides[rest:]), address
        )


class Routine(Protocol):
    """A routine of a library that works on arrays at some addresses; equal to another that does the same."""

    def enqueue(self, addresses: tuple[int, ...], /) -> None:
        """Enqueues it on the current stream of the current device. Raises DeviceError."""


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as it was asked for."""

    source: KernelSource
    entry: str
    grid: int
    block: int
    shared: int
    params: ctypes.Structure
    dependent: bool

    @property
    def outline(self) -> tuple[Any, ...]:
        """All but the arguments."""
        return self.source, self.entry, self.grid, self.block, self.shared


@dataclass(frozen=True)
class RecordedCall:
    """A routine as it was asked for. `params`: the addresses."""

    routine: Routine
    params: ctypes.Array[ctypes.c_uint64]

    @property
    def outline(self) -> tuple[Any, ...]:
        """All but the addresses."""
        return self.routine, len(self.params)


@dataclass(frozen=True)
class _Allocation:
    number: int
    nbytes: int
    cleared: bool


class LaunchRecorder:
    """A Launcher that runs nothing and keeps what it is asked for."""

    def __init__(self, spec: DeviceSpec, max_grid: int, turn: int) -> None:
        self.spec = spec
        self.max_grid = max_grid
        self._turn = turn
        self.array_count = 0
        self.phases: list[int] = []
        self.steps: list[_Allocation | RecordedLaunch | RecordedCall] = []
        self.maps: list[tuple[Box, int]] = []
        self.elements = 0

    def argument(self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], phase: int = 0) -> RecordedArray:
        """The next argument of the program, `phase` bytes past an aligned address; before anything is allocated."""
        number = self.array_count
        self.array_count += 1
        self.phases.append(phase)
        address = (number + 1) * (_SPACE + self._turn * _STEP) + phase
        return RecordedArray(number, tuple(shape), np.dtype(dtype), tuple(strides), address)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See Launcher."""
        return self._allocate(shape, dtype, cleared=False)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """See Launcher."""
        return self._allocate(shape, dtype, cleared=True)

    def _allocate(self, shape: tuple[int, ...], dtype: Any, *, cleared: bool) -> RecordedArray:
        strides, step = [], np.dtype(dtype).itemsize
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        array = self.argument(shape, dtype, tuple(reversed(strides)))
        self.steps.append(_Allocation(array.number, array.nbytes, cleared))
        return array

    def pointer(self, array: Any) -> int:
        """See Launcher."""
        return int(array.address)

    def counters(self, elements: int) -> int:
        """See Launcher."""
        self.elements += elements
        return _COUNTERS * (_SPACE + self._turn * _STEP)

    def tensor_map(self, box: Box, address: int) -> Any:
        """See Launcher."""
        from gemmserve_kernels.device.tensor_map import TensorMap

        self.maps.append((box, address))
        stand_in = TensorMap()
        stand_in.words[:2] = _MARK, len(self.maps) - 1
        return stand_in

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
        """See Launcher."""
        copy = type(params).from_buffer_copy(params)
        self.steps.append(RecordedLaunch(source, entry, grid, block, shared, copy, dependent))

    def call(self, routine: Routine, addresses: tuple[int, ...]) -> None:
        """See Launcher."""
        self.steps.append(RecordedCall(routine, (ctypes.c_uint64 * len(addresses))(*addresses)))


@dataclass(frozen=True)
class Launch:
    """One kernel of a program; its arguments begin at `word` of the program's. `kind` is their type."""

    source: KernelSource
    entry: str
    grid: int
    block: int
    shared: int
    word: int
    kind: type[ctypes.Structure]
    dependent: bool


@dataclass(frozen=True)
class Call:
    """One routine of a program, whose `count` addresses begin at `word` of the program's."""

    routine: Routine
    word: int
    count: int

    @property
    def kind(self) -> type[ctypes.Array[ctypes.c_uint64]]:
        """The type of what its words are."""
        return ctypes.c_uint64 * self.count


@dataclass(frozen=True)
class Clear:
    """Zeroing of `nbytes` of the workspace at `offset`."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class MapPlace:
    """Place of a tensor map among the words, and what it describes: `offset` bytes past base number `base`."""

    word: int
    box: Box
    base: int
    offset: int


@dataclass(frozen=True, eq=False)
class Program:
    """A product for any addresses. `words[i]` is to be raised by base number `bases[i]`: 0, the arguments' addresses
    in their order, the workspace's, and that of the device's element counters. `elements`: of results, that these are
    asked for; 0: they are not used.
    """

    words: np.ndarray[Any, np.dtype[np.uint64]]
    bases: np.ndarray[Any, np.dtype[np.intp]]
    maps: tuple[MapPlace, ...]
    steps: tuple[Launch | Call | Clear, ...]
    workspace: int
    arguments: int
    elements: int = 0

    def filled(
        self, addresses: Sequence[int], workspace: int, counters: int, tensor_map: Callable[[Box, int], Any]
    ) -> Any:
        """The words for these addresses: uint64, a fresh array."""
        base = np.array([0, *addresses, workspace, counters], np.uint64)
        words = self.words + base[self.bases]
        for place in self.maps:
            address = (int(base[place.base]) + place.offset) % (1 << 64)
            encoded = tensor_map(place.box, address)
            count = ctypes.sizeof(encoded) // _WORD
            words[place.word : place.word + count] = encoded.words
        return words

    def run(self, launcher: Launcher, addresses: Sequence[int]) -> None:
        """Runs it on `launcher`, one ordinary launch after another."""
        memory = launcher.empty((max(1, self.workspace),), np.dtype(np.uint8))
        counters = launcher.counters(self.elements) if self.elements else 0
        words = self.filled(addresses, launcher.pointer(memory), counters, launcher.tensor_map)
        for step in self.steps:
            if isinstance(step, Clear):
                memory[step.offset : step.offset + step.nbytes] = 0
                continue
            if isinstance(step, Call):
                launcher.call(step.routine, tuple(words[step.word : step.word + step.count].tolist()))
                continue
            launcher.launch(
                step.source,
                step.entry,
                grid=step.grid,
                block=step.block,
                shared=step.shared,
                params=step.kind.from_buffer_copy(words.data, step.word * _WORD),
                dependent=step.dependent,
            )


def record(spec: DeviceSpec, max_grid: int, run: Callable[[LaunchRecorder], int]) -> Program:
    """Return the program of the launches of `run`. It is called twice, makes its arguments with
    `LaunchRecorder.argument` and returns how many. Raises what `run` raises; ValueError where the two calls differ.
    """
    first, second = LaunchRecorder(spec, max_grid, 0), LaunchRecorder(spec, max_grid, 1)
    run(first)
    return _Assembly(run(second), first, second).program()


@dataclass
class _Assembly:
    arguments: int
    first: LaunchRecorder
    second: LaunchRecorder
    words: list[Any] = field(default_factory=list)
    bases: list[Any] = field(default_factory=list)

    def program(self) -> Program:
        if len(self.first.steps) != len(self.second.steps) or len(self.first.maps) != len(self.second.maps):
            raise ValueError("the launches depend on addresses")
        used: list[set[int]] = []
        launches: list[tuple[RecordedLaunch | RecordedCall, int]] = []
        length = 0
        for one, two in zip(self.first.steps, self.second.steps, strict=True):
            if isinstance(one, _Allocation) or isinstance(two, _Allocation):
                used.append(set())
                continue
            words, owners = self._addresses(one, two)
            self.words.append(words)
            self.bases.append(owners)
            marks = [self._owner(self.first.maps[i][1], self.second.maps[i][1]) for _, i in _marks(words)]
            used.append({int(owner) for owner in owners} | set(marks))
            launches.append((one, length))
            length += len(words)
        offsets, workspace = self._place(used)
        words = np.concatenate([np.zeros(0, np.uint64), *self.words])
        owners = np.concatenate([np.zeros(0, np.intp), *self.bases])
        maps = tuple(self._map(at, index, offsets) for at, index in _marks(words))
        bases = np.zeros(len(words), np.intp)
        for owner in np.unique(owners):
            where = owners == owner
            if owner:
                base, offset = self._base(int(owner), offsets)
                bases[where] = base
                words[where] += np.uint64((offset - int(owner) * _SPACE) % (1 << 64))
        steps = self._steps(launches, offsets)
        return Program(words, bases, maps, steps, workspace, self.arguments, self.first.elements)

    def _base(self, owner: int, offsets: dict[int, int]) -> tuple[int, int]:
        """Number of the base that array `owner - 1` counts from, and where that is zero."""
        if owner == _COUNTERS:
            return self.arguments + 2, 0
        if owner <= self.arguments:
            return owner, -self.first.phases[owner - 1]
        return self.arguments + 1, offsets[owner]

    def _map(self, at: int, index: int, offsets: dict[int, int]) -> MapPlace:
        box, address = self.first.maps[index]
        owner = self._owner(address, self.second.maps[index][1])
        base, offset = self._base(owner, offsets)
        return MapPlace(at, box, base, address - owner * _SPACE + offset)

    @staticmethod
    def _owner(one: int, two: int) -> int:
        owner, rest = divmod((two - one) % (1 << 64), _STEP)
        if rest:
            raise ValueError("the launches depend on addresses")
        return owner

    def _addresses(self, one: RecordedLaunch | RecordedCall, two: RecordedLaunch | RecordedCall) -> tuple[Any, Any]:
        """The words of the arguments, and for each 1 + the number of the array whose address it is, or 0."""
        size = ctypes.sizeof(one.params)
        if one.outline != two.outline or size != ctypes.sizeof(two.params):
            raise ValueError("the launches depend on addresses")
        padding = bytes(-size % _WORD)
        words, other = (np.frombuffer(bytes(each.params) + padding, np.uint64) for each in (one, two))
        owners, rests = np.divmod(other - words, np.uint64(_STEP))
        if rests.any() or ((owners > self.first.array_count) & (owners != _COUNTERS)).any():
            raise ValueError("the launches depend on addresses")
        return words.copy(), owners.astype(np.intp)

    def _place(self, used: list[set[int]]) -> tuple[dict[int, int], int]:
        """Return where in the workspace each allocation lies: the lowest gap among those alive at the same time."""
        last = {owner: number for number, owners in enumerate(used) for owner in owners}
        alive: dict[int, tuple[int, int]] = {}
        offsets: dict[int, int] = {}
        top = 0
        for number, step in enumerate(self.first.steps):
            if not isinstance(step, _Allocation):
                alive = {owner: span for owner, span in alive.items() if last[owner] > number}
                continue
            owner = step.number + 1
            if owner not in last:
                last[owner] = number
            at = 0
            for begin, end in sorted(alive.values()):
                if begin - at >= step.nbytes:
                    break
                at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
            offsets[owner] = at
            alive[owner] = (at, at + step.nbytes)
            top = max(top, at + step.nbytes)
        return offsets, top

    def _steps(
        self, launches: list[tuple[RecordedLaunch | RecordedCall, int]], offsets: dict[int, int]
    ) -> tuple[Launch | Call | Clear, ...]:
        steps: list[Launch | Call | Clear] = []
        found = iter(launches)
        for step in self.first.steps:
            if isinstance(step, RecordedCall):
                steps.append(Call(step.routine, next(found)[1], len(step.params)))
            elif isinstance(step, RecordedLaunch):
                note, word = step, next(found)[1]
                # Work may only begin early where a kernel comes before it.
                dependent = note.dependent and bool(steps) and isinstance(steps[-1], Launch)
                steps.append(
                    Launch(
                        note.source, note.entry, note.grid, note.block, note.shared, word, type(note.params), dependent
                    )
                )
            elif step.cleared and step.nbytes:
                steps.append(Clear(offsets[step.number + 1], step.nbytes))
        return tuple(steps)


def _marks(words: Any) -> list[tuple[int, int]]:
    """Return where tensor maps stand: (word, number)."""
    return [(int(at), int(words[at + 1])) for at in np.flatnonzero(words == np.uint64(_MARK))]
