// A few elements of a product computed again in double, each beside the sum of the magnitudes of its own terms: what a
// check by norms cannot see (freivalds.cu). gemmserve_kernels.freivalds.sampled says which elements, and why.
//
// A block has one element: it looks for it where it is aimed at, and its threads walk along k together. Columns of an
// operand in rows come in sectors of 32 bytes: 256 elements of k = 4096 read 33 MB, little beside a check of 4096 x 4096.
#include "../common/numbers/exact.cuh"
#include "../common/memory/lanes.cuh"
#include "../common/memory/neighbours.cuh"
#include "../common/numbers/random.cuh"
#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"

constexpr int THREADS = GEMM_THREADS, WARPS = THREADS / 32;
constexpr bool PLANAR = GEMM_PLANAR, COMPENSATED = GEMM_COMPENSATED, NORMS = GEMM_NORMS;
using StoredA = GEMM_TYPE_A;
using StoredB = GEMM_TYPE_B;
using StoredC = GEMM_TYPE_C;
using StoredD = GEMM_TYPE_D;
using Acc = GEMM_TYPE_ACC;  // double or Complex<double>

constexpr int CANDIDATE_BITS = 12, CANDIDATES = 1 << CANDIDATE_BITS;
constexpr unsigned long long OF_ITS_OWN = 0x6a09e667f3bcc908ull;  // makes a seed of these numbers from that of the signs
constexpr int FIGURES = 4;  // error in units of what rounding leaves, relative error, row, column

struct SampledParams {
    MatrixParams a, b, c, d;  // op(A), op(B)
    Long m, n, k;
    Long batch_shape[BATCH_DIMS];
    const unsigned long long* seed;
    double* out;  // (matrices, samples, FIGURES)
    Long products;  // of the problem
    Long first_product, first_matrix, first_block;  // of this launch: among all products, in the batch's shape
    int sample_bits, row_bits;  // samples of a product; strata of rows for those that are not aimed
    int a_bits, b_bits;         // elements of op(A), and op(B), among which a large one is looked for
    int has_c;
    int conjugate_a, conjugate_b;
    int reserved;
    double alpha[2], beta[2];
    double per_root, rest;  // relative rounding of an element of t terms: per_root t^(1/2) + rest
    double floor;           // absolute
    double largest;         // number that the arithmetic and the result can hold
};

template <class Stored>
GEMM_DEVICE Acc element(const MatrixParams& matrix, Long offset) {
    return Neighbours<Stored, 1, PLANAR>::read(matrix, offset, 0, 1).template at<Acc>(0);
}
GEMM_DEVICE Acc conjugated(Acc x, int whether) {
    return make<Acc>(real_part(x), whether ? -imaginary_part(x) : imaginary_part(x));
}
GEMM_DEVICE double sum_of_parts(Acc x) { return fabs(real_part(x)) + fabs(imaginary_part(x)); }
GEMM_DEVICE double larger_part(Acc x) {
    const double re = fabs(real_part(x)), im = fabs(imaginary_part(x));
    return im > re ? im : re;
}
GEMM_DEVICE bool is_finite(Acc x) { return finite(real_part(x)) && finite(imaginary_part(x)); }
GEMM_DEVICE double infinity() { return __builtin_bit_cast(double, 0x7ff0000000000000ULL); }
GEMM_DEVICE double unknown() { return __builtin_bit_cast(double, 0x7ff8000000000000ULL); }

// ---- which element

struct Candidate {
    double key;
    Long at;

    GEMM_DEVICE bool before(const Candidate& other) const {
        return key < other.key || (key == other.key && at < other.at);
    }
};

