// What the consumers do with a stage, one struct a scheme: `multiply` for each block of k, `end` after the last one.
//
//   1xfp16       one product, accumulated by the tensor core alone.
//   fp16         the same of float16 operands as they are, whichever way they lie; promoted like the 3x schemes where
//                the result keeps more than float16 does, or k is long.
//   3xfp16       hi hi + hi lo + lo hi of the real products; complex ones by four real products.
//   3xfp16-3m    the same by three (Gauss). Each product has a stage of its own, so that a stage is small.
//   3xbf16       3xfp16 with the first two of three bfloat16 parts, which reach over float32's whole range.
//   6xbf16       x0 y0 + x0 y1 + x1 y0 + x1 y1 + x0 y2 + x2 y0 of three parts, which hold all 24 bits; 9xbf16 all nine.
//
// The tensor core adds with truncation. So the sums of all but the first start anew every PROMOTE columns and are added
// to float32 sums rounding to nearest (Ootomo and Yokota 2022, section 3.2).
//
// Real parts of complex sums are differences, re re - im im. While such a sum climbs and falls again, truncation takes
// from it what depends on which of the two came first; where all numbers have one sign, it is the same every time. So
// the parts take turns: im im - re re is taken away every other time. This is what makes a real part that cancels as
// accurate as plain float32's (gemmserve_kernels.numerics.models).
#pragma once

#include "pipeline.cuh"
#include "products.cuh"

// Sums that stay on the tensor core; the products of a stage are on their way while the next one arrives.
template <class Config>
struct Accumulated {
    int previous = -1;  // the stage that is being multiplied

    GEMM_DEVICE void multiply(Sums<Config>& sums, FilledStages<Config>& stages, int) {
        const Address stage = stages.wait();
        const Descriptor left = stages.left(stage), right = stages.right(stage);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
            product<Config, 0, 0, 1>(sums[0][part], left, right, {0, part}, false);
            if constexpr (Config::COMPONENTS == 2) {
                product<Config, 1, 1, -1>(sums[0][part], left, right, {0, part}, false);
                product<Config, 0, 1, 1>(sums[1][part], left, right, {0, part}, false);
                product<Config, 1, 0, 1>(sums[1][part], left, right, {0, part}, false);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0) stages.release(previous);
        previous = stages.turn.stage;
        stages.turn.next();
    }

    GEMM_DEVICE void end(Sums<Config>& sums, const FilledStages<Config>& stages) const {
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < Config::COMPONENTS; ++i) {
#pragma unroll
            for (int part = 0; part < Config::PARTS; ++part) pin(sums[i][part]);
        }
        if (previous >= 0) stages.release(previous);
    }
};

// Stages of all planes, promoted every PROMOTE columns: Products::multiply does so once, for the `turn`-th
// time. `phase` says which product has the stage; `release` is called when it has read its planes.
template <class Config, class Products>
struct Promoted {
    Partial<Config> temporary;

    GEMM_DEVICE void multiply(Sums<Config>& sums, FilledStages<Config>& stages, int block) {
        constexpr int ROUNDS = Config::BLOCK_K / Config::PROMOTE;
#pragma unroll
        for (int phase = 0; phase < Config::PHASES; ++phase) {
            const Address stage = stages.wait();
            const Descriptor left = stages.left(stage), right = stages.right(stage);
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
                for (int part = 0; part < Config::PARTS; ++part) {
                    const bool last = round == ROUNDS - 1 && part == Config::PARTS - 1;
                    wgmma_fence();
                    const Piece piece{round * Config::STEPS, part};
                    Products::multiply(sums, temporary, left, right, piece, block * ROUNDS + round, phase, [&] {
                        if (last) stages.release(stages.turn.stage);
                    });
                }
            }
            stages.turn.next();
        }
    }
    GEMM_DEVICE void end(Sums<Config>&, const FilledStages<Config>&) const {}
};

// Real numbers of 1, 2 or 3 parts, which are the planes in this order.
template <class Config>
struct RealProducts {
    static GEMM_DEVICE void multiply_parts(Partial<Config>& temporary, Descriptor left, Descriptor right, Piece piece) {
        bool fresh = true;
        for_small_products<Config>([&](auto i, auto j) {
            product<Config, decltype(i)::VALUE, decltype(j)::VALUE, 1>(temporary, left, right, piece, fresh);
            fresh = false;
        });
        product<Config, 0, 0, 1>(temporary, left, right, piece, fresh);
        finish(temporary);
    }

