"""Random operands made where they are used, and the errors of results against an oracle computed there.

`xp` is CuPy or NumPy. Products of 32-bit data and narrower are compared with the same product in double precision;
those of 64-bit data with an exact one (`gemmserve_kernels.bench.elementwise`). Rows are sampled, evenly.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from gemmserve_kernels.bench import elementwise, kinds
from gemmserve_kernels.bench.cases import INITS

BINADES = {"float16": 8}
WIDE, GRADED = 24, 40
ROWS = 256
"""Rows of a result that are checked, of every matrix that is."""
ELEMENTWISE = ("float32", "complex64", "float64", "complex128")
MATRICES_ROWS = 4096
"""Rows of all matrices of a batch that are checked, together."""


# ---- operands


def operands(xp, case, seed=0):
    """Arrays of `case` by name, see gemmserve_kernels.bench.cases.INITS; other numbers than on the host. Of one product
    as it stands, also the kinds of gemmserve_kernels.bench.kinds.
    """
    if case.init not in INITS:
        return dict(zip("ab", kinds.operands(xp, case.init, case.m, case.n, case.k, case.dtype, seed), strict=True))
    rng = xp.random.default_rng(seed + case.seed)
    found = {name: draw(xp, rng, shape, case.stored_dtype, case.init) for name, shape in case.shapes().items()}
    if case.init in {"graded", "ill-scaled"}:
        for name, trans, inner in (("a", case.trans_a, -1), ("b", case.trans_b, -2)):
            along = inner if trans in {"N", "R"} else -3 - inner
            _scale(xp, rng, found[name], along, case.init, falling=name == "b")
    return found


def draw(xp, rng, shape, dtype, init):
    """One array; what is scaled along an axis is normal here."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        values = xp.empty(shape, dtype)
        real = np.dtype(f"f{dtype.itemsize // 2}")
        values.real = draw(xp, rng, shape, real, init)
        values.imag = draw(xp, rng, shape, real, init)
        return values
    wide = np.float64 if dtype.itemsize == 8 else np.float32
    if init == "positive":
        return rng.random(shape, wide).astype(dtype, copy=False)
    values = rng.standard_normal(shape, wide)
    if init == "wide":
        half = BINADES.get(dtype.name, WIDE) // 2
        values = xp.ldexp(values, xp.floor((rng.random(shape, np.float32) * 2 - 1) * half).astype(np.int32))
    return values.astype(dtype, copy=False)


def _scale(xp, rng, x, along, init, *, falling):
    real = np.dtype(f"f{x.dtype.itemsize // 2}") if x.dtype.kind == "c" else x.dtype
    if init == "graded":
        extent = x.shape[along]
        steps = BINADES.get(real.name, GRADED) / max(1, extent) * xp.arange(extent)
        factors, axis = xp.exp2(-steps if falling else steps), along
    else:
        axis, half = -3 - along, BINADES.get(real.name, WIDE) // 2
        factors = xp.exp2(xp.floor((rng.random(x.shape[axis], np.float32) * 2 - 1) * half))
    x *= (factors[:, None] if axis == -2 else factors).astype(real)


# ---- errors


@dataclass(frozen=True)
class Found:
    """Relative errors, Frobenius norms; see `numerics.reference.Errors`. None where it does not apply."""

    rel_fro: float
    worst_row: float | None
    rel_real: float | None
    rel_imag: float | None
    checked: str


