"""Worst errors of elements of every mode beside the vendor's, by kind of data and k, on this machine; writes JSON.

    python benchmarks/kernels/accuracy.py [--seconds 480] [--dtypes complex64 ...] [--kinds exp-6n ...] [--output FILE]

In units of the unit roundoff, over (|A| |B|) element by element, against a reference made on the device (see
`gemmserve_kernels.bench.elementwise`); data are drawn anew, and each row has its seed. `auto` comes first, over every
dtype, kind and k, then the modes by name; kinds that have shown most come first. The JSON is written every few seconds:
run again, it goes on where it stopped, and passes over a case in which it died. A mode that the device lacks is passed
over, and said to be. Exits 2 where there is no GPU (--device cpu measures NumPy), 3 where a case failed, 4 where the
time was up, 1 where a fault ended it: run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import secrets
import sys
import time
from pathlib import Path

import numpy as np
from results import Results, digest, writable

from gemmserve_kernels import DeviceError, DeviceSpec
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.grades import MODES, grades
from gemmserve_kernels.bench.kinds import BY_WEIGHT
from gemmserve_kernels.device.spec import device_errors
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_kernels.problem.operand import real_dtype

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
DEPTHS = (256, 4096, 64, 1024, 16, 16384)
"""k, what shows most first."""
DTYPES = ("float32", "complex64", "float64", "complex128")
EXTENTS = {4: ((256, 8192), (1024, 4096), (16384, 2048)), 8: ((64, 8192), (1024, 4096), (16384, 1024))}
"""By bytes of a real number: m = n for k up to a limit. Many rows make the trap; what is deep is dear."""
SHAPES = {"dominant-term": ((1024, 1024, 64), (64, 8192, 8192))}
"""(m, n, k) of 32-bit data of that kind beside those: products that have tiles, and sums, of other lengths."""

KEPT = ("dtype", "kind", "m", "n", "k", "seed", "mode", "source")
ERRORS = ("error", "real", "imag", "vendor", "vendor_real", "vendor_imag")
"""Fields of a row that the JSON keeps, errors to four digits; the report derives the rest."""
SAVE_S = 5.0
POOL_BYTES = 32 << 30
"""Share of the device's memory that freed arrays of other shapes may occupy."""


class Rows(Results):
    """The document with a row on each line, written every few seconds; the case at hand in a file of its own."""

    def __init__(self, path, environment, sources, *, fresh=False):
        super().__init__(path, environment, sources, fresh=fresh)
        self._saved = time.perf_counter()
        self._at_hand = path.with_suffix(".running")
        path.parent.mkdir(parents=True, exist_ok=True)

    def stopped_in(self):
        """The case in which the last run died, or None."""
        return self._at_hand.read_text(encoding="utf-8") if self._at_hand.is_file() else None

    def begin(self, key):
        self._at_hand.write_text(key, encoding="utf-8")

    def end(self, key, rows):
        """Keeps the rows of a case; of none, where it failed."""
        self.document["rows"] += rows
        if rows:
            self.document["done"].append(key)
        if time.perf_counter() - self._saved > SAVE_S:
            self.save()
        self._at_hand.unlink(missing_ok=True)

    def save(self):
        rest = {name: value for name, value in self.document.items() if name != "rows"}
        head = json.dumps(writable(rest), indent=1, allow_nan=False)[:-2]
        rows = ",\n".join(json.dumps(writable(row), allow_nan=False) for row in self.document["rows"])
        temporary = self.path.with_suffix(".part")
        temporary.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")
        temporary.replace(self.path)
        self._saved = time.perf_counter()


def kept(row):
    """A row of the JSON."""
    return {name: getattr(row, name) for name in KEPT} | {name: float(f"{getattr(row, name):.4g}") for name in ERRORS}


def extent(dtype, k):
    """m and n."""
    bytes_of_real = 4 if dtype in {"float32", "complex64"} else 8
    return next(size for most, size in EXTENTS[bytes_of_real] if k <= most)


