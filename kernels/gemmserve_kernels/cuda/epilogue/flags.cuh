// What must not be taken from tensor cores: flags as matrices, two arrays of the same strides in `re` and `im`, of which
// either may say so. No arrays (null): nothing is flagged.
#pragma once

#include "../common/params.cuh"

struct FlagParams {
    MatrixParams rows;     // of op(A)
    MatrixParams columns;  // of op(B)
    MatrixParams pairs;    // of the batch
    const int* status;     // 0 where none is set
};

GEMM_DEVICE bool flagged(const MatrixParams& flags, Long at) {
    if (flags.re == nullptr) return false;
    return (static_cast<const int*>(flags.re)[at] | static_cast<const int*>(flags.im)[at]) != 0;
}
