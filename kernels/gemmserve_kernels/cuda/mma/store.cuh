// D = alpha sums + beta C, element by element of one warp's accumulators.
#pragma once

#include "../common/memory/element.cuh"
#include "../common/numbers/power.cuh"
#include "../common/numbers/truncation.cuh"
#include "multiply.cuh"
#include "params.cuh"

GEMM_DEVICE bool finite(float x) { return (bits_of(x) & FLOAT_EXPONENT) != FLOAT_EXPONENT; }

template <class Acc>
GEMM_DEVICE bool finite_element(Acc x) {
    if constexpr (is_complex<Acc>) {
        return finite(x.re) && finite(x.im);
    } else {
        return finite(x);
    }
}

// x * 2^exponent of float16 planes, exact unless the result is subnormal or too large; exponents beyond +-252 do not fit two floats, and
// no sum of products that fits float32 needs them.
GEMM_DEVICE float times_power(float x, int exponent) {
    exponent = exponent < -252 ? -252 : exponent > 252 ? 252 : exponent;
    const int half = exponent / 2;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

template <class Config>
class Store {
  public:
    using Acc = typename Config::Acc;

    GEMM_DEVICE Store(const MmaParams& params, Long batch)
        : params_(params), gemm_(params.gemm), batch_(batch),
          c_(batch_offset(batch, gemm_.batch_shape, gemm_.c.batch_stride)),
          d_(batch_offset(batch, gemm_.batch_shape, gemm_.d.batch_stride)),
          reads_c_(gemm_.beta[0] != 0 || gemm_.beta[1] != 0) {
        if constexpr (Config::PLANES) {
            a_exponents_ = params.exponents[0] + batch_offset(batch, gemm_.batch_shape, params.exponent_stride[0]);
            b_exponents_ = params.exponents[1] + batch_offset(batch, gemm_.batch_shape, params.exponent_stride[1]);
        }
    }

    // Writes the warp's accumulators, whose first element is (row, column) of D.
    GEMM_DEVICE void run(const typename Config::Multiply::Sums& sums, Long row, Long column, int lane) const {
        constexpr int ROWS = Config::Multiply::ROWS, PAIRS = Config::Multiply::PAIRS;
        constexpr int WORDS = (ROWS * PAIRS * 8 + 31) / 32;
        const int g = lane / 4, t = lane % 4;
        unsigned wrong[WORDS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Long here = row + fragment_row<Config::A::ALONG_K>(16 * i, r, g);
                if (here >= gemm_.m) continue;
#pragma unroll
                for (int j = 0; j < PAIRS; ++j) {
                    constexpr int PIECE = Config::B::ALONG_K ? 2 : 4;
#pragma unroll
                    for (int first = 0; first < 4; first += PIECE) {
                        const Long there = column + 16 * j + first_column(first, t);
                        Acc values[PIECE];
                        unsigned bad = 0;
#pragma unroll
                        for (int p = 0; p < PIECE; ++p) {
                            const int half = Config::B::ALONG_K ? first / 2 : p % 2;
                            const int e = Config::B::ALONG_K ? p : p / 2;
                            const float(&sum)[Config::COMPONENTS][4] = sums[i][j][half];
                            values[p] = make<Acc>(sum[0][2 * r + e], sum[Config::COMPONENTS - 1][2 * r + e]);
                            if (!Config::PLANES && !finite_element(values[p])) bad |= 1u << p;
                        }
                        const int bit = ((i * 2 + r) * PAIRS + j) * 4 + first;
                        wrong[bit / 32] |= bad << bit % 32;
                        piece(here, there, bad, values);
                    }
                }
            }
        }
        if constexpr (!Config::PLANES) repair(wrong, row, column, g, t);
    }

    // Puts the finished elements into the place of the sums.
    GEMM_DEVICE void finish(typename Config::Multiply::Sums& sums, Long row, Long column, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < Config::Multiply::ROWS; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Long here = row + fragment_row<Config::A::ALONG_K>(16 * i, r, g);
                if (here >= gemm_.m) continue;
#pragma unroll
                for (int bit = 0; bit < 4 * Config::Multiply::PAIRS; ++bit) {
                    const Long there = column + 16 * (bit / 4) + column_of(bit % 4, t);
                    if (there >= gemm_.n) continue;
                    const Acc value = finished(element(sums[i][bit / 4], r, bit % 4), here, there);
                    set_element(sums[i][bit / 4], r, bit % 4, value);
                }
            }
        }
    }

    // Calls visit(column - first_column, element) for a lane's finished elements of one row whose columns lie inside.
    // `sums` are those of its 16 rows, `r` says which of the lane's two.
    template <class RowSums, class Visit>
    GEMM_DEVICE void row(const RowSums& sums, int r, Long first_column, int t, const Visit& visit) const {
#pragma unroll
        for (int j = 0; j < Config::Multiply::PAIRS; ++j) {
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const int column = 16 * j + column_of(p, t);
                if (first_column + column < gemm_.n) visit(column, element(sums[j], r, p));
            }
        }
    }

    // Puts what plain float32 has into the place of sums that are infinite or NaN (see `repair`).
    GEMM_DEVICE void mend(typename Config::Multiply::Sums& sums, Long row, Long column, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < Config::Multiply::ROWS; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Long here = row + fragment_row<Config::A::ALONG_K>(16 * i, r, g);
                unsigned wrong = 0;
#pragma unroll
                for (int bit = 0; bit < 4 * Config::Multiply::PAIRS; ++bit) {
                    const bool inside = here < gemm_.m && column + 16 * (bit / 4) + column_of(bit % 4, t) < gemm_.n;
                    if (inside && !finite_element(element(sums[i][bit / 4], r, bit % 4))) wrong |= 1u << bit;
                }
#pragma unroll 1
                while (wrong != 0) {
                    const int which = __ffs(static_cast<int>(wrong)) - 1;
                    wrong &= wrong - 1;
                    const Acc value = plain(here, column + 16 * (which / 4) + column_of(which % 4, t));
#pragma unroll
                    for (int bit = 0; bit < 4 * Config::Multiply::PAIRS; ++bit) {
                        if (bit == which) set_element(sums[i][bit / 4], r, bit % 4, value);
                    }
                }
            }
        }
    }

  private:
    const MmaParams& params_;
    const GemmParams& gemm_;
    Long batch_;
    Long c_, d_;
    bool reads_c_;
    const int* a_exponents_ = nullptr;
    const int* b_exponents_ = nullptr;

    // The columns of a lane in a pair of tiles: 2t, 2t + 1, 8 + 2t, 8 + 2t + 1, or 4t .. 4t + 3.
    static GEMM_DEVICE int first_column(int first, int t) {
        return Config::B::ALONG_K ? 4 * first + 2 * t : 4 * t + first;
    }

    // The p-th of a lane's four columns of a pair of tiles.
    static GEMM_DEVICE int column_of(int p, int t) {
        return Config::B::ALONG_K ? first_column(p & 2, t) + (p & 1) : first_column(0, t) + p;
    }

    // That column's sum in row `r` of two.
    template <class PairSums>
    static GEMM_DEVICE Acc element(const PairSums& sums, int r, int p) {
        const int half = Config::B::ALONG_K ? p / 2 : p % 2, e = Config::B::ALONG_K ? p % 2 : p / 2;
        return make<Acc>(sums[half][0][2 * r + e], sums[half][Config::COMPONENTS - 1][2 * r + e]);
    }
    template <class PairSums>
    static GEMM_DEVICE void set_element(PairSums& sums, int r, int p, Acc value) {
        const int half = Config::B::ALONG_K ? p / 2 : p % 2, e = Config::B::ALONG_K ? p % 2 : p / 2;
        if constexpr (is_complex<Acc>) {
            sums[half][0][2 * r + e] = value.re;
            sums[half][1][2 * r + e] = value.im;
        } else {
            sums[half][0][2 * r + e] = value;
        }
    }

    GEMM_DEVICE Acc finished(Acc value, Long row, Long column) const {
        if constexpr (Config::PLANES) {
            const int exponent = a_exponents_[row] + b_exponents_[column];
            if constexpr (Config::PARTS == 2 && !Config::BFLOAT) value = restored<Config::A::GROUP / 16>(value);
            if constexpr (Config::BFLOAT) {
                value = Power(exponent).times(value);
            } else if constexpr (is_complex<Acc>) {
                value = Acc{times_power(value.re, exponent), times_power(value.im, exponent)};
            } else {
                value = times_power(value, exponent);
            }
        }
        value = scale(value, static_cast<float>(gemm_.alpha[0]), static_cast<float>(gemm_.alpha[1]));
        if (reads_c_) {
            const Acc c = read_element<typename Config::C, Acc, Config::PLANAR>(
                gemm_.c, c_ + row * gemm_.c.row_stride + column * gemm_.c.column_stride);
            value = add(value, scale(c, static_cast<float>(gemm_.beta[0]), static_cast<float>(gemm_.beta[1])));
        }
        return value;
    }

    GEMM_DEVICE Long d_offset(Long row, Long column) const {
        return d_ + row * gemm_.d.row_stride + column * gemm_.d.column_stride;
    }

    // Neighbouring columns of one row, but those of `skipped`.
    template <int N>
    GEMM_DEVICE void piece(Long row, Long column, unsigned skipped, Acc (&values)[N]) const {
        constexpr int WIDTH = sizeof(typename Config::D) * N <= 16 ? N : N / 2;
#pragma unroll
        for (int first = 0; first < N; first += WIDTH) {
#pragma unroll
            for (int p = first; p < first + WIDTH; ++p) {
                if (column + p < gemm_.n) values[p] = finished(values[p], row, column + p);
            }
            if constexpr (Config::VECTOR_D) {
                if (column + first + WIDTH <= gemm_.n && skipped == 0) {
                    write_vector<WIDTH>(d_offset(row, column + first), values + first);
                    continue;
                }
            }
#pragma unroll
            for (int p = first; p < first + WIDTH; ++p) {
                if (column + p < gemm_.n && (skipped >> p & 1u) == 0) {
                    write_element<typename Config::D, Config::PLANAR>(gemm_.d, d_offset(row, column + p), values[p]);
                }
            }
        }
    }

    template <int N>
    GEMM_DEVICE void write_vector(Long offset, const Acc* values) const {
        using D = typename Config::D;
        Vector<D, N> re, im;
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if constexpr (Config::PLANAR) {
                re.at[p] = static_cast<D>(values[p].re);
                im.at[p] = static_cast<D>(values[p].im);
            } else {
                re.at[p] = Narrow<D>::from(values[p]);
            }
        }
        *reinterpret_cast<Vector<D, N>*>(static_cast<D*>(gemm_.d.re) + offset) = re;
        if constexpr (Config::PLANAR) *reinterpret_cast<Vector<D, N>*>(static_cast<D*>(gemm_.d.im) + offset) = im;
    }

    // Elements that are infinite or NaN, by whatever way: plain float32 says what they are. Big times small may have made
    // NaN of an infinity, and rounding up an infinity of a large number.
    template <int WORDS>
    GEMM_DEVICE void repair(const unsigned (&wrong)[WORDS], Long row, Long column, int g, int t) const {
        constexpr int PAIRS = Config::Multiply::PAIRS;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            unsigned left = wrong[word];
#pragma unroll 1
            while (left != 0) {
                const int bit = word * 32 + __ffs(static_cast<int>(left)) - 1;
                left &= left - 1;
                const int p = bit % 4, j = bit / 4 % PAIRS, r = bit / 4 / PAIRS % 2, i = bit / 4 / PAIRS / 2;
                const Long here = row + fragment_row<Config::A::ALONG_K>(16 * i, r, g);
                const Long there = column + 16 * j + column_of(p, t);
                if (there >= gemm_.n) continue;
                write_element<typename Config::D, Config::PLANAR>(
                    gemm_.d, d_offset(here, there), finished(plain(here, there), here, there));
            }
        }
    }

    GEMM_DEVICE Acc plain(Long row, Long column) const {
        const MatrixParams &a = gemm_.a, &b = gemm_.b;
        Long from_a = batch_offset(batch_, gemm_.batch_shape, a.batch_stride) + row * a.row_stride;
        Long from_b = batch_offset(batch_, gemm_.batch_shape, b.batch_stride) + column * b.column_stride;
        Acc sum{};
#pragma unroll 1
        for (Long k = 0; k < gemm_.k; ++k, from_a += a.column_stride, from_b += b.row_stride) {
            Acc x = read_element<typename Config::Stored, Acc, Config::PLANAR>(a, from_a);
            Acc y = read_element<typename Config::Stored, Acc, Config::PLANAR>(b, from_b);
            if constexpr (is_complex<Acc>) {
                if (gemm_.conjugate_a) x.im = -x.im;
                if (gemm_.conjugate_b) y.im = -y.im;
                if (sum.re != sum.re && sum.im != sum.im) break;
            } else {
                if (sum != sum) break;
            }
            multiply_accumulate(sum, x, y);
        }
        return sum;
    }
};
