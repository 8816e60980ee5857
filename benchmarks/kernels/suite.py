"""What the suite measures: tables of cases. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.algorithms.ozaki.moduli import Moduli, available, needed
from gemmserve_kernels.bench.cases import Case

KINDS = ("normal", "positive", "wide", "graded", "ill-scaled")
DEPTHS = (512, 1024, 2048, 4096, 8192, 16384)
MODES = {
    "complex64": ("auto", "fp32", "3xfp16", "3xfp16-3m", "3xtf32", "1xtf32", "tf32", "ozaki"),
    "float32": ("auto", "fp32", "3xfp16", "3xtf32", "1xtf32", "tf32", "ozaki"),
    "complex128": ("auto", "fp64", "ozaki"),
    "float64": ("auto", "fp64", "ozaki"),
}
HEADLINE = Case(m=3456, n=4096, k=4096)
BATCHED = (
    (2, 400_000), (3, 300_000), (4, 200_000), (8, 100_000), (16, 50_000), (32, 20_000),
    (33, 16_384), (48, 8192), (64, 4096), (96, 2048), (128, 1024), (192, 512), (256, 256), (512, 64), (1024, 16),
)  # fmt: skip
REAL_BATCHED = ((48, 16_384), (64, 8192), (96, 4096), (128, 2048), (256, 512))
"""Batches of float32 as large as those of complex64."""
THIN = (
    (16384, 256, 4096), (256, 16384, 4096), (8192, 8192, 64), (4096, 16, 4096), (16, 4096, 4096), (64, 64, 65536),
    (1024, 1024, 65536), (32768, 64, 512), (64, 8192, 8192), (8192, 64, 8192),
)  # fmt: skip
REDUCTIONS = {
    "complex64": ((16, 2048, 2048, 1024), (64, 1024, 1024, 256), (256, 512, 512, 64)),
    "float32": ((64, 1024, 1024, 256), (256, 512, 512, 64)),
}
RESIDUES_ERROR = 2e-15
"""What is looked for among numbers of residues: errors from there down."""
DOUBLE = (("complex128", "absmax"), ("float64", "max"))
SECOND_THIN = ((64, 8192, 8192), (8192, 64, 8192), (64, 64, 65536), (300, 5000, 20000))
SECOND_BATCHED = (
    *((n, batch, "float32") for n, batch in REAL_BATCHED),
    (32, 16384, "float64"),
    (64, 2048, "complex128"),
)
TALL = (("complex64", (4, 65536, 4096, 64)), ("float32", (4, 65536, 4096, 128)))
"""Products with many more rows and columns than steps of k, of which the rival's is 8.6 or 4.3 GB."""
HALF = (
    ((64, 1024, 1024, 1024), "NN", ("max",)),
    ((64, 1024, 1024, 1024), "NT", ("max",)),
    ((64, 1024, 1024, 1024), "TN", ("max",)),
    ((64, 1024, 1024, 1024), "NN", ("sumsq", "absmax")),
    ((64, 1000, 1000, 1001), "NN", ("max",)),
    ((256, 512, 512, 512), "NN", ("max",)),
)
"""Reductions of float16: operands along k and across it, and such as are copied first; sums, which are promoted."""


@dataclass(frozen=True)
class Table:
    """Cases that are shown together.

    `forced`: our other algorithms by name too. `prepared`: ours on operands prepared beforehand too. `residues`: of
    data in double ours with other numbers of residues too. `elements`: errors of elements too. `timed`: whether there
    are times, or errors alone, then of every compute mode on the same data.
    """

    name: str
    cases: tuple[Case, ...]
    forced: bool = True
    prepared: bool = False
    residues: bool = False
    elements: bool = False
    timed: bool = True


def square(*sizes, **options):
    return tuple(Case(m=n, n=n, k=n, **options) for n in sizes)


def suite(quick=False):
    """The tables, what matters most first. `quick`: smaller sizes."""
    large = 2048 if quick else 4096
    larger = () if quick else (8192,)
    double = {"dtype": "complex128"}
    sizes = (256, 384, 512, 768, 1024, 1536, 2048, *(() if quick else (3072, 4096, 8192, 16384)))
    named = tuple(replace(HEADLINE, compute=mode) for mode in ("3xfp16-3m", "tf32", "3xtf32", "1xtf32"))
    return [
        Table("headline", (HEADLINE,), prepared=True),
        Table("square", square(*sizes), prepared=True),
        Table("modes", named, prepared=True),
        Table("float32", square(512, 1024, 2048, large, *larger, dtype="float32"), prepared=True),
        Table("double", square(512, 1024, 2048, large, *larger, **double) + square(1024, large, dtype="float64")),
        Table("ozaki", tuple(replace(c, compute="ozaki") for c in square(large, *larger, **double)), prepared=True),
        Table("batched", tuple(Case(m=n, n=n, k=n, batch=b) for n, b in BATCHED)),
        Table("thin", tuple(Case(m=m, n=n, k=k) for m, n, k in THIN)),
        *errors(quick),
        Table("tf32", square(1024, 2048, large, compute="tf32") + square(large, compute="tf32", dtype="float32")),
        Table("mma", (replace(HEADLINE, compute="3xfp16", config=GemmConfig(algorithm="mma")),)),
        Table("ops", tuple(replace(c, trans_a=t) for c in square(2048) for t in "TCR"), forced=False),
        Table("scalars", tuple(replace(c, alpha=2 - 1j, beta=0.5j) for c in square(512, 2048)), forced=False),
        Table("planar", square(2048, layout="planar"), forced=False),
        Table("half", halves(large)),
        Table("other batches", other_batches()),
        Table("gemm_reduce", reductions(quick), forced=False),
        Table("second-wave", second_wave(quick), prepared=True, residues=True, elements=True),
    ]


