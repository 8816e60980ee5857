// Reductions of products that tensor cores must not answer, in plain arithmetic: launched after every one that left
// partials, over at once where nothing is flagged.
//
// A block takes BLOCK_N outputs of one product and walks over all that is reduced for them. Its result stands in the
// place of the product's first partial; the others become those of nothing.
#include "../common/dependent.cuh"
#include "../simt/multiply.cuh"
#include "../epilogue/flags.cuh"
#include "../epilogue/reduce.cuh"

struct ReduceFallbackParams {
    GemmReduceParams product;
    FlagParams flags;
    Long parts;  // partials of one product for each output
    Long tiles;  // of outputs, over all matrices of the launch
};

// Whether any of the outputs' columns, any row or any tile of both is flagged: all threads agree.
GEMM_DEVICE bool wanted(const ReduceFallbackParams& params, Long batch, Long first_column, int thread, int (&shared)[2]) {
    static_assert(GROUP % Config::BLOCK_N == 0, "a block's columns lie in one group");
    const GemmParams& gemm = params.product.gemm;
    const FlagParams& flags = params.flags;
    const Long rows = batch_offset(batch, gemm.batch_shape, flags.rows.batch_stride);
    const Long columns = batch_offset(batch, gemm.batch_shape, flags.columns.batch_stride);
    const Long row_deficits = batch_offset(batch, gemm.batch_shape, flags.row_deficits.batch_stride);
    const Long column_deficits = batch_offset(batch, gemm.batch_shape, flags.column_deficits.batch_stride);
    if (thread == 0) shared[0] = shared[1] = 0;
    __syncthreads();
    int of_rows = 0, of_columns = 0;
    if (flags.row_deficits.re != nullptr && !flags.widened) {
        for (Long i = GROUP * static_cast<Long>(thread); i < gemm.m; i += GROUP * Config::THREADS) {
            if (!is_served(flags, row_deficits, i, column_deficits, first_column)) of_rows |= summary_of(FLAG_BOTH);
        }
    }
    if (flags.rows.re != nullptr) {
        for (Long i = thread; i < gemm.m; i += Config::THREADS) of_rows |= summary_of(flags_at(flags.rows, rows + i));
    }
    for (Long j = thread; j < Config::BLOCK_N && first_column + j < gemm.n; j += Config::THREADS) {
        of_columns |= summary_of(flags_at(flags.columns, columns + first_column + j));
    }
    if (of_rows) atomicOr(&shared[0], of_rows);
    if (of_columns) atomicOr(&shared[1], of_columns);
    __syncthreads();
    return any_is_unfit(shared[0], shared[1]);
}

// Notes that all of the outputs' columns are computed: each thread some groups of rows.
GEMM_DEVICE void count(const ReduceFallbackParams& params, Long batch, Long first_column, int thread) {
    const GemmParams& gemm = params.product.gemm;
    const FlagParams& flags = params.flags;
    const Long rows = batch_offset(batch, gemm.batch_shape, flags.row_deficits.batch_stride);
    const Long columns = batch_offset(batch, gemm.batch_shape, flags.column_deficits.batch_stride);
    const Long width = clipped(first_column, Config::BLOCK_N, gemm.n);
    for (Long i = GROUP * static_cast<Long>(thread); i < gemm.m; i += GROUP * Config::THREADS) {
        count(flags, clipped(i, GROUP, gemm.m) * width, !is_served(flags, rows, i, columns, first_column));
    }
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) reduce_fallback(ReduceFallbackParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    __shared__ int any[2];
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES <= GEMM_SHARED_BYTES, "the host reserves enough");
    wait_for_previous();
    if (params.flags.none()) return;
    const GemmParams& gemm = params.product.gemm;
    const int thread = static_cast<int>(threadIdx.x);
    const Config::Threads threads(thread);
    for (Long tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
        const Quotient at = divide(tile, gemm.tiles_n);
        TileCoordinate where;
        where.batch = at.quotient;
        where.tile_n = at.remainder;
        if (!wanted(params, where.batch, where.tile_n * Config::BLOCK_N, thread, any)) {
            __syncthreads();
            continue;
        }
        if (params.flags.counters != nullptr) count(params, where.batch, where.tile_n * Config::BLOCK_N, thread);
        const Long batch = params.product.first_batch + where.batch;
        const Long first = params.product.reduce_batch ? batch * params.parts : 0;
        for (where.tile_m = 0; where.tile_m < gemm.tiles_m; ++where.tile_m) {
            Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
            accumulate<Config, RUN>(gemm, where, threads, thread, shared, acc);
            // A thread meets the same outputs in every tile.
            const auto keep = [&](auto reduction, Long output, auto partial) {
                using Each = decltype(reduction);
                const PartialParams& to = params.product.partial;
                const Long slot = first * params.product.outputs + output;
                if (where.tile_m > 0) {
                    auto sum = Each::load(to, slot);
                    Each::merge(sum, partial);
                    partial = sum;
                } else {
                    for (Long part = 1; part < params.parts; ++part) {
                        Each::store(to, slot + part * params.product.outputs, Each::identity());
                    }
                }
                Each::store(to, slot, partial);
            };
            reduce_tile<Config, GEMM_REDUCTIONS, GEMM_PRE_OP>(params.product, where, threads, thread, shared, acc, keep);
            __syncthreads();  // the next tile's operands take the place of what the reduction reads
        }
    }
}
