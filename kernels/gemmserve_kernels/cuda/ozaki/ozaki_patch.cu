// The product in plain arithmetic, of those tiles alone that are marked: what residues cannot give as well. In runs of k,
// or it would be less accurate than a BLAS that splits k.
#include "../common/judging/counters.cuh"
#include "../simt/multiply.cuh"
#include "../epilogue/store.cuh"

struct PatchParams {
    GemmParams gemm;
    const unsigned char* patches;  // a mark for each tile, and one that says whether there is any
    Long count;
    ElementCounters* counters;
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) ozaki_patch(PatchParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    if (!params.patches[params.count]) return;
    const GemmParams& gemm = params.gemm;
    const int thread = static_cast<int>(threadIdx.x);
    for (Long number = blockIdx.x; number < params.count; number += gridDim.x) {
        if (!params.patches[number]) continue;
        // Row after row: the order of the marks.
        const Quotient by_n = divide(gemm.first_tile + number, gemm.tiles_n), by_m = divide(by_n.quotient, gemm.tiles_m);
        const TileCoordinate where{by_m.quotient, by_m.remainder, by_n.remainder};
        if (thread == 0) {
            add_elements(
                params.counters->plain, clipped(where.tile_m * Config::BLOCK_M, Config::BLOCK_M, gemm.m) *
                                            clipped(where.tile_n * Config::BLOCK_N, Config::BLOCK_N, gemm.n));
        }
        const Config::Threads threads(thread);
        Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
        accumulate<Config, RUN>(gemm, where, threads, thread, shared, acc);
        visit_tile<Config>(gemm, where, threads, acc, StoreEpilogue<Config>(gemm, where.batch));
        __syncthreads();
    }
}
