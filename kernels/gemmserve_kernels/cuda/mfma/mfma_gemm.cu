// D = alpha op(A) op(B) + beta C on AMD's matrix units: tiled, batched, strided, real or fused complex; or from float16
// planes.
#include "kernel.cuh"
#include "../epilogue/store.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) mfma_gemm(MfmaParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const GemmParams& gemm = params.work.gemm;
    const int thread = static_cast<int>(threadIdx.x);
    const TileCoordinate where =
        tile_of<Config::GROUP>(gemm.first_tile + static_cast<Long>(blockIdx.x), gemm.tiles_m, gemm.tiles_n);
    const Config::Threads threads(thread);
    Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
    product_tile(params, where, threads, thread, shared, acc);
    visit_tile<Config>(gemm, where, threads, acc, StoreEpilogue<Config>(gemm, where.batch));
}
