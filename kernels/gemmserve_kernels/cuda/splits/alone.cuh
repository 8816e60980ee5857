// Short vectors: a warp has a few of them to itself, whole, and asks no other.
//
// A unit is STRIP / element neighbouring vectors. The warp fetches it into its own shared memory, the next one while it
// converts this one. LANES lanes have a vector, each RUN of its steps of k; what they have to agree on, its largest
// magnitude and what is counted of it, goes from lane to lane. Warps take equal parts of all units of both operands, those of A
// before those of B.
#pragma once

#include "../common/memory/lanes.cuh"
#include "source.cuh"

namespace alone {

constexpr int LANES = GEMM_HELD_K / RUN;  // that have a vector; none is longer than GEMM_HELD_K
constexpr int VECTORS = GEMM_STRIP / (COMPLEX ? 8 : 4);  // of a unit
constexpr int ROW = GEMM_STRIP / 16;      // pieces of a unit at one step of k
constexpr int TURNS = VECTORS * LANES / 32;
constexpr int LOADS = VECTORS * LANES * PIECES / 32;
constexpr int STAGES = GEMM_STAGES;
static_assert(LANES <= 32 && VECTORS * LANES % 32 == 0 && ROW <= 16, "whole turns of a warp");
static_assert(TURNS <= LANES, "a lane for each vector of a unit");

using Unit = Piece[STAGES][VECTORS * LANES * PIECES];

struct Shared {
    Unit unit[WARPS];
};

template <bool SIDE_B, bool ALONG, bool VECTOR>
struct Split {
    const SplitOperandParams& operand;
    Unit& unit;
    const int lane;

    // Pieces that eight lanes read at once lie in different banks: those of vectors along memory are a run apart, those
    // of vectors across it RUN rows.
    static GEMM_DEVICE int slot(int piece) {
        if constexpr (ALONG) return piece ^ (piece >> 3 & (PIECES - 1));
        return piece ^ (piece / ROW / RUN & 7);
    }

    GEMM_DEVICE void begin(const Place& at, int stage) const {
        const Long across = VECTOR && !ALONG ? 1 : operand.source.row_stride;
        const Long along = VECTOR && ALONG ? 1 : operand.source.column_stride;
        const Long base = offset_of(operand, at);
        const int rows = operand.rows - at.row < VECTORS ? static_cast<int>(operand.rows - at.row) : VECTORS;
        const int k = static_cast<int>(operand.k);
        Piece* const to = unit[stage];
        if (ASYNC<VECTOR> && rows == VECTORS && k == LANES * RUN) {
            fetch_whole(to, base, ALONG ? across : along);
            copy_commit();
            return;
        }
#pragma unroll 4
        for (int i = 0; i < LOADS; ++i) {
            const int piece = i * 32 + lane;
            int vector, step, count;
            if constexpr (ALONG) {
                vector = piece / (LANES * PIECES), step = piece % (LANES * PIECES) * WIDTH;
                count = vector < rows ? k - step : 0;
            } else {
                vector = piece % ROW * WIDTH, step = piece / ROW;
                count = step < k ? rows - vector : 0;
            }
            const Source source(operand.source, count > 0 ? base + vector * across + step * along : base);
            fetch<VECTOR>(to + slot(piece), source, 0, ALONG ? along : across, count);
        }
        copy_commit();
    }

    // A unit of which nothing lies outside, by addresses that differ by constants and multiples of `stride`.
    GEMM_DEVICE void fetch_whole(Piece* to, Long base, Long stride) const {
        constexpr int LINE = ALONG ? LANES * PIECES : ROW;  // pieces that follow each other in memory
        constexpr int STEP = LINE < 32 ? 32 / LINE : 1, PARTS_OF_LINE = LINE < 32 ? 1 : LINE / 32;
        Source source(operand.source, base + lane / LINE * stride + lane % LINE * WIDTH);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int part = i % PARTS_OF_LINE;
            copy_async(to + slot(i * 32 + lane), source.re + part * 32 * 4);
            if (part + 1 == PARTS_OF_LINE) source.step(STEP * stride);
        }
    }

    // Units `first` to `last` of all matrices.
    GEMM_DEVICE void run(int first, int last, int* status) const {
        Place at = place_of(operand, first, VECTORS);
        if (STAGES > 1 && first < last) begin(at, 0);
        for (int number = first; number < last; ++number) {
            const int stage = STAGES > 1 ? (number - first) % STAGES : 0;
            const Place next = place_of(operand, number + 1, VECTORS);
            if constexpr (STAGES > 1) {
                if (number + 1 < last) begin(next, (stage + 1) % STAGES);
                else copy_commit();
                copy_wait<1>();
            } else {
                begin(at, 0);
                copy_wait<0>();
            }
            __syncwarp();
            convert(at, stage, status);
            __syncwarp();  // all lanes have read the unit
            at = next;
        }
        copy_wait<0>();
    }

