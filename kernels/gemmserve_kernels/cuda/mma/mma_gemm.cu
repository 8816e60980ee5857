// D = alpha op(A) op(B) + beta C on the tensor cores of sm_80 and later: mma.sync behind a pipeline of cp.async.
// float32 and complex64 as TF32 (read as they are stored, split in registers), or planes of float16 or bfloat16.
#include "kernel.cuh"

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) mma_gemm(MmaParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    multiply_block(params, shared, [&](const Share& share, Config::Multiply::Sums& sums) {
        const int thread = thread_again();
        if (params.splits > 1) {
            if (!gather_splits(params, share.tile, share.split, thread, *reinterpret_cast<int*>(shared), sums)) return;
        }
        Store<Config>(params, share.where.batch)
            .run(sums, share.row + warp_row(thread), share.column + warp_column(thread), thread % 32);
    });
}
