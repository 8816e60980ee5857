// What the host passes to the kernel for small products (gemmserve_kernels.device.structures).
#pragma once

#include "../common/params.cuh"
#include "../common/raster.cuh"

// D = alpha op(A) op(B) + beta C for every product of a batch. Extents, layouts and conjugation are compiled in.
struct SmallParams {
    MatrixParams a, b, c, d;
    Long batch_shape[BATCH_DIMS];
    Long batch;       // products: the product of batch_shape
    int batch_axes;   // how many of batch_shape, counted from the last, are not 1
    int reserved;
    double alpha[2];
    double beta[2];
};

// Element offset of matrix `number` of the batch; the last axis runs fastest, and the first needs no division.
GEMM_DEVICE Long matrix_offset(Long number, const SmallParams& params, const Long (&stride)[BATCH_DIMS]) {
    Long offset = 0;
#pragma unroll
    for (int d = BATCH_DIMS - 1; d > 0; --d) {
        if (params.batch_axes > BATCH_DIMS - d) {
            const Quotient split = divide(number, params.batch_shape[d]);
            offset += split.remainder * stride[d];
            number = split.quotient;
        } else if (params.batch_axes == BATCH_DIMS - d) {
            return offset + number * stride[d];
        }
    }
    return params.batch_axes == BATCH_DIMS ? offset + number * stride[0] : offset;
}
