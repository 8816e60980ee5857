// What the host passes: gemmserve_kernels.device.structures reads the structures from here.
#pragma once

#include "../common/params.cuh"

struct MfmaParams {
    GemmReduceParams work;  // of a plain product, its gemm alone
    // Planes: the exponents of A's rows and B's columns, and elements from one plane to the next.
    const int* exponents[2];
    Long exponent_stride[2][BATCH_DIMS];
    Long plane_stride[2];
};
