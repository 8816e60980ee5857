// Vectors that are short enough for a block to hold some of them whole.
//
// A unit is STRIP / element neighbouring vectors. A block fetches it into its shared memory, later ones while it converts this
// one, and each of its warps has OWN of the vectors to itself: LANES lanes have one, each RUN of its steps of k at a time; what
// they have to agree on, its largest magnitude and what is counted of it, goes from lane to lane. Vectors along memory are
// fetched by the warp that converts them, strips across it by the whole block, line by line. What is counted is written down
// by one of the warps, while the others go on. Blocks take units in turn, so that those that are fetched at one time lie next to
// each other in memory; all of A come before those of B.
#pragma once

#include "../common/memory/lanes.cuh"
#include "source.cuh"

namespace alone {

constexpr int RUNS = GEMM_HELD_K > 32 * RUN ? GEMM_HELD_K / (32 * RUN) : 1;  // of a lane; no vector is longer than GEMM_HELD_K
constexpr int LANES = GEMM_HELD_K / RUN / RUNS;                              // that have a vector
constexpr int VECTORS = GEMM_STRIP / (COMPLEX ? 8 : 4);                      // of a unit
constexpr int OWN = VECTORS / WARPS;                                         // of a warp
constexpr int AT_ONCE = 32 / LANES, TURNS = OWN / AT_ONCE;                   // vectors in a turn of a warp
constexpr int LINE = GEMM_HELD_K / WIDTH;                                    // pieces of a vector
constexpr int ROW = GEMM_STRIP / 16;                                         // pieces of a unit at one step of k
constexpr int STAGES = GEMM_STAGES;
static_assert(LANES <= 32 && LANES * RUNS * RUN == GEMM_HELD_K, "whole runs of lanes");
static_assert(TURNS * AT_ONCE * WARPS == VECTORS && TURNS <= LANES && ROW <= 16, "whole turns of all warps, a lane for each");

static_assert(GROUP % VECTORS == 0, "a unit lies in one group");

using Unit = Piece[VECTORS * LINE];

// What is found of a vector.
struct Found {
    int counts[COUNTS];
    unsigned largest[PARTS];
};

struct Shared {
    Unit unit[STAGES];
    Found found[2][VECTORS];  // of this unit and of the one before
};

// A unit of an operand, of which blocks take those that are `step` apart: no divisions but for the first.
struct Turn {
    int matrix, unit, units, step_matrix, step_unit;

    GEMM_DEVICE Turn(const SplitOperandParams& operand, int number, int step) : units(static_cast<int>(operand.units)) {
        matrix = number / units, unit = number - matrix * units;
        step_matrix = step / units, step_unit = step - step_matrix * units;
    }
    GEMM_DEVICE Place place() const { return {matrix, unit * VECTORS}; }
    GEMM_DEVICE void next() {
        matrix += step_matrix, unit += step_unit;
        if (unit >= units) unit -= units, ++matrix;
    }
};

template <bool SIDE_B, bool ALONG, bool VECTOR>
struct Split {
    const SplitOperandParams& operand;
    Shared& shared;
    const int thread;

    static constexpr int TOGETHER = ALONG ? 32 : THREADS;  // threads that fetch together
    static constexpr int LOADS = (ALONG ? OWN : VECTORS) * LINE / TOGETHER;
    static_assert(LOADS * TOGETHER == (ALONG ? OWN : VECTORS) * LINE, "as many for each");

    // Pieces that eight lanes read at once lie in different banks: those of vectors along memory are a run apart, those
    // of vectors across it RUN rows.
    static GEMM_DEVICE int slot(int piece) {
        if constexpr (ALONG) return piece ^ (piece >> 3 & (PIECES - 1));
        return piece ^ (piece / ROW / RUN & 7);
    }

    GEMM_DEVICE int lane() const { return thread % 32; }
    GEMM_DEVICE int first_vector() const { return thread / 32 * OWN; }

    GEMM_DEVICE void begin(Turn& turn, int stage) const {
        if (turn.matrix < operand.matrices) fetch_unit(turn.place(), shared.unit[stage]);
        copy_commit();
        turn.next();
    }

