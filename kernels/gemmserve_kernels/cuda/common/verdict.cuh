// Which tiles of a product may be taken from float16 planes: gemmserve_kernels.planes.verdict has the proof.
#pragma once

#include "params.cuh"

constexpr int GROUP = 256;        // vectors whose largest deficit is kept
constexpr int SPARE = 16;         // steps of k at which both vectors are large, beside those that make up for losses
constexpr int NEVER = 1 << 30;    // the deficit of a vector that is not finite, and the largest: two are added as Long

// Which tiles a kernel computes: all, those that float16 planes serve, or the rest of these.
enum Tiles { TILES_ALL, TILES_SERVED, TILES_REST };

// What the first words of both operands' deficits say, read after the pre-pass has ended. Without a doubt all tiles are
// served.
template <Tiles TILES>
struct Doubt {
    bool any;

    GEMM_DEVICE Doubt(const int* left, const int* right) : any(false) {
        if constexpr (TILES != TILES_ALL) any = (*left | *right) != 0;
    }

    // Whether there is nothing to do.
    GEMM_DEVICE bool none() const { return TILES == TILES_REST && !any; }

    // Whether the kernel has the tile, which lies in one group of rows and one of columns, where there is a doubt.
    static GEMM_DEVICE bool wants(Long row_deficit, Long column_deficit, Long most_deficit) {
        return (row_deficit + column_deficit <= most_deficit) == (TILES == TILES_SERVED);
    }
};

GEMM_DEVICE Long groups_of(Long vectors) { return (vectors + GROUP - 1) / GROUP; }

// Deficits of one operand's vectors: how many are in doubt, then the largest of each group (matrices, groups).
GEMM_DEVICE Long deficit_of(const int* deficits, Long matrix, Long vectors, Long vector) {
    return deficits[1 + matrix * groups_of(vectors) + vector / GROUP];
}
