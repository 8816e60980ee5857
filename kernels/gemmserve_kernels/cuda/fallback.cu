// D = alpha op(A) op(B) + beta C in plain arithmetic, where the rows, columns or products are flagged. Launched after
// every tensor-core product, over at once where nothing is.
#include "common/dependent.cuh"
#include "mma/simt.cuh"
#include "epilogue/store.cuh"

// Flags as matrices: two arrays of the same strides in `re` and `im`, of which either may say so.
struct FallbackParams {
    GemmParams gemm;
    MatrixParams rows;     // of op(A)
    MatrixParams columns;  // of op(B)
    MatrixParams pairs;
    const int* status;
    Long tiles;
};

GEMM_DEVICE bool flagged(const MatrixParams& flags, Long at) {
    return (static_cast<const int*>(flags.re)[at] | static_cast<const int*>(flags.im)[at]) != 0;
}

template <class Config>
struct FallbackEpilogue {
    using Acc = typename Config::Acc;
    using R = Real<Acc>;
    static constexpr int N = Config::Threads::PIECE_N;

    const FallbackParams& fallback;
    const GemmParams& params;
    Long row_flags, column_flags;
    bool all;
    Long c_offset, d_offset;
    bool reads_c;

    GEMM_DEVICE FallbackEpilogue(const FallbackParams& f, Long batch)
        : fallback(f),
          params(f.gemm),
          row_flags(batch_offset(batch, f.gemm.batch_shape, f.rows.batch_stride)),
          column_flags(batch_offset(batch, f.gemm.batch_shape, f.columns.batch_stride)),
          all(flagged(f.pairs, batch_offset(batch, f.gemm.batch_shape, f.pairs.batch_stride))),
          c_offset(batch_offset(batch, f.gemm.batch_shape, f.gemm.c.batch_stride)),
          d_offset(batch_offset(batch, f.gemm.batch_shape, f.gemm.d.batch_stride)),
          reads_c(f.gemm.beta[0] != 0 || f.gemm.beta[1] != 0) {}

    GEMM_DEVICE bool row(Long i) const { return i < params.m && flagged(fallback.rows, row_flags + i); }
    GEMM_DEVICE bool column(Long j) const { return j < params.n && flagged(fallback.columns, column_flags + j); }

    GEMM_DEVICE void visit(Long i, Long first, int count, Acc (&values)[N]) const {
        const bool whole = all || row(i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (j >= count || !(whole || column(first + j))) continue;
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

constexpr Long RUN = 64;  // steps of k that are summed up one after another

GEMM_DEVICE void advance(MatrixParams& matrix, Long elements, int itemsize) {
    matrix.re = static_cast<char*>(matrix.re) + elements * itemsize;
    matrix.im = static_cast<char*>(matrix.im) + elements * itemsize;
}

// acc = op(A) op(B) for one tile, runs of k first: what stands in for tensor cores must not be less accurate than they
// are, and one long sum would be.
GEMM_DEVICE void accumulate_in_runs(
    const GemmParams& params, const TileCoordinate& where, const Config::Threads& threads, int thread,
    unsigned char* shared, Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N]) {
    GemmParams run = params;
    run.k = params.k < RUN ? params.k : RUN;
    accumulate<Config>(run, where, threads, thread, shared, acc);
    for (Long done = RUN; done < params.k; done += RUN) {
        advance(run.a, RUN * params.a.column_stride, sizeof(Config::A));
        advance(run.b, RUN * params.b.row_stride, sizeof(Config::B));
        run.k = params.k - done < RUN ? params.k - done : RUN;
        Config::Acc part[Config::THREAD_M][Config::THREAD_N];
        __syncthreads();  // the last stage has been read
        accumulate<Config>(run, where, threads, thread, shared, part);
#pragma unroll
        for (int i = 0; i < Config::THREAD_M; ++i) {
#pragma unroll
            for (int j = 0; j < Config::THREAD_N; ++j) acc[i][j] = add(acc[i][j], part[i][j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) fallback(FallbackParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    __shared__ int wanted;
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    let_next_start();
    wait_for_previous();
    if (*params.status == 0) return;
    const int thread = static_cast<int>(threadIdx.x);
    const Config::Threads threads(thread);
    const Long grid = static_cast<Long>(gridDim.x);
    for (Long tile = params.gemm.first_tile + static_cast<Long>(blockIdx.x); tile < params.tiles; tile += grid) {
        const TileCoordinate where = tile_of<Config::GROUP>(tile, params.gemm.tiles_m, params.gemm.tiles_n);
        const FallbackEpilogue<Config> epilogue(params, where.batch);
        if (thread == 0) wanted = epilogue.all;
        __syncthreads();
        for (int i = thread; i < Config::BLOCK_M + Config::BLOCK_N; i += Config::THREADS) {
            const bool here = i < Config::BLOCK_M
                                  ? epilogue.row(where.tile_m * Config::BLOCK_M + i)
                                  : epilogue.column(where.tile_n * Config::BLOCK_N + i - Config::BLOCK_M);
            if (here) atomicOr(&wanted, 1);
        }
        __syncthreads();
        const bool work = wanted != 0;
        if (work) {
            Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
            accumulate_in_runs(params.gemm, where, threads, thread, shared, acc);
            visit_tile<Config>(params.gemm, where, threads, acc, epilogue);
        }
        __syncthreads();
    }
}
