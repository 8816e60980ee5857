"""Our kernels beside the vendor's BLAS on this machine's GPU, in one run: time, rate and error; writes JSON.

    python benchmarks/kernels/run.py [--quick] [--device cuda:0|cpu] [--output docs/benchmarks/kernels-<device>.json]

Times are medians of device events over operands that rotate through three times the level-2 cache. Every row is checked
against an oracle in double precision (long double for 64-bit data), on as many rows as that takes a few seconds for.
Exits 2 where there is no GPU, unless --device cpu asks for NumPy.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from contenders import SuiteTarget

from gemmserve_kernels import DeviceError, GemmConfig
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.formats import fields
from gemmserve_kernels.bench.run import measure
from gemmserve_kernels.bench.targets import CpuTarget
from gemmserve_kernels.errors import KernelError

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
KINDS = ("normal", "positive", "wide", "graded", "ill-scaled")
MODES = ("fp32", "3xfp16", "3xfp16-3m", "3xtf32", "1xtf32", "tf32")


def square(*sizes, **options):
    return [Case(m=n, n=n, k=n, **options) for n in sizes]


def suite(quick):
    """(name, cases): the figures of one table each."""
    half, double = {"dtype": "float16"}, {"dtype": "complex128"}
    large = 2048 if quick else 4096
    headline = Case(m=3456, n=4096, k=4096)
    return [
        ("headline", [headline]),
        ("square", square(256, 512, 1024, 2048, *([] if quick else [4096, 8192, 16384]))),
        ("modes", [replace(headline, compute=mode) for mode in MODES[1:]]),
        ("mma", [replace(headline, compute="3xfp16", config=GemmConfig(algorithm="mma"))]),
        ("float32", square(512, 1024, large, *([] if quick else [8192]), dtype="float32")),
        (
            "thin",
            [
                Case(m=m, n=n, k=k)
                for m, n, k in (
                    (16384, 256, 4096),
                    (256, 16384, 4096),
                    (8192, 8192, 64),
                    (4096, 16, 4096),
                    (16, 4096, 4096),
                    (64, 64, 65536),
                )
            ],
        ),
        ("double", square(1024, large, *([] if quick else [8192]), **double) + square(large, dtype="float64")),
        ("ozaki", [replace(case, compute="ozaki") for case in square(large, **double)]),
        (
            "batched",
            [Case(m=n, n=n, k=n, batch=b) for n, b in ((4, 200_000), (8, 100_000), (16, 50_000), (32, 20_000))]
            + [
                Case(m=n, n=n, k=n, batch=b)
                for n, b in ((33, 16384), (64, 4096), (128, 1024), (256, 256), (512, 64), (1024, 16))
            ]
            + [Case(m=512, n=512, k=512, batch=256, **half)],
        ),
        ("data", [Case(m=1024, n=1024, k=k, init=init) for init in KINDS for k in (512, 4096, 16384)]),
        ("float32 data", [Case(m=1024, n=1024, k=4096, init=init, dtype="float32") for init in KINDS]),
        ("double data", [Case(m=512, n=512, k=4096, init=init, compute="ozaki", **double) for init in KINDS]),
        (
            "error by k",
            [
                Case(m=256, n=256, k=k, compute=mode)
                for mode in MODES
                for k in (256, 512, 1024, 2048, 4096, 8192, 16384)
            ],
        ),
        ("half", square(large, **half)),
        ("ops", [replace(case, trans_a=t) for case in square(2048) for t in ("T", "C", "R")]),
        ("planar", square(2048, layout="planar")),
        ("tf32", square(1024, large, compute="tf32") + square(large, compute="tf32", dtype="float32")),
        (
            "gemm_reduce",
            [
                Case(op="gemm_reduce", batch=b, m=m, n=n, k=k, dtype=dtype, reduce=reduce)
                for dtype, shapes in (
                    ("complex64", ((16, 2048, 2048, 1024), (64, 1024, 1024, 256), (256, 512, 512, 64))),
                    ("float32", ((64, 1024, 1024, 256), (256, 512, 512, 64))),
                )
                for b, m, n, k in (shapes[-1:] if quick else shapes)
                for reduce in (("absmax",), ("sum",), ("sum", "sumsq", "absmax"))
            ],
        ),
    ]


LONG_FLOPS = 1e13
"""Products of more operations are timed five times only."""
PREPARED = ("headline", "modes", "square")
"""Tables that show operands prepared beforehand too."""
UNFORCED = ("error by k", "gemm_reduce", "data", "float32 data", "double data")
"""Tables that do without our other algorithms by name."""


def describe(row):
    rate = f"{row.gflops / 1e3:8.2f} TF" if row.flops else " " * 11
    error = "" if row.rel_fro is None else f"  relF {row.rel_fro:.1e}"
    return f"  {row.who:16} {row.algorithm:7} {row.seconds * 1e3:9.4f} ms {rate} {row.gib_per_s:8.0f} GiB/s{error}"


def summary(rows):
    """What the rows say together: ours as dispatched against cuBLAS's plain arithmetic, and against the best of it and
    of our own algorithms by name ("auto_over_best": the best time over that of `auto`, at worst, and where)."""
    by_case = {}
    for row in rows:
        if row["compute"] == "auto" and row["op"] == "gemm":
            key = (row["table"], row["case"], row["dtype"], row["label"])
            by_case.setdefault(key, {})[row["who"]] = row["seconds"]
    ratios, worst = [], (float("inf"), "")
    for (table, *names), times in by_case.items():
        ours = times.pop("gemmserve")
        rivals = [seconds for who, seconds in times.items() if who in PLAIN_RIVALS]
        ratios += [min(rivals) / ours] if rivals else []
        same = [seconds for who, seconds in times.items() if who not in {"prepared", "cuBLAS FAST_TF32"}]
        if same and table != "half":
            worst = min(worst, (min(same) / ours, " ".join(filter(None, (table, *names)))))
    mean = statistics.geometric_mean(ratios) if ratios else None
    return {"rival_over_auto": mean, "auto_over_best": worst[0], "auto_over_best_at": worst[1]}


PLAIN_RIVALS = ("vendor BLAS", "cupy", "np.matmul")


def label(case):
    """What tells cases of one size apart."""
    parts = [case.init if case.init != "normal" else "", f"{case.trans_a}{case.trans_b}".replace("NN", "")]
    parts += [case.config.algorithm if case.config else ""]
    parts += [case.layout if case.layout == "planar" else "", "+".join(case.reduce) if case.op != "gemm" else ""]
    return " ".join(part for part in parts if part)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer iterations")
    parser.add_argument("--device", default="auto", help="auto (a GPU), cuda:0, rocm:0, cpu")
    parser.add_argument("--tables", nargs="+", help="only these")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    try:
        target = CpuTarget() if args.device == "cpu" else SuiteTarget(int(args.device.partition(":")[2] or 0))
    except DeviceError as error:
        print(f"no such device: {error} (--device cpu measures NumPy instead)", file=sys.stderr)
        return 2
    iterations = min(args.iterations, 5) if args.quick else args.iterations
    rows, began = [], time.perf_counter()
    for name, cases in suite(args.quick):
        if args.tables and name not in args.tables:
            continue
        if isinstance(target, SuiteTarget):
            target.forced, target.prepared = name not in UNFORCED, name in PREPARED
        for case in cases:
            print(f"{name}: {case.op} {case.label} {case.dtype} {case.compute} {label(case)}", flush=True)
            try:
                repeats = iterations if case.problem().flops() < LONG_FLOPS else min(iterations, 5)
                found = measure(case, target, iterations=repeats)
            except KernelError as error:
                print(f"  not on this device: {error}")
                continue
            print("\n".join(map(describe, found)), flush=True)
            rows += [{"table": name, "label": label(case), **fields(row)} for row in found]
    document = {
        "environment": environment(target.spec) | {"iterations": iterations, "quick": args.quick},
        "summary": summary(rows),
        "rows": rows,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", target.name.lower()).strip("-")
    output = args.output or DOCS / f"kernels-{slug}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{document['summary']}\n{output}, {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
