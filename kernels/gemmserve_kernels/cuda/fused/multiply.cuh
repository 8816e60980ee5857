// One warpgroup's part of a tile: the real or the imaginary parts of its sums, from planes or from numbers as they are.
//
// The tensor core cuts sums towards zero. So products of PROMOTE steps leave it by an addition that rounds to nearest,
// which takes the scales of both vectors along. Mixed products (big times small) come first: while the partial sum is
// small, so is what is cut off. Real parts are re re - im im, and every other time -im im + re re (wgmma/schemes.cuh says
// why).
#pragma once

#include "../common/ptx/wgmma.cuh"
#include "operand.cuh"

// Sums of a tile of 64 x 64. Number e of column block j: column 8 j + 2 (lane % 4) + e % 2,
// row 16 warp + 8 (e / 2) + lane / 4.
struct PartSums {
    static constexpr int COLUMNS = Config::BLOCK_N / 8;
    float at[COLUMNS][4];
};

class PartMultiply {
  public:
    int row, column;  // of the lane's first element
    bool imaginary;

    GEMM_DEVICE explicit PartMultiply(int thread)
        : row(thread / 32 % 4 * 16 + thread % 32 / 4), column(thread % 4 * 2), imaginary(thread >= 128) {}

    // sums += the parts of A B over `steps` steps of k, from the planes of a stage at `address`. By a warpgroup.
    GEMM_DEVICE void from_planes(PartSums& sums, const unsigned char* stage, Address address, int steps) const {
        if (imaginary) {
            multiply<true>(sums, stage, address, steps);
        } else {
            multiply<false>(sums, stage, address, steps);
        }
    }

    // The same from numbers as they are, step by step of k.
    GEMM_DEVICE void from_numbers(PartSums& sums, const unsigned char* stage, int steps) const {
        const Value* const a = reinterpret_cast<const Value*>(stage);
        const Value* const b = reinterpret_cast<const Value*>(stage + Config::SIDE);
        PartSums of_chunk = {};
#pragma unroll 1
        for (int k = 0; k < steps; ++k) {
            const Value x[2] = {a[plain_at(row, k)], a[plain_at(row + 8, k)]};
#pragma unroll
            for (int j = 0; j < PartSums::COLUMNS; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Value y = b[plain_at(column + 8 * j + e % 2, k)];
                    const float by_re = imaginary ? y.im : y.re, by_im = imaginary ? y.re : -y.im;
                    float& sum = of_chunk.at[j][e];
                    sum = multiply_add(x[e / 2].im, by_im, multiply_add(x[e / 2].re, by_re, sum));
                }
            }
        }
#pragma unroll
        for (int j = 0; j < PartSums::COLUMNS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums.at[j][e] += of_chunk.at[j][e];
    }

  private:
    using Partial = float[4 * PartSums::COLUMNS];

    template <bool IMAGINARY>
    GEMM_DEVICE void multiply(PartSums& sums, const unsigned char* stage, Address address, int steps) const {
        const float* const scales = reinterpret_cast<const float*>(stage + Config::SCALES_AT);
        const Descriptor a = describe<Config::ROW>(address), b = describe<Config::ROW>(address + Config::SIDE);
        const float left[2] = {scales[row], scales[row + 8]};
        const float* const right = scales + Config::VECTORS + column;
#pragma unroll 1
        for (int step = 0; step < steps; step += 2 * Config::PROMOTE) {
            Partial partial;
            products<IMAGINARY, false>(partial, a, b, step);
            promote(sums, partial, left, right);
            if (step + Config::PROMOTE >= steps) break;
            products<IMAGINARY, true>(partial, a, b, step + Config::PROMOTE);
            promote(sums, partial, left, right);
        }
    }

    template <bool IMAGINARY, bool ODD>
    static GEMM_DEVICE void products(Partial& partial, Descriptor a, Descriptor b, int step) {
        constexpr int MINUS = IMAGINARY ? 1 : -1;
        constexpr Plane BY_RE = IMAGINARY ? IM_HIGH : RE_HIGH, BY_IM = IMAGINARY ? RE_HIGH : IM_HIGH;
        constexpr Plane BY_RE_LOW = IMAGINARY ? IM_LOW : RE_LOW, BY_IM_LOW = IMAGINARY ? RE_LOW : IM_LOW;
        const Descriptor from_a = a + step * 2 / 16, from_b = b + step * 2 / 16;
        pin(partial);
        wgmma_fence();
        add<1, RE_LOW, BY_RE>(partial, from_a, from_b, true);
        add<MINUS, IM_LOW, BY_IM>(partial, from_a, from_b);
        add<1, RE_HIGH, BY_RE_LOW>(partial, from_a, from_b);
        add<MINUS, IM_HIGH, BY_IM_LOW>(partial, from_a, from_b);
        if constexpr (ODD) {
            add<MINUS, IM_HIGH, BY_IM>(partial, from_a, from_b);
            add<1, RE_HIGH, BY_RE>(partial, from_a, from_b);
        } else {
            add<1, RE_HIGH, BY_RE>(partial, from_a, from_b);
            add<MINUS, IM_HIGH, BY_IM>(partial, from_a, from_b);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(partial);
    }

    // partial += SIGN A B of two planes over PROMOTE steps.
    template <int SIGN, Plane OF_A, Plane OF_B>
    static GEMM_DEVICE void add(Partial& partial, Descriptor a, Descriptor b, bool fresh = false) {
#pragma unroll
        for (int step = 0; step < Config::PROMOTE; step += 16) {
            Instruction<Config::BLOCK_N>::template multiply<SIGN, 0, 0, false>(
                partial, a + (OF_A * Config::PLANE + step * 2) / 16, b + (OF_B * Config::PLANE + step * 2) / 16,
                fresh && step == 0 ? 0 : 1);
        }
    }

    static GEMM_DEVICE void promote(
        PartSums& sums, const Partial& partial, const float (&left)[2], const float* right) {
#pragma unroll
        for (int j = 0; j < PartSums::COLUMNS; ++j) {
            const auto of_b = *reinterpret_cast<const Vector<float, 2>*>(right + 8 * j);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sums.at[j][e] = multiply_add(partial[4 * j + e], left[e / 2] * of_b.at[e % 2], sums.at[j][e]);
            }
        }
    }
};
