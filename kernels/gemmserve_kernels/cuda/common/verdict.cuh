// Which tiles of a product may be taken from float16 planes: gemmserve_kernels.planes.verdict has the proof.
#pragma once

#include "params.cuh"

constexpr int GROUP = 256;        // vectors whose largest deficit is kept
constexpr int SPARE = 16;         // steps of k at which both vectors are large, beside those that make up for losses
constexpr int NEVER = 1 << 30;    // the deficit of a vector that is not finite, and the largest: two are added as Long

GEMM_DEVICE Long groups_of(Long vectors) { return (vectors + GROUP - 1) / GROUP; }

// Deficits of one operand's vectors: how many are in doubt, then the largest of each group (matrices, groups).
GEMM_DEVICE Long deficit_of(const int* deficits, Long matrix, Long vectors, Long vector) {
    return deficits[1 + matrix * groups_of(vectors) + vector / GROUP];
}
