// From the sums in registers to D = alpha 2^(exponents) sum + beta C, or to the workspace where k is split over grids.
#pragma once

#include "../common/numbers/bits.cuh"
#include "../common/memory/element.cuh"
#include "../common/memory/lanes.cuh"
#include "../common/numbers/power.cuh"
#include "../common/numbers/truncation.cuh"
#include "../common/numbers/types.cuh"
#include "mainloop.cuh"

// Where a thread's values lie: of eight columns, rows `row` and `row` + 8, two neighbours each (PTX ISA 9.7.15.5.1.1).
struct Place {
    Long row, column;
    GEMM_DEVICE Place(const Unit& unit, int block_m, int block_n, int group, int thread)
        : row(static_cast<Long>(unit.tile_m) * block_m + group * 64 + thread / 32 * 16 + thread % 32 / 4),
          column(static_cast<Long>(unit.tile_n) * block_n + thread % 4 * 2) {}
};

// The exponents of a warp's tile, fetched before it multiplies: lanes have its columns between them, in turns, and each
// those of its two rows.
template <class Config>
struct Exponents {
    static constexpr int SMALL = 36;
    static constexpr int USUAL = Config::BFLOAT ? -16 : 0;  // of magnitudes like those that float16 planes have around 0
    int column[Config::BLOCK_N / 32], row[2];

    GEMM_DEVICE void fetch(const WgmmaParams& params, const Work& work, int group, int thread) {
        if constexpr (Config::DIRECT) return;
        const Place place(work.unit, Config::BLOCK_M, Config::BLOCK_N, group, thread);
        const int* const left = exponents_of(params.left, work.at.left, params.m);
        const int* const right = exponents_of(params.right, work.at.right, params.n);
        const Long first = static_cast<Long>(work.unit.tile_n) * Config::BLOCK_N + thread % 32;
#pragma unroll
        for (int i = 0; i < Config::BLOCK_N / 32; ++i) column[i] = first + 32 * i < params.n ? right[first + 32 * i] : 0;
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            row[lower] = place.row + 8 * lower < params.m ? left[place.row + 8 * lower] : 0;
        }
    }

    // Whether one factor, a normal number, undoes the exponents of any row and any column: sums lie between 2^-48 and 2^48,
    // so that the result is normal, too (of bfloat16 planes it may be subnormal, but is rounded once). All lanes of the
    // warp come here.
    GEMM_DEVICE bool are_small() const {
        if constexpr (Config::DIRECT) return true;
        int large = is_large(row[0]) || is_large(row[1]);
#pragma unroll
        for (int i = 0; i < Config::BLOCK_N / 32; ++i) large |= is_large(column[i]);
        return !__any_sync(0xffffffffu, large);
    }
    static GEMM_DEVICE bool is_large(int exponent) { return exponent < USUAL - SMALL || exponent > USUAL + SMALL; }

    // Of a lane's neighbour `e` of two in `eight` columns.
    GEMM_DEVICE int of_column(int eight, int e) const {
        const int lane = eight % 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e;
        if constexpr (Config::SPLIT == 1) return __shfl_sync(0xffffffffu, column[eight / 4], lane);
        int found = 0;  // not known to the compiler: it would put the array into memory
#pragma unroll
        for (int i = 0; i < Config::BLOCK_N / 32; ++i) {
            const int exponent = __shfl_sync(0xffffffffu, column[i], lane);
            found = eight / 4 == i ? exponent : found;
        }
        return found;
    }

    static GEMM_DEVICE const int* exponents_of(const PlaneParams& side, int matrix, Long rows) {
        if constexpr (Config::DIRECT) return nullptr;
        return side.exponents + matrix * rows;
    }
};

// PLAIN: of a tile whose columns are all inside, of small exponents, where alpha is 1. ADDS_C: whether beta may not be 0.
template <class Config, bool PLAIN = false, bool ADDS_C = Config::ADDS_C>
struct Store {
    using Value = typename Config::Value;
    using C = typename Config::C;
    using D = typename Config::D;
    static constexpr bool WIDE = Config::WIDE_D;

