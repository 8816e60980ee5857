// Vectors that lie across memory: a strip of neighbouring ones, 128 bytes wide, goes through shared memory transposed.
//
// The blocks of a cluster share a strip, each some of its k. Where all of it fits into their shared memory it is read
// once; otherwise the maxima take a sweep of their own, and the second one finds most of the strip in L2.
#pragma once

#include "along.cuh"

constexpr int PIECES = 8;                  // of 16 bytes, in 128
constexpr int STRIP = PIECES * WIDTH;      // vectors of a strip
constexpr int TILE_K = GEMM_TILE_K;        // steps of k in shared memory: 128 bytes each
constexpr int LOADS = TILE_K * PIECES / THREADS;
constexpr int DEPTH = 4;                   // steps of k that a thread converts at once
constexpr int GROUPS = THREADS / PIECES;   // threads that work on one piece
constexpr int TURNS = TILE_K / (GROUPS * DEPTH);
constexpr int LANES = GROUPS < 32 ? GROUPS : 32;  // lanes of a warp that work on one piece

struct AcrossShared {
    Piece tile[TILE_K * PIECES];
    float largest[WARPS][STRIP];
    unsigned relative[TILE_K], absolute[TILE_K];
    Tally tally[GROUPS / LANES][STRIP];
    float block_largest[STRIP];  // read by the other blocks of the cluster
    float strip_largest[STRIP];
    Tally block_tally[STRIP];
    Scaling scaling[STRIP];
};

#if GEMM_CLUSTER > 1
GEMM_DEVICE unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
GEMM_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same word of shared memory in another block of the cluster.
GEMM_DEVICE unsigned remote_word(const void* word, int rank) {
    unsigned address, value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(word))), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
#else
GEMM_DEVICE unsigned cluster_rank() { return 0; }
GEMM_DEVICE void cluster_barrier() { __syncthreads(); }
GEMM_DEVICE unsigned remote_word(const void* word, int) { return *static_cast<const unsigned*>(word); }
#endif

template <bool SIDE_B, bool VECTOR>
struct Across {
    const SplitOperand& operand;
    AcrossShared& shared;
    const int thread;

    GEMM_DEVICE Across(const SplitOperand& o, AcrossShared& s, int t) : operand(o), shared(s), thread(t) {}

    // A vector's piece of step k lies where eight threads, DEPTH steps apart, find theirs in different banks.
    static GEMM_DEVICE int slot(int k, int piece) { return k * PIECES + (piece ^ (k / DEPTH & 7)); }

    GEMM_DEVICE Piece& own(int i) const { return shared.tile[slot((i * THREADS + thread) / PIECES, thread % PIECES)]; }

