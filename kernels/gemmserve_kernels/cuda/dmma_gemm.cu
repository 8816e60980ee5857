// D = alpha op(A) op(B) + beta C in double precision on tensor cores (sm_80 and later).
#include "dmma/kernel.cuh"

struct DmmaParams {
    GemmParams gemm;
    Long tiles;
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) dmma_gemm(DmmaParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const GemmParams& gemm = params.gemm;
    const auto place = [&](int number) {
        return tile_of<Config::GROUP>(gemm.first_tile + number, gemm.tiles_m, gemm.tiles_n);
    };
    const int tiles = static_cast<int>(params.tiles), stride = static_cast<int>(gridDim.x);
    for (int number = static_cast<int>(blockIdx.x); number < tiles; number += stride) {
        Sums sums;
        accumulate(gemm, place(number), shared, sums);
        store(gemm, place(once_more(number)), sums);  // registers are short in the loop over k
    }
}
