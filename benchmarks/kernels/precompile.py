"""Compiles kernels ahead of their use into the kernel cache; needs NVRTC and no device.

    GEMMSERVE_KERNEL_CACHE=DIR python benchmarks/kernels/precompile.py [--suite] [--tables NAME ...] [--table]
        [--sources FILE ...]

`--suite`: what run.py would compile, `--tables` for some of its tables; `--table`: what tune_dispatch.py would;
`--common`: what dispatch chooses for products of common sizes; `--sources`: what is listed in a file, one JSON object
{"name", "defines"} a line. The cache is used by the machine that has the same compiler and these very sources. Exits 1
where something does not compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import tune_dispatch
from suite import MODES, by_residues, suite

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import sources
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.compiler import KernelSource
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.validation import compute_modes

COMMON = (16, 64, 256, 512, 1024, 2048, 4096, 8192)


def of_suite(spec, names=None):
    """Every source of the suite, or of its tables of these names."""
    found = set()
    for table in suite():
        if names and table.name not in names:
            continue
        for case in table.cases:
            for _, named in by_residues(case) if table.residues else ():
                found |= sources(named, spec)
            computes = (case.compute,) if table.timed else MODES[case.dtype]
            for compute in computes:
                found |= sources(replace(case, compute=compute), spec)
    return found


def of_table(spec):
    """Every source of tune_dispatch.py."""
    found = set()
    for dtype in tune_dispatch.MOST_FLOPS:
        for batch, m, n, k in tune_dispatch.grid(dtype):
            for compute in tune_dispatch.COMPUTES.get(dtype, ("auto",)):
                found |= sources(Case(batch=batch, m=m, n=n, k=k, dtype=dtype, compute=compute), spec)
    return found


def of_common(spec):
    """What is chosen for square and batched products of every dtype and mode, plain and conjugate transposed."""
    found = set()
    for dtype in ("float16", "float32", "float64", "complex64", "complex128"):
        for compute in compute_modes(np.dtype(dtype)):
            for n in COMMON:
                for trans in ("NN", "CN", "NC"):
                    case = Case(m=n, n=n, k=n, dtype=dtype, compute=compute, trans_a=trans[0], trans_b=trans[1])
                    found |= sources(case, spec, every=False)
    return found


def listed(path):
    """The sources of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    parsed = (json.loads(line) for line in lines if line)
    return {KernelSource(each["name"], tuple((k, v) for k, v in each["defines"])) for each in parsed}


def compiled(job):
    """The file of one source, or what went wrong."""
    source, arch = job
    try:
        began = time.perf_counter()
        path = compiler.cubin_file(source, arch)
        return path, time.perf_counter() - began, None
    except Exception as error:
        return None, 0.0, f"{source.name} {dict(source.defines)}: {type(error).__name__}: {str(error)[:2000]}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", action="store_true", help="what run.py would compile")
    parser.add_argument("--tables", nargs="+", metavar="NAME", help="of the suite, only these tables")
    parser.add_argument("--table", action="store_true", help="what tune_dispatch.py would compile")
    parser.add_argument("--common", action="store_true", help="what common products would compile")
    parser.add_argument("--sources", type=Path, nargs="+", default=[], metavar="FILE", help="lists of sources")
    parser.add_argument("--device", default="H200", choices=[n for n, s in KNOWN.items() if s.kind == "cuda"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--prune", action="store_true", help="delete what is in the cache and not asked for")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the list of sources, as --sources reads it")
    parser.add_argument("--list", action="store_true", help="compile nothing")
    args = parser.parse_args(argv)
    spec = KNOWN[args.device]
    began = time.perf_counter()
    found = set().union(*(listed(path) for path in args.sources))
    if args.suite or args.tables:
        found |= of_suite(spec, args.tables)
    for wanted, of in ((args.table, of_table), (args.common, of_common)):
        found |= of(spec) if wanted else set()
    print(f"{len(found)} sources for {spec.arch}: {dict(Counter(source.name for source in found))}", flush=True)
    if args.write:
        lines = (json.dumps({"name": each.name, "defines": each.defines}) for each in sorted(found, key=repr))
        args.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if args.list:
        return 0
    with ProcessPoolExecutor(args.jobs) as pool:
        done = list(pool.map(compiled, [(source, spec.arch) for source in sorted(found, key=repr)]))
    failures = [failure for _, _, failure in done if failure]
    print("\n".join(failures), end="\n" if failures else "")
    paths = {path for path, *_ in done if path}
    if args.prune:
        for path in set(compiler.cache_directory().glob("*.cubin")) - paths:
            path.unlink()
    fresh = sum(seconds > 0.05 for _, seconds, _ in done)
    size = sum(path.stat().st_size for path in paths) / 1e6
    print(f"{len(paths)} cubins, {fresh} of them compiled now, {size:.1f} MB in {compiler.cache_directory()}, "
          f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
