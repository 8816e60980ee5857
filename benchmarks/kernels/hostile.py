"""`auto` beside the vendor's plain product on data that break methods which are right in norm alone.

    python benchmarks/kernels/hostile.py [--seconds 120] [--extents 4096 8192] [--output FILE]   # measures: JSON
    python benchmarks/kernels/hostile.py --report FILE                                           # JSON -> Markdown

Both take turns on the same operands, timed as in timing.py (the device's share). Shares of elements that left the
planned way (`gemmserve_kernels.read_element_counts`) stand beside the times. Run again, it goes on where it stopped.
Exits 2 where there is no GPU, 4 where the time was up.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import secrets
import sys
import time
from pathlib import Path

import timing
from results import Results, digest, readable

from gemmserve_kernels import DeviceError, DeviceSpec, gemm, read_element_counts
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.kinds import KINDS, operands

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
DTYPES = ("float32", "complex64", "float64", "complex128")
DATA = ("normal", "spikes", "exp-6n", "graded-heavy", "infinite", "sparse-1", "permutation", "gate", "cauchy")
"""Kinds of `bench.kinds`, what has shown most first, and one that is no product to measure errors of."""


def drawn(xp, kind, extent, dtype, seed):
    """A and B, square."""
    if kind != "infinite":
        return operands(xp, kind, extent, extent, extent, dtype, seed)
    a, b = operands(xp, "normal", extent, extent, extent, dtype, seed)
    index = xp.arange(extent)
    a[index, index], b[index, index] = math.inf, math.inf
    return a, b


def measure(xp, clock, kind, extent, dtype, *, rounds, budget):
    """A row."""
    seed = secrets.randbits(32)
    a, b = drawn(xp, kind, extent, dtype, seed)
    out = xp.empty((extent, extent), dtype)
    before = read_element_counts()
    gemm(a, b, out=out)
    counts = read_element_counts().counts() - before.counts()
    runs = {"auto": lambda _: gemm(a, b, out=out), "vendor": lambda _: xp.matmul(a, b, out=out)}
    times = timing.in_turns(clock, runs, rounds=rounds, budget=budget)
    return {
        "kind": kind, "dtype": dtype, "extent": extent, "seed": seed,
        "auto_s": times["auto"].seconds, "vendor_s": times["vendor"].seconds,
        "wide_share": counts.wide_share, "plain_share": counts.fallback_share,
    }  # fmt: skip


def about(kind):
    """What the data are."""
    return KINDS[kind].about if kind in KINDS else "normal, an infinity in every row of A and column of B"


def percent(share):
    return "" if share is None else "0" if share == 0 else "100 %" if share == 1 else f"{100 * share:.2g} %"


def report(document):
    """The Markdown."""
    yield f"# Speed on hostile data, {document['environment']['device']}"
    yield ""
    yield "Written by `benchmarks/kernels/hostile.py` from the JSON of the same name."
    yield ""
    yield from (f"- {name}: {value}" for name, value in document["environment"].items())
    yield ""
    rows = document["rows"]
    ratios = {row["vendor_s"] / row["auto_s"]: row for row in rows}
    least = ratios[min(ratios)]
    yield (
        "`auto` and the vendor's plain product of square matrices take turns in one run; a ratio above 1 says that "
        f"`auto` is the faster one. The smallest of {len(rows)} is {min(ratios):.2f} "
        f"({least['dtype']}, {least['kind']}, {least['extent']}). Shares are those of elements that took the wide way "
        "(three bfloat16 parts), and plain "
        "arithmetic or double in its place."
    )
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        yield from ("", f"## {dtype}", "", "| data | m = n = k | vendor, ms | auto, ms | ratio | wide | plain |")
        yield "|---|---|---|---|---|---|---|"
        for row in rows:
            if row["dtype"] == dtype:
                times = (
                    f"{row['vendor_s'] * 1e3:.3g} | {row['auto_s'] * 1e3:.3g} | {row['vendor_s'] / row['auto_s']:.2f}"
                )
                shares = f"{percent(row['wide_share'])} | {percent(row['plain_share'])}"
                yield f"| {row['kind']} | {row['extent']} | {times} | {shares} |"
    yield from ("", "## Data", "")
    yield from (f"- {kind}: {about(kind)}" for kind in dict.fromkeys(row["kind"] for row in rows))


def write_report(path):
    document = readable(json.loads(path.read_text(encoding="utf-8")))
    target = path.with_suffix(".md")
    target.write_text("\n".join(report(document)) + "\n", encoding="utf-8")
    print(target)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after that time")
    parser.add_argument("--extents", type=int, nargs="+", default=[4096, 8192], help="m = n = k")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--rounds", type=int, default=9, help="turns at most")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of device time of each, about")
    parser.add_argument(
        "--fill-bytes",
        type=int,
        default=timing.GpuClock.FILL_BYTES,
        help="of a write that calls are enqueued behind",
    )
    parser.add_argument("--fresh", action="store_true", help="do not go on where the last run stopped")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report", type=Path, metavar="JSON", help="write the Markdown of that file, and nothing else")
    options = parser.parse_args(argv)
    if options.report:
        write_report(options.report)
        return 0
    try:
        spec = DeviceSpec.of(0)
    except DeviceError as error:
        print(f"no GPU: {error}", file=sys.stderr)
        return 2
    import cupy

    slug = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    path = options.output or DOCS / f"hostile-{slug}.json"
    found = Results(path, environment(spec), digest(), fresh=options.fresh)
    clock, began = timing.GpuClock(cupy, options.fill_bytes), time.perf_counter()
    for extent in options.extents:
        for kind in options.kinds:
            for dtype in options.dtypes:
                key = f"{kind} {dtype} {extent}"
                if found.done(key):
                    continue
                if time.perf_counter() - began > options.seconds:
                    return 4
                row = measure(cupy, clock, kind, extent, dtype, rounds=options.rounds, budget=options.budget)
                found.add(key, [row])
                print(f"{key}: {row['vendor_s'] / row['auto_s']:.3f} of {row['vendor_s'] * 1e3:.3f} ms", flush=True)
                cupy.get_default_memory_pool().free_all_blocks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
