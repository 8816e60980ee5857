"""A compiled kernel source: launches its kernels and turns what goes wrong in them into exceptions."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import toolchain
from .memory import PAGE, GuardedBlock, Stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


class ShimError(RuntimeError):
    """Device code failed. `block` and `thread` say where, `address` which memory (or None)."""

    def __init__(
        self,
        message: str,
        block: tuple[int, int, int] = (0, 0, 0),
        thread: tuple[int, int, int] = (0, 0, 0),
        address: int | None = None,
    ) -> None:
        super().__init__(message)
        self.block = block
        self.thread = thread
        self.address = address


class BarrierError(ShimError):
    """Threads of a block do not all meet at one __syncthreads."""


class WarpError(ShimError):
    """Lanes that a mask names do not meet at one warp operation."""


class MemoryFault(ShimError):  # noqa: N818 - named for what happened on the device
    """An access outside of every buffer, or a read of shared memory that was never written."""


class DataRace(ShimError):  # noqa: N818 - named for what happened on the device
    """Two threads touch the same bytes, one writing, and nothing orders them (checked builds)."""


class Trap(ShimError):  # noqa: N818 - named for what happened on the device
    """__trap, a failed assertion, an integer division by zero, a loop without end."""


class LaunchError(ShimError):
    """The launch itself is wrong: arguments, sizes, the limits of the device."""


_ERRORS = (ShimError, BarrierError, WarpError, MemoryFault, DataRace, Trap, LaunchError)  # enum class Failure


# ---- device/launch.hpp


class _Dim(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

    def tuple(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class _Buffer(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_size_t), ("end", ctypes.c_size_t)]


class _Request(ctypes.Structure):
    _fields_ = [
        ("grid", _Dim),
        ("block", _Dim),
        ("cluster", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("dynamic_shared", ctypes.c_void_p),
        ("dynamic_bytes", ctypes.c_size_t),
        ("stacks", ctypes.c_void_p),
        ("stack_bytes", ctypes.c_size_t),
        ("guard_bytes", ctypes.c_size_t),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_size_t),
        ("seconds", ctypes.c_double),
        ("dependent", ctypes.c_int),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("block", _Dim),
        ("thread", _Dim),
        ("access", ctypes.c_int),
        ("address", ctypes.c_size_t),
        ("code", ctypes.c_size_t),
        ("other_code", ctypes.c_size_t),
        ("switches", ctypes.c_uint64),
        ("message", ctypes.c_char * 1024),
    ]


@dataclass(frozen=True)
class Order:
    """In which order blocks, warps and lanes run; results must not depend on it."""

    name: str = "forward"  # forward, reverse or shuffled
    seed: int = 0  # of the shuffled order

    @property
    def code(self) -> int:
        return ("forward", "reverse", "shuffled").index(self.name)

    def __str__(self) -> str:
        return f"shuffled-{self.seed}" if self.name == "shuffled" else self.name


FORWARD = Order("forward")
REVERSE = Order("reverse")
ORDERS = (FORWARD, REVERSE, Order("shuffled", 1), Order("shuffled", 2))


@dataclass(frozen=True)
class Region:
    """A named piece of device memory, for messages and for the bounds of checked builds."""

    begin: int
    nbytes: int
    name: str


# One launch at a time in this process: fibers share their stacks, and signal handlers belong to the process.
_machine = threading.Lock()
_stacks = Stacks()


@functools.lru_cache(maxsize=64)
def _shared_block(nbytes: int) -> GuardedBlock:
    return GuardedBlock(nbytes, alignment=16)  # what CUDA promises of dynamic shared memory


class ShimModule:
    """A loaded shared object. Make one with compile_source()."""

    def __init__(
        self, path: Path, kernels: Sequence[str], *, warp_size: int, checked: bool, with_lines: Callable[[], Path]
    ) -> None:
        self._with_lines = with_lines  # builds the same code with debug information
        self.kernels = tuple(kernels)
        self.warp_size = warp_size
        self.checked = checked
        self._library = ctypes.CDLL(str(path))
        self._library.simt_static_shared.restype = ctypes.c_size_t
        self._library.simt_static_shared.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        self.static_shared_bytes = self._static_shared().nbytes

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared: int = 0,
        order: Order = FORWARD,
        regions: Iterable[Region] = (),
        seconds: float = 120,
        cluster: int = 1,
        dependent: bool = False,
    ) -> int:
        """Runs a kernel and returns how often a thread was resumed.

        `args` are ctypes values and structures, NumPy scalars, also structured ones, ndarrays (the pointer to their
        first element), ints (a C int), floats (a double) and None (a null pointer); their sizes must be those of the
        parameters. `shared` is the dynamic shared memory in bytes. `regions` are the buffers that a checked build lets
        the kernel touch, next to the ndarrays among `args`. A launch that takes more than `seconds` of processor time
        is a Trap. `cluster` blocks run together (kernels of Hopper's clusters). `dependent`: kernels ahead may still
        run, so a thread that returns, or in a checked build touches global memory, before it has waited for them is a
        DataRace. Raises ShimError's subclasses.
        """
        if kernel not in self.kernels:
            raise LaunchError(f"no kernel {kernel!r} in this source: it has {', '.join(self.kernels)}")
        grid3, block3 = _three(grid, "grid"), _three(block, "block")
        if np.prod(block3, dtype=np.int64) > 1024:
            raise LaunchError(f"a block of {block3} has more than 1024 threads")
        keep = [_argument(arg) for arg in args]
        copies = [_aligned(value) for value in keep]
        pointers = (ctypes.c_void_p * max(len(keep), 1))(*(ctypes.addressof(value) for value in copies))
        sizes = (ctypes.c_size_t * max(len(keep), 1))(*(ctypes.sizeof(value) for value in keep))
        arrays = [(i, arg) for i, arg in enumerate(args) if isinstance(arg, np.ndarray)]
        known = [*regions, *(_region_of(array, f"argument {i}") for i, array in arrays)]
        buffers = _disjoint(known)
        report = _Report()
        with _machine:
            threads = int(np.prod(block3)) * cluster
            _stacks.reserve(threads)
            memory = _shared_block(shared * cluster)
            request = _Request(
                _Dim(*grid3), _Dim(*block3), cluster, order.code, order.seed, memory.address, shared,
                _stacks.address, _stacks.stack_bytes, PAGE, buffers, len(buffers), seconds,
                dependent,
            )  # fmt: skip
            function = getattr(self._library, f"simt_launch_{kernel}")
            function(ctypes.byref(request), pointers, sizes, len(keep), ctypes.byref(report))
            damage = memory.damage()
            if damage is not None:
                _shared_block.cache_clear()
        if report.kind:
            raise self._error(kernel, report, known, shared, memory)
        if damage is not None:
            raise MemoryFault(f"{kernel}: a write at byte {damage} of {shared} bytes of dynamic shared memory")
        return int(report.switches)

    def _static_shared(self) -> Region:
        """The static shared memory of the calling thread."""
        address = ctypes.c_void_p()
        nbytes = self._library.simt_static_shared(ctypes.byref(address))
        return Region(address.value or 0, int(nbytes), "static shared memory")

    def _error(
        self, kernel: str, report: _Report, known: Sequence[Region], shared: int, memory: GuardedBlock
    ) -> ShimError:
        kind = _ERRORS[report.kind]
        message = f"{kernel}: {report.message.decode(errors='replace')}"
        address = report.address or None
        if address is not None:
            regions = [*known, Region(memory.address, shared, "dynamic shared memory"), self._static_shared()]
            message += ": " + _describe(address, [region for region in regions if region.nbytes])
        if kind is not LaunchError:
            message += f"; block {report.block.tuple()}, thread {report.thread.tuple()}"
        if report.code:
            message += f", at {self._line_of(report.code)}"
        if report.other_code:
            message += f", the earlier access at {self._line_of(report.other_code)}"
        return kind(message, report.block.tuple(), report.thread.tuple(), address)

    def _line_of(self, offset: int) -> str:
        """File and line of an instruction from the debug information, by addr2line where binutils are installed."""
        tool = shutil.which("addr2line")
        if tool is None:
            return f"module offset {offset:#x}"
        # The frames of inlined functions, innermost first; those of the device language itself are left out.
        command = [tool, "-i", "-e", str(self._with_lines()), hex(offset - 1)]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        cache = f"{toolchain.cache_directory()}/"
        places = [line.split(" (")[0].removeprefix(cache) for line in lines if line and "?" not in line]
        places = [
            place.replace("<stdin>", "kernel") for place in places if not place.startswith(f"{toolchain.HERE.name}/")
        ]
        return places[0] if places else f"module offset {offset:#x}"


def compile_source(
    source: str,
    *,
    kernels: Sequence[str] | None = None,
    warp_size: int = 32,
    defines: Sequence[str] = (),
    checked: bool = False,
    optimize: str = "-Og",
    ucontext: bool = False,
    compiler: toolchain.Compiler | None = None,
) -> ShimModule:
    """Compiles a kernel source, unmodified, for the CPU. `kernels` defaults to every `extern "C" __global__` in it."""
    if warp_size not in (32, 64):
        raise ValueError(f"warps have 32 or 64 lanes, not {warp_size}")
    names = tuple(kernels) if kernels is not None else kernel_names(source)
    make = functools.partial(
        toolchain.build, source, names, warp_size=warp_size, defines=tuple(defines), checked=checked,
        optimize=optimize, ucontext=ucontext, compiler=compiler,
    )  # fmt: skip
    path = make()
    if path not in _loaded:
        with_lines = functools.partial(make, debug=True)
        _loaded[path] = ShimModule(path, names, warp_size=warp_size, checked=checked, with_lines=with_lines)
    return _loaded[path]


_loaded: dict[Path, ShimModule] = {}


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = re.compile(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)")
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:[A-Z_]+\s+)*(\w+)\s*\(')  # macros may stand before it


def kernel_names(source: str) -> tuple[str, ...]:
    """The `extern "C" __global__ void` functions of a source."""
    text = _BOUNDS.sub(" ", _COMMENT.sub(" ", source))
    return tuple(dict.fromkeys(_KERNEL.findall(text)))


def _three(sizes: Sequence[int], what: str) -> tuple[int, int, int]:
    padded = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))
    if len(padded) != 3 or min(padded) < 1:
        raise LaunchError(f"a {what} has one to three positive sizes, not {tuple(sizes)}")
    return padded


def _argument(value: Any) -> Any:
    """The value as a ctypes object."""
    if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return value
    if value is None:
        return ctypes.c_void_p()
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        return ctypes.c_int(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, np.generic):
        raw = value.tobytes()
        return (ctypes.c_char * len(raw)).from_buffer_copy(raw)
    raise TypeError(f"an argument of type {type(value).__name__} has no form in C")


def _aligned(value: Any) -> Any:
    """The bytes of a ctypes object at an address that suits any parameter: tensor maps want multiples of 64."""
    size = ctypes.sizeof(value)
    memory = (ctypes.c_char * (size + 64))()
    copy = (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % 64)
    ctypes.memmove(copy, ctypes.addressof(value), size)
    return copy


def extent_of(array: np.ndarray) -> tuple[int, int]:
    """The addresses of the first byte of an array and of the byte past its last, whatever its strides."""
    first = int(array.ctypes.data)
    if array.size == 0:
        return first, first
    reach = [stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True)]
    return first + sum(r for r in reach if r < 0), first + sum(r for r in reach if r > 0) + array.itemsize


def _region_of(array: np.ndarray, name: str) -> Region:
    low, high = extent_of(array)
    return Region(low, high - low, name)


def _disjoint(regions: Iterable[Region]) -> Any:
    """The regions sorted, overlapping ones (views of one array) joined."""
    joined: list[list[int]] = []
    for region in sorted(regions, key=lambda r: r.begin):
        if not region.nbytes:
            continue
        if joined and region.begin < joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], region.begin + region.nbytes)
        else:
            joined.append([region.begin, region.begin + region.nbytes])
    return (_Buffer * len(joined))(*(_Buffer(begin, end) for begin, end in joined))


def _describe(address: int, regions: Sequence[Region]) -> str:
    """Where an address lies with respect to the nearest region."""

    def distance(region: Region) -> int:
        return max(region.begin - address, address - (region.begin + region.nbytes - 1), 0)

    nearest = min(regions, key=distance, default=None)
    if nearest is None or distance(nearest) > 1 << 20:
        return f"{address:#x} is near no buffer"
    if distance(nearest) == 0:
        return f"byte {address - nearest.begin} of {nearest.name}"
    if address < nearest.begin:
        return f"{nearest.begin - address} bytes before {nearest.name} ({nearest.nbytes} bytes)"
    return f"{address - nearest.begin - nearest.nbytes} bytes past the end of {nearest.name} ({nearest.nbytes} bytes)"
