// Reductions of alpha op(A) op(B) over its rows, without the product ever reaching global memory.
//
// One partial per tile and column is left in a workspace; combine.cu folds them.
#include "multiply.cuh"
#include "../epilogue/store.cuh"
#include "../epilogue/reduce.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) gemm_reduce(GemmReduceParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES <= GEMM_SHARED_BYTES, "the host reserves enough");
    const int thread = static_cast<int>(threadIdx.x);
    const TileCoordinate where = tile_of<Config::GROUP>(
        params.gemm.first_tile + static_cast<Long>(blockIdx.x), params.gemm.tiles_m, params.gemm.tiles_n);
    const Config::Threads threads(thread);
    Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
    accumulate<Config, GEMM_SUM_STEPS, (GEMM_SUM_STEPS > 0)>(params.gemm, where, threads, thread, shared, acc);
    const Long batch = params.first_batch + where.batch;
    const Long row = (params.reduce_batch ? batch * params.gemm.tiles_m : 0) + where.tile_m;
    const auto keep = [&](auto reduction, Long output, auto partial) {
        using Each = decltype(reduction);
        if constexpr (GEMM_ATOMIC && Each::ADDS) {
            Each::store_atomically(params.partial, output, partial);
        } else {
            Each::store(params.partial, row * params.outputs + output, partial);
        }
    };
    reduce_tile<Config, GEMM_REDUCTIONS, GEMM_PRE_OP>(params, where, threads, thread, shared, acc, keep);
#if GEMM_RETURN_C
    visit_tile<Config>(params.gemm, where, threads, acc, StoreEpilogue<Config>(params.gemm, where.batch));
#endif
}
