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
constexpr Long TILE = static_cast<Long>(CLUSTER) * WARPS * HELD * PATCH;
static_assert(COLUMNS * LANES % 32 == 0 && COLUMNS <= 32 && ROW <= 8, "strips of 32 to 128 bytes");

struct Shared {
    Piece patch[HELD * WARPS][PATCH * ROW];  // each warp reads what it has fetched: no barriers
    Piece largest[WARPS][ROW];
    Part tally[WARPS][COLUMNS][PARTS];
    float block_largest[2][COLUMNS][PARTS];  // read by the other blocks of the cluster
    Part block_tally[2][COLUMNS][PARTS];
    float strip_largest[2][COLUMNS][PARTS];
    Scaling scaling[COLUMNS];
    int next[2];
};

template <bool SIDE_B, bool VECTOR>
struct Split {
    const SplitOperand& operand;
    Shared& shared;
    const int thread, lane, warp, rank;
    const bool look;  // before maxima are raised

    GEMM_DEVICE Split(const SplitOperand& o, Shared& s, int t)
        : operand(o), shared(s), thread(t), lane(t % 32), warp(t / 32), rank(cluster_rank()),
          look(o.units * o.matrices > 2ll * o.groups) {}

    GEMM_DEVICE Long first_k(Long tile, int h) const {
        return tile * TILE + ((rank * HELD + h) * WARPS + warp) * PATCH;
    }
    // The same piece of steps that are RUN apart lies in different banks.
    static GEMM_DEVICE int slot(int k, int piece) { return (k * ROW + piece) ^ (k / RUN & 7); }

    struct Place {
        Long matrix, row;
    };
    GEMM_DEVICE Place place(Long unit) const {
        const Quotient at = divide(unit, operand.units);
        return {at.quotient, at.remainder * COLUMNS};
    }

