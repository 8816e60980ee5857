// The two roles of a block: a producer that asks the copy engine for planes, and consumers that multiply them.
//
// A stage of shared memory holds BLOCK_K columns of k of some planes of both operands. What the consumers do with a
// stage is the scheme's:
//   3xfp16       hi hi + hi lo + lo hi of the real products; complex ones by four real products.
//   3xfp16-3m    the same by three (Gauss): P0 = (ar + ai) br, P1 = ar (bi - br), P2 = ai (br + bi);
//                re = P0 - P2, im = P0 + P1. Each product has a stage of its own, so that a stage is small.
//   1xfp16       one product, accumulated by the tensor core alone.
//   3xbf16       3xfp16 with the first two of three bfloat16 parts, which reach over float32's whole range.
//   6xbf16       x0 y0 + x0 y1 + x1 y0 + x1 y1 + x0 y2 + x2 y0 of three parts, which hold all 24 bits; 9xbf16 all nine.
//                Of complex data the small ones are promoted by themselves: x0 y0 of one term is then cut once, not twice.
//   fp16         the same of float16 operands as they are, whichever way they lie; promoted like the 3x schemes where
//                the result keeps more than float16 does, or k is long.
// Four planes of 64 columns of both operands would fill shared memory with one stage, six of 32 columns with two.
// QUARTERED, a stage is the planes of the real or of the imaginary part of one operand, and is free as soon as its own products are done.
// The tensor core adds with truncation. So the sums of the 3x schemes start anew every PROMOTE columns and are added to
// float32 sums rounding to nearest (Ootomo and Yokota 2022, section 3.2); small products come before the large ones.
//
// Real parts of complex sums are differences, re re - im im. While such a sum climbs and falls again, truncation takes
// from it what depends on which of the two came first; where all numbers have one sign, it is the same every time. So
// the parts take turns: im im - re re is taken away every other time. This is what makes a real part that cancels as
// accurate as plain float32's (gemmserve_kernels.numerics.models).
#pragma once

#include "schedule.cuh"
#include "instructions.cuh"

struct Pipeline {
    Address stages, full, empty;  // `full` and `empty`: a barrier for each stage
    Work* work;                   // of the unit that is being finished, and of as many that follow as there are stages
};

