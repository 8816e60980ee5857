// What the host passes to the pre-pass (gemmserve_kernels.device.structures).
#pragma once

#include "../common/params.cuh"

// One operand of a product, as vectors of length k: the rows of op(A), the columns of op(B).
struct SplitOperandParams {
    MatrixParams source;  // row_stride from vector to vector, column_stride along k
    Long batch_shape[BATCH_DIMS];
    Half* planes;          // float16 or bfloat16 (matrices, planes, rows, pitch)
    int* exponents;        // (matrices, rows)
    int* deficits;         // float16 planes: see common/judging/verdict.cuh; zero before the launch
    int* flags;            // bfloat16 planes: (matrices, rows), see common/judging/flag_bits.cuh
    Long rows, k, pitch;
    Long units;            // of one matrix: what is taken at a time, see Queue
    Long matrices;
    int conjugate;
    int groups;            // that begin with this operand
    int chunk;             // units taken at a time, one after the other
    int reserved;
};

// What is counted into, zeroed: by a kernel, since the next one can begin meanwhile.
struct ClearParams {
    int* words;
    Long count;
};

struct SplitParams {
    SplitOperandParams a, b;
    int* status;        // [0]: not 0 where anything is deep; [1], [2]: units taken of a, of b
    const int* gate;   // nothing is done where the word is 0; null: there is no gate
};
