// The same for those tiles alone that residues do not serve; over at once where there are none. Every block counts the
// tiles that fail, 32 at a time, and takes its share of them: bad rows keep all multiprocessors busy.
#include "common/counters.cuh"
#include "common/judged.cuh"
#include "dmma/kernel.cuh"

struct DmmaTilesParams {
    GemmParams gemm;
    JudgedParams judged;
    Long tiles;
    Long first;  // matrix of the batch: the first that is judged
    ElementCounters* counters;
};

static_assert(JUDGED_M % Config::BLOCK_M == 0 && JUDGED_N % Config::BLOCK_N == 0, "a tile fails as a whole");

GEMM_DEVICE TileCoordinate place(const DmmaTilesParams& params, int number) {
    const TileCoordinate in_panel = tile_of<Config::GROUP>(number, params.gemm.tiles_m, params.gemm.tiles_n);
    return {params.first + in_panel.batch, in_panel.tile_m, in_panel.tile_n};
}

GEMM_DEVICE bool fails(const DmmaTilesParams& params, int number) {
    if (number >= params.tiles) return false;
    const TileCoordinate where = tile_of<Config::GROUP>(number, params.gemm.tiles_m, params.gemm.tiles_n);
    return !passes(
        params.judged, where.batch, where.tile_m / (JUDGED_M / Config::BLOCK_M), where.tile_n / (JUDGED_N / Config::BLOCK_N));
}

GEMM_DEVICE void count(const DmmaTilesParams& params, int number) {
    const TileCoordinate where = place(params, number);
    add_elements(
        params.counters->plain, clipped(where.tile_m * Config::BLOCK_M, Config::BLOCK_M, params.gemm.m) *
                                    clipped(where.tile_n * Config::BLOCK_N, Config::BLOCK_N, params.gemm.n));
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) dmma_tiles(DmmaTilesParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    if (all_pass(params.judged)) return;
    const GemmParams& gemm = params.gemm;
    unsigned turn = blockIdx.x;  // failing tiles before the next one of this block
    const int tiles = static_cast<int>(params.tiles);
    for (int first = 0; first < tiles; first += 32) {
        unsigned failing = __ballot_sync(0xffffffffu, fails(params, first + thread_again() % 32));
        while (failing != 0) {
            const int bit = __ffs(static_cast<int>(failing)) - 1;
            failing &= failing - 1;
            if (turn-- != 0) continue;
            turn = gridDim.x - 1;
            const int number = first + bit;
            if (threadIdx.x == 0) count(params, number);
            Sums sums;
            accumulate(gemm, place(params, number), shared, sums);
            store(gemm, place(params, once_more(number)), sums);  // registers are short in the loop over k
        }
    }
}
