// What the prelude says of fused_cluster.cu, as one type.
#pragma once

struct Config {
    static constexpr int CLUSTER = GEMM_CLUSTER;  // blocks that share rows of op(A)
    static constexpr int PARTS = 2;  // of a number
    static constexpr bool TALL = false;
    static constexpr int BLOCK_M = 128, BLOCK_N = 64;
    static constexpr int VECTORS = 64;  // rows of a warpgroup of consumers, and columns: what is judged together
    static constexpr int CHUNK = 64;    // steps of k that have their own scales, at most
    static constexpr int HALF = CHUNK / 2;  // of a stage
    static constexpr int PROMOTE = GEMM_PROMOTE, STAGES = GEMM_STAGES;
    static constexpr int CONSUMERS = 256, PRODUCERS = 256, THREADS = CONSUMERS + PRODUCERS, GROUP_THREADS = 128;
    static constexpr int PRODUCER_WARPS = PRODUCERS / 32, CONSUMER_WARPS = CONSUMERS / 32, SIDE_WARPS = PRODUCER_WARPS;
    static constexpr int CONSUMER_REGISTERS = 168, PRODUCER_REGISTERS = 88;
    // A warp of producers splits so many vectors of a chunk at once. Of those of A each block has its share.
    static constexpr int TASK = 8, TASKS_A = BLOCK_M / TASK, OWN_A = TASKS_A / CLUSTER, TASKS_B = BLOCK_N / TASK;
    static constexpr int PLANES = 4;
    // Planes lie in pairs: a row has the high parts of a vector's 32 steps and then the low ones. Those of A are re and im of
    // eight rows, which are copied at once, then of the next eight. Those of B are -im, re, im of all columns, one behind
    // the other, so that one instruction multiplies two of them (multiply.cuh).
    static constexpr int ROW = 2 * HALF * 2, LOW = HALF * 2;
    static constexpr int PAIR_A = TASK * ROW, TASK_A = 2 * PAIR_A, SIDE_A = TASKS_A * TASK_A;
    static constexpr int PAIR_B = BLOCK_N * ROW, TASK_B = TASK * ROW, STAGE_BYTES = SIDE_A + 3 * PAIR_B;
    static constexpr int ALIGNMENT = 1024;  // of planes
    // Behind the stages: what is known of the vectors of two chunks; numbers as they are, of each warp of producers and, a few
    // steps of both operands at a time, of each warpgroup of consumers.
    static constexpr int RECORD = 64, KNOWN_STEP = (TASKS_A + TASKS_B) * RECORD, KNOWN_AT = STAGES * STAGE_BYTES;
    static constexpr int SLOTS_AT = KNOWN_AT + 2 * KNOWN_STEP, SLOT_BYTES = TASK * CHUNK * 8;
    static constexpr int FEW = 8, FEW_SIDE = FEW * VECTORS * 8, FEW_BYTES = 2 * FEW_SIDE;
    static constexpr int FEW_AT = SLOTS_AT + PRODUCER_WARPS * SLOT_BYTES;
    static constexpr int SHARED_BYTES = FEW_AT + 2 * FEW_BYTES + ALIGNMENT - 16;  // memory is aligned to 16 bytes
    // What operand.cuh says of planes and numbers of other tiles.
    static constexpr int PLANE = PAIR_B, TURNED = VECTORS, TURNED_PLANES = 3, TURNED_PLANE = PAIR_B, NUMBERS_ROW = CHUNK * 8;
    static_assert(CLUSTER == 2 && OWN_A == PRODUCER_WARPS && TASKS_B == PRODUCER_WARPS, "a task of either side for each warp");
    static_assert(PROMOTE == 16 || PROMOTE == HALF, "sums of whole instructions within a stage");
    static_assert(STAGES == 2 || STAGES == 3, "two chunks are known at a time");
};