    GEMM_DEVICE void fetch_unit(const Place& at, Piece* to) const {
        const Long across = VECTOR && !ALONG ? 1 : operand.source.row_stride;
        const Long along = VECTOR && ALONG ? 1 : operand.source.column_stride;
        const Long base = offset_of(operand, at);
        const int rows = operand.rows - at.row < VECTORS ? static_cast<int>(operand.rows - at.row) : VECTORS;
        const int k = static_cast<int>(operand.k), first = ALONG ? lane() + first_vector() * LINE : thread;
        if (ASYNC<VECTOR> && rows == VECTORS && k == GEMM_HELD_K) {
            fetch_whole(to, base, ALONG ? across : along, first);
            return;
        }
#pragma unroll 2
        for (int i = 0; i < LOADS; ++i) {
            const int piece = i * TOGETHER + first;
            int vector, step, count;
            if constexpr (ALONG) {
                vector = piece / LINE, step = piece % LINE * WIDTH;
                count = vector < rows ? k - step : 0;
            } else {
                vector = piece % ROW * WIDTH, step = piece / ROW;
                count = step < k ? rows - vector : 0;
            }
            const Source source(operand.source, count > 0 ? base + vector * across + step * along : base);
            fetch<VECTOR>(to + slot(piece), source, 0, ALONG ? along : across, count);
        }
    }

    // A unit of which nothing lies outside, by addresses that differ by constants and multiples of `stride`.
    GEMM_DEVICE void fetch_whole(Piece* to, Long base, Long stride, int first) const {
        constexpr int NEXT = ALONG ? LINE : ROW;  // pieces that follow each other in memory
        constexpr int STEP = NEXT < TOGETHER ? TOGETHER / NEXT : 1, PARTS_OF_LINE = NEXT < TOGETHER ? 1 : NEXT / TOGETHER;
        static_assert(STEP * NEXT == PARTS_OF_LINE * TOGETHER, "whole lines, or parts of one");
        Source source(operand.source, base + first / NEXT * stride + first % NEXT * WIDTH);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int part = i % PARTS_OF_LINE;
            copy_async(to + slot(i * TOGETHER + first), source.re + part * TOGETHER * 4);
            if (part + 1 == PARTS_OF_LINE) source.step(STEP * stride);
        }
    }

