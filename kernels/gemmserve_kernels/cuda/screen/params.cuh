// What the host passes to the kernels that find extremes of products (gemmserve_kernels.device.structures).
#pragma once

#include "../common/params.cuh"

// A line along k after rounding, scaled: `scale` takes it back. `norm` is no less than its Euclidean norm, before and after
// rounding, and `residual` no less than that of what rounding took: `norm` 0 where all of it is zero, UNKNOWN where
// something is not finite, or so large or small that no power of two helps.
struct alignas(16) LineInfo {
    double scale;
    float norm, residual;
};
constexpr float UNKNOWN = -1.0f;

// One operand's lines that are rounded.
struct RoundSide {
    MatrixParams x;  // lines by k
    Long first;              // matrix of the batch
    Long first_line, lines;  // the lines to round
    Long stored;             // lines of a matrix in `rounded`
    Long blocks;
    Half* rounded;   // [matrix][line][pitch]
    LineInfo* info;  // [matrix][line]
    int conjugate;
    int reserved;
};

struct RoundParams {
    RoundSide left, right;
    Long batch_shape[BATCH_DIMS];
    Long k, pitch;  // elements of a line; numbers of one that is rounded
    int* cleared;   // words that are set to zero on the way
    Long clear;
    int steps;     // of k, that shared memory holds of a block's lines
    int exponent;  // of the largest number of a line, scaled
};

struct ScreenParams {
    MatrixParams a, b;  // rows by k, columns by k
    Long batch_shape[BATCH_DIMS];
    Long first;            // matrix of the launch
    Long first_row, rows;  // of the panel
    Long m, n, k;          // of the product
    const Half* products;  // [matrix][row][pitch], of complex numbers a row of real parts and one of imaginary parts
    Long pitch;
    Long products_step;          // rows between matrices: 0 where all have the same
    const LineInfo* of_rows;     // [matrix][row of the panel]
    const LineInfo* of_columns;  // [matrix][column]
    Long rows_step, columns_step;  // between matrices: 0 where all have the same
    int* failing;                  // [matrix of the batch][block of rows]: not 0 where a row has too many candidates
    int* failing_rows;             // [matrix of the batch][row]: the same of each
    int* failing_any;              // the same of all
    Long block, blocks;            // rows of a block; blocks of a matrix
    Long parts;                    // slots of a row that the full product has; the extremes go to the first of them
    PartialParams partial;         // where results are folded over the batch
    void* result[REDUCTION_KINDS];  // where they are not
    Long outputs;
    Long first_batch;
    double alpha[2];
    float accumulated;  // bound of what the tensor core's sums are off by, over the norms
    int reduce_batch;
    int conjugate_a, conjugate_b;
};
