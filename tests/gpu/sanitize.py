"""Runs every kernel once, on small odd shapes, for NVIDIA's compute-sanitizer (`make sanitize`), or by itself.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [--only WORD ...] [--list]

Every array is an allocation of its own, with an element of guard on both sides of the result. Results are compared
with a double-precision product, and repeated once for their bits; exits 1 where one is wrong, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmserve_kernels import GemmConfig, KernelError, gemm, gemm_reduce, prepare
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.freivalds import freivalds_check
from gemmserve_kernels.numerics.reference import errors, logical, oracle_gemm, reduction_errors
from gemmserve_kernels.problem.errors import DeviceError
from gemmserve_kernels.problem.problem import GemmReduceProblem, Operand


@dataclass(frozen=True)
class Job:
    """A product: `spoil` changes its operands, `prepared` names sides that are prepared first."""

    case: Case
    limit: float = 1e-6
    spoil: str = ""
    prepared: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def forced(algorithm, compute="auto", *, limit=1e-6, spoil="", prepared="", config=None, **case):
    extents = {"m": 133, "n": 71, "k": 201} | {name: case.pop(name) for name in "mnk" if name in case}
    chosen = GemmConfig(algorithm=algorithm, **(config or {}))
    return Job(Case(compute=compute, config=chosen, **extents, **case), limit, spoil, prepared)


BETA = {"alpha": 2 - 1j, "beta": 0.5j}
REAL = {"dtype": "float32"}
DOUBLE = {"dtype": "complex128"}
HALF = {"dtype": "float16", "limit": 1e-3}
JOBS = {
    # ---- plain arithmetic
    **{f"simt {d}": forced("simt", limit=2e-3 if d == "float16" else 1e-6, dtype=d) for d in ("float16", "float32")},
    **{
        f"simt {d}": forced("simt", limit=1e-6 if d == "complex64" else 1e-14, dtype=d)
        for d in ("float64", "complex64")
    },
    "simt, alpha, beta, conjugate": forced("simt", trans_a="C", trans_b="R", batch=3, **BETA),
    "small": forced("small", m=7, n=9, k=5, batch=133),
    "small, alpha, beta": forced("small", m=16, n=12, k=31, batch=37, trans_a="C", **BETA),
    "small complex128": forced("small", m=32, n=32, k=32, batch=5, limit=1e-14, **DOUBLE),
    "small 3xtf32": forced("small", "3xtf32", m=40, n=36, k=50, batch=17),
    # ---- operands split by the kernel that multiplies them
    "fused": forced("fused"),
    "fused, alpha, beta": forced("fused", m=65, n=67, k=129, batch=3, trans_a="C", trans_b="T", **BETA),
    "fused, parts of k": forced("fused", m=40, n=36, k=520, config={"split_k": 6}),
    "fused, not served": forced("fused", spoil="spike"),
    "fused float32": forced("fused", **REAL),
    "fused float32, beta, odd": forced("fused", m=65, n=67, k=129, batch=3, trans_a="T", alpha=2, beta=0.5, **REAL),
    "fused float32, parts of k": forced("fused", m=40, n=36, k=520, config={"split_k": 6}, **REAL),
    "fused float32, not served": forced("fused", spoil="spike", **REAL),
    # ---- TF32
    "mma 3xtf32": forced("mma", "3xtf32"),
    "mma 3xtf32, split": forced("mma", "3xtf32", k=1000, config={"split_k": 3}, trans_a="C", **BETA),
    "mma 1xtf32 float32": forced("mma", "1xtf32", limit=1e-3, **REAL),
    # ---- float16 planes
    "wgmma 3xfp16": forced("wgmma", "3xfp16"),
    "wgmma 3xfp16, alpha, beta, batch": forced("wgmma", "3xfp16", batch=3, trans_b="C", **BETA),
    "wgmma 3xfp16, split in a cluster": forced("wgmma", "3xfp16", k=700, config={"split_k": 4}),
    "wgmma 3xfp16, split in grids": forced("wgmma", "3xfp16", k=900, config={"split_k": 12}),
    "wgmma 3xfp16, multicast": forced(
        "wgmma", "3xfp16", m=300, n=277, config={"cluster": 2, "block_m": 128, "block_n": 128, "block_k": 32}
    ),
    "wgmma 3xfp16 float32": forced("wgmma", "3xfp16", **REAL),
    "wgmma 3xfp16 planar": forced("wgmma", "3xfp16", layout="planar"),
    "wgmma 3xfp16-3m": forced("wgmma", "3xfp16-3m"),
    "wgmma 1xfp16": forced("wgmma", "tf32", limit=1e-3),
    "wgmma 1xfp16 float32": forced("wgmma", "tf32", limit=1e-3, **REAL),
    # ---- float16 as it lies; sizes that the copy engine can step over
    "wgmma fp16": forced("wgmma", n=72, k=200, **HALF),
    "wgmma fp16, across on both sides, c": forced("wgmma", m=136, trans_a="T", n=72, alpha=2, beta=-1, batch=3, **HALF),
    "wgmma fp16, along k on both sides": forced("wgmma", k=200, trans_b="T", order="F", **HALF),
    "wgmma fp16, copied": forced("wgmma", batch=2, **HALF),
    "wgmma fp16, multicast": forced(
        "wgmma", m=300, n=520, k=200, config={"cluster": 2, "block_m": 128, "block_n": 256}, **HALF
    ),
    "wgmma fp16, split in a cluster": forced("wgmma", n=72, k=704, config={"split_k": 4}, **HALF),
    "wgmma fp16, split in grids": forced("wgmma", n=72, k=904, config={"split_k": 12, "promote": 64}, **HALF),
    "mma 3xfp16": forced("mma", "3xfp16"),
    "mma 3xfp16 float32": forced("mma", "3xfp16", batch=2, **REAL),
    "the wide way": forced("wgmma", "3xfp16", init="graded"),
    "falls back": forced("wgmma", "3xfp16", spoil="spike"),
    "not finite": forced("wgmma", "3xfp16", spoil="nan"),
    "prepared planes": forced("wgmma", "3xfp16", prepared="ab", trans_a="T"),
    # ---- residues
    "ozaki": forced("ozaki", "ozaki", limit=3e-15, **DOUBLE),
    "ozaki float64, beta": forced("ozaki", "ozaki", limit=3e-15, dtype="float64", alpha=2, beta=-1, trans_a="T"),
    "ozaki complex64": forced("ozaki", "ozaki"),
    "ozaki complex64, the wide way": forced("ozaki", "ozaki", init="graded"),
    "ozaki complex64, falls back": forced("ozaki", "ozaki", spoil="spike"),
    "ozaki complex64, not finite": forced("ozaki", "ozaki", spoil="nan", prepared="ab"),
    "ozaki, not finite": forced("ozaki", "ozaki", limit=3e-15, spoil="nan", **DOUBLE),
    "prepared residues": forced("ozaki", "ozaki", limit=3e-15, prepared="ab", **DOUBLE),
    # ---- the vendor's BLAS with our copies around it
    "vendor": forced("vendor", trans_a="R", batch=2, **BETA),
}


def reduced(algorithm=None, compute="auto", **case):
    extents = {"m": 133, "n": 71, "k": 201} | case
    config = None if algorithm is None else GemmConfig(algorithm=algorithm)
    return Case(op="gemm_reduce", compute=compute, config=config, **extents)


SEVERAL = ("sum", "sumsq", "absmax", "argmax")
REDUCTIONS = {
    "reduce m, simt": reduced("simt", batch=2, reduce=SEVERAL),
    "reduce n and batch, simt": reduced("simt", batch=3, reduce=("mean", "absmin"), axis=("n", "batch")),
    "reduce real, simt": reduced("simt", dtype="float32", reduce=("max", "argmin"), return_c=True),
    "reduce m, wgmma": reduced("wgmma", "3xfp16", batch=2, reduce=SEVERAL),
    "reduce n, wgmma": reduced("wgmma", "3xfp16", reduce=("absmin", "sumsq"), axis=("n",), return_c=True),
    "reduce m, wgmma fp16": reduced("wgmma", dtype="float16", n=72, k=200, batch=2, reduce=("sumsq", "argmax")),
    "reduce n, wgmma fp16": reduced(
        "wgmma", dtype="float16", n=520, k=200, reduce=("sumsq", "sum"), axis=("n", "batch"), return_c=True
    ),
    "reduce m, mma planes": reduced("mma", "3xfp16", batch=2, reduce=SEVERAL),
    "reduce m, mma": reduced("mma", "3xtf32", batch=2, reduce=SEVERAL, return_c=True),
    "reduce n and batch, mma": reduced("mma", "3xtf32", batch=3, reduce=("absmax",), axis=("n", "batch")),
    "reduce m, vendor": reduced("vendor", batch=2, reduce=SEVERAL),
    "reduce n and batch, vendor": reduced("vendor", batch=3, n=9, reduce=SEVERAL, axis=("n", "batch")),
    "reduce m, vendor, with c": reduced("vendor", batch=2, reduce=SEVERAL, return_c=True),
    "reduce planar, vendor": reduced("vendor", layout="planar", reduce=SEVERAL, trans_a="C"),
    "gram m": reduced("gram", batch=2, m=1300, k=70, reduce=("sumsq", "sum")),
    "gram n and batch": reduced("gram", batch=3, n=700, k=33, reduce=("sumsq",), axis=("n", "batch"), trans_b="C"),
    "gram real": reduced("gram", dtype="float32", m=600, k=20, reduce=("sumsq",)),
    "gram planar": reduced("gram", layout="planar", m=600, k=40, reduce=("sumsq",)),
    "screen n": reduced("screen", dtype="complex128", batch=2, m=300, n=200, k=40, reduce=("absmax",), axis=("n",)),
    "screen m": reduced("screen", dtype="float64", m=200, n=70, k=33, reduce=("max", "argmin"), trans_b="T"),
    "sums m": reduced(batch=2, reduce=("sum", "mean")),
    "sums n and batch": reduced(batch=2, reduce=("sum",), axis=("n", "batch"), trans_a="C"),
}


def spoiled(operands, how):
    a = operands["a"]
    if how == "spike":
        a[..., a.shape[-1] // 3] *= 2.0**25
    if how == "nan":
        a[..., 5, 7] = np.nan
        operands["b"][..., 11, 3] = np.inf
    return operands


def guarded(cupy, problem):
    """A result of NaN between guards, and the whole of its memory."""
    size = int(np.prod(problem.result_shape))
    memory = cupy.full(size + 2, cupy.nan, problem.result_dtype)
    return memory[1 : 1 + size].reshape(problem.result_shape), memory


def product(cupy, job):
    """The relative error; infinity where bits differ, guards are written or elements are not."""
    case, problem = job.case, job.case.problem()
    operands = spoiled(case.operands(), job.spoil)
    device = {name: cupy.asarray(array) for name, array in operands.items()}
    for side in job.prepared:
        device[side] = prepare(
            device[side], side, case.compute, trans=getattr(case, f"trans_{side}"), layout=case.layout
        )
    results = []
    for _ in range(2):
        out, memory = guarded(cupy, problem)
        options = {name: value for name, value in case.options().items() if name != "order"}
        gemm(device["a"], device["b"], device.get("c"), out=out, **options)
        host = memory.get()
        if not np.isnan(host[[0, -1]]).all():
            return float("inf")
        results.append(out.get())
    if results[0].tobytes() != results[1].tobytes() and not job.spoil:
        return float("inf")
    d, expected = logical(problem, results[0]), oracle_gemm(problem, *(operands.get(name) for name in "abc"))
    finite = np.isfinite(expected)
    if (np.isfinite(d) != finite).any():
        return float("inf")
    rows, columns = (finite.all(axis=axis) for axis in (-1, -2))
    if finite.all():
        return errors(d, expected).rel_fro
    return errors(d[np.ix_(rows, columns)], expected[np.ix_(rows, columns)]).rel_fro


HALF = 1e-3


def reduction(cupy, case):
    operands = case.operands()
    found = gemm_reduce(*(cupy.asarray(operands[name]) for name in "ab"), **case.options())
    found = found if isinstance(found, dict) else {case.reduce[0]: found}
    problem = GemmReduceProblem.build(*(Operand.of(operands[name]) for name in "ab"), **case.options())
    host = {name: array.get() for name, array in found.items()}
    found = reduction_errors(problem, operands["a"], operands["b"], host)
    if case.dtype == "float16" and found.get("c", 0) <= HALF:  # the product of float16 data is float16 itself
        found.pop("c", None)
    return max(found.values())


CHECKS = {
    f"check {name}": Case(m=133, n=71, k=201, batch=batch, **case)
    for name, batch, case in (
        ("complex64", 3, {"trans_a": "C", "trans_b": "R", **BETA}),
        ("complex64, F", 1, {"trans_a": "T", "trans_b": "T", "order": "F"}),
        ("float16", 2, {"dtype": "float16"}),
        ("float32", 1, {"dtype": "float32", "trans_b": "T", "alpha": 2, "beta": -1}),
        ("float64", 1, {"dtype": "float64", "trans_a": "T"}),
        ("complex128", 1, {"dtype": "complex128"}),
        ("planar", 2, {"layout": "planar"}),
    )
}


def check(cupy, case):
    """How far the finding of a check on the device is from the host's; infinity where a wrong element is not found."""
    problem, operands = case.problem(), case.operands()
    arrays = [operands.get(name) for name in "abc"]
    d = gemm(*arrays, **case.options())
    differences = [float("inf")]
    for wrong in (False, True):
        if wrong:
            d[..., 3, 4] += 20
        held = [None if x is None else cupy.asarray(x) for x in (*arrays, d)]
        here, there = (freivalds_check(problem, *each, seed=5) for each in ((*arrays, d), held))
        if (there.excess > 8) != wrong:
            return float("inf")
        # Of right results in double precision little but the check's own rounding is seen.
        differences = [abs(there.excess / here.excess - 1), abs(there.residual / here.residual - 1)]
    return max(differences)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="jobs whose names contain one of these")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    names = (*JOBS, *REDUCTIONS, *CHECKS)
    chosen = [n for n in names if not args.only or any(word in n for word in args.only)]
    if args.list:
        print("\n".join(chosen))
        return 0
    try:
        DeviceSpec.current()
    except DeviceError as error:
        print(f"no GPU: {error}", file=sys.stderr)
        return 2
    import cupy

    cupy.cuda.set_allocator(None)  # one allocation for each array: what lies beyond it is seen
    wrong = 0
    for name in chosen:
        try:
            limit = JOBS[name].limit if name in JOBS else 1e-5
            if name in CHECKS:
                error = check(cupy, CHECKS[name])
            else:
                error = product(cupy, JOBS[name]) if name in JOBS else reduction(cupy, REDUCTIONS[name])
        except KernelError as reason:
            print(f"{name}: not on this device: {reason}", flush=True)
            continue
        good = error <= limit
        wrong += not good
        print(f"{name}: {error:.1e}{'' if good else ' WRONG'}", flush=True)
    print(f"{len(chosen)} jobs, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
