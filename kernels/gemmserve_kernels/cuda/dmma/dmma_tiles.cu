// The same for those tiles alone that residues do not serve; over at once where there are none. They are dealt to all
// blocks: bad rows keep all multiprocessors busy. Where all fail, tiles run in the order of a whole product.
//
// What decides where a block goes is read at one address by all of its threads, and divided in 32 bits alone. Where it came
// from votes of a warp, or from a division in 64 bits, which is a call, the compiler took the loop over k for one that lanes
// may leave one by one, at 4 to 17 % of a product's time.
#include "../common/judging/counters.cuh"
#include "../common/judging/judged.cuh"
#include "kernel.cuh"

struct DmmaTilesParams {
    TensorMap map_a, map_b;
    GemmParams gemm;
    const unsigned* failing;  // how many, and which: see JudgedParams
    Long tiles;
    Long first;  // matrix of the batch: the first that is judged
    ElementCounters* counters;
    unsigned judged, judged_m, judged_n;  // tiles that are judged: all, and of one matrix
    int reserved[7];
};

// Tiles of this kernel in one that is judged.
constexpr int DOWN = JUDGED_M / Config::BLOCK_M, RIGHT = JUDGED_N / Config::BLOCK_N;
static_assert(JUDGED_M % Config::BLOCK_M == 0 && JUDGED_N % Config::BLOCK_N == 0, "a tile fails as a whole");

class Walk {
  public:
    const DmmaTilesParams& params;
    bool all;
    int end;  // numbers of tiles, or of parts of those that fail

    GEMM_DEVICE explicit Walk(const DmmaTilesParams& walked) : params(walked) {
        const unsigned failing = *params.failing;
        all = failing == params.judged;
        end = all ? static_cast<int>(params.tiles) : static_cast<int>(failing * (DOWN * RIGHT));
    }

    GEMM_DEVICE TileCoordinate place(int number) const {
        const GemmParams& gemm = params.gemm;
        if (all) {
            const TileCoordinate where = tile_of<Config::GROUP>(number, gemm.tiles_m, gemm.tiles_n);
            return {params.first + where.batch, where.tile_m, where.tile_n};
        }
        const unsigned judged = judged_at(number), by_n = judged / params.judged_n;
        return {params.first + by_n / params.judged_m, row(judged, number), column(judged, number)};
    }
    // Whether a part of a tile that is judged lies outside of the product.
    GEMM_DEVICE bool outside(int number) const {
        if (all) return false;
        const unsigned judged = judged_at(number);
        return row(judged, number) >= params.gemm.tiles_m || column(judged, number) >= params.gemm.tiles_n;
    }

  private:
    GEMM_DEVICE unsigned judged_at(int number) const {
        return params.failing[1 + number / (DOWN * RIGHT)];
    }
    GEMM_DEVICE Long row(unsigned judged, int number) const {
        return judged / params.judged_n % params.judged_m * DOWN + number % (DOWN * RIGHT) / RIGHT;
    }
    GEMM_DEVICE Long column(unsigned judged, int number) const {
        return judged % params.judged_n * RIGHT + number % RIGHT;
    }
};

GEMM_DEVICE void count(const DmmaTilesParams& params, const TileCoordinate& where) {
    add_elements(
        params.counters->plain, clipped(where.tile_m * Config::BLOCK_M, Config::BLOCK_M, params.gemm.m) *
                                    clipped(where.tile_n * Config::BLOCK_N, Config::BLOCK_N, params.gemm.n));
}

extern "C" __global__ void __launch_bounds__(Pipeline::THREADS, GEMM_MIN_BLOCKS)
    dmma_tiles(const __grid_constant__ DmmaTilesParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    if (*params.failing == 0) return;
    multiply_tiles(params, shared, [&](auto visit) {
        const Walk walk(params);
        for (int number = static_cast<int>(blockIdx.x); number < walk.end; number += static_cast<int>(gridDim.x)) {
            if (walk.outside(number)) continue;
            if (threadIdx.x == 0) count(params, walk.place(number));
            visit([&] { return walk.place(once_more(number)); });
        }
    });
}
