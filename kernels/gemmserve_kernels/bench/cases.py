"""Cases to measure: one product or reduction with its data. Pure but for the random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand, real_dtype

if TYPE_CHECKING:
    from gemmserve_kernels.problem.config import GemmConfig

    Array = np.ndarray[Any, Any]

INITS: Final = ("none", "int", "normal", "positive", "wide", "graded", "ill-scaled")
"""none: whatever the memory holds, here zeros; int: -5 to 5, exact in every mode; normal; positive: uniform in [0, 1),
so that nothing cancels; wide: normal times powers of two over 24 binades (8 for float16); graded: normal, column k of
op(A) times 2**(40 k / K) and row k of op(B) divided by it (8 for float16); ill-scaled: normal, each row of op(A) and
each column of op(B) times a power of two over 24 binades (8 for float16)."""

_BINADES: Final = {"float16": 8}
_WIDE_BINADES: Final = 24
_GRADED_BINADES: Final = 40


@dataclass(frozen=True)
class Case:
    """One operation on random data, as `gemm` and `gemm_reduce` take it.

    `batch` > 1 gives every operand a leading axis.
    """

    op: str = "gemm"
    m: int = 1024
    n: int = 1024
    k: int = 1024
    batch: int = 1
    dtype: str = "complex64"
    compute: str = "auto"
    trans_a: str = "N"
    trans_b: str = "N"
    alpha: complex = 1
    beta: complex = 0
    order: str = "C"
    layout: str = "interleaved"
    reduce: tuple[str, ...] = ("sum",)
    axis: tuple[str, ...] = ("m",)
    pre_op: str = "identity"
    return_c: bool = False
    reproducible: bool = True
    config: GemmConfig | None = None
    init: str = "normal"
    seed: int = 0

    @property
    def label(self) -> str:
        """The size: "16 x 2048 x 2048 x 1024" is batch, m, n, k."""
        sizes = [self.m, self.n, self.k]
        return " x ".join(map(str, [self.batch, *sizes] if self.batch > 1 else sizes))

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operation."""
        common = {
            "alpha": self.alpha,
            "trans_a": self.trans_a,
            "trans_b": self.trans_b,
            "layout": self.layout,
            "compute": self.compute,
            "config": self.config,
        }
        if self.op == "gemm":
            return common | {"beta": self.beta, "order": self.order}
        return common | {
            "reduce": list(self.reduce),
            "axis": list(self.axis),
            "pre_op": self.pre_op,
            "return_c": self.return_c,
            "reproducible": self.reproducible,
        }

    def problem(self) -> GemmProblem | GemmReduceProblem:
        """The checked problem. Raises KernelError."""
        operands = {name: Operand.contiguous(shape, self.stored_dtype) for name, shape in self.shapes().items()}
        if self.op == "gemm":
            return GemmProblem.build(operands["a"], operands["b"], operands.get("c"), **self.options())
        return GemmReduceProblem.build(operands["a"], operands["b"], **self.options())

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The operands' dtype: real where they are planar."""
        dtype = np.dtype(self.dtype)
        return real_dtype(dtype) if self.layout == "planar" else dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a, b and, where beta is not 0, c."""
        outer = ((2,) if self.layout == "planar" else ()) + ((self.batch,) if self.batch > 1 else ())
        a = (self.m, self.k) if self.trans_a in {"N", "R"} else (self.k, self.m)
        b = (self.k, self.n) if self.trans_b in {"N", "R"} else (self.n, self.k)
        shapes = {"a": (*outer, *a), "b": (*outer, *b)}
        if self.op == "gemm" and self.beta != 0:
            shapes["c"] = (*outer, self.m, self.n)
        return shapes

    def operands(self) -> dict[str, Array]:
        """The data: the same for the same seed."""
        rng = np.random.default_rng(self.seed)
        drawn = {name: draw(rng, shape, self.stored_dtype, self.init) for name, shape in self.shapes().items()}
        if self.init in {"graded", "ill-scaled"}:
            for name, trans, inner in (("a", self.trans_a, -1), ("b", self.trans_b, -2)):
                axis = inner if trans in {"N", "R"} else -3 - inner
                _scale(rng, drawn[name], axis, self.init, falling=name == "b")
        return drawn


def _scale(rng: np.random.Generator, x: Array, axis: int, init: str, *, falling: bool) -> None:
    """Grades `x` along k, its `axis`, or scales the rows or columns across it, in place."""
    half_range = _BINADES.get(x.dtype.name)
    if init == "graded":
        extent = x.shape[axis]
        factors = np.exp2((half_range or _GRADED_BINADES) / max(1, extent) * np.arange(extent))
        factors = 1 / factors if falling else factors
    else:
        axis, half = -3 - axis, (half_range or _WIDE_BINADES) // 2
        factors = np.exp2(rng.integers(-half, half, x.shape[axis]))
    x *= (factors[:, None] if axis == -2 else factors).astype(real_dtype(x.dtype))


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], init: str) -> Array:
    """Random data, see INITS; real and imaginary parts alike. What is scaled along an axis is normal here."""
    if init == "none":
        return np.zeros(shape, dtype)
    if dtype.kind == "c":
        values = np.empty(shape, dtype)
        real = real_dtype(dtype)
        values.real = draw(rng, shape, real, init)
        values.imag = draw(rng, shape, real, init)
        return values
    if init == "int":
        return rng.integers(-5, 6, shape).astype(dtype)
    if init == "positive":
        return rng.random(shape, np.float32 if dtype.itemsize < 8 else np.float64).astype(dtype)
    values = rng.standard_normal(shape, np.float32 if dtype.itemsize < 8 else np.float64).astype(dtype)
    if init == "wide":
        half = _BINADES.get(dtype.name, _WIDE_BINADES) // 2
        values = np.ldexp(values, rng.integers(-half, half, shape, dtype=np.int32))
    return values


@dataclass(frozen=True)
class Row:
    """One measurement. Times in seconds, medians over the iterations; errors relative, None where not checked."""

    case: str
    op: str
    dtype: str
    compute: str
    who: str
    algorithm: str
    batch: int
    m: int
    n: int
    k: int
    seconds: float | None
    fastest: float | None
    flops: int
    nbytes: int
    rel_fro: float | None = None
    worst_row: float | None = None
    rel_real: float | None = None
    rel_imag: float | None = None
    checked: str = "no"
    ratio: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def gflops(self) -> float | None:
        """Rate of arithmetic, 8 m n k for complex."""
        return self.flops / self.seconds / 1e9 if self.seconds else None

    @property
    def gib_per_s(self) -> float | None:
        """Every operand read once and every result written once, over the time."""
        return self.nbytes / self.seconds / 2**30 if self.seconds else None
