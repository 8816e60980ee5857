// Reductions of the rows of a product that lies in memory: one partial for each row and share of its columns (combine.cu
// folds them). LANES neighbours of a warp have a share, each of them every LANES-th element. Where what is reduced lies apart
// and rows are neighbours in memory (DOWN), the next thread has the share of the next row. Elements are read once, however
// many reductions there are: DEPTH of a thread are on their way at once, and are folded before sums are in double.
#include "../common/memory/lanes.cuh"
#include "../common/raster.cuh"
#include "pre_op.cuh"
#include "reductions.cuh"

struct StoredReduceParams {
    MatrixParams d;
    Long matrices, first_matrix;   // of the panel; of the batch
    Long first_row, rows;          // of the panel
    Long m, n;                     // of the product
    Long share, parts;             // columns of a share; shares of a row
    PartialParams partial;
    Long outputs;
    int reduce_batch;
    int reserved;
};

using Stored = GEMM_TYPE_X;
using Acc = GEMM_TYPE_ACC;
using Value = PreOpValue<GEMM_PRE_OP, Acc>;
constexpr bool PLANAR = GEMM_PLANAR, DOWN = GEMM_DOWN;
constexpr int LANES = GEMM_LANES;  // 1 where DOWN; a power of two
constexpr int THREADS = 256, DEPTH = 8;

GEMM_DEVICE Acc read(const MatrixParams& matrix, Long offset) {
    const Stored first = static_cast<const Stored*>(matrix.re)[offset];
    if constexpr (PLANAR) {
        return widen<Acc>(first, static_cast<const Stored*>(matrix.im)[offset]);
    } else {
        return widen<Acc>(first);
    }
}

template <class Each>
struct Held {
    typename Each::Partial partial;
};
template <Kind KIND>
struct NotHeld {};
template <Kind KIND>
using Kept = Select<(GEMM_REDUCTIONS >> KIND & 1u) != 0, Held<Reduction<KIND, Value>>, NotHeld<KIND>>;
struct AllKept : Kept<SUM>, Kept<SUMSQ>, Kept<MAX>, Kept<MIN>, Kept<ABSMAX>, Kept<ABSMIN>, Kept<ARGMAX>, Kept<ARGMIN> {};

template <class Each>
GEMM_DEVICE typename Each::Partial& partial_of(AllKept& kept) {
    return static_cast<Held<Each>&>(kept).partial;
}

struct Share {
    Long matrix, row, part;  // of the panel, of the panel, of the row
};

GEMM_DEVICE Share share_of(const StoredReduceParams& params, Long number) {
    if constexpr (DOWN) {
        const Quotient by_row = divide(number, params.rows), by_part = divide(by_row.quotient, params.parts);
        return {by_part.quotient, by_row.remainder, by_part.remainder};
    } else {
        const Quotient by_part = divide(number, params.parts), by_row = divide(by_part.quotient, params.rows);
        return {by_row.quotient, by_row.remainder, by_part.remainder};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) stored_reduce(StoredReduceParams params) {
    constexpr int SHARES = THREADS / LANES;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % LANES;
    const Long shares = params.matrices * params.rows * params.parts;
    const Long number = static_cast<Long>(blockIdx.x) * SHARES + (LANES == 32 ? warp_number() : thread / LANES);
    const bool there = number < shares;  // lanes of one warp go on together
    const Share share = share_of(params, there ? number : shares - 1);
    const Long first = share.part * params.share, step = DOWN ? params.d.column_stride : 1;
    const Long from = share.matrix * params.d.batch_stride[BATCH_DIMS - 1] + share.row * params.d.row_stride + first * step;
    const int count = static_cast<int>(params.n - first < params.share ? params.n - first : params.share);
    const Long batch = params.first_matrix + share.matrix, row = params.first_row + share.row;
    const Long output = params.reduce_batch ? row : batch * params.m + row;
    const Long slot = (params.reduce_batch ? batch * params.parts : 0) + share.part;
    const Long first_index = (params.reduce_batch ? batch * params.n : 0) + first;
    AllKept kept;
    for_each_reduction<GEMM_REDUCTIONS, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        partial_of<Each>(kept) = Each::identity();
    });
#pragma unroll 1
    for (int at = lane; at < count; at += DEPTH * LANES) {
        Value x[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int j = at + d * LANES;
            if (j < count) x[d] = apply<GEMM_PRE_OP>(read(params.d, from + j * step));
        }
        for_each_reduction<GEMM_REDUCTIONS, Value>([&](auto reduction) {
            using Each = decltype(reduction);
            const auto local = fold_elements<Each>([&](auto fold) {
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    if (at + d * LANES < count) fold(x[d], at + d * LANES);
                }
            });
            Each::merge(partial_of<Each>(kept), Each::lift(local, first_index));
        });
    }
    for_each_reduction<GEMM_REDUCTIONS, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        auto& partial = partial_of<Each>(kept);
#pragma unroll
        for (int near = LANES / 2; near > 0; near /= 2) Each::merge(partial, of_neighbour(partial, near));
        if (there && lane == 0) Each::store(params.partial, slot * params.outputs + output, partial);
    });
}
