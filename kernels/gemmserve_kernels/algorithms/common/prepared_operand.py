"""Operands prepared once for many products: an array, and what an algorithm keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from gemmserve_kernels.device.replay import RecordedArray


@dataclass(frozen=True)
class PreparedOperand:
    """`source` as op(A) or op(B) of products to come. Its elements must not change meanwhile.

    `payload` is what an algorithm keeps: a `SplitOperand` (float16 planes), an `OzakiOperand` (residues) or None. A
    product takes it where it is what it would have made itself, so that the result has the same bits either way.
    """

    source: Any
    side: Literal["a", "b"]
    trans: str
    layout: str
    compute: str
    payload: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.source.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the array."""
        dtype: np.dtype[Any] = np.dtype(self.source.dtype)
        return dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the array, in bytes."""
        return tuple(self.source.strides)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return len(self.shape)

    @property
    def device(self) -> Any:
        """Device of the array."""
        return self.source.device

    @property
    def nbytes(self) -> int:
        """Bytes that the payload takes beside the array."""
        return sum(int(array.nbytes) for array in self.arrays)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Arrays of the payload."""
        return () if self.payload is None else self.payload.arrays

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the payload's arrays are, CuPy's."""
        return tuple([int(array.data.ptr) for array in self.arrays])

    @cached_property
    def outline(self) -> Outline | None:
        """The payload but for where its arrays are, for plans. Like payloads have one and the same object."""
        if self.payload is None:
            return None
        shapes = [RecordedArray(-1, tuple(x.shape), np.dtype(x.dtype), tuple(x.strides), 0) for x in self.arrays]
        return _outline(self.payload.with_arrays(None, shapes))


@dataclass(frozen=True, eq=False)
class Outline:
    """A payload whose arrays are not there."""

    payload: Any


@lru_cache(maxsize=1024)
def _outline(payload: Any) -> Outline:
    """One object for equal payloads; where it was forgotten, a plan is merely made again."""
    return Outline(payload)


def source_of(operand: Any) -> Any:
    """The array of an operand, prepared or not."""
    return operand.source if isinstance(operand, PreparedOperand) else operand
