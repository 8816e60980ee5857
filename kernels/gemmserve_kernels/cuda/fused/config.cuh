// What the prelude says, as one type.
#pragma once

#include "../common/numbers/types.cuh"

struct Config {
    static constexpr int BLOCK_M = 64, BLOCK_N = 64;
    static constexpr int CHUNK = 64;    // steps of k that have their own scales, at most
    static constexpr int PROMOTE = GEMM_PROMOTE, STAGES = GEMM_STAGES;
    static constexpr int CONSUMERS = 256, SIDE_THREADS = 256, THREADS = CONSUMERS + 2 * SIDE_THREADS;
    static constexpr int SIDE_WARPS = SIDE_THREADS / 32, PRODUCER_WARPS = 2 * SIDE_WARPS, CONSUMER_WARPS = CONSUMERS / 32;
    // Of 80 that every thread begins with: what some take, others must have given.
    static constexpr int CONSUMER_REGISTERS = 96, PRODUCER_REGISTERS = 72;
    static_assert(CONSUMERS * CONSUMER_REGISTERS + 2 * SIDE_THREADS * PRODUCER_REGISTERS <= THREADS * 80, "no more than are there");
    static constexpr int PLANES = 4;    // re, im of the high parts, re, im of the low parts
    static constexpr int ROW = CHUNK * 2;  // bytes of one vector in one plane
    static constexpr int PLANE = BLOCK_M * ROW, SIDE = PLANES * PLANE;  // bytes; those of B lie behind those of A
    // Of a stage: planes, scales, what is known of each vector, and whether a producer's warp has a doubt.
    static constexpr int SCALES_AT = 2 * SIDE, COUNTS_AT = SCALES_AT + 4 * (BLOCK_M + BLOCK_N);
    static constexpr int DOUBTS_AT = COUNTS_AT + 4 * (BLOCK_M + BLOCK_N);
    static constexpr int STAGE_BYTES = DOUBTS_AT + 1024;  // planes are aligned to 1024 bytes
    static constexpr int EXCHANGE_AT = STAGES * STAGE_BYTES, EXCHANGE_BYTES = CONSUMERS * 16 * 4;
    static constexpr int SLOTS_AT = EXCHANGE_AT + EXCHANGE_BYTES, SLOTS_BYTES = 2 * SIDE_THREADS * 128;
    static constexpr int ALIGNMENT = 1024;
    static constexpr int SHARED_BYTES = SLOTS_AT + SLOTS_BYTES + ALIGNMENT;
    static_assert(BLOCK_M == 64 && BLOCK_N == 64, "a warpgroup multiplies 64 x 64");
    static_assert(PROMOTE == 16 || PROMOTE == 32, "whole instructions");
    static_assert(STAGE_BYTES % 1024 == 0, "planes are aligned");
};
