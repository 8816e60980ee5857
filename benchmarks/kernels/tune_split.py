"""Times the pre-pass that makes planes (planes/split.py), for variants of its geometry, and checks what it writes.

    python benchmarks/kernels/tune_split.py [--only 1024 4096] [--quick] [--budget 70] [--output FILE]
    python benchmarks/kernels/tune_split.py --precompile
    python benchmarks/kernels/tune_split.py --fake

`--precompile` compiles what would run into the kernel cache; `--fake` checks tiny operands on the CPU emulation of the
device language and takes no times. Neither needs a device.

Scales, statistics and planes are compared bit for bit with array operations. Probes leave a stage out (no stores; no
loads) to tell what the rest takes: what they write is wrong, and not looked at. Exits 1 where something is wrong, 2
without a device, 4 where the time was up.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from precompile import compiled
from split_variants import LAYOUTS, PROBES, SHAPES, jobs

from gemmserve_kernels.algorithms.common import verdict
from gemmserve_kernels.algorithms.splits import split
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.device import driver, launch
from gemmserve_kernels.device.compiler import KernelSource, cache_directory, kernel_source
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.problem.errors import DeviceError

SCHEME = "3xfp16"
ROTATED_BYTES = 4e8
MOST_SETS = 24
SAMPLE = 1 << 23
"""Elements of an operand whose planes are compared, about."""
SEED = 1


class Probe(KernelSource):
    """A kernel with a few words of its text replaced; the last of the defines names the probe."""

    @property
    def text(self):
        old, new = PROBES[self.defines[-1][1]]
        text = kernel_source(self.name, dict(self.defines[:-1]))
        if old not in text:
            raise ValueError(f"the kernel no longer says {old!r}")
        return text.replace(old, new)


@contextmanager
def variant(job):
    """Inside, splits.split does as the job says."""
    changes = dict(job.changes)
    geometry_of, plan = split.geometry_of, split.plan

    def changed(k, spec):
        return replace(geometry_of(k, spec), **changes)

    def probing(*arguments):
        found = plan(*arguments)
        defines = (*found.source.defines, ("PROBE", job.probe))
        return replace(found, source=Probe(found.source.name, defines))

    plan.cache_clear()
    try:
        with mock.patch.multiple(split, geometry_of=changed, plan=probing if job.probe else plan):
            yield
    finally:
        plan.cache_clear()


def sides(job, stored):
    """Both operands as vectors along k."""
    return [
        split.SplitSide.of(each, (), trans, left=left, planar=False)
        for each, trans, left in zip(stored, job.layout, (True, False), strict=True)
    ]


def source(job, spec):
    """What `run` would compile."""
    item = np.dtype(job.dtype).itemsize
    stored = [StoredArray(shape, (shape[1] * item, item), np.dtype(job.dtype), 0) for shape in job.shapes]
    with variant(job):
        return split.plan(spec, SCHEME, *sides(job, stored)).source


class Operands:
    """A and B of one job, with the memory for their planes; `words` is that for what is counted."""

    def __init__(self, xp, launcher, job, words):
        rng = xp.random.default_rng(SEED)
        self.arrays = [self._random(rng, shape, job.dtype) for shape in job.shapes]
        if xp is np:
            self.arrays = [launcher.array(x) for x in self.arrays]
        self.words = words
        stored, self.bases = zip(*(StoredArray.of(launcher, x) for x in self.arrays), strict=True)
        self.sides = sides(job, stored)
        self.outputs = [
            split.allocate(
                launcher,
                SCHEME,
                side,
                name,
                verdict.Deficits(self.words, 4 + i * verdict.words(1, max(each.rows for each in self.sides))),
            )
            for i, (side, name) in enumerate(zip(self.sides, "ab", strict=True))
        ]

    @staticmethod
    def _random(rng, shape, dtype):
        x = rng.standard_normal(shape, dtype=np.float32)
        return (x + 1j * rng.standard_normal(shape, dtype=np.float32)).astype(dtype) if dtype == "complex64" else x

    def run(self, launcher):
        """Its words are zero before."""
        split.run(launcher, *self.outputs, *self.bases, launcher.pointer(self.words))

    def poison(self):
        """What is not written shall be noticed."""
        for output in self.outputs:
            output.planes.data.view(np.uint16)[...] = 0x7E01
            output.planes.exponents[...] = 12345


def wrong(xp, operands, job):
    """What the pre-pass wrote wrongly, by name. Of the planes it looks at some rows."""
    found = []
    for i, name in enumerate("ab"):
        x, output = operands.arrays[i], operands.outputs[i]
        x = x.T if (job.layout[i] == "T") == (name == "a") else x
        parts = [x.real, x.imag] if x.dtype.kind == "c" else [x]
        magnitude = xp.abs(parts[0]) if len(parts) == 1 else xp.maximum(*map(xp.abs, parts))
        exponents = xp.frexp(magnitude.max(axis=1))[1].astype(np.int32) - 15
        counts = _counts(xp, [xp.ldexp(xp.ascontiguousarray(part), -exponents[:, None]) for part in parts])
        first, groups = output.deficits.first, verdict.groups(len(x))
        largest = xp.zeros((groups * verdict.GROUP, verdict.GROUP_WORDS), np.int64)
        largest[: len(x)] = counts
        largest = largest.reshape(groups, verdict.GROUP, -1).max(axis=1)
        words = operands.words[first + 1 :][: groups * verdict.GROUP_WORDS].reshape(groups, -1)
        step = max(1, x.size // SAMPLE)
        data = output.planes.data[0][:, ::step].view(np.uint16)
        checks = {
            "exponents": (output.planes.exponents[0] == exponents).all(),
            "doubt": operands.words[first] == verdict.is_doubtful(counts, job.k).sum(),
            "deficits": (words == largest).all(),
            "padding": (data[:, :, job.k :] == 0).all(),
        }
        for p, part in enumerate(parts):
            scaled = xp.ldexp(xp.ascontiguousarray(part[::step]), -exponents[::step, None])
            high = scaled.astype(np.float16)
            low = (scaled - high.astype(np.float32)).astype(np.float16)
            checks[f"high {p}"] = (data[p, :, : job.k] == high.view(np.uint16)).all()
            checks[f"low {p}"] = (data[len(parts) + p, :, : job.k] == low.view(np.uint16)).all()
        found += [f"{name} {what}" for what, right in checks.items() if not bool(right)]
    return found


def _counts(xp, parts):
    """What is counted of vectors along the last axis, as in `common.verdict`; all of them are there."""
    small = [(xp.abs(part.astype(np.float16)) < 256).sum(axis=1) for part in parts]
    lossy = sum(((part != 0) & (xp.abs(part) < 2.0**-4 - 2.0**-16)).sum(axis=1) for part in parts)
    best, worst = (small[0], small[0]) if len(small) == 1 else (xp.minimum(*small), xp.maximum(*small))
    return xp.stack([best, worst, lossy, xp.full_like(lossy, 2 ** len(parts) - 1)], axis=1).astype(np.int64)


def residency(launcher, operands):
    """Return the kernel's registers, spilled bytes, blocks of a multiprocessor, clusters at once; or what failed."""
    try:
        return _residency(launcher, operands)
    except Exception as error:  # the times are good without
        return f"{type(error).__name__}: {error}"


