// The pre-pass of the tensor-core products: both operands as scaled float16 (bfloat16) planes, in one launch.
#include "../common/memory/lanes.cuh"
#include "source.cuh"
#if GEMM_ALONE
#include "alone.cuh"
#else
#include "across.cuh"
#include "along.cuh"
#endif

// Whether no product asks for these planes.
GEMM_DEVICE bool is_idle(const SplitParams& params) {
    return params.gate != nullptr && *params.gate == 0;
}

// Zeroes what `split`, the kernel behind it, counts into.
extern "C" __global__ void __launch_bounds__(256) split_clear(ClearParams params) {
    let_next_start();
    wait_for_previous();
    const Long number = static_cast<Long>(blockIdx.x) * 256 + threadIdx.x;
    if (number < params.count) params.words[number] = 0;
}

#if GEMM_ALONE

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) split(SplitParams params) {
    GEMM_DYNAMIC_SHARED(dynamic);
    static_assert(sizeof(alone::Shared) <= GEMM_SHARED_BYTES, "as the host counts");
    alone::Shared& shared = *reinterpret_cast<alone::Shared*>(dynamic);
    const Long of_a = params.a.units * params.a.matrices;
    wait_for_previous();
    let_next_start();
    if (is_idle(params)) return;
    Long number = blockIdx.x;
    number = alone::split_operand<false, GEMM_A_ALONG_K, GEMM_VECTOR_A>(params.a, 0, number, shared, params.status);
    alone::split_operand<true, GEMM_B_ALONG_K, GEMM_VECTOR_B>(params.b, of_a, number, shared, params.status);
}

#else

template <bool SIDE_B, bool ALONG_K, bool VECTOR>
GEMM_DEVICE void split_operand(const SplitOperandParams& operand, bool first, int group, unsigned char* shared, int* status) {
    if (operand.matrices == 0) return;  // prepared already
    const int thread = block_thread();
    int* counter = status + (SIDE_B ? 2 : 1);
    if constexpr (ALONG_K) {
        along::Split<SIDE_B, VECTOR> split(operand, *reinterpret_cast<along::Shared*>(shared), thread);
        split.run(first, group, status, counter);
    } else {
        across::Split<SIDE_B, VECTOR> split(operand, *reinterpret_cast<across::Shared*>(shared), thread);
        split.run(first, group, status, counter);
    }
}

#if GEMM_CLUSTER > 1 && !defined(GEMM_SHIM)
extern "C" __cluster_dims__(GEMM_CLUSTER, 1, 1) __global__ void split(SplitParams params);
#endif

// Some groups begin with A, the others with B; who has run out of one helps with the other.
extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) split(SplitParams params) {
    GEMM_DYNAMIC_SHARED(all_shared);
    unsigned char* const shared = block_shared(all_shared);
    static_assert(!(GEMM_A_ALONG_K || GEMM_B_ALONG_K) || sizeof(along::Shared) <= GEMM_SHARED_BYTES, "as the host counts");
    static_assert((GEMM_A_ALONG_K && GEMM_B_ALONG_K) || sizeof(across::Shared) <= GEMM_SHARED_BYTES, "as the host counts");
    const int group = cluster_number();
    const bool begins_with_b = group >= params.a.groups;
    wait_for_previous();
    let_next_start();
    if (is_idle(params)) return;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        if (begins_with_b == (turn != 0)) {
            split_operand<false, GEMM_A_ALONG_K, GEMM_VECTOR_A>(params.a, turn == 0, group, shared, params.status);
        } else {
            split_operand<true, GEMM_B_ALONG_K, GEMM_VECTOR_B>(
                params.b, turn == 0, group - params.a.groups, shared, params.status);
        }
    }
    if constexpr (CLUSTER > 1) cluster_barrier();  // no block may end while another reads its shared memory
}

#endif