    // Units from `first` on, `step` apart, of all matrices.
    GEMM_DEVICE void run(int first, int step, int* status) const {
        Turn turn(operand, first, step), ahead = turn;
#pragma unroll
        for (int stage = 0; stage + 1 < STAGES; ++stage) begin(ahead, stage);
        int stage = 0, number = 0;
        for (; turn.matrix < operand.matrices; turn.next(), ++number) {
            begin(ahead, stage == 0 ? STAGES - 1 : stage - 1);
            copy_wait<STAGES - 1>();
            __syncthreads();
            convert(turn.place(), shared.unit[stage], shared.found[number & 1]);
            __syncthreads();  // all have read the unit
            if (thread / 32 == number % WARPS) write_down(turn.place(), shared.found[number & 1], status);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        copy_wait<0>();
        __syncthreads();  // the other operand's units come to the same memory
    }

    GEMM_DEVICE void convert(const Place& at, const Piece* unit, Found (&found)[VECTORS]) const {
        const int lane = this->lane(), step = lane % LANES * RUN, mine = first_vector() + lane / LANES;
        const Long plane = operand.rows * operand.pitch;
        Half* to = planes_of(operand, {at.matrix, at.row + mine}) + step;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            const int vector = mine + turn * AT_ONCE;
            float re[RUN], im[RUN] = {};
            float largest[PARTS] = {};
#pragma unroll 1
            for (int run = RUNS; run-- > 0;) {
                load(unit, vector, step + run * 32 * RUN, re, im);
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    largest[0] = larger_magnitude(largest[0], fabsf(re[i]));
                    if constexpr (COMPLEX) largest[PARTS - 1] = larger_magnitude(largest[PARTS - 1], fabsf(im[i]));
                }
            }
            unsigned most[PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) most[p] = largest_of_lanes(bits_of(largest[p]));
            const Scaling by = scaling_for(larger(most[0], most[PARTS - 1]));
            Tally tally = {};
#pragma unroll 1
            for (int run = 0; run < RUNS; ++run) {  // the first one is still there
                if (run > 0) load(unit, vector, step + run * 32 * RUN, re, im);
                Vector<unsigned, RUN / 2> words[PLANES];
                convert_run<SIDE_B>(re, im, by, operand, words, tally);
                if (at.row + vector < operand.rows && step + run * 32 * RUN < operand.pitch) {
                    store_run(to + run * 32 * RUN, plane, words);
                }
            }
            to += AT_ONCE * operand.pitch;
            tally.unpack();
            sum_of_all_lanes(tally.count);
            if (lane % LANES == 0) {
#pragma unroll
                for (int i = 0; i < COUNTS; ++i) found[vector].counts[i] = tally.count[i];
#pragma unroll
                for (int p = 0; p < PARTS; ++p) found[vector].largest[p] = most[p];
            }
        }
    }

    // By a whole warp.
    GEMM_DEVICE void write_down(const Place& at, const Found (&found)[VECTORS], int* status) const {
        const int padding = GEMM_HELD_K - static_cast<int>(operand.k);
#pragma unroll
        for (int first = 0; first < VECTORS; first += 32) {
            const int vector = first + lane(), row = at.row + vector;
            const bool exists = vector < VECTORS && row < operand.rows;
            const Found& of = found[exists ? vector : 0];
            if (exists) {
                operand.exponents[at.matrix * operand.rows + row] = undo_exponent(larger(of.largest[0], of.largest[PARTS - 1]));
            }
            if constexpr (BFLOAT) {
                if (exists) record(operand, at.matrix, row, of.counts, of.largest, padding, status);
            } else {
                Deficit deficit = {};
                if (exists) deficit = deficit_of(of.counts, of.largest, padding);
                const int doubts = __popc(__ballot_sync(ALL_LANES, deficit.is_doubtful(operand.k)));
                deficit.best = largest_of_warp(deficit.best);
                deficit.worst = largest_of_warp(deficit.worst);
                deficit.lossy = largest_of_warp(deficit.lossy);
                const bool re = __any_sync(ALL_LANES, deficit.present & 1), im = __any_sync(ALL_LANES, deficit.present & 2);
                deficit.present = (re ? 1 : 0) | (im ? 2 : 0);
                if (lane() == 0) deficit.raise_group(operand, at.matrix, row, doubts);
            }
        }
    }

    static GEMM_DEVICE int largest_of_warp(int count) {
#if defined(GEMM_CUDA)
        return __reduce_max_sync(ALL_LANES, count);
#else
#pragma unroll
        for (int other = 1; other < 32; other *= 2) {
            const int more = __shfl_xor_sync(ALL_LANES, count, other);
            count = more > count ? more : count;
        }
        return count;
#endif
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

    static GEMM_DEVICE unsigned sum_of_lanes(unsigned counts) {
#if defined(GEMM_CUDA)
        if constexpr (LANES == 32) return __reduce_add_sync(ALL_LANES, counts);
#endif
#pragma unroll
        for (int other = 1; other < LANES; other *= 2) counts += __shfl_xor_sync(ALL_LANES, counts, other);
        return counts;
    }

    // Sums the counts of all lanes that have a vector, as many in one word as it holds. None exceeds twice GEMM_HELD_K.
    static GEMM_DEVICE void sum_of_all_lanes(int (&counts)[COUNTS]) {
        constexpr int BITS = 2 * GEMM_HELD_K < 1 << 10 ? 10 : 16, AT_ONCE = 32 / BITS;
        static_assert(2 * GEMM_HELD_K < 1 << BITS, "so many bits hold a count");
#pragma unroll
        for (int first = 0; first < COUNTS; first += AT_ONCE) {
            unsigned word = 0;
#pragma unroll
            for (int i = first; i < COUNTS && i < first + AT_ONCE; ++i) word |= static_cast<unsigned>(counts[i]) << BITS * (i - first);
            word = sum_of_lanes(word);
#pragma unroll
            for (int i = first; i < COUNTS && i < first + AT_ONCE; ++i) {
                counts[i] = static_cast<int>(word >> BITS * (i - first) & ((1u << BITS) - 1));
            }
        }
    }

    // A lane's run of a vector, from `step` on.
    static GEMM_DEVICE void load(const Piece* unit, int vector, int step, float (&re)[RUN], float (&im)[RUN]) {
        if constexpr (ALONG) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const Piece piece = unit[slot(vector * LINE + step / WIDTH + i)];
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    re[i * WIDTH + e] = piece.at[COMPLEX ? 2 * e : e];
                    if constexpr (COMPLEX) im[i * WIDTH + e] = piece.at[2 * e + 1];
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                const float* const piece = unit[slot((step + i) * ROW + vector / WIDTH)].at;
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

// This block's units of an operand, which are `before` and following ones of all that blocks take in turn. Returns the number
// of its next one.
template <bool SIDE_B, bool ALONG, bool VECTOR>
GEMM_DEVICE Long split_operand(const SplitOperandParams& operand, Long before, Long number, Shared& shared, int* status) {
    const Long units = operand.units * operand.matrices, first = number - before;
    const int step = static_cast<int>(gridDim.x);
    if (first >= units) return number;
    Split<SIDE_B, ALONG, VECTOR>{operand, shared, static_cast<int>(threadIdx.x)}.run(static_cast<int>(first), step, status);
    return number + (units - first + step - 1) / step * step;
}

}  // namespace alone
