// Sums of a tile: those of several blocks added up, and the result stored.
#pragma once

#include "../common/memory/element.cuh"
#include "items.cuh"

// A thread's elements of a tile, from its first one on: number e of column block j lies in column 8 j + e % 2, in the first
// row or in the second one (e / 2).
struct Sums {
    static constexpr int COLUMNS = Config::BLOCK_M * Config::BLOCK_N / (4 * Config::CONSUMERS);
    float re[COLUMNS][4], im[COLUMNS][4];  // of real numbers the former alone

    // Made of what every complex number was multiplied by last: see once_read.
    GEMM_DEVICE unsigned made_of() const {
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            bits ^= bits_of(re[j][0]) ^ bits_of(re[j][1]) ^ bits_of(im[j][0]) ^ bits_of(im[j][1]);
        }
        return bits;
    }
};

// The larger of two of every lane's numbers.
GEMM_DEVICE int largest(int x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, x, lane);
        x = other > x ? other : x;
    }
    return x;
}

// The worst of what is known of some vectors: the numbers of Deficits.
struct Worst {
    int words[GROUP_WORDS] = {0, 0, 0, 0};

    GEMM_DEVICE void add(int word) {
        const bool re = (word & HAS_REAL) != 0, im = (word & HAS_IMAGINARY) != 0;
        if (!re && !im) return;  // adds nothing to any sum, and loses nothing
        const int small_re = word & 0x7f, small_im = word >> IMAGINARY_AT & 0x7f;
        int best = small_re < small_im ? small_re : small_im, worst = small_re < small_im ? small_im : small_re;
        const int lossy = (re ? small_re : 0) + (im ? small_im : 0);
        if ((word & UNSERVED) == UNSERVED) best = worst = NEVER;
        words[0] = best > words[0] ? best : words[0];
        words[1] = worst > words[1] ? worst : words[1];
        words[2] = lossy > words[2] ? lossy : words[2];
        words[3] |= (re ? 1 : 0) | (im ? 2 : 0);
    }
    // Deficits of the vectors of all lanes of a warp.
    GEMM_DEVICE Deficits over_warp() {
        const int has_re = largest(words[3] & 1), has_im = largest(words[3] & 2);
#pragma unroll
        for (int i = 0; i < 3; ++i) words[i] = largest(words[i]);
        words[3] = has_re | has_im;
        return Deficits(words);
    }
};

// What is known of the vectors of one side of a chunk, by a whole warp.
GEMM_DEVICE Deficits deficits_of_chunk(const VectorWord* counts) {
    Worst worst;
    for (int vector = static_cast<int>(threadIdx.x) % 32; vector < Config::VECTORS; vector += 32) {
        worst.add(counts[vector]);
    }
    return worst.over_warp();
}

// Leaves the sums of one part of `count`; the block that comes last gets those of all, added up in their order,
// whichever it is. `served`: whether planes served all of the part, and then all parts; `place`: where the sums of the
// first part lie; `last`: shared memory. False: another block will come.
GEMM_DEVICE bool gather(
    Sums& sums, bool& served, float* place, int part, int count, unsigned* arrivals, int* last, Meeting& meeting,
    int thread) {
    constexpr unsigned UNSERVED_PART = 1u << 16;
    constexpr int PIECES = Config::PARTS * Sums::COLUMNS, TILE = PIECES * Config::CONSUMERS;
    using Piece = Vector<float, 4>;
    Piece* const pieces = reinterpret_cast<Piece*>(place) + thread;
    const auto part_of = [&](int p) -> float(&)[4] {
        return p % Config::PARTS == 0 ? sums.re[p / Config::PARTS] : sums.im[p / Config::PARTS];
    };
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const float(&from)[4] = part_of(p);
        pieces[static_cast<Long>(part) * TILE + p * Config::CONSUMERS] = Piece{{from[0], from[1], from[2], from[3]}};
    }
    __threadfence();
    meeting.meet(thread);
    if (thread == 0) {
        const unsigned own = served ? 1u : UNSERVED_PART + 1u, all = atomicAdd(arrivals, own) + own;
        *last = all % UNSERVED_PART != static_cast<unsigned>(count) ? 0 : all < UNSERVED_PART ? 1 : 2;
    }
    meeting.meet(thread);
    if (*last == 0) return false;
    served = *last == 1;
    __threadfence();
    sums = {};