    // This warp's patches of a strip; nothing past the last unit.
    GEMM_DEVICE void begin(const Place& at, Long tile, bool exists) const {
        if (exists) {
            const Long base = batch_offset(at.matrix, operand.batch_shape, operand.source.batch_stride);
            const Source source(operand.source, base + at.row * operand.source.row_stride);
            const int piece = lane % ROW;
            const Long left = operand.rows - at.row - piece * WIDTH;
            const Long across = piece * WIDTH * operand.source.row_stride;
#pragma unroll
            for (int h = 0; h < HELD; ++h) {
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    const int k = (i * 32 + lane) / ROW;
                    const Long at_k = first_k(tile, h) + k;
                    fetch<VECTOR>(
                        &shared.patch[h * WARPS + warp][slot(k, piece)], source,
                        at_k * operand.source.column_stride + across, operand.source.row_stride,
                        at_k < operand.k ? left : 0);
                }
            }
        }
        commit_async();
    }

    GEMM_DEVICE void run(bool first, Long group, int* status, int* counter) {
        using Units = Queue<1, (CLUSTER > 1)>;
        Units units(operand.units * operand.matrices, first, group, operand.groups, counter, &shared.next, thread);
        const Long tiles = WHOLE ? 1 : (operand.pitch + TILE - 1) / TILE;
        if constexpr (WHOLE) begin(place(units.current()), 0, !units.done());
        Peaks peaks[HELD] = {};
        Place before = {};
        Long step = 0;
        for (; !units.done(); ++step) {
            const int parity = static_cast<int>(step & 1);
            const Place at = place(units.current());
            if (step > 0 && at.matrix != before.matrix) flush(before.matrix, 0, peaks);
            Piece most = {};
            for (Long tile = 0; tile < tiles; ++tile) {
                if constexpr (!WHOLE) begin(at, tile, true);
                wait_async<0>();
                __syncwarp();
#pragma unroll
                for (int h = 0; h < HELD; ++h) {
#pragma unroll
                    for (int i = 0; i < LOADS; ++i) {
                        const int k = (i * 32 + lane) / ROW;
                        raise(most, shared.patch[h * WARPS + warp][slot(k, lane % ROW)]);
                    }
                }
                if constexpr (!WHOLE) __syncwarp();
            }
            share_largest(most);
            units.publish(step);
            __syncthreads();
            gather(parity, step > 0);
            cluster_barrier();
            find_scaling(at, parity);
            if (step > 0) finish(before, parity ^ 1, status);
            units.advance(step);
            __syncthreads();
            before = at;
            for (Long tile = tiles; tile-- > 0;) {
                if constexpr (!WHOLE) {
                    if (tile + 1 < tiles) {
                        __syncwarp();
                        begin(at, tile, true);
                        wait_async<0>();
                        __syncwarp();
                    }
                }
                convert(at, tile, tile + 1 == tiles, peaks);
                if constexpr (!WHOLE) flush(at.matrix, tile, peaks);
            }
            if constexpr (WHOLE) {
                __syncwarp();  // all lanes have read the patches
                begin(place(units.current()), 0, !units.done());
            }
        }
        wait_async<0>();
        if (step == 0) return;
        __syncthreads();
        gather_tally(static_cast<int>((step - 1) & 1));
        cluster_barrier();
        finish(before, static_cast<int>((step - 1) & 1), status);
        flush(before.matrix, 0, peaks);
        cluster_barrier();  // shared memory may be read no more, and serve the other operand
    }

    GEMM_DEVICE void share_largest(Piece& most) const {
#pragma unroll
        for (int step = 16; step >= ROW; step /= 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) most.at[i] = fmaxf(most.at[i], __shfl_xor_sync(ALL_LANES, most.at[i], step));
        }
        if (lane < ROW) shared.largest[warp][lane] = most;
    }

    // What the block knows of this strip and, where there is one, of the strip before.
    GEMM_DEVICE void gather(int parity, bool more) const {
        if (thread < FLOATS) {
            float all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all = fmaxf(all, shared.largest[w][thread / 4].at[thread % 4]);
            shared.block_largest[parity][thread / PARTS][thread % PARTS] = all;
        }
        if (more) gather_tally(parity ^ 1);
    }

    GEMM_DEVICE void gather_tally(int parity) const {
        const int at = thread - (THREADS >= 2 * FLOATS ? THREADS - FLOATS : 0);  // other warps, where there are any
        if (at < 0 || at >= FLOATS) return;
        Part all = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all.add(shared.tally[w][at / PARTS][at % PARTS]);
        shared.block_tally[parity][at / PARTS][at % PARTS] = all;
    }

    GEMM_DEVICE void find_scaling(const Place& at, int parity) const {
        if (thread >= COLUMNS) return;
        float all[PARTS] = {};
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) all[p] = fmaxf(all[p], remote_float(&shared.block_largest[parity][thread][p], r));
        }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) shared.strip_largest[parity][thread][p] = all[p];
        const unsigned most = bits_of(fmaxf(all[0], all[PARTS - 1]));
        shared.scaling[thread] = scaling_for(most);
        if (rank == 0 && at.row + thread < operand.rows) {
            operand.exponents[at.matrix * operand.rows + at.row + thread] = undo_exponent(most);
        }
    }

    GEMM_DEVICE void convert(const Place& at, Long tile, bool fresh, Peaks (&peaks)[HELD]) const {
        const int lane_k = lane % LANES * RUN;
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
                convert_run<SIDE_B>(re, im, by, operand.conjugate, peaks[h], words, tally);
                if (at.row + column < operand.rows) {
                    store_run(operand, at.matrix, at.row + column, first_k(tile, h) + lane_k, words);
                }
            }
            Part sum = sum_of_lanes<LANES>(tally, lane);
            if (lane % LANES < PARTS) {
                Part& to = shared.tally[warp][column][lane % LANES];
                if (!fresh) sum.add(to);
                to = sum;
            }
        }
    }

    // The maxima of all lanes that have the same steps of k.
    GEMM_DEVICE void flush(Long matrix, Long tile, Peaks (&peaks)[HELD]) const {
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
#pragma unroll
                for (int step = 16; step >= LANES; step /= 2) {
                    peaks[h].relative[i] = fmaxf(peaks[h].relative[i], __shfl_xor_sync(ALL_LANES, peaks[h].relative[i], step));
                    peaks[h].absolute[i] = fmaxf(peaks[h].absolute[i], __shfl_xor_sync(ALL_LANES, peaks[h].absolute[i], step));
                }
            }
            if (lane < LANES) {
                raise(operand, matrix, first_k(tile, h) + lane * RUN, peaks[h], look);
            } else {
                peaks[h] = {};
            }
        }
    }

    GEMM_DEVICE void finish(const Place& at, int parity, int* status) const {
        const int column = thread - (THREADS >= 64 ? 32 : 0);  // another warp than finds the scaling, where there is one
        if (rank != 0 || column < 0 || column >= COLUMNS || at.row + column >= operand.rows) return;
        bool flag = false;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const Part& from = shared.block_tally[parity][column][p];
            Part all = {};
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) all.add({remote_float(&from.lost, r), remote_float(&from.norm, r)});
            const float largest = shared.strip_largest[parity][column][p];
            flag = flag || all.too_much(largest != 0.0f) || bits_of(largest) >= INFINITE;
        }
        operand.flags[at.matrix * operand.rows + at.row + column] = flag;
        if (flag) atomicOr(status, 1);
    }
};

}  // namespace across