    GEMM_DEVICE void convert(const Place& at, int stage, int* status) const {
        constexpr int AT_ONCE = 32 / LANES;  // vectors in a turn
        const int step = lane % LANES * RUN;
        const Long plane = operand.rows * operand.pitch;
        Half* to = planes_of(operand, {at.matrix, at.row + lane / LANES}) + step;
        unsigned kept[PARTS] = {}, kept_counts = 0;  // of the turn that this lane writes down
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            const int vector = turn * AT_ONCE + lane / LANES;
            float re[RUN], im[RUN] = {};
            load(stage, vector, step, re, im);
            float largest[PARTS] = {};
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                largest[0] = larger_magnitude(largest[0], fabsf(re[i]));
                if constexpr (COMPLEX) largest[PARTS - 1] = larger_magnitude(largest[PARTS - 1], fabsf(im[i]));
            }
            unsigned most[PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) most[p] = largest_of_lanes(bits_of(largest[p]));
            Vector<unsigned, RUN / 2> words[PLANES];
            Tally tally = {};
            convert_run<SIDE_B>(re, im, scaling_for(larger(most[0], most[PARTS - 1])), operand, words, tally);
            if (at.row + vector < operand.rows && step < operand.pitch) store_run(to, plane, words);
            to += AT_ONCE * operand.pitch;
            tally.unpack();
            // All counts in one word: none exceeds twice GEMM_HELD_K.
            static_assert(2 * GEMM_HELD_K < 1 << 10, "ten bits hold a count");
            unsigned counts = 0;
#pragma unroll
            for (int i = 0; i < COUNTS; ++i) counts |= static_cast<unsigned>(tally.count[i]) << 10 * i;
            counts = sum_of_all_lanes(counts);
            if (lane % LANES == turn) {
                kept_counts = counts;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) kept[p] = most[p];
            }
        }
        const int vector = lane % LANES * AT_ONCE + lane / LANES;
        if (lane % LANES < TURNS && at.row + vector < operand.rows) {
            operand.exponents[at.matrix * operand.rows + at.row + vector] = undo_exponent(larger(kept[0], kept[PARTS - 1]));
            int counts[COUNTS];
#pragma unroll
            for (int i = 0; i < COUNTS; ++i) counts[i] = static_cast<int>(kept_counts >> 10 * i & 1023u);
            record(
                operand, at.matrix, at.row + vector, counts, kept, GEMM_HELD_K - static_cast<int>(operand.k), status);
        }
    }

    // The largest of the lanes that have a vector.
    static GEMM_DEVICE unsigned largest_of_lanes(unsigned most) {
#if defined(GEMM_CUDA)
        if constexpr (LANES == 32) return __reduce_max_sync(ALL_LANES, most);
#endif
#pragma unroll
        for (int other = 1; other < LANES; other *= 2) most = larger(most, __shfl_xor_sync(ALL_LANES, most, other));
        return most;
    }

    static GEMM_DEVICE unsigned sum_of_all_lanes(unsigned counts) {
#if defined(GEMM_CUDA)
        if constexpr (LANES == 32) return __reduce_add_sync(ALL_LANES, counts);
#endif
#pragma unroll
        for (int other = 1; other < LANES; other *= 2) counts += __shfl_xor_sync(ALL_LANES, counts, other);
        return counts;
    }

    // A lane's steps of a vector.
    GEMM_DEVICE void load(int stage, int vector, int step, float (&re)[RUN], float (&im)[RUN]) const {
        const Piece* const from = unit[stage];
        if constexpr (ALONG) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const Piece piece = from[slot(vector * (LANES * PIECES) + step / WIDTH + i)];
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    re[i * WIDTH + e] = piece.at[COMPLEX ? 2 * e : e];
                    if constexpr (COMPLEX) im[i * WIDTH + e] = piece.at[2 * e + 1];
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                const float* const piece = from[slot((step + i) * ROW + vector / WIDTH)].at;
                if constexpr (COMPLEX) {
                    const auto both = *reinterpret_cast<const Vector<float, 2>*>(piece + vector % WIDTH * 2);
                    re[i] = both.at[0], im[i] = both.at[1];
                } else {
                    re[i] = piece[vector % WIDTH];
                }
            }
        }
    }
};

// This warp's part of an operand's units, which are `before` and following ones of `all`.
template <bool SIDE_B, bool ALONG, bool VECTOR>
GEMM_DEVICE void split_operand(const SplitOperandParams& operand, Long before, Long first, Long last, Unit& unit, int* status) {
    const Long units = operand.units * operand.matrices;
    const Long from = first > before ? first - before : 0, to = last - before < units ? last - before : units;
    if (from >= to) return;
    Split<SIDE_B, ALONG, VECTOR>{operand, unit, static_cast<int>(threadIdx.x) % 32}.run(
        static_cast<int>(from), static_cast<int>(to), status);
}

}  // namespace alone