// Which of `extent` elements has the least key: of all, or of one that is drawn in each of 2^bits strata. All threads take
// part.
template <class Stored, class Where, class Key>
GEMM_DEVICE Long least(const MatrixParams& matrix, Long extent, bool all, int bits, unsigned long long seed, Long number,
                       Where where, Key key) {
    __shared__ Candidate shared[WARPS];
    const int thread = static_cast<int>(threadIdx.x), count = all ? static_cast<int>(extent) : 1 << bits;
    Candidate best{infinity(), extent};
#pragma unroll 4
    for (int i = thread; i < count; i += THREADS) {
        const Long at =
            all ? i : in_stratum(extent, i, bits, static_cast<unsigned>(random_bits(seed, number + i)));
        const Acc x = element<Stored>(matrix, where(at));
        const Candidate found{key(is_finite(x), larger_part(x)), at};
        if (found.before(best)) best = found;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const Candidate other = of_neighbour(best, step);
        if (other.before(best)) best = other;
    }
    __syncthreads();  // what was there before has been read
    if (thread % 32 == 0) shared[thread / 32] = best;
    __syncthreads();
    best = shared[0];
    for (int w = 1; w < WARPS; ++w) {
        if (shared[w].before(best)) best = shared[w];
    }
    return best.at;
}

// The smallest; what is lost (0, or not finite) comes first, or last.
struct Smallest {
    double lost;

    GEMM_DEVICE double operator()(bool is_finite, double size) const { return is_finite && size > 0 ? size : lost; }
};
// The largest that is finite.
struct Largest {
    GEMM_DEVICE double operator()(bool is_finite, double size) const { return is_finite ? -size : infinity(); }
};

// Along a row or a column from `offset` on.
struct Line {
    Long offset, stride;

    GEMM_DEVICE Long operator()(Long at) const { return offset + at * stride; }
};
// All of a matrix, row after row.
struct Whole {
    Long offset, row_stride, column_stride, columns;

    GEMM_DEVICE Long operator()(Long at) const {
        const Quotient place = divide(at, columns);
        return offset + place.quotient * row_stride + place.remainder * column_stride;
    }
};

struct Place {
    Long row, column;
};

// Where the offsets are of the matrices of the product.
struct Offsets {
    Long a, b, d;
};

GEMM_DEVICE Place place_of(const SampledParams& params, Long product, int sample, const Offsets& from) {
    const unsigned long long seed = *params.seed ^ OF_ITS_OWN;
    const int bits = params.sample_bits, half = 1 << (bits - 1), quarter = half / 2;
    const Long number = (product << bits) + sample;
    const unsigned long long word = random_bits(seed, number);
    const unsigned upper = static_cast<unsigned>(word >> 32), lower = static_cast<unsigned>(word);
    if (sample < half) {
        const int column_bits = bits - 1 - params.row_bits;
        return {in_stratum(params.m, sample >> column_bits, params.row_bits, upper),
                in_stratum(params.n, sample & ((1 << column_bits) - 1), column_bits, lower)};
    }
    const Long first = (params.products << bits) + ((2 * number) << CANDIDATE_BITS);
    const Long row_stride = params.d.row_stride, column_stride = params.d.column_stride;
    if (sample < half + quarter) {
        const bool along_row = (lower & 1) == 0;
        const Smallest key{(lower & 2) != 0 ? -1.0 : infinity()};
        const Long line = in_stratum(along_row ? params.m : params.n, sample - half, bits - 2, upper);
        const Long extent = along_row ? params.n : params.m;
        const Line where{from.d + line * (along_row ? row_stride : column_stride), along_row ? column_stride : row_stride};
        const Long at =
            least<StoredD>(params.d, extent, extent <= CANDIDATES, CANDIDATE_BITS, seed, first, where, key);
        return along_row ? Place{line, at} : Place{at, line};
    }
    if (params.k == 0) return {0, 0};
    const Whole of_a{from.a, params.a.row_stride, params.a.column_stride, params.k};
    const Whole of_b{from.b, params.b.row_stride, params.b.column_stride, params.n};
    const Long in_a = least<StoredA>(params.a, params.m * params.k, false, params.a_bits, seed, first, of_a, Largest{});
    const Long in_b =
        least<StoredB>(params.b, params.k * params.n, false, params.b_bits, seed, first + CANDIDATES, of_b, Largest{});
    return {divide(in_a, params.k).quotient, divide(in_b, params.n).remainder};
}

// ---- what it should be

struct Sums {
    Exact re, im;
    double size;         // of the magnitudes of all finite terms, as sums of parts
    double terms;        // that are not zero
    double of_a, of_b;  // squared norms (NORMS)

