// The pre-pass of the tensor-core products: both operands as scaled float16 planes, in one launch.
#include "split/across.cuh"

// `group` counts the clusters of this operand.
template <bool SIDE_B, bool ALONG_K, bool VECTOR>
GEMM_DEVICE void split_operand(const SplitOperand& operand, Long group, unsigned char* shared, int* status) {
    const int thread = static_cast<int>(threadIdx.x);
    const Quotient where = divide(group, operand.groups);
    if constexpr (ALONG_K) {
        Along<SIDE_B, VECTOR> along(operand, *reinterpret_cast<AlongShared*>(shared), thread);
        const Long first_row = (where.remainder * CLUSTER + static_cast<Long>(cluster_rank())) * operand.rows_per_block;
        along.run(where.quotient, first_row, status);
    } else {
        Across<SIDE_B, VECTOR> across(operand, *reinterpret_cast<AcrossShared*>(shared), thread);
        across.run(where.quotient, where.remainder * STRIP, status);
    }
}

#if GEMM_CLUSTER > 1
extern "C" __cluster_dims__(GEMM_CLUSTER, 1, 1) __global__ void split(SplitParams params);
#endif

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) split(SplitParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(!(GEMM_A_ALONG_K || GEMM_B_ALONG_K) || sizeof(AlongShared) <= GEMM_SHARED_BYTES, "as the host counts");
    static_assert((GEMM_A_ALONG_K && GEMM_B_ALONG_K) || sizeof(AcrossShared) <= GEMM_SHARED_BYTES, "as the host counts");
    const Long group = params.first_group + static_cast<Long>(blockIdx.x) / CLUSTER;
    const Long groups_a = params.a.groups * params.a.matrices;
    if (group < groups_a) {
        split_operand<false, GEMM_A_ALONG_K, GEMM_VECTOR_A>(params.a, group, shared, params.status);
    } else {
        split_operand<true, GEMM_B_ALONG_K, GEMM_VECTOR_B>(params.b, group - groups_a, shared, params.status);
    }
}
