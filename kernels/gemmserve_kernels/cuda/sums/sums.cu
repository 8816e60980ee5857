// Weighted sums of the rows of a matrix, out[j] = alpha sum over i of w[i] x[i, j], in double: half of a sum over a
// product, since 1^T (A B) = (1^T A) B. Bound by memory: every element is read once.
//
// A block takes LINES rows of a tile of columns and leaves one partial for each column; combine.cu folds them. Weights may
// come as a few partials, which every block adds up for its rows; where a block has all rows of its columns, it writes the
// results. So two launches do for short sums. Where
// columns are neighbours in memory (ACROSS) a thread holds VECTOR of them, LANES threads have a row of the tile and the
// block's other threads other rows, DEPTH of which are on their way at once; where rows are, a warp walks along one column
// after another.
#include "../common/dependent.cuh"
#include "../common/memory/lanes.cuh"
#include "../common/memory/neighbours.cuh"
#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"

struct SumsParams {
    MatrixParams x;
    Long rows, columns;
    Long batch_shape[BATCH_DIMS];
    const void* weights;  // Acc, rows of them for each matrix; null: all are 1
    Long weight_stride[BATCH_DIMS];
    Long weights_apart;  // from one part of the weights to the next
    void* out;           // Acc, (partials, outputs); null: the results are written
    void *sum, *mean;    // each may be null
    Long count;          // of what the mean is
    Long outputs;
    Long first_batch, first_block;
    Long tiles, parts;  // of columns, of rows
    double alpha[2];
    int reduce_batch;  // whether matrices are further partials of the same outputs
    int conjugate;
    int weight_parts;
    int reserved;
};

using Stored = GEMM_TYPE_X;
using Acc = GEMM_TYPE_ACC;  // double or Complex<double>
constexpr bool PLANAR = GEMM_PLANAR, ACROSS = GEMM_ACROSS, WEIGHTED = GEMM_WEIGHTED;
constexpr int VECTOR = GEMM_VECTOR, LINES = GEMM_LINES, COLUMNS = GEMM_COLUMNS, THREADS = 256, WARPS = THREADS / 32;
constexpr int LANES = ACROSS ? COLUMNS / VECTOR : 32, DEPTH = 8;

template <class T>
GEMM_DEVICE T conjugated(T x) {
    if constexpr (is_complex<T>) x.im = -x.im;
    return x;
}

using Piece = Neighbours<Stored, VECTOR, PLANAR>;

template <bool CONJUGATE>
GEMM_DEVICE Acc element(const Piece& x, int v) {
    const Acc value = x.at<Acc>(v);
    return CONJUGATE ? conjugated(value) : value;
}

// Beyond the end there is nothing to add: zero times a weight that is infinite would be.
GEMM_DEVICE void fold(Acc& sum, Acc x, const Acc* weight) {
    if constexpr (WEIGHTED) {
        multiply_accumulate(sum, *weight, x);
    } else {
        sum = add(sum, x);
    }
}

struct Target {
    const SumsParams& params;
    Long slot, column;

    GEMM_DEVICE Target(const SumsParams& p, Long matrix, Long part)
        : params(p), slot((p.reduce_batch ? (p.first_batch + matrix) * p.parts : 0) + part),
          column(p.reduce_batch ? 0 : (p.first_batch + matrix) * p.columns) {}
    GEMM_DEVICE void store(Long j, Acc sum) const {
        if constexpr (WEIGHTED) {
            sum = scale(sum, params.alpha[0], params.alpha[1]);
            if (!params.out) {
                using Sum = GEMM_TYPE_SUM;
                const Acc mean = over(sum, static_cast<double>(params.count));
                if (params.sum) static_cast<Sum*>(params.sum)[column + j] = Narrow<Sum>::from(sum);
                if (params.mean) static_cast<Sum*>(params.mean)[column + j] = Narrow<Sum>::from(mean);
                return;
            }
        }
        static_cast<Acc*>(params.out)[slot * params.outputs + column + j] = sum;
    }
};

