"""The Launcher protocol of `device.launch` over host memory: the kernels' own host code runs unchanged."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from blas_model import multiply

from gemmserve_kernels.device.element_counts import WORDS, ElementCounts

from .memory import GuardedBlock
from .module import FORWARD, LaunchError, MemoryFault, Order, Region, ShimModule, compile_source, extent_of

if TYPE_CHECKING:
    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_kernels.device.spec import DeviceSpec

    from .toolchain import Compiler


@functools.lru_cache(maxsize=256)
def _module(
    source: KernelSource, warp_size: int, checked: bool, compiler: Compiler | None, optimize: str
) -> ShimModule:
    return compile_source(source.text, warp_size=warp_size, checked=checked, compiler=compiler, optimize=optimize)


_CLUSTERED = ("wgmma_gemm", "wgmma_reduce", "ozaki_multiply", "fused_cluster")


def _cluster(source: KernelSource, entry: str) -> int:
    """Blocks of a cluster: what the source's __cluster_dims__ says, which no C++ compiler passes on."""
    if entry not in _CLUSTERED:
        return 1
    defines = dict(source.defines)
    return int(defines["CLUSTER"]) * int(defines.get("SPLIT", "1"))


def _pairs(values: tuple[int, ...]) -> list[int]:
    """Numbers of 32 bits as words of 64."""
    padded = [*values, *[1] * (6 - len(values))]
    return [low | high << 32 for low, high in zip(padded[::2], padded[1::2], strict=True)]


def _refused(box: Any, address: int) -> str | None:
    """Why the driver would not encode this map, or None (CUDA driver API, cuTensorMapEncodeTiled)."""
    if address % 16:
        return "the address is no multiple of 16"
    if any(stride % 16 or not 0 <= stride < 1 << 40 for stride in box.byte_strides):
        return f"strides of {box.byte_strides} bytes"
    if not all(0 < extent <= 1 << 32 for extent in box.extents):
        return "an extent is out of range"
    if not all(0 < extent <= 256 for extent in box.box) or 2 * box.box[0] not in {32, 64, 128}:
        return "an extent of the box is out of range"
    return None


class ShimLauncher:
    """A device of the shim.

    `spec` gives the warp size (32 or 64) and the limits. `order` says in which order threads run. `checked` looks at
    every memory access (bounds, races, shared memory read before it is written) at about ten times the cost. `max_grid`
    is the most blocks of one launch; a small one makes the host code cut its grids. `optimize` is the C++ compiler's
    option: "-O0" for kernels that are compiled for one small product each.

    Memory from `empty`, `zeros` and `array` lies between guard pages, and what surrounds it is inspected after each
    launch. Plain NumPy arrays may be used as well; they have no guards.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        *,
        order: Order = FORWARD,
        checked: bool = False,
        max_grid: int = 2**31 - 1,
        compiler: Compiler | None = None,
        optimize: str = "-Og",
    ) -> None:
        self.spec = spec
        self.max_grid = max_grid
        self.order = order
        self.checked = checked
        self.launches: list[str] = []
        self.elements = 0
        self._counters: np.ndarray | None = None
        self._compiler, self._optimize = compiler, optimize
        self._blocks: weakref.WeakSet[GuardedBlock] = weakref.WeakSet()
        self._foreign: dict[int, Region] = {}

    def _allocate(self, nbytes: int) -> tuple[GuardedBlock, np.ndarray]:
        block = GuardedBlock(nbytes)
        self._blocks.add(block)
        return block, block.bytes()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """See Launcher. Every byte is 0xff: NaN in floating point, -1 in integers."""
        dtype = np.dtype(dtype)
        _, memory = self._allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return np.ndarray(shape, dtype, memory)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """See Launcher."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def array(self, values: np.ndarray) -> np.ndarray:
        """A guarded copy with the same strides; bytes between the elements are poisoned."""
        low, high = extent_of(values)
        _, memory = self._allocate(high - low)
        copy = np.ndarray(values.shape, values.dtype, memory, values.ctypes.data - low, values.strides)
        copy[...] = values
        return copy

    def pointer(self, array: Any) -> int:
        """See Launcher."""
        address = int(array.ctypes.data)
        if not any(block.address <= address <= block.address + block.nbytes for block in self._blocks):
            low, high = extent_of(array)
            self._foreign[low] = Region(low, high - low, f"an array of shape {array.shape}")
        return address

    def counters(self, elements: int) -> int:
        """See Launcher."""
        if self._counters is None:
            self._counters = self.zeros((WORDS,), np.dtype(np.uint64))
        self.elements += elements
        return self.pointer(self._counters)

    def counts(self) -> ElementCounts:
        """What the counters hold."""
        words = (0, 0) if self._counters is None else map(int, self._counters)
        return ElementCounts.of(self.elements, *words)

    def tensor_map(self, box: Any, address: int) -> Any:
        """See Launcher: what device/hopper.hpp reads in the place of what a driver would write."""
        from gemmserve_kernels.device.tensor_map import TensorMap

        if reason := _refused(box, address):
            raise LaunchError(f"{box} at {address:#x}: {reason}")
        strides = [*box.byte_strides, *[0] * (6 - len(box.extents))]
        words = [address, len(box.extents), *_pairs(box.extents), *_pairs(box.box), *strides]
        found = TensorMap()
        found.words[: len(words)] = words
        return found

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
        """See Launcher: one launch ends before the next begins, and a dependent one that does not wait for it fails.

        Raises the errors of ShimModule.launch, and MemoryFault for a write next to a buffer.
        """
        module = _module(source, self.spec.warp_size, self.checked, self._compiler, self._optimize)
        self._check_limits(entry, grid, block, shared + module.static_shared_bytes)
        regions = [
            *(Region(b.address, b.nbytes, f"a buffer of {b.nbytes} bytes") for b in self._blocks),
            *self._foreign.values(),
        ]
        module.launch(
            entry, (grid,), (block,), (params,), shared=shared, order=self.order, regions=regions,
            cluster=_cluster(source, entry), dependent=dependent,
        )  # fmt: skip
        self.launches.append(entry)
        for buffer in self._blocks:
            if (damage := buffer.damage()) is not None:
                where = f"{-damage} bytes before" if damage < 0 else f"{damage - buffer.nbytes} bytes past the end of"
                raise MemoryFault(f"{entry}: a write {where} a buffer of {buffer.nbytes} bytes")

    def call(self, routine: Any, addresses: tuple[int, ...]) -> None:
        """See Launcher: a product by the vendor's BLAS, made by a model of it within the buffers that are known."""
        multiply(routine.problem, routine.plan, addresses, self._memory)
        self.launches.append("blas")

    def _memory(self, address: int) -> np.ndarray:
        """The bytes from an address to the end of the buffer that it lies in."""
        regions = [
            *((b.address, b.nbytes) for b in self._blocks),
            *((r.address, r.nbytes) for r in self._foreign.values()),
        ]
        for first, nbytes in regions:
            if first <= address < first + nbytes:
                memory = (ctypes.c_uint8 * (first + nbytes - address)).from_address(address)
                return np.frombuffer(memory, np.uint8)
        raise MemoryFault(f"no buffer at {address:#x}")

    def _check_limits(self, entry: str, grid: int, block: int, shared: int) -> None:
        if grid > self.max_grid:
            raise LaunchError(f"{entry}: {grid} blocks, and the device takes {self.max_grid}")
        if shared > self.spec.shared_per_block:
            raise LaunchError(
                f"{entry}: {shared} bytes of shared memory a block, and {self.spec.name} has "
                f"{self.spec.shared_per_block}"
            )
