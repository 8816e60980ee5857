// What the prelude says, as one type.
#pragma once

#include "../common/numbers/types.cuh"

struct Config {
    static constexpr int BLOCK_M = 64, BLOCK_N = 64;
    static constexpr int CHUNK = 64;    // steps of k that have their own scales, at most
    static constexpr int PROMOTE = GEMM_PROMOTE, STAGES = GEMM_STAGES;
    static constexpr int CONSUMERS = 256, PRODUCERS = 256, THREADS = CONSUMERS + PRODUCERS;
    static constexpr int PRODUCER_WARPS = PRODUCERS / 32, CONSUMER_WARPS = CONSUMERS / 32;
    static constexpr int PLANES = 4;    // re, im of the high parts, re, im of the low parts
    static constexpr int ROW = CHUNK * 2;  // bytes of one vector in one plane
    static constexpr int PLANE = BLOCK_M * ROW, SIDE = PLANES * PLANE;  // bytes; those of B lie behind those of A
    // Places in a stage of planes, scales, what is known of each vector, and whether a producer's warp has a doubt.
    static constexpr int SCALES_AT = 2 * SIDE, COUNTS_AT = SCALES_AT + 4 * (BLOCK_M + BLOCK_N);
    static constexpr int DOUBTS_AT = COUNTS_AT + 4 * (BLOCK_M + BLOCK_N);
    static constexpr int STAGE_BYTES = DOUBTS_AT + 1024;  // planes are aligned to 1024 bytes
    static constexpr int EXCHANGE_AT = STAGES * STAGE_BYTES, EXCHANGE_BYTES = CONSUMERS * 16 * 4;
    static constexpr int ALIGNMENT = 1024;
    static constexpr int SHARED_BYTES = EXCHANGE_AT + EXCHANGE_BYTES + ALIGNMENT;
    static_assert(BLOCK_M == 64 && BLOCK_N == 64, "a warpgroup multiplies 64 x 64");
    static_assert(PROMOTE == 16 || PROMOTE == 32, "whole instructions");
    static_assert(PRODUCER_WARPS <= 16, "doubts of so many warps");
    static_assert(STAGE_BYTES % 1024 == 0, "planes are aligned");
};