def second_wave(quick=False):
    """Where the vendor's newest library, or plain arithmetic on small and thin products, is hard to be faster than."""
    double = {"dtype": "complex128"}
    cubes = (1024, 2048) if quick else (8192, 4096, 2048, 1024)
    largest = max(cubes)
    thin = tuple(Case(m=m, n=n, k=k) for m, n, k in SECOND_THIN)
    return (
        *square(*cubes, **double),
        *square(largest, init="spikes", **double),
        *square(largest, dtype="float64"),
        *reductions_in_double(),
        HEADLINE,
        replace(HEADLINE, compute="3xfp16"),
        *square(largest),
        *square(largest, compute="3xfp16"),
        *thin,
        *(replace(case, compute="tf32") for case in thin[:1] + thin[2:3]),
        *square(512, 768),
        *square(768, compute="tf32"),
        *(Case(m=n, n=n, k=n, batch=dict(BATCHED)[n]) for n in (48, 64, 96, 128, 256)),
        *square(1024, dtype="float32"),
        *(Case(m=n, n=n, k=n, batch=batch, dtype=dtype) for n, batch, dtype in SECOND_BATCHED),
        *square(2048 if quick else 4096, dtype="float16"),
    )


def halves(large):
    """Products of float16, one of them along k on both sides."""
    half = {"dtype": "float16"}
    batched = (Case(m=512, n=512, k=512, batch=256, **half), Case(m=1024, n=1024, k=1024, batch=64, **half))
    return (*square(1024, large, **half), *square(large, trans_b="T", **half), *batched)


def errors(quick=False):
    """Errors of every mode against k and the kind of data."""
    depths = DEPTHS[:3] if quick else DEPTHS
    few = (512, 4096, 16384)[: 1 if quick else 3]
    sizes = {"complex64": (1024, depths), "float32": (1024, few), "complex128": (512, few), "float64": (512, few)}
    return [
        Table(
            f"errors {dtype}",
            tuple(Case(m=n, n=n, k=k, init=init, dtype=dtype) for init in KINDS for k in ks),
            timed=False,
        )
        for dtype, (n, ks) in sizes.items()
    ]


def other_batches():
    """Batches of other dtypes."""
    return (
        *(Case(m=n, n=n, k=n, batch=b, dtype="float32") for n, b in ((4, 200_000), (16, 50_000), (32, 20_000))),
        *(Case(m=n, n=n, k=n, batch=b, dtype="float32") for n, b in REAL_BATCHED),
        *(Case(m=n, n=n, k=n, batch=b, dtype="complex128") for n, b in ((4, 200_000), (16, 50_000), (32, 10_000))),
        Case(m=512, n=512, k=512, batch=64, dtype="float32"),
        Case(m=512, n=512, k=512, batch=16, dtype="complex128"),
    )


def reductions(quick=False):
    """Fused products and reductions."""
    return tuple(
        Case(op="gemm_reduce", batch=batch, m=m, n=n, k=k, dtype=dtype, reduce=reduce)
        for dtype, shapes in REDUCTIONS.items()
        for batch, m, n, k in (shapes[-1:] if quick else shapes)
        for reduce in (("absmax",) if dtype == "complex64" else ("max",), ("sum",), ("sum", "sumsq", "absmax"))
    ) + reductions_in_double() + tuple(
        Case(op="gemm_reduce", batch=batch, m=m, n=n, k=k, dtype=dtype, reduce=("sumsq",))
        for dtype, (batch, m, n, k) in (TALL[:1] if quick else TALL)
    ) + tuple(
        Case(
            op="gemm_reduce", batch=batch, m=m, n=n, k=k, dtype="float16", reduce=reduce, trans_a=trans[0],
            trans_b=trans[1],
        )
        for (batch, m, n, k), trans, reduce in (HALF[-1:] if quick else HALF)
    )  # fmt: skip


def reductions_in_double():
    """Reductions in double precision, of matrices at which the vendor is not much slower."""
    return tuple(
        Case(op="gemm_reduce", batch=8, m=1024, n=1024, k=512, dtype=dtype, reduce=(reduce,))
        for dtype, reduce in DOUBLE
    )


def by_residues(case):
    """A product of data in double with other numbers of residues than dispatch takes, of errors that are of interest:
    (number, case).
    """
    if case.op != "gemm" or case.dtype not in {"float64", "complex128"} or case.batch > 1:
        return []
    is_complex = case.dtype == "complex128"
    return [
        (count, replace(case, compute="ozaki", config=GemmConfig(algorithm="ozaki", moduli=count)))
        for count in range(1, len(available(complex_=is_complex)) + 1)
        if count != needed(case.k, case.dtype)
        and Moduli.first(count, complex_=is_complex).error(case.k) <= RESIDUES_ERROR
    ]


def label(case):
    """What tells cases of one size apart."""
    parts = [case.init if case.init != "normal" else "", f"{case.trans_a}{case.trans_b}".replace("NN", "")]
    parts += [case.config.algorithm if case.config else "", "alpha, beta" if case.beta != 0 else ""]
    parts += [case.layout if case.layout == "planar" else "", "+".join(case.reduce) if case.op != "gemm" else ""]
    return " ".join(part for part in parts if part)
