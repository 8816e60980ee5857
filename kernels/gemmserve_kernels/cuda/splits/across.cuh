// Vectors that lie across memory: a strip of neighbouring ones, STRIP bytes wide, goes through shared memory transposed.
//
// The blocks of a cluster share a strip, each some of its k; a warp fetches and converts the same steps of k of one
// strip after another. As soon as it has converted them, those of the next strip are on their way to their place.
#pragma once

#include "queue.cuh"

namespace across {

constexpr int HELD = GEMM_HELD_ACROSS;     // patches of a warp
constexpr bool WHOLE = GEMM_WHOLE_ACROSS;  // whether a cluster holds all of a strip
constexpr int PATCH = 64;                  // steps of k: what a warp holds of a strip, 128 bytes of a plane
constexpr int ROW = GEMM_STRIP / 16;       // pieces of the strip at one step of k
constexpr int FLOATS = GEMM_STRIP / 4, COLUMNS = FLOATS / PARTS;
constexpr int LANES = PATCH / RUN;         // that convert one vector's part of a patch
constexpr int TURNS = COLUMNS * LANES / 32;
constexpr int LOADS = PATCH * ROW / 32;
constexpr int TILE = CLUSTER * WARPS * HELD * PATCH;
static_assert(COLUMNS * LANES % 32 == 0 && COLUMNS <= 32 && ROW <= 16, "strips of 32 to 256 bytes");

struct Shared {
    Piece patch[HELD * WARPS][PATCH * ROW];  // each warp reads what it has fetched: no barriers
    Piece largest[WARPS][ROW];
    int tally[WARPS][COLUMNS][COUNTS];
    float block_largest[2][COLUMNS][PARTS];  // read by the other blocks of the cluster
    int block_tally[2][COLUMNS][COUNTS];
    float strip_largest[2][COLUMNS][PARTS];
    Scaling scaling[COLUMNS];
    int next[2];
};

template <bool SIDE_B, bool VECTOR>
struct Split {
    const SplitOperandParams& operand;
    Shared& shared;
    const int thread, lane, warp, rank;

    GEMM_DEVICE Split(const SplitOperandParams& o, Shared& s, int t)
        : operand(o), shared(s), thread(t), lane(t % 32), warp(t / 32), rank(block_rank()) {}

    GEMM_DEVICE int first_k(int tile, int h) const { return tile * TILE + ((rank * HELD + h) * WARPS + warp) * PATCH; }
    // The same piece of steps that are RUN apart lies in different banks.
    static GEMM_DEVICE int slot(int k, int piece) { return (k * ROW + piece) ^ (k / RUN & 7); }

    // This warp's patches of a strip; nothing past the last unit.
    GEMM_DEVICE void begin(int unit, int tile, bool exists) const {
        if (exists) {
            const Place at = place_of(operand, unit, COLUMNS);
            const int lane = once_more(this->lane), piece = lane % ROW, column = at.row + piece * WIDTH;
            const int left = column < operand.rows ? static_cast<int>(operand.rows) - column : 0;
            const Long stride = VECTOR ? 1 : operand.source.row_stride, down = operand.source.column_stride;
            const Long base = offset_of(operand, at) + piece * WIDTH * stride;
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
                const int k = first_k(tile, h) + lane / ROW;
                Source source(operand.source, base + k * down);
                Piece* const to = shared.patch[h * WARPS + warp];
                if (ASYNC<VECTOR> && first_k(tile, h) + PATCH <= operand.k && left >= WIDTH) {
#pragma unroll
                    for (int i = 0; i < LOADS; ++i) {
                        copy_async(to + slot(i * (32 / ROW) + lane / ROW, piece), source.re);
                        source.step(32 / ROW * down);
                    }
                    continue;
                }
#pragma unroll 2
                for (int i = 0; i < LOADS; ++i) {
                    fetch<VECTOR>(
                        to + slot(i * (32 / ROW) + lane / ROW, piece), source, 0, stride,
                        k + i * (32 / ROW) < operand.k ? left : 0);
                    source.step(32 / ROW * down);
                }
            }
        }
        copy_commit();
    }

    GEMM_DEVICE void run(bool first, int group, int* status, int* counter) {
        using Units = Queue<1, (CLUSTER > 1)>;
        Units units(
            operand.units * operand.matrices, operand.chunk, first, group, operand.groups, counter, shared.next, thread);
        const int tiles = WHOLE ? 1 : static_cast<int>((operand.pitch + TILE - 1) / TILE);
        if constexpr (WHOLE) begin(units.current(), 0, !units.done());
        Place before = {};
        int step = 0;
        for (; !units.done(); ++step) {
            const int parity = step & 1;
            const int unit = units.current();
            const Place at = place_of(operand, unit, COLUMNS);
            Piece most = {};
            for (int tile = 0; tile < tiles; ++tile) {
                if constexpr (!WHOLE) begin(unit, tile, true);
                copy_wait<0>();
                __syncwarp();
                look_at(most);
                if constexpr (!WHOLE) __syncwarp();
            }
            share_largest(most);
            units.publish(step);
            __syncthreads();
            gather(parity, step > 0);
            cluster_barrier();
            find_scaling(at, parity);
            units.advance(step);
            __syncthreads();
            if (step > 0) finish(before, parity ^ 1, status);
            before = at;
            for (int tile = tiles; tile-- > 0;) {
                if constexpr (!WHOLE) {
                    if (tile + 1 < tiles) {
                        begin(unit, tile, true);
                        copy_wait<0>();
                        __syncwarp();
                    }
                }
                convert(at, tile, tile + 1 == tiles);
                __syncwarp();  // all lanes have read the patches
            }
            if constexpr (WHOLE) begin(units.current(), 0, !units.done());
        }
        copy_wait<0>();
        if (step == 0) return;
        __syncthreads();
        gather_tally((step - 1) & 1);
        cluster_barrier();
        finish(before, (step - 1) & 1, status);
        cluster_barrier();  // shared memory may be read no more, and serve the other operand
    }

