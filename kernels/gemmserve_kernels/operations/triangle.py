"""Triangles of matrices: one of them kept, or the whole Hermitian or symmetric matrix that it stands for.

What BLAS's hemm, symm and trmm read of an operand. A gemm of the whole matrix follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.freivalds import Finding
from gemmserve_kernels.operations.operation import Operation, Result, module_of
from gemmserve_kernels.problem.errors import DtypeUnsupported, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.problem.operand import DTYPES
from gemmserve_kernels.problem.validation import check_size, choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gemmserve_kernels.problem.operand import Operand

_FILLS: Final = ("lower", "upper")
_STRUCTURES: Final = ("triangular", "hermitian", "symmetric")
_HOST_ELEMENTS: Final = 1 << 20
"""Elements of a block on the host, between two moments at which a program can be stopped."""
_DEVICE_ELEMENTS: Final = 1 << 25
_SAMPLES: Final = 256


@dataclass(frozen=True)
class Triangle(Operation):
    """D of the `fill` triangle of every matrix of a stack (..., m, n), its diagonal in it; the other is not read.

    `structure` "triangular": zero beyond it (matrices of any shape); "hermitian" and "symmetric" (square ones): the
    other triangle is its mirror, the diagonal of a Hermitian matrix real. `unit`: ones on the diagonal, which is not
    read.
    """

    name = "triangle"
    a: Operand
    fill: str
    structure: str
    unit: bool
    dtype: np.dtype[Any]

    @classmethod
    def build(cls, *, a: Operand, fill: str = "lower", structure: str = "triangular", unit: bool = False) -> Triangle:
        """Check everything and return the operation. Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid."""
        if a.dtype not in DTYPES:
            raise DtypeUnsupported(f"a is {a.dtype.name}, which no triangle is taken of")
        choice(fill, _FILLS, "fill")
        choice(structure, _STRUCTURES, "structure")
        if a.ndim < 2:
            raise ShapeMismatch(f"a {a.shape} has {a.ndim} dimensions; a matrix has at least 2")
        if structure != "triangular":
            if a.shape[-1] != a.shape[-2]:
                raise ShapeMismatch(f"a {a.shape} must be square, or a stack of square matrices (..., n, n)")
            if unit:
                raise ParameterInvalid("unit is of triangular matrices", "unit")
        check_size("a", a.shape, a.dtype)
        return cls(a, fill, structure, unit, a.dtype)

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a}

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.a.shape, self.dtype)}

    def flops(self) -> int:
        """See `Operation`: none, elements are moved."""
        return 0

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`. A block's elements on either side of the diagonal, and where it lies."""
        return min(self.a.size, _DEVICE_ELEMENTS) * (2 * self.dtype.itemsize + 1)

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        a, out = operands["a"], results["d"]
        xp = module_of(out)
        mirrored = self._mirrored(xp, a)
        for block in _blocks(self.a.shape, _HOST_ELEMENTS if xp is np else _DEVICE_ELEMENTS):
            rows = xp.arange(block[-2].start, block[-2].stop)[:, None]
            columns = xp.arange(block[-1].start, block[-1].stop)
            kept = columns <= rows if self.fill == "lower" else columns >= rows
            beyond = self.dtype.type(0) if mirrored is None else mirrored[block]
            made = xp.where(kept, a[block], beyond)
            if self.unit:
                made = xp.where(columns == rows, self.dtype.type(1), made)
            elif self.structure == "hermitian" and self.dtype.kind == "c":
                made.imag = xp.where(columns == rows, 0, made.imag)
            out[block] = made

    def _mirrored(self, xp: Any, a: Any) -> Any:
        """Return the matrices whose other triangle the result has; None: it is zero."""
        if self.structure == "triangular":
            return None
        return _Adjoint(xp, a.swapaxes(-1, -2), conjugate=self.structure == "hermitian")

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`: some elements looked up again, which are the same to the bit."""
        out = results["d"]
        if not math.prod(self.a.shape):
            return Finding(0.0, 0.0)
        rng = np.random.default_rng(seed)
        for _ in range(_SAMPLES):
            place = tuple(int(rng.integers(extent)) for extent in self.a.shape)
            found, expected = _element(out, place), self._expected(operands["a"], place)
            if not (found == expected or (np.isnan(found) and np.isnan(expected))):
                return Finding(math.inf, math.inf)
        return Finding(0.0, 0.0)

    def _expected(self, a: Any, place: tuple[int, ...]) -> Any:
        *batch, row, column = place
        if row == column:
            if self.unit:
                return self.dtype.type(1)
            element = _element(a, place)
            return self.dtype.type(element.real) if self.structure == "hermitian" else element
        if (column < row) == (self.fill == "lower"):
            return _element(a, place)
        if self.structure == "triangular":
            return self.dtype.type(0)
        element = _element(a, (*batch, column, row))
        return element.conjugate() if self.structure == "hermitian" else element


def _element(array: Any, place: tuple[int, ...]) -> Any:
    found = array[place]
    return found if module_of(array) is np else found.get()[()]


@dataclass(frozen=True)
class _Adjoint:
    """Blocks of transposed matrices, conjugated where asked."""

    xp: Any
    transposed: Any
    conjugate: bool

    def __getitem__(self, block: tuple[slice, ...]) -> Any:
        part = self.transposed[block]
        return self.xp.conjugate(part) if self.conjugate and part.dtype.kind == "c" else part


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Blocks of a stack of matrices, of at most `most` elements, of whole rows where a row is no more; none of an empty
    stack. `checkpoint` is called before each.
    """
    if math.prod(shape) == 0:
        return
    sizes = [*shape[:-1], min(shape[-1], most)]
    while math.prod(sizes) > most:
        axis = max(range(len(sizes) - 1), key=sizes.__getitem__)
        sizes[axis] = -(-sizes[axis] // 2)
    starts = np.ndindex(*(-(-extent // size) for extent, size in zip(shape, sizes, strict=True)))
    for place in starts:
        checkpoint()
        yield tuple(
            slice(number * size, min((number + 1) * size, extent))
            for number, size, extent in zip(place, sizes, shape, strict=True)
        )
