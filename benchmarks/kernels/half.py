"""The vendor's product of float16 operands with a float32 result, so that what is reduced was not rounded."""

from __future__ import annotations

import numpy as np


def product(a, b, trans_a="N", trans_b="N"):
    """op(a) op(b) of CuPy arrays in C order, (..., rows, columns) with the same batch, accumulated in float32."""
    import cupy
    from cupy.cuda import cublas, runtime

    (*batch, m, k), n = _turned(a.shape, trans_a), _turned(b.shape, trans_b)[-1]
    count = int(np.prod(batch))
    d = cupy.empty((*batch, m, n), np.float32)
    factors = np.array([1, 0], np.float32)
    address = factors.ctypes.data
    # Column by column the result is B^T A^T.
    cublas.gemmStridedBatchedEx(
        cupy.cuda.device.get_cublas_handle(), _operation(trans_b), _operation(trans_a), n, m, k,
        address, b.data.ptr, runtime.CUDA_R_16F, b.shape[-1], k * n, a.data.ptr, runtime.CUDA_R_16F, a.shape[-1], m * k,
        address + factors.itemsize, d.data.ptr, runtime.CUDA_R_32F, n, m * n,
        count, cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip
    return d


def _turned(shape, trans):
    return shape if trans in "NR" else (*shape[:-2], shape[-1], shape[-2])


def _operation(trans):
    from cupy.cuda import cublas

    return cublas.CUBLAS_OP_N if trans in "NR" else cublas.CUBLAS_OP_T
