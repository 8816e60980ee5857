// Reductions of alpha op(A) op(B) over its rows on AMD's matrix units: mfma_gemm's product, whose tiles leave one partial
// for each column instead of D (or beside it). combine.cu folds them.
#include "kernel.cuh"
#include "../epilogue/store.cuh"
#include "../epilogue/reduce.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) mfma_reduce(MfmaParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES <= GEMM_SHARED_BYTES, "the host reserves enough");
    const GemmReduceParams& work = params.work;
    const int thread = static_cast<int>(threadIdx.x);
    const TileCoordinate where = tile_of<Config::GROUP>(
        work.gemm.first_tile + static_cast<Long>(blockIdx.x), work.gemm.tiles_m, work.gemm.tiles_n);
    const Config::Threads threads(thread);
    Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
    product_tile(params, where, threads, thread, shared, acc);
    const Long batch = work.first_batch + where.batch;
    const Long part = (work.reduce_batch ? batch * work.gemm.tiles_m : 0) + where.tile_m;
    const auto keep = [&](auto reduction, Long output, auto partial) {
        using Each = decltype(reduction);
        if constexpr (GEMM_ATOMIC && Each::ADDS) {
            Each::store_atomically(work.partial, output, partial);
        } else {
            Each::store(work.partial, part * work.outputs + output, partial);
        }
    };
    reduce_tile<Config, GEMM_REDUCTIONS, GEMM_PRE_OP>(work, where, threads, thread, shared, acc, keep);
#if GEMM_RETURN_C
    visit_tile<Config>(work.gemm, where, threads, acc, StoreEpilogue<Config>(work.gemm, where.batch));
#endif
}