    const WgmmaParams& params;
    Long c_offset, d_offset;
    const int *left, *right;
    Exponents<Config> exponents;  // PLAIN
    float alpha_re, alpha_im, beta_re, beta_im;
    bool scales, reads_c;

    GEMM_DEVICE Store(const WgmmaParams& p, const Matrices& at)
        : params(p),
          c_offset(at.c),
          d_offset(at.d),
          left(Exponents<Config>::exponents_of(p.left, at.left, p.m)),
          right(Exponents<Config>::exponents_of(p.right, at.right, p.n)),
          exponents{},
          alpha_re(static_cast<float>(p.alpha[0])),
          alpha_im(static_cast<float>(p.alpha[1])),
          beta_re(static_cast<float>(p.beta[0])),
          beta_im(static_cast<float>(p.beta[1])),
          scales(p.alpha[0] != 1 || p.alpha[1] != 0),
          reads_c(p.beta[0] != 0 || p.beta[1] != 0) {}

    GEMM_DEVICE Store(const Store<Config>& o, const Exponents<Config>& e)
        : params(o.params), c_offset(o.c_offset), d_offset(o.d_offset), left(nullptr), right(nullptr), exponents(e),
          alpha_re(1), alpha_im(0), beta_re(o.beta_re), beta_im(o.beta_im), scales(false), reads_c(o.reads_c) {}

    // Whether the columns of a tile from `first` on can have a store that is PLAIN.
    GEMM_DEVICE bool is_plain(Long first, const Exponents<Config>& exponents) const {
        return !scales && first + Config::BLOCK_N <= params.n && exponents.are_small();
    }

    // What a row has in common.
    struct Row {
        Long c, d;
        int exponent;
        bool inside;
    };
    // `lower`: which of a lane's two.
    GEMM_DEVICE Row row(Long index, int lower) const {
        const bool inside = index < params.m;
        int exponent = 0;
        if constexpr (!Config::DIRECT) exponent = PLAIN ? exponents.row[lower] : inside ? left[index] : 0;
        return {
            c_offset + index * params.c.row_stride, d_offset + index * params.d.row_stride, exponent, inside};
    }

    GEMM_DEVICE Value finished(Value sum, const Row& row, Long column, int exponent) const {
        if constexpr (Config::ACCUMULATIONS > 0) sum = restored<Config::ACCUMULATIONS>(sum);
        Value value = sum;
        if constexpr (!Config::DIRECT) {
            if constexpr (PLAIN) {
                const float factor = power_of_two(row.exponent + exponent);
                value = scale(sum, factor, 0.0f);
            } else {
                value = Power(row.exponent + exponent).times(sum);
            }
        }
        if (!PLAIN && scales) value = scale(value, alpha_re, alpha_im);
        if (ADDS_C && reads_c) {
            const Long offset = row.c + column * params.c.column_stride;
            value = add(value, scale(read_element<C, Value, Config::PLANAR>(params.c, offset), beta_re, beta_im));
        }
        return value;
    }

    // Two neighbouring columns, and whether they lie inside.
    struct Columns {
        Long tile, first;
        bool any, both;
        int exponents[2];
    };
    // In the tile's `eight` columns, of which `tile` are the lane's in the first eight.
    GEMM_DEVICE Columns columns(Long tile, int eight) const {
        const Long first = tile + 8 * eight;
        const bool any = PLAIN || first < params.n, both = PLAIN || first + 1 < params.n;
        if constexpr (Config::DIRECT) return {tile, first, any, both, {0, 0}};
        if constexpr (PLAIN) return {tile, first, any, both, {exponents.of_column(eight, 0), exponents.of_column(eight, 1)}};
        return {tile, first, any, both, {any ? right[first] : 0, both ? right[first + 1] : 0}};
    }

