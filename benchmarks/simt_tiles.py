"""Every tile of the portable kernels beside the vendor's BLAS, in one run: the source of the rates in simt/tile.py.

    python benchmarks/simt_tiles.py [--sizes 512 1024 4096] [--dtypes complex64 ...] [--json FILE]

Times are medians of CUDA events; operands alternate between two sets. TF counts 8 n^3 operations for complex products,
2 n^3 for real ones. relF is ||D - ref||_F / ||ref||_F, the reference in float64 or complex128 by the vendor's BLAS
(for 64-bit data this compares the two). "*" marks the tile that dispatch would choose.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
from pathlib import Path

import cupy
import numpy as np

from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.algorithms.simt import tile as tiles
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.problem.problem import GemmProblem, Operand

DTYPES = ("complex64", "float32", "float16", "float64", "complex128")


def median_ms(call, repeats=9):
    """Return the median of one call; short ones are timed in rows of up to 20, so that the host's share hides behind
    the device's.
    """

    def timed(count):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for index in range(count):
            call(index % 2)
        stop.record()
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) / count

    timed(2)
    count = int(min(20, max(2, 4 / timed(2))))
    return float(np.median([timed(count) for _ in range(repeats)]))


def normal(seed, dtype, n):
    rng = cupy.random.default_rng(seed)
    real = rng.standard_normal((n, n), dtype=cupy.float32)
    if np.dtype(dtype).kind == "c":
        return (real + 1j * rng.standard_normal((n, n), dtype=cupy.float32)).astype(dtype)
    return real.astype(dtype)


class Recorder(CupyLauncher):
    """Notes the source instead of running it."""

    def launch(self, source, entry, **_):
        sources[entry] = source


sources: dict[str, compiler.KernelSource] = {}


@functools.cache
def resources(source, arch):
    cubin = compiler.compile_cuda(source.text, arch)
    return cubin.registers["gemm"], cubin.spill_bytes["gemm"]


def measure(dtype, n):
    pairs = [(normal(2 * i, dtype, n), normal(2 * i + 1, dtype, n)) for i in range(2)]
    out = cupy.empty((n, n), dtype)
    problem = GemmProblem.build(Operand.of(pairs[0][0]), Operand.of(pairs[0][1]))
    tera = problem.flops() / 1e9
    wide = np.complex128 if problem.dtype.kind == "c" else np.float64
    reference = pairs[0][0].astype(wide) @ pairs[0][1].astype(wide)

    def rel_fro():
        return float(cupy.linalg.norm(out.astype(wide) - reference) / cupy.linalg.norm(reference))

    vendor = median_ms(lambda i: cupy.matmul(*pairs[i], out=out))
    cupy.matmul(*pairs[0], out=out)
    yield {"dtype": dtype, "n": n, "what": "vendor", "ms": vendor, "tflops": tera / vendor, "rel_fro": rel_fro()}
    launcher = CupyLauncher.current()
    chosen = tiles.resolve_simt(None, m=n, n=n, batch=1, accumulate=problem.accumulate, spec=launcher.spec)
    for candidate in tiles._CANDIDATES[problem.accumulate.name]:
        tile = candidate.tile
        out[...] = cupy.nan
        simt.run_gemm(launcher, problem, tile, *pairs[0], None, out)
        error = rel_fro()
        ms = median_ms(lambda i, tile=tile: simt.run_gemm(launcher, problem, tile, *pairs[i], None, out))
        simt.run_gemm(Recorder(launcher.spec), problem, tile, *pairs[0], None, out)
        registers, spills = resources(sources["gemm"], launcher.spec.arch)
        name = f"{tile.block_m}x{tile.block_n}x{tile.block_k} {tile.thread_m}x{tile.thread_n} x{tile.min_blocks}"
        yield {
            "dtype": dtype,
            "n": n,
            "what": name + ("*" if tile == chosen else ""),
            "ms": ms,
            "tflops": tera / ms,
            "rel_fro": error,
            "of_vendor": vendor / ms,
            "registers": registers,
            "spill_bytes": spills,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runtime = cupy.cuda.runtime
    about = {
        "device": CupyLauncher.current().spec.name,
        "driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "blas": cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle()),
        "nvrtc": cupy.cuda.nvrtc.getVersion(),
        "cupy": cupy.__version__,
        "python": platform.python_version(),
    }
    print(about)
    rows = []
    for dtype in arguments.dtypes:
        for n in arguments.sizes:
            for row in measure(dtype, n):
                rows.append(row)
                print(
                    f"{dtype:10} {n:5} {row['what']:20} {row['ms']:8.3f} ms {row['tflops']:6.1f} TF "
                    f"{row.get('of_vendor', 1):5.2f} relF {row['rel_fro']:.1e} "
                    f"registers {row.get('registers', '-')} spills {row.get('spill_bytes', '-')}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
