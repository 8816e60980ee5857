"""Products of column-major matrices given by address, by NumPy."""

import ctypes

import numpy as np

CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C = 0, 1, 2
CUBLAS_POINTER_MODE_HOST = 0
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_COMPUTE_32I = 68, 70, 77, 72
CUBLAS_GEMM_DEFAULT = -1
TYPES = {2: np.float16, 0: np.float32, 1: np.float64, 4: np.complex64, 5: np.complex128, 3: np.int8, 10: np.int32}
SCALE = {2: np.float32, 3: np.int32}


class CUBLASError(RuntimeError):
    pass


def getVersion(handle):
    return 130100


def getPointerMode(handle):
    return 0


def setPointerMode(handle, mode):
    pass


def _matrix(pointer, dtype, rows, columns, leading, batch, stride):
    """(batch, rows, columns) of a column-major matrix."""
    item = np.dtype(dtype).itemsize
    assert leading >= max(1, rows), f"leading dimension {leading} for {rows} rows"
    assert pointer % item == 0, "an address that is no element's"
    extent = ((batch - 1) * stride + (columns - 1) * leading + rows) * item
    memory = (ctypes.c_uint8 * extent).from_address(pointer)
    return np.ndarray((batch, rows, columns), dtype, memory, 0, (stride * item, item, leading * item))


def _stored(pointer, dtype, op, rows, columns, leading, batch, stride):
    shape = (rows, columns) if op == CUBLAS_OP_N else (columns, rows)
    matrix = _matrix(pointer, dtype, *shape, leading, batch, stride)
    matrix = matrix if op == CUBLAS_OP_N else matrix.swapaxes(1, 2)
    return matrix.conj() if op == CUBLAS_OP_C else matrix


def gemmStridedBatchedEx(
    handle, transa, transb, m, n, k, alpha, a, a_type, lda, stride_a, b, b_type, ldb, stride_b, beta, c, c_type, ldc,
    stride_c, batch, compute, algorithm,
):  # fmt: skip
    left = _stored(a, TYPES[a_type], transa, m, k, lda, batch, stride_a)
    right = _stored(b, TYPES[b_type], transb, k, n, ldb, batch, stride_b)
    result = _matrix(c, TYPES[c_type], m, n, ldc, batch, stride_c)
    scale = np.dtype(SCALE.get(a_type, TYPES[c_type]))
    factors = [np.ctypeslib.as_array((ctypes.c_uint8 * 16).from_address(x))[: scale.itemsize] for x in (alpha, beta)]
    one, zero = (factor.copy().view(scale)[0] for factor in factors)
    wide = np.dtype(TYPES[c_type]) if scale != np.float32 else np.dtype(np.float32)
    product = one * np.matmul(left.astype(wide), right.astype(wide))
    result[...] = product if zero == 0 else product + zero * result


def gemmEx(
    handle, transa, transb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algorithm
):
    gemmStridedBatchedEx(
        handle, transa, transb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1,
        compute, algorithm,
    )  # fmt: skip
