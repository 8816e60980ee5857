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

from gemmserve_kernels import DeviceError, GemmConfig
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.formats import fields
from gemmserve_kernels.bench.run import measure
from gemmserve_kernels.bench.targets import CpuTarget, open_target
from gemmserve_kernels.errors import KernelError

SIMT = GemmConfig(algorithm="simt")
DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


def square(*sizes, **options):
    return [Case(m=n, n=n, k=n, **options) for n in sizes]


def suite(quick):
    """(name, cases): the figures of one table each."""
    half = {"dtype": "float16"}
    large = 2048 if quick else 4096
    return [
        ("square", square(256, 512, 1024, 2048, *([] if quick else [4096, 8192]))),
        ("article", [Case(m=3456, n=4096, k=4096)]),
        ("dtypes", [case for dtype in ("float32", "float64", "complex128") for case in square(large, dtype=dtype)]),
        ("half", square(large, **half)),
        ("data", [Case(m=1024, n=1024, k=4096, init=init) for init in ("normal", "positive", "wide", "int")]),
        ("ops", [replace(case, trans_a=t) for case in square(2048) for t in ("T", "C", "R")]),
        ("planar", square(2048, layout="planar")),
        ("thin", [Case(m=4096, n=16, k=4096), Case(m=16, n=4096, k=4096), Case(m=64, n=64, k=65536)]),
        (
            "batched",
            [Case(m=n, n=n, k=n, batch=b) for n, b in ((4, 200_000), (8, 100_000), (16, 50_000), (32, 20_000))]
            + [Case(m=64, n=64, k=64, batch=4096), Case(m=128, n=128, k=128, batch=1024)]
            + [Case(m=512, n=512, k=512, batch=256, **half)],
        ),
        ("tf32", square(large, compute="tf32") + square(large, compute="tf32", dtype="float32")),
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


def run_case(case, target, iterations):
    """Rows of ours as dispatched, ours with the portable kernel, and the rival."""
    rows = measure(case, target, iterations=iterations)
    if case.op == "gemm" and rows[0].algorithm == "vendor" and case.compute == "auto":
        forced = measure(replace(case, config=SIMT), target, iterations=iterations, rival=False)
        ours = rows[0].seconds
        rows[1:1] = [replace(row, who="portable", ratio=row.seconds / ours) for row in forced]
    return rows


def describe(row):
    rate = f"{row.gflops / 1e3:8.2f} TF" if row.flops else " " * 11
    error = "" if row.rel_fro is None else f"  relF {row.rel_fro:.1e}"
    return f"  {row.who:12} {row.algorithm:7} {row.seconds * 1e3:9.4f} ms {rate} {row.gib_per_s:8.0f} GiB/s{error}"


def summary(rows):
    """Geometric mean, over the products, of the rival's time over that of the dispatched and of the portable kernel."""
    ratios = {"gemmserve": [], "portable": []}
    by_case = {}
    for row in rows:
        key = (row["table"], row["case"], row["dtype"], row["compute"], row["label"])
        by_case.setdefault(key, {})[row["who"]] = row["seconds"]
    for times in by_case.values():
        rival = times.get("vendor BLAS") or times.get("cupy") or times.get("np.matmul")
        for who, found in ratios.items():
            if rival and who in times:
                found.append(rival / times[who])
    return {who: statistics.geometric_mean(found) for who, found in ratios.items() if found}


def label(case):
    """What tells cases of one size apart."""
    parts = [case.init if case.init != "normal" else "", f"{case.trans_a}{case.trans_b}".replace("NN", "")]
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
        target = open_target(args.device)
    except DeviceError as error:
        print(f"no such device: {error}", file=sys.stderr)
        return 2
    if isinstance(target, CpuTarget) and args.device != "cpu":
        print("there is no GPU here (--device cpu measures NumPy instead)", file=sys.stderr)
        return 2
    iterations = min(args.iterations, 5) if args.quick else args.iterations
    rows, began = [], time.perf_counter()
    for name, cases in suite(args.quick):
        if args.tables and name not in args.tables:
            continue
        for case in cases:
            print(f"{name}: {case.op} {case.label} {case.dtype} {case.compute} {label(case)}", flush=True)
            try:
                found = run_case(case, target, iterations)
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
