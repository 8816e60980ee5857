"""Times tiles of the Hopper tensor-core kernel on prepared planes, or on float16 operands as they lie: a table on the
screen, every figure as JSON.

    python benchmarks/kernels/tune_wgmma.py --schemes 3xfp16:complex64 --shapes 4096x4096x4096 --json tiles.json

`--compile` only compiles what would run, into the kernel cache, and needs no device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from gemmserve_kernels.algorithms.common.splits import PITCH, Planes
from gemmserve_kernels.algorithms.wgmma import gemm as wgmma
from gemmserve_kernels.algorithms.wgmma.candidates import resolve
from gemmserve_kernels.algorithms.wgmma.direct import gemm as direct
from gemmserve_kernels.algorithms.wgmma.plan import plan
from gemmserve_kernels.algorithms.wgmma.tile import WgmmaTile
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.replay import LaunchRecorder, RecordedLaunch
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.problem.problem import GemmProblem, Operand

SCHEMES = (
    "3xfp16:complex64",
    "3xfp16-3m:complex64",
    "1xfp16:complex64",
    "3xfp16:float32",
    "1xfp16:float32",
    "fp16:float16",
)
SHAPES = (
    "3456x4096x4096", "8192x8192x8192", "4096x4096x4096", "2048x2048x2048", "1024x1024x1024", "512x512x512",
    "256x256x256", "64x64x65536", "16384x64x4096", "64*512x512x512",
)  # fmt: skip
SEED = 1
LEAST_MS = 1.5
"""Length of one measurement: short kernels are repeated inside a graph."""


def tiles(scheme, is_complex, *, small):
    """Tiles worth a look; where the result is `small`, every split of k too."""
    bits = {"3xfp16": 2, "3xfp16-3m": 2, "1xfp16": 1, "fp16": 1}[scheme]
    wide = [] if is_complex else [(128, 256)]
    blocks = [*wide, (128, 128), (128, 64), (64, 64)]
    for (block_m, block_n), block_k, cluster in itertools.product(blocks, (32, 64), (1, 2)):
        if cluster > 1 and (small or block_n == 64):
            continue
        for promote in {"1xfp16": (0,), "fp16": (0, block_k)}.get(scheme, (block_k,)):
            tile = WgmmaTile(scheme, is_complex, block_m, block_n, block_k, 2, cluster, promote=promote)
            stages = min(12, (KNOWN["H200"].shared_per_block - 1536) // tile.stage_bytes)
            if stages * block_k * bits < 96:
                continue
            for split in (1, 2, 4) if small else (1,):
                yield replace(tile, stages=stages, split=split, raster=16 // cluster)


def cases(schemes, shapes):
    """(scheme, dtype, batch, (m, n, k), tiles), the tile that dispatch would choose first."""
    for entry, text in itertools.product(schemes, shapes):
        scheme, dtype = entry.split(":")
        batch, _, extents = text.rpartition("*")
        m, n, k = (int(x) for x in extents.split("x"))
        problem = _problem(m, n, k, int(batch or 1), dtype)
        is_complex = np.dtype(dtype).kind == "c"
        chosen = resolve(None, problem, KNOWN["H200"], scheme)
        small = -(-m // 128) * -(-n // 128) * problem.batch < 100
        found = [chosen, *tiles(scheme, is_complex, small=small)]
        fitting = [tile for tile in dict.fromkeys(found) if tile.broken_limit(KNOWN["H200"]) is None]
        yield scheme, dtype, problem, fitting


def _matrix(batch, rows, columns, dtype):
    """A matrix that takes no memory."""
    item = np.dtype(dtype).itemsize
    shape, strides = (batch, rows, columns), (rows * columns * item, columns * item, item)
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape[batch == 1 :], strides[batch == 1 :])


def _problem(m, n, k, batch, dtype):
    a, b = _matrix(batch, m, k, dtype), _matrix(batch, k, n, dtype)
    return GemmProblem.build(Operand.of(a), Operand.of(b))


def _source(problem, tile):
    """What would be compiled."""
    if tile.scheme == "fp16":
        recorder = LaunchRecorder(KNOWN["H200"], 2**31 - 1, 0)
        operands = (problem.a, problem.b, problem.result)
        arrays = [recorder.argument(x.shape, x.dtype, tuple(2 * stride for stride in x.strides)) for x in operands]
        direct.run_gemm(recorder, problem, tile, arrays[0], arrays[1], None, arrays[2])
        return next(step.source for step in recorder.steps if isinstance(step, RecordedLaunch))
    out = _matrix(problem.batch, problem.m, problem.n, problem.dtype)
    stored = StoredArray(out.shape, out.strides, out.dtype, 0)
    strides = (1,) * len(problem.batch_shape)
    sides = [
        Planes(
            tile.scheme, tile.complex, side, None, None, problem.batch, rows, problem.k,
            -(-problem.k // PITCH) * PITCH, strides,
        )
        for side, rows in (("a", problem.m), ("b", problem.n))
    ]  # fmt: skip
    return plan(KNOWN["H200"].sm_count, problem, tile, *sides, stored, stored).source


def _compile(source):
    import cupy  # noqa: F401 - finds the compiler's libraries

    compiler.cubin_file(source, "sm_90a")


def make_planes(x, scheme, side):
    """Planes of `x`, (matrices, rows, k) on the device, by array operations."""
    import cupy

    matrices, rows, k = x.shape
    is_complex = x.dtype.kind == "c"
    largest = cupy.maximum(cupy.abs(x.real), cupy.abs(x.imag)).max(axis=2, keepdims=True)
    exponents = cupy.floor(cupy.log2(largest)).astype(cupy.int32) - (13 if scheme == "3xfp16-3m" else 14)
    factor = cupy.ldexp(cupy.ones_like(largest), -exponents)
    re, im = x.real * factor, x.imag * factor if is_complex else None
    if scheme == "3xfp16-3m":
        parts = [re, im, re + im] if side == "a" else [re, im - re, re + im]
    else:
        parts = [re, im] if is_complex else [re]
    high = [part.astype(cupy.float16) for part in parts]
    low = [(part - upper.astype(cupy.float32)).astype(cupy.float16) for part, upper in zip(parts, high, strict=True)]
    if scheme == "1xfp16":
        planes = high
    elif scheme == "3xfp16":
        planes = high + low
    else:
        planes = [plane for pair in zip(high, low, strict=True) for plane in pair]
    pitch = -(-k // PITCH) * PITCH
    data = cupy.zeros((matrices, len(planes), rows, pitch), cupy.float16)
    for index, plane in enumerate(planes):
        data[:, index, :, :k] = plane
    strides = (1,) if matrices > 1 else ()
    exponents = cupy.ascontiguousarray(exponents[..., 0])
    return Planes(scheme, is_complex, side, data, exponents, matrices, rows, k, pitch, strides)


def _random(rng, shape, dtype):
    import cupy

    x = rng.standard_normal(shape, dtype=cupy.float32)
    if np.dtype(dtype) == np.float16:
        return x.astype(cupy.float16)
    return x + 1j * rng.standard_normal(shape, dtype=cupy.float32) if np.dtype(dtype).kind == "c" else x


def _milliseconds(call, repeats):
    """Median of graphs of so many calls that one takes LEAST_MS at least, per call."""
    import cupy

    def graph(count):
        stream.begin_capture()
        for _ in range(count):
            call()
        return stream.end_capture()

    def once(captured, count):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        captured.launch(stream)
        stop.record(stream)
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) / count

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        single = graph(1)
        once(single, 1)
        count = max(1, int(LEAST_MS / once(single, 1)))
        captured = graph(count)
        once(captured, count)
        return statistics.median(once(captured, count) for _ in range(repeats))


def _multiplier(launcher, scheme, problem, a, b, out):
    """What multiplies the rows of A and of B into `out` by a tile."""
    import cupy

    if scheme == "fp16":
        left, right = a.reshape(problem.a.shape), cupy.ascontiguousarray(b.swapaxes(1, 2)).reshape(problem.b.shape)
        return lambda tile: direct.run_gemm(launcher, problem, tile, left, right, None, out)
    planes = make_planes(a, scheme, "a"), make_planes(b, scheme, "b")
    return lambda tile: wgmma.multiply(launcher, problem, tile, *planes, None, out)


def measure(scheme, dtype, problem, candidates, repeats):
    """One row for each tile: its time and rate, the relative error of a sample of rows."""
    import cupy

    from gemmserve_kernels.device.launch import CupyLauncher

    launcher = CupyLauncher.current()
    rng = cupy.random.default_rng(SEED)
    a = _random(rng, (problem.batch, problem.m, problem.k), dtype)
    b = _random(rng, (problem.batch, problem.n, problem.k), dtype)
    out = cupy.empty((*problem.batch_shape, problem.m, problem.n), dtype)
    call = _multiplier(launcher, scheme, problem, a, b, out)
    wide = cupy.complex128 if a.dtype.kind == "c" else cupy.float64
    rows = slice(0, 8)
    expected = a[-1, rows].astype(wide) @ b[-1].astype(wide).T
    del a, b
    found = []
    for tile in candidates:
        out.fill(cupy.nan)
        cupy.cuda.Device().synchronize()  # the measurement has a stream of its own
        ms = _milliseconds(lambda tile=tile: call(tile), repeats)
        last = out[-1] if problem.batch_shape else out
        error = float(cupy.linalg.norm(last[rows] - expected) / cupy.linalg.norm(expected))
        tflops = problem.flops() / ms / 1e9
        shape = [problem.m, problem.n, problem.k]
        row = asdict(tile) | {"dtype": dtype, "batch": problem.batch, "shape": shape}
        found.append(row | {"ms": ms, "tflops": tflops, "error": error})
    return found


def _describe(row):
    split = f" split {row['split']}x{row['parts']}" if row["split"] * row["parts"] > 1 else ""
    split += f" promote {row['promote']}" if row["promote"] else ""
    return (
        f"{row['block_m']}x{row['block_n']}x{row['block_k']} s{row['stages']} c{row['cluster']} r{row['raster']}{split}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, metavar="SCHEME:DTYPE")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="[BATCH*]MxNxK")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--show", type=int, default=5, help="tiles shown for each case, the fastest")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--compile", action="store_true", help="compile only")
    arguments = parser.parse_args()
    every = list(cases(arguments.schemes, arguments.shapes))
    if arguments.compile:
        sources = list(dict.fromkeys(_source(problem, tile) for *_, problem, found in every for tile in found))
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compile, sources))
        print(f"{len(sources)} kernels compiled", file=sys.stderr)
        return
    results = []
    for scheme, dtype, problem, found in every:
        rows = measure(scheme, dtype, problem, found, arguments.repeats)
        results += rows
        batch = f"{problem.batch} x " if problem.batch > 1 else ""
        print(
            f"{scheme} {dtype} {batch}{problem.m}x{problem.n}x{problem.k}: chosen {_describe(rows[0])}"
            f" {rows[0]['ms'] * 1e3:.1f} us {rows[0]['tflops']:.1f} TF, worst error {max(r['error'] for r in rows):.1e}"
        )
        for row in sorted(rows, key=lambda row: row["ms"])[: arguments.show]:
            print(f"    {row['ms'] * 1e3:10.1f} us {row['tflops']:7.1f} TF  {_describe(row)}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
