// Blockwise multiply on the plain FMA units, and the loop over k around it.
#pragma once

#include "../common/memory/copy.cuh"
#include "../common/raster.cuh"

// ptxas moves the reads of one step under the arithmetic of another as far as registers go; LLVM for AMD moves them all
// to the front and spills, so it sees two steps at a time.
#if defined(GEMM_HIP)
#define GEMM_UNROLL_K 2
#else
#define GEMM_UNROLL_K DEPTH
#endif

// acc += A B for DEPTH steps of a tile of k in shared memory: each thread an outer product of THREAD_M x THREAD_N a step.
template <class Acc, class Threads, int THREAD_M, int THREAD_N, int DEPTH, class TileA, class TileB>
GEMM_DEVICE void multiply_tile(Acc (&acc)[THREAD_M][THREAD_N], const Threads& threads, TileA a, TileB b, int first = 0) {
#pragma unroll GEMM_UNROLL_K
    for (int k = first; k < first + DEPTH; ++k) {
        Acc left[THREAD_M], right[THREAD_N];
#pragma unroll
        for (int i = 0; i < THREAD_M; i += Threads::PIECE_M) {
            const auto piece = a.template vector<Threads::PIECE_M>(k, threads.row(i));
#pragma unroll
            for (int p = 0; p < Threads::PIECE_M; ++p) left[i + p] = piece.at[p];
        }
#pragma unroll
        for (int j = 0; j < THREAD_N; j += Threads::PIECE_N) {
            const auto piece = b.template vector<Threads::PIECE_N>(k, threads.column(j));
#pragma unroll
            for (int p = 0; p < Threads::PIECE_N; ++p) right[j + p] = piece.at[p];
        }
#pragma unroll
        for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
            for (int j = 0; j < THREAD_N; ++j) multiply_accumulate(acc[i][j], left[i], right[j]);
        }
    }
}

// sum += x, and lost += what that rounds away (Knuth's TwoSum).
template <class T>
GEMM_DEVICE void add_keeping(T& sum, T& lost, T x) {
    if constexpr (is_complex<T>) {
        add_keeping(sum.re, lost.re, x.re);
        add_keeping(sum.im, lost.im, x.im);
    } else {
        const T both = sum + x, seen = both - sum;
        lost += (sum - (both - seen)) + (x - seen);
        sum = both;
    }
}

// The sum with what it has lost. What is not finite has lost nothing that counts.
template <class T>
GEMM_DEVICE T with_lost(T sum, T lost) {
    if constexpr (is_complex<T>) {
        return {with_lost(sum.re, lost.re), with_lost(sum.im, lost.im)};
    } else {
        return lost - lost == T(0) ? sum + lost : sum;
    }
}

// Steps of k that are summed up one after another by what stands in for tensor cores: it must not be less accurate than
// they are, and one long sum would be.
constexpr int RUN = 64;

// The configuration of the prelude as one type.
struct Config {
    using A = GEMM_TYPE_A;
    using B = GEMM_TYPE_B;
    using C = GEMM_TYPE_C;
    using D = GEMM_TYPE_D;
    using Acc = GEMM_TYPE_ACC;
    using Index = GEMM_INDEX;
    static constexpr bool PLANAR = GEMM_PLANAR;
    static constexpr int BLOCK_M = GEMM_BLOCK_M, BLOCK_N = GEMM_BLOCK_N, BLOCK_K = GEMM_BLOCK_K;
    static constexpr int THREAD_M = GEMM_THREAD_M, THREAD_N = GEMM_THREAD_N;
    static constexpr int STAGES = GEMM_STAGES, GROUP = GEMM_GROUP;
    static constexpr bool VECTOR_D = GEMM_VECTOR_D;

    using Threads = Partition<Acc, BLOCK_M, BLOCK_N, THREAD_M, THREAD_N>;
    static constexpr int THREADS = Threads::THREADS;
    using CopyA = BlockCopy<A, Acc, PLANAR, BLOCK_M, BLOCK_K, THREADS, GEMM_VECTOR_A, GEMM_A_ALONG_K, Index>;
    using CopyB = BlockCopy<B, Acc, PLANAR, BLOCK_N, BLOCK_K, THREADS, GEMM_VECTOR_B, GEMM_B_ALONG_K, Index>;
    using SharedA = typename CopyA::Shared;
    using SharedB = typename CopyB::Shared;
    static constexpr int STAGE_BYTES = SharedA::BYTES + SharedB::BYTES;
};

