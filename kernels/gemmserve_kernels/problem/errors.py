"""Errors of a product, each with the slug of its problem type.

::

    ValueError
      KernelError
        ShapeMismatch        operands do not fit each other
        DtypeUnsupported     a dtype outside float16, float32, float64, complex64, complex128
        ComputeUnsupported   a compute mode that the device or the dtype lacks
        ParameterInvalid     alpha, beta, trans, order, layout, reduce, axis, out ...
        ConfigInfeasible     a configuration that breaks a limit of the device
        SingularMatrix       a system without a solution, or with many
        NotPositiveDefinite  a matrix that has no Cholesky factor
    RuntimeError
      DeviceError            the device or its driver failed
        OutOfDeviceMemory
"""

# ruff: noqa: N818 (the names are the problem slugs and the public contract)

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class KernelError(ValueError):
    """The request, or its data, are at fault: the same request will fail again."""

    slug: ClassVar[str] = "parameter-invalid"


class ShapeMismatch(KernelError):
    """The operands' shapes do not fit each other, or one is no matrix."""

    slug: ClassVar[str] = "shape-mismatch"


class DtypeUnsupported(KernelError):
    """A dtype that no algorithm multiplies."""

    slug: ClassVar[str] = "dtype-unsupported"


class ComputeUnsupported(KernelError):
    """A compute mode that is unknown, or that this dtype or this device lacks; `available` lists those there are."""

    slug: ClassVar[str] = "compute-unsupported"

    def __init__(self, message: str, available: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.available = list(available)


class ParameterInvalid(KernelError):
    """One parameter is wrong by itself or for these operands; `parameter` names it."""

    slug: ClassVar[str] = "parameter-invalid"

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class ConfigInfeasible(KernelError):
    """A configuration that breaks a limit of the device or of the kernels; the message says which."""

    slug: ClassVar[str] = "config-infeasible"


class _OfStack(Exception):
    """Error of one matrix of a stack; `index` is its place in the stack, empty where there is one matrix."""

    def __init__(self, message: str, index: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.index = list(index)


class SingularMatrix(_OfStack, KernelError):
    """A matrix with a pivot of exactly zero, by which a system cannot be solved; `index`: its place in the stack."""

    slug: ClassVar[str] = "singular-matrix"


class NotPositiveDefinite(_OfStack, KernelError):
    """A matrix with a pivot that is not positive, which has no Cholesky factor; `index`: its place in the stack."""

    slug: ClassVar[str] = "not-positive-definite"


class DeviceError(RuntimeError):
    """The device or its driver failed: the request may be fine."""

    slug: ClassVar[str] = "device-error"


class OutOfDeviceMemory(DeviceError):
    """An allocation on the device failed."""

    slug: ClassVar[str] = "out-of-device-memory"
