"""Our kernels beside the vendor's BLAS on this machine's GPU, in one run: times, rates, errors; writes JSON.

    python benchmarks/kernels/run.py [--tables headline square ...] [--quick] [--seconds 480] [--output FILE]

Every case's contenders take turns on operands that rotate through three times the level-2 cache; see timing.py for what
`seconds` (the device's) and `wall` (the caller's) are. Results are compared, on the device, with the product in double
precision (64-bit data: exact). Ceilings are measured first. The JSON is written after every case: run again, it goes on
where it stopped, and passes over a case in which it died. With GEMMSERVE_RIVAL_CUBLAS a newer cuBLAS competes, see
newest_blas.py. Exits 2 where there is no GPU (--device cpu measures NumPy) or no such library, 3 where a case failed, 4
where the time was up, 1 where a fault or a case that hung ended it: run again.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import ceilings
import data
import newest_blas
import numpy as np
import timing
from contenders import Contender, contenders, modes
from results import Results, digest
from suite import MODES, label, suite
from summary import summary

from gemmserve_kernels import DeviceError, read_element_counts
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.targets import by_hand, run_case
from gemmserve_kernels.device.spec import DeviceSpec, device_errors
from gemmserve_kernels.problem.errors import KernelError

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
CACHES = 3
"""Operands rotate through that many times the level-2 cache."""
MOST_SETS = 32
PLANES = ("3xfp16", "3xfp16-3m", "1xfp16")


class Gpu:
    """The current CUDA or ROCm device."""

    def __init__(self, ordinal, shrink=1):
        self._shrink = shrink
        self.spec = DeviceSpec.of(ordinal)
        import cupy

        cupy.cuda.Device(ordinal).use()
        self.xp = cupy
        self.clock = timing.GpuClock(cupy, timing.GpuClock.FILL_BYTES // shrink**3)

    def sets(self, arrays):
        """The operands as often as it takes to exceed the cache."""
        nbytes = sum(array.nbytes for array in arrays.values())
        count = min(MOST_SETS, max(1, math.ceil(CACHES * self.spec.l2_bytes / max(1, nbytes))))
        return [arrays] + [{name: array.copy() for name, array in arrays.items()} for _ in range(count - 1)]

    def contenders(self, case, sets, table):
        """Who competes, ours first."""
        if not table.timed:
            return modes(case, sets, self.spec, MODES[case.dtype])
        wanted = {"forced": table.forced, "prepared": table.prepared, "residues": table.residues}
        return contenders(case, sets, self.spec, **wanted)

    def rates(self):
        """Ceilings."""
        return ceilings.measured(self.xp, self.clock, 8192 // self._shrink)

    def poison(self, nbytes):
        """What the pool gives out next for so many bytes is NaN: an element that is not written shows."""
        self.xp.full(max(1, nbytes), 0xFF, self.xp.uint8)

    def release(self):
        """What the last case, or contender, left."""
        self.xp.get_default_memory_pool().free_all_blocks()

    def workspace(self, run):
        """Bytes that a call needs at its peak beyond its operands and results.

        In a pool of its own: in that of all others it may be given what lies free between arrays, and none is counted.
        """
        self.release()
        pool = self.xp.cuda.MemoryPool()
        with self.xp.cuda.using_allocator(pool.malloc):
            results = run(0)
        return max(0, pool.total_bytes() - sum(array.nbytes for array in results.values()))

    def state(self):
        """Clocks, power and temperature now; empty where the driver does not say."""
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            return {
                "sm_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
                "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            }
        except Exception:  # not installed, or a driver that refuses: the figures are only a remark
            return {}


class Cpu:
    """NumPy."""

    xp = np
    clock = timing.CpuClock()

    def __init__(self):
        self.spec = DeviceSpec.cpu()

    def sets(self, arrays):
        """One: whatever the cache."""
        return [arrays]

    def contenders(self, case, sets, table):
        """Ours and `np.matmul`."""
        found = [Contender("gemmserve" if table.timed else "auto", "numpy", "plain", lambda _: run_case(case, sets[0]))]
        if case.layout == "planar":
            return found
        return [*found, Contender("np.matmul", "numpy", "", lambda _: by_hand(np, case, sets[0]))]

    def rates(self):
        """None measured."""
        return {}

    def poison(self, nbytes):
        """Nothing: NumPy's own product writes every element."""

    def release(self):
        """Nothing is kept."""

    def workspace(self, run):
        """Not known."""

    def state(self):
        """Not known."""
        return {}