    GEMM_DEVICE void pair(const Row& row, const Columns& columns, Value first, Value second) const {
        if (!row.inside || !columns.any) return;
        Value values[2] = {finished(first, row, columns.first, columns.exponents[0]), second};
        if (columns.both) values[1] = finished(second, row, columns.first + 1, columns.exponents[1]);
        const Long stride = Config::VECTOR_D ? 1 : params.d.column_stride;
        const Long tile = row.d + columns.tile * stride;  // once for all columns: the others are constants apart
        write_piece<D, Config::PLANAR, Config::VECTOR_D>(
            params.d, tile + (columns.first - columns.tile) * stride, stride, values, columns.both ? 2 : 1);
    }

    GEMM_DEVICE void one(Long index, Long column, Value sum) const {
        const Row at = row(index, 0);
        const Value value = finished(sum, at, column, columns(column, 0).exponents[0]);
        write_element<D, Config::PLANAR>(params.d, at.d + column * params.d.column_stride, value);
    }

    // Float16 results of 32 columns from `first` on, `left` of them inside: a quad of lanes has two in each eight, and
    // every lane gets eight neighbours, 16 bytes, so that a quad writes 64. The host says where rows allow it.
    template <class Sum>
    GEMM_DEVICE void quad(const Row& row, Long first, int left, int lane, const Sum& sum) const {
        unsigned words[4];
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
            const int column = 8 * eight + 2 * lane;
            unsigned halves[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool there = row.inside && column + e < left;  // C is read within its bounds
                if (there) halves[e] = Narrow<Half>::from(finished(sum(eight, e), row, first + column + e, 0)).bits;
            }
            words[eight] = halves[0] | halves[1] << 16;
        }
        transpose_quad(words, lane);
        const int column = 8 * lane;
        if (!row.inside || column >= left) return;
        Half* const target = static_cast<Half*>(params.d.re) + row.d + first + column;
        if (column + 8 <= left) {
            *reinterpret_cast<Vector<unsigned, 4>*>(target) =
                Vector<unsigned, 4>{{words[0], words[1], words[2], words[3]}};
            return;
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            if (column + e < left) target[e] = Half{static_cast<unsigned short>(words[e / 2] >> (16 * (e % 2)))};
        }
    }
};

// Sums as they are, (part, matrix, row, column).
template <class Config>
struct StorePartial {
    using Value = typename Config::Value;
    static constexpr bool WIDE = false;
    const WgmmaParams& params;
    Value* target;

    GEMM_DEVICE StorePartial(const WgmmaParams& p, const Unit& unit) : params(p) {
        const Long matrix = static_cast<Long>(unit.part) * p.matrices + unit.batch;
        target = reinterpret_cast<Value*>(p.workspace) + matrix * p.m * p.n;
    }
    struct Row {
        Value* target;
        bool inside;
    };
    GEMM_DEVICE Row row(Long index, int) const { return {target + index * params.n, index < params.m}; }
    GEMM_DEVICE Long columns(Long tile, int eight) const { return tile + 8 * eight; }
    GEMM_DEVICE void pair(const Row& row, Long column, Value first, Value second) const {
        if (!row.inside) return;
        if (column < params.n) row.target[column] = first;
        if (column + 1 < params.n) row.target[column + 1] = second;
    }
};

template <class Config, class To>
GEMM_DEVICE void write_eight(
    const To& to, const typename To::Row& upper, const typename To::Row& lower, Long column, int eight,
    const float (&re)[4], const float (&im)[4]) {
    using Value = typename Config::Value;
    const auto columns = to.columns(column, eight);
    to.pair(upper, columns, make<Value>(re[0], im[0]), make<Value>(re[1], im[1]));
    to.pair(lower, columns, make<Value>(re[2], im[2]), make<Value>(re[3], im[3]));
}

