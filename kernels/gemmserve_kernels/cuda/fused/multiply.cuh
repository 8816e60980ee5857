// A warpgroup's half of a tile, 64 x 32 (of real numbers the whole one): its sums, from planes or from numbers as they are.
//
// Planes of B's -im, re and im lie one behind the other, so that one instruction multiplies a plane of A with two of them: re(A) with
// re and im, im(A) with -im and re. The first 32 columns of what comes out are real parts, the others imaginary ones.
// The tensor core cuts sums towards zero. So products of PROMOTE steps leave it by an addition that rounds to nearest,
// which takes the scales of both vectors along. Mixed products (big times small) come first: while the partial sum is
// small, so is what is cut off. Real parts are re re - im im, and every other time -im im + re re (wgmma/schemes.cuh says
// why).
#pragma once

#include "../common/ptx/wgmma.cuh"
#include "gather.cuh"

class HalfMultiply {
  public:
    int row, column;  // of the lane's first element, in the tile: the numbers of Sums

    // `half`: which one, known to all lanes.
    GEMM_DEVICE HalfMultiply(int thread, int half)
        : row(thread / 32 % 4 * 16 + thread % 32 / 4), column(thread % 4 * 2 + half * Config::TURNED), half(half) {}

    // sums += A B over `steps` steps of k, from the planes of a stage at `address` and from its scales. By a warpgroup.
    GEMM_DEVICE void from_planes(Sums& sums, Address address, const float* scales, int steps) const {
        const Descriptor a = describe<Config::ROW>(address);
        const Descriptor b =
            describe<Config::ROW>(address + Config::SIDE + half * Config::TURNED_PLANES * Config::TURNED_PLANE);
        const float left[2] = {scales[row], scales[row + 8]};
        const float* const right = scales + Config::VECTORS + column;
#pragma unroll 1
        for (int step = 0; step < steps; step += 2 * Config::PROMOTE) {
            Partial partial;
            products<false>(partial, a, b, step);
            promote(sums, partial, left, right);
            if (Config::PROMOTE == Config::CHUNK || step + Config::PROMOTE >= steps) break;
            products<true>(partial, a, b, step + Config::PROMOTE);
            promote(sums, partial, left, right);
        }
    }

    // The same from numbers as they are, step by step of k.
    GEMM_DEVICE void from_numbers(Sums& sums, const unsigned char* stage, int steps) const {
        const Value* const a = reinterpret_cast<const Value*>(stage);
        const Value* const b = reinterpret_cast<const Value*>(stage + Config::SIDE);
        Sums of_chunk = {};
#pragma unroll 1
        for (int k = 0; k < steps; ++k) {
            const Value x[2] = {a[plain_at(row, k)], a[plain_at(row + 8, k)]};
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Value &left = x[e / 2], right = b[plain_at(column + 8 * j + e % 2, k)];
                    float &re = of_chunk.re[j][e], &im = of_chunk.im[j][e];
                    re = multiply_add(re_of(left), re_of(right), re);
                    if constexpr (Config::PARTS == 2) {
                        re = multiply_add(im_of(left), -im_of(right), re);
                        im = multiply_add(re_of(left), im_of(right), im);
                        im = multiply_add(im_of(left), re_of(right), im);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sums.re[j][e] += of_chunk.re[j][e];
                if constexpr (Config::PARTS == 2) sums.im[j][e] += of_chunk.im[j][e];
            }
    }

  private:
    int half;

    static constexpr int REAL = 4 * Sums::COLUMNS;  // parts of what an instruction leaves to a lane
    static_assert(REAL == Config::TURNED / 2, "64 rows of a warpgroup");
    using Partial = float[Config::PARTS * REAL];
    // First planes of B that re(A) and im(A) are multiplied with; real numbers have no others than those of re.
    enum Turned { BY_RE = Config::PARTS - 1, BY_IM = 0, LOW = Config::TURNED_PLANES / 2 };

    template <bool ODD>
    static GEMM_DEVICE void products(Partial& partial, Descriptor a, Descriptor b, int step) {
        const Descriptor from_a = a + step * 2 / 16, from_b = b + step * 2 / 16;
        pin(partial);
        wgmma_fence();
        add<RE_LOW, BY_RE>(partial, from_a, from_b, true);
        if constexpr (Config::PARTS == 2) add<IM_LOW, BY_IM>(partial, from_a, from_b);
        add<RE_HIGH, BY_RE + LOW>(partial, from_a, from_b);
        if constexpr (Config::PARTS == 2) add<IM_HIGH, BY_IM + LOW>(partial, from_a, from_b);
        if constexpr (Config::PARTS == 1) {
            add<RE_HIGH, BY_RE>(partial, from_a, from_b);
        } else if constexpr (ODD) {
            add<IM_HIGH, BY_IM>(partial, from_a, from_b);
            add<RE_HIGH, BY_RE>(partial, from_a, from_b);
        } else {
            add<RE_HIGH, BY_RE>(partial, from_a, from_b);
            add<IM_HIGH, BY_IM>(partial, from_a, from_b);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(partial);
    }

    // partial += A B of a plane and of two neighbours over PROMOTE steps.
    template <Plane OF_A, int OF_B>
    static GEMM_DEVICE void add(Partial& partial, Descriptor a, Descriptor b, bool fresh = false) {
#pragma unroll
        for (int step = 0; step < Config::PROMOTE; step += 16) {
            Instruction<Config::PARTS * Config::TURNED>::template multiply<1, 0, 0, false>(
                partial, a + (OF_A * Config::PLANE + step * 2) / 16, b + (OF_B * Config::TURNED_PLANE + step * 2) / 16,
                fresh && step == 0 ? 0 : 1);
        }
    }

    static GEMM_DEVICE void promote(Sums& sums, const Partial& partial, const float (&left)[2], const float* right) {
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) {
            const auto of_b = *reinterpret_cast<const Vector<float, 2>*>(right + 8 * j);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float scale = left[e / 2] * of_b.at[e % 2];
                sums.re[j][e] = multiply_add(partial[4 * j + e], scale, sums.re[j][e]);
                if constexpr (Config::PARTS == 2) {
                    sums.im[j][e] = multiply_add(partial[REAL + 4 * j + e], scale, sums.im[j][e]);
                }
            }
        }
    }
};
