// The same for those tiles alone that residues do not serve; over at once where there are none. Every block counts the
// tiles that fail, 32 at a time, and takes its share of them: bad rows keep all multiprocessors busy.
#include "common/counters.cuh"
#include "common/judged.cuh"
#include "dmma/kernel.cuh"

struct DmmaTilesParams {
    TensorMap map_a, map_b;
    GemmParams gemm;
    JudgedParams judged;
    Long tiles;
    Long first;  // matrix of the batch: the first that is judged
    ElementCounters* counters;
    Long reserved[7];
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

extern "C" __global__ void __launch_bounds__(Pipeline::THREADS, GEMM_MIN_BLOCKS)
    dmma_tiles(const __grid_constant__ DmmaTilesParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    if (all_pass(params.judged)) return;
    const int tiles = static_cast<int>(params.tiles);
    multiply_tiles(params, shared, [&](auto visit) {
        unsigned turn = blockIdx.x;  // failing tiles before the next one of this block
        for (int first = 0; first < tiles; first += 32) {
            unsigned failing = __ballot_sync(0xffffffffu, fails(params, first + thread_again() % 32));
            while (failing != 0) {
                const int bit = __ffs(static_cast<int>(failing)) - 1;
                failing &= failing - 1;
                if (turn-- != 0) continue;
                turn = gridDim.x - 1;
                if (threadIdx.x == 0) count(params, first + bit);
                visit([&] { return place(params, once_more(first + bit)); });
            }
        }
    });
}
