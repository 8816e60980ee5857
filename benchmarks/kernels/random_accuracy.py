"""Worst errors of elements of `auto` on products drawn at random, in shape, dtype and data; writes JSON and Markdown.

    python benchmarks/kernels/random_accuracy.py [--seconds 100] [--processes 16] [--output FILE]
    python benchmarks/kernels/random_accuracy.py --report docs/benchmarks/random-accuracy-nvidia-h200.json

What `accuracy.py` measures at chosen shapes: errors over (|A| |B|) in units of the unit roundoff, moduli and parts each
beside the vendor's own, over what `auto` may be off by. Extents are powers of two with random exponents, most of them
rounded to multiples of 64. Cases beyond the limit are in the JSON with their seeds, and those nearest to it. Exits 2
where there is no GPU (--device cpu measures NumPy).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import queue
import random
import re
import secrets
import sys
import time
from pathlib import Path

import numpy as np
from accuracy import DTYPES, alive, opened
from accuracy_report import UNITS, number
from report import table_lines
from results import digest, readable, writable

from gemmserve_kernels import DeviceError
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.grades import grades
from gemmserve_kernels.bench.kinds import BY_WEIGHT, most
from gemmserve_kernels.device.spec import device_errors
from gemmserve_kernels.dispatch.routes import plan_gemm
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
MOST = 12.0
"""Binary logarithm of m and n at most; they are 16 at least."""
DEEPEST = 14.0
"""The same of k."""
PRODUCTS = 12_000_000_000
ELEMENTS = 40_000_000
"""m n k, and elements of both operands together, at most."""
WHOLE = 0.7
"""Share of the extents that are multiples of 64, or of 8 where they are less."""
NEAR = 0.85
"""Share of the limit from which on a case is kept."""
LOOK_S = 5.0
"""Seconds after which processes that say nothing are looked at."""
POOL_BYTES = 6 << 30
"""Memory of freed arrays that each process keeps."""


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto (a GPU), cuda:0, rocm:0, cpu")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=BY_WEIGHT, default=list(BY_WEIGHT), metavar="KIND")
    parser.add_argument("--shrink", type=int, default=1, help="divide every extent, to try the script")
    parser.add_argument("--seed", type=int, help="of shapes, dtypes, kinds and data; by default a new one")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report", type=Path, help="write the Markdown beside that JSON again, and nothing else")
    return parser.parse_args(argv)


def extent(draws, most_bits):
    """Return m, n or k."""
    found = int(2 ** draws.uniform(4, most_bits))
    if draws.random() >= WHOLE:
        return found
    return found // 64 * 64 if found >= 64 else found // 8 * 8


def drawn(draws, args):
    """Return a case: dtype, kind, m, n, k and the seed of the data."""
    while True:
        m, n, k = (extent(draws, bits) for bits in (MOST, MOST, DEEPEST))
        if m * n * k <= PRODUCTS and (m + n) * k <= ELEMENTS:
            break
    m, n, k = (max(4, each // args.shrink) for each in (m, n, k))
    kind, dtype = draws.choice(args.kinds), draws.choice(args.dtypes)
    return {"dtype": dtype, "kind": kind, "m": m, "n": n, "k": k, "seed": draws.getrandbits(32)}


def measured(xp, spec, case):
    """Return the case with its errors, `ratio`: the largest share of a limit, and the algorithm that had it."""
    asked = {name: case[name] for name in ("m", "n", "k", "dtype", "seed")}
    ((row,), _) = grades(xp, case["kind"], modes=("auto",), **asked)
    errors = {name: [getattr(row, name), getattr(row, other)] for name, other in (
        ("error", "vendor"), ("real", "vendor_real"), ("imag", "vendor_imag"),
    )}  # fmt: skip
    ratio = max(found / most(case["kind"], case["dtype"], vendor) for found, vendor in errors.values())
    a, b = (
        Operand.contiguous(shape, np.dtype(case["dtype"])) for shape in ((case["m"], case["k"]), (case["k"], case["n"]))
    )
    plan = plan_gemm(GemmProblem.build(a, b, None), spec)
    rounded = {name: [float(f"{value:.4g}") for value in pair] for name, pair in errors.items()}
    return case | rounded | {"ratio": float(f"{ratio:.4g}"), "by": f"{plan.algorithm}:{plan.arithmetic}"}


def work(number, seed, args, found):
    """Measure until the time is up or the device is lost, in a process of its own; then None goes into `found`."""
    xp, spec = opened(args.device)
    draws = random.Random(f"{seed} {number}")
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        case = drawn(draws, args)
        try:
            with device_errors() if spec.kind != "cpu" else contextlib.nullcontext():
                found.put(measured(xp, spec, case))
        except (KernelError, DeviceError) as error:
            found.put(case | {"failed": f"{type(error).__name__}: {error}"})
            if not alive(xp):
                break
        if xp is not np and (pool := xp.get_default_memory_pool()).total_bytes() > POOL_BYTES:
            pool.free_all_blocks()
    found.put(None)


def answers(seed, args, target=work):
    """Yield every case that the processes measure; a case that failed for each of them that ended before its time."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=target, args=(each, seed, args, found)) for each in range(args.processes)]
    for process in processes:
        process.start()
    left = len(processes)
    while left:
        running = any(process.is_alive() for process in processes)
        try:
            case = found.get(timeout=LOOK_S)
        except queue.Empty:
            if running:
                continue
            break
        left -= case is None
        if case is not None:
            yield case
    for process in processes:
        process.join()
        if process.exitcode:
            yield {"failed": f"a process ended by {process.exitcode}"}


