// A warp's tile of one complex64 product on TF32 tensor cores, as accurate as float32.
//
// 3xTF32 (CUTLASS, example 29): x = big + small, two TF32 numbers that hold 22 bits or more of x; a product of two is
// big big + big small + small big. The tensor core truncates what it adds up, so each step of 8 k starts from zero, the
// small terms first, and is added to the accumulators in round-to-nearest.
//
// Numbers too small for two TF32 parts, infinities and NaN would not give what float32 gives. A warp that meets an
// element below 2^-100 (0 excepted), or a result that is not finite, computes its tile again with plain multiply-adds.
#pragma once

#include "../common/ptx/mma.cuh"
#include "store.cuh"

#if GEMM_TENSOR

struct Split {
    unsigned big, small;
};

// Rounding by hand costs less than a conversion. It would lose the NaN of all ones, but the small part does not.
GEMM_DEVICE Split split(float x) {
    const unsigned big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    return {big, to_tf32(x - __uint_as_float(big))};
}

// Steps k and k + 1 of a row of op(A), or of a column of op(B); zeros past the end.
template <class Layout, bool CONJUGATE, bool ALONG_K, int READ, class Acc, class Stored>
GEMM_DEVICE void read_pair(Acc (&values)[2], const Stored* matrix, int part, int line, int k) {
    values[0] = values[1] = Acc{};
    if constexpr (ALONG_K && READ >= 2) {
        if (Config::K % 8 == 0 || k < Config::K) {
            read_piece<Acc, Config::PLANAR, CONJUGATE>(values, matrix + line * Layout::LEADING + k, part);
        }
    } else {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            if (Config::K % 8 == 0 || k + s < Config::K) {
                const int at = ALONG_K ? line * Layout::LEADING + k + s : (k + s) * Layout::LEADING + line;
                Acc one[1];
                read_piece<Acc, Config::PLANAR, CONJUGATE>(one, matrix + at, part);
                values[s] = one[0];
            }
        }
    }
}

GEMM_DEVICE int at_most(int x, int limit) { return x < limit ? x : limit; }

// The smallest magnitude so far, as the bits of a float shifted left; 0 counts as the largest.
GEMM_DEVICE void look_at(unsigned& least, float x) {
    const unsigned bits = (__float_as_uint(x) << 1) - 1;
    least = bits < least ? bits : least;
}

struct WarpTile {
    using Acc = Config::Acc;
    using Multiply = MultiplyTf32<8>;
    static constexpr int TILES_M = THREAD_M / 16, TILES_N = THREAD_N / 8;
    static constexpr int TOGETHER = TILES_N % 2 == 0 ? 2 : 1;
    static_assert(THREAD_M % 16 == 0 && THREAD_N % 8 == 0, "whole instructions");

    float re[TILES_M][TILES_N][4], im[TILES_M][TILES_N][4];
    int group, quad;         // of the lane: g and t above
    int first_row, first_column;

    GEMM_DEVICE WarpTile(int lane, int tile_m, int tile_n)
        : group(lane / 4), quad(lane % 4), first_row(tile_m * THREAD_M), first_column(tile_n * THREAD_N) {}

    GEMM_DEVICE int row(int i, int e) const { return first_row + i * 16 + group + e / 2 * 8; }
    GEMM_DEVICE int column(int j, int e) const { return first_column + j * 8 + quad * 2 + e % 2; }

    // Returns whether the result stands; otherwise it is to be computed in another way.
    GEMM_DEVICE bool multiply(const Config::A* a, const Config::B* b) {
        unsigned least = ~0u;
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) re[i][j][e] = im[i][j][e] = 0.0f;
            }
        }
