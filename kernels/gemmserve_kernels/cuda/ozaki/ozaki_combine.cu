// From residues of the integer product to D = alpha op(A) op(B) + beta C: Chinese remainders, exactly, then one rounding.
//
// Every weight has three limbs with signs, of 42 bits the lower two; every sum of residues times limbs, and what is left of it
// when a multiple of the product of the moduli is taken away, is an integer below 2^53: all exact in float64. Tiles
// whose lines do not promise enough are left out; to the others come terms with outliers, in double.
#include "../common/numbers/exact.cuh"
#include "layout.cuh"
#include "outliers.cuh"

constexpr bool OUTLIERS = GEMM_OUTLIERS;
constexpr int MODULI = GEMM_MODULI;
constexpr int THREADS = 256, BLOCK_WORDS = THREADS;
constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52
constexpr double LIMB = 4398046511104.0;      // 2^42
using Acc = GEMM_TYPE_ACC;
using R = Real<Acc>;

struct Limbs {
    double at[3];
};

struct Wide {
    double high, low;
};

constexpr double ZERO = 4503599627370496.0;  // 2^52

// A residue, and 2^52 less than it stands for.
GEMM_DEVICE void add_residue(Limbs& sum, unsigned residue, double zero, const double (&weight)[3]) {
    // 2^52 + residue, put together from its words: conversions are four times as slow as additions.
    const double r = __hiloint2double(0x43300000, static_cast<int>(residue)) - zero;
#pragma unroll
    for (int i = 0; i < 3; ++i) sum.at[i] = fma(r, weight[i], sum.at[i]);
}

GEMM_DEVICE unsigned byte_at(unsigned word, int i) { return __byte_perm(word, 0, 0x4440 | i); }

// The number nearest to 0 that is congruent to the sum, as an unevaluated sum of two.
GEMM_DEVICE Wide nearest(const Limbs& sum, const RemainderParams& params) {
    const double size = fma(fma(sum.at[0], 1.0 / LIMB, sum.at[1]), 1.0 / LIMB, sum.at[2]);
    const double quotient = fma(size, params.inverse_product, ROUND) - ROUND;
    const double low = fma(-quotient, params.product[0], sum.at[0]);
    const double middle = fma(-quotient, params.product[1], sum.at[1]) * LIMB;
    const double top = fma(-quotient, params.product[2], sum.at[2]) * (LIMB * LIMB);
    const double high = top + middle, back = high - top;  // D. E. Knuth's two-sum
    const double rest = ((top - (high - back)) + (middle - back)) + low;
    const double total = high + rest;
    return {total, (high - total) + rest};
}

template <class T>
GEMM_DEVICE T read_c(const MatrixParams& matrix, Long offset) {
    const Stored first = static_cast<const Stored*>(matrix.re)[offset];
    if constexpr (PLANAR) {
        return widen<T>(first, static_cast<const Stored*>(matrix.im)[offset]);
    } else {
        return widen<T>(first);
    }
}

template <class T>
GEMM_DEVICE void write_d(const MatrixParams& matrix, Long offset, T value) {
    if constexpr (PLANAR) {
        static_cast<Stored*>(matrix.re)[offset] = static_cast<Stored>(value.re);
        static_cast<Stored*>(matrix.im)[offset] = static_cast<Stored>(value.im);
    } else {
        static_cast<Stored*>(matrix.re)[offset] = Narrow<Stored>::from(value);
    }
}

// x times 16 / (n_a n_b) times 2^e. The quotient is taken to twice the precision, so that what is exact stays so.
GEMM_DEVICE double unscaled(const Wide& x, double inverse, double inverse_low, double first, double second) {
    const double product = x.high * inverse;
    const double rest = fma(x.high, inverse, -product) + fma(x.high, inverse_low, x.low * inverse);
    return (product + rest) * first * second;
}

// x y to a sum with what rounding lost of it (exact.cuh has the sources).
GEMM_DEVICE void add_product(Exact& sum, double x, double y) {
    const Exact product = two_product(x, y), high = two_sum(sum.high, product.high);
    sum = {high.high, sum.low + (high.low + product.low)};
}

