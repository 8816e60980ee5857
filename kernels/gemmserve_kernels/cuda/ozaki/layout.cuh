// How bytes lie in memory between the kernels.
//
// Residues of an operand: blocks of 128 lines by 128 steps of k, 16 KiB each, in the order in which the matrix instruction
// wants them in shared memory (swizzled over 128 bytes: PTX ISA, "Shared memory matrix layout"), so that a stage is a few
// straight copies. Planes hold a multiple of 256 lines; those past the end are arbitrary.
//
// Products modulo p, one byte each, in the order in which the matrix instruction leaves them in registers.
//
// A tile has 128 x 256 elements: two groups of 128 threads have 64 rows each. A thread holds 32 words of 4 bytes a tile;
// word w of all threads of a group lies together, so that warps write and read 128 bytes at once. Rows and columns are
// those of wgmma.m64n256's accumulator (PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk32").
#pragma once

#include "../common/platform.cuh"

constexpr int TILE_M = 128, TILE_N = 256, TILE_BYTES = TILE_M * TILE_N;
constexpr int GROUP_THREADS = 128, WORDS = 32;
constexpr int TILE_WORDS = 2 * WORDS * GROUP_THREADS;

constexpr int BLOCK_LINES = 128, BLOCK_STEPS = 128, BLOCK_BYTES = BLOCK_LINES * BLOCK_STEPS;

// Where the residue of `line` at step `k` lies in its plane; pieces of 16 along k stay together.
GEMM_DEVICE Long residue_offset(Long line, Long k, Long pitch) {
    const Long block = (line / BLOCK_LINES) * (pitch / BLOCK_STEPS) + k / BLOCK_STEPS;
    const int row = static_cast<int>(line % BLOCK_LINES), in_row = static_cast<int>(k % BLOCK_STEPS);
    return block * BLOCK_BYTES + row * BLOCK_STEPS + ((in_row / 16 ^ row & 7) * 16 + in_row % 16);
}

// Word number `index` of a tile; its bytes are at columns + 0, 1, 8, 9.
GEMM_DEVICE int word_row(int index) {
    const int thread = index % GROUP_THREADS, word = index / GROUP_THREADS % WORDS, group = index / (GROUP_THREADS * WORDS);
    return group * 64 + thread / 32 * 16 + thread % 32 / 4 + word / 16 * 8;
}
GEMM_DEVICE int word_column(int index) {
    const int thread = index % GROUP_THREADS, word = index / GROUP_THREADS % WORDS;
    return word % 16 * 16 + thread % 4 * 2;
}
GEMM_DEVICE int byte_column(int byte) { return byte / 2 * 8 + byte % 2; }

// Steps of k after which sums of products of two bytes are reduced: 2^15 (2^8 - 1)^2 + 2^8 < 2^31.
constexpr int MOST_STEPS = 32768;

// The remainder of an unsigned number below 2^31 + 2^9, in [0, d]; d stands for 0. `reciprocal` is floor(2^39 / d): the
// quotient is at most one too small, and only where d, from 129 to 256, divides the number.
GEMM_DEVICE unsigned reduce(unsigned x, unsigned divisor, unsigned reciprocal) {
    return x - (__umulhi(x, reciprocal) >> 7) * divisor;
}
