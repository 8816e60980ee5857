// D = alpha op(A) op(B) + beta C: tiled, batched, strided, real or fused complex.
#include "multiply.cuh"
#include "../epilogue/store.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) gemm(GemmParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const int thread = static_cast<int>(threadIdx.x);
    const TileCoordinate where =
        tile_of<Config::GROUP>(params.first_tile + static_cast<Long>(blockIdx.x), params.tiles_m, params.tiles_n);
    const Config::Threads threads(thread);
    Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
    accumulate<Config, GEMM_SUM_STEPS, (GEMM_SUM_STEPS > 0)>(params, where, threads, thread, shared, acc);
    visit_tile<Config>(params, where, threads, acc, StoreEpilogue<Config>(params, where.batch));
}
