"""Compiles the kernels of documented products ahead of time: `python -m gemmserve_kernels.precompile sm_80 sm_90a`.

Needs NVRTC (for AMD's architectures CuPy built for ROCm, and its HIPRTC), no device. The kernels go where
`compiler.cache_directory` says; a folder of them is what $GEMMSERVE_KERNEL_SEED names and what a wheel of kernels holds
(`tools/kernel_wheel.py`). Documented products are those of `cases`, planned by the dispatch for the devices of each
architecture with operands as fresh arrays are; whatever else comes is compiled when it is first asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import check_sources, prepared_sources, sources
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.element_counts import READ_COUNTERS
from gemmserve_kernels.device.spec import KNOWN, cuda_device
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.validation import compute_modes
from gemmserve_kernels.problem.vocabulary import REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gemmserve_kernels.device.compiler import KernelSource

_LIKELY: Final = ("complex64", "float32")
_DTYPES: Final = (*_LIKELY, "complex128", "float64", "float16")
_SIZES: Final = (1024, 256, 4096, 64, 512, 2048, 128, 8192, 32, 16)
_BETWEEN: Final = (1536, 768, 3072, 640, 1152, 1600, 704, 3264, 6144, 96, 192, 384)
"""Extents of squares, the likeliest first; between powers of two the dispatch takes tiles of its own."""
_CLASSES: Final = (1024, 4096, 256, 64, 16)
"""The same, where the tile depends on them less."""
_EXTENTS: Final = (8192, 1024, 128, 16)
"""Extents of rectangles."""
_RUNS: Final = (
    (928, 1680, 112), (992, 624, 80), (1552, 1440, 16), (5136, 2304, 16), (560, 1744, 624), (1584, 7760, 32),
    (1520, 688, 16),
)  # fmt: skip
"""(m, n, k) of double precision whose tiles have runs (`algorithms.common.runs`) that those of squares have not."""
_TRANS: Final = (("N", "N"), ("C", "N"), ("N", "C"), ("T", "N"), ("N", "T"))
_BATCHED: Final = (64, 16, 256, 32, 128, 8, 4)
_BATCHES: Final = (64, 1024, 8)
_LIKELY_REDUCTIONS: Final = ("sum", "sumsq", "absmax")
_LINES: Final = (256, 64, 16)
"""Lengths of lines for which passes over products differ."""
_VENDOR: Final = GemmConfig(algorithm="vendor")
_CHECKED: Final = (1024,)
"""Sizes for which every kernel of a check is compiled."""
_PREPARED: Final = (1024, 256, 4096, 512, 2048, 8192)
"""Sizes for which those that prepare operands are compiled."""


DEVICES: Final = {
    "sm_80": (KNOWN["A100"],),
    "sm_86": (cuda_device("NVIDIA A10", 86, 72, 100, 24, 6),),
    "sm_89": (cuda_device("NVIDIA L40S", 89, 142, 100, 48, 96),),
    "sm_90a": (KNOWN["H200"], KNOWN["H100"]),
    "sm_100": (KNOWN["B200"],),
    "sm_120": (KNOWN["RTX5090"],),
    "gfx90a": (KNOWN["MI250X"],),
    "gfx942": (KNOWN["MI300X"],),
}
"""The devices that stand for each architecture; sizes from data sheets."""


def likely_cases() -> Iterator[Case]:
    """Return the documented products that are asked for most, the likeliest first: a worker's own, squares of every
    dtype, sums and the like.
    """
    # What the server's workers verify before they are ready, of which it has a test.
    yield Case(m=67, n=45, k=83, trans_a="C", alpha=1.5 - 0.5j, beta=0.25j)
    for dtypes in (_LIKELY, _DTYPES[len(_LIKELY) :]):
        for n, dtype, (trans_a, trans_b) in product(_SIZES, dtypes, _TRANS):
            yield Case(m=n, n=n, k=n, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
        for reduce, n, dtype in product(_LIKELY_REDUCTIONS, _CLASSES, dtypes):
            yield Case(op="gemm_reduce", m=n, n=n, k=n, dtype=dtype, reduce=(reduce,))


def cases() -> Iterator[Case]:
    """Return the documented products, the likeliest first: every dtype, compute mode and size class, plain, transposed
    and conjugate transposed; batches; every reduction.
    """
    yield from likely_cases()
    for n, dtype, (trans_a, trans_b) in product(_BETWEEN, _DTYPES, _TRANS):
        yield Case(m=n, n=n, k=n, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
    for n, batch, dtype, (trans_a, trans_b) in product(_BATCHED, _BATCHES, _DTYPES, _TRANS):
        yield Case(m=n, n=n, k=n, batch=batch, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
    for (m, n, k), dtype, (trans_a, trans_b) in product(product(_EXTENTS, repeat=3), _DTYPES, _TRANS):
        yield Case(m=m, n=n, k=k, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
    for (m, n, k), dtype, (trans_a, trans_b) in product(_RUNS, ("complex128", "float64"), _TRANS):
        yield Case(m=m, n=n, k=k, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
    for dtype, (trans_a, trans_b) in product(_LIKELY, _TRANS):  # few tiles over a long k
        yield Case(m=256, n=256, k=2048, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
    named = [(dtype, mode) for dtype in _DTYPES for mode in compute_modes(np.dtype(dtype)) if mode != "auto"]
    for n, (dtype, mode), (trans_a, trans_b) in product(_CLASSES, named, _TRANS):
        yield Case(m=n, n=n, k=n, dtype=dtype, compute=mode, trans_a=trans_a, trans_b=trans_b)
    for n, dtype, reduce, axis, (trans_a, trans_b) in product(_CLASSES, _DTYPES, REDUCTIONS, "mn", _TRANS[:3]):
        yield Case(
            op="gemm_reduce", m=n, n=n, k=n, dtype=dtype, reduce=(reduce,), axis=(axis,), trans_a=trans_a,
            trans_b=trans_b,
        )  # fmt: skip
    # Lines that are shorter than those of the classes.
    for dtype, axis, (trans_a, trans_b) in product(("float64", "complex128"), "mn", _TRANS[:3]):
        yield Case(
            op="gemm_reduce", m=4096, n=4096, k=256, dtype=dtype, reduce=("absmax",), axis=(axis,), trans_a=trans_a,
            trans_b=trans_b,
        )  # fmt: skip
    for n, (dtype, mode), reduce in product(_CLASSES, named, _LIKELY_REDUCTIONS):
        yield Case(op="gemm_reduce", m=n, n=n, k=n, dtype=dtype, compute=mode, reduce=(reduce,))
    # Passes over the vendor's products, by the length of lines.
    for n, dtype, reduce in product(_LINES, _DTYPES, REDUCTIONS):
        yield Case(op="gemm_reduce", m=n, n=n, k=n, dtype=dtype, reduce=(reduce,), config=_VENDOR)
    for n, dtype, (trans_a, trans_b) in product(_CLASSES, _DTYPES, _TRANS[:3]):
        yield Case(m=n - 1, n=n - 1, k=n - 1, dtype=dtype, trans_a=trans_a, trans_b=trans_b)


@cache
def documented(arch: str) -> tuple[KernelSource, ...]:
    """Return the sources that the documented products compile on `arch`, in the order of `cases`; with those that
    prepare their operands and check their results. Raises KeyError for an architecture without a device.
    """
    found: dict[KernelSource, None] = {READ_COUNTERS: None}
    for case in cases():
        for spec in DEVICES[arch]:
            found.update(dict.fromkeys(sorted(sources(case, spec, every=False), key=repr)))
            if case.op == "gemm_reduce" or case.compute != "auto" or not case.m == case.n == case.k:
                continue
            others = check_sources(case, spec) if case.m in _CHECKED else set()
            if case.m in _PREPARED:
                others |= prepared_sources(case, spec)
            found.update(dict.fromkeys(sorted(others, key=repr)))
    return tuple(found)


def compile_all(arch: str, sources: Sequence[KernelSource], jobs: int | None = None) -> list[str]:
    """Compile those of the sources that are neither in the cache nor shipped, so many at one time (by default one for
    each processor), and print how many and how large all are; return what did not compile, printed too.
    """
    began = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        done = list(pool.map(partial(_compile, arch), sources))
    failures = [each for each in done if isinstance(each, str)]
    for failure in failures:
        print(f"{arch}: {failure}", file=sys.stderr)
    nbytes = sum(each for each in done if isinstance(each, int))
    seconds = time.perf_counter() - began
    print(f"{arch}: {len(done) - len(failures)} kernels, {nbytes / 1e6:.1f} MB, {seconds:.0f} s", flush=True)
    return failures


def _compile(arch: str, source: KernelSource) -> int | str:
    """Return the bytes of the cubin, compiled unless it is there, or why it does not compile."""
    try:
        return compiler.cubin_file(source, arch).stat().st_size
    except compiler.CompileError as error:
        return str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 where something does not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m gemmserve_kernels.precompile", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("arch", nargs="+", choices=sorted(DEVICES), help="architectures")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at one time")
    parser.add_argument("--first", type=int, metavar="N", help="only the likeliest of each architecture")
    chosen = parser.parse_args(arguments)
    failures = [compile_all(arch, documented(arch)[: chosen.first], chosen.jobs) for arch in chosen.arch]
    return 1 if any(failures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
