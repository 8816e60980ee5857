// float16 matrices of any strides copied into rows that begin at multiples of 16 bytes, for the copy engine. The host's
// side is gemmserve_kernels.algorithms.wgmma.direct.pack.
#include "../common/dependent.cuh"
#include "../common/params.cuh"
#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"

constexpr int PIECE = 8;  // elements of one thread, 16 bytes of a row
constexpr int THREADS = 256;

struct PackParams {
    MatrixParams from, to;  // `rows` by `columns`; in `to` columns are next to each other
    Long batch_shape[BATCH_DIMS];
    Long rows, columns;
    Long pieces;  // of a row
    Long total;   // of all matrices
    Long first;   // of this launch
};
static_assert(sizeof(PackParams) == GEMM_PARAMS_BYTES, "the host mirrors the structure");

extern "C" __global__ void __launch_bounds__(THREADS) wgmma_pack(const PackParams params) {
    let_next_start();
    wait_for_previous();
    const Long index = params.first + static_cast<Long>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= params.total) return;
    const Quotient row = divide(index, params.pieces), matrix = divide(row.quotient, params.rows);
    const Long column = row.remainder * PIECE;
    const Half* const from = static_cast<const Half*>(params.from.re) +
                             batch_offset(matrix.quotient, params.batch_shape, params.from.batch_stride) +
                             matrix.remainder * params.from.row_stride + column * params.from.column_stride;
    Vector<Half, PIECE> piece;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        piece.at[i] = column + i < params.columns ? from[i * params.from.column_stride] : Half{0};
    }
    Half* const to = static_cast<Half*>(params.to.re) +
                     batch_offset(matrix.quotient, params.batch_shape, params.to.batch_stride) +
                     matrix.remainder * params.to.row_stride + column;
    *reinterpret_cast<Vector<Half, PIECE>*>(to) = piece;
}
