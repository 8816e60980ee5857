"""Base of operations: what a step that is no single product says of itself, and how it is run and checked.

An operation is built from the operands' shapes, dtypes and strides and from its parameters, before any data exist, and
then run on arrays of NumPy, or of CuPy on the current device and stream. It is hashable: equal ones share their plans.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from gemmserve_kernels.freivalds import Finding
    from gemmserve_kernels.problem.operand import Operand
    from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem


class Result(NamedTuple):
    """Array that an operation makes; `order` is that of its memory, "C" or "F"."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: str = "C"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Operation(ABC):
    """Operation whose operands and parameters have passed every check; a frozen dataclass, its operands fields.

    A subclass has a class method `build(*, a, b, ..., **parameters)` with operands as `Operand` (None where optional
    ones are left out), which raises KernelError.
    """

    name: ClassVar[str]
    """Name by which programs ask for it, "add"."""
    dtype: np.dtype[Any]
    """Dtype of its arithmetic."""

    @property
    @abstractmethod
    def operands(self) -> dict[str, Operand]:
        """Operands that it has, by name."""

    @property
    @abstractmethod
    def results(self) -> dict[str, Result]:
        """Results by name; "d" where there is one."""

    @abstractmethod
    def flops(self) -> int:
        """Operations on real numbers, as a plain count."""

    def nbytes(self) -> int:
        """Bytes that must move at least: every operand read once, every result written once."""
        read = sum(operand.nbytes for operand in self.operands.values())
        return read + sum(result.nbytes for result in self.results.values())

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that it takes while it runs, beside operands and results."""
        return 0

    @property
    def products(self) -> tuple[GemmProblem | GemmReduceProblem, ...]:
        """Products that it is made of, whose kernels a device needs."""
        return ()

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, as a job's record says it."""
        return self.name

    @abstractmethod
    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Compute into `results`, every element of them; they share no memory with operands.

        Arrays are all NumPy's, aligned, or all CuPy's on the current device, where the work is enqueued on the current
        stream; they lie in any strides. Calls `interruption.checkpoint` between parts of the work on a host.
        Raises KernelError for data that it has no result for, DeviceError, MemoryError.
        """

    @abstractmethod
    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """Return what a check of these results finds, arrays as in `run`; `seed` chooses what is looked at."""


def module_of(array: Any) -> ModuleType:
    """Return the library of an array, NumPy or CuPy, as a module."""
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy  # type: ignore[no-any-return]
    return np
