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
constexpr Long TILE = static_cast<Long>(RANKS) * TEAM * HELD * RUN;  // steps of k
static_assert(RANKS == 1 || TEAM == THREADS, "several blocks or a part of one");

struct Shared {
    Piece stage[STAGES][HELD * WARPS][32 * PIECES];  // each warp reads what it has fetched: no barriers
    float largest[2][WARPS][PARTS];
    Part tally[2][WARPS][PARTS];
    int next[2];
};

template <bool SIDE_B, bool VECTOR>
struct Split {
    const SplitOperand& operand;
    Shared& shared;
    const int lane, warp, team, rank;
    const bool look;  // before maxima are raised

    GEMM_DEVICE Split(const SplitOperand& o, Shared& s, int thread)
        : operand(o), shared(s), lane(thread % 32), warp(thread / 32), team(thread / TEAM + teams_before()),
          rank(RANKS > 1 ? cluster_rank() % RANKS : 0),
          look(o.units * o.matrices > 2ll * o.groups * (RANKS > 1 ? 1 : CLUSTER)) {}

    static GEMM_DEVICE int teams_before() { return RANKS > 1 ? cluster_rank() / RANKS : 0; }

    // Where run `h` of lane 0 begins.
    GEMM_DEVICE Long chunk(Long tile, int h) const {
        return tile * TILE + ((rank * HELD + h) * TEAM_WARPS + warp % TEAM_WARPS) * (32 * RUN);
    }
    // Pieces that eight lanes read at once, a run apart, lie in different banks.
    static GEMM_DEVICE int slot(int piece) { return piece ^ (piece >> 3 & (PIECES - 1)); }

    struct Place {
        Long matrix, row;
    };
    GEMM_DEVICE Place place(Long unit) const {
        const Quotient at = divide(unit, operand.units);
        return {at.quotient, at.remainder * STEP + team};
    }

