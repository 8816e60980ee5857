// Products of planes in shared memory, and how their sums leave the tensor core.
#pragma once

#include "../common/ptx/wgmma.cuh"
#include "../common/numbers/types.cuh"

// The consumer's sums: COMPONENTS (re, im) of 64 x BLOCK_N, in PARTS instructions side by side.
template <class Config>
using Sums = float[Config::COMPONENTS][Config::PARTS][Config::VALUES];

// What one instruction adds up, between promotions.
template <class Config>
using Partial = float[Config::VALUES];

// Piece of a stage: from step `step` of 16 columns of k on; the columns of instruction `part`.
struct Piece {
    int step, part;
};

// d += SIGN left[LEFT] right[RIGHT], planes of the stage, over STEPS steps; d = where `fresh`.
template <class Config, int LEFT, int RIGHT, int SIGN>
GEMM_DEVICE void product(Partial<Config>& d, Descriptor left, Descriptor right, Piece piece, bool fresh) {
    const int columns = piece.part * Config::INSTRUCTION_N * Config::ROW_BYTES;
#pragma unroll
    for (int step = 0; step < Config::STEPS; ++step) {
        const int steps = (piece.step + step) * 16;  // 2 bytes further along k each, or a row of 64 neighbours
        const int in_left = steps * (Config::LEFT_ACROSS ? 128 : 2);
        const int in_right = steps * (Config::RIGHT_ACROSS ? 128 : 2);
        Instruction<Config::INSTRUCTION_N>::template multiply<
            SIGN, Config::LEFT_ACROSS, Config::RIGHT_ACROSS, Config::BFLOAT>(
            d, left + (LEFT * Config::LEFT_PLANE + in_left) / 16,
            right + (RIGHT * Config::RIGHT_PLANE + columns + in_right) / 16,
            fresh && step == 0 ? 0 : 1);
    }
}

// Calls visit(Number<i>, Number<j>) for the parts i of the left number and j of the right one whose product is added to
// that of the first parts: small ones come before large ones, as the tensor core truncates what it adds.
template <class Config, class Visit>
GEMM_DEVICE void for_small_products(Visit visit) {
    if constexpr (Config::NINE) {
        visit(Number<2>(), Number<2>());
        visit(Number<2>(), Number<1>());
        visit(Number<1>(), Number<2>());
    }
    if constexpr (Config::DEPTH == 3) {
        visit(Number<2>(), Number<0>());
        visit(Number<0>(), Number<2>());
        visit(Number<1>(), Number<1>());
    }
    if constexpr (Config::DEPTH >= 2) {
        visit(Number<1>(), Number<0>());
        visit(Number<0>(), Number<1>());
    }
}

// Waits for what is in `temporary`.
template <int COUNT>
GEMM_DEVICE void finish(float (&temporary)[COUNT]) {
    wgmma_commit();
    wgmma_wait<0>();
    pin(temporary);
}

template <int SIGN, int COUNT>
GEMM_DEVICE void promote(float (&sum)[COUNT], const float (&temporary)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = SIGN > 0 ? sum[i] + temporary[i] : sum[i] - temporary[i];
}

// sum += sign temporary, `sign` 1 or -1: the product is exact.
template <int COUNT>
GEMM_DEVICE void promote(float (&sum)[COUNT], const float (&temporary)[COUNT], float sign) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = fmaf(temporary[i], sign, sum[i]);
}
