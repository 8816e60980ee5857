"""Cases for the portable kernels, shared by the CPU shim and the device: operands, calls and what must come out.

A `Machine` puts NumPy arrays where its kernels can read them, strides and all, and brings results back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

SMALL = GemmConfig(block_m=16, block_n=8, block_k=4, thread_m=4, thread_n=2)
"""Many tiles, and edges of every kind, from matrices of a few dozen rows."""


class Machine(Protocol):
    launcher: Any

    def put(self, array: np.ndarray) -> Any: ...
    def get(self, array: Any) -> np.ndarray: ...


class ShimMachine:
    """The CPU shim, over guarded memory."""

    def __init__(self, launcher):
        self.launcher = launcher

    def put(self, array):
        return self.launcher.array(array)

    def get(self, array):
        return np.array(array)


class CupyMachine:
    """The current CuPy device."""

    def __init__(self, launcher):
        self.launcher = launcher

    def put(self, array):
        import cupy

        if array.size == 0:
            return cupy.empty(array.shape, array.dtype)
        low, high = np.lib.array_utils.byte_bounds(array)
        memory = cupy.full(high - low, 0xFF, cupy.uint8)
        copy = cupy.ndarray(array.shape, array.dtype, memory.data + (array.ctypes.data - low), array.strides)
        # Element by element where strides leave gaps; CuPy's own copy handles any strides, repeated elements included.
        copy[...] = cupy.asarray(np.ascontiguousarray(array))
        return copy

    def get(self, array):
        return array.get()


def random(seed, dtype, *shape, scale=1.0):
    """Normal values; real and imaginary parts alike."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    values = rng.standard_normal(shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return (scale * values).astype(dtype)