    GEMM_DEVICE void load(const Source& source, Long first_k, Long left) const {
        const Long column = thread % PIECES * WIDTH;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const Long k = first_k + (i * THREADS + thread) / PIECES;
            fetch<VECTOR>(
                &own(i), source, k * operand.source.column_stride + column * operand.source.row_stride,
                operand.source.row_stride, k < operand.k ? left - column : 0);
        }
        commit_async();
        wait_async<0>();
    }

    GEMM_DEVICE void run(Long matrix, Long first_row, int* status) {
        const int rank = static_cast<int>(cluster_rank());
        const Long left = operand.rows - first_row;
        const Long base = batch_offset(matrix, operand.batch_shape, operand.source.batch_stride);
        const Source source(operand.source, base + first_row * operand.source.row_stride);
        const Long tiles = (operand.pitch + TILE_K * CLUSTER - 1) / (TILE_K * CLUSTER);

        // Each thread looks at what it has fetched itself: no barrier.
        float largest[WIDTH] = {};
        for (Long tile = 0; tile < tiles; ++tile) {
            load(source, (tile * CLUSTER + rank) * TILE_K, left);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const Piece piece = own(i);
#pragma unroll
                for (int e = 0; e < WIDTH; ++e) largest[e] = fmaxf(largest[e], piece_magnitude(piece, e));
            }
        }
        share_largest(largest);
        cluster_barrier();
        if (thread < STRIP) {
            float all = 0;
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) all = fmaxf(all, float_of(remote_word(shared.block_largest + thread, r)));
            shared.scaling[thread] = scaling_for(bits_of(all));
            shared.strip_largest[thread] = all;
            if (rank == 0 && thread < left) {
                operand.exponents[matrix * operand.rows + first_row + thread] = undo_exponent(bits_of(all));
            }
        }

        Tally tally[WIDTH] = {};
        for (Long tile = tiles; tile-- > 0;) {
            const Long first_k = (tile * CLUSTER + rank) * TILE_K;
            if (tile + 1 < tiles) {
                __syncthreads();
                load(source, first_k, left);
            }
            for (int k = thread; k < TILE_K; k += THREADS) shared.relative[k] = shared.absolute[k] = 0;
            __syncthreads();
            convert(matrix, first_row, first_k, left, tally);
            __syncthreads();
            for (int k = thread; k < TILE_K && first_k + k < operand.k; k += THREADS) {
                raise(operand.relative + matrix * operand.k + first_k + k, shared.relative[k]);
                raise(operand.absolute + matrix * operand.k + first_k + k, shared.absolute[k]);
            }
        }
        finish(matrix, first_row, left, tally, rank, status);
    }

    // The largest magnitudes of the block's part of the strip.
    GEMM_DEVICE void share_largest(float (&largest)[WIDTH]) const {
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
#pragma unroll
            for (int step = 16; step >= PIECES; step /= 2) {
                largest[e] = fmaxf(largest[e], __shfl_xor_sync(0xffffffffu, largest[e], step));
            }
            if (thread % 32 < PIECES) shared.largest[thread / 32][thread % 32 * WIDTH + e] = largest[e];
        }
        __syncthreads();
        if (thread < STRIP) {
            float all = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all = fmaxf(all, shared.largest[w][thread]);
            shared.block_largest[thread] = all;
        }
    }

    GEMM_DEVICE void convert(Long matrix, Long first_row, Long first_k, Long left, Tally (&tally)[WIDTH]) const {
        const int piece = thread / GROUPS;
        const Long plane = operand.rows * operand.pitch;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            const int here = (turn * GROUPS + thread % GROUPS) * DEPTH;
            if (first_k + here >= operand.pitch) return;
            Piece mine[DEPTH];
            float relative[DEPTH] = {}, absolute[DEPTH] = {};
#pragma unroll
            for (int j = 0; j < DEPTH; ++j) mine[j] = shared.tile[slot(here + j, piece)];
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                const int column = piece * WIDTH + e;
                if (column >= left) continue;
                const Scaling by = shared.scaling[column], by_im = conjugated(by, operand.conjugate);
                Vector<unsigned, DEPTH / 2> words[PLANES];
#pragma unroll
                for (int pair = 0; pair < DEPTH / 2; ++pair) {
                    float re[2], im[2] = {}, magnitude[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        re[i] = mine[2 * pair + i].at[COMPLEX ? 2 * e : e];
                        if constexpr (COMPLEX) im[i] = mine[2 * pair + i].at[2 * e + 1];
                    }
                    unsigned out[PLANES];
                    convert_pair<SIDE_B>(re, im, by, by_im, out, tally[e], magnitude);
#pragma unroll
                    for (int p = 0; p < PLANES; ++p) words[p].at[pair] = out[p];
                    if (by.first == 0.0f) continue;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int j = 2 * pair + i;
                        relative[j] = fmaxf(relative[j], magnitude[i]);
                        absolute[j] = fmaxf(absolute[j], piece_magnitude(mine[j], e));
                    }
                }
                Half* to = operand.planes + (matrix * PLANES * operand.rows + first_row + column) * operand.pitch + first_k;
#pragma unroll
                for (int p = 0; p < PLANES; ++p) {
                    *reinterpret_cast<Vector<unsigned, DEPTH / 2>*>(to + p * plane + here) = words[p];
                }
            }
#pragma unroll
            for (int j = 0; j < DEPTH; ++j) {
                atomicMax(shared.relative + here + j, bits_of(relative[j]));
                atomicMax(shared.absolute + here + j, bits_of(absolute[j]));
            }
        }
    }

    GEMM_DEVICE void finish(Long matrix, Long first_row, Long left, Tally (&tally)[WIDTH], int rank, int* status) const {
        const int piece = thread / GROUPS, group = thread % GROUPS;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            tally[e].template reduce<LANES>();
            if (group % LANES == 0) shared.tally[group / LANES][piece * WIDTH + e] = tally[e];
        }
        __syncthreads();
        if (thread < STRIP) {
            Tally all = {};
#pragma unroll
            for (int g = 0; g < GROUPS / LANES; ++g) all.add(shared.tally[g][thread]);
            shared.block_tally[thread] = all;
        }
        cluster_barrier();
        if (rank == 0 && thread < STRIP && thread < left) {
            Tally all = {};
#pragma unroll
            for (int r = 0; r < CLUSTER; ++r) {
                const Tally& from = shared.block_tally[thread];
                Tally part;
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    part.lost[p] = float_of(remote_word(&from.lost[p], r));
                    part.norm[p] = float_of(remote_word(&from.norm[p], r));
                    part.any[p] = remote_word(&from.any[p], r);
                }
                all.add(part);
            }
            const bool flag = bits_of(shared.strip_largest[thread]) >= INFINITE || all.too_much();
            operand.flags[matrix * operand.rows + first_row + thread] = flag;
            if (flag) atomicOr(status, 1);
        }
        if constexpr (CLUSTER > 1) cluster_barrier();  // no block may end while another reads its shared memory
    }
};