#pragma unroll 1
        for (int k = 0; k < Config::K; k += 8) step(a, b, k, least);
        float probe = 0.0f;
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) probe = fmaf(re[i][j][e], 0.0f, fmaf(im[i][j][e], 0.0f, probe));
            }
        }
        const bool good = probe == 0.0f && least >= (27u << 24);  // 2^-100
        return __all_sync(0xffffffffu, good);
    }

    GEMM_DEVICE void step(const Config::A* a, const Config::B* b, int k, unsigned& least) {
        unsigned a_re[TILES_M][2][4], a_im[TILES_M][2][4];
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Acc pair[2];
                read_pair<Config::LayoutA, GEMM_CONJUGATE_A, Config::A_ALONG_K, GEMM_READ_A>(
                    pair, a, Config::PART_A, at_most(row(i, 2 * h), Config::M - 1), k + 2 * quad);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    look_at(least, pair[s].re);
                    look_at(least, pair[s].im);
                    const Split x = split(pair[s].re), y = split(pair[s].im);
                    a_re[i][0][2 * s + h] = x.big;
                    a_re[i][1][2 * s + h] = x.small;
                    a_im[i][0][2 * s + h] = y.big;
                    a_im[i][1][2 * s + h] = y.small;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < TILES_N; j += TOGETHER) columns(b, k, j, a_re, a_im, least);
    }

    // TOGETHER of the tile's columns of instructions: their sums are independent, so that one need not wait for another.
    GEMM_DEVICE void columns(
        const Config::B* b, int k, int first, const unsigned (&a_re)[TILES_M][2][4], const unsigned (&a_im)[TILES_M][2][4],
        unsigned& least) {
        unsigned b_re[TOGETHER][2][2], b_im[TOGETHER][2][2], b_minus[TOGETHER][2][2];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            Acc pair[2];
            read_pair<Config::LayoutB, GEMM_CONJUGATE_B, Config::B_ALONG_K, GEMM_READ_B>(
                pair, b, Config::PART_B, at_most(first_column + (first + j) * 8 + group, Config::N - 1), k + 2 * quad);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                look_at(least, pair[s].re);
                look_at(least, pair[s].im);
                const Split x = split(pair[s].re), y = split(pair[s].im);
                b_re[j][0][s] = x.big;
                b_re[j][1][s] = x.small;
                b_im[j][0][s] = y.big;
                b_im[j][1][s] = y.small;
                b_minus[j][0][s] = y.big ^ 0x80000000u;
                b_minus[j][1][s] = y.small ^ 0x80000000u;
            }
        }
        float sum_re[TOGETHER][TILES_M][4], sum_im[TOGETHER][TILES_M][4];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sum_re[j][i][e] = sum_im[j][i][e] = 0.0f;
            }
        }
        // small big, big small, big big
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            const int x = term == 0, y = term == 1;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) {
#pragma unroll
                    for (int i = 0; i < TILES_M; ++i) {
                        const auto& a = half ? a_im[i][x] : a_re[i][x];
                        Multiply::run(sum_re[j][i], a, half ? b_minus[j][y] : b_re[j][y], sum_re[j][i]);
                        Multiply::run(sum_im[j][i], a, half ? b_re[j][y] : b_im[j][y], sum_im[j][i]);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    re[i][first + j][e] += sum_re[j][i][e];
                    im[i][first + j][e] += sum_im[j][i][e];
                }
            }
        }
    }

    // The same tile in float32.
    GEMM_DEVICE void multiply_plainly(const Config::A* a, const Config::B* b) {
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int r = at_most(row(i, e), Config::M - 1), c = at_most(column(j, e), Config::N - 1);
                    Acc sum = Acc{};
#pragma unroll 1
                    for (int k = 0; k < Config::K; ++k) {
                        using LA = Config::LayoutA;
                        using LB = Config::LayoutB;
                        Acc x[1], y[1];
                        read_piece<Acc, Config::PLANAR, GEMM_CONJUGATE_A>(
                            x, a + (Config::A_ALONG_K ? r * LA::LEADING + k : k * LA::LEADING + r), Config::PART_A);
                        read_piece<Acc, Config::PLANAR, GEMM_CONJUGATE_B>(
                            y, b + (Config::B_ALONG_K ? c * LB::LEADING + k : k * LB::LEADING + c), Config::PART_B);
                        multiply_accumulate(sum, x[0], y[0]);
                    }
                    re[i][j][e] = sum.re;
                    im[i][j][e] = sum.im;
                }
            }
        }
    }

    GEMM_DEVICE void store(const Store& to) const {
        constexpr int PIECE = GEMM_PIECE_N;
        static_assert(PIECE <= 2, "a lane has pairs of columns");
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
#pragma unroll
                for (int e = 0; e < 4; e += PIECE) {
                    if (row(i, e) >= Config::M || column(j, e) >= Config::N) continue;
                    Acc values[PIECE];
#pragma unroll
                    for (int p = 0; p < PIECE; ++p) values[p] = Acc{re[i][j][e + p], im[i][j][e + p]};
                    to.piece(row(i, e), column(j, e), values);
                }
            }
        }
    }
};

GEMM_DEVICE void multiply_in_warp(const Store& to, const Config::A* a, const Config::B* b, int tile_m, int tile_n) {
    WarpTile tile(static_cast<int>(threadIdx.x) % 32, tile_m, tile_n);
    if (!tile.multiply(a, b)) tile.multiply_plainly(a, b);
    tile.store(to);
}

#endif
