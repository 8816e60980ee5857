// What the host passes: gemmserve_kernels.device.structures reads the structures from here.
#pragma once

#include "../common/judging/counters.cuh"
#include "../common/params.cuh"

struct MmaParams {
    GemmParams gemm;  // first_tile counts blocks: `splits` for each tile
    Long k_part;      // steps of k of one split
    int splits;
    unsigned mask;       // TF32_MASK (see split_tf32); of planes, all bits (see PlaneOperand)
    float* partial;      // splits > 1: one accumulator tile of each block, by tile and split
    unsigned* arrivals;  // splits > 1: zero for each tile at the start
    // Planes: the exponents of A's rows and B's columns, and the step between two matrices of the batch.
    const int* exponents[2];
    Long exponent_stride[2][BATCH_DIMS];
    Long plane_stride[2];  // elements from one plane to the next
    // Where tiles are chosen by them (common/judging/verdict.cuh): the words that say whether there is a doubt, and the deficits of
    // groups of A's rows and of B's columns with the step between two matrices of the batch.
    const int* doubt[2];
    const int* deficits[2];
    Long deficit_stride[2][BATCH_DIMS];
    int* wanted;       // not 0 where a tile is left to the wide way
    Long most_deficit;
    unsigned blocks;  // of this launch, which has a smaller grid where blocks look for the rest of the tiles
    unsigned unused;
    ElementCounters* counters;  // of the rest of the tiles
    RowReduceParams reduce;  // of mma_reduce
};
