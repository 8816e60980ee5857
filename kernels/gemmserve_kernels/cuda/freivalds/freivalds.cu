// Freivalds' check of a product: what is left of D x - alpha A (B x) - beta C x for a few random vectors x of signs, in
// double. Bound by memory: every element of every matrix is read once, all vectors in one pass.
//
// This takes one matrix times the vectors, and its squared magnitudes times one more. It sees op(X)^T: rows are summed
// over, columns are kept. Where columns are neighbours in memory (ACROSS) a thread holds VECTOR of them and LANES threads
// have a row of the tile; where rows are, a warp walks along HELD columns at once. A block takes `lines` rows, and leaves
// one partial for each column and vector.
#include "../common/memory/lanes.cuh"
#include "../common/memory/neighbours.cuh"
#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"

constexpr int VECTORS = 4, THREADS = 256, WARPS = THREADS / 32;

struct TimesParams {
    MatrixParams x;
    Long rows, columns;
    Long batch_shape[BATCH_DIMS];
    const void* weights;           // (matrices or 1, VECTORS, rows): signs as double, or Acc
    const double* square_weights;  // (matrices or 1, rows); null: all are 1
    double* out;  // in each part Acc (matrices, VECTORS, columns), and `squares` doubles on (matrices, columns)
    Long squares, part_stride;
    Long first_matrix, matrices, first_block;  // of the batch, of this launch
    Long tiles, parts, lines;  // of columns; of rows; rows of a part
    int own_weights;           // whether every matrix has its own
    int conjugate;             // what is left
};

using Stored = GEMM_TYPE_X;
using Acc = GEMM_TYPE_ACC;  // double or Complex<double>
constexpr bool PLANAR = GEMM_PLANAR, ACROSS = GEMM_ACROSS, SIGNS = GEMM_SIGNS;
using Weight = Select<SIGNS, double, Acc>;
constexpr int VECTOR = GEMM_VECTOR, COLUMNS = GEMM_COLUMNS, HELD = ACROSS ? 1 : COLUMNS / WARPS;
constexpr int LANES = ACROSS ? COLUMNS / VECTOR : 32, DEPTH = SIGNS ? 4 : 2;

using Piece = Neighbours<Stored, VECTOR, PLANAR>;

GEMM_DEVICE void add_product(double& sum, double weight, double x) { sum = multiply_add(weight, x, sum); }
GEMM_DEVICE void add_product(Complex<double>& sum, double sign, Complex<double> x) {
    sum.re = multiply_add(sign, x.re, sum.re);
    sum.im = multiply_add(sign, x.im, sum.im);
}
GEMM_DEVICE void add_product(Complex<double>& sum, Complex<double> weight, Complex<double> x) {
    multiply_accumulate(sum, weight, x);
}
GEMM_DEVICE double norm(double x) { return x * x; }
GEMM_DEVICE double norm(Complex<double> x) { return multiply_add(x.im, x.im, x.re * x.re); }
GEMM_DEVICE double conjugated(double x) { return x; }
GEMM_DEVICE Complex<double> conjugated(Complex<double> x) { return {x.re, -x.im}; }

// What multiplies one row.
struct Factors {
    Weight of[VECTORS];
    double square;

    GEMM_DEVICE Factors(const Weight* weights, const double* square_weights, Long rows, Long i)
        : square(SIGNS ? 1.0 : square_weights[i]) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) of[v] = weights[v * rows + i];
    }
};

struct Sums {
    Acc of[VECTORS];
    double square;

    GEMM_DEVICE void fold(const Factors& by, Acc x) {
        square = SIGNS ? square + norm(x) : multiply_add(by.square, norm(x), square);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) add_product(of[v], by.of[v], x);
    }
};

struct Target {
    const TimesParams& params;
    Long matrix;
    double* out;

    GEMM_DEVICE void store(int v, Long j, Acc sum) const {
        const Long at = (matrix * VECTORS + v) * params.columns + j;
        reinterpret_cast<Acc*>(out)[at] = params.conjugate ? conjugated(sum) : sum;
    }
    GEMM_DEVICE void store_square(Long j, double sum) const { out[params.squares + matrix * params.columns + j] = sum; }
};

