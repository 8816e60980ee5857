// What the host passes: gemmserve_kernels.device.structures reads the structures from here.
#pragma once

#include "../common/judging/counters.cuh"
#include "../common/params.cuh"
#include "../common/ptx/hopper.cuh"

// The planes of one operand: a tensor (k, row, plane, matrix), and for each row the exponent that scales it back. Or an
// operand as it is: (k, row, 1, matrix), or (row, k, 1, matrix) where rows lie next to each other, without exponents.
struct PlaneParams {
    const int* exponents;  // (matrices, rows)
    const int* deficits;   // common/judging/verdict.cuh, or judged.cuh, where tiles are chosen by them
    Long deficit_words;    // judged.cuh: from one product to the next, 0 where the operand is shared
    Long first_matrix;
    Long batch_stride[BATCH_DIMS];  // matrices
};

// D = alpha L R^T 2^(exponents) + beta C: the rows of L are rows of D, the rows of R are its columns.
struct WgmmaParams {
    TensorMap map_left, map_right;
    PlaneParams left, right;
    MatrixParams c, d;
    int* wanted;       // not 0 where a tile is left to the wide way
    ElementCounters* counters;  // of the rest of the tiles
    float* workspace;  // (parts, batch, m, n) sums, complex where the data are, where k is split over grids
    Long m, n;
    int batch_shape[BATCH_DIMS];
    int k_blocks;
    int parts;             // that k is split into beside the split over a cluster
    int tiles_m, tiles_n;  // tiles of one matrix; a row of tiles_m is a cluster's
    int matrices;          // of this launch
    int units;             // matrices x tiles x parts
    int most_deficit;      // of a row and a column whose product float16 planes, or residues, serve
    int unused;
    double alpha[2];
    double beta[2];
    RowReduceParams reduce;  // of wgmma_reduce
};
