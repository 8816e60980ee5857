// Epilogue that reduces a tile over its rows: one partial result a column goes to the workspace, C goes nowhere.
#pragma once

#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"
#include "pre_op.cuh"
#include "reductions.cuh"

// `keep(reduction, output, partial)` is called once for each reduction and output of the tile.
template <class Config, unsigned MASK, PreOp OP, class Keep>
GEMM_DEVICE void reduce_tile(
    const GemmReduceParams& params, const TileCoordinate& where, const typename Config::Threads& threads, int thread,
    unsigned char* shared, const typename Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N], const Keep& keep) {
    using Value = PreOpValue<OP, typename Config::Acc>;
    using R = Real<typename Config::Acc>;
    constexpr int COLUMNS = Config::BLOCK_N, ROWS = Config::Threads::THREADS_M;
    const Long first_row = where.tile_m * Config::BLOCK_M, first_column = where.tile_n * COLUMNS;
    const int rows = params.gemm.m - first_row < Config::BLOCK_M ? static_cast<int>(params.gemm.m - first_row)
                                                                 : Config::BLOCK_M;
    const Long batch = params.first_batch + where.batch;
    const Long first_output = (params.reduce_batch ? 0 : batch * params.gemm.n) + first_column;
    const Long first_index = (params.reduce_batch ? batch * params.gemm.m : 0) + first_row;

    for_each_reduction<MASK, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        auto* const locals = reinterpret_cast<typename Each::Local*>(shared);
        __syncthreads();  // the mainloop, or the reduction before this one, may still be reading
#pragma unroll
        for (int j = 0; j < Config::THREAD_N; ++j) {
            locals[threads.thread_m * COLUMNS + threads.column(j)] = fold_elements<Each>([&](auto fold) {
#pragma unroll
                for (int i = 0; i < Config::THREAD_M; ++i) {
                    const int row = threads.row(i);
                    const auto scaled = scale(
                        acc[i][j], static_cast<R>(params.gemm.alpha[0]), static_cast<R>(params.gemm.alpha[1]));
                    if (row < rows) fold(apply<OP>(scaled), row);
                }
            });
        }
        __syncthreads();
        for (int column = thread; column < COLUMNS; column += Config::THREADS) {
            if (first_column + column >= params.gemm.n) continue;
            typename Each::Partial partial = Each::identity();
            for (int r = 0; r < ROWS; ++r) Each::merge(partial, Each::lift(locals[r * COLUMNS + column], first_index));
            keep(reduction, first_output + column, partial);
        }
    });
}
