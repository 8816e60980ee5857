// The scale of every line from its Euclidean norm, rounded up. The sum of squares has 32 partial sums, k modulo 32, and a
// fixed tree over them, whichever way the operand lies in memory. In double precision norms also say what lines lack at
// least, before they are counted; lines of which a few elements make the scale too coarse for the others are gathered a
// second time, without those.
#include "outliers.cuh"

constexpr int BLOCK_LINES = 32, THREADS = 1024;
constexpr bool OUTLIERS = GEMM_OUTLIERS;
constexpr int AT_ONCE = OUTLIERS && PLANAR ? 2 : 4;  // elements: of planes each is read twice
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

// Partial sums of the block's lines. `reads` says of a line whether it is looked at, `counts` of an element whether it is among
// its sums; `looks` is called when the partial sums are there, before they are added up.
template <class Reads, class Counts, class Looks>
GEMM_DEVICE void gather(
    const LineParams& line, Long offset, Long first_line, const double (&factor)[BLOCK_LINES],
    Partial (&partial)[BLOCK_LINES][33], const Reads& reads, const Counts& counts,
    const Looks& looks) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int l = ALONG_K ? warp : lane, part = ALONG_K ? lane : warp;
    Partial found{};
    if (first_line + l < line.lines && reads(l)) {
        const Long at = offset + (first_line + l) * line.x.row_stride;
#pragma unroll AT_ONCE
        for (Long k = part; k < line.k; k += 32) {
            const Element x = read(line, at + k * line.x.column_stride);
            if (counts(l, k, x)) add_element(found, x, factor[l]);
        }
    }
    partial[l][part] = found;
    __syncthreads();
    looks();
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
        tally.least[group + thread / 4].quarter[thread % 4] = empty ? NEVER_PASSES : 0;
    }
}

// The scale of a line from the sum of the squares of its elements times 2^exponent.
GEMM_DEVICE int code_of(double sum, double target, int exponent) {
    if (!(sum - sum == 0.0)) return FLAGGED_LINE;
    if (sum == 0.0) return ZERO_LINE;
    // target / norm = n / 4 * 2^e, n rounded down.
    const Long bits = bits_of(target / (sqrt(sum) * MARGIN));
    return (static_cast<int>(bits >> 52) - 1023 + exponent) * 8 + 4 + static_cast<int>(bits >> 50 & 3);
}

// What is known of the block's lines' outliers; steps of k in no order.
struct Apart {
    Partial all[BLOCK_LINES];  // with them
    double above[BLOCK_LINES];
    double largest[BLOCK_LINES][33];  // by k modulo 32
    int count[BLOCK_LINES];
    int at[BLOCK_LINES][MOST_OUTLIERS];
    int any;
};

// The power of two that brings elements up to `above` to about 1.
GEMM_DEVICE int exponent_below(double above) {
    const int e = static_cast<int>(bits_of(above) >> 52) - 1023;
    return e < -1000 ? 1000 : e > 1000 ? -1000 : -e;
}

// Looks for outliers in the partial sums of a warp's line, and the largest element of each.
GEMM_DEVICE void look(
    const ScaleParams& params, double largest, const double (&factor)[BLOCK_LINES], const Partial (&partial)[BLOCK_LINES][33],
    Apart& apart) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    apart.largest[ALONG_K ? warp : lane][ALONG_K ? lane : warp] = largest;
    __syncthreads();
    const Partial& own = partial[warp][lane];
    const double above = outliers_above(
        apart.largest[warp][lane], factor[warp], own.size, own.sum, params.target, params.line.k, params.tally);
    if (lane == 0) {
        apart.above[warp] = above;
        apart.count[warp] = 0;
    }
    __syncthreads();
}

// Gathers those lines again, without their outliers, that may have some.
GEMM_DEVICE void set_apart(
    const ScaleParams& params, Long offset, Long first_line, double (&factor)[BLOCK_LINES],
    Partial (&partial)[BLOCK_LINES][33], Apart& apart) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < BLOCK_LINES) {
        const double above = apart.above[thread];
        apart.all[thread] = partial[thread][0];
        const bool any = __any_sync(0xffffffffu, above < NO_LIMIT);
        if (thread == 0) apart.any = any;
        factor[thread] = power(exponent_below(above));
    }
    __syncthreads();
    if (!apart.any) return;
    gather(
        params.line, offset, first_line, factor, partial, [&](int l) { return apart.above[l] < NO_LIMIT; },
        [&](int l, Long k, const Element& x) {
            if (!(size_of(x) > apart.above[l])) return true;
            const int place = atomicAdd(&apart.count[l], 1);
            if (place < MOST_OUTLIERS) apart.at[l][place] = static_cast<int>(k);
            return false;
        },
        [] {});
}