// acc = op(A) op(B) for the tile at `where`. Global memory is read one tile ahead, into registers; with two stages of
// shared memory one barrier a tile is enough, with one it takes two. STEPS: those of k that are summed up one after another
// before their sum is added to that of all; 0: all of them. COMPENSATED: what additions of such sums round away is kept and
// added in the end.
template <class Config, int STEPS = 0, bool COMPENSATED = false>
GEMM_DEVICE void accumulate(
    const GemmParams& params, const TileCoordinate& where, const typename Config::Threads& threads, int thread,
    unsigned char* shared, typename Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N]) {
    typename Config::CopyA copy_a(
        params.a, params.a.row_stride, params.a.column_stride,
        batch_offset(where.batch, params.batch_shape, params.a.batch_stride), where.tile_m * Config::BLOCK_M, params.m,
        params.conjugate_a, thread);
    typename Config::CopyB copy_b(
        params.b, params.b.column_stride, params.b.row_stride,
        batch_offset(where.batch, params.batch_shape, params.b.batch_stride), where.tile_n * Config::BLOCK_N, params.n,
        params.conjugate_b, thread);

#pragma unroll
    for (int i = 0; i < Config::THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < Config::THREAD_N; ++j) acc[i][j] = typename Config::Acc{};
    }

    Long remaining = params.k;
    if (remaining <= 0) return;
    const auto steps = [&remaining] { return remaining < Config::BLOCK_K ? static_cast<int>(remaining) : Config::BLOCK_K; };
    copy_a.load(steps());
    copy_b.load(steps());
    copy_a.store(Config::SharedA::at(shared));
    copy_b.store(Config::SharedB::at(shared + Config::SharedA::BYTES));
    __syncthreads();

    constexpr int PART = STEPS > 0 && STEPS < Config::BLOCK_K ? STEPS : Config::BLOCK_K;
    static_assert(STEPS % PART == 0 && Config::BLOCK_K % PART == 0, "whole tiles, or parts of one");
    typename Config::Acc run[STEPS > 0 ? Config::THREAD_M : 1][STEPS > 0 ? Config::THREAD_N : 1] = {};
    typename Config::Acc lost[COMPENSATED ? Config::THREAD_M : 1][COMPENSATED ? Config::THREAD_N : 1] = {};
    int stage = 0, left = STEPS;
    while (true) {
        remaining -= Config::BLOCK_K;
        const bool more = remaining > 0;
        if (more) {
            copy_a.load(steps());
            copy_b.load(steps());
        }
        unsigned char* current = shared + stage * Config::STAGE_BYTES;
        const auto multiply = [&](auto& to, int first) {
            multiply_tile<typename Config::Acc, typename Config::Threads, Config::THREAD_M, Config::THREAD_N, PART>(
                to, threads, Config::SharedA::at(current), Config::SharedB::at(current + Config::SharedA::BYTES), first);
        };
        if constexpr (STEPS == 0) {
            multiply(acc, 0);
        } else {
#pragma unroll
            for (int first = 0; first < Config::BLOCK_K; first += PART) {
                multiply(run, first);
                left -= PART;
                if (left != 0 && (more || first + PART < Config::BLOCK_K)) continue;
                left = STEPS;
#pragma unroll
                for (int i = 0; i < Config::THREAD_M; ++i) {
#pragma unroll
                    for (int j = 0; j < Config::THREAD_N; ++j) {
                        if constexpr (COMPENSATED) {
                            add_keeping(acc[i][j], lost[i][j], run[i][j]);
                        } else {
                            acc[i][j] = add(acc[i][j], run[i][j]);
                        }
                        run[i][j] = typename Config::Acc{};
                    }
                }
            }
        }
        if (!more) break;
        if constexpr (Config::STAGES == 1) {
            __syncthreads();
        } else {
            stage ^= 1;
        }
        unsigned char* next = shared + stage * Config::STAGE_BYTES;
        copy_a.store(Config::SharedA::at(next));
        copy_b.store(Config::SharedB::at(next + Config::SharedA::BYTES));
        __syncthreads();
    }
    if constexpr (COMPENSATED) {
#pragma unroll
        for (int i = 0; i < Config::THREAD_M; ++i) {
#pragma unroll
            for (int j = 0; j < Config::THREAD_N; ++j) acc[i][j] = with_lost(acc[i][j], lost[i][j]);
        }
    }
}
