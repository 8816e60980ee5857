// What must not be taken from tensor cores: flags of rows and columns, and the deficits of groups of them
// (common/verdict.cuh). Where there are none (null), nothing is flagged by them.
#pragma once

#include "../common/verdict.cuh"

struct FlagParams {
    MatrixParams rows;     // of op(A): int flags as matrices of one row
    MatrixParams columns;  // of op(B)
    MatrixParams row_deficits, column_deficits;  // of groups
    const int* status_a;   // where both words are 0, nothing is flagged
    const int* status_b;
    Long most_deficit;     // of a row and a column that tensor cores may answer

    GEMM_DEVICE bool none() const { return (*status_a | *status_b) == 0; }
};

GEMM_DEVICE bool flagged(const MatrixParams& flags, Long at) {
    return flags.re != nullptr && static_cast<const int*>(flags.re)[at] != 0;
}

// The deficit of vector `index` of the matrix whose deficits begin at `first`.
GEMM_DEVICE Long group_deficit(const MatrixParams& deficits, Long first, Long index) {
    return deficits.re == nullptr ? 0 : static_cast<const int*>(deficits.re)[first + index / GROUP];
}
