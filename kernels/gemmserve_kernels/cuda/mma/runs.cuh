// A tile's product on the multiply-add units, k in runs: what stands in for tensor cores.
#pragma once

#include "simt.cuh"

constexpr Long RUN = 64;  // steps of k that are summed up one after another

GEMM_DEVICE void advance(MatrixParams& matrix, Long elements, int itemsize) {
    matrix.re = static_cast<char*>(matrix.re) + elements * itemsize;
    matrix.im = static_cast<char*>(matrix.im) + elements * itemsize;
}

// acc = op(A) op(B) for one tile, runs of k first: what stands in for tensor cores must not be less accurate than they
// are, and one long sum would be. `Each`: Config, or a variant of it that reads differently.
template <class Each = Config>
GEMM_DEVICE void accumulate_in_runs(
    const GemmParams& params, const TileCoordinate& where, const Config::Threads& threads, int thread,
    unsigned char* shared, Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N]) {
    GemmParams run = params;
    run.k = params.k < RUN ? params.k : RUN;
    accumulate<Each>(run, where, threads, thread, shared, acc);
    for (Long done = RUN; done < params.k; done += RUN) {
        advance(run.a, RUN * params.a.column_stride, sizeof(Config::A));
        advance(run.b, RUN * params.b.row_stride, sizeof(Config::B));
        run.k = params.k - done < RUN ? params.k - done : RUN;
        Config::Acc part[Config::THREAD_M][Config::THREAD_N];
        __syncthreads();  // the last stage has been read
        accumulate<Each>(run, where, threads, thread, shared, part);
#pragma unroll
        for (int i = 0; i < Config::THREAD_M; ++i) {
#pragma unroll
            for (int j = 0; j < Config::THREAD_N; ++j) acc[i][j] = add(acc[i][j], part[i][j]);
        }
    }
}
