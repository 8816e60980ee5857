"""Times gemm_reduce with several tiles, whole and on prepared operands: the difference is the pre-pass.

    python benchmarks/kernels/tune_reduce.py [--only 1 3] [--repeats 5] [--json FILE]

`--compile` only compiles what would run, into the kernel cache, and needs no device. The first tile of a case is what
is chosen; errors are those of all outputs of the last matrix.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from tune_wgmma import SEED, _compile, _milliseconds, _random

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import sources
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

CASES = [
    ("complex64", 16, 2048, 2048, 1024, "absmax"),
    ("complex64", 64, 1024, 1024, 256, "absmax"),
    ("complex64", 256, 512, 512, 64, "absmax"),
    ("float32", 64, 1024, 1024, 256, "max"),
    ("float32", 256, 512, 512, 64, "max"),
]
"""dtype, batch, m, n, k, reduction; all over m."""


def configs(is_complex):
    """What to ask of the tile, nothing first. Where k is promoted is not asked: it would change the result's bits."""
    yield None
    for (block_m, block_n), block_k, cluster in itertools.product(((128, 128), (128, 64), (64, 64)), (32, 64), (1, 2)):
        if cluster == 1 or block_n == 128:
            stages = 3 if is_complex and block_k == 32 else None
            yield GemmConfig(
                algorithm="wgmma", block_m=block_m, block_n=block_n, block_k=block_k, cluster=cluster, stages=stages
            )


def cases(only):
    """The cases of those numbers (from 1 on), or all."""
    for number, (dtype, batch, m, n, k, name) in enumerate(CASES, 1):
        if not only or number in only:
            yield Case(op="gemm_reduce", batch=batch, m=m, n=n, k=k, dtype=dtype, reduce=(name,))


def measure(case, repeats):
    """A row for each tile that can run: milliseconds whole and prepared, relative error."""
    import cupy

    import gemmserve_kernels as gk

    rng = cupy.random.default_rng(SEED)
    a, b = (_random(rng, (case.batch, *shape), case.dtype) for shape in ((case.m, case.k), (case.k, case.n)))
    (name,) = case.reduce
    wide = cupy.complex128 if a.dtype.kind == "c" else cupy.float64
    product = a[-1].astype(wide) @ b[-1].astype(wide)
    expected = (abs(product) if name.startswith("abs") else product).max(axis=0).get()
    prepared = gk.prepare(a, "a"), gk.prepare(b, "b")
    for config in configs(a.dtype.kind == "c"):

        def run(left, right, config=config):
            return gk.gemm_reduce(left, right, reduce=name, axis="m", config=config)

        try:
            found = run(a, b)
        except ConfigInfeasible:
            continue
        found = (found if hasattr(found, "get") else found[name])[-1].get()
        yield {
            "case": case.label,
            "dtype": case.dtype,
            "config": None if config is None else {k: v for k, v in vars(config).items() if v is not None},
            "ms": _milliseconds(lambda: run(a, b), repeats),
            "prepared_ms": _milliseconds(lambda: run(*prepared), repeats),
            "error": float(np.linalg.norm(found - expected) / np.linalg.norm(expected)),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", type=int, default=[], help="numbers of cases, from 1 on")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--compile", action="store_true", help="compile only")
    arguments = parser.parse_args()
    if arguments.compile:
        wanted = set()
        for case in cases(arguments.only):
            for config in configs(np.dtype(case.dtype).kind == "c"):
                wanted |= sources(replace(case, config=config), KNOWN["H200"])
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compile, sorted(wanted, key=lambda source: (source.name, source.defines))))
        print(f"{len(wanted)} kernels compiled", file=sys.stderr)
        return
    rows = []
    for case in cases(arguments.only):
        for row in measure(case, arguments.repeats):
            rows.append(row)
            print(
                f"{row['dtype']} {row['case']}: {row['ms'] * 1e3:.0f} us, prepared {row['prepared_ms'] * 1e3:.0f} us,"
                f" error {row['error']:.1e}  {row['config'] or 'chosen'}",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
