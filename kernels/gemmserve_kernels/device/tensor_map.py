"""Tensor maps: how the copy engine of Hopper finds boxes of an array, encoded by the driver (CUDA driver API 6.31).

Encoding touches no device memory, and a map depends on nothing but its arguments.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Final

from gemmserve_kernels.device import driver
from gemmserve_kernels.device.structures import opaque

MAP_BYTES: Final = 128
MAX_STRIDE: Final = 1 << 40
"""Bytes between neighbours along any axis must be fewer."""

_FLOAT16: Final = 6
_NO_INTERLEAVE: Final = 0
_SWIZZLE: Final = {32: 1, 64: 2, 128: 3}
_PROMOTE_TO_256: Final = 3
_ZERO_FILL: Final = 0
"""CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle by bytes, CUtensorMapL2promotion,
CUtensorMapFloatOOBfill of cuda.h."""


@opaque
class TensorMap(ctypes.Structure):
    """Mirror of TensorMap in cuda/common/ptx/hopper.cuh: opaque; the kernel's parameter aligns it to 64 bytes."""

    _fields_ = (("words", ctypes.c_uint64 * (MAP_BYTES // 8)),)


@dataclass(frozen=True)
class Box:
    """A float16 array, its fastest axis first, and the box that one copy fetches.

    The box's fastest axis is 32, 64 or 128 bytes long and swizzled over that span. `strides`: bytes between neighbours
    along every axis but the first, multiples of 16; none where the array is C-contiguous.
    """

    extents: tuple[int, ...]
    box: tuple[int, ...]
    strides: tuple[int, ...] = ()

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along every axis but the first."""
        return self.strides or tuple(2 * math.prod(self.extents[:axis]) for axis in range(1, len(self.extents)))

    def encode(self, address: int) -> TensorMap:
        """The map of the array at `address`. Raises DeviceError where the driver is missing or refuses."""
        rank = len(self.extents)
        # The driver wants its result aligned to 64 bytes, which ctypes cannot promise.
        memory = (ctypes.c_uint8 * (2 * MAP_BYTES))()
        start = -ctypes.addressof(memory) % 64
        code = driver.map_encoder()(
            ctypes.byref(memory, start),
            _FLOAT16,
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*self.extents),
            (ctypes.c_uint64 * (rank - 1))(*self.byte_strides),
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            _NO_INTERLEAVE,
            _SWIZZLE[2 * self.box[0]],
            _PROMOTE_TO_256,
            _ZERO_FILL,
        )
        driver.check(code, f"a tensor map of {self} at {address:#x}")
        return TensorMap.from_buffer_copy(memory, start)