    template <class Release>
    static GEMM_DEVICE void multiply(
        Sums<Config>& sums, Partial<Config>& temporary, Descriptor left, Descriptor right, Piece piece, int, int,
        Release release) {
        multiply_parts(temporary, left, right, piece);
        release();
        promote<1>(sums[0][piece.part], temporary);
    }
};

// Complex numbers by three real products: P0 = (ar + ai) br, P1 = ar (bi - br), P2 = ai (br + bi);
// re = P0 - P2, im = P0 + P1.
template <class Config>
struct GaussProducts {
    template <class Release>
    static GEMM_DEVICE void multiply(
        Sums<Config>& sums, Partial<Config>& temporary, Descriptor left, Descriptor right, Piece piece, int,
        int phase, Release release) {
        RealProducts<Config>::multiply_parts(temporary, left, right, piece);
        release();
        if (phase == 0) promote<1>(sums[0][piece.part], temporary);
        if (phase < 2) promote<1>(sums[1][piece.part], temporary);
        if (phase == 2) promote<-1>(sums[0][piece.part], temporary);
    }
};

// Complex numbers of two parts by four real products. Operands: ComplexPlanes or Quarters.
template <class Config, class Operands>
GEMM_DEVICE void multiply_halves(Sums<Config>& sums, Partial<Config>& temporary, Operands& operands, Piece piece) {
    const auto small_products = [&](auto sign, Descriptor left, Descriptor right, bool fresh) {
        for_small_products<Config>([&](auto i, auto j) {
            constexpr int LEFT = decltype(i)::VALUE * Operands::APART, RIGHT = decltype(j)::VALUE * Operands::APART;
            product<Config, LEFT, RIGHT, decltype(sign)::VALUE>(temporary, left, right, piece, fresh);
            fresh = false;
        });
    };
    small_products(Number<1>(), operands.left_1, operands.right_1, true);
    if constexpr (Config::QUARTERED) {
        operands.await_second();
        wgmma_fence();
    }
    small_products(Number<-1>(), operands.left_2, operands.right_2, false);
    product<Config, 0, 0, 1>(temporary, operands.left_1, operands.right_1, piece, false);
    product<Config, 0, 0, -1>(temporary, operands.left_2, operands.right_2, piece, false);
    finish(temporary);
    promote(sums[0][piece.part], temporary, operands.sign);
    wgmma_fence();
    small_products(Number<1>(), operands.left_1, operands.right_2, true);
    small_products(Number<1>(), operands.left_2, operands.right_1, false);
    product<Config, 0, 0, 1>(temporary, operands.left_1, operands.right_2, piece, false);
    if constexpr (Config::QUARTERED) wgmma_commit();
    product<Config, 0, 0, 1>(temporary, operands.left_2, operands.right_1, piece, false);
    operands.finish_last(temporary);
    promote<1>(sums[1][piece.part], temporary);
}

// The same of three parts. Small products are promoted by themselves: x0 y0 of one term is then cut once, not twice.
template <class Config, class Operands>
GEMM_DEVICE void multiply_thirds(Sums<Config>& sums, Partial<Config>& temporary, Operands& operands, Piece piece) {
    const auto small_products = [&](auto sign, Descriptor left, Descriptor right, Descriptor other_left,
                                    Descriptor other_right) {
        bool fresh = true;
        for_small_products<Config>([&](auto i, auto j) {
            constexpr int LEFT = decltype(i)::VALUE * Operands::APART, RIGHT = decltype(j)::VALUE * Operands::APART;
            product<Config, LEFT, RIGHT, 1>(temporary, left, right, piece, fresh);
            fresh = false;
            product<Config, LEFT, RIGHT, decltype(sign)::VALUE>(temporary, other_left, other_right, piece, false);
        });
    };
    small_products(Number<-1>(), operands.left_1, operands.right_1, operands.left_2, operands.right_2);
    finish(temporary);
    promote(sums[0][piece.part], temporary, operands.sign);
    wgmma_fence();
    product<Config, 0, 0, 1>(temporary, operands.left_1, operands.right_1, piece, true);
    product<Config, 0, 0, -1>(temporary, operands.left_2, operands.right_2, piece, false);
    finish(temporary);
    promote(sums[0][piece.part], temporary, operands.sign);
    wgmma_fence();
    small_products(Number<1>(), operands.left_1, operands.right_2, operands.left_2, operands.right_1);
    finish(temporary);
    promote<1>(sums[1][piece.part], temporary);
    wgmma_fence();
    product<Config, 0, 0, 1>(temporary, operands.left_1, operands.right_2, piece, true);
    if constexpr (Config::QUARTERED) wgmma_commit();
    product<Config, 0, 0, 1>(temporary, operands.left_2, operands.right_1, piece, false);
    operands.finish_last(temporary);
    promote<1>(sums[1][piece.part], temporary);
}