// Steps through the stages, round and round.
template <int STAGES>
struct Turn {
    int stage = 0;
    unsigned parity = 0;
    GEMM_DEVICE void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The first plane of product `phase` on either side.
template <class Config>
GEMM_DEVICE int first_plane(int phase, bool of_a) {
    if constexpr (Config::PHASES == 1) return 0;
    return of_a ? (phase == 0 ? 4 : 2 * phase - 2) : 2 * phase;
}

// Where a unit's operands are.
struct Source {
    int row_left, row_right, matrix_left, matrix_right;
};

// BLOCK_K steps of k of one operand as it is, from its row `row` on: rows along k in one box, or columns of 64 rows.
template <bool ACROSS, int BLOCK_K, int ROWS, class Copy>
GEMM_DEVICE void fetch_direct(Address target, int row, int k, const Copy& copy) {
    if constexpr (ACROSS) {
#pragma unroll
        for (int first = 0; first < ROWS; first += 64) copy(target + first * BLOCK_K * 2, row + first, k);
    } else {
        copy(target, k, row);
    }
}

// One stage of float16 operands as they are.
template <class Config>
GEMM_DEVICE void fetch_stage(
    const WgmmaParams& params, const Source& from, Address target, Address full, int k, unsigned rank) {
    constexpr int ROWS = Config::BLOCK_N / Config::CLUSTER;  // of the right operand, for all of the cluster
    fetch_direct<Config::LEFT_ACROSS, Config::BLOCK_K, Config::BLOCK_M>(
        target, from.row_left, k,
        [&](Address to, int x, int y) { copy_box(to, params.map_left, x, y, 0, from.matrix_left, full); });
    const int share = Config::CLUSTER > 1 ? static_cast<int>(rank) * ROWS : 0;  // else a rank is a part of k
    fetch_direct<Config::RIGHT_ACROSS, Config::BLOCK_K, ROWS>(
        target + Config::LEFT_BYTES + share * Config::BLOCK_K * 2, from.row_right + share, k,
        [&](Address to, int x, int y) {
            if constexpr (Config::CLUSTER == 1) {
                copy_box(to, params.map_right, x, y, 0, from.matrix_right, full);
            } else {
                copy_box_multicast(
                    to, params.map_right, x, y, 0, from.matrix_right, full,
                    static_cast<unsigned short>((1 << Config::CLUSTER) - 1));
            }
        });
}

// One stage: the planes of product `phase` of both operands.
template <class Config>
GEMM_DEVICE void fetch(
    const WgmmaParams& params, const Source& from, Address target, Address full, int x, int phase, unsigned rank) {
    copy_box(
        target, params.map_left, x, from.row_left, first_plane<Config>(phase, !Config::SWAPPED), from.matrix_left,
        full);
    const Address to_right = target + Config::LEFT_BYTES;
    const int plane = first_plane<Config>(phase, Config::SWAPPED);
    if constexpr (Config::CLUSTER == 1) {
        copy_box(to_right, params.map_right, x, from.row_right, plane, from.matrix_right, full);
    } else {  // every block of the cluster fetches its share for all of them
        constexpr bool BY_PLANES = Config::STAGE_PLANES % Config::CLUSTER == 0;
        const int share = static_cast<int>(rank);
        copy_box_multicast(
            to_right + share * (Config::RIGHT_BYTES / Config::CLUSTER), params.map_right, x,
            from.row_right + (BY_PLANES ? 0 : share * (Config::BLOCK_N / Config::CLUSTER)),
            plane + (BY_PLANES ? share * (Config::STAGE_PLANES / Config::CLUSTER) : 0), from.matrix_right, full,
            static_cast<unsigned short>((1 << Config::CLUSTER) - 1));
    }
}

// One stage of a quartered tile: 0 re of the left operand, 1 re of the right one, 2 im of the left one, 3 of the right;
// im first in every other block of k.
template <class Config>
GEMM_DEVICE void fetch_quarter(
    const WgmmaParams& params, const Source& from, Address target, Address full, int block, int quarter) {
    const int x = block * Config::BLOCK_K, part = (quarter / 2) ^ (block & 1);
#pragma unroll
    for (int plane = 0; plane < Config::STAGE_PLANES / 2; ++plane) {
        if (quarter % 2 == 0) {
            copy_box(
                target + plane * Config::LEFT_PLANE, params.map_left, x, from.row_left, part + 2 * plane,
                from.matrix_left, full);
        } else {
            copy_box(
                target + plane * Config::RIGHT_PLANE, params.map_right, x, from.row_right, part + 2 * plane,
                from.matrix_right, full);
        }
    }
}

template <class Config>
GEMM_DEVICE void produce(
    const WgmmaParams& params, const Verdicts<Config>& verdicts, const Pipeline& pipeline, unsigned rank) {
    constexpr int STAGES_EACH = Config::QUARTERED ? 4 : Config::PHASES;
    prefetch_map(params.map_left);
    prefetch_map(params.map_right);
    Turn<Config::STAGES> turn;
    Turn<Config::STAGES + 1> works;
    for_each_unit<Config>(params, verdicts, [&](int number) {
        const Unit unit = unit_at<Config>(params, number, rank);
        const Matrices at = matrices_of(params, unit.batch);
        const Slice slice = slice_of<Config>(params, unit, rank);
        const Source from{unit.tile_m * Config::BLOCK_M, unit.tile_n * Config::BLOCK_N, at.left, at.right};
        barrier_wait(pipeline.empty + turn.stage * sizeof(Barrier), turn.parity ^ 1);
        pipeline.work[works.stage] = {unit, at};
        works.next();
        for (int block = slice.first; block < slice.last; ++block) {
#pragma unroll 1
            for (int index = 0; index < STAGES_EACH; ++index, turn.next()) {
                const Address full = pipeline.full + turn.stage * sizeof(Barrier);
                const Address target = pipeline.stages + turn.stage * Config::STAGE_BYTES;
                barrier_wait(pipeline.empty + turn.stage * sizeof(Barrier), turn.parity ^ 1);
                barrier_arrive_expecting(full, Config::STAGE_BYTES);
                if constexpr (Config::QUARTERED) {
                    fetch_quarter<Config>(params, from, target, full, block, index);
                } else if constexpr (Config::DIRECT) {
                    fetch_stage<Config>(params, from, target, full, block * Config::BLOCK_K, rank);
                } else {
                    fetch<Config>(params, from, target, full, block * Config::BLOCK_K, index, rank);
                }
            }
        }
    });
}

// The consumer's sums: COMPONENTS (re, im) of 64 x BLOCK_N, in PARTS instructions side by side.
template <class Config>
using Sums = float[Config::COMPONENTS][Config::PARTS][Config::VALUES];

// d += SIGN left[PLANE_LEFT] right[PLANE_RIGHT] over COUNT steps of 16 columns from step `first` on.
template <class Config, int LEFT, int RIGHT, int SIGN, int COUNT>
GEMM_DEVICE void product(
    float (&d)[Config::VALUES], Descriptor left, Descriptor right, int first, int part, bool fresh) {
#pragma unroll
    for (int step = 0; step < COUNT; ++step) {
        const int steps = (first + step) * 16;  // 2 bytes further along k each, or a row of 64 neighbours
        const int in_left = steps * (Config::LEFT_ACROSS ? 128 : 2);
        const int in_right = steps * (Config::RIGHT_ACROSS ? 128 : 2);
        Instruction<Config::INSTRUCTION_N>::template multiply<
            SIGN, Config::LEFT_ACROSS, Config::RIGHT_ACROSS, Config::BFLOAT>(
            d, left + (LEFT * Config::LEFT_PLANE + in_left) / 16,
            right + (RIGHT * Config::RIGHT_PLANE + part * Config::INSTRUCTION_N * Config::ROW_BYTES + in_right) / 16,
            fresh && step == 0 ? 0 : 1);
    }
}

// What six (nine) products of three parts add to that of the first parts, the smallest first: of one pair of operands and,
// of complex data, of another one, which is taken away where MINUS. Planes: the parts of either lie PLANES apart.
template <class Config, bool MINUS, int PLANES = Config::COMPONENTS>
GEMM_DEVICE void small_products(
    float (&d)[Config::VALUES], Descriptor left, Descriptor right, Descriptor other_left, Descriptor other_right, int first,
    int part) {
    constexpr int STEPS = Config::PROMOTE / 16, SIGN = MINUS ? -1 : 1;
    bool fresh = true;
    const auto both = [&](auto i, auto j) {
        constexpr int I = decltype(i)::VALUE * PLANES, J = decltype(j)::VALUE * PLANES;
        product<Config, I, J, 1, STEPS>(d, left, right, first, part, fresh);
        fresh = false;
        if constexpr (Config::COMPONENTS == 2) {
            product<Config, I, J, SIGN, STEPS>(d, other_left, other_right, first, part, false);
        }
    };
    if constexpr (Config::NINE) {
        both(Number<2>(), Number<2>());
        both(Number<2>(), Number<1>());
        both(Number<1>(), Number<2>());
    }
    both(Number<2>(), Number<0>());
    both(Number<0>(), Number<2>());
    both(Number<1>(), Number<1>());
    both(Number<1>(), Number<0>());
    both(Number<0>(), Number<1>());
}

// Waits for what is in `temporary`.
template <class Config>
GEMM_DEVICE void finish(float (&temporary)[Config::VALUES]) {
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

// One stage of a 3x scheme, columns BLOCK_K `block` of k. `release` is called when the stage has been read.
template <class Config, class Release>
GEMM_DEVICE void multiply_promoted(
    Sums<Config>& sums, float (&temporary)[Config::VALUES], Descriptor left, Descriptor right, int block, int phase,
    Release release) {
    constexpr int STEPS = Config::PROMOTE / 16, ROUNDS = Config::BLOCK_K / Config::PROMOTE;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
            const bool last = round == ROUNDS - 1 && part == Config::PARTS - 1;
            const int first = round * STEPS;
            wgmma_fence();
            if constexpr (Config::THIRDS) {
                // planes: 0 re, 1 im of the first parts, then of the second, of the third; 0, 1, 2 of real data
                constexpr int EACH = Config::COMPONENTS;
                const int turn = EACH == 2 ? (block * ROUNDS + round) & 1 : 0;
                const Descriptor left_1 = left + turn * (Config::LEFT_PLANE / 16);
                const Descriptor left_2 = left + (1 - turn) * (Config::LEFT_PLANE / 16);
                const Descriptor right_1 = right + turn * (Config::RIGHT_PLANE / 16);
                const Descriptor right_2 = right + (1 - turn) * (Config::RIGHT_PLANE / 16);
                const float sign = turn ? -1.0f : 1.0f;
                small_products<Config, true>(temporary, left_1, right_1, left_2, right_2, first, part);
                if constexpr (EACH == 1) {
                    product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_1, first, part, false);
                } else {
                    finish<Config>(temporary);
                    promote(sums[0][part], temporary, sign);
                    wgmma_fence();
                    product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_1, first, part, true);
                    product<Config, 0, 0, -1, STEPS>(temporary, left_2, right_2, first, part, false);
                    finish<Config>(temporary);
                    promote(sums[0][part], temporary, sign);
                    wgmma_fence();
                    small_products<Config, false>(temporary, left_1, right_2, left_2, right_1, first, part);
                    finish<Config>(temporary);
                    promote<1>(sums[EACH - 1][part], temporary);
                    wgmma_fence();
                    product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_2, first, part, true);
                    product<Config, 0, 0, 1, STEPS>(temporary, left_2, right_1, first, part, false);
                }
                finish<Config>(temporary);
                if (last) release();
                promote<1>(sums[EACH - 1][part], temporary);
            } else if constexpr (Config::COMPONENTS == 2 && Config::PHASES == 1) {
                // planes: 0 re hi, 1 im hi, 2 re lo, 3 im lo; of the first part and of the second
                const int turn = (block * ROUNDS + round) & 1;
                const Descriptor left_1 = left + turn * (Config::LEFT_PLANE / 16);
                const Descriptor left_2 = left + (1 - turn) * (Config::LEFT_PLANE / 16);
                const Descriptor right_1 = right + turn * (Config::RIGHT_PLANE / 16);
                const Descriptor right_2 = right + (1 - turn) * (Config::RIGHT_PLANE / 16);
                product<Config, 2, 0, 1, STEPS>(temporary, left_1, right_1, first, part, true);
                product<Config, 0, 2, 1, STEPS>(temporary, left_1, right_1, first, part, false);
                product<Config, 2, 0, -1, STEPS>(temporary, left_2, right_2, first, part, false);
                product<Config, 0, 2, -1, STEPS>(temporary, left_2, right_2, first, part, false);
                product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_1, first, part, false);
                product<Config, 0, 0, -1, STEPS>(temporary, left_2, right_2, first, part, false);
                finish<Config>(temporary);
                promote(sums[0][part], temporary, turn ? -1.0f : 1.0f);
                wgmma_fence();
                product<Config, 2, 0, 1, STEPS>(temporary, left_1, right_2, first, part, true);
                product<Config, 0, 2, 1, STEPS>(temporary, left_1, right_2, first, part, false);
                product<Config, 2, 0, 1, STEPS>(temporary, left_2, right_1, first, part, false);
                product<Config, 0, 2, 1, STEPS>(temporary, left_2, right_1, first, part, false);
                product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_2, first, part, false);
                product<Config, 0, 0, 1, STEPS>(temporary, left_2, right_1, first, part, false);
                finish<Config>(temporary);
                if (last) release();
                promote<1>(sums[Config::COMPONENTS - 1][part], temporary);
            } else if constexpr (!Config::HALVES) {
                product<Config, 0, 0, 1, STEPS>(temporary, left, right, first, part, true);
                finish<Config>(temporary);
                if (last) release();
                promote<1>(sums[0][part], temporary);
            } else {
                // planes: 0 hi, 1 lo
                product<Config, 1, 0, 1, STEPS>(temporary, left, right, first, part, true);
                product<Config, 0, 1, 1, STEPS>(temporary, left, right, first, part, false);
                product<Config, 0, 0, 1, STEPS>(temporary, left, right, first, part, false);
                finish<Config>(temporary);
                if (last) release();
                if (Config::PHASES == 1 || phase == 0) promote<1>(sums[0][part], temporary);
                if (Config::PHASES > 1 && phase < 2) promote<1>(sums[Config::COMPONENTS - 1][part], temporary);
                if (Config::PHASES > 1 && phase == 2) promote<-1>(sums[0][part], temporary);
            }
        }
    }
}