def _residency(launcher, operands):
    import cupy

    plan = split.plan(launcher.spec, SCHEME, *operands.sides)
    kernel = launch._loaded(plan.source, "split", plan.shared, launcher.spec.arch, cupy.cuda.runtime.getDevice())
    occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    clusters = ctypes.c_int(-1)
    config = driver.LaunchConfig.of(plan.grid, plan.geometry.threads, plan.shared)
    address = ctypes.c_void_p(kernel.kernel.ptr)
    code = driver._function("cuOccupancyMaxActiveClusters")(ctypes.byref(clusters), address, ctypes.byref(config))
    driver.check(code, "clusters at once")
    return {
        "registers": kernel.num_regs,
        "local_bytes": kernel.local_size_bytes,
        "blocks_per_sm": occupancy(kernel.kernel.ptr, plan.geometry.threads, plan.shared),
        "clusters_at_once": clusters.value,
        "clusters": plan.grid // plan.cluster,
        "cluster": plan.cluster,
    }


def microseconds(launcher, words, sets, repeats):
    """Return times of a pre-pass, each in a graph that has one for each set: the cache does not hold all of them."""
    import cupy

    cupy.cuda.Device().synchronize()  # the measurement has a stream of its own
    stream = cupy.cuda.Stream(non_blocking=True)
    found = []
    with stream:
        stream.begin_capture()
        words[...] = 0
        for operands in sets:
            operands.run(launcher)
        graph = stream.end_capture()
        for turn in range(2 + repeats):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            if turn >= 2:
                found.append(1e3 * cupy.cuda.get_elapsed_time(start, stop) / len(sets))
    return found


def measure(xp, launcher, job, held, repeats):
    """A row: the job, what is wrong; on a device times, rate (bytes read and written) and residency."""
    words, sets = held
    row = {name: getattr(job, name) for name in ("k", "m", "n", "dtype", "layout", "variant")}
    row |= {"changes": dict(job.changes), "us": None, "tbs": None, "wrong": []}
    try:
        with variant(job):
            sets[0].poison()
            words[...] = 0
            sets[0].run(launcher)
            row["wrong"] = [] if job.probe else wrong(xp, sets[0], job)
            if xp is np:
                return row
            times = microseconds(launcher, words, sets, repeats)
            row |= {"us": statistics.median(times), "fastest_us": min(times)}
            row["tbs"] = job.moved / row["us"] / 1e6
            row["residency"] = residency(launcher, sets[0])
    except Exception as error:  # a variant that cannot run must not cost the others
        row["wrong"].append(f"{type(error).__name__}: {str(error)[:200]}")
    return row


