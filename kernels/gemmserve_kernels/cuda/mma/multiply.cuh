// One warp's part of a tile: fragments from shared memory, matrix instructions, promotion of partial sums.
#pragma once

#include "fragments.cuh"

// The tensor core cuts sums towards zero. So partial sums of OperandA::GROUP steps of k are added to a second accumulator
// by the ordinary units, which round to nearest. Mixed products (big times small) come first: while the partial sum is
// small, so is what is cut off. PRODUCTS of parts: 1; 3 of two parts, for small times small is below the last bit; 6 or 9
// of three bfloat16 parts. Of the latter the product of the first parts has a partial sum of its own: of one term it is
// exact, and cut only where the small ones are added, to nearest.
//
// A complex row of A is two rows of one instruction, its real and its imaginary parts, as they lie next to each other in
// memory; the parts of B take an instruction each. The four sums meet when they are promoted, where the minus sign is.
template <class Instruction, class OperandA, class OperandB, int PRODUCTS, int COMPONENTS, int WARP_M, int WARP_N, int BLOCK_K>
struct WarpMultiply {
    static constexpr int ROWS = WARP_M / 16, PAIRS = WARP_N / 16, GROUP = OperandA::GROUP;
    static constexpr int GROUPS = BLOCK_K / GROUP;
    static constexpr int HALVES = Instruction::B;  // registers of k of one row in one instruction
    static constexpr int STEPS = OperandA::WIDTH / HALVES;
    static constexpr int ALL = 9, FIRST = ALL - PRODUCTS;  // of all products, the last ones
    static_assert(PRODUCTS == 1 || PRODUCTS == 3 || PRODUCTS == 6 || PRODUCTS == 9, "products of one, two or three parts");
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && BLOCK_K % GROUP == 0, "whole fragments");
    using Sums = float[ROWS][PAIRS][2][COMPONENTS][4];  // 16 rows, 16 columns, which half of these, component, element

    static GEMM_DEVICE void zero(Sums& sums) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int c = 0; c < COMPONENTS; ++c)
#pragma unroll
                        for (int e = 0; e < 4; ++e) sums[i][j][half][c][e] = 0.0f;
    }

    // sums += A B for the BLOCK_K steps in shared memory, rows and columns from `row` and `column` on.
    static GEMM_DEVICE void run(
        const unsigned char* shared_a, const unsigned char* shared_b, int row, int column, int lane, unsigned mask,
        Sums& sums) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            typename OperandB::Registers b[PAIRS];
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) OperandB::read(shared_b, column + 16 * j, group, lane, mask, b[j]);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                typename OperandA::Registers a;
                OperandA::read(shared_a, row + 16 * i, group, lane, mask, a);
                add_products(a, b, sums[i]);
            }
        }
    }

  private:
    // The parts that product number `product` of ALL multiplies, two bits for each, the smallest products first: a2 b2,
    // a2 b1, a1 b2, a2 b0, a0 b2, a1 b1, a1 b0, a0 b1, a0 b0.
    static GEMM_DEVICE int part_a(int product) { return 0x149a >> 2 * product & 3; }
    static GEMM_DEVICE int part_b(int product) { return 0x4626 >> 2 * product & 3; }

    static constexpr bool APART = PRODUCTS > 3;  // the last product has a partial sum of its own
    using Partial = float[PAIRS][2][COMPONENTS][4];

    // Promotes the products of one group and 16 rows.
    static GEMM_DEVICE void add_products(
        const typename OperandA::Registers& a, const typename OperandB::Registers (&b)[PAIRS],
        float (&sums)[PAIRS][2][COMPONENTS][4]) {
#pragma unroll
        for (int r = 0; r < COMPONENTS; ++r) {
            Partial partial, large;
            row_of_tiles<FIRST, APART ? ALL - 1 : ALL>(a, r, b, partial);
            if constexpr (APART) row_of_tiles<ALL - 1, ALL>(a, r, b, large);
#pragma unroll
            for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float(&to)[COMPONENTS][4] = sums[j][half];
                    if constexpr (COMPONENTS == 2) {
                        promote(to, r, partial[j][half], large[j][half]);
                    } else {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float small = partial[j][half][0][e];
                            to[0][e] += APART ? large[j][half][0][e] + small : small;
                        }
                    }
                }
        }
    }

    // Rows r of complex sums: those by the real and by the imaginary part of B meet.
    static GEMM_DEVICE void promote(
        float (&to)[COMPONENTS][4], int r, const float (&partial)[COMPONENTS][4], const float (&large)[COMPONENTS][4]) {
        constexpr int IM = COMPONENTS - 1;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float re = partial[0][e] - partial[IM][2 + e], im = partial[0][2 + e] + partial[IM][e];
            if constexpr (APART) {
                re = re + large[0][e] - large[IM][2 + e];
                im = im + large[0][2 + e] + large[IM][e];
            }
            to[0][2 * r + e] += re;
            to[IM][2 * r + e] += im;
        }
    }

    // Products BEGIN .. END of one group: a real fragment's 16 rows, or 8 rows (half `r`) of a complex one.
    template <int BEGIN, int END>
    static GEMM_DEVICE void row_of_tiles(
        const typename OperandA::Registers& a, int r, const typename OperandB::Registers (&b)[PAIRS],
        float (&partial)[PAIRS][2][COMPONENTS][4]) {
        constexpr float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int product = BEGIN; product < END; ++product) {
            const int of_a = part_a(product), of_b = part_b(product);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned left[Instruction::A];
#pragma unroll
                for (int h = 0; h < HALVES; ++h)
#pragma unroll
                    for (int upper = 0; upper < 2; ++upper) {  // rows g + 8: the next rows, or the imaginary parts
                        const int w = step * HALVES + h;
                        left[2 * h + upper] = COMPONENTS == 2 ? a.at[of_a][upper][r][w] : a.at[of_a][0][upper][w];
                    }
#pragma unroll
                for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int c = 0; c < COMPONENTS; ++c) {
                            unsigned right[HALVES];
#pragma unroll
                            for (int h = 0; h < HALVES; ++h) right[h] = b[j].at[of_b][c][half][step * HALVES + h];
                            float(&sum)[4] = partial[j][half][c];
                            if (product == BEGIN && step == 0) {
                                Instruction::run(sum, left, right, none);
                            } else {
                                Instruction::run(sum, left, right, sum);
                            }
                        }
            }
        }
    }
};