def measure(machine, table, case, rates, *, rounds, budget):
    """One row for each contender. Raises KernelError where the device cannot run the case at all."""
    problem = case.problem()
    arrays = data.operands(machine.xp, case)
    sets = machine.sets(arrays) if table.timed else [arrays]
    found, failures = checked(machine, case, sets, machine.contenders(case, sets, table), elements=table.elements)
    times = {}
    if table.timed:
        runs = {each.who: each.run for each, *_ in found}
        times = timing.in_turns(machine.clock, runs, rounds=rounds, budget=budget)
    state = machine.state()
    rows = []
    for each, errors, share, workspace, element in found:
        took = times.get(each.who)
        row = {
            "table": table.name, "label": label(case), "case": case.label, "op": case.op, "dtype": case.dtype,
            "compute": case.compute if table.timed else each.who if each.who in MODES[case.dtype] else "auto",
            "init": case.init, "batch": case.batch, "m": case.m, "n": case.n, "k": case.k,
            "who": each.who, "algorithm": each.algorithm, "arithmetic": each.arithmetic,
            "flops": problem.flops(), "nbytes": problem.nbytes(),
            "seconds": took and took.seconds, "fastest": took and took.fastest, "spread": took and took.spread,
            "wall": took and took.wall, "rounds": took and took.rounds, "calls": took and took.calls,
            "rel_fro": errors.rel_fro, "worst_row": errors.worst_row, "rel_real": errors.rel_real,
            "rel_imag": errors.rel_imag, "checked": errors.checked, "fallback": share, "workspace": workspace,
            "element": element and element.modulus, "bits": each.bits and each.bits(), "state": state,
        }  # fmt: skip
        rows.append(row | derived(row, rates))
    return rows, failures


def derived(row, rates):
    """Rates from a row's time: TFLOP/s, bytes a second, shares of the ceiling and of a copy's bandwidth."""
    seconds, ceiling = row["seconds"], ceilings.seconds(row, rates) if rates else None
    if not seconds:
        return {
            "tflops": None,
            "bytes_per_s": None,
            "ceiling_s": ceiling,
            "ceiling_share": None,
            "bandwidth_share": None,
        }
    rate = row["nbytes"] / seconds
    return {
        "tflops": row["flops"] / seconds / 1e12,
        "bytes_per_s": rate,
        "ceiling_s": ceiling,
        "ceiling_share": ceiling and ceiling / seconds,
        "bandwidth_share": rate / rates["copy"] if rates and rates.get("copy") else None,
    }


def checked(machine, case, sets, every, *, elements=False):
    """Each contender's errors, the share of elements that fell back to plain arithmetic (None: it has none), for
    reductions the memory taken beyond operands and results, and the errors of elements where they are asked for.
    """
    oracle = cache(lambda case: (data.Oracle if case.op == "gemm" else data.ReduceOracle)(machine.xp, case, sets[0]))
    sampled = data.Elements(machine.xp, case, sets[0]) if elements and data.Elements.apply(case) else None
    found, failures = [], []
    for each in every:
        machine.release()  # or results would come to lie in what the workspace before was cut from, and hold all of it
        machine.poison(case.batch * case.m * case.n * np.dtype(case.dtype).itemsize)
        try:
            own = each.case or case
            results = each.run(0)
            errors = oracle(own).errors(results["d"] if own.op == "gemm" else results)
            if sampled:
                sampled.take(each.who, results["d"])
            del results
            workspace = machine.workspace(each.run) if case.op == "gemm_reduce" else None
            found.append((each, errors, fallback_share(each), workspace))
        except (KernelError, DeviceError) as error:
            failures.append(f"{each.who}: {type(error).__name__}: {error}")
    worst = sampled.found() if sampled else {}
    return [(*one, worst.get(one[0].who)) for one in found], failures


def fallback_share(contender):
    """The share of elements that products from float16 planes left to plain arithmetic; None for other products."""
    if contender.arithmetic not in PLANES:
        return None
    before = read_element_counts()
    contender.run(0)
    return (read_element_counts().counts() - before.counts()).fallback_share


def describe(row):
    errors = f"relF {row['rel_fro']:.1e}"
    if row["rel_real"] is not None:
        errors += f" re {row['rel_real']:.1e} im {row['rel_imag']:.1e}"
    if row["fallback"]:
        errors += f" fallback {row['fallback']:.1%}"
    if row["element"] is not None:
        errors += f" worst element {row['element']:.2g} u"
    if row["bits"] is not None:
        errors += f" bits {row['bits']}"
    if not row["seconds"]:
        return f"  {row['who']:21} {row['algorithm']:7} {errors}"
    wall = f" wall {row['wall'] * 1e3:9.4f}" if row["wall"] else " " * 15
    share = f" {row['ceiling_share']:4.0%}" if row["ceiling_share"] else " " * 5
    return (
        f"  {row['who']:21} {row['algorithm']:7} {row['seconds'] * 1e3:9.4f} ms{wall} {row['tflops']:7.2f} TF{share}"
        f" {row['bytes_per_s'] / 1e9:6.0f} GB/s ±{row['spread']:.1%}  {errors}"
    )


