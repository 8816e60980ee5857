"""Measures every algorithm on a grid of shapes: the table that `auto` decides by on this architecture.

    python benchmarks/kernels/tune_dispatch.py [--dtypes complex64 float32 ...] [--seconds 240] [--output FILE]
    python benchmarks/kernels/tune_dispatch.py --routes dmma:plain [--dtypes ...] [--output FILE]
    python benchmarks/kernels/tune_dispatch.py --check [--output FILE]

Writes kernels/gemmserve_kernels/dispatch/tables/<arch>.json, after every shape: each point's dtype, batch, m, n, k, and
of each route, "algorithm:arithmetic", the device's seconds and, for short products, the caller's (see timing.py).
"elsewhere" names the device, of the same architecture, on which a route was measured that was not measured on this one.
Points are kept from the file that is there unless they are measured again (--missing: measures only those that are not
there; --shapes: others than the grid's; --routes: those routes alone, added to the points, as for a new algorithm).
`--check` needs no device: it leaves out one point after another and says how much slower than the best route the one
is that the others would have chosen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import timing
from suite import suite

from gemmserve_kernels import GemmConfig, KernelError
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.targets import run_case
from gemmserve_kernels.device.spec import DeviceSpec, device_errors
from gemmserve_kernels.dispatch.estimate import Table, call_seconds, measured_device, predicted, shape_of
from gemmserve_kernels.dispatch.routes import candidates
from gemmserve_kernels.problem.errors import DeviceError

TABLES = Path(__file__).parents[2] / "kernels" / "gemmserve_kernels" / "dispatch" / "tables"
EXTENTS = ((64, 256, 1024, 4096), (128, 512, 2048))
"""All combinations of the first, and of the second between them."""
SQUARES = (96, 128, 192, 384, 512, 768, 1536, 2048, 3072, 6144, 8192)
BATCHES = {
    4: (1, 256, 200_000),
    8: (4096, 100_000),
    16: (1, 256, 50_000),
    32: (1, 256, 20_000),
    33: (16, 16_384),
    48: (256, 8192),
    64: (16, 4096),
    96: (64,),
    128: (4, 64, 1024),
    256: (8, 256),
    512: (8, 64),
    1024: (16,),
}
MOST_FLOPS = {"complex64": 5e12, "float32": 1.2e12, "complex128": 4.5e12, "float64": 3e11, "float16": 1e12}
COMPUTES = {"complex64": ("auto", "tf32", "1xtf32"), "float32": ("auto", "tf32", "1xtf32")}
"""`auto` has every route of its dtype; the routes of tf32, of which one has a mode of its own too."""
BUFFER_BYTES = 4 << 30
LEAST_BYTES = 16 << 20
CACHES, MOST_SETS = 3, 32


def grid(dtype):
    """Shapes (batch, m, n, k): those of the suite, all combinations of EXTENTS, squares, batches of small ones."""
    cases = [case for table in suite() for case in table.cases if case.op == "gemm" and case.dtype == dtype]
    shapes = [(case.batch, case.m, case.n, case.k) for case in cases]
    shapes += [(1, *extents) for every in EXTENTS for extents in itertools.product(every, repeat=3)]
    shapes += [(1, n, n, n) for n in SQUARES]
    shapes += [(batch, n, n, n) for n, batches in BATCHES.items() for batch in batches]
    unit = 8 if dtype.startswith("complex") else 2
    return [shape for shape in dict.fromkeys(shapes) if unit * float(np.prod(shape)) <= MOST_FLOPS[dtype]]


def routes(case, spec):
    """By "algorithm:arithmetic", the case that forces that route. Where an algorithm has several, none of them can be
    forced by its name, and they are left out."""
    plans = candidates(case.problem(), spec)
    names = [plan.algorithm for plan in plans]
    return {
        f"{plan.algorithm}:{plan.arithmetic}": replace(case, config=GemmConfig(algorithm=plan.algorithm))
        for plan in plans
        if names.count(plan.algorithm) == 1
    }


def measure(clock, case, spec, buffer, *, rounds, budget, only=None):
    """(device seconds, wall seconds) by route, of those named `only` if any are."""
    sets = rotated(spec, case, buffer)
    runs = {
        route: lambda i, forced=forced: run_case(forced, sets[i % len(sets)])
        for route, forced in routes(case, spec).items()
        if only is None or route in only
    }
    if not runs:
        return {}, {}
    times = timing.in_turns(clock, runs, rounds=rounds, budget=budget)
    walls = {route: found.wall for route, found in times.items() if found.wall}
    return {route: found.seconds for route, found in times.items()}, walls


def rotated(spec, case, buffer):
    """Operand sets as views of one buffer of random numbers, far enough apart to leave the cache."""
    item = np.dtype(case.dtype).itemsize
    flat = buffer.view(case.dtype)
    sizes = {name: int(np.prod(shape)) for name, shape in case.shapes().items()}
    step = sum(-(-size // 64) * 64 for size in sizes.values())
    count = max(1, min(MOST_SETS, -(-CACHES * spec.l2_bytes // (step * item)), flat.size // step))
    sets = []
    for i in range(count):
        offset, arrays = i * step, {}
        for name, shape in case.shapes().items():
            arrays[name] = flat[offset : offset + sizes[name]].reshape(shape)
            offset += -(-sizes[name] // 64) * 64
        sets.append(arrays)
    return sets


def random_buffer(cupy, dtype, nbytes):
    rng = cupy.random.default_rng(0)
    real = {"complex64": np.float32, "complex128": np.float64}.get(dtype, np.dtype(dtype).type)
    wide = np.float64 if real == np.float64 else np.float32
    return rng.standard_normal(nbytes // np.dtype(wide).itemsize, wide).astype(real, copy=False)


def parsed(text):
    """A shape (batch, m, n, k) from "512x64x2048" or "16x512x64x2048"."""
    extents = [int(extent) for extent in text.split("x")]
    if len(extents) not in {3, 4} or min(extents) < 1:
        raise argparse.ArgumentTypeError(f"a shape is written 512x64x2048 or 16x512x64x2048, not {text!r}")
    return (1,) * (4 - len(extents)) + tuple(extents)


def point_key(point):
    return tuple(point[name] for name in ("dtype", "batch", "m", "n", "k"))


def write(path, about, points):
    """One point a line; under another name first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(point) for point in points)
    temporary = path.with_suffix(".part")
    temporary.write_text(f'{{"environment": {json.dumps(about)},\n"points": [\n{lines}\n]}}\n', encoding="utf-8")
    temporary.replace(path)