class Oracle:
    """What the product of these operands should be, on some of the rows; made once for all contenders."""

    def __init__(self, xp, case, arrays):
        self._xp, self._case = xp, case
        a, b, c = (None if arrays.get(name) is None else self._joined(arrays[name]) for name in "abc")
        matrices = min(case.batch, max(1, MATRICES_ROWS // case.m))
        rows = min(case.m, ROWS)
        self.checked = "all" if (rows, matrices) == (case.m, case.batch) else f"{matrices * rows} rows"
        self._matrices = _spread(xp, case.batch, matrices) if matrices < case.batch else None
        self._rows = _spread(xp, case.m, rows) if rows < case.m else slice(None)
        a, b = (x if self._matrices is None else x[self._matrices] for x in (a, b))
        a, b = _op(a, case.trans_a)[..., self._rows, :], _op(b, case.trans_b)
        wide = np.dtype(np.complex128 if a.dtype.kind == "c" else np.float64)
        if a.dtype.itemsize == wide.itemsize:
            self._high, self._low = exact_product(xp, a, b)
        else:
            self._high, self._low = a.astype(wide) @ b.astype(wide), None
        self._finish(c, wide)

    def _finish(self, c, wide):
        case = self._case
        if case.alpha != 1:
            self._high, self._low = wide.type(case.alpha) * self._high, None
        if case.beta != 0 and c is not None:
            self._high = self._high + wide.type(case.beta) * self._picked(c).astype(wide)
            self._low = None
        self._norms = self._norms_of(self._high)

    def errors(self, d):
        """Return the errors of a result, norm over norm."""
        d = self._picked(self._joined(d)).astype(self._high.dtype)
        difference = d - self._high
        if self._low is not None:
            difference -= self._low
        found = self._norms_of(difference)
        ratios = [_ratio(x, y) for x, y in zip(found[:3], self._norms[:3], strict=True)]
        rows = largest(itertools.starmap(_ratio, zip(found[3], self._norms[3], strict=True)))
        imaginary = ratios[2] if self._high.dtype.kind == "c" else 0.0
        return Found(ratios[0], rows, ratios[1], imaginary, self.checked)

    def _picked(self, d):
        d = d if self._matrices is None else d[self._matrices]
        return d[..., self._rows, :]

    def _joined(self, x):
        """Planar operands as complex ones."""
        if self._case.layout != "planar":
            return x
        joined = self._xp.empty(x.shape[1:], np.result_type(x.dtype, np.complex64))
        joined.real, joined.imag = x[0], x[1]
        return joined

    def _norms_of(self, x):
        """Return the norms of all, of the real and the imaginary part, and of every row; on the host."""
        norm = self._xp.linalg.norm
        rows = norm(x.reshape(-1, x.shape[-1]), axis=-1)
        host = rows.get() if hasattr(rows, "get") else rows
        imaginary = float(norm(x.imag.ravel())) if x.dtype.kind == "c" else 0.0
        return float(norm(x.ravel())), float(norm(x.real.ravel())), imaginary, host.tolist()


class Elements:
    """Worst errors of elements on some rows of one product as it stands, of all contenders at once."""

    ROWS = 64

    def __init__(self, xp, case, arrays):
        self._xp, self._arrays = xp, arrays
        self._rows = _spread(xp, case.m, min(case.m, self.ROWS))
        self._results = {}

    @staticmethod
    def apply(case):
        """Whether they are known of a case: 32-bit or 64-bit data, D = A B."""
        plain = case.trans_a == case.trans_b == "N" and (case.alpha, case.beta) == (1, 0) and case.batch == 1
        return case.op == "gemm" and plain and case.dtype in ELEMENTWISE and case.layout == "interleaved"

    def take(self, who, d):
        """Keep what is looked at of a result."""
        self._results[who] = d[self._rows]

    def found(self):
        """Errors by name, in units of u of |A| |B|."""
        a, b = self._arrays["a"][self._rows], self._arrays["b"]
        return elementwise.elementwise(self._xp, a, b, self._results)


REDUCE = {
    "sum": lambda x: x.sum(axis=-2),
    "sumsq": lambda x: (abs(x) ** 2).sum(axis=-2),
    "absmax": lambda x: abs(x).max(axis=-2),
    "max": lambda x: x.max(axis=-2),
}
"""Over m of a product."""


class ReduceOracle:
    """What reductions over m of a product should be, for some columns of some matrices."""

    COLUMNS, MATRICES = 32, 8

    def __init__(self, xp, case, arrays):
        if case.axis != ("m",) or case.pre_op != "identity" or not set(case.reduce) <= set(REDUCE):
            raise ValueError(f"no oracle of {case.reduce} over {case.axis}")
        self._xp, self._case = xp, case
        matrices, columns = min(case.batch, self.MATRICES), min(case.n, self.COLUMNS)
        self._matrices = _spread(xp, case.batch, matrices) if case.batch > 1 else None
        self._columns = _spread(xp, case.n, columns)
        self.checked = f"{matrices * columns} outputs"
        a, b = (arrays[name] if self._matrices is None else arrays[name][self._matrices] for name in "ab")
        wide = np.result_type(case.dtype, np.float64)
        a, b = _op(a, case.trans_a).astype(wide), _op(b, case.trans_b)[..., self._columns].astype(wide)
        self._product = a @ b if case.alpha == 1 else wide.type(case.alpha) * (a @ b)

    def errors(self, results):
        """The largest of the named results' relative errors."""
        norm, worst = self._xp.linalg.norm, 0.0
        for name in self._case.reduce:
            expected = REDUCE[name](self._product)
            found = results[name]
            found = found if self._matrices is None else found[self._matrices]
            found = found[..., self._columns].astype(expected.dtype)
            worst = largest([worst, _ratio(float(norm((found - expected).ravel())), float(norm(expected.ravel())))])
        return Found(worst, None, None, None, self.checked)


def largest(values):
    """The largest, NaN where one is; 0 of none."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _ratio(x, y):
    if x != x:  # noqa: PLR0124 - NaN
        return math.nan
    return x / y if y else (0.0 if x == 0 else math.inf)


def _spread(xp, extent, count):
    """Indices, evenly over the extent, the first and the last among them."""
    return xp.asarray(np.array([i * (extent - 1) // max(1, count - 1) for i in range(count)]))


def _op(x, trans):
    x = x.swapaxes(-1, -2) if trans in {"T", "C"} else x
    return x.conj() if trans in {"C", "R"} else x


def exact_product(xp, a, b):
    """A B of float64 or complex128 as an unevaluated sum of two of them. Finite operands."""
    complex_data = a.dtype.kind == "c"
    if complex_data:
        a, b = elementwise.embedded_left(xp, a), elementwise.embedded_right(xp, b)
    high, low, exponent = elementwise.exact_product(xp, a, b)
    high, low = xp.ldexp(high, exponent), xp.ldexp(low, exponent)
    return (_complex(xp, high), _complex(xp, low)) if complex_data else (high, low)


def _complex(xp, x):
    """[Re Im] as one matrix."""
    n = x.shape[-1] // 2
    joined = xp.empty((*x.shape[:-1], n), np.complex128)
    joined.real, joined.imag = x[..., :n], x[..., n:]
    return joined