    GEMM_DEVICE static void fold_product(Exact& sum, double x, double y) {
        if constexpr (COMPENSATED) {
            const Exact product = two_product(x, y), both = two_sum(sum.high, product.high);
            sum = {both.high, sum.low + (both.low + product.low)};
        } else {
            sum.high = multiply_add(x, y, sum.high);  // 48 bits at most: the product is exact
        }
    }

    GEMM_DEVICE void fold(Acc a, Acc b) {
        fold_product(re, real_part(a), real_part(b));
        if constexpr (is_complex<Acc>) {
            fold_product(re, -imaginary_part(a), imaginary_part(b));
            fold_product(im, real_part(a), imaginary_part(b));
            fold_product(im, imaginary_part(a), real_part(b));
        }
        const double size_a = sum_of_parts(a), size_b = sum_of_parts(b);
        if (finite(size_a) && finite(size_b)) size = multiply_add(size_a, size_b, size);
        terms += size_a != 0 && size_b != 0 ? 1.0 : 0.0;
        if constexpr (NORMS) {
            of_a = multiply_add(size_a, size_a, of_a);
            of_b = multiply_add(size_b, size_b, of_b);
        }
    }

    GEMM_DEVICE void fold(const Sums& other) {
        re = joined(re, other.re);
        im = joined(im, other.im);
        size += other.size;
        terms += other.terms;
        of_a += other.of_a;
        of_b += other.of_b;
    }
};

GEMM_DEVICE Sums whole(const Sums& mine) {
    __shared__ Sums shared[WARPS];
    const int thread = static_cast<int>(threadIdx.x);
    Sums sums = mine;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums.fold(of_neighbour(sums, step));
    if (thread % 32 == 0) shared[thread / 32] = sums;
    __syncthreads();
    sums = shared[0];
    for (int w = 1; w < WARPS; ++w) sums.fold(shared[w]);
    return sums;
}

// x - factor y, the product not rounded.
GEMM_DEVICE double less(double x, double factor, double y) { return multiply_add(-factor, y, x); }

// What is left of one part of D: d - Re or Im of alpha p + beta c.
GEMM_DEVICE double remainder(double d, const double (&alpha)[2], Exact p, Exact turned, const double (&beta)[2], double c,
                             double turned_c) {
    double left = less(less(d, alpha[0], p.high), alpha[1], turned.high);
    left = less(less(left, beta[0], c), beta[1], turned_c);
    return less(less(left, alpha[0], p.low), alpha[1], turned.low);
}

struct Judgement {
    double ratio, error;
};

// Whether what is not finite in the data came out as what is not finite in D.
GEMM_DEVICE bool same_class(Acc d, Acc expected) {
    if constexpr (is_complex<Acc>) {
        return !is_finite(d);  // which part it reaches depends on the algorithm
    } else {
        const double is = real_part(d), should_be = real_part(expected);
        return is_nan(should_be) ? is_nan(is) : is == should_be;
    }
}

GEMM_DEVICE Judgement judge(const SampledParams& params, Sums sums, Acc c, Acc d) {
    const double of_alpha = fabs(params.alpha[0]) + fabs(params.alpha[1]);
    const double of_beta = fabs(params.beta[0]) + fabs(params.beta[1]);
    const double size = NORMS ? sqrt(sums.of_a) * sqrt(sums.of_b) : sums.size, size_c = sum_of_parts(c);
    const double weight = of_alpha * size + (finite(size_c) ? of_beta * size_c : 0.0);
    const bool overflows = !(sums.size < params.largest && weight < params.largest);
    Acc expected = scale(make<Acc>(sums.re.high, sums.im.high), params.alpha[0], params.alpha[1]);
    if (params.has_c) expected = add(expected, scale(c, params.beta[0], params.beta[1]));
    if (!is_finite(expected)) {
        if (overflows || of_alpha == 0) return {unknown(), unknown()};
        if (same_class(d, expected)) return {0.0, 0.0};
        return {infinity(), infinity()};
    }
    if (!is_finite(d)) {
        if (overflows) return {unknown(), unknown()};
        return {infinity(), infinity()};
    }
    const double terms = sums.terms * (is_complex<Acc> ? 2.0 : 1.0);
    const double unit = params.per_root * sqrt(terms) + params.rest;
    double error = fabs(remainder(real_part(d), params.alpha, sums.re, {-sums.im.high, -sums.im.low}, params.beta,
                                  real_part(c), -imaginary_part(c)));
    if constexpr (is_complex<Acc>) {
        const double im = fabs(remainder(imaginary_part(d), params.alpha, sums.im, sums.re, params.beta, imaginary_part(c),
                                         real_part(c)));
        error = im > error ? im : error;
    }
    if (error == 0) return {0.0, 0.0};
    return {error / (unit * weight + params.floor), weight > 0 ? error / weight : infinity()};
}