def strided(array, how):
    """The same elements with other strides."""
    if how == "fortran":
        return np.asfortranarray(array)
    if how == "reversed":
        return array[..., ::-1, ::-1].copy()[..., ::-1, ::-1]
    if how == "gaps":
        wide = np.zeros((*array.shape[:-2], 2 * array.shape[-2], 3 * array.shape[-1]), array.dtype)
        view = wide[..., ::2, 1::3]
        view[...] = array
        return view
    if how == "offset":  # contiguous rows that begin off any 16-byte boundary
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
        view = wide[..., 1:]
        view[...] = array
        return view
    if how == "padded":  # rows on 16-byte boundaries, longer than what is used
        wide = np.zeros((*array.shape[:-1], -(-array.shape[-1] // 8) * 8 + 8), array.dtype)
        view = wide[..., : array.shape[-1]]
        view[...] = array
        return view
    if how == "constant rows":
        return np.broadcast_to(array[..., :1, :], array.shape)
    assert how == "plain"
    return array


@dataclass(frozen=True)
class Gemm:
    """One call: shapes as stored, without the planar axis."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("complex64",)
    strides: tuple[str, str] = ("plain", "plain")
    out: str = "plain"
    config: GemmConfig | None = SMALL
    options: dict[str, Any] = field(default_factory=dict)

    def operands(self):
        names = (*self.dtypes, self.dtypes[-1], self.dtypes[-1])[:3]
        planar = (2,) if self.options.get("layout") == "planar" else ()
        a = strided(random(1, names[0], *planar, *self.a), self.strides[0])
        b = strided(random(2, names[1], *planar, *self.b), self.strides[1])
        c = None if self.c is None else random(3, names[2], *planar, *self.c)
        return a, b, c


def run_gemm(machine, case, operands=None):
    """Runs `case` into an output full of NaN and returns (problem, a, b, c, result)."""
    a, b, c = operands or case.operands()
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), None if c is None else Operand.of(c), **case.options)
    poison = np.full(problem.result_shape, np.nan, problem.result_dtype)
    out = machine.put(strided(poison, case.out))
    held = [None if array is None else machine.put(array) for array in (a, b, c)]
    simt.run_gemm(machine.launcher, problem, case.config, *held, out)
    return problem, a, b, c, machine.get(out)


def check_gemm(machine, case):
    """Every part of every element is within the a-priori bound of the higher-precision reference."""
    problem, a, b, c, result = run_gemm(machine, case)
    assert result.shape == problem.result_shape
    d = reference.logical(problem, result)
    expected = reference.oracle_gemm(problem, a, b, c)
    assert_within(d, expected, reference.bound(problem, a, b, c))


def assert_within(d, expected, bound):
    assert d.shape == expected.shape
    assert np.isfinite(d).all()
    for part in ("real", "imag"):
        error = np.abs(getattr(d, part) - getattr(expected, part)).astype(np.float64)
        worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
        assert (error <= bound).all(), f"{part} at {worst}: {d[worst]} for {expected[worst]}, bound {bound[worst]}"


COMPLEX_ALPHA = {"alpha": 1.5 - 0.5j, "beta": -0.25 + 2j}

GEMM_CASES = {
    # ---- dtypes
    **{
        f"{dtype} {trans_a}{trans_b}": Gemm(
            (21, 37) if trans_a in "TC" else (37, 21),
            (19, 21) if trans_b in "TC" else (21, 19),
            (37, 19),
            (dtype,),
            options={"trans_a": trans_a, "trans_b": trans_b, "alpha": 1.5, "beta": -0.5},
        )
        for dtype in ("float16", "float32", "float64", "complex64", "complex128")
        for trans_a, trans_b in ("NN", "TN", "NT", "CR", "RC")
    },
    **{
        f"complex64 {trans_a}{trans_b}": Gemm(
            (20, 24) if trans_a in "TC" else (24, 20),
            (16, 20) if trans_b in "TC" else (20, 16),
            options={"trans_a": trans_a, "trans_b": trans_b},
        )
        for trans_a in "NTCR"
        for trans_b in "NTCR"
    },
    **{
        "x".join(dtypes): Gemm((18, 11), (11, 9), (18, 9), dtypes, options={"beta": 1, "alpha": 2})
        for dtypes in (
            ("float32", "complex64", "float16"),
            ("float16", "float32", "float32"),
            ("complex64", "float64", "complex64"),
            ("float32", "float32", "complex128"),
        )
    },
    "fp64 on complex64": Gemm((17, 30), (30, 9), options={"compute": "fp64"}),
    "fp64 on float32": Gemm((17, 30), (30, 9), dtypes=("float32",), options={"compute": "fp64"}),
    # ---- extents
    **{
        f"{m}x{n}x{k}": Gemm((m, k), (k, n), (m, n), options=COMPLEX_ALPHA)
        for m, n, k in (
            (1, 1, 1),
            (16, 8, 4),
            (32, 16, 8),
            (17, 9, 5),
            (33, 1, 7),
            (1, 40, 3),
            (40, 3, 0),
            (64, 64, 1),
            (15, 7, 129),
        )
    },
    "empty m": Gemm((0, 5), (5, 3)),
    "empty n": Gemm((5, 3), (3, 0), dtypes=("float32",)),
    "k = 0 without c": Gemm((5, 0), (0, 6)),
    # ---- scalars and c
    "complex alpha and beta": Gemm((20, 12), (12, 10), (20, 10), options=COMPLEX_ALPHA),
    "c is a row": Gemm((20, 12), (12, 10), (1, 10), options=COMPLEX_ALPHA),
    "c is a column of each": Gemm((3, 20, 12), (12, 10), (3, 20, 1), options=COMPLEX_ALPHA),
    "c is one for all": Gemm((3, 20, 12), (12, 10), (20, 10), options=COMPLEX_ALPHA),
    # ---- strides
    **{
        f"strides {how_a}, {how_b}": Gemm((24, 16), (16, 24), dtypes=(dtype,), strides=(how_a, how_b), out=out)
        for dtype, how_a, how_b, out in (
            ("complex64", "fortran", "fortran", "fortran"),
            ("complex64", "reversed", "gaps", "reversed"),
            ("float32", "gaps", "reversed", "gaps"),
            ("complex64", "offset", "offset", "offset"),
            ("float32", "padded", "padded", "padded"),
            ("float16", "padded", "fortran", "padded"),
            ("complex128", "constant rows", "plain", "fortran"),
            ("float64", "fortran", "constant rows", "gaps"),
        )
    },
    "fortran with odd extents": Gemm((3, 19, 13), (3, 13, 21), (3, 19, 21), out="fortran", options=COMPLEX_ALPHA),
    # ---- batches
    "batch": Gemm((5, 17, 6), (5, 6, 9), (5, 17, 9), options=COMPLEX_ALPHA),
    "batch against one": Gemm((5, 17, 6), (6, 9), dtypes=("float32",)),
    "broadcast both ways": Gemm((2, 1, 3, 17, 6), (4, 1, 6, 9), (4, 3, 17, 9), options=COMPLEX_ALPHA),
    "six batch axes": Gemm((2, 1, 2, 1, 2, 1, 5, 6), (1, 2, 1, 2, 1, 2, 6, 7), options={"trans_a": "R"}),
    "empty batch": Gemm((0, 4, 5), (5, 6)),
    # ---- planar
    **{
        f"planar {trans_a}{trans_b} {out}": Gemm(
            (2, 21, 18) if trans_a in "TC" else (2, 18, 21),
            (10, 21) if trans_b in "TC" else (21, 10),
            (18, 10),
            dtypes,
            out=out,
            options={"layout": "planar", "trans_a": trans_a, "trans_b": trans_b, **COMPLEX_ALPHA},
        )
        for trans_a, trans_b, dtypes, out in (
            ("N", "N", ("float32",), "plain"),
            ("C", "R", ("float32",), "fortran"),
            ("T", "C", ("float64",), "gaps"),
            ("N", "T", ("float32", "float64"), "plain"),
        )
    },
    # ---- tiles
    **{
        f"tile {t[0]}x{t[1]}x{t[2]} {t[3]}x{t[4]} {t[5]} stages": Gemm(
            (50, 30),
            (30, 44),
            (50, 44),
            (dtype,),
            strides=("fortran", "plain"),
            config=GemmConfig(block_m=t[0], block_n=t[1], block_k=t[2], thread_m=t[3], thread_n=t[4], stages=t[5]),
            options={"beta": 1},
        )
        for dtype, t in (
            ("complex64", (1, 1, 1, 1, 1, 2)),
            ("complex64", (10, 6, 3, 5, 3, 1)),
            ("float32", (32, 64, 8, 8, 8, 1)),
            ("float16", (64, 32, 16, 4, 8, 2)),
            ("complex128", (48, 24, 5, 4, 6, 2)),
            ("float64", (7, 48, 8, 7, 2, 2)),
        )
    },
    "chosen tile": Gemm((70, 40), (40, 66), config=None),
    "chosen tile, float32": Gemm((130, 16), (16, 130), dtypes=("float32",), config=None),
}


@dataclass(frozen=True)
class Reduce:
    """One call of gemm_reduce."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    reduce: tuple[str, ...]
    dtypes: tuple[str, str] = ("complex64", "complex64")
    axis: tuple[str, ...] = ("m",)
    out: dict[str, str] = field(default_factory=dict)
    config: GemmConfig | None = SMALL
    options: dict[str, Any] = field(default_factory=dict)

    def operands(self):
        planar = (2,) if self.options.get("layout") == "planar" else ()
        return random(1, self.dtypes[0], *planar, *self.a), random(2, self.dtypes[1], *planar, *self.b)


def run_reduce(machine, case, operands=None):
    """Runs `case` into outputs full of NaN and returns (problem, a, b, results)."""
    a, b = operands or case.operands()
    problem = GemmReduceProblem.build(
        Operand.of(a), Operand.of(b), reduce=list(case.reduce), axis=list(case.axis), **case.options
    )
    out = {}
    for name, how in case.out.items():
        shape, dtype = problem.results[name]
        filler = np.full(shape, np.nan if dtype.kind != "i" else -7, dtype)
        out[name] = machine.put(filler[..., ::-1].copy()[..., ::-1] if how == "backwards" else strided(filler, how))
    results = simt.run_gemm_reduce(machine.launcher, problem, case.config, machine.put(a), machine.put(b), out)
    assert list(results) == list(problem.results)
    for name, array in out.items():
        assert results[name] is array
    return problem, a, b, {name: machine.get(array) for name, array in results.items()}


def check_reduce(machine, case):
    """See assert_reduced."""
    assert_reduced(*run_reduce(machine, case))


def assert_reduced(problem, a, b, results):
    """Each result against the reference, within the bound of the product's elements and of the sums over them."""
    expected = reference.oracle_gemm_reduce(problem, a, b)
    element = _element_bound(problem, a, b)
    product = reference.oracle_product(problem, a, b)
    for name, (shape, dtype) in problem.results.items():
        assert results[name].shape == shape
        assert results[name].dtype == dtype
        if name.startswith("arg"):
            _check_argument(problem, name, results[name], product, element)
        elif name == "c":
            assert_within(reference.logical(problem, results[name]), expected[name], element)
        else:
            got = (
                reference.logical(problem, results[name])
                if problem.value_dtype.kind == "c" and name in {"sum", "mean"}
                else results[name]
            )
            assert_within(got, expected[name], _reduced_bound(problem, name, product, element))


def _element_bound(problem, a, b):
    as_gemm = GemmProblem.build(
        Operand.of(a),
        Operand.of(b),
        alpha=problem.alpha,
        trans_a=problem.trans_a,
        trans_b=problem.trans_b,
        layout=problem.layout,
        compute=problem.compute,
    )
    return reference.bound(as_gemm, a, b)


def _reduced_bound(problem, name, product, element):
    """From |f(c + e) - f(c)| and the roundings of f and of its result; all reductions are Lipschitz in the values."""
    unit = float(np.finfo(problem.accumulate).eps)
    widened = name in {"sum", "mean", "sumsq"} and problem.dtype == np.float16
    stored = float(np.finfo(np.float32 if widened else problem.dtype).eps)
    size = np.abs(product).astype(np.float64)
    element = 2 * element  # an error in both parts
    if problem.pre_op == "square":
        size, element = size**2, 2 * size * element + element**2 + 4 * unit * size**2
    if problem.pre_op == "abs":
        element = element + 2 * unit * size
    axis = _reduced_axes(problem)
    if name == "sumsq":
        size, element = size**2, 2 * size * element + element**2 + 4 * unit * size**2
    total, spread = size.sum(axis=axis), element.sum(axis=axis)
    count = max(problem.extent, 1)
    if name in {"sum", "sumsq"}:
        return spread + (count + 4) * unit * (total + spread) + stored * (total + spread)
    if name == "mean":
        return (spread + (count + 4) * unit * (total + spread) + stored * (total + spread)) / count
    largest = size.max(axis=axis)
    return element.max(axis=axis) + (4 * unit + stored) * largest


def _reduced_axes(problem):
    kept = -1 if problem.over_rows else -2
    reduced = -2 if problem.over_rows else -1
    ndim = len(problem.batch_shape) + 2
    if problem.over_batch:
        return tuple(axis for axis in range(ndim) if axis != ndim + kept)
    return ndim + reduced


def _check_argument(problem, name, index, product, element):
    """The element at the index is as extreme as the reference's, up to the product's own error."""
    values = reference.pre_op(problem.pre_op, product)
    values = np.abs(values) if values.dtype.kind == "c" else values
    bound = 2 * element if problem.pre_op != "square" else 4 * np.abs(product) * element + 4 * element**2
    bound = bound + 8 * np.finfo(problem.accumulate).eps * np.abs(values)
    values, bound = _lined_up(problem, values), _lined_up(problem, bound)
    assert ((index >= 0) & (index < values.shape[-1])).all()
    chosen = np.take_along_axis(values, index[..., None], -1)[..., 0]
    best = values.max(-1) if name == "argmax" else values.min(-1)
    assert (np.abs(chosen - best) <= 2 * bound.max(-1)).all()


def _lined_up(problem, values):
    """What is reduced as the last axis, in index order."""
    if not problem.over_rows:
        values = values.swapaxes(-1, -2)
    if problem.over_batch:
        return values.reshape(-1, values.shape[-1]).T
    return values.swapaxes(-1, -2)


COMPLEX_KINDS = ("sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin")
REAL_KINDS = ("argmin", "max", "sum", "min", "mean", "sumsq", "absmax", "absmin", "argmax")

REDUCE_CASES = {
    **{
        f"{dtype} over {'+'.join(axis)}": Reduce(
            (3, 37, 21),
            (21, 19),
            COMPLEX_KINDS if dtype.startswith("c") else REAL_KINDS,
            (dtype, dtype),
            axis,
            options={"alpha": -1.5},
        )
        for dtype in ("float16", "float32", "float64", "complex64", "complex128")
        for axis in (("m",), ("n",), ("m", "batch"), ("batch", "n"))
    },
    **{
        f"{dtype} {pre_op}": Reduce(
            (20, 9),
            (9, 12),
            REAL_KINDS if dtype.startswith("f") or pre_op == "abs" else COMPLEX_KINDS,
            (dtype, dtype),
            options={"pre_op": pre_op, "alpha": 0.5},
        )
        for dtype in ("float16", "float32", "complex64", "complex128")
        for pre_op in ("abs", "square")
    },
    **{f"{kind} alone": Reduce((40, 9), (9, 12), (kind,), options={"alpha": 1 - 2j}) for kind in COMPLEX_KINDS},
    "atomic sums": Reduce((3, 70, 9), (9, 12), COMPLEX_KINDS, options={"reproducible": False}),
    "atomic sums over the batch": Reduce(
        (3, 70, 9), (9, 12), REAL_KINDS, ("float32", "float32"), ("n", "batch"), options={"reproducible": False}
    ),
    "returns c": Reduce((2, 20, 9), (9, 12), ("sum", "absmax"), options={"return_c": True, "alpha": 2j}),
    "returns c, abs": Reduce(
        (2, 20, 9), (9, 12), ("max",), ("float16", "float16"), options={"return_c": True, "pre_op": "abs"}
    ),
    "returns c in its own strides": Reduce(
        (2, 20, 9), (9, 12), ("sum",), axis=("n",), out={"c": "fortran", "sum": "backwards"}, options={"return_c": True}
    ),
    "results in their own strides": Reduce(
        (2, 20, 9), (9, 12), ("mean", "argmax"), out={"mean": "backwards", "argmax": "backwards"}
    ),
    "planar": Reduce(
        (2, 20, 9), (9, 12), COMPLEX_KINDS, ("float32", "float32"), options={"layout": "planar", "return_c": True}
    ),
    "planar conjugate transposed": Reduce(
        (9, 20),
        (12, 9),
        ("sum", "mean"),
        ("float64", "float32"),
        ("n",),
        options={"layout": "planar", "trans_a": "C", "trans_b": "C"},
    ),
    "mixed types": Reduce((20, 9), (9, 12), COMPLEX_KINDS, ("float32", "complex64")),
    "transposed": Reduce((9, 20), (12, 9), COMPLEX_KINDS, options={"trans_a": "C", "trans_b": "T"}),
    "fp64 on complex64": Reduce((20, 9), (9, 12), COMPLEX_KINDS, options={"compute": "fp64"}),
    "six batch axes": Reduce(
        (2, 1, 2, 1, 2, 1, 5, 6),
        (1, 2, 1, 2, 1, 2, 6, 7),
        COMPLEX_KINDS,
        axis=("m", "batch"),
        options={"return_c": True},
    ),
    "six batch axes kept": Reduce((2, 1, 2, 1, 2, 1, 5, 6), (1, 2, 1, 2, 1, 2, 6, 7), COMPLEX_KINDS, axis=("n",)),
    "one row": Reduce((1, 9), (9, 12), COMPLEX_KINDS),
    "k = 0": Reduce((20, 0), (0, 12), COMPLEX_KINDS),
    "nothing to reduce": Reduce((0, 9), (9, 12), ("sum", "sumsq")),
    "an empty batch to reduce": Reduce((0, 5, 9), (9, 12), ("sum", "sumsq"), axis=("m", "batch")),
    "no results": Reduce((5, 9), (9, 0), ("sum",)),
    "two levels of partials": Reduce((70, 16, 3), (3, 10), COMPLEX_KINDS, axis=("m", "batch")),
    "three levels of partials": Reduce((1100, 2, 1), (1, 3), REAL_KINDS, ("float32", "float32"), ("m", "batch")),
    "atomic with many partials": Reduce(
        (70, 16, 3), (3, 10), COMPLEX_KINDS, axis=("m", "batch"), options={"reproducible": False}
    ),
    "chosen tile": Reduce((2, 150, 12), (12, 70), COMPLEX_KINDS, config=None),
}
