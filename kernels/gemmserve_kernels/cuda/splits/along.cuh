// Vectors that lie along memory. A team of threads has the same steps of k of one vector after another, while the next
// ones are on their way; where one block is too short, blocks of a cluster share a vector.
#pragma once

#include "queue.cuh"

namespace along {

constexpr int HELD = GEMM_HELD_ALONG;  // runs of a thread
constexpr int RANKS = GEMM_RANKS;      // blocks that share a vector
constexpr bool WHOLE = GEMM_WHOLE_ALONG;  // whether they hold all of it
constexpr int TEAM = GEMM_TEAM;        // threads of a block that share one
constexpr int TEAMS = THREADS / TEAM, TEAM_WARPS = TEAM / 32;
constexpr int STEP = (RANKS > 1 ? CLUSTER / RANKS : 1) * TEAMS;  // vectors taken at a time
constexpr int STAGES = WHOLE ? GEMM_STAGES : 1;
constexpr int TILE = RANKS * TEAM * HELD * RUN;  // steps of k
static_assert(RANKS == 1 || TEAM == THREADS, "several blocks or a part of one");

struct Shared {
    Piece stage[STAGES][HELD * WARPS][32 * PIECES];  // each warp reads what it has fetched: no barriers
    float largest[2][WARPS][PARTS];
    int tally[2][WARPS][COUNTS];
    int next[2];
};

template <bool SIDE_B, bool VECTOR>
struct Split {
    const SplitOperandParams& operand;
    Shared& shared;
    const int lane, warp, team, rank;

    GEMM_DEVICE Split(const SplitOperandParams& o, Shared& s, int thread)
        : operand(o), shared(s), lane(thread % 32), warp(thread / 32), team(thread / TEAM + teams_before()),
          rank(RANKS > 1 ? block_rank() % RANKS : 0) {}

    static GEMM_DEVICE int teams_before() { return RANKS > 1 ? block_rank() / RANKS : 0; }

    // Where run `h` of lane 0 begins.
    GEMM_DEVICE int chunk(int tile, int h) const {
        return tile * TILE + ((rank * HELD + h) * TEAM_WARPS + warp % TEAM_WARPS) * (32 * RUN);
    }
    // Pieces that eight lanes read at once, a run apart, lie in different banks.
    static GEMM_DEVICE int slot(int piece) { return piece ^ (piece >> 3 & (PIECES - 1)); }

    GEMM_DEVICE Place place(int unit) const {
        Place at = place_of(operand, unit, STEP);
        at.row += team;
        return at;
    }