extern "C" __global__ void __launch_bounds__(THREADS, GEMM_MIN_BLOCKS) sampled_elements(SampledParams params) {
    const int thread = static_cast<int>(threadIdx.x);
    const Long block = params.first_block + static_cast<Long>(blockIdx.x);
    const Long in_launch = block >> params.sample_bits, matrix = params.first_matrix + in_launch;
    const int sample = static_cast<int>(block - (in_launch << params.sample_bits));
    const Offsets from{batch_offset(matrix, params.batch_shape, params.a.batch_stride),
                       batch_offset(matrix, params.batch_shape, params.b.batch_stride),
                       batch_offset(matrix, params.batch_shape, params.d.batch_stride)};
    const Place place = place_of(params, params.first_product + in_launch, sample, from);
    const Long of_a = from.a + place.row * params.a.row_stride, of_b = from.b + place.column * params.b.column_stride;
    Sums mine{};
#pragma unroll 4
    for (Long l = thread; l < params.k; l += THREADS) {
        const Acc a = element<StoredA>(params.a, of_a + l * params.a.column_stride);
        const Acc b = element<StoredB>(params.b, of_b + l * params.b.row_stride);
        mine.fold(conjugated(a, params.conjugate_a), conjugated(b, params.conjugate_b));
    }
    Sums sums = whole(mine);
    if (thread != 0) return;
    if (!finite(sums.re.high)) sums.re.low = 0;  // what is lost of an infinity is not a number
    if (!finite(sums.im.high)) sums.im.low = 0;
    const Acc d = element<StoredD>(params.d, from.d + place.row * params.d.row_stride + place.column * params.d.column_stride);
    Acc c = make<Acc>(0, 0);
    if (params.has_c) {
        const Long of_c = batch_offset(matrix, params.batch_shape, params.c.batch_stride);
        c = element<StoredC>(params.c, of_c + place.row * params.c.row_stride + place.column * params.c.column_stride);
    }
    const Judgement judgement = judge(params, sums, c, d);
    double* const out = params.out + block * FIGURES;
    out[0] = judgement.ratio;
    out[1] = judgement.error;
    out[2] = static_cast<double>(place.row);
    out[3] = static_cast<double>(place.column);
}

struct WorstParams {
    const double* samples;  // (products, samples, FIGURES)
    double* out;            // (products, FIGURES)
    Long products;
    Long first_block;
    int sample_bits;
    int reserved;
};

struct Ranked {
    double ratio;  // -1: nothing is known
    int sample;

    GEMM_DEVICE bool before(const Ranked& other) const {
        return ratio > other.ratio || (ratio == other.ratio && sample < other.sample);
    }
};

// The worst sample of each product, one warp for each; the first of equals. NaN where none can be judged.
extern "C" __global__ void __launch_bounds__(THREADS) sampled_worst(WorstParams params) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const Long product = (params.first_block + static_cast<Long>(blockIdx.x)) * WARPS + warp;
    if (product >= params.products) return;
    const int count = 1 << params.sample_bits;
    const double* const samples = params.samples + (product << params.sample_bits) * FIGURES;
    Ranked worst{-2.0, count};
    for (int i = lane; i < count; i += 32) {
        const double ratio = samples[i * FIGURES];
        const Ranked found{is_nan(ratio) ? -1.0 : ratio, i};
        if (found.before(worst)) worst = found;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const Ranked other{of_neighbour(worst.ratio, step), of_neighbour(worst.sample, step)};
        if (other.before(worst)) worst = other;
    }
    if (lane < FIGURES) params.out[product * FIGURES + lane] = samples[worst.sample * FIGURES + lane];
}