def tune(args, spec):
    """Measures; 0, 3 where a route failed, 4 where the time was up, 1 where the device was lost (--missing goes on)."""
    import cupy

    began, status = time.perf_counter(), 0
    clock = timing.GpuClock(cupy, timing.GpuClock.FILL_BYTES // args.shrink**3)
    output = args.output or TABLES / f"{spec.arch}.json"
    kept = json.loads(output.read_text(encoding="utf-8"))["points"] if output.is_file() else []
    points = {point_key(point): point for point in kept}
    about = environment(spec)
    for dtype in args.dtypes:
        buffer = random_buffer(cupy, dtype, max(LEAST_BYTES, BUFFER_BYTES // args.shrink**3))
        for shape in args.shapes or grid(dtype):
            batch, m, n, k = (max(1, extent // args.shrink) for extent in shape)
            key = (dtype, batch, m, n, k)
            known = points.get(key, {"seconds": {}, "wall": {}})
            if args.missing and key in points and not set(args.routes or ()) - set(known["seconds"]):
                continue
            if time.perf_counter() - began > args.seconds:
                print("out of time", file=sys.stderr)
                return 4
            point = {"dtype": dtype, "batch": batch, "m": m, "n": n, "k": k, "seconds": {}, "wall": {}}
            if args.routes:
                point |= {"seconds": dict(known["seconds"]), "wall": dict(known["wall"])}
            if key not in points:  # should the process end here, --missing passes over the shape
                write(output, about, [*points.values(), point])
            measured = set()
            for compute in COMPUTES.get(dtype, ("auto",)):
                case = Case(batch=batch, m=m, n=n, k=k, dtype=dtype, compute=compute)
                try:
                    with timing.watchdog(args.patience), device_errors():
                        how = {"rounds": args.rounds, "budget": args.budget, "only": args.routes}
                        found = measure(clock, case, spec, buffer, **how)
                except (KernelError, DeviceError) as error:
                    print(f"{dtype} {batch}x{m}x{n}x{k} {compute}: {type(error).__name__}: {error}", file=sys.stderr)
                    status = 3
                    if not clock.alive():
                        return 1
                    continue
                point["seconds"] |= found[0]
                point["wall"] |= found[1]
                measured |= set(found[0])
            elsewhere = {route: device for route, device in known.get("elsewhere", {}).items()
                         if route in point["seconds"] and route not in measured}  # fmt: skip
            points[key] = point | ({"elsewhere": elsewhere} if elsewhere else {})
            write(output, about, points.values())
            cupy.get_default_memory_pool().free_all_blocks()
            print(f"{dtype} {batch}x{m}x{n}x{k} us: {shown(point)}", flush=True)
        del buffer
        cupy.get_default_memory_pool().free_all_blocks()
    print(f"{output}: {len(points)} points, {time.perf_counter() - began:.0f} s")
    return status


def shown(point):
    walls = {route: f"/{seconds * 1e6:.1f}" for route, seconds in point["wall"].items()}
    return "  ".join(f"{route} {s * 1e6:.1f}{walls.get(route, '')}" for route, s in point["seconds"].items())


@dataclass(frozen=True)
class LeftOut:
    """A point, the route that the others would choose for it, the best one there, and the best one's time over it."""

    dtype: str
    mode: str
    shape: tuple
    chosen: str
    best: str
    ratio: float


MODES = {
    "auto": ("plain", "3xfp16", "fp16", "ozaki"),
    "tf32": ("tf32", "1xfp16", "1xtf32"),
}
"""The arithmetic that routes of a mode do."""


def left_out(measured, document):
    """For every point of `document`, whose table is `measured`, what the table would choose without it. Times are the
    device's, or the host's where those are longer."""
    spec = measured_device(document)

    def called(who, seconds):
        return max(seconds, call_seconds(spec, who.split(":")[0]))

    found = []
    for point in document["points"]:
        shape, dtype = shape_of(point), point["dtype"]
        for mode, arithmetics in MODES.items():
            times = {who: s for who, s in point["seconds"].items() if who.split(":")[1] in arithmetics}
            if len(times) < 2:
                continue
            guesses = {who: predicted(spec, measured, (*who.split(":"), dtype), shape, without=shape) for who in times}
            guesses, times = ({who: called(who, s) for who, s in each.items()} for each in (guesses, times))
            chosen, best = min(guesses, key=guesses.get), min(times, key=times.get)
            found.append(LeftOut(dtype, mode, shape, chosen, best, times[best] / times[chosen]))
    return found


def check(path, worst):
    """Prints what leaving out each point costs, by dtype and mode."""
    document = json.loads(path.read_text(encoding="utf-8"))
    found = left_out(Table.of(document), document)
    for kind in dict.fromkeys((each.dtype, each.mode) for each in found):
        ratios = sorted(each.ratio for each in found if (each.dtype, each.mode) == kind)
        good = sum(ratio >= 0.97 for ratio in ratios)
        print(f"{' '.join(kind)}: {good} of {len(ratios)} within 0.97 of the best, worst {ratios[0]:.2f}")
    for each in sorted(found, key=lambda each: each.ratio)[:worst]:
        print(f"  {each.ratio:.2f} {each.dtype} {each.mode} {each.shape}: {each.chosen} for {each.best}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(MOST_FLOPS), choices=list(MOST_FLOPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.03, help="seconds of device time of each route, about")
    parser.add_argument("--seconds", type=float, default=240, help="stop cleanly after that time")
    parser.add_argument("--patience", type=float, default=0, help="end the process where a mode takes more seconds")
    parser.add_argument("--shapes", nargs="+", type=parsed, metavar="[Bx]MxNxK", help="these instead of the grid")
    parser.add_argument("--routes", nargs="+", metavar="ALGORITHM:ARITHMETIC", help="these alone, added to the points")
    parser.add_argument("--missing", action="store_true", help="only shapes that the table lacks")
    parser.add_argument("--shrink", type=int, default=1, help="divide every extent, to try the script")
    parser.add_argument(
        "--check", action="store_true", help="measure nothing: how good is the table between its points"
    )
    parser.add_argument("--worst", type=int, default=20, help="points that --check shows")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.check:
        check(args.output or TABLES / "sm_90a.json", args.worst)
        return 0
    try:
        spec = DeviceSpec.current()
    except DeviceError as error:
        print(f"no device: {error}", file=sys.stderr)
        return 2
    return tune(args, spec)


if __name__ == "__main__":
    sys.exit(main())
