// What the host passes: gemmserve_kernels.device.structures reads the structure from here.
#pragma once

#include "../common/judging/counters.cuh"
#include "../common/params.cuh"

struct FusedParams {
    GemmParams gemm;
    unsigned items;   // of this launch; blocks take them in turns
    unsigned step_matrices, step_tiles;  // from one tile to the next of a block, where k is not cut: matrices, tiles
    int chunks;       // that k is cut into
    Long pieces;      // of a chunk: two steps of k each, of real numbers four; the last one maybe half outside
    int longer;       // the first chunks, which have one piece more
    int chunks_part;  // of one split
    int splits;
    int together;      // splits whose sums one block adds up, before one adds up theirs
    float* partial;    // splits > 1: one accumulator tile of each item
    float* grouped;    // splits > together: the same of each group of splits
    unsigned* arrivals;  // splits > 1: zero at the start, for each group of splits of each tile, then for each tile
    unsigned arrivals_count;  // of this launch: what fused_columns sets to zero
    unsigned images;          // that fused_columns makes: of each chunk of each tile's columns what a stage has of them
    int own_columns;          // whether every matrix has its own columns; else all have the first one's
    Long first_matrix;        // that has images, where every matrix has its own
    unsigned char* columns;   // the images
    ElementCounters* counters;
};
