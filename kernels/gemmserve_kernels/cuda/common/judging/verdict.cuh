// Which tiles of a product may be taken from float16 planes: gemmserve_kernels.algorithms.common.verdict has the proof.
#pragma once

#include "../params.cuh"

constexpr int GROUP = 256;        // vectors of which the largest counts are kept
constexpr int SPARE = 16;         // large terms that every sum has beside those that make up for losses
constexpr int NEVER = 1 << 30;    // the count of a vector that is not finite, and the largest: two are added as Long
constexpr int GROUP_WORDS = 4;    // of a group, see Deficits

// Which tiles a kernel computes: all, those that float16 planes serve, the rest of these, or those that residues do not serve
// (judged.cuh).
enum Tiles { TILES_ALL, TILES_SERVED, TILES_REST, TILES_FAILING };

GEMM_DEVICE Long groups_of(Long vectors) { return (vectors + GROUP - 1) / GROUP; }

// Of the vectors of a group, the largest number of steps of k at which the better (the worse) part is not large, and of
// parts that lose; which parts are not all zero: 1 the real, 2 the imaginary ones.
struct Deficits {
    Long best, worst, lossy;
    int present;

    GEMM_DEVICE explicit Deficits(const int* words) : best(words[0]), worst(words[1]), lossy(words[2]), present(words[3]) {}
    GEMM_DEVICE bool one_part() const { return present == 1 || present == 2; }
};

// Whether planes serve the products of two groups' vectors. `most`: k - SPARE.
GEMM_DEVICE bool is_served(const Deficits& a, const Deficits& b, Long most) {
    const Long left = a.best + b.worst, right = a.worst + b.best;
    Long terms = left < right ? left : right;
    if (a.one_part() && b.one_part()) terms = a.best + b.best;
    return terms + (a.lossy + b.lossy + 3) / 4 <= most;
}

// What the first words of both operands' deficits say, read after the pre-pass has ended: without a doubt all tiles are
// served. Who leaves a tile to the wide way says so in `wanted`, which that reads.
template <Tiles TILES>
struct Doubt {
    int* wanted;
    bool any;

    GEMM_DEVICE Doubt(const int* left, const int* right, int* rest) : wanted(rest), any(false) {
        if constexpr (TILES == TILES_SERVED) any = (*left | *right) != 0;
        if constexpr (TILES >= TILES_REST) any = *rest != 0;
    }

    // Whether there is nothing to do.
    GEMM_DEVICE bool none() const { return TILES >= TILES_REST && !any; }

    // Whether the kernel has the tile, which lies in one group of rows and one of columns, where there is a doubt.
    GEMM_DEVICE bool wants(const Deficits& row, const Deficits& column, Long most) const {
        const bool served = is_served(row, column, most);
        if (TILES == TILES_SERVED && !served && threadIdx.x == 0) atomicOr(wanted, 1);
        return served == (TILES == TILES_SERVED);
    }
};

// An operand's words: how many vectors are in doubt, then (matrices, groups, GROUP_WORDS).
GEMM_DEVICE Deficits deficits_of(const int* words, Long matrix, Long vectors, Long vector) {
    return Deficits(words + 1 + (matrix * groups_of(vectors) + vector / GROUP) * GROUP_WORDS);
}
