// Sums of squares from Gram matrices, out[j] = |alpha|^2 b_j^H G b_j, and for which of them the sum of squares of the
// product itself is wanted. Of G there is what gram.cu leaves: squares of BLOCK_M on the diagonal, and twice what is
// above them.
//
// A block takes BLOCK_N columns of B and walks over all rows of G. Beside each form it makes the bound of its error,
//     (sum over k of sqrt(G_kk) (|re b_kj| + |im b_kj|))^2 times a constant of the host's,
// and flags the column where the form is not far above it, or where anything is not finite. reduce_fallback.cu then
// replaces what was left here.
#include "../simt/multiply.cuh"
#include "../common/judging/flag_bits.cuh"
#include "../epilogue/store.cuh"

struct GramFormParams {
    GemmParams gemm;   // G by B; alpha[0]: |alpha|^2
    double* values;    // (matrices, columns)
    int* flags;        // the same
    int* status;       // set where a flag is
    double tolerance;  // least ratio of a form to the square of its weights
    Long first_matrix;
};

// G is never planar, whatever B is.
struct FormConfig : Config {
    using CopyA = BlockCopy<A, Acc, false, BLOCK_M, BLOCK_K, THREADS, GEMM_VECTOR_A, GEMM_A_ALONG_K, Index>;
};

GEMM_DEVICE void advance(MatrixParams& matrix, Long elements, int itemsize) {
    matrix.re = static_cast<char*>(matrix.re) + elements * itemsize;
    matrix.im = static_cast<char*>(matrix.im) + elements * itemsize;
}

GEMM_DEVICE double infinite() { return __builtin_bit_cast(double, 0x7ff0000000000000ULL); }

GEMM_DEVICE double absolute(double x) { return fabs(x); }
GEMM_DEVICE double absolute(Complex<double> x) { return fabs(x.re) + fabs(x.im); }

GEMM_DEVICE double conjugated(double x, int) { return x; }
GEMM_DEVICE Complex<double> conjugated(Complex<double> x, int conjugate) { return {x.re, conjugate ? -x.im : x.im}; }

// The real part of conj(b) y, added to `sum`.
GEMM_DEVICE double inner(double b, double y, double sum) { return fma(b, y, sum); }
GEMM_DEVICE double inner(Complex<double> b, Complex<double> y, double sum) {
    return fma(b.im, y.im, fma(b.re, y.re, sum));
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, GEMM_MIN_BLOCKS) gram_form(GramFormParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES <= GEMM_SHARED_BYTES, "the host reserves enough");
    constexpr int COLUMNS = Config::BLOCK_N, ROWS = Config::Threads::THREADS_M;
    const GemmParams& gemm = params.gemm;
    const int thread = static_cast<int>(threadIdx.x);
    const Config::Threads threads(thread);
    const Quotient at = divide(gemm.first_tile + static_cast<Long>(blockIdx.x), gemm.tiles_n);
    TileCoordinate where;
    where.batch = at.quotient;
    where.tile_n = at.remainder;
    const Long first_column = where.tile_n * COLUMNS;
    const Config::A* const diagonal =
        static_cast<const Config::A*>(gemm.a.re) + batch_offset(where.batch, gemm.batch_shape, gemm.a.batch_stride);
    const Long matrix = batch_offset(where.batch, gemm.batch_shape, gemm.b.batch_stride);

    double form[Config::THREAD_N] = {}, weight[Config::THREAD_N] = {};
    for (where.tile_m = 0; where.tile_m < gemm.tiles_m; ++where.tile_m) {
        Config::Acc acc[Config::THREAD_M][Config::THREAD_N];
        GemmParams upper = gemm;
        const Long left_of = where.tile_m * Config::BLOCK_M;
        advance(upper.a, left_of * gemm.a.column_stride, sizeof(Config::A));
        advance(upper.b, left_of * gemm.b.row_stride, sizeof(Config::B));
        upper.k = gemm.k - left_of;
        accumulate<FormConfig, RUN>(upper, where, threads, thread, shared, acc);
        double tile[Config::THREAD_N] = {};
#pragma unroll
        for (int i = 0; i < Config::THREAD_M; ++i) {
            const Long row = where.tile_m * Config::BLOCK_M + threads.row(i);
            if (row >= gemm.m) continue;
            const double norm = sqrt(real_part(diagonal[row * (gemm.a.row_stride + gemm.a.column_stride)]));
#pragma unroll
            for (int j = 0; j < Config::THREAD_N; ++j) {
                const Long column = first_column + threads.column(j);
                if (column >= gemm.n) continue;
                const Long offset = matrix + row * gemm.b.row_stride + column * gemm.b.column_stride;
                const Config::Acc b = read_element<Config::B, Config::Acc, Config::PLANAR>(gemm.b, offset);
                weight[j] = fma(norm, absolute(b), weight[j]);
                tile[j] = inner(conjugated(b, gemm.conjugate_b), acc[i][j], tile[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < Config::THREAD_N; ++j) form[j] += tile[j];
        __syncthreads();  // the next tile's operands take the place of this one's
    }

    double* const forms = reinterpret_cast<double*>(shared);
    double* const weights = forms + ROWS * COLUMNS;
#pragma unroll
    for (int j = 0; j < Config::THREAD_N; ++j) {
        forms[threads.thread_m * COLUMNS + threads.column(j)] = form[j];
        weights[threads.thread_m * COLUMNS + threads.column(j)] = weight[j];
    }
    __syncthreads();
    for (int column = thread; column < COLUMNS; column += Config::THREADS) {
        if (first_column + column >= gemm.n) continue;
        double sum = 0, whole = 0;
        for (int r = 0; r < ROWS; ++r) {
            sum += forms[r * COLUMNS + column];
            whole += weights[r * COLUMNS + column];
        }
        const double least = params.tolerance * (whole * whole);
        const int flag = !(sum >= least && least < infinite());  // NaN compares as false
        const Long slot = (params.first_matrix + where.batch) * gemm.n + first_column + column;
        params.values[slot] = sum * gemm.alpha[0];
        params.flags[slot] = flag ? FLAG_BOTH : 0;
        if (flag) atomicOr(params.status, 1);
    }
}
