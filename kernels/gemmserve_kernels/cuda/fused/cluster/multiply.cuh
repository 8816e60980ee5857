// What a warpgroup multiplies of a block's tile, 64 x 64: the same sums as multiply.cuh's, of all columns at once.
#pragma once

#include "../../common/ptx/wgmma.cuh"
#include "../gather.cuh"
#include "planes.cuh"

class GroupMultiply {
  public:
    int row, column;  // of the lane's first element, in the tile: the numbers of Sums

    GEMM_DEVICE GroupMultiply(int thread, int group)
        : row(group * Config::VECTORS + thread / 32 % 4 * 16 + thread % 32 / 4), column(thread % 4 * 2), group(group) {}

    // sums += A B over half HALF of a chunk of `steps` steps, from a stage's planes. By a warpgroup.
    template <int HALF>
    GEMM_DEVICE void from_planes(Sums& sums, Address stage, const TaskKnown* known, int steps) const {
        const int left_steps = steps - HALF * Config::HALF;
        if (left_steps <= 0) return;
        const Descriptor a = describe<Config::ROW, Config::TASK_A>(stage + group * (Config::SIDE_A / 2));
        const Descriptor b = describe<Config::ROW>(stage + Config::SIDE_A);
        const TaskKnown* const rows = known + row / Config::TASK;
        const float left[2] = {rows[0].scales[row % Config::TASK], rows[1].scales[row % Config::TASK]};
        const TaskKnown* const columns = known + Config::TASKS_A;
        Partial partial;
        products<Config::PROMOTE == Config::HALF && HALF == 1>(partial, a, b);
        promote(sums, partial, left, columns);
        if constexpr (Config::PROMOTE < Config::HALF) {
            if (left_steps <= Config::PROMOTE) return;
            products<true>(partial, a + Config::PROMOTE * 2 / 16, b + Config::PROMOTE * 2 / 16);
            promote(sums, partial, left, columns);
        }
    }

    // of_chunk += A B over `steps` steps of numbers as they are, B's behind A's.
    GEMM_DEVICE void from_numbers(Sums& of_chunk, const unsigned char* numbers, int steps) const {
        const Value* const a = reinterpret_cast<const Value*>(numbers);
        const Value* const b = reinterpret_cast<const Value*>(numbers + Config::FEW_SIDE);
        const int in_group = row - group * Config::VECTORS;
#pragma unroll 1
        for (int k = 0; k < steps; ++k) {
            const Value x[2] = {a[plain_at(in_group, k)], a[plain_at(in_group + 8, k)]};
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const Value right = b[plain_at(column + 8 * j + e, k)];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float &re = of_chunk.re[j][2 * h + e], &im = of_chunk.im[j][2 * h + e];
                        re = multiply_add(x[h].im, -right.im, multiply_add(x[h].re, right.re, re));
                        im = multiply_add(x[h].im, right.re, multiply_add(x[h].re, right.im, im));
                    }
                }
            }
        }
    }

  private:
    int group;

    static constexpr int REAL = 4 * Sums::COLUMNS;  // parts of what an instruction leaves to a lane
    using Partial = float[2 * REAL];
    // Bytes from a stage's first planes of a side to those that are multiplied: of A, and pairs of B's neighbours.
    enum Place { RE = 0, IM = Config::PAIR_A, BY_IM = 0, BY_RE = Config::PAIR_B, LOW = Config::LOW };

    // `ODD`: the order of the large products; see multiply.cuh.
    template <bool ODD>
    static GEMM_DEVICE void products(Partial& partial, Descriptor a, Descriptor b) {
        pin(partial);
        wgmma_fence();
        add<RE + LOW, BY_RE>(partial, a, b, true);
        add<IM + LOW, BY_IM>(partial, a, b);
        add<RE, BY_RE + LOW>(partial, a, b);
        add<IM, BY_IM + LOW>(partial, a, b);
        if constexpr (ODD) {
            add<IM, BY_IM>(partial, a, b);
            add<RE, BY_RE>(partial, a, b);
        } else {
            add<RE, BY_RE>(partial, a, b);
            add<IM, BY_IM>(partial, a, b);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(partial);
    }

    // partial += A B of a plane and of two neighbours over PROMOTE steps.
    template <int OF_A, int OF_B>
    static GEMM_DEVICE void add(Partial& partial, Descriptor a, Descriptor b, bool fresh = false) {
#pragma unroll
        for (int step = 0; step < Config::PROMOTE; step += 16) {
            Instruction<2 * Config::BLOCK_N>::template multiply<1, 0, 0, false>(
                partial, a + (OF_A + step * 2) / 16, b + (OF_B + step * 2) / 16, fresh && step == 0 ? 0 : 1);
        }
    }

    GEMM_DEVICE void promote(Sums& sums, const Partial& partial, const float (&left)[2], const TaskKnown* columns) const {
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) {
            const auto right = *reinterpret_cast<const Vector<float, 2>*>(&columns[j].scales[column]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float scale = left[e / 2] * right.at[e % 2];
                sums.re[j][e] = multiply_add(partial[4 * j + e], scale, sums.re[j][e]);
                sums.im[j][e] = multiply_add(partial[REAL + 4 * j + e], scale, sums.im[j][e]);
            }
        }
    }
};
