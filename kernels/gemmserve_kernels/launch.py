"""What the host code of the portable kernels needs of a machine, and CuPy as one.

`Launcher` is a port: `simt` computes arguments and calls it, whatever stands behind. `CupyLauncher` is the adapter for
CUDA and ROCm devices; the tests put a CPU emulation of the device language behind the same five methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from gemmserve_kernels import compiler

if TYPE_CHECKING:
    import ctypes

    from gemmserve_kernels.compiler import KernelSource
    from gemmserve_kernels.device import DeviceSpec

_UNASKED_SHARED: Final = 48 * 1024
"""Dynamic shared memory that a CUDA kernel gets without opting in (CUDA C++ programming guide)."""


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

    def launch(
        self, source: KernelSource, entry: str, *, grid: int, block: int, shared: int, params: ctypes.Structure
    ) -> None:
        """Enqueues `entry` of `source`: `grid` blocks of `block` threads, `shared` bytes, one structure by value."""


@dataclass(frozen=True)
class CupyLauncher:
    """The current CuPy device and stream."""

    spec: DeviceSpec
    max_grid: int = 2**31 - 1

    @classmethod
    def current(cls) -> CupyLauncher:
        """For the device that is current in this thread."""
        from gemmserve_kernels.device import DeviceSpec

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

    def launch(
        self, source: KernelSource, entry: str, *, grid: int, block: int, shared: int, params: ctypes.Structure
    ) -> None:
        """See Launcher."""
        import cupy

        kernel = compiler.load(source, entry, self.spec.arch, cupy.cuda.Device().id)
        if shared > _UNASKED_SHARED and kernel.max_dynamic_shared_size_bytes < shared:
            kernel.max_dynamic_shared_size_bytes = shared
        # CuPy passes a structure by value as a NumPy scalar of its bytes.
        packed = np.frombuffer(bytes(params), dtype=f"V{len(bytes(params))}")
        kernel((grid,), (block,), (packed,), shared_mem=shared)
