// Reductions of the rows of alpha op(A) op(B) on the tensor cores of sm_80 and later: mma_gemm's product, whose tiles
// leave partials instead of D (or beside it). combine.cu folds them.
#include "kernel.cuh"
#include "../epilogue/quad.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) mma_reduce(MmaParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    multiply_block(params, shared, [&](const Share& share, Config::Multiply::Sums& sums) {
        const int thread = thread_again(), lane = thread % 32;
        if (params.splits > 1) {
            if (!gather_splits(params, share.tile, share.split, thread, *reinterpret_cast<int*>(shared), sums)) return;
        }
        const Store<Config> store(params, share.where.batch);
        const Long first_row = share.row + warp_row(thread), first_column = share.column + warp_column(thread);
        if constexpr (!Config::PLANES) store.mend(sums, first_row, first_column, lane);
#if GEMM_RETURN_C
        store.run(sums, first_row, first_column, lane);
#endif
        store.finish(sums, first_row, first_column, lane);
        const RowReduceParams& reduce = params.reduce;
        const Long batch = reduce.first_batch + share.where.batch, parts = params.gemm.tiles_n * Config::WARPS_N;
        const Long part = share.where.tile_n * Config::WARPS_N + warp_column(thread) / Config::WARP_N;
#pragma unroll
        for (int i = 0; i < Config::Multiply::ROWS; ++i) {
            const Long row = first_row + fragment_row<Config::A::ALONG_K>(16 * i, lane % 2, lane / 4);
            const RowSlot slot{
                (reduce.reduce_batch ? 0 : batch * params.gemm.m) + row, (reduce.reduce_batch ? batch * parts : 0) + part,
                (reduce.reduce_batch ? batch * params.gemm.n : 0) + first_column, row < params.gemm.m};
            reduce_rows<GEMM_REDUCTIONS, GEMM_PRE_OP, GEMM_ATOMIC, Config::Acc>(
                reduce, slot, lane % 4, [&](bool lower, auto fold) {
                    store.row(sums[i], lower, first_column, lane % 4, fold);
                });
        }
    });
}