def summed(cases, document):
    """Put into the document what its page needs: counts by dtype and algorithm, cases near their limit or beyond it."""
    groups = {}
    for case in cases:
        if "failed" in case:
            document["failed"].append(case)
            continue
        group = groups.setdefault((case["dtype"], case["by"]), {"cases": 0, "beyond": 0, "worst": 0.0})
        group["cases"] += 1
        group["beyond"] += not case["ratio"] <= 1
        group["worst"] = max(group["worst"], case["ratio"])
        if not case["ratio"] <= NEAR:
            document["near"].append(case)
    document["near"].sort(key=lambda case: -case["ratio"])
    order = sorted(groups, key=lambda key: (DTYPES.index(key[0]), key[1]))
    document["groups"] = [{"dtype": key[0], "by": key[1], **groups[key]} for key in order]
    document["cases"] = sum(group["cases"] for group in groups.values())
    document["beyond"] = sum(group["beyond"] for group in groups.values())
    return document


def markdown(document):
    """Return the page."""
    lines = [f"# Accuracy of products drawn at random on {document['environment']['device']}, element by element", ""]
    lines += ["Written by `benchmarks/kernels/random_accuracy.py` from its JSON.", ""]
    lines += [f"- {name}: {value}" for name, value in document["environment"].items()]
    said = (
        f"{document['cases']} products, their shapes, dtypes and {document['kinds']} kinds of data drawn at random: "
        f"m and n from 16 to {2**MOST:.0f}, k from 16 to {2**DEEPEST:.0f}, spread evenly by their logarithms, "
        f"{PRODUCTS:.1e} multiplications at most. **{document['beyond']} are beyond the limit of `auto`**, "
        "max(4 u, twice the vendor's own error) but for kinds with a bound of their own, by moduli or by a part. "
        "Errors are over (|A| |B|)."
    )
    lines += ["", said, ""]
    columns = ("dtype", "by", "cases", "beyond the limit", "worst over its limit")
    names = ("dtype", "by", "cases", "beyond")
    counts = ([*(str(each[name]) for name in names), number(each["worst"])] for each in document["groups"])
    lines += table_lines(columns, counts)
    if document["near"]:
        units = ", ".join(f"{unit} ({name})" for name, unit in UNITS.items())
        lines += ["", f"Cases above {NEAR} of their limit; errors are ours (the vendor's), in units of {units}:", ""]
        errors = ("modulus", "real part", "imaginary part")
        columns = ("over its limit", "by", "dtype", "data", "m x n x k", *errors, "seed")
        lines += table_lines(columns, map(cells, document["near"]))
    if document["failed"]:
        lines += ["", "## Failed", "", *(f"- {case}" for case in document["failed"])]
    return "\n".join([*lines, ""])


def cells(case):
    """Return a line of the table of cases."""
    errors = (f"{number(case[name][0])} ({number(case[name][1])})" for name in ("error", "real", "imag"))
    shape = f"{case['m']} x {case['n']} x {case['k']}"
    return [number(case["ratio"]), case["by"], case["dtype"], case["kind"], shape, *errors, str(case["seed"])]


def main(argv=None):
    args = parsed(argv)
    if args.report:
        document = readable(json.loads(args.report.read_text(encoding="utf-8")))
        args.report.with_suffix(".md").write_text(markdown(document), encoding="utf-8")
        return 0
    try:
        _, spec = opened(args.device)
    except DeviceError as error:
        print(f"no such device: {error} (--device cpu measures NumPy instead)", file=sys.stderr)
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    output = args.output or DOCS / f"random-accuracy-{slug}.json"
    seed = secrets.randbits(32) if args.seed is None else args.seed
    document = {
        "environment": environment(spec), "sources": digest(), "seed": seed, "seconds": args.seconds,
        "processes": args.processes, "kinds": len(args.kinds), "near": [], "failed": [],
    }  # fmt: skip
    summed(answers(seed, args), document)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(writable(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(markdown(document), encoding="utf-8")
    print(
        f"{output}: {document['cases']} cases, {document['beyond']} beyond the limit, {len(document['failed'])} failed"
    )
    for case in document["near"]:
        print(" ".join(cells(case)))
    return 3 if document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
