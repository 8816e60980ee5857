"""Compiles the kernels of common products ahead of time: `python -m gemmserve_kernels.precompile sm_80 sm_90a`.

Needs NVRTC, no device. The kernels go where `compiler.cache_directory` says, so that a server's first requests do not
wait for the compiler. Common products are those of `cases`, planned for one device of each architecture with operands
as fresh arrays are; whatever else comes is compiled when it is first asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import check_sources, sources
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN, cuda_arch, cuda_modes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gemmserve_kernels.device.compiler import KernelSource
    from gemmserve_kernels.device.spec import DeviceSpec

_DTYPES: Final = ("complex64", "float32", "complex128", "float64", "float16")
_SIZES: Final = (16, 64, 256, 1024, 4096)
_CHECKED: Final = (1024,)
"""Sizes for which every kernel of a check is compiled."""
_KIB: Final = 1 << 10


def _workstation(name: str, capability: int, sms: int, memory_gib: int, l2_mib: int) -> DeviceSpec:
    """A device of 100 KiB of shared memory a multiprocessor, as those of 8.6 and 8.9 have."""
    return replace(
        KNOWN["A100"],
        name=name,
        arch=cuda_arch(capability),
        sm_count=sms,
        shared_per_block=99 * _KIB,
        shared_per_sm=100 * _KIB,
        memory_bytes=memory_gib << 30,
        l2_bytes=l2_mib << 20,
        compute_modes=cuda_modes(capability),
    )


DEVICES: Final = {
    spec.arch: spec
    for spec in (
        KNOWN["A100"],
        _workstation("NVIDIA A10", 86, 72, 24, 6),
        _workstation("NVIDIA L40S", 89, 142, 48, 96),
        KNOWN["H200"],
        KNOWN["B200"],
        KNOWN["RTX5090"],
    )
}
"""The device that stands for each architecture; sizes from data sheets."""


def cases() -> Iterator[Case]:
    """The common products: a worker's first; square and batched ones of every dtype, plain, transposed and conjugate
    transposed; reductions over the rows.
    """
    # What the server's workers verify before they are ready, of which it has a test.
    yield Case(m=67, n=45, k=83, trans_a="C", alpha=1.5 - 0.5j, beta=0.25j)
    for dtype in _DTYPES:
        for n in _SIZES:
            for trans_a, trans_b in ("NN", "CN", "NC", "TN"):
                yield Case(m=n, n=n, k=n, dtype=dtype, trans_a=trans_a, trans_b=trans_b)
        for n in _SIZES[:3]:
            yield Case(m=n, n=n, k=n, batch=64, dtype=dtype)
        for n in _SIZES[1:]:
            for reduce in ("sum", "sumsq", "absmax"):
                yield Case(op="gemm_reduce", m=n, n=n, k=n, dtype=dtype, reduce=(reduce,))


def common(arch: str) -> set[KernelSource]:
    """The sources that the common products compile on `arch`. Raises KeyError for an architecture without a device."""
    spec = DEVICES[arch]
    found = {source for case in cases() for source in sources(case, spec, every=False)}
    # Of some products the service checks the results.
    return found.union(*(check_sources(case, spec) for case in cases() if case.m in _CHECKED))


def _compile(arch: str, source: KernelSource) -> int:
    """Bytes of the cubin, compiled unless it is there. Raises CompileError."""
    return compiler.cubin_file(source, arch).stat().st_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 where something does not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m gemmserve_kernels.precompile", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("arch", nargs="+", choices=sorted(DEVICES), help="architectures")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at one time")
    chosen = parser.parse_args(arguments)
    failed = False
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for arch in chosen.arch:
            began = time.perf_counter()
            found = sorted(common(arch), key=repr)
            try:
                nbytes = sum(pool.map(partial(_compile, arch), found))
            except compiler.CompileError as error:
                print(f"{arch}: {error}", file=sys.stderr)
                failed = True
                continue
            seconds = time.perf_counter() - began
            print(f"{arch}: {len(found)} kernels, {nbytes / 1e6:.1f} MB, {seconds:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
