"""Calls that were made before, found by what their arguments look like: what makes a call that comes again cheap.

The questions that `gemm` and `gemm_reduce` ask of their operands (of which library, on which device, whole elements,
which plan) have answers that follow from shapes, strides, dtypes, the device and the last bits of addresses. Where
arrays are CuPy's, those, what was prepared of them and the options are one key, and what was answered once is found by
it. Anything else goes the long way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from gemmserve_kernels.device.struct_params import VECTOR_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

C = TypeVar("C")

_MOST: Final = 4096
"""Calls that are kept; then the oldest go."""
PHASE: Final = VECTOR_BYTES - 1
"""Bits of an address that a plan may know."""


class KnownCalls(Generic[C]):
    """Calls by key. Threads may use one at the same time."""

    def __init__(self) -> None:
        self._calls: dict[Any, C] = {}

    def find(self, key: Any) -> C | None:
        """The call that was kept under `key`, or None; for a key that cannot be hashed, too."""
        try:
            return self._calls.get(key)
        except TypeError:
            return None

    def keep(self, key: Any, call: C) -> None:
        """Keeps a call. A key that cannot be hashed is passed over."""
        try:
            while len(self._calls) >= _MOST:
                self._calls.pop(next(iter(self._calls)), None)
            self._calls[key] = call
        except (TypeError, RuntimeError, StopIteration):
            return  # not hashable, or other threads drop calls as well


def pair_key(ordinal: int, at_a: int, a: Any, at_b: int, b: Any, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a call with the CuPy arrays `a` and `b`, at these addresses of device `ordinal`."""
    return (ordinal, at_a & PHASE, a.shape, a.strides, a.dtype, at_b & PHASE, b.shape, b.strides, b.dtype, options)


def place_key(array: Any) -> tuple[Any, ...] | None:
    """Return what a plan may know of a CuPy array: how it lies in memory, and the last bits of its address; None of
    none.
    """
    return None if array is None else (array.shape, array.strides, array.dtype, array.data.ptr & PHASE)


@dataclass(frozen=True)
class Span:
    """Bytes that an array takes, counted from its first element: from `low` up to `high`."""

    low: int
    high: int

    @classmethod
    def of(cls, array: Any) -> Span:
        """The span of an array; of one without elements it is empty."""
        if 0 in array.shape:
            return cls(0, 0)
        reach = [stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True)]
        return cls(sum(x for x in reach if x < 0), sum(x for x in reach if x > 0) + array.dtype.itemsize)


def is_apart(out: int, of_out: Span, operands: Sequence[int], spans: Sequence[Span]) -> bool:
    """Whether a result at address `out` shares no byte with any of the `operands`, by the bounds of each."""
    low, high = out + of_out.low, out + of_out.high
    for number, span in enumerate(spans):
        address = operands[number]
        if low < address + span.high and address + span.low < high:
            return False
    return True