// BLOCK_K columns of 3xfp16 or of three bfloat16 parts by quarters, in the order in which they are fetched: each has `arrived` before it is read,
// and is `release`d. Planes: 0 hi, 1 lo. `sign` is -1 where imaginary parts are the first.
template <class Config, class Arrived, class Release>
GEMM_DEVICE void multiply_quarters(
    Sums<Config>& sums, float (&temporary)[Config::VALUES], Turn<Config::STAGES>& turn, float sign, Arrived arrived,
    Release release) {
    constexpr int STEPS = Config::BLOCK_K / 16;
    const int left_1_stage = turn.stage;
    const Descriptor left_1 = arrived(true);
    const int right_1_stage = turn.stage;
    const Descriptor right_1 = arrived(false);
    if constexpr (Config::THIRDS) {
        const int left_2_stage = turn.stage;
        const Descriptor left_2 = arrived(true);
        const int right_2_stage = turn.stage;
        const Descriptor right_2 = arrived(false);
        wgmma_fence();
        small_products<Config, true, 1>(temporary, left_1, right_1, left_2, right_2, 0, 0);
        finish<Config>(temporary);
        promote(sums[0][0], temporary, sign);
        wgmma_fence();
        product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_1, 0, 0, true);
        product<Config, 0, 0, -1, STEPS>(temporary, left_2, right_2, 0, 0, false);
        finish<Config>(temporary);
        promote(sums[0][0], temporary, sign);
        wgmma_fence();
        small_products<Config, false, 1>(temporary, left_1, right_2, left_2, right_1, 0, 0);
        finish<Config>(temporary);
        promote<1>(sums[Config::COMPONENTS - 1][0], temporary);
        wgmma_fence();
        product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_2, 0, 0, true);
        wgmma_commit();
        product<Config, 0, 0, 1, STEPS>(temporary, left_2, right_1, 0, 0, false);
        wgmma_commit();
        wgmma_wait<1>();
        release(left_1_stage);
        release(right_2_stage);
        wgmma_wait<0>();
        pin(temporary);
        release(right_1_stage);
        release(left_2_stage);
        promote<1>(sums[Config::COMPONENTS - 1][0], temporary);
        return;
    }
    wgmma_fence();
    product<Config, 1, 0, 1, STEPS>(temporary, left_1, right_1, 0, 0, true);
    product<Config, 0, 1, 1, STEPS>(temporary, left_1, right_1, 0, 0, false);
    const int left_2_stage = turn.stage;
    const Descriptor left_2 = arrived(true);
    const int right_2_stage = turn.stage;
    const Descriptor right_2 = arrived(false);
    wgmma_fence();
    product<Config, 1, 0, -1, STEPS>(temporary, left_2, right_2, 0, 0, false);
    product<Config, 0, 1, -1, STEPS>(temporary, left_2, right_2, 0, 0, false);
    product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_1, 0, 0, false);
    product<Config, 0, 0, -1, STEPS>(temporary, left_2, right_2, 0, 0, false);
    finish<Config>(temporary);
    promote(sums[0][0], temporary, sign);
    wgmma_fence();
    product<Config, 1, 0, 1, STEPS>(temporary, left_1, right_2, 0, 0, true);
    product<Config, 0, 1, 1, STEPS>(temporary, left_1, right_2, 0, 0, false);
    product<Config, 1, 0, 1, STEPS>(temporary, left_2, right_1, 0, 0, false);
    product<Config, 0, 1, 1, STEPS>(temporary, left_2, right_1, 0, 0, false);
    product<Config, 0, 0, 1, STEPS>(temporary, left_1, right_2, 0, 0, false);
    wgmma_commit();
    product<Config, 0, 0, 1, STEPS>(temporary, left_2, right_1, 0, 0, false);
    wgmma_commit();
    wgmma_wait<1>();
    release(left_1_stage);
    release(right_2_stage);
    wgmma_wait<0>();
    pin(temporary);
    release(right_1_stage);
    release(left_2_stage);
    promote<1>(sums[Config::COMPONENTS - 1][0], temporary);
}

