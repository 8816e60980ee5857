// D = alpha op(A) op(B) + beta C in plain arithmetic, where rows, columns or tiles are flagged. Launched after
// every tensor-core product, over at once where nothing is.
#include "common/dependent.cuh"
#include "mma/simt.cuh"
#include "epilogue/flags.cuh"
#include "epilogue/store.cuh"

struct FallbackParams {
    GemmParams gemm;
    FlagParams flags;
    Long tiles;
};

template <class Config>
struct FallbackEpilogue {
    using Acc = typename Config::Acc;
    using R = Real<Acc>;
    static constexpr int N = Config::Threads::PIECE_N;

    const FallbackParams& fallback;
    const GemmParams& params;
    Long row_flags, column_flags;
    Long c_offset, d_offset;
    bool reads_c;
    bool all = false;

    GEMM_DEVICE FallbackEpilogue(const FallbackParams& f, Long batch)
        : fallback(f),
          params(f.gemm),
          row_flags(batch_offset(batch, f.gemm.batch_shape, f.flags.rows.batch_stride)),
          column_flags(batch_offset(batch, f.gemm.batch_shape, f.flags.columns.batch_stride)),
          c_offset(batch_offset(batch, f.gemm.batch_shape, f.gemm.c.batch_stride)),
          d_offset(batch_offset(batch, f.gemm.batch_shape, f.gemm.d.batch_stride)),
          reads_c(f.gemm.beta[0] != 0 || f.gemm.beta[1] != 0) {}

    // Whether the tile at (i, j), which lies in one group of rows and one of columns, is none for float16 planes.
    GEMM_DEVICE bool rest(Long batch, Long i, Long j) const {
        const FlagParams& flags = fallback.flags;
        const Long rows = batch_offset(batch, params.batch_shape, flags.row_deficits.batch_stride);
        const Long columns = batch_offset(batch, params.batch_shape, flags.column_deficits.batch_stride);
        return !is_served(flags, rows, i, columns, j);
    }
    GEMM_DEVICE int row(Long i) const { return i < params.m ? flags_at(fallback.flags.rows, row_flags + i) : 0; }
    GEMM_DEVICE int column(Long j) const { return j < params.n ? flags_at(fallback.flags.columns, column_flags + j) : 0; }

    GEMM_DEVICE void visit(Long i, Long first, int count, Acc (&values)[N]) const {
        const int of_row = all ? FLAG_BOTH : row(i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (j >= count || !is_unfit(of_row | column(first + j))) continue;
            Acc value[1] = {scale(values[j], static_cast<R>(params.alpha[0]), static_cast<R>(params.alpha[1]))};
            if (reads_c) {
                const Long at = c_offset + i * params.c.row_stride + (first + j) * params.c.column_stride;
                const Acc c = read_element<typename Config::C, Acc, Config::PLANAR>(params.c, at);
                value[0] = add(value[0], scale(c, static_cast<R>(params.beta[0]), static_cast<R>(params.beta[1])));
            }
            const Long at = d_offset + i * params.d.row_stride + (first + j) * params.d.column_stride;
            write_piece<typename Config::D, Config::PLANAR, false>(params.d, at, params.d.column_stride, value, 1);
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
    const int thread = static_cast<int>(threadIdx.x);
    const Config::Threads threads(thread);
    const Long grid = static_cast<Long>(gridDim.x);
    for (Long tile = params.gemm.first_tile + static_cast<Long>(blockIdx.x); tile < params.tiles; tile += grid) {
        const TileCoordinate where = tile_of<Config::GROUP>(tile, params.gemm.tiles_m, params.gemm.tiles_n);
        FallbackEpilogue<Config> epilogue(params, where.batch);
        const Long first_row = where.tile_m * Config::BLOCK_M, first_column = where.tile_n * Config::BLOCK_N;
        const bool rest = epilogue.rest(where.batch, first_row, first_column);
        epilogue.all = rest && !params.flags.widened;
        if (thread < 2 * (FLAG_BOTH + 1)) found[thread / (FLAG_BOTH + 1)][thread % (FLAG_BOTH + 1)] = 0;
        __syncthreads();
        for (int i = thread; i < Config::BLOCK_M + Config::BLOCK_N; i += Config::THREADS) {
            const bool of_rows = i < Config::BLOCK_M;
            const int flags = of_rows ? epilogue.row(first_row + i) : epilogue.column(first_column + i - Config::BLOCK_M);
            if (flags) atomicAdd(&found[!of_rows][flags], 1);
        }
        __syncthreads();
        const Long rows = clipped(first_row, Config::BLOCK_M, params.gemm.m);
        const Long columns = clipped(first_column, Config::BLOCK_N, params.gemm.n);
        const Long unfit = epilogue.all ? rows * columns : unfit_pairs(found[0], found[1], rows, columns);
        if (unfit != 0) {
            if (thread == 0 && params.flags.counters != nullptr) count(params.flags, unfit, rest);
            Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
            accumulate<Config, RUN>(params.gemm, where, threads, thread, shared, acc);
            visit_tile<Config>(params.gemm, where, threads, acc, epilogue);
        }
        __syncthreads();
    }
}
