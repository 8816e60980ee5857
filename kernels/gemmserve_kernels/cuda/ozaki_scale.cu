// The scale of every line from its Euclidean norm, rounded up. The sum of squares has 32 partial sums, k modulo 32, and a
// fixed tree over them, whichever way the operand lies in memory.
#include "ozaki/lines.cuh"

constexpr int BLOCK_LINES = 32, THREADS = 1024;
constexpr double SMALL = 3.2033e-145, LARGE = 3.1217e144;  // 2^-480, 2^480
constexpr double MARGIN = 1.0 + 9.313225746154785e-10;     // 1 + 2^-30: roundings of the sum, the root, the quotient

struct Partial {
    double sum, largest;
};

// NaN and infinity stay in the sum.
GEMM_DEVICE void add_element(Partial& partial, const Element& x, double factor) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const double value = x.part[p] * factor;
        partial.sum = fma(value, value, partial.sum);
        partial.largest = fmax(partial.largest, fabs(value));
    }
}

// Partial sums of the block's lines into shared memory, [line][k modulo 32].
GEMM_DEVICE void gather(
    const LineParams& line, Long offset, Long first_line, const double (&factor)[BLOCK_LINES],
    Partial (&partial)[BLOCK_LINES][33]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int l = ALONG_K ? warp : lane, part = ALONG_K ? lane : warp;
    Partial found{0.0, 0.0};
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
            here.largest = fmax(here.largest, other.largest);
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) ozaki_scale(ScaleParams params) {
    __shared__ Partial partial[BLOCK_LINES][33];
    __shared__ double factor[BLOCK_LINES];
    __shared__ int again;
    const LineParams& line = params.line;
    const Long blocks = (line.lines + BLOCK_LINES - 1) / BLOCK_LINES;
    const Quotient where = divide(static_cast<Long>(blockIdx.x), blocks);
    const Long first_line = where.remainder * BLOCK_LINES;
    const Long offset = batch_offset(line.first + where.quotient, line.batch_shape, line.x.batch_stride);
    const int l = static_cast<int>(threadIdx.x);
    if (l == 0) again = 0;
    if (l < BLOCK_LINES) factor[l] = 1.0;
    __syncthreads();
    gather(line, offset, first_line, factor, partial);
    int exponent = 0;
    if (l < BLOCK_LINES) {
        const double largest = partial[l][0].largest;
        // Squares that would overflow or vanish: the same again, scaled.
        if (largest > LARGE && largest - largest == 0.0) exponent = -600;
        if (largest < SMALL && largest > 0.0) exponent = 600;
        factor[l] = power(exponent);
        if (exponent != 0) again = 1;
    }
    __syncthreads();
    if (again) gather(line, offset, first_line, factor, partial);
    if constexpr (GEMM_TALLY) {
        // Nothing is counted yet.
        const TallyParams& tally = params.tally;
        if (l < BLOCK_LINES && first_line + l < line.lines) tally.sums[where.quotient * line.lines + first_line + l] = 0;
        if (first_line % (2 * JUDGED_LINES) == 0 && l < 2) {
            const Long group = where.quotient * tally.groups + first_line / JUDGED_LINES + l;
            tally.arrivals[group] = 0;
        }
        if (blockIdx.x == 0 && l == 0 && tally.counts) *tally.doubt = 0;
    }
    if (l >= BLOCK_LINES || first_line + l >= line.lines) return;
    const double sum = partial[l][0].sum;
    int code;
    if (!(sum - sum == 0.0)) {
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
