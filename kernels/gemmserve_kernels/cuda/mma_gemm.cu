// D = alpha op(A) op(B) + beta C on the tensor cores of sm_80 and later: mma.sync behind a pipeline of cp.async.
// float32 and complex64 as TF32 (read as they are stored, split in registers), or float16 planes.
#include "mma_sync/kernel.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) mma_gemm(MmaParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    Config::Multiply::Sums sums;
    accumulate(params, shared, sums);
    const int thread = thread_again();
    const Share share(params, block_again());
    if (params.splits > 1) {
        if (!gather_splits(params, share.tile, share.split, thread, *reinterpret_cast<int*>(shared), sums)) return;
    }
    Store<Config>(params, share.where.batch)
        .run(sums, share.row + warp_row(thread), share.column + warp_column(thread), thread % 32);
}