extern "C" __global__ void __launch_bounds__(THREADS, GEMM_MIN_BLOCKS) freivalds_times(TimesParams params) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const Quotient row = divide(params.first_block + static_cast<Long>(blockIdx.x), params.tiles);
    const Quotient at = divide(row.quotient, params.parts);
    const Long matrix = at.quotient, part = at.remainder, tile = row.remainder;
    const Long base = batch_offset(params.first_matrix + matrix, params.batch_shape, params.x.batch_stride);
    const Long first = part * params.lines, left = params.rows - first;
    const Long lines = left < params.lines ? left : params.lines;
    const Long own = params.own_weights ? matrix * params.rows : 0;
    const Weight* const weights = static_cast<const Weight*>(params.weights) + own * VECTORS + first;
    const double* const square_weights = SIGNS ? nullptr : params.square_weights + own + first;
    const Target target{params, matrix, params.out + part * params.part_stride};
    if constexpr (ACROSS) {
        constexpr int ROWS = THREADS / LANES;  // at once
        __shared__ Acc shared[ROWS][COLUMNS];
        const int row_of = thread / LANES, lane_of = thread % LANES;
        const Long column = tile * COLUMNS + lane_of * VECTOR, count = params.columns - column;
        Sums sum[VECTOR] = {};
        if (count > 0) {
            const Long stride = params.x.row_stride, across = params.x.column_stride;
            const Long offset = base + first * stride + column * across;
            Long i = row_of;
#pragma unroll 1
            for (; i + (DEPTH - 1) * ROWS < lines; i += DEPTH * ROWS) {
                Piece x[DEPTH];
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) x[d] = Piece::read(params.x, offset + (i + d * ROWS) * stride, across, count);
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    const Factors by(weights, square_weights, params.rows, i + d * ROWS);
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v) sum[v].fold(by, x[d].at<Acc>(v));
                }
            }
#pragma unroll 1
            for (; i < lines; i += ROWS) {
                const Piece x = Piece::read(params.x, offset + i * stride, across, count);
                const Factors by(weights, square_weights, params.rows, i);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sum[v].fold(by, x.at<Acc>(v));
            }
        }
#pragma unroll
        for (int of = 0; of <= VECTORS; ++of) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                shared[row_of][lane_of * VECTOR + v] = of < VECTORS ? sum[v].of[of % VECTORS] : make<Acc>(sum[v].square, 0);
            }
            __syncthreads();
            for (int j = thread; j < COLUMNS; j += THREADS) {
                if (tile * COLUMNS + j >= params.columns) break;
                Acc all = shared[0][j];
#pragma unroll 8
                for (int r = 1; r < ROWS; ++r) all = add(all, shared[r][j]);
                if (of < VECTORS) target.store(of, tile * COLUMNS + j, all);
                else target.store_square(tile * COLUMNS + j, real_part(all));
            }
            __syncthreads();
        }
    } else {
        const Long stride = params.x.row_stride, across = params.x.column_stride;
        const Long column = tile * COLUMNS + warp * HELD, count = params.columns - column;
        const Long offset = base + first * stride + column * across;
        Sums sum[HELD] = {};
#pragma unroll 2
        for (Long i = lane * VECTOR; i < lines; i += 32 * VECTOR) {
            Piece x[HELD];
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
                if (h < count) x[h] = Piece::read(params.x, offset + h * across + i * stride, stride, lines - i);
                else x[h] = Piece{};
            }
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                if (i + v >= lines) break;  // zero times a weight that is infinite would be NaN
                const Factors by(weights, square_weights, params.rows, i + v);
#pragma unroll
                for (int h = 0; h < HELD; ++h) sum[h].fold(by, x[h].at<Acc>(v));
            }
        }
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
#pragma unroll
            for (int of = 0; of < VECTORS; ++of) {
#pragma unroll
                for (int step = 16; step > 0; step /= 2) {
                    sum[h].of[of] = add(sum[h].of[of], of_neighbour(sum[h].of[of], step));
                }
                if (lane == 0 && h < count) target.store(of, column + h, sum[h].of[of]);
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum[h].square += of_neighbour(sum[h].square, step);
            if (lane == 0 && h < count) target.store_square(column + h, sum[h].square);
        }
    }
}
