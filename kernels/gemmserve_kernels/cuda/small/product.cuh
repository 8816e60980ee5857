// One thread's part of one small product, from operands in shared memory.
#pragma once

#include "copy.cuh"

// The configuration of the prelude as one type.
struct Config {
    using A = GEMM_TYPE_A;
    using B = GEMM_TYPE_B;
    using C = GEMM_TYPE_C;
    using D = GEMM_TYPE_D;
    using Acc = GEMM_TYPE_ACC;
    static constexpr bool PLANAR = GEMM_PLANAR;
    static constexpr int PARTS = PLANAR ? 2 : 1;
    static constexpr int M = GEMM_M, N = GEMM_N, K = GEMM_K;
    static constexpr int THREADS = GEMM_THREADS, STAGES = GEMM_STAGES;
    // TENSOR: a tile of THREAD_M x THREAD_N elements is a warp's, on the tensor cores; otherwise a thread's.
    static constexpr bool TENSOR = GEMM_TENSOR;
    static constexpr int TILES_M = (M + GEMM_THREAD_M - 1) / GEMM_THREAD_M;
    static constexpr int TILES_N = (N + GEMM_THREAD_N - 1) / GEMM_THREAD_N;
    static constexpr int THREADS_EACH = TILES_M * TILES_N * (TENSOR ? 32 : 1);  // threads of one product
    static constexpr int AT_ONCE = GEMM_GROUP / GEMM_ROUNDS;                    // products that the block computes at once
    static constexpr int GROUP = GEMM_GROUP, ROUNDS = GEMM_ROUNDS;
    static_assert(AT_ONCE * ROUNDS == GROUP && AT_ONCE * THREADS_EACH <= THREADS, "every product needs its threads");

    static constexpr bool A_ALONG_K = GEMM_A_ALONG_K, B_ALONG_K = GEMM_B_ALONG_K;
    static constexpr bool A_BROADCAST = GEMM_A_BROADCAST, B_BROADCAST = GEMM_B_BROADCAST;
    using LayoutA = OperandLayout<
        A_ALONG_K ? M : K, A_ALONG_K ? K : M, GEMM_A_LEADING, GEMM_A_MATRIX, GEMM_A_VECTOR, GEMM_A_PACKED, GEMM_A_IMAGE>;
    using LayoutB = OperandLayout<
        B_ALONG_K ? N : K, B_ALONG_K ? K : N, GEMM_B_LEADING, GEMM_B_MATRIX, GEMM_B_VECTOR, GEMM_B_PACKED, GEMM_B_IMAGE>;
    static constexpr int GROUP_A = A_BROADCAST ? 1 : GROUP, GROUP_B = B_BROADCAST ? 1 : GROUP;
    static constexpr int PART_A = GROUP_A * LayoutA::MATRIX, PART_B = GROUP_B * LayoutB::MATRIX;
    static constexpr int BYTES_A = round_up(PARTS * PART_A * static_cast<int>(sizeof(A)), 16);
    static constexpr int BYTES_B = round_up(PARTS * PART_B * static_cast<int>(sizeof(B)), 16);
    // Operands that all products share stand before the stages, results on their way out behind them.
    static constexpr int BYTES_KEPT = (A_BROADCAST ? BYTES_A : 0) + (B_BROADCAST ? BYTES_B : 0);
    static constexpr int BYTES_STAGE = (A_BROADCAST ? 0 : BYTES_A) + (B_BROADCAST ? 0 : BYTES_B);
    static constexpr bool STAGED_D = GEMM_STAGED_D, PACKED_D = GEMM_PACKED_D;
    static constexpr bool VECTOR_C = GEMM_VECTOR_C, VECTOR_D = GEMM_VECTOR_D;
    static constexpr int PART_D = GROUP * M * N;
    static constexpr int BYTES_D = STAGED_D ? PARTS * PART_D * static_cast<int>(sizeof(D)) : 0;
    static constexpr int SHARED_BYTES = BYTES_KEPT + STAGES * BYTES_STAGE + BYTES_D;
};

// Neighbouring elements along a line of shared memory as accumulator elements.
template <class Acc, bool PLANAR, bool CONJUGATE, int N, class Stored>
GEMM_DEVICE void read_piece(Acc (&values)[N], const Stored* shared, int part) {
    using Piece = Vector<Stored, N>;
    const Piece re = *reinterpret_cast<const Piece*>(shared);
    if constexpr (PLANAR) {
        const Piece im = *reinterpret_cast<const Piece*>(shared + part);
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = widen<Acc>(re.at[i], im.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = widen<Acc>(re.at[i]);
    }
    if constexpr (CONJUGATE && is_complex<Acc>) {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i].im = -values[i].im;
    }
}