GEMM_DEVICE void add_product(Exact (&sum)[PARTS], const Element& x, const Element& y) {
    add_product(sum[0], x.part[0], y.part[0]);
    if constexpr (COMPLEX) {
        add_product(sum[0], -x.part[PARTS - 1], y.part[PARTS - 1]);
        add_product(sum[PARTS - 1], x.part[0], y.part[PARTS - 1]);
        add_product(sum[PARTS - 1], x.part[PARTS - 1], y.part[0]);
    }
}

// An element of an operand, or its conjugate.
GEMM_DEVICE Element read_factor(const MatrixParams& matrix, Long offset, bool conjugate) {
    Element x = read(matrix, offset);
    if (COMPLEX && conjugate) x.part[PARTS - 1] = -x.part[PARTS - 1];
    return x;
}

// To an element the terms with an outlier: first those of its row, then those of its column where the row has none there. As
// if with twice the bits; what has no such term keeps its bits. `a`, `b`: where the row and the column begin.
template <class T>
GEMM_DEVICE T with_outliers(
    const RemainderParams& params, const Outliers& of_row, const Outliers& of_column, Long a, Long b, T value) {
    Exact sum[PARTS];
    sum[0] = {real_part(value), 0.0};
    if constexpr (COMPLEX) sum[PARTS - 1] = {imaginary_part(value), 0.0};
    const int in_row = of_row.count, all = in_row + of_column.count;
    const double above = of_row.above;
#pragma unroll 4
    for (int t = 0; t < all; ++t) {
        const Long k = t < in_row ? of_row.at[t] : of_column.at[t - in_row];
        const Element x = read_factor(params.a, a + k * params.a.column_stride, params.conjugate_a);
        const Element y = read_factor(params.b, b + k * params.b.row_stride, params.conjugate_b);
        if (t < in_row || size_of(x) <= above) add_product(sum, x, y);
    }
    const auto rounded = [](const Exact& x) { return finite(x.high) && x.low != 0.0 ? x.high + x.low : x.high; };
    return make<T>(
        static_cast<Real<T>>(rounded(sum[0])), static_cast<Real<T>>(COMPLEX ? rounded(sum[PARTS - 1]) : 0.0));
}

