// What the host passes: gemmserve_kernels.device.structures reads the structures from here.
#pragma once

#include "platform.cuh"

constexpr int BATCH_DIMS = 4;

// A batched matrix. Strides count elements and may be negative or 0.
struct MatrixParams {
    void* re;  // the elements; the real parts where the operand is planar
    void* im;  // the imaginary parts where it is planar
    Long row_stride;
    Long column_stride;
    Long batch_stride[BATCH_DIMS];
};

// D = alpha op(A) op(B) + beta C, where op(A) is m x k, op(B) is k x n: transposition is in the strides.
struct GemmParams {
    MatrixParams a, b, c, d;
    Long m, n, k;
    Long batch_shape[BATCH_DIMS];
    Long tiles_m, tiles_n;
    Long first_tile;  // of this launch: a grid may be too long for one
    double alpha[2];
    double beta[2];
    int conjugate_a, conjugate_b;
};

constexpr int REDUCTION_KINDS = 8;

// Partial results of every kind, `outputs` next to each other per tile; the last two kinds have indices too.
struct PartialParams {
    void* values[REDUCTION_KINDS];
    Long* indices[2];
};

// What a tensor-core kernel is told that leaves partials: of each row of its product, over a share of the columns.
struct RowReduceParams {
    PartialParams partial;
    Long outputs;
    Long first_batch;
    int reduce_batch;
    int reserved;
};

struct GemmReduceParams {
    GemmParams gemm;
    PartialParams partial;
    Long outputs;       // results per reduction
    Long first_batch;   // batch index of this launch's first matrix
    int reduce_batch;
    int reserved;
};

struct CombineParams {
    PartialParams in, out;
    void* result[REDUCTION_KINDS + 1];  // sum, ..., argmin, mean; null: not asked for
    Long outputs;
    Long length;       // partials per output
    Long sums_length;  // the same for sum and sumsq, where atomics may have added them up already
    Long group;        // partials that one thread folds
    Long count;        // elements per output, for the mean
    const int* failing;      // GEMM_SCREENED: [output], not 0 where it is made of partials at all
    const int* failing_any;  // not 0 where any is
};
