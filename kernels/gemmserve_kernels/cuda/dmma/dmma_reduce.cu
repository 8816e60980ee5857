// Reductions of the rows of alpha op(A) op(B) in double precision on tensor cores (sm_80 and later): dmma_gemm's product,
// whose tiles leave partials instead of D (or beside it). combine.cu folds them.
#include "../common/dependent.cuh"
#include "../epilogue/quad.cuh"
#include "kernel.cuh"

struct DmmaReduceParams {
    TensorMap map_a, map_b;
    GemmParams gemm;
    Long tiles;
    RowReduceParams reduce;
    const int* failing;         // GEMM_SCREENED: [matrix of the batch][row of tiles], not 0 where tiles are made at all
    const int* failing_rows;    // [matrix of the batch][row], not 0 where they leave partials
    const int* failing_any;     // not 0 where any is
};

// Whether a tile is of no use: the rows of it have their extremes already.
GEMM_DEVICE bool is_spared(const DmmaReduceParams& params, const TileCoordinate& where) {
#if defined(GEMM_SCREENED)
    return params.failing[(params.reduce.first_batch + where.batch) * params.gemm.tiles_m + where.tile_m] == 0;
#else
    return false;
#endif
}

// What a warp's rows come to over its columns, from registers: a quad has the elements of a row.
GEMM_DEVICE void reduce_sums(const DmmaReduceParams& params, const TileCoordinate& where, const Sums& sums) {
    const GemmParams& gemm = params.gemm;
    const RowReduceParams& reduce = params.reduce;
    const int warp = thread_again() / 32, g = thread_again() % 32 / 4, t = thread_again() % 4;
    const Long first_row = where.tile_m * Config::BLOCK_M + warp / Config::WARPS_N * Config::WARP_M;
    const Long first_column = where.tile_n * Config::BLOCK_N + warp % Config::WARPS_N * Config::WARP_N;
    const Long left = gemm.n - first_column;
    const int columns = left < Config::WARP_N ? static_cast<int>(left) : Config::WARP_N;  // inside; or none
    const Long batch = reduce.first_batch + where.batch, parts = gemm.tiles_n * Config::WARPS_N;
    const Long part = where.tile_n * Config::WARPS_N + warp % Config::WARPS_N;
    const Long first_output = reduce.reduce_batch ? 0 : batch * gemm.m;
    const Long number = (reduce.reduce_batch ? batch * parts : 0) + part;
    const Long first_index = (reduce.reduce_batch ? batch * gemm.n : 0) + first_column;
    static_assert(Pieces::ROWS % 2 == 0, "rows are reduced in pairs");
#pragma unroll
    for (int r = 0; r < Pieces::ROWS; r += 2) {
        const Long row = first_row + (t % 2 == 0 ? Pieces::row(r, g) : Pieces::row(r + 1, g));
        bool is_wanted = row < gemm.m;
#if defined(GEMM_SCREENED)
        if (is_wanted) is_wanted = params.failing_rows[batch * gemm.m + row] != 0;
#endif
        const RowSlot slot{first_output + row, number, first_index, is_wanted};
        reduce_rows<GEMM_REDUCTIONS, GEMM_PRE_OP, GEMM_ATOMIC, Config::Acc>(reduce, slot, t, [&](bool lower, auto fold) {
#pragma unroll
            for (int piece = 0; piece < Pieces::COUNT; ++piece) {
                Config::Acc values[Pieces::N];
                Pieces::of(sums, lower ? r + 1 : r, piece, values);
#pragma unroll
                for (int p = 0; p < Pieces::N; ++p) {
                    const int column = Pieces::column(piece, t) + p;
                    if (column < columns) fold(column, scale(values[p], gemm.alpha[0], gemm.alpha[1]));
                }
            }
        });
    }
}

extern "C" __global__ void __launch_bounds__(Pipeline::THREADS, GEMM_MIN_BLOCKS)
    dmma_reduce(const __grid_constant__ DmmaReduceParams params) {
    GEMM_DYNAMIC_SHARED(shared);
#if defined(GEMM_SCREENED)
    let_next_start();
    wait_for_previous();
    if (*params.failing_any == 0) return;
#endif
    const GemmParams& gemm = params.gemm;
    const int tiles = static_cast<int>(params.tiles), stride = static_cast<int>(gridDim.x);
    multiply_tiles(
        params, shared,
        [&](auto visit) {
            for (int number = static_cast<int>(blockIdx.x); number < tiles; number += stride) {
                const auto place = [&] {
                    return tile_of<Config::GROUP>(gemm.first_tile + once_more(number), gemm.tiles_m, gemm.tiles_n);
                };
                if (!is_spared(params, place())) visit(place);
            }
        },
        [&](Pipeline& pipeline, auto place, unsigned char* memory) {
            Sums sums;
            accumulate(pipeline, gemm, place(), memory, sums);
#if GEMM_RETURN_C
            store(gemm, place(), sums);
#endif
            reduce_sums(params, place(), sums);
        });
}