    // A tile of the vector of a unit into a stage; nothing past the last unit.
    GEMM_DEVICE void begin(const Place& at, int tile, int stage, bool exists) const {
        if (exists) {
            const Long stride = VECTOR ? 1 : operand.source.column_stride;
            const Long base = offset_of(operand, at);
            const int length = at.row < operand.rows ? static_cast<int>(operand.k) : 0;
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
                const int k = chunk(tile, h) + lane * WIDTH;
                const Source source(operand.source, base + k * stride);
                Piece* const to = shared.stage[stage][h * WARPS + warp];
                if (ASYNC<VECTOR> && chunk(tile, h) + 32 * RUN <= length) {
#pragma unroll
                    for (int i = 0; i < PIECES; ++i) copy_async(to + slot(i * 32 + lane), source.re + i * 32 * 4);
                    continue;
                }
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    fetch<VECTOR>(
                        to + slot(i * 32 + lane), source, i * 32 * WIDTH * stride, stride, length - k - i * 32 * WIDTH);
                }
            }
        }
        copy_commit();
    }

    GEMM_DEVICE void run(bool first, int group, int* status, int* counter) {
        using Units = Queue<WHOLE ? GEMM_STAGES : 1, (RANKS > 1)>;
        const bool together = RANKS > 1;
        const int own = together ? group : group * CLUSTER + block_rank();
        const int groups = operand.groups * (together ? 1 : CLUSTER);
        Units units(operand.units * operand.matrices, operand.chunk, first, own, groups, counter, shared.next, warp * 32 + lane);
        const int tiles = WHOLE ? 1 : static_cast<int>((operand.pitch + TILE - 1) / TILE);
        if constexpr (WHOLE) {
#pragma unroll
            for (int s = 0; s < STAGES; ++s) begin(place(units.number[s]), 0, s, units.number[s] < units.all);
        }
        Place before = {};
        float largest[PARTS] = {};
        int stage = 0;
        int step = 0;
        for (; !units.done(); ++step) {
            const int parity = step & 1;
            const Place at = place(units.current());
            Piece most = {};
            for (int tile = 0; tile < tiles; ++tile) {
                if constexpr (!WHOLE) begin(at, tile, 0, true);
                copy_wait<STAGES - 1>();
                __syncwarp();
#pragma unroll
                for (int h = 0; h < HELD; ++h) {
#pragma unroll
                    for (int i = 0; i < PIECES; ++i) raise(most, shared.stage[stage][h * WARPS + warp][i * 32 + lane]);
                }
                if constexpr (!WHOLE) __syncwarp();
            }
            share_largest(most, parity);
            units.publish(step);
            Units::barrier();
            if (step > 0) finish(before, largest, parity ^ 1, status);
            units.advance(step);
            find_largest(parity, largest);
            before = at;
            const Scaling by = scaling_for(larger(bits_of(largest[0]), bits_of(largest[PARTS - 1])));
            Tally tally = {};
            for (int tile = tiles; tile-- > 0;) {
                if constexpr (!WHOLE) {
                    if (tile + 1 < tiles) {
                        begin(at, tile, 0, true);
                        copy_wait<0>();
                        __syncwarp();
                    }
                }
                convert(at, tile, stage, by, tally);
                __syncwarp();  // all lanes have read the stage
            }
            if constexpr (WHOLE) {
                const int coming = units.last();
                begin(place(coming), 0, stage, coming < units.all);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            const int sum = sum_of_lanes<32>(tally, lane);
            if (lane < COUNTS) shared.tally[parity][warp][lane] = sum;
        }
        copy_wait<0>();
        if (step == 0) return;
        Units::barrier();
        finish(before, largest, (step - 1) & 1, status);
        Units::barrier();  // shared memory may be read no more, and serve the other operand
    }

    GEMM_DEVICE void share_largest(const Piece& most, int parity) const {
        float first, second;  // of even and odd floats
        if constexpr (COMPLEX) {
            first = larger_magnitude(most.at[0], most.at[2]), second = larger_magnitude(most.at[1], most.at[3]);
        } else {
            first = second = larger_magnitude(larger_magnitude(most.at[0], most.at[1]), larger_magnitude(most.at[2], most.at[3]));
        }
        const bool odd = lane & 1;
        float mine = odd ? second : first;
        mine = larger_magnitude(mine, __shfl_xor_sync(ALL_LANES, odd ? first : second, 1));
#pragma unroll
        for (int step = 2; step < 32; step *= 2) mine = larger_magnitude(mine, __shfl_xor_sync(ALL_LANES, mine, step));
        if (lane < PARTS) shared.largest[parity][warp][lane] = mine;
    }

    // The largest magnitudes of the vector's real and imaginary parts, in all threads of its team.
    GEMM_DEVICE void find_largest(int parity, float (&largest)[PARTS]) const {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) largest[p] = 0.0f;
        if constexpr (RANKS > 1) {
            const int base = block_rank() / RANKS * RANKS;
#pragma unroll
            for (int i = 0; i < (RANKS * WARPS + 31) / 32; ++i) {
                const int w = i * 32 + lane;
                if (w >= RANKS * WARPS) continue;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    largest[p] = larger_magnitude(largest[p], remote_float(&shared.largest[parity][w % WARPS][p], base + w / WARPS));
                }
            }
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
#pragma unroll
                for (int step = 16; step > 0; step /= 2) {
                    largest[p] = larger_magnitude(largest[p], __shfl_xor_sync(ALL_LANES, largest[p], step));
                }
            }
        } else {
#pragma unroll
            for (int w = 0; w < TEAM_WARPS; ++w) {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    largest[p] = larger_magnitude(largest[p], shared.largest[parity][warp / TEAM_WARPS * TEAM_WARPS + w][p]);
                }
            }
        }
    }

    GEMM_DEVICE void convert(
        const Place& at, int tile, int stage, const Scaling& by, Tally& tally) const {
        Half* const to = planes_of(operand, at) + lane * RUN;
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            if (chunk(tile, h) >= operand.pitch) continue;  // for all lanes
            float re[RUN], im[RUN] = {};
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const Piece piece = shared.stage[stage][h * WARPS + warp][slot(lane * PIECES + i)];
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    re[i * WIDTH + e] = piece.at[COMPLEX ? 2 * e : e];
                    if constexpr (COMPLEX) im[i * WIDTH + e] = piece.at[2 * e + 1];
                }
            }
            Vector<unsigned, RUN / 2> words[PLANES];
            convert_run<SIDE_B>(re, im, by, operand, words, tally);
            if (chunk(tile, h) + lane * RUN < operand.pitch && at.row < operand.rows) {
                store_run(to + chunk(tile, h), operand.rows * operand.pitch, words);
            }
        }
        tally.unpack();
    }

    GEMM_DEVICE void finish(const Place& at, const float (&largest)[PARTS], int parity, int* status) const {
        if (lane != 0 || warp % TEAM_WARPS != 0 || rank != 0 || at.row >= operand.rows) return;
        const int base = RANKS > 1 ? block_rank() / RANKS * RANKS : 0;
        int counts[COUNTS];
        unsigned bits[PARTS];
#pragma unroll
        for (int p = 0; p < COUNTS; ++p) {
            counts[p] = 0;
            for (int r = 0; r < RANKS; ++r) {
                for (int w = 0; w < TEAM_WARPS; ++w) {
                    const int* const from = &shared.tally[parity][warp + w][p];
                    counts[p] += RANKS > 1 ? static_cast<int>(remote_word(from, base + r)) : *from;
                }
            }
            if (p < PARTS) bits[p] = bits_of(largest[p]);
        }
        operand.exponents[at.matrix * operand.rows + at.row] = undo_exponent(larger(bits[0], bits[PARTS - 1]));
        constexpr int CHUNK = 32 * RUN;
        const int padding = static_cast<int>((operand.pitch + CHUNK - 1) / CHUNK * CHUNK - operand.k);
        record(operand, at.matrix, at.row, counts, bits, padding, status);
    }
};

}  // namespace along
