// From a block's number to the tile it computes.
#pragma once

#include "params.cuh"

struct TileCoordinate {
    Long batch;
    Long tile_m, tile_n;
};

struct Quotient {
    Long quotient, remainder;
};

// 64-bit division is slow on a GPU: most sizes fit 32 bits.
GEMM_DEVICE Quotient divide(Long x, Long by) {
    if ((x | by) >> 32 == 0) {
        const unsigned small = static_cast<unsigned>(x), divisor = static_cast<unsigned>(by);
        return {static_cast<Long>(small / divisor), static_cast<Long>(small % divisor)};
    }
    return {x / by, x % by};
}

// Blocks that run together walk down GROUP rows of tiles before they move right, so that their operands stay in L2
// (the grouped order of Triton's matrix multiplication tutorial).
template <int GROUP>
GEMM_DEVICE TileCoordinate tile_of(Long number, Long tiles_m, Long tiles_n) {
    const Quotient batch = divide(number, tiles_m * tiles_n);
    const Quotient group = divide(batch.remainder, GROUP * tiles_n);
    const Long first = group.quotient * GROUP;
    const Long height = tiles_m - first < GROUP ? tiles_m - first : GROUP;
    const Quotient in_group = divide(group.remainder, height);
    return {batch.quotient, first + in_group.remainder, in_group.quotient};
}

// Element offset of a matrix of the batch; the last dimension runs fastest.
GEMM_DEVICE Long batch_offset(Long batch, const Long (&shape)[BATCH_DIMS], const Long (&stride)[BATCH_DIMS]) {
    Long offset = 0;
#pragma unroll
    for (int d = BATCH_DIMS - 1; d >= 0; --d) {
        if (shape[d] != 1) {
            const Quotient split = divide(batch, shape[d]);
            offset += split.remainder * stride[d];
            batch = split.quotient;
        }
    }
    return offset;
}