// Rows `from`, `from` + `step` ... of `lines`, from the columns at `offset`, of which `count` exist.
template <bool CONJUGATE>
GEMM_DEVICE void fold_rows(
    const SumsParams& params, Long offset, Long count, int from, int step, int lines, const Acc* weights,
    Acc (&sum)[VECTOR]) {
    const Long stride = params.x.row_stride, across = params.x.column_stride;
    int i = from;
#pragma unroll 1
    for (; i + (DEPTH - 1) * step < lines; i += DEPTH * step) {
        Piece x[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) x[d] = Piece::read(params.x, offset + (i + d * step) * stride, across, count);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) fold(sum[v], element<CONJUGATE>(x[d], v), weights + i + d * step);
        }
    }
#pragma unroll 1
    for (; i < lines; i += step) {
        const Piece x = Piece::read(params.x, offset + i * stride, across, count);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) fold(sum[v], element<CONJUGATE>(x, v), weights + i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sums(SumsParams params) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const Quotient row = divide(params.first_block + static_cast<Long>(blockIdx.x), params.tiles);
    const Quotient at = divide(row.quotient, params.parts);
    const Long matrix = at.quotient, part = at.remainder, tile = row.remainder;
    const Long base = batch_offset(matrix, params.batch_shape, params.x.batch_stride);
    const Long first = part * LINES, left = params.rows - first, lines = left < LINES ? left : LINES;
    let_next_start();
    wait_for_previous();  // weights are what the kernel ahead has left
    __shared__ Acc weights[WEIGHTED ? LINES : 1];  // of the block's rows
    if constexpr (WEIGHTED) {
        const Acc* const from = static_cast<const Acc*>(params.weights) +
                                batch_offset(matrix, params.batch_shape, params.weight_stride) + first;
        for (int i = thread; i < lines; i += THREADS) {
            Acc all = from[i];
            for (int p = 1; p < params.weight_parts; ++p) all = add(all, from[p * params.weights_apart + i]);
            weights[i] = all;
        }
        __syncthreads();
    }
    const Target target(params, matrix, part);
    if constexpr (ACROSS) {
        constexpr int ROWS = THREADS / LANES;  // at once
        __shared__ Acc shared[ROWS][COLUMNS];
        const int row_of = thread / LANES, lane_of = thread % LANES;
        const Long column = tile * COLUMNS + lane_of * VECTOR, count = params.columns - column;
        Acc sum[VECTOR] = {};
        if (count > 0) {
            const Long offset = base + first * params.x.row_stride + column * params.x.column_stride;
            const int all = static_cast<int>(lines);
            if (params.conjugate) {
                fold_rows<true>(params, offset, count, row_of, ROWS, all, weights, sum);
            } else {
                fold_rows<false>(params, offset, count, row_of, ROWS, all, weights, sum);
            }
        }
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) shared[row_of][lane_of * VECTOR + v] = sum[v];
        __syncthreads();
        for (int j = thread; j < COLUMNS; j += THREADS) {
            if (tile * COLUMNS + j >= params.columns) break;
            Acc all = shared[0][j];
#pragma unroll 8
            for (int r = 1; r < ROWS; ++r) all = add(all, shared[r][j]);
            target.store(tile * COLUMNS + j, all);
        }
    } else {
        for (int j = warp; j < COLUMNS; j += WARPS) {
            const Long column = tile * COLUMNS + j;
            if (column >= params.columns) break;
            const Long offset = base + first * params.x.row_stride + column * params.x.column_stride;
            Acc sum{};
#pragma unroll 4
            for (Long i = lane * VECTOR; i < lines; i += 32 * VECTOR) {
                const Piece x = Piece::read(params.x, offset + i * params.x.row_stride, params.x.row_stride, lines - i);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    const Acc value = params.conjugate ? element<true>(x, v) : element<false>(x, v);
                    if (i + v < lines) fold(sum, value, weights + i + v);
                }
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum = add(sum, of_neighbour(sum, step));
            if (lane == 0) target.store(column, sum);
        }
    }
}