template <class Config, class Operands>
GEMM_DEVICE void multiply_complex(Sums<Config>& sums, Partial<Config>& temporary, Operands& operands, Piece piece) {
    if constexpr (Config::DEPTH == 3) multiply_thirds<Config>(sums, temporary, operands, piece);
    else multiply_halves<Config>(sums, temporary, operands, piece);
}

// Complex numbers whose planes are in one stage: re and im of the first parts, then of the second, of the third. The
// part that comes first has number 1: im in every other turn.
template <class Config>
struct ComplexProducts {
    template <class Release>
    struct ComplexPlanes {
        static constexpr int APART = 2;  // planes from one part of a number to the next
        Descriptor left_1, left_2, right_1, right_2;
        float sign;
        Release release;

        GEMM_DEVICE void finish_last(Partial<Config>& temporary) {
            finish(temporary);
            release();
        }
    };

    template <class Release>
    static GEMM_DEVICE void multiply(
        Sums<Config>& sums, Partial<Config>& temporary, Descriptor left, Descriptor right, Piece piece, int turn,
        int, Release release) {
        constexpr int LEFT_PLANE = Config::LEFT_PLANE / 16, RIGHT_PLANE = Config::RIGHT_PLANE / 16;
        const int im_first = turn & 1;
        ComplexPlanes<Release> planes{
            left + im_first * LEFT_PLANE, left + (1 - im_first) * LEFT_PLANE, right + im_first * RIGHT_PLANE,
            right + (1 - im_first) * RIGHT_PLANE, im_first ? -1.0f : 1.0f, release};
        multiply_complex<Config>(sums, temporary, planes, piece);
    }
};

// Complex numbers by quarters, each in a stage of its own that is free as soon as its own products are done: four
// planes of 64 columns of both operands would fill shared memory with one stage, six of 32 columns with two.
template <class Config>
struct Quarters {
    Partial<Config> temporary;

    // Those of one block of k, in the order in which they are fetched.
    struct Operands {
        static constexpr int APART = 1;
        FilledStages<Config>& stages;
        float sign;
        int left_1_stage, right_1_stage, left_2_stage, right_2_stage;
        Descriptor left_1, right_1, left_2, right_2;

        GEMM_DEVICE Operands(FilledStages<Config>& s, int block) : stages(s), sign(block % 2 ? -1.0f : 1.0f) {
            await(left_1_stage, left_1, right_1_stage, right_1);
        }
        GEMM_DEVICE void await_second() { await(left_2_stage, left_2, right_2_stage, right_2); }
        GEMM_DEVICE void await(int& left_stage, Descriptor& left, int& right_stage, Descriptor& right) {
            left_stage = stages.turn.stage;
            left = stages.left(stages.take());
            right_stage = stages.turn.stage;
            right = stages.right(stages.take());
        }

        // The last product but one is committed apart: two stages are free before the other two.
        GEMM_DEVICE void finish_last(Partial<Config>& values) {
            wgmma_commit();
            wgmma_wait<1>();
            stages.release(left_1_stage);
            stages.release(right_2_stage);
            wgmma_wait<0>();
            pin(values);
            stages.release(right_1_stage);
            stages.release(left_2_stage);
        }
    };

    GEMM_DEVICE void multiply(Sums<Config>& sums, FilledStages<Config>& stages, int block) {
        Operands quarters(stages, block);
        if constexpr (Config::DEPTH == 3) quarters.await_second();
        wgmma_fence();
        multiply_complex<Config>(sums, temporary, quarters, {0, 0});
    }
    GEMM_DEVICE void end(Sums<Config>&, const FilledStages<Config>&) const {}
};

template <class Config>
using ProductsOf = Select<
    Config::COMPONENTS == 1, RealProducts<Config>,
    Select<Config::PHASES == 3, GaussProducts<Config>, ComplexProducts<Config>>>;

template <class Config>
using SchemeOf = Select<
    Config::QUARTERED, Quarters<Config>,
    Select<Config::PROMOTE == 0, Accumulated<Config>, Promoted<Config, ProductsOf<Config>>>>;