// One stage of 1xfp16, left on its way.
template <class Config>
GEMM_DEVICE void multiply_plain(Sums<Config>& sums, Descriptor left, Descriptor right) {
    constexpr int STEPS = Config::BLOCK_K / 16;
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < Config::PARTS; ++part) {
        product<Config, 0, 0, 1, STEPS>(sums[0][part], left, right, 0, part, false);
        if constexpr (Config::COMPONENTS == 2) {
            product<Config, 1, 1, -1, STEPS>(sums[0][part], left, right, 0, part, false);
            product<Config, 0, 1, 1, STEPS>(sums[1][part], left, right, 0, part, false);
            product<Config, 1, 0, 1, STEPS>(sums[1][part], left, right, 0, part, false);
        }
    }
    wgmma_commit();
}

// Multiplies all units of this block; `begin_unit(work)` hears of each, `finish_unit(work, sums)` gets its result. `group`
// counts the consumers.
template <class Config, class Begin, class Finish>
GEMM_DEVICE void consume(
    const WgmmaParams& params, const Verdicts<Config>& verdicts, const Pipeline& pipeline, unsigned rank, int group, int thread, Begin begin_unit,
    Finish finish_unit) {
    Turn<Config::STAGES> turn;
    Turn<Config::STAGES + 1> works;
    const auto release = [&](int stage) {
        const Address empty = pipeline.empty + stage * sizeof(Barrier);
        if constexpr (Config::CLUSTER == 1) {
            if (thread == 0) barrier_arrive(empty);
        } else {
            if (thread < Config::CLUSTER) barrier_arrive_remote(empty, thread);
        }
    };
    const auto arrived = [&]() {
        barrier_wait(pipeline.full + turn.stage * sizeof(Barrier), turn.parity);
        return pipeline.stages + turn.stage * Config::STAGE_BYTES;
    };
    const auto left_of = [&](Address stage) {
        const Address first = stage + group * 64 * Config::ROW_BYTES;  // 64 rows are as long either way
        if constexpr (Config::LEFT_ACROSS) return describe_across<Config::BLOCK_K>(first);
        else return describe<Config::ROW_BYTES>(first);
    };
    const auto right_of = [&](Address stage) {
        if constexpr (Config::RIGHT_ACROSS) return describe_across<Config::BLOCK_K>(stage + Config::LEFT_BYTES);
        else return describe<Config::ROW_BYTES>(stage + Config::LEFT_BYTES);
    };

    for_each_unit<Config>(params, verdicts, [&](int) {
        arrived();
        const Work work = pipeline.work[works.stage];
        const Slice slice = slice_of<Config>(params, work.unit, rank);
        begin_unit(work);
        Sums<Config> sums;
#pragma unroll
        for (int i = 0; i < Config::COMPONENTS; ++i) {
#pragma unroll
            for (int part = 0; part < Config::PARTS; ++part) {
#pragma unroll
                for (int e = 0; e < Config::VALUES; ++e) sums[i][part][e] = 0.0f;
            }
        }
        if constexpr (Config::QUARTERED) {
            float temporary[Config::VALUES];
            const auto next = [&](bool is_left) {
                const Address stage = arrived();
                turn.next();
                return describe<Config::ROW_BYTES>(stage + (is_left ? group * 64 * Config::ROW_BYTES : 0));
            };
            for (int block = slice.first; block < slice.last; ++block) {
                multiply_quarters<Config>(sums, temporary, turn, block % 2 ? -1.0f : 1.0f, next, release);
            }
        } else if constexpr (Config::PROMOTE > 0) {
            float temporary[Config::VALUES];
            for (int block = slice.first; block < slice.last; ++block) {
#pragma unroll
                for (int phase = 0; phase < Config::PHASES; ++phase) {
                    const Address stage = arrived();
                    multiply_promoted<Config>(
                        sums, temporary, left_of(stage), right_of(stage), block, phase,
                        [&]() { release(turn.stage); });
                    turn.next();
                }
            }
        } else {
            int previous = -1;
            for (int block = slice.first; block < slice.last; ++block) {
                const Address stage = arrived();
                multiply_plain<Config>(sums, left_of(stage), right_of(stage));
                wgmma_wait<1>();
                if (previous >= 0) release(previous);
                previous = turn.stage;
                turn.next();
            }
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < Config::COMPONENTS; ++i) {
#pragma unroll
                for (int part = 0; part < Config::PARTS; ++part) pin(sums[i][part]);
            }
            if (previous >= 0) release(previous);
        }
        finish_unit(work, sums);
        works.next();
    });
}