    // The largest magnitudes of what this thread has fetched.
    GEMM_DEVICE void look_at(Piece& most) const {
        const int lane = once_more(this->lane);
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                raise(most, shared.patch[h * WARPS + warp][slot(i * (32 / ROW) + lane / ROW, lane % ROW)]);
            }
        }
    }

    GEMM_DEVICE void share_largest(Piece& most) const {
#pragma unroll
        for (int step = 16; step >= ROW; step /= 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) most.at[i] = larger_magnitude(most.at[i], __shfl_xor_sync(ALL_LANES, most.at[i], step));
        }
        if (lane < ROW) shared.largest[warp][lane] = most;
    }

    // What the block knows of this strip and, where there is one, of the strip before.
    GEMM_DEVICE void gather(int parity, bool more) const {
        if (thread < FLOATS) {
            float all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all = larger_magnitude(all, shared.largest[w][thread / 4].at[thread % 4]);
            shared.block_largest[parity][thread / PARTS][thread % PARTS] = all;
        }
        if (more) gather_tally(parity ^ 1);
    }

    GEMM_DEVICE void gather_tally(int parity) const {
        const int first = THREADS >= 2 * FLOATS ? FLOATS : 0;  // other warps, where there are any
        for (int at = thread - first; at < COLUMNS * COUNTS; at += THREADS - first) {
            if (at < 0) break;
            int all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all += shared.tally[w][at / COUNTS][at % COUNTS];
            shared.block_tally[parity][at / COUNTS][at % COUNTS] = all;
        }
    }

    GEMM_DEVICE void find_scaling(const Place& at, int parity) const {
        if (thread >= COLUMNS) return;
        float all[PARTS] = {};
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) all[p] = larger_magnitude(all[p], remote_float(&shared.block_largest[parity][thread][p], r));
        }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) shared.strip_largest[parity][thread][p] = all[p];
        const unsigned most = larger(bits_of(all[0]), bits_of(all[PARTS - 1]));
        shared.scaling[thread] = scaling_for(most);
        if (rank == 0 && at.row + thread < operand.rows) {
            operand.exponents[at.matrix * operand.rows + at.row + thread] = undo_exponent(most);
        }
    }

    GEMM_DEVICE void convert(const Place& at, int tile, bool fresh) const {
        const int lane_k = lane % LANES * RUN;
        const Long plane = operand.rows * operand.pitch;
        Half* to = planes_of(operand, {at.matrix, at.row + lane / LANES}) + lane_k;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            const int column = turn * (32 / LANES) + lane / LANES;
            const Scaling by = shared.scaling[column];
            Tally tally = {};
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
                if (first_k(tile, h) >= operand.pitch) continue;  // for all lanes
                float re[RUN], im[RUN] = {};
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const float* piece = shared.patch[h * WARPS + warp][slot(lane_k + i, column / WIDTH)].at;
                    if constexpr (COMPLEX) {
                        const auto both = *reinterpret_cast<const Vector<float, 2>*>(piece + column % WIDTH * 2);
                        re[i] = both.at[0], im[i] = both.at[1];
                    } else {
                        re[i] = piece[column % WIDTH];
                    }
                }
                Vector<unsigned, RUN / 2> words[PLANES];
                convert_run<SIDE_B>(re, im, by, operand, words, tally);
                if (at.row + column < operand.rows) store_run(to + first_k(tile, h), plane, words);
            }
            to += 32 / LANES * operand.pitch;
            tally.unpack();
            int sum = sum_of_lanes<LANES>(tally, lane);
            if (lane % LANES < COUNTS) {
                int& to = shared.tally[warp][column][lane % LANES];
                if (!fresh) sum += to;
                to = sum;
            }
        }
    }

    GEMM_DEVICE void finish(const Place& at, int parity, int* status) const {
        const int column = thread - (THREADS >= 64 ? 32 : 0);  // another warp than finds the scaling, where there is one
        if (rank != 0 || column < 0 || column >= COLUMNS || at.row + column >= operand.rows) return;
        int counts[COUNTS];
        unsigned largest[PARTS];
#pragma unroll
        for (int p = 0; p < COUNTS; ++p) {
            counts[p] = 0;
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) {
                counts[p] += static_cast<int>(remote_word(&shared.block_tally[parity][column][p], r));
            }
            if (p < PARTS) largest[p] = bits_of(shared.strip_largest[parity][column][p]);
        }
        record(
            operand, at.matrix, at.row + column, counts, largest, static_cast<int>(operand.pitch - operand.k), status);
    }
};

}  // namespace across
