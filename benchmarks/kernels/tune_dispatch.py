"""Measures every algorithm on a grid of shapes: the table that `auto` decides by on this architecture.

    python benchmarks/kernels/tune_dispatch.py [--dtypes complex64 float32 ...] [--seconds 240] [--output FILE]

Writes kernels/gemmserve_kernels/tables/<arch>.json: for each point the dtype, batch, m, n, k and the seconds of each
route, "algorithm:arithmetic". Points are kept from the file that is there unless they are measured again. Times are
medians of device events over operands that rotate through three times the level-2 cache; nothing is checked here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from gemmserve_kernels import GemmConfig, KernelError
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.targets import GpuTarget
from gemmserve_kernels.dispatch import candidates

TABLES = Path(__file__).parents[2] / "kernels" / "gemmserve_kernels" / "tables"
EXTENTS = (64, 256, 1024, 4096)
BATCHES = {
    4: (1, 256, 200_000),
    8: (100_000,),
    16: (1, 256, 50_000),
    32: (1, 256, 20_000),
    33: (16, 16_384),
    64: (16, 4096),
    128: (4, 64, 1024),
    256: (8, 256),
    512: (8, 64),
    1024: (16,),
}
MOST_FLOPS = {"complex64": 2.5e12, "float32": 1.2e12, "complex128": 1.2e12, "float64": 3e11, "float16": 1e12}
BOTH = {"complex64": ("auto", "tf32"), "float32": ("auto", "tf32")}


def grid(dtype):
    """Shapes (batch, m, n, k): all combinations of EXTENTS, large squares, batches of small ones."""
    shapes = [(1, m, n, k) for m, n, k in itertools.product(EXTENTS, repeat=3)]
    shapes += [(1, n, n, n) for n in (128, 384, 512, 768, 1536, 2048, 3072, 6144, 8192)]
    shapes += [(1, 4096, 16, 4096), (1, 16, 4096, 4096), (1, 64, 64, 65536), (1, 8192, 8192, 64)]
    shapes += [(1, 3456, 4096, 4096), (1, 16384, 256, 4096), (1, 256, 16384, 4096)]
    shapes += [(batch, n, n, n) for n, batches in BATCHES.items() for batch in batches]
    unit = 8 if dtype.startswith("complex") else 2
    return [shape for shape in shapes if unit * float(np.prod(shape)) <= MOST_FLOPS[dtype]]


def measure(target, case, buffer, iterations):
    """Seconds by route, "algorithm:arithmetic"."""
    problem = case.problem()
    sets = rotated(target, case, buffer)
    times = {}
    for plan in candidates(problem, target.spec):
        named = replace(case, config=GemmConfig(algorithm=plan.algorithm))
        contender = target.ours(named, sets, plan.algorithm, plan.algorithm)
        contender.run(0)
        found = target.seconds(contender, iterations)
        times[f"{plan.algorithm}:{plan.arithmetic}"] = statistics.median(found)
    return times


def rotated(target, case, buffer):
    """Operand sets as views of one buffer of random numbers, far enough apart to leave the cache."""
    item = np.dtype(case.dtype).itemsize
    flat = buffer.view(case.dtype)
    sizes = {name: int(np.prod(shape)) for name, shape in case.shapes().items()}
    step = -(-sum(sizes.values()) // 64) * 64
    count = max(1, min(32, -(-3 * target.spec.l2_bytes // (step * item)), flat.size // step))
    sets = []
    for i in range(count):
        offset, arrays = i * step, {}
        for name, shape in case.shapes().items():
            arrays[name] = flat[offset : offset + sizes[name]].reshape(shape)
            offset += sizes[name]
        sets.append(arrays)
    return sets


def random_buffer(dtype, nbytes):
    import cupy

    rng = cupy.random.default_rng(0)
    real = {"complex64": np.float32, "complex128": np.float64}.get(dtype, np.dtype(dtype).type)
    wide = np.float64 if real == np.float64 else np.float32
    return rng.standard_normal(nbytes // np.dtype(wide).itemsize, wide).astype(real, copy=False)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(MOST_FLOPS))
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240, help="stop cleanly after that time")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    target = GpuTarget(0)
    output = args.output or TABLES / f"{target.spec.arch}.json"
    source = TABLES / f"{target.spec.arch}.json"
    kept = json.loads(source.read_text(encoding="utf-8"))["points"] if source.is_file() else []
    points = {point_key(point): point for point in kept}
    began = time.perf_counter()
    for dtype in args.dtypes:
        buffer = random_buffer(dtype, 4 << 30)
        for shape in grid(dtype):
            if time.perf_counter() - began > args.seconds:
                print("out of time", file=sys.stderr)
                break
            batch, m, n, k = shape
            seconds = {}
            for compute in BOTH.get(dtype, ("auto",)):
                try:
                    case = Case(batch=batch, m=m, n=n, k=k, dtype=dtype, compute=compute)
                    seconds |= measure(target, case, buffer, args.iterations)
                except KernelError as error:
                    print(f"{dtype} {shape} {compute}: {error}", file=sys.stderr)
            point = {"dtype": dtype, "batch": batch, "m": m, "n": n, "k": k, "seconds": seconds}
            points[point_key(point)] = point
            times = "  ".join(f"{who} {s * 1e6:.1f}" for who, s in seconds.items())
            print(f"{dtype} {batch}x{m}x{n}x{k} us: {times}", flush=True)
        del buffer
        target.release()
    document = {"environment": environment(target.spec), "points": list(points.values())}
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(point) for point in document["points"])
    head = json.dumps(document["environment"])
    output.write_text(f'{{"environment": {head},\n"points": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{output}: {len(points)} points, {time.perf_counter() - began:.0f} s")
    return 0


def point_key(point):
    return tuple(point[name] for name in ("dtype", "batch", "m", "n", "k"))


if __name__ == "__main__":
    sys.exit(main())
