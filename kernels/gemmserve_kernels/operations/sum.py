"""Sums over axes of an array."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.device.interruption import checkpoint
from gemmserve_kernels.freivalds import Finding, rounding
from gemmserve_kernels.operations.operation import Operation, Result, module_of
from gemmserve_kernels.problem.errors import DtypeUnsupported, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.problem.operand import DTYPES, Operand
from gemmserve_kernels.problem.validation import check_size, scalar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_HOST_ELEMENTS: Final = 1 << 22
"""Elements that are summed between two moments at which a sum can be interrupted, on the host."""
_DEVICE_ELEMENTS: Final = 1 << 28
_SAMPLES: Final = 16
"""Results that a check computes again."""


@dataclass(frozen=True)
class Sum(Operation):
    """D = alpha * sum of a over `axes`, whose axes are gone from the result; none: every element times alpha.

    Sums are kept in the array's dtype, of float16 in float32, and rounded at the end. The sum of nothing is 0.
    """

    name = "sum"
    a: Operand
    axes: tuple[int, ...]
    alpha: complex
    dtype: np.dtype[Any]

    @classmethod
    def build(cls, *, a: Operand, axes: Sequence[int], alpha: complex = 1) -> Sum:
        """Check everything and return the operation; negative axes count from the last. The result is complex where
        alpha has an imaginary part.

        Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid.
        """
        if a.dtype not in DTYPES:
            supported = ", ".join(dtype.name for dtype in DTYPES)
            raise DtypeUnsupported(f"a is {a.dtype.name}; the dtypes are {supported}")
        check_size("a", a.shape, a.dtype)
        for axis in axes:
            if not -a.ndim <= axis < a.ndim:
                raise ShapeMismatch(f"axes {list(axes)}: a {a.shape} has no axis {axis}")
        chosen = tuple(sorted(axis % a.ndim for axis in axes))
        if len(set(chosen)) < len(chosen):
            raise ParameterInvalid(f"axes {list(axes)} name one twice", "axes")
        dtype = a.dtype
        if dtype.kind != "c" and complex(alpha).imag:
            dtype = np.result_type(dtype, np.complex64)
        return cls(a, chosen, scalar(alpha, "alpha", dtype), dtype)

    @property
    def operands(self) -> dict[str, Operand]:
        """See `Operation`."""
        return {"a": self.a}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple(extent for axis, extent in enumerate(self.a.shape) if axis not in self.axes)

    @property
    def results(self) -> dict[str, Result]:
        """See `Operation`."""
        return {"d": Result(self.shape, self.dtype)}

    def flops(self) -> int:
        """See `Operation`."""
        return (2 if self.a.dtype.kind == "c" else 1) * self.a.size

    @property
    def scratch_nbytes(self) -> int:
        """See `Operation`. Two numbers for every result, and what a library makes of sums that it cuts."""
        return 4 * math.prod(self.shape) * self._kept.itemsize

    @property
    def _kept(self) -> np.dtype[Any]:
        """Dtype that sums are kept in."""
        return np.dtype(np.float32) if self.a.dtype == np.float16 else self.a.dtype

    def run(self, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """See `Operation`."""
        out, a = results["d"], operands["a"]
        xp = module_of(out)
        first = xp.moveaxis(a, self.axes, tuple(range(len(self.axes))))
        total = xp.zeros(self.shape, self._kept)
        over = tuple(range(len(self.axes)))
        with np.errstate(all="ignore"):
            for block in self._blocks(first.shape, _HOST_ELEMENTS if xp is np else _DEVICE_ELEMENTS):
                kept = block[len(over) :]
                total[kept] += first[block].sum(axis=over, dtype=self._kept) if over else first[block]
            if self.alpha != 1:
                arithmetic = np.result_type(total.dtype, self.dtype)
                total = total.astype(arithmetic, copy=False)
                total *= arithmetic.type(self.alpha if arithmetic.kind == "c" else self.alpha.real)
            out[...] = total.astype(self.dtype, copy=False)

    def _blocks(self, shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
        """Blocks of an array of at most `limit` elements each, those of one result next to each other."""
        if math.prod(shape) == 0:
            return
        sizes = list(shape)
        while math.prod(sizes) > limit:
            axis = max(range(len(sizes)), key=sizes.__getitem__)
            sizes[axis] = -(-sizes[axis] // 2)
        ranges = [
            [slice(start, start + size) for start in range(0, extent, size)]
            for extent, size in zip(shape, sizes, strict=True)
        ]
        for block in itertools.product(*ranges):
            checkpoint()
            yield block

    def find(self, operands: Mapping[str, Any], results: Mapping[str, Any], seed: int) -> Finding:
        """See `Operation`: some results again, in double precision."""
        out, a = results["d"], operands["a"]
        xp = module_of(out)
        if not math.prod(self.shape):
            return Finding(0.0, 0.0)
        first = xp.moveaxis(a, self.axes, tuple(range(len(self.axes))))
        rng = np.random.default_rng(seed)
        terms = math.prod(first.shape[: len(self.axes)])
        unit = rounding("auto", self.dtype, self._kept, terms)
        wide = np.dtype(np.complex128 if self.dtype.kind == "c" else np.float64)
        residual = excess = math.nan
        with np.errstate(all="ignore"):
            # Each place once: of few results every sample is a pass over much of the array.
            for place in {tuple(int(rng.integers(extent)) for extent in self.shape) for _ in range(_SAMPLES)}:
                expected, size = 0.0j, 0.0
                column = first[(..., *place)]
                for block in self._blocks(column.shape, _HOST_ELEMENTS):
                    values = column[block].astype(wide)
                    expected += complex(values.sum())
                    size += float(xp.abs(values).sum())
                expected, size = self.alpha * expected, abs(self.alpha) * size
                if not size < float(np.finfo(self.dtype).max) / 4:  # may overflow, or is NaN
                    continue
                error = abs(complex(out[place]) - expected)
                error = math.inf if math.isnan(error) else error
                tiny = float(np.finfo(self.dtype).tiny)
                residual = max(0.0 if math.isnan(residual) else residual, error / (size + tiny))
                excess = max(0.0 if math.isnan(excess) else excess, error / (unit * size + tiny))
        return Finding(residual, excess)
