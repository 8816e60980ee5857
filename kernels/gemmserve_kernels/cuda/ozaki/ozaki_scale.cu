// The scale of every line from its Euclidean norm, rounded up. The sum of squares has 32 partial sums, k modulo 32, and a
// fixed tree over them, whichever way the operand lies in memory. In double precision norms also say what lines lack at
// least, before they are counted.
#include "least.cuh"

constexpr int BLOCK_LINES = 32, THREADS = 1024;
constexpr double SMALL = 3.2033e-145, LARGE = 3.1217e144;  // 2^-480, 2^480
constexpr double MARGIN = 1.0 + 9.313225746154785e-10;     // 1 + 2^-30: roundings of the sum, the root, the quotient

struct Partial {
    double sum;
    Magnitudes size;
};

// NaN and infinity stay in the sum.
GEMM_DEVICE void add_element(Partial& partial, const Element& x, double factor) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const double value = x.part[p] * factor;
        partial.sum = fma(value, value, partial.sum);
        partial.size.part[p] += fabs(value);
    }
}

// Partial sums of the block's lines into shared memory, [line][k modulo 32].
GEMM_DEVICE void gather(
    const LineParams& line, Long offset, Long first_line, const double (&factor)[BLOCK_LINES],
    Partial (&partial)[BLOCK_LINES][33]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int l = ALONG_K ? warp : lane, part = ALONG_K ? lane : warp;
    Partial found{};
    if (first_line + l < line.lines) {
        const Long at = offset + (first_line + l) * line.x.row_stride;
#pragma unroll 4
        for (Long k = part; k < line.k; k += 32) add_element(found, read(line, at + k * line.x.column_stride), factor[l]);
    }
    partial[l][part] = found;
    __syncthreads();
    for (int half = 16; half > 0; half /= 2) {
        for (int i = static_cast<int>(threadIdx.x); i < BLOCK_LINES * half; i += THREADS) {
            const int l = i / half, j = i % half;
            Partial& here = partial[l][j];
            const Partial& other = partial[l][j + half];
            here.sum += other.sum;
            here.size.add(other.size);
        }
        __syncthreads();
    }
}

// Nothing is counted yet; of the group of the matrix and the one after it.
GEMM_DEVICE void clear(const TallyParams& tally, Long group, Long lines_left) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 2) tally.arrivals[group + thread] = 0;
    constexpr int QUARTERS = 2 * JUDGED_LINES / BLOCK_LINES;
    if (thread < QUARTERS && thread * BLOCK_LINES >= lines_left) {
        const bool empty = thread / 4 * JUDGED_LINES >= lines_left;
        tally.least[group + thread / 4].quarter[thread % 4] = empty ? NEVER : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ozaki_scale(ScaleParams params) {
    __shared__ Partial partial[BLOCK_LINES][33];
    __shared__ double factor[BLOCK_LINES];
    __shared__ int again;
    const LineParams& line = params.line;
    const TallyParams& tally = params.tally;
    const Long blocks = (line.lines + BLOCK_LINES - 1) / BLOCK_LINES;
    const Quotient where = divide(static_cast<Long>(blockIdx.x), blocks);
    const Long first_line = where.remainder * BLOCK_LINES;
    const Long offset = batch_offset(line.first + where.quotient, line.batch_shape, line.x.batch_stride);
    const Long group = where.quotient * tally.groups + first_line / JUDGED_LINES;
    const int l = static_cast<int>(threadIdx.x);
    if (l == 0) again = 0;
    if constexpr (GEMM_TALLY) {
        if (first_line % (2 * JUDGED_LINES) == 0) clear(tally, group, line.lines - first_line);
        if (blockIdx.x == 0 && l == 0 && tally.counts) *tally.doubt = 0;
    }
    if (l < BLOCK_LINES) factor[l] = 1.0;
    __syncthreads();
    gather(line, offset, first_line, factor, partial);
    int exponent = 0;
    if (l < BLOCK_LINES) {
        const Magnitudes& size = partial[l][0].size;
        const double all = size.part[0] + (COMPLEX ? size.part[PARTS - 1] : 0.0);
        // Squares that would overflow or vanish: the same again, scaled.
        if (all > LARGE) exponent = -600;
        if (all < SMALL && all > 0.0) exponent = 600;
        factor[l] = power(exponent);
        if (exponent != 0) again = 1;
    }
    __syncthreads();
    if (again) gather(line, offset, first_line, factor, partial);
    if (l >= BLOCK_LINES) return;
    const bool exists = first_line + l < line.lines;
    const double sum = partial[l][0].sum;
    const bool finite = sum - sum == 0.0;
    if constexpr (GEMM_TALLY) {
        if (exists) tally.sums[where.quotient * line.lines + first_line + l] = 0;
        unsigned least = finite ? least_deficit(partial[l][0].size, sum, params.target, line.k, tally) : NEVER;
        if (!exists) least = 0;
#pragma unroll
        for (int lane = 16; lane > 0; lane /= 2) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, least, lane);
            least = other > least ? other : least;
        }
        if (l == 0) tally.least[group].quarter[first_line % JUDGED_LINES / BLOCK_LINES] = least;
    }
    if (!exists) return;
    int code;
    if (!finite) {
        code = FLAGGED_LINE;
    } else if (sum == 0.0) {
        code = ZERO_LINE;
    } else {
        // target / norm = n / 4 * 2^e, n rounded down.
        const Long bits = bits_of(params.target / (sqrt(sum) * MARGIN));
        code = (static_cast<int>(bits >> 52) - 1023 + exponent) * 8 + 4 + static_cast<int>(bits >> 50 & 3);
    }
    line.codes[where.quotient * line.lines + first_line + l] = code;
}