def shrunk(case, by):
    """The case with every extent divided, at least 4: to try the script."""
    extents = {name: max(4, getattr(case, name) // by) for name in "mnk"}
    return replace(case, batch=max(1, case.batch // by // by), **extents)


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--device", default="auto", help="auto (a GPU), cuda:0, rocm:0, cpu")
    parser.add_argument("--tables", nargs="+", help="only these")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender at most")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of device time of each contender, about")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after that time")
    parser.add_argument("--patience", type=float, default=0, help="end the process where a case takes more seconds")
    parser.add_argument("--fresh", action="store_true", help="do not go on where the last run stopped")
    parser.add_argument("--shrink", type=int, default=1, help="divide every extent, to try the script")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    names = [table.name for table in suite()]
    if unknown := set(args.tables or ()) - set(names):
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return args


def main(argv=None):
    args = parsed(argv)
    try:
        machine = Cpu() if args.device == "cpu" else Gpu(int(args.device.partition(":")[2] or 0), args.shrink)
    except DeviceError as error:
        print(f"no such device: {error} (--device cpu measures NumPy instead)", file=sys.stderr)
        return 2
    try:
        newest = {newest_blas.NAME: newest_blas.version()} if args.device != "cpu" and newest_blas.available() else {}
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", machine.spec.name.lower()).strip("-")
    about = environment(machine.spec) | {"rounds": args.rounds, "quick": args.quick}
    results = Results(args.output or DOCS / f"kernels-{slug}.json", about, digest(), fresh=args.fresh)
    results.document["environment"] |= newest
    began, status = time.perf_counter(), 0
    if results.document.get("rates") is None:
        results.document["rates"] = machine.rates()
        print(f"ceilings: {results.document['rates']}", flush=True)
    failed = results.document.setdefault("failed", {})
    if stopped := results.document.pop("running", None):
        failed[stopped] = "the run stopped in it"
        status = 3
    rounds = min(args.rounds, 5) if args.quick else args.rounds
    for table in suite(args.quick):
        if args.tables and table.name not in args.tables:
            continue
        for whole in table.cases:
            case = shrunk(whole, args.shrink) if args.shrink > 1 else whole
            key = " ".join(
                f"{table.name} {whole.op} {whole.label} {whole.dtype} {whole.compute} {label(whole)}".split()
            )
            if results.done(key) or key in failed:
                continue
            if time.perf_counter() - began > args.seconds:
                results.document["summary"] = summary(results.document["rows"])
                results.save()
                print("out of time", file=sys.stderr)
                return 4
            print(key, flush=True)
            results.document["running"] = key
            results.save()
            with timing.watchdog(args.patience):
                status = max(status, one(machine, table, case, results, key, rounds, args.budget))
            if status and not machine.clock.alive():
                print("the device is lost to this process: run again to go on", file=sys.stderr)
                return 1
    results.document["summary"] = summary(results.document["rows"])
    results.document["failed"] = failed
    results.save()
    for each in results.document["summary"]["targets"]:
        aimed = f"(target {each['target']}, stretch {each['stretch']}, met {each['met']})"
        print(f"{each['name']}: {each['found']} {each['unit']} {aimed}")
    print(f"{results.path}, {time.perf_counter() - began:.0f} s")
    return status


def one(machine, table, case, results, key, rounds, budget):
    """Measures and keeps one case; 3 where something failed in it."""
    failures = []
    try:
        with device_errors() if machine.spec.kind != "cpu" else contextlib.nullcontext():
            rates = results.document["rates"]
            rows, failures = measure(machine, table, case, rates, rounds=rounds, budget=budget)
            machine.release()
    except (KernelError, DeviceError) as error:
        rows, failures = [], [f"{type(error).__name__}: {error}"]
    del results.document["running"]
    for failure in failures:
        print(f"  failed: {failure}", flush=True)
    if failures:
        results.document["failed"][key if not rows else f"{key} (part)"] = "; ".join(failures)
    if rows:
        results.add(key, rows)
        print("\n".join(map(describe, rows)), flush=True)
    else:
        results.save()
    return 3 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