// Writes the steps of k of the block's lines in their order: a warp those of a line.
GEMM_DEVICE void write_apart(const Apart& apart, Outliers* outliers) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int count = apart.count[warp];
    for (int i = lane; i < count; i += 32) {
        int before = 0;
        for (int j = 0; j < count; ++j) before += apart.at[warp][j] < apart.at[warp][i];
        outliers[warp].at[before] = apart.at[warp][i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ozaki_scale(ScaleParams params) {
    __shared__ Partial partial[BLOCK_LINES][33];
    __shared__ double factor[BLOCK_LINES];
    __shared__ int again;
    __shared__ Apart apart;
    const LineParams& line = params.line;
    const TallyParams& tally = params.tally;
    const Long blocks = (line.lines + BLOCK_LINES - 1) / BLOCK_LINES;
    const Quotient where = divide(static_cast<Long>(blockIdx.x), blocks);
    const Long first_line = where.remainder * BLOCK_LINES;
    const Long offset = batch_offset(line.first + where.quotient, line.batch_shape, line.x.batch_stride);
    const Long group = where.quotient * tally.groups + first_line / JUDGED_LINES;
    const Long in_all = where.quotient * line.lines + first_line;
    const int l = static_cast<int>(threadIdx.x);
    if (l == 0) again = 0;
    if (first_line % (2 * JUDGED_LINES) == 0) clear(tally, group, line.lines - first_line);
    if (blockIdx.x == 0 && l == 0 && tally.counts) *tally.doubt = 0;
    if (l < BLOCK_LINES) factor[l] = 1.0;
    __syncthreads();
    double largest = 0.0;  // of what this thread reads
    const auto every = [](int) { return true; };
    const auto measured = [&](int, Long, const Element& x) {
        if constexpr (OUTLIERS) largest = fmax(largest, size_of(x));
        return true;
    };
    const auto looks = [&] {
        if constexpr (OUTLIERS) look(params, largest, factor, partial, apart);
    };
    gather(line, offset, first_line, factor, partial, every, measured, looks);
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
    if (again) gather(line, offset, first_line, factor, partial, every, measured, looks);
    if constexpr (OUTLIERS) set_apart(params, offset, first_line, factor, partial, apart);
    if (l < BLOCK_LINES) {
        const bool exists = first_line + l < line.lines;
        Partial all = OUTLIERS ? apart.all[l] : partial[l][0];
        int code = code_of(all.sum, params.target, exponent);
        if constexpr (OUTLIERS) {
            const double above = apart.above[l];
            const Partial rest = partial[l][0];
            const int finer = above < NO_LIMIT ? code_of(rest.sum, params.target, exponent_below(above)) : FLAGGED_LINE;
            int count = above < NO_LIMIT ? apart.count[l] : 0;
            if (count > tally.most_outliers || !(rest.sum == 0.0 || is_finer(finer, code))) count = 0;
            // What pays is half as many in the mean.
            if (2 * over_warp(count) > BLOCK_LINES * tally.most_outliers) count = 0;
            if (count > 0) {
                code = finer;
                all = rest;
            }
            apart.count[l] = count;
            if (exists) {
                tally.outliers[in_all + l].above = count > 0 ? above : NO_LIMIT;
                tally.outliers[in_all + l].count = count;
            }
        }
        if (exists) tally.sums[in_all + l] = 0;
        unsigned least = code != FLAGGED_LINE ? least_deficit(all.size, all.sum, params.target, line.k, tally) : NEVER_PASSES;
        if (!exists) least = 0;
#pragma unroll
        for (int lane = 16; lane > 0; lane /= 2) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, least, lane);
            least = other > least ? other : least;
        }
        if (l == 0) tally.least[group].quarter[first_line % JUDGED_LINES / BLOCK_LINES] = least;
        if (exists) line.codes[in_all + l] = code;
    }
    if constexpr (OUTLIERS) {
        if (!apart.any) return;
        __syncthreads();
        write_apart(apart, tally.outliers + in_all);
    }
}
