// D = alpha op(A) op(B) + beta C in double precision on tensor cores (sm_80 and later).
#include "kernel.cuh"

struct DmmaParams {
    TensorMap map_a, map_b;
    GemmParams gemm;
    Long tiles;
};

extern "C" __global__ void __launch_bounds__(Pipeline::THREADS, GEMM_MIN_BLOCKS)
    dmma_gemm(const __grid_constant__ DmmaParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    const GemmParams& gemm = params.gemm;
    const int tiles = static_cast<int>(params.tiles), stride = static_cast<int>(gridDim.x);
    multiply_tiles(params, shared, [&](auto visit) {
        for (int number = static_cast<int>(blockIdx.x); number < tiles; number += stride) {
            visit([&] { return tile_of<Config::GROUP>(gemm.first_tile + once_more(number), gemm.tiles_m, gemm.tiles_n); });
        }
    });
}
