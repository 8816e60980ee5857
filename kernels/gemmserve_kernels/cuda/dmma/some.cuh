// Products of some of a warp's pieces alone: what an instruction multiplies, ROWS by COLUMNS elements.
#pragma once

#include "kernel.cuh"

struct Piece {
    static constexpr int COUNT = Sums::ROWS * Sums::COLUMNS;
    static_assert(COUNT <= 32, "a bit for each");
    static constexpr unsigned ALL = 0xffffffffu >> (32 - COUNT), ROW = (1u << Sums::COLUMNS) - 1;

    static GEMM_DEVICE constexpr unsigned bit(int i, int j) { return 1u << (i * Sums::COLUMNS + j); }
    static GEMM_DEVICE constexpr unsigned row(int i) { return ROW << i * Sums::COLUMNS; }
    static GEMM_DEVICE constexpr unsigned column(int j) {
        unsigned bits = 0;
        for (int i = 0; i < Sums::ROWS; ++i) bits |= bit(i, j);
        return bits;
    }
};

// The same as `accumulate` for the pieces in `wanted`, which a warp's lanes agree on; the others are zero. A piece has the
// same bits either way. A block then waits for the tiles, not for the instructions.
GEMM_DEVICE void accumulate_some(
    Pipeline& pipeline, const GemmParams& gemm, const TileCoordinate& where, unsigned wanted, Sums& sums) {
    static_assert(!Config::HAS_RUNS, "sums are those of one run");
    const int steps = static_cast<int>((gemm.k + Config::BLOCK_K - 1) / Config::BLOCK_K);
    sums.clear();
    if (steps == 0) return;
    Arriving tiles(pipeline, gemm, where, steps);
    const FirstOfLane first = first_of_lane();
    const unsigned zero = static_cast<unsigned>(gemm.conjugate_a);
    constexpr int ALL = Config::BLOCK_K / Config::STEPS_K;
    const auto multiply = [&] {
        if (wanted == 0) return;
#pragma unroll
        for (int step = 0; step < ALL; ++step) {
            // Else all that follows from these, in every step, is kept in registers beside the loop.
            const unsigned bits = static_cast<unsigned>(once_more(static_cast<int>(wanted)));
            const int first_a = once_more(first.a), first_b = once_more(first.b);
            Config::Right b[Sums::COLUMNS];
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j) {
                if (bits & Piece::column(j)) b[j].read(tiles.now(), first_b, j, step);
            }
#pragma unroll
            for (int i = 0; i < Sums::ROWS; ++i) {
                if ((bits & Piece::row(i)) == 0) continue;
                Config::Left a;
                a.read(tiles.now(), first_a, i, step, zero);
#pragma unroll
                for (int j = 0; j < Sums::COLUMNS; ++j) {
                    if (bits & Piece::bit(i, j)) sums.multiply(i, j, a, b[j]);
                }
            }
        }
    };
    multiply();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
        tiles.next();
        tiles.release();
        multiply();
    }
    tiles.end();
}
