"""Cost of a call on the host, from calling to having returned, beside CuPy's: the plan is known, the device idle; JSON.

    python benchmarks/kernels/host_cost.py [--rounds 20] [--calls 50] [--rows small wgmma ...] [--output FILE]

A round is `--calls` calls one after another by the clock, then a wait for the device, out of its sight: the queue is
never so long that the driver waits. The rows take turns. What is told is the median of the rounds' means, the least of
them, and how far apart their quartiles are. `parts` are what every call is made of: a launch of an empty kernel through
the driver, a fresh array, and so on. Operands are CuPy's, the result is a fresh array in every row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemmserve_kernels import GemmConfig, KernelError, gemm, gemm_reduce, prepare
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.device import driver
from gemmserve_kernels.device.spec import DeviceSpec, device_errors
from gemmserve_kernels.dispatch.routes import plan
from gemmserve_kernels.problem.errors import DeviceError

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
PERIOD = 25
"""Calls before the clock starts: plans, kernels, memory of the pool."""


@dataclass(frozen=True)
class Row:
    """A call that is measured: `name`, what `case` it is, and who computes it."""

    name: str
    case: Case
    who: str = "gemmserve"


def named(algorithm):
    """A configuration that asks for an algorithm."""
    return GemmConfig(algorithm=algorithm)


def square(n, **options):
    """A case of square matrices."""
    return Case(m=n, n=n, k=n, **options)


def reduction(reduce, **options):
    """A case of gemm_reduce."""
    return Case(op="gemm_reduce", reduce=(reduce,), **options)


def rows():
    """Every route, ours first; then CuPy's."""
    small, tall = square(16, batch=64), {"m": 512, "n": 512, "k": 64, "batch": 4}
    double = {"m": 256, "n": 256, "k": 64, "dtype": "complex128"}
    ours = [
        *(Row(f"auto {n}", square(n)) for n in (64, 256, 384, 512, 1024)),
        Row("vendor", square(256, config=named("vendor"))),
        Row("simt", square(256, config=named("simt"))),
        Row("small", small),
        Row("float16", square(256, dtype="float16")),
        Row("dmma", square(256, dtype="complex128", config=named("dmma"))),
        Row("mma 1xtf32", square(256, compute="1xtf32")),
        Row("wgmma 3xfp16", square(512, compute="3xfp16")),
        Row("wgmma 3xfp16, prepared", square(512, compute="3xfp16"), "prepared"),
        Row("ozaki", square(512, dtype="complex128", compute="ozaki")),
        Row("reduce sums", reduction("sum", **tall)),
        Row("reduce simt", reduction("absmax", compute="fp32", **tall)),
        Row("reduce dmma", reduction("absmax", **double, config=named("dmma"))),
        Row("reduce wgmma", reduction("absmax", compute="3xfp16", **tall)),
        Row("reduce auto", reduction("absmax", **tall)),
    ]
    theirs = [
        Row("CuPy matmul 256", square(256), "cupy"),
        Row("CuPy matmul batch", small, "cupy"),
        Row("CuPy matmul, abs, max", reduction("absmax", **tall), "cupy"),
    ]
    return ours + theirs


def called(xp, row):
    """The function that is timed. Raises KernelError where the device cannot run it."""
    case = row.case
    a, b = (random(xp, shape, case.dtype, seed) for seed, shape in enumerate(list(case.shapes().values())[:2]))
    if row.who == "cupy":
        if case.op == "gemm":
            return lambda: xp.matmul(a, b)
        return lambda: xp.abs(xp.matmul(a, b)).max(axis=-2)
    options = case.options()
    if row.who == "prepared":
        a, b = prepare(a, "a", case.compute), prepare(b, "b", case.compute)
    if case.op == "gemm":
        return lambda: gemm(a, b, **options)
    return lambda: gemm_reduce(a, b, **options | {"reduce": case.reduce[0], "axis": case.axis[0]})


def random(xp, shape, dtype, seed):
    """An array of normal numbers on the device."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return xp.asarray(values.astype(dtype))


def parts(cupy, spec):
    """What calls are made of, by name."""
    found = {
        "a call of a function": lambda: None,
        "runtime.getDevice": cupy.cuda.runtime.getDevice,
        "get_current_stream().ptr": lambda: cupy.cuda.get_current_stream().ptr,
        "a fresh array of 512 KiB": lambda: cupy.ndarray((256, 256), np.complex64),
        "a workspace of 1 MiB": lambda: cupy.cuda.alloc(1 << 20),
    }
    if spec.kind == "cuda":
        found["a launch by the driver"] = empty_launch(cupy)
    return found


def empty_launch(cupy):
    """A launch of a kernel that does nothing, as a planned call makes it."""
    kernel = cupy.RawModule(code='extern "C" __global__ void nothing(unsigned long long) {}').get_function("nothing")
    config = driver.LaunchConfig.of(1, 32, 0)
    word = ctypes.c_uint64(0)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(word))
    launch, places = driver.launcher(), (ctypes.addressof(config), kernel.kernel.ptr, ctypes.addressof(pointers))
    arguments = (*map(driver.argument, places), None)

    def run():
        if code := launch(*arguments):
            driver.check(code, "launch of nothing")
        return config, word, pointers, kernel  # alive as long as this is

    return run


def measured(functions, wait, *, rounds, calls, clock=time.perf_counter):
    """The seconds of one call, by name: those of every round. `wait` waits for the device."""
    found = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(PERIOD):
            function()
        wait()
    names = list(functions)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            function, began = functions[name], clock()
            for _ in range(calls):
                kept = function()  # until the next one is there: results alternate between two places
            found[name].append((clock() - began) / calls)
            del kept
            wait()
    return found


def summarized(times):
    """Median, least, and the distance of the quartiles over the median."""
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    median = statistics.median(times)
    return {"seconds": median, "fastest": min(times), "spread": (quartiles[2] - quartiles[0]) / median}


def report(document):
    """A line for each row, in microseconds."""
    for row in document["rows"] + document["parts"]:
        yield f"{row['name']:28s} {row.get('algorithm', ''):8s} {row['seconds'] * 1e6:8.2f} {row['fastest'] * 1e6:8.2f}"


def main(argv):
    """Measures, prints, writes. 2 where there is no GPU, 3 where a row could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50, help="of one round")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="those whose name has one of these words in it")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    try:
        spec = DeviceSpec.current()
    except DeviceError as error:
        print(f"no GPU: {error}", file=sys.stderr)
        return 2
    import cupy

    wait = cupy.cuda.Device().synchronize
    chosen = [row for row in rows() if not options.rows or any(word in row.name for word in options.rows)]
    functions, about, status = {}, {}, 0
    for row in chosen:
        try:
            with device_errors():
                functions[row.name] = function = called(cupy, row)
                function()
                wait()
        except KernelError as error:
            functions.pop(row.name, None)
            print(f"{row.name}: {error}", file=sys.stderr)
            status = 3
            continue
        about[row.name] = {"who": row.who, "op": row.case.op, "dtype": row.case.dtype}
        if row.who != "cupy":
            about[row.name]["algorithm"] = plan(row.case.problem(), spec).algorithm
    how = {"rounds": options.rounds, "calls": options.calls}
    found = measured(functions, wait, **how)
    made_of = measured(parts(cupy, spec), wait, **how)
    document = {
        "environment": environment(spec),
        **how,
        "rows": [{"name": name, **about[name], **summarized(times)} for name, times in found.items()],
        "parts": [{"name": name, **summarized(times)} for name, times in made_of.items()],
    }
    slug = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    path = options.output or DOCS / f"host-cost-{slug}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(report(document)))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
