// Reductions of the rows of a product that lies in memory: one partial for each row and share of its columns (combine.cu
// folds them). A warp has a share, its lanes every 32nd element.
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
constexpr bool PLANAR = GEMM_PLANAR;
constexpr int THREADS = 256, WARPS = THREADS / 32;

GEMM_DEVICE Acc read(const MatrixParams& matrix, Long offset) {
    const Stored first = static_cast<const Stored*>(matrix.re)[offset];
    if constexpr (PLANAR) {
        return widen<Acc>(first, static_cast<const Stored*>(matrix.im)[offset]);
    } else {
        return widen<Acc>(first);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) stored_reduce(StoredReduceParams params) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Long number = static_cast<Long>(blockIdx.x) * WARPS + warp_number();
    if (number >= params.matrices * params.rows * params.parts) return;
    const Quotient by_part = divide(number, params.parts), by_row = divide(by_part.quotient, params.rows);
    const Long matrix = by_row.quotient, in_panel = by_row.remainder, first = by_part.remainder * params.share;
    const Long from = matrix * params.d.batch_stride[BATCH_DIMS - 1] + in_panel * params.d.row_stride + first;
    const int count = static_cast<int>(params.n - first < params.share ? params.n - first : params.share);
    const Long batch = params.first_matrix + matrix, row = params.first_row + in_panel;
    const Long output = params.reduce_batch ? row : batch * params.m + row;
    const Long slot = (params.reduce_batch ? batch * params.parts : 0) + by_part.remainder;
    const Long first_index = (params.reduce_batch ? batch * params.n : 0) + first;
    for_each_reduction<GEMM_REDUCTIONS, Value>([&](auto reduction) {
        using Each = decltype(reduction);
        auto partial = Each::lift(
            fold_elements<Each>([&](auto fold) {
#pragma unroll 4
                for (int j = lane; j < count; j += 32) fold(apply<GEMM_PRE_OP>(read(params.d, from + j)), j);
            }),
            first_index);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) Each::merge(partial, of_neighbour(partial, step));
        if (lane == 0) Each::store(params.partial, slot * params.outputs + output, partial);
    });
}