#pragma unroll(Config::TALL ? 1 : 2)
    for (int from = 0; from < count; ++from) {
        Piece piece[PIECES];
#pragma unroll
        for (int p = 0; p < PIECES; ++p) piece[p] = pieces[static_cast<Long>(from) * TILE + p * Config::CONSUMERS];
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            float(&to)[4] = part_of(p);
#pragma unroll
            for (int e = 0; e < 4; ++e) to[e] += piece[p].at[e];
        }
    }
    return true;
}

// The sums of all splits of a tile. False: another block has them.
GEMM_DEVICE bool gather_splits(
    const FusedParams& params, const Item& item, unsigned number, Sums& sums, bool& served, int* last, Meeting& meeting,
    int thread) {
    const Long tile = number / params.splits;
    constexpr Long TILE = 4 * Config::PARTS * Sums::COLUMNS * Config::CONSUMERS;
    const int groups = (params.splits + params.together - 1) / params.together, group = item.split / params.together;
    const int first = group * params.together, left = params.splits - first;
    unsigned* const arrivals = params.arrivals + tile * (groups + 1);
    float* const place = params.partial + (tile * params.splits + first) * TILE;
    const int count = left < params.together ? left : params.together;
    if (!gather(sums, served, place, item.split - first, count, arrivals + group, last, meeting, thread)) return false;
    if (groups == 1) return true;
    float* const grouped = params.grouped + tile * groups * TILE;
    return gather(sums, served, grouped, group, groups, arrivals + groups, last, meeting, thread);
}

// A thread's elements of two rows `apart`, from (in_row, first_column) of the tile on. WHOLE: all lie inside the matrix.
template <bool WHOLE, bool READS_C>
GEMM_DEVICE void store_rows(
    const GemmParams& gemm, const Item& item, const Sums& sums, int in_row, int first_column, int apart) {
    const Long d_stride = GEMM_VECTOR_D ? 1 : gemm.d.column_stride;
    Long d_at = offset_of(item.batch, gemm, gemm.d) + (item.row() + in_row) * gemm.d.row_stride +
                (item.column() + first_column) * d_stride;
    Long c_at = 0;
    if constexpr (READS_C) {
        c_at = offset_of(item.batch, gemm, gemm.c) + (item.row() + in_row) * gemm.c.row_stride +
               (item.column() + first_column) * gemm.c.column_stride;
    }
    const float alpha[2] = {static_cast<float>(gemm.alpha[0]), static_cast<float>(gemm.alpha[1])};
    const float beta[2] = {static_cast<float>(gemm.beta[0]), static_cast<float>(gemm.beta[1])};
#pragma unroll
    for (int h = 0; h < 2; ++h, d_at += apart * gemm.d.row_stride, c_at += READS_C ? apart * gemm.c.row_stride : 0) {
        if (!WHOLE && in_row + apart * h >= item.rows(gemm)) continue;
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) {
            const int inside = WHOLE ? 2 : item.columns(gemm) - first_column - 8 * j;
            if (inside <= 0) continue;
            Value values[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                values[e] = scale(make<Value>(sums.re[j][2 * h + e], sums.im[j][2 * h + e]), alpha[0], alpha[1]);
                if (READS_C && e < inside) {
                    const Value c = read_element<GEMM_TYPE_C, Value, false>(
                        gemm.c, c_at + (8 * j + e) * gemm.c.column_stride);
                    values[e] = add(values[e], scale(c, beta[0], beta[1]));
                }
            }
            write_piece<GEMM_TYPE_D, false, GEMM_VECTOR_D>(gemm.d, d_at + 8 * j * d_stride, d_stride, values, inside);
        }
    }
}

// `in_row`, `first_column`: of the thread's first element; its second row lies `apart` rows below.
GEMM_DEVICE void store(
    const GemmParams& gemm, const Item& item, const Sums& sums, int in_row, int first_column, int apart = 8) {
    if (gemm.beta[0] != 0 || gemm.beta[1] != 0) {
        store_rows<false, true>(gemm, item, sums, in_row, first_column, apart);
    } else if (item.rows(gemm) == Config::BLOCK_M && item.columns(gemm) == Config::BLOCK_N) {
        store_rows<true, false>(gemm, item, sums, in_row, first_column, apart);
    } else {
        store_rows<false, false>(gemm, item, sums, in_row, first_column, apart);
    }
}
