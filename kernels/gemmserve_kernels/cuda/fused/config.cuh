// What the prelude says, as one type.
#pragma once

#include "../common/numbers/types.cuh"

#if defined(GEMM_CLUSTER)
#include "cluster/config.cuh"
#else
struct Config {
    static constexpr int CLUSTER = 1;
    static constexpr int PARTS = GEMM_PARTS;  // of a number: two of complex64, one of float32
    static constexpr int BLOCK_M = GEMM_BLOCK_M, BLOCK_N = 64;
    static constexpr bool TALL = BLOCK_M == 128;  // rows of op(A) go through registers: fused_tall.cu
    static constexpr int VECTORS = 64;  // of an operand that has planes in shared memory
    static constexpr int CHUNK = 64;    // steps of k that have their own scales, at most
    static constexpr int PROMOTE = GEMM_PROMOTE, STAGES = GEMM_STAGES;
    // Real numbers have half a block, of which a multiprocessor has two at a time: as much of theirs is on its way then.
    static constexpr int BLOCKS = PARTS == 2 ? 1 : 2;
    static constexpr int CONSUMERS = 256 / BLOCKS, PRODUCERS = TALL ? 128 : 512 / BLOCKS, COPIERS = TALL ? 0 : 128;
    static constexpr int THREADS = CONSUMERS + PRODUCERS + COPIERS;
    static constexpr int PRODUCER_WARPS = PRODUCERS / 32, CONSUMER_WARPS = CONSUMERS / 32, COPIER_WARPS = COPIERS / 32;
    static constexpr int SIDE_WARPS = TALL ? PRODUCER_WARPS : PRODUCER_WARPS / 2;  // producers of one operand's planes
    static constexpr int CONSUMER_REGISTERS = TALL ? 224 : PARTS == 1 ? 104 : 96;
    static constexpr int PRODUCER_REGISTERS = TALL || PARTS == 1 ? 56 : 64, COPIER_REGISTERS = PARTS == 1 ? 40 : 56;
    static constexpr int PLANES = 2 * PARTS;  // re, im of the high parts, re, im of the low parts
    // Planes of columns that are multiplied to real and imaginary sums at once (multiply.cuh): -im, re, im of the high parts,
    // then of the low parts; first those of the first TURNED columns, then those of the others. Real ones have one of either.
    static constexpr int TURNED_PLANES = PARTS == 2 ? 6 : 2, TURNED = PARTS == 2 ? 32 : VECTORS;
    static constexpr int ROW = CHUNK * 2;  // bytes of one vector in one plane
    static constexpr int PLANE = VECTORS * ROW, SIDE = PLANES * PLANE;  // bytes; those of B lie behind those of A
    static constexpr int SIDES = TALL ? 1 : 2;  // that have planes
    static constexpr int TURNED_PLANE = TURNED * ROW;
    static constexpr int PLANES_BYTES = TALL ? SIDE : SIDE + TURNED_PLANES * PLANE;
    // What is known of a chunk's vectors: the scale of each, how much of it is not large (operand.cuh), and whether a
    // producer's warp has a doubt.
    static constexpr int SCALES_AT = 0, COUNTS_AT = SCALES_AT + 4 * SIDES * VECTORS;
    static constexpr int DOUBTS_AT = COUNTS_AT + 2 * SIDES * VECTORS, KNOWN_BYTES = DOUBTS_AT + 16;
    static constexpr int ALIGNMENT = 1024;  // of planes
    // A stage has planes, and those of tall tiles what is known behind them: both are copied at once.
    static constexpr int IMAGE_BYTES = PLANES_BYTES + KNOWN_BYTES;
    static constexpr int STAGE_BYTES = TALL ? round_up(IMAGE_BYTES, ALIGNMENT) : PLANES_BYTES;
    // Behind the stages, of tall tiles: for every stage the rows of a chunk as they are, ROWS for each warp of consumers, and
    // a few steps of columns as they are.
    static constexpr int ROWS = 16, SLOT_ROW = CHUNK * 8 + 32, SLOT_BYTES = ROWS * SLOT_ROW;
    static constexpr int SLOT_STAGE = CONSUMER_WARPS * SLOT_BYTES;
    static constexpr int FEW_STEPS = 4, FEW_BYTES = FEW_STEPS * VECTORS * 8;
    static constexpr int SLOTS_AT = STAGES * STAGE_BYTES, FEW_AT = SLOTS_AT + STAGES * SLOT_STAGE;
    // Shared memory of other tiles: a chunk of both operands as they are, A's first, and what is known of every stage.
    static constexpr int NUMBERS_ROW = CHUNK * PARTS * 4, NUMBERS_BYTES = VECTORS * NUMBERS_ROW;
    static constexpr int COPIED = VECTORS / (COPIERS > 0 ? COPIER_WARPS : 1);  // vectors of an operand, by a warp
    static constexpr int KNOWN_AT = TALL ? PLANES_BYTES : SLOTS_AT + SIDES * NUMBERS_BYTES;
    static constexpr int KNOWN_STEP = TALL ? STAGE_BYTES : KNOWN_BYTES;  // from one stage's to the next
    static constexpr int END = TALL ? FEW_AT + CONSUMER_WARPS * FEW_BYTES : KNOWN_AT + STAGES * KNOWN_STEP;
    static constexpr int SHARED_BYTES = END + ALIGNMENT - 16;  // memory is aligned to 16 bytes
    static_assert(BLOCK_N == VECTORS && (TALL || BLOCK_M == VECTORS), "a warpgroup multiplies 64 x 64");
    static_assert(PARTS == 2 || (PARTS == 1 && !TALL), "rows of complex numbers go through registers, no others");
    static_assert(
        PROMOTE == 16 || PROMOTE == 32 || ((TALL || PARTS == 1) && PROMOTE == CHUNK), "whole instructions, halves, chunks");
    static_assert(PRODUCER_WARPS <= 16 && IMAGE_BYTES % 16 == 0, "doubts of so many warps");
};
#endif