// Which of EXTENT rows (or columns) a thread owns: COUNT of them, in pieces of PIECE neighbours that alternate between
// the TILES threads. The last piece is repeated where the extent is no multiple: those results are not stored.
template <int EXTENT, int COUNT, int PIECE>
struct Owned {
    static constexpr int TILES = (EXTENT + COUNT - 1) / COUNT;
    static constexpr bool EVEN = TILES * COUNT == EXTENT;
    static_assert(EXTENT % PIECE == 0 && COUNT % PIECE == 0, "pieces must not be cut");

    static GEMM_DEVICE int index(int tile, int i) { return (i / PIECE * TILES + tile) * PIECE + i % PIECE; }
    static GEMM_DEVICE bool inside(int tile, int i) { return EVEN || index(tile, i) < EXTENT; }
    static GEMM_DEVICE int clamped(int tile, int i) {
        const int at = index(tile, i);
        return EVEN || at < EXTENT ? at : EXTENT - PIECE + i % PIECE;
    }
};

// COUNT rows (or columns) of STEP steps of k from a matrix in shared memory: values[step][i].
template <class Layout, class Where, class Acc, bool PLANAR, bool CONJUGATE, bool ALONG_K, int STEP, int COUNT, int PIECE,
          int READ, class Stored>
GEMM_DEVICE void read_fragment(Acc (&values)[STEP][COUNT], const Stored* matrix, int part, int k, int tile) {
    if constexpr (ALONG_K) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Stored* line = matrix + Where::clamped(tile, i) * Layout::LEADING + k;
#pragma unroll
            for (int s = 0; s < STEP; s += READ) {
                Acc piece[READ];
                read_piece<Acc, PLANAR, CONJUGATE>(piece, line + s, part);
#pragma unroll
                for (int p = 0; p < READ; ++p) values[s + p][i] = piece[p];
            }
        }
    } else {
#pragma unroll
        for (int s = 0; s < STEP; ++s) {
#pragma unroll
            for (int i = 0; i < COUNT; i += PIECE) {
                Acc piece[PIECE];
                const Stored* from = matrix + (k + s) * Layout::LEADING + Where::clamped(tile, i);
                read_piece<Acc, PLANAR, CONJUGATE>(piece, from, part);
#pragma unroll
                for (int p = 0; p < PIECE; ++p) values[s][i + p] = piece[p];
            }
        }
    }
}

constexpr int THREAD_M = GEMM_THREAD_M, THREAD_N = GEMM_THREAD_N;

#if !GEMM_TENSOR

using Rows = Owned<Config::M, THREAD_M, GEMM_PIECE_M>;
using Columns = Owned<Config::N, THREAD_N, GEMM_PIECE_N>;

// Steps of k that are summed up one after another before their sum is added to that of all: as accurate as a BLAS that
// deals k to four warps.
constexpr int RUN = 8;

// acc = op(A) op(B): fused multiply-adds in the order of k.
GEMM_DEVICE void multiply(
    Config::Acc (&acc)[THREAD_M][THREAD_N], const Config::A* a, const Config::B* b, int tile_m, int tile_n) {
    using Acc = Config::Acc;
    constexpr int STEP = GEMM_STEP;
    constexpr bool RUNS = Config::K > RUN;
    static_assert(RUN % STEP == 0 && Config::K % STEP == 0, "whole turns of the loop");
    Acc run[RUNS ? THREAD_M : 1][RUNS ? THREAD_N : 1] = {};
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) acc[i][j] = Acc{};
    }
#pragma unroll GEMM_UNROLL
    for (int k = 0; k < Config::K; k += STEP) {
        Acc left[STEP][THREAD_M], right[STEP][THREAD_N];
        read_fragment<
            Config::LayoutA, Rows, Acc, Config::PLANAR, GEMM_CONJUGATE_A, Config::A_ALONG_K, STEP, THREAD_M, GEMM_PIECE_M,
            GEMM_READ_A>(left, a, Config::PART_A, k, tile_m);
        read_fragment<
            Config::LayoutB, Columns, Acc, Config::PLANAR, GEMM_CONJUGATE_B, Config::B_ALONG_K, STEP, THREAD_N,
            GEMM_PIECE_N, GEMM_READ_B>(right, b, Config::PART_B, k, tile_n);
        const bool ends = (k + STEP) % RUN == 0 || k + STEP == Config::K;
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) {
                Acc& sum = [&]() -> Acc& {
                    if constexpr (RUNS) return run[i][j];
                    else return acc[i][j];
                }();
#pragma unroll
                for (int s = 0; s < STEP; ++s) multiply_accumulate(sum, left[s][i], right[s][j]);
                if constexpr (RUNS) {
                    if (ends) {
                        acc[i][j] = add(acc[i][j], sum);
                        sum = Acc{};
                    }
                }
            }
        }
    }
}

#endif
