"""Operands, all that a plan knows of an array: shape, dtype, strides. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np

from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_kernels.problem.vocabulary import Dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES: Final = tuple(np.dtype(name) for name in get_args(Dtype))
"""Element types of operands."""


@dataclass(frozen=True)
class Operand:
    """Shape, dtype and strides of an array; strides count elements and may be negative or 0."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> Operand:
        """The operand that a NumPy or CuPy array is.

        Raises ParameterInvalid where a stride is no multiple of the element (a field of a structured array): `gemm`
        copies such arrays first.
        """
        dtype = np.dtype(array.dtype)
        if dtype.itemsize == 0 or any(stride % dtype.itemsize for stride in array.strides):
            raise ParameterInvalid("strides must be whole elements: pass a contiguous copy", "strides")
        return cls(tuple(array.shape), dtype, tuple(stride // dtype.itemsize for stride in array.strides))

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: Any, order: str = "C") -> Operand:
        """A fresh array of that shape in C or Fortran order."""
        extents = list(shape) if order == "F" else list(reversed(shape))
        strides, step = [], 1
        for extent in extents:
            strides.append(step)
            step *= max(extent, 1)
        return cls(tuple(shape), np.dtype(dtype), tuple(strides if order == "F" else reversed(strides)))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, broadcast ones counted as often as they appear."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The real dtype of the same precision."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