// The sums of a block that had all of its part of k.
template <class Config, class To>
GEMM_DEVICE void write_sums(const To& to, const Place& place, const Sums<Config>& sums) {
    constexpr int IM = Config::COMPONENTS - 1;
    const auto upper = to.row(place.row, 0), lower = to.row(place.row + 8, 1);
    if constexpr (To::WIDE) {
        const int lane = static_cast<int>(threadIdx.x % 4);
        const Long tile = place.column - 2 * lane, after = to.params.n - tile;
        const int columns = after < Config::BLOCK_N ? static_cast<int>(after) : Config::BLOCK_N;
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
#pragma unroll
            for (int first = 0; first < Config::INSTRUCTION_N / 8; first += 4) {
                const int at = part * Config::INSTRUCTION_N + 8 * first, left = columns - at;
                to.quad(upper, tile + at, left, lane, [&](int eight, int e) {
                    return sums[0][part][4 * (first + eight) + e];
                });
                to.quad(lower, tile + at, left, lane, [&](int eight, int e) {
                    return sums[0][part][4 * (first + eight) + 2 + e];
                });
            }
        }
        return;
    }
#pragma unroll
    for (int part = 0; part < Config::PARTS; ++part) {
#pragma unroll
        for (int eight = 0; eight < Config::INSTRUCTION_N / 8; ++eight) {
            const float* const from_re = &sums[0][part][4 * eight];
            const float* const from_im = &sums[IM][part][4 * eight];
            const float re[4] = {from_re[0], from_re[1], from_re[2], from_re[3]};
            const float im[4] = {from_im[0], from_im[1], from_im[2], from_im[3]};
            write_eight<Config>(to, upper, lower, place.column, part * (Config::INSTRUCTION_N / 8) + eight, re, im);
        }
    }
}

// Where k is split over the cluster: every block puts its sums into its own shared memory, where the stages were, and
// adds up all blocks' sums of its share of the columns, in the order of k.
template <class Config>
GEMM_DEVICE void exchange_out(Address memory, int consumer, const Sums<Config>& sums) {
#pragma unroll
    for (int i = 0; i < Config::COMPONENTS; ++i) {
#pragma unroll
        for (int part = 0; part < Config::PARTS; ++part) {
#pragma unroll
            for (int e = 0; e < Config::VALUES; ++e) {
                const int slot = (i * Config::PARTS + part) * Config::VALUES + e;
                store_shared(memory + (slot * Config::CONSUMER_THREADS + consumer) * 4, sums[i][part][e]);
            }
        }
    }
}

// The sums of eight columns, number `eight` of the tile's, over all of the cluster.
template <class Config>
GEMM_DEVICE void exchanged(Address memory, int consumer, int eight, float (&re)[4], float (&im)[4]) {
#pragma unroll
    for (int block = 0; block < Config::SPLIT; ++block) {
#pragma unroll
        for (int component = 0; component < Config::COMPONENTS; ++component) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int slot = component * Config::PARTS * Config::VALUES + 4 * eight + e;
                const float x = load_remote(memory + (slot * Config::CONSUMER_THREADS + consumer) * 4, block);
                float& sum = component == 0 ? re[e] : im[e];
                sum = block == 0 ? x : sum + x;
            }
        }
    }
    if constexpr (Config::COMPONENTS == 1) {
#pragma unroll
        for (int e = 0; e < 4; ++e) im[e] = re[e];
    }
}

template <class Config, class To>
GEMM_DEVICE void exchange_in(const To& to, const Place& place, Address memory, int consumer, unsigned rank) {
    constexpr int EIGHTS = Config::BLOCK_N / 8, SHARE = EIGHTS / Config::SPLIT;
    static_assert(SHARE * Config::SPLIT == EIGHTS, "every block of the cluster finishes as many columns");
    const auto upper = to.row(place.row, 0), lower = to.row(place.row + 8, 1);
#pragma unroll 1
    for (int i = 0; i < SHARE; ++i) {
        const int eight = static_cast<int>(rank) * SHARE + i;
        float re[4], im[4];
        exchanged<Config>(memory, consumer, eight, re, im);
        write_eight<Config>(to, upper, lower, place.column, eight, re, im);
    }
}