extern "C" __global__ void __launch_bounds__(THREADS) ozaki_combine(RemainderParams params) {
    const Long blocks = TILE_WORDS / BLOCK_WORDS;
    const Quotient in_tile = divide(static_cast<Long>(blockIdx.x), blocks);
    const Quotient by_n = divide(in_tile.quotient, params.tiles_n);
    const Quotient by_m = divide(by_n.quotient, params.tiles_m);
    const Long matrix = by_m.quotient, tile_m = by_m.remainder, tile_n = by_n.remainder;
    const bool apart = has_outliers(params.judged);
    // Both are read at once: a block that has nothing to do is over sooner.
    if (!(all_pass(params.judged) | passes(params.judged, matrix, tile_m, tile_n))) {
        if (in_tile.remainder == 0 && threadIdx.x == 0) add_failing(params.judged, in_tile.quotient);
        return;
    }
    const int index = static_cast<int>(in_tile.remainder) * BLOCK_WORDS + static_cast<int>(threadIdx.x);
    const Long row = tile_m * TILE_M + word_row(index), column = tile_n * TILE_N + word_column(index);
    const Long row_in_matrix = params.first_row + row;

    Limbs re[4] = {}, im[4] = {};
    const bool inside = row < params.rows && column < params.columns;
    if (inside) {
        const Long plane = params.tiles_m * params.tiles_n * TILE_BYTES;
        const unsigned char* from = params.products + matrix * (MODULI * PARTS) * plane +
                                    (tile_m * params.tiles_n + tile_n) * TILE_BYTES + 4 * index;
#pragma unroll
        for (int m = 0; m < MODULI; ++m) {
            const unsigned first = *reinterpret_cast<const unsigned*>(from + m * PARTS * plane);
            if constexpr (COMPLEX) {
                // Residues of a product's u and v. A multiple of p is taken away so that neither sum is larger than that.
                const unsigned second = *reinterpret_cast<const unsigned*>(from + (m * PARTS + 1) * plane);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned u = byte_at(first, i), v = byte_at(second, i);
                    add_residue(re[i], u + v, params.zero[m], params.weight[m][0]);
                    add_residue(im[i], u - v + 256u, ZERO + 256.0, params.weight[m][1]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) add_residue(re[i], byte_at(first, i), ZERO, params.weight[m][0]);
            }
        }
    }

    const int code_a = inside ? params.a_codes[matrix * params.a_codes_step + row_in_matrix] : ZERO_LINE;
    const bool reads_c = params.beta[0] != 0 || params.beta[1] != 0;
    const Long c_offset = batch_offset(params.first + matrix, params.batch_shape, params.c.batch_stride);
    const Long d_offset = batch_offset(params.first + matrix, params.batch_shape, params.d.batch_stride);
    const auto write = [&](Acc value, Long column_in_matrix) {
        value = scale(value, static_cast<R>(params.alpha[0]), static_cast<R>(params.alpha[1]));
        if (reads_c) {
            const Long at = c_offset + row_in_matrix * params.c.row_stride + column_in_matrix * params.c.column_stride;
            const Acc c = read_c<Acc>(params.c, at);
            value = add(value, scale(c, static_cast<R>(params.beta[0]), static_cast<R>(params.beta[1])));
        }
        const Long at = d_offset + row_in_matrix * params.d.row_stride + column_in_matrix * params.d.column_stride;
        write_d(params.d, at, value);
    };
    __shared__ Acc held[4][THREADS];  // while outliers are added: registers are short
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Long j = column + byte_column(i);
        if (!inside || j >= params.columns) continue;
        const Long column_in_matrix = params.first_column + j;
        const int code_b = params.b_codes[matrix * params.b_codes_step + column_in_matrix];
        const int n_a = code_a & 7, n_b = code_b & 7;
        Acc value = make<Acc>(R(0), R(0));
        if (n_a >= 4 && n_b >= 4) {
            const double(&of_a)[2] = params.inverse[n_a & 3];
            const double(&of_b)[2] = params.inverse[n_b & 3];
            const double inverse = of_a[0] * of_b[0];
            const double inverse_low = fma(of_a[0], of_b[0], -inverse) + fma(of_a[0], of_b[1], of_a[1] * of_b[0]);
            const int e = -(code_a >> 3) - (code_b >> 3);
            const int half = e < -1000 ? -1000 : e > 1000 ? 1000 : e;
            int rest = e - half;
            rest = rest < -1022 ? -1022 : rest > 1023 ? 1023 : rest;
            const double first = power(half), second = power(rest);
            const Wide x = nearest(re[i], params);
            const Wide y = COMPLEX ? nearest(im[i], params) : Wide{0.0, 0.0};
            value = make<Acc>(
                static_cast<R>(unscaled(x, inverse, inverse_low, first, second)),
                static_cast<R>(COMPLEX ? unscaled(y, inverse, inverse_low, first, second) : 0.0));
        }
        if constexpr (OUTLIERS) {
            if (apart) {
                held[i][threadIdx.x] = value;
                continue;
            }
        }
        write(value, column_in_matrix);
    }
    if constexpr (OUTLIERS) {
        if (!apart || !inside) return;
        const Long j = params.first_column + column, number = params.first + matrix;
        const Outliers& of_row = params.a_outliers[matrix * params.a_codes_step + row_in_matrix];
        const Outliers* of_column = params.b_outliers + matrix * params.b_codes_step + j;
        const Long a = batch_offset(number, params.batch_shape, params.a.batch_stride) + row_in_matrix * params.a.row_stride;
        const Long b = batch_offset(number, params.batch_shape, params.b.batch_stride) + j * params.b.column_stride;
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const int step = byte_column(i);
            if (column + step >= params.columns) return;
            write(
                with_outliers(params, of_row, of_column[step], a, b + step * params.b.column_stride, held[i][threadIdx.x]),
                j + step);
        }
    }
}