def operand_sets(xp, launcher, job):
    """The words of all sets, and as many sets as are larger than the cache."""
    count = 1 if xp is np else max(1, min(MOST_SETS, round(ROTATED_BYTES / job.moved + 0.5)))
    each = 4 + 2 * verdict.words(1, max(shape[i] for shape in job.shapes for i in (0, 1)))
    words = launcher.zeros((count * each,), np.dtype(np.int32))
    return words, [Operands(xp, launcher, job, words[i * each : (i + 1) * each]) for i in range(count)]


def run(xp, launcher, found, args):
    """Measures, prints, writes; the exit status."""
    began, status = time.perf_counter(), 0
    rows, held, kind = [], None, None
    for job in found:
        if time.perf_counter() - began > args.budget:
            print(f"out of time before {job}", file=sys.stderr)
            status = 4
            break
        if kind != (job.shapes, job.layout, job.dtype):
            held, kind = None, (job.shapes, job.layout, job.dtype)
            if xp is not np:
                xp.get_default_memory_pool().free_all_blocks()
            held = operand_sets(xp, launcher, job)
        row = measure(xp, launcher, job, held, 5 if args.quick else 9)
        rows.append(row)
        if row["wrong"]:
            print(f"{job}: {', '.join(row['wrong'])}", flush=True)
            if xp is not np and not alive(xp):
                break
    print(*table(rows), sep="\n")
    if args.output:
        document = {"environment": environment(None if xp is np else launcher.spec), "rows": rows}
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["wrong"] for row in rows) else status


def alive(cupy):
    """Whether the device still does what it is told: after a fault in a kernel, nothing in the process will."""
    try:
        cupy.cuda.Device().synchronize()
    except Exception:
        return False
    return True


def table(rows):
    """The times as text: a block for each k and dtype, a line for each variant, a column for each layout."""
    blocks = {}
    for row in rows:
        block = blocks.setdefault((row["dtype"], row["m"], row["n"], row["k"]), {})
        block.setdefault(row["variant"], {})[row["layout"]] = row
    lines = []
    for (dtype, m, n, k), variants in blocks.items():
        lines.append(f"{dtype} {m}x{n}x{k}, us (TB/s)".ljust(40) + "".join(f"{layout:>18}" for layout in LAYOUTS))
        for name, by_layout in variants.items():
            cells = "".join(f"{_cell(by_layout.get(layout)):>18}" for layout in LAYOUTS)
            lines.append(f"  {name:38}{cells}")
    return lines


def _cell(row):
    if row is None:
        return ""
    time_of = "right" if row["us"] is None else f"{row['us']:.2f} ({row['tbs']:.2f})"
    return "WRONG" if row["wrong"] else time_of


def precompile(found, processes, *, prune):
    """Compiles every kernel of these jobs; 1 where one does not. `prune`: the cache is to hold nothing else."""
    spec = KNOWN["H200"]
    sources = list({(type(each), each): each for each in (source(job, spec) for job in found)}.values())
    with ProcessPoolExecutor(processes) as pool:
        done = list(pool.map(compiled, [(each, spec.arch) for each in sources]))
    failures = [failure for *_, failure in done if failure]
    if prune:
        for path in set(cache_directory().glob("*.cubin")) - {path for path, *_ in done}:
            path.unlink()
    print(f"{len(done) - len(failures)} of {len(done)} kernels in the cache", *failures, sep="\n")
    return 1 if failures else 0


def machine(*, fake):
    """Array library and launcher of a device, or of its emulation. Raises DeviceError."""
    if fake:
        sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
        from simt_shim import ShimLauncher

        return np, ShimLauncher(KNOWN["H200"])
    DeviceSpec.current()
    import cupy

    return cupy, launch.CupyLauncher.current()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="K", choices=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="5 repetitions in place of 9")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no further variant begins")
    parser.add_argument("--output", type=Path, help="write every figure to this file, as JSON")
    parser.add_argument("--precompile", action="store_true", help="compile only")
    parser.add_argument("--prune", action="store_true", help="delete what is in the cache and not compiled for this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--fake", action="store_true", help="tiny operands on the CPU emulation of the device language")
    args = parser.parse_args(argv)
    found = list(jobs(args.only, tiny=args.fake))
    if args.precompile:
        return precompile(found, args.jobs, prune=args.prune)
    try:
        xp, launcher = machine(fake=args.fake)
    except DeviceError as error:
        print(f"no device: {error}", file=sys.stderr)
        return 2
    return run(xp, launcher, found, args)


if __name__ == "__main__":
    sys.exit(main())
