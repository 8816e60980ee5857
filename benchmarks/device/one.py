"""One product, for a profiler; or the reduction of one over m.

python benchmarks/device/one.py [BATCHx]M N K DTYPE COMPUTE [REDUCTION]
"""

from __future__ import annotations

import sys

import cupy
import numpy as np

from gemmserve_kernels import gemm, gemm_reduce


def main(m, n, k, dtype, compute, reduction=None):
    """`m` may be written 16x512, a batch of 16."""
    batch, _, rows = m.rpartition("x")
    lead = (int(batch),) if batch else ()
    rng = cupy.random.default_rng(0)

    def drawn(*shape):
        x = rng.standard_normal((*lead, *shape))
        return (x + 1j * rng.standard_normal(x.shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)

    a, b = drawn(int(rows), int(k)), drawn(int(k), int(n))
    if reduction:
        result = gemm_reduce(a, b, reduce=reduction, axis="m", compute=compute)
    else:
        result = gemm(a, b, compute=compute)
    cupy.cuda.Device().synchronize()
    print(result.shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
