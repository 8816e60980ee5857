// From partial reductions to results, whichever kernel left the partials.
//
// gemm_reduce_combine folds runs of `group` of them, as often as it takes; gemm_reduce_finish folds the rest and writes
// the results. The order of every fold is fixed by shapes and configuration, so the results are the same bit for bit
// from run to run.
#include "../common/dependent.cuh"
#include "../common/raster.cuh"
#include "reductions.cuh"

using Value = GEMM_TYPE_VALUE;

// Folds partials [first, last) of one output, in order.
template <class Each>
GEMM_DEVICE typename Each::Partial fold_partials(const CombineParams& params, Long output, Long first, Long last) {
    typename Each::Partial partial = Each::identity();
    for (Long l = first; l < last; ++l) Each::merge(partial, Each::load(params.in, l * params.outputs + output));
    return partial;
}

// Whether an output has its result already.
GEMM_DEVICE bool is_spared(const CombineParams& params, Long output) {
#if defined(GEMM_SCREENED)
    return *params.failing_any == 0 || params.failing[output] == 0;
#else
    return false;
#endif
}

template <class Each>
GEMM_DEVICE Long length_of(const CombineParams& params) {
    return Each::ADDS ? params.sums_length : params.length;
}

extern "C" __global__ void __launch_bounds__(256) gemm_reduce_combine(const CombineParams params) {
    let_next_start();
    wait_for_previous();
    const Long slot = static_cast<Long>(blockIdx.x) * 256 + static_cast<Long>(threadIdx.x);
    const Quotient split = divide(slot, params.outputs);
    if (is_spared(params, split.remainder)) return;
    for_each_reduction<GEMM_REDUCTIONS, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        const Long length = length_of<Each>(params), first = split.quotient * params.group;
        if (first >= length) return;
        const Long last = length - first < params.group ? length : first + params.group;
        Each::store(params.out, slot, fold_partials<Each>(params, split.remainder, first, last));
    });
}

extern "C" __global__ void __launch_bounds__(256) gemm_reduce_finish(const CombineParams params) {
    let_next_start();
    wait_for_previous();
    const Long output = static_cast<Long>(blockIdx.x) * 256 + static_cast<Long>(threadIdx.x);
    if (output >= params.outputs || is_spared(params, output)) return;
    for_each_reduction<GEMM_REDUCTIONS, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        const auto partial = fold_partials<Each>(params, output, 0, length_of<Each>(params));
        void* const result = params.result[Each::WHICH];
        if constexpr (Each::WHICH == SUM) {
            const double count = static_cast<double>(params.count);
            void* const mean = params.result[MEAN];
            if (result) static_cast<GEMM_TYPE_SUM*>(result)[output] = Narrow<GEMM_TYPE_SUM>::from(partial);
            if (mean) static_cast<GEMM_TYPE_SUM*>(mean)[output] = Narrow<GEMM_TYPE_SUM>::from(over(partial, count));
        } else if constexpr (Each::WHICH == SUMSQ) {
            static_cast<GEMM_TYPE_SUMSQ*>(result)[output] = static_cast<GEMM_TYPE_SUMSQ>(partial);
        } else if constexpr (Each::WHICH == ARGMAX || Each::WHICH == ARGMIN) {
            static_cast<Long*>(result)[output] = partial.index;
        } else {
            static_cast<GEMM_TYPE_REAL*>(result)[output] = Narrow<GEMM_TYPE_REAL>::from(partial);
        }
    });
}
