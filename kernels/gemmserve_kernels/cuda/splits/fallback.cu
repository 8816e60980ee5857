// D = alpha op(A) op(B) + beta C in plain arithmetic, where rows, columns or tiles are flagged. Launched after
// every tensor-core product, over at once where nothing is.
#include "../common/dependent.cuh"
#include "../simt/multiply.cuh"
#include "../epilogue/flags.cuh"
#include "../epilogue/store.cuh"

struct FallbackParams {
    GemmParams gemm;
    FlagParams flags;
    Long tiles;
};

struct FallbackEpilogue {
    static constexpr int N = Config::Threads::PIECE_N;

    const MatrixFlags& flags;
    StoreEpilogue<Config> store;
    bool all;

    GEMM_DEVICE void visit(Long i, Long first, int count, Config::Acc (&values)[N]) const {
        const int of_row = all ? FLAG_BOTH : flags.row(i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (j < count && is_unfit(of_row | flags.column(first + j))) store.put(i, first + j, values[j]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) fallback(FallbackParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    __shared__ int found[2][FLAG_BOTH + 1];  // rows and columns of the tile by their flags
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    let_next_start();
    wait_for_previous();
    if (params.flags.none()) return;
    static_assert(GROUP % Config::BLOCK_M == 0 && GROUP % Config::BLOCK_N == 0, "a tile lies in one group either way");
    static_assert(!FAILING || lie_in_tiles<TURNED>(Config::BLOCK_M, Config::BLOCK_N), "all of a tile fails, or nothing");
    const int thread = static_cast<int>(threadIdx.x);
    const Config::Threads threads(thread);
    const Long grid = static_cast<Long>(gridDim.x);
    for (Long tile = params.gemm.first_tile + static_cast<Long>(blockIdx.x); tile < params.tiles; tile += grid) {
        const TileCoordinate where = tile_of<Config::GROUP>(tile, params.gemm.tiles_m, params.gemm.tiles_n);
        const MatrixFlags flags(params.flags, params.gemm, where.batch);
        const Long first_row = where.tile_m * Config::BLOCK_M, first_column = where.tile_n * Config::BLOCK_N;
        const bool rest = flags.rest(first_row, first_column), all = rest && !params.flags.widened;
        if (thread < 2 * (FLAG_BOTH + 1)) found[thread / (FLAG_BOTH + 1)][thread % (FLAG_BOTH + 1)] = 0;
        __syncthreads();
        for (int i = thread; i < Config::BLOCK_M + Config::BLOCK_N; i += Config::THREADS) {
            const bool of_rows = i < Config::BLOCK_M;
            const int of_one = of_rows ? flags.row(first_row + i) : flags.column(first_column + i - Config::BLOCK_M);
            if (of_one) atomicAdd(&found[!of_rows][of_one], 1);
        }
        __syncthreads();
        const Long rows = clipped(first_row, Config::BLOCK_M, params.gemm.m);
        const Long columns = clipped(first_column, Config::BLOCK_N, params.gemm.n);
        const Long pairs = FAILING && !rest ? 0 : unfit_pairs(found[0], found[1], rows, columns);
        const Long unfit = all ? rows * columns : pairs;
        if (unfit != 0) {
            if (thread == 0 && params.flags.counters != nullptr) count(params.flags, unfit, rest);
            Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
            accumulate<Config, RUN>(params.gemm, where, threads, thread, shared, acc);
            const StoreEpilogue<Config> store(params.gemm, where.batch);
            visit_tile<Config>(params.gemm, where, threads, acc, FallbackEpilogue{flags, store, all});
        }
        __syncthreads();
    }
}