def cases(dtypes, kinds, depths):
    """(key, what, dtype, kind, (m, n, k)): `auto` of all, then the other modes of all."""
    for what in ("auto", "named"):
        for k in depths:
            for dtype in dtypes:
                for kind in kinds:
                    yield f"{what} {dtype} {kind} {k}", what, dtype, kind, (extent(dtype, k), extent(dtype, k), k)
        for kind in kinds:
            for dtype in dtypes:
                for shape in SHAPES.get(kind, ()) if real_dtype(np.dtype(dtype)).itemsize == 4 else ():
                    yield f"{what} {dtype} {kind} {'x'.join(map(str, shape))}", what, dtype, kind, shape


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto (a GPU), cuda:0, rocm:0, cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after that time")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=BY_WEIGHT, default=list(BY_WEIGHT), metavar="KIND")
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS), help="k")
    parser.add_argument("--modes", nargs="+", help="only these")
    parser.add_argument("--seed", type=int, help="of all data; by default a new one for each case")
    parser.add_argument("--shrink", type=int, default=1, help="divide every extent, to try the script")
    parser.add_argument("--fresh", action="store_true", help="do not go on where the last run stopped")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(argv)


def opened(device):
    """The library and the device's description."""
    if device == "cpu":
        return np, DeviceSpec.cpu()
    ordinal = int(device.partition(":")[2] or 0)
    spec = DeviceSpec.of(ordinal)
    import cupy

    cupy.cuda.Device(ordinal).use()
    return cupy, spec


def main(argv=None):
    args = parsed(argv)
    try:
        xp, spec = opened(args.device)
    except DeviceError as error:
        print(f"no such device: {error} (--device cpu measures NumPy instead)", file=sys.stderr)
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    about = environment(spec) | {"shrink": args.shrink}
    results = Rows(args.output or DOCS / f"accuracy-{slug}.json", about, digest(), fresh=args.fresh)
    document = results.document
    failed, lacking = document.setdefault("failed", {}), document.setdefault("lacking", {})
    began, status = time.perf_counter(), 0
    if stopped := results.stopped_in():
        failed[stopped] = "the run stopped in it"
        status = 3
    for key, what, dtype, kind, shape in cases(args.dtypes, args.kinds, args.depths):
        modes = ["auto"] if what == "auto" else [mode for mode in MODES[dtype] if mode != "auto"]
        modes = [mode for mode in modes if mode in (args.modes or modes) and f"{dtype} {mode}" not in lacking]
        if not modes or results.done(key) or key in failed:
            continue
        if time.perf_counter() - began > args.seconds:
            results.save()
            print("out of time", file=sys.stderr)
            return 4
        results.begin(key)
        found = one(xp, spec, results, key, dtype, kind, shape, modes, args)
        status = max(status, found)
        if found == 1:
            results.save()
            print("the device is lost to this process: run again to go on", file=sys.stderr)
            return 1
    results.save()
    print(f"{results.path}, {time.perf_counter() - began:.0f} s, {len(document['rows'])} rows")
    return status


def one(xp, spec, results, key, dtype, kind, shape, modes, args):
    """Measures and keeps one case: 3 where it failed, 1 where the device is lost."""
    document = results.document
    m, n, k = (max(4, extent // args.shrink) for extent in shape)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    try:
        with device_errors() if spec.kind != "cpu" else contextlib.nullcontext():
            rows, skipped = grades(xp, kind, m=m, n=n, k=k, dtype=dtype, seed=seed, modes=modes)
    except (KernelError, DeviceError) as error:
        rows, skipped = [], {}
        document["failed"][key] = f"{type(error).__name__}: {error}"
        print(f"{key} failed: {error}", flush=True)
    document["lacking"].update({f"{dtype} {mode}": reason for mode, reason in skipped.items()})
    for row in rows:
        mark = row.grade if row.parts else f"{row.grade}, parts -"
        print(f"{key} {row.mode}: {row.error:.3g} u, vendor {row.vendor:.3g} u: {mark}", flush=True)
    if xp is not np and (pool := xp.get_default_memory_pool()).total_bytes() > POOL_BYTES:
        pool.free_all_blocks()
    results.end(key, [kept(row) for row in rows])
    if key not in document["failed"]:
        return 0
    return 3 if alive(xp) else 1


def alive(xp):
    """Whether the device still answers."""
    if xp is np:
        return True
    try:
        xp.get_default_memory_pool().free_all_blocks()
        return float(xp.ones((1,)).sum()) == 1
    except Exception:
        return False


if __name__ == "__main__":
    sys.exit(main())