    // A tile of the vector of a unit into a stage; nothing past the last unit.
    GEMM_DEVICE void begin(const Place& at, Long tile, int stage, bool exists) const {
        if (exists) {
            const Long base = batch_offset(at.matrix, operand.batch_shape, operand.source.batch_stride);
            const Source source(operand.source, base + at.row * operand.source.row_stride);
            const Long stride = operand.source.column_stride;
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    const Long k = chunk(tile, h) + (i * 32 + lane) * WIDTH;
                    fetch<VECTOR>(
                        &shared.stage[stage][h * WARPS + warp][slot(i * 32 + lane)], source, k * stride, stride,
                        at.row < operand.rows ? operand.k - k : 0);
                }
            }
        }
        commit_async();
    }

    GEMM_DEVICE void run(bool first, Long group, int* status, int* counter) {
        using Units = Queue<WHOLE ? GEMM_STAGES : 1, (RANKS > 1)>;
        const bool together = RANKS > 1;
        const Long own = together ? group : group * CLUSTER + cluster_rank();
        const Long groups = static_cast<Long>(operand.groups) * (together ? 1 : CLUSTER);
        Units units(operand.units * operand.matrices, first, own, groups, counter, &shared.next, warp * 32 + lane);
        const Long tiles = WHOLE ? 1 : (operand.pitch + TILE - 1) / TILE;
        if constexpr (WHOLE) {
#pragma unroll
            for (int s = 0; s < STAGES; ++s) begin(place(units.number[s]), 0, s, units.number[s] < units.all);
        }
        Peaks peaks[HELD] = {};
        Place before = {0, operand.rows};
        float largest[PARTS] = {};
        int stage = 0;
        Long step = 0;
        for (; !units.done(); ++step) {
            const int parity = static_cast<int>(step & 1);
            const Place at = place(units.current());
            if (step > 0 && at.matrix != before.matrix) flush(before.matrix, 0, peaks);
            Piece most = {};
            for (Long tile = 0; tile < tiles; ++tile) {
                if constexpr (!WHOLE) begin(at, tile, 0, true);
                wait_async<STAGES - 1>();
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
            const Scaling by = scaling_for(bits_of(fmaxf(largest[0], largest[PARTS - 1])));
            Tally tally = {};
            for (Long tile = tiles; tile-- > 0;) {
                if constexpr (!WHOLE) {
                    if (tile + 1 < tiles) {
                        __syncwarp();
                        begin(at, tile, 0, true);
                        wait_async<0>();
                        __syncwarp();
                    }
                }
                convert(at, tile, stage, by, peaks, tally);
                if constexpr (!WHOLE) flush(at.matrix, tile, peaks);
            }
            if constexpr (WHOLE) {
                __syncwarp();  // all lanes have read the stage
                const Long coming = units.number[STAGES - 1];
                begin(place(coming), 0, stage, coming < units.all);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            const Part sum = sum_of_lanes<32>(tally, lane);
            if (lane < PARTS) shared.tally[parity][warp][lane] = sum;
        }
        wait_async<0>();
        if (step == 0) return;
        Units::barrier();
        finish(before, largest, static_cast<int>((step - 1) & 1), status);
        flush(before.matrix, 0, peaks);
        Units::barrier();  // shared memory may be read no more, and serve the other operand
    }

    GEMM_DEVICE void share_largest(const Piece& most, int parity) const {
        float first, second;  // of even and odd floats
        if constexpr (COMPLEX) {
            first = fmaxf(most.at[0], most.at[2]), second = fmaxf(most.at[1], most.at[3]);
        } else {
            first = second = fmaxf(fmaxf(most.at[0], most.at[1]), fmaxf(most.at[2], most.at[3]));
        }
        const bool odd = lane & 1;
        float mine = odd ? second : first;
        mine = fmaxf(mine, __shfl_xor_sync(ALL_LANES, odd ? first : second, 1));
#pragma unroll
        for (int step = 2; step < 32; step *= 2) mine = fmaxf(mine, __shfl_xor_sync(ALL_LANES, mine, step));
        if (lane < PARTS) shared.largest[parity][warp][lane] = mine;
    }

    // The largest magnitudes of the vector's real and imaginary parts, in all threads of its team.
    GEMM_DEVICE void find_largest(int parity, float (&largest)[PARTS]) const {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) largest[p] = 0.0f;
        if constexpr (RANKS > 1) {
            const int base = cluster_rank() / RANKS * RANKS;
#pragma unroll
            for (int i = 0; i < (RANKS * WARPS + 31) / 32; ++i) {
                const int w = i * 32 + lane;
                if (w >= RANKS * WARPS) continue;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    largest[p] = fmaxf(largest[p], remote_float(&shared.largest[parity][w % WARPS][p], base + w / WARPS));
                }
            }
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
#pragma unroll
                for (int step = 16; step > 0; step /= 2) {
                    largest[p] = fmaxf(largest[p], __shfl_xor_sync(ALL_LANES, largest[p], step));
                }
            }
        } else {
#pragma unroll
            for (int w = 0; w < TEAM_WARPS; ++w) {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    largest[p] = fmaxf(largest[p], shared.largest[parity][warp / TEAM_WARPS * TEAM_WARPS + w][p]);
                }
            }
        }
    }

    GEMM_DEVICE void convert(
        const Place& at, Long tile, int stage, const Scaling& by, Peaks (&peaks)[HELD], Tally& tally) const {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            const Long k = chunk(tile, h) + lane * RUN;
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
            convert_run<SIDE_B>(re, im, by, operand.conjugate, peaks[h], words, tally);
            if (k < operand.pitch && at.row < operand.rows) store_run(operand, at.matrix, at.row, k, words);
        }
    }

    GEMM_DEVICE void flush(Long matrix, Long tile, Peaks (&peaks)[HELD]) const {
#pragma unroll
        for (int h = 0; h < HELD; ++h) raise(operand, matrix, chunk(tile, h) + lane * RUN, peaks[h], look);
    }

    GEMM_DEVICE void finish(const Place& at, const float (&largest)[PARTS], int parity, int* status) const {
        if (lane != 0 || warp % TEAM_WARPS != 0 || rank != 0 || at.row >= operand.rows) return;
        bool flag = false;
        const int base = RANKS > 1 ? cluster_rank() / RANKS * RANKS : 0;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            Part all = {};
            for (int r = 0; r < RANKS; ++r) {
                for (int w = 0; w < TEAM_WARPS; ++w) {
                    const Part& part = shared.tally[parity][warp + w][p];
                    all.add(RANKS > 1 ? Part{remote_float(&part.lost, base + r), remote_float(&part.norm, base + r)} : part);
                }
            }
            flag = flag || all.too_much(largest[p] != 0.0f);
        }
        const unsigned most = bits_of(fmaxf(largest[0], largest[PARTS - 1]));
        flag = flag || most >= INFINITE;
        operand.exponents[at.matrix * operand.rows + at.row] = undo_exponent(most);
        operand.flags[at.matrix * operand.rows + at.row] = flag;
        if (flag) atomicOr(status, 1);
    }
};

}  // namespace along
