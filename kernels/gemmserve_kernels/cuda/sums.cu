// Weighted sums of the rows of a matrix, out[j] = alpha sum over i of w[i] x[i, j], in double: half of a sum over a
// product, since 1^T (A B) = (1^T A) B. Bound by memory: every element is read once.
//
// A block takes LINES rows of a tile of columns and leaves one partial for each column; combine.cu folds them. Where
// columns are neighbours in memory (ACROSS) a lane holds VECTOR of them and the warps share the rows; where rows are, a
// warp walks along one column after another.
#include "common/lanes.cuh"
#include "common/raster.cuh"
#include "common/types.cuh"

struct SumsParams {
    MatrixParams x;
    Long rows, columns;
    Long batch_shape[BATCH_DIMS];
    const void* weights;  // Acc, rows of them for each matrix; null: all are 1
    Long weight_stride[BATCH_DIMS];
    void* out;  // Acc, (partials, outputs)
    Long outputs;
    Long first_batch, first_block;
    Long tiles, parts;  // of columns, of rows
    double alpha[2];
    int reduce_batch;  // whether matrices are further partials of the same outputs
    int conjugate;
};

using Stored = GEMM_TYPE_X;
using Acc = GEMM_TYPE_ACC;  // double or Complex<double>
constexpr bool PLANAR = GEMM_PLANAR, ACROSS = GEMM_ACROSS, WEIGHTED = GEMM_WEIGHTED;
constexpr int VECTOR = GEMM_VECTOR, LINES = GEMM_LINES, COLUMNS = GEMM_COLUMNS, WARPS = 8;

template <class To>
GEMM_DEVICE To element(Stored re, Stored im) {
    if constexpr (PLANAR) {
        return widen<To>(re, im);
    } else {
        return widen<To>(re);
    }
}

template <class T>
GEMM_DEVICE T conjugated(T x) {
    if constexpr (is_complex<T>) x.im = -x.im;
    return x;
}

// VECTOR neighbours along the fast axis, of which the first `count` exist.
GEMM_DEVICE void read(const SumsParams& params, Long offset, Long stride, Long count, Acc (&to)[VECTOR]) {
    const Stored* const re = static_cast<const Stored*>(params.x.re) + offset;
    const Stored* const im = static_cast<const Stored*>(params.x.im) + offset;
    Vector<Stored, VECTOR> x{}, y{};
    if (VECTOR > 1 && count >= VECTOR) {
        x = *reinterpret_cast<const Vector<Stored, VECTOR>*>(re);
        if constexpr (PLANAR) y = *reinterpret_cast<const Vector<Stored, VECTOR>*>(im);
    } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            if (v >= count) break;
            x.at[v] = re[v * stride];
            if constexpr (PLANAR) y.at[v] = im[v * stride];
        }
    }
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        to[v] = element<Acc>(x.at[v], y.at[v]);
        if (params.conjugate) to[v] = conjugated(to[v]);
    }
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
        if constexpr (WEIGHTED) sum = scale(sum, params.alpha[0], params.alpha[1]);
        static_cast<Acc*>(params.out)[slot * params.outputs + column + j] = sum;
    }
};

extern "C" __global__ void __launch_bounds__(256) sums(SumsParams params) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const Quotient row = divide(params.first_block + static_cast<Long>(blockIdx.x), params.tiles);
    const Quotient at = divide(row.quotient, params.parts);
    const Long matrix = at.quotient, part = at.remainder, tile = row.remainder;
    const Long base = batch_offset(matrix, params.batch_shape, params.x.batch_stride);
    const Acc* const weights =
        static_cast<const Acc*>(params.weights) + batch_offset(matrix, params.batch_shape, params.weight_stride);
    const Long first = part * LINES, left = params.rows - first, lines = left < LINES ? left : LINES;
    const Target target(params, matrix, part);
    if constexpr (ACROSS) {
        __shared__ Acc shared[WARPS][32 * VECTOR];
        const Long column = tile * COLUMNS + lane * VECTOR, count = params.columns - column;
        Acc sum[VECTOR] = {};
        if (count > 0) {
            const Long offset = base + first * params.x.row_stride + column * params.x.column_stride;
#pragma unroll 4
            for (Long i = warp; i < lines; i += WARPS) {
                Acc x[VECTOR];
                read(params, offset + i * params.x.row_stride, params.x.column_stride, count, x);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) fold(sum[v], x[v], weights + first + i);
            }
        }
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) shared[warp][lane * VECTOR + v] = sum[v];
        __syncthreads();
        for (int j = thread; j < COLUMNS; j += 32 * WARPS) {
            if (tile * COLUMNS + j >= params.columns) break;
            Acc all = shared[0][j];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) all = add(all, shared[w][j]);
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
                Acc x[VECTOR];
                read(params, offset + i * params.x.row_stride, params.x.row_stride, lines - i, x);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    if (i + v < lines) fold(sum, x[v], weights + first + i + v);
                }
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum = add(sum, of_neighbour(sum, step));
            if (lane == 0) target.store(column, sum);
        }
    }
}
