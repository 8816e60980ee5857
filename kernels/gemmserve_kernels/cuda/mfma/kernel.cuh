// One block's product: the configuration of the prelude as one type, the loop over k, what the epilogues are given.
#pragma once

#include "../common/raster.cuh"
#include "copy.cuh"
#include "multiply.cuh"
#include "params.cuh"

struct Config {
    using Acc = GEMM_TYPE_ACC;
    using C = GEMM_TYPE_C;
    using D = GEMM_TYPE_D;
    using Instruction = GEMM_INSTRUCTION;
    using Element = Instruction::Element;
    static constexpr bool PLANES = GEMM_PLANES, PLANAR = GEMM_PLANAR, VECTOR_D = false;
    static constexpr int BLOCK_M = GEMM_BLOCK_M, BLOCK_N = GEMM_BLOCK_N, BLOCK_K = GEMM_BLOCK_K;
    static constexpr int WARP_M = GEMM_WARP_M, WARP_N = GEMM_WARP_N, STAGES = GEMM_STAGES, GROUP = GEMM_GROUP;
    static constexpr int COMPONENTS = is_complex<Acc> ? 2 : 1, PARTS = GEMM_PARTS;
    static constexpr int SOURCES = PLANES ? COMPONENTS * PARTS : is_complex<Acc> && PLANAR ? 2 : 1;

    using Threads = WavePartition<Instruction, BLOCK_M, BLOCK_N, WARP_M, WARP_N>;
    static constexpr int THREADS = Threads::THREADS, THREAD_M = Threads::THREAD_M, THREAD_N = Threads::THREAD_N;
    using CopyA = PackedCopy<
        GEMM_TYPE_A, Element, SOURCES, COMPONENTS * PARTS, BLOCK_M, BLOCK_K, THREADS, GEMM_VECTOR_A, GEMM_A_ALONG_K,
        GEMM_ROUNDING, GEMM_INDEX>;
    using CopyB = PackedCopy<
        GEMM_TYPE_B, Element, SOURCES, COMPONENTS * PARTS, BLOCK_N, BLOCK_K, THREADS, GEMM_VECTOR_B, GEMM_B_ALONG_K,
        GEMM_ROUNDING, GEMM_INDEX>;
    using Multiply = WaveMultiply<
        Instruction, typename CopyA::Tile, typename CopyB::Tile, COMPONENTS, PARTS, WARP_M, WARP_N>;
    static constexpr int STAGE_BYTES = CopyA::Tile::BYTES + CopyB::Tile::BYTES;
};

template <class Stored>
GEMM_DEVICE void sources(const MatrixParams& matrix, Long offset, Long plane, const void* (&base)[Config::SOURCES]) {
#pragma unroll
    for (int s = 0; s < Config::SOURCES; ++s) {
        const void* const from = !Config::PLANES && s == 1 ? matrix.im : matrix.re;
        base[s] = static_cast<const Stored*>(from) + offset + (Config::PLANES ? s * plane : 0);
    }
}

// Sums of instructions as elements of the product, in the order of WavePartition. ADD: to what is there.
template <bool ADD>
GEMM_DEVICE void unpack(const Config::Multiply::Tiles& tiles, Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N]) {
    constexpr int COUNT = Config::Instruction::COUNT;
#pragma unroll
    for (int i = 0; i < Config::THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < Config::THREAD_N; ++j) {
            const auto& parts = tiles[i / COUNT][j];
            const Config::Acc x = make<Config::Acc>(parts[0][i % COUNT], parts[Config::COMPONENTS - 1][i % COUNT]);
            acc[i][j] = ADD ? add(acc[i][j], x) : x;
        }
    }
}

// acc = op(A) op(B) for the tile at `where`. Global memory is read one tile ahead, into registers; with two stages of
// shared memory one barrier a tile is enough, with one it takes two.
//
// Planes: the sums of each tile, BLOCK_K steps of k, are promoted, added to the accumulators by the ordinary units, which
// round to nearest; how the matrix units of CDNA round is not documented.
GEMM_DEVICE void accumulate(
    const MfmaParams& params, const TileCoordinate& where, const Config::Threads& threads, int thread,
    unsigned char* shared, Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N]) {
    const GemmParams& gemm = params.work.gemm;
    const void *base_a[Config::SOURCES], *base_b[Config::SOURCES];
    sources<GEMM_TYPE_A>(
        gemm.a, batch_offset(where.batch, gemm.batch_shape, gemm.a.batch_stride), params.plane_stride[0], base_a);
    sources<GEMM_TYPE_B>(
        gemm.b, batch_offset(where.batch, gemm.batch_shape, gemm.b.batch_stride), params.plane_stride[1], base_b);
    Config::CopyA copy_a(
        base_a, gemm.a.row_stride, gemm.a.column_stride, where.tile_m * Config::BLOCK_M, gemm.m, gemm.conjugate_a, thread);
    Config::CopyB copy_b(
        base_b, gemm.b.column_stride, gemm.b.row_stride, where.tile_n * Config::BLOCK_N, gemm.n, gemm.conjugate_b, thread);

    Config::Multiply::Tiles tiles;
    Config::Multiply::zero(tiles);
    if constexpr (Config::PLANES) unpack<false>(tiles, acc);
    Long remaining = gemm.k;
    const auto steps = [&remaining] { return remaining < Config::BLOCK_K ? static_cast<int>(remaining) : Config::BLOCK_K; };
    copy_a.load(steps());
    copy_b.load(steps());
    copy_a.store(shared);
    copy_b.store(shared + Config::CopyA::Tile::BYTES);
    __syncthreads();

    int stage = 0;
#pragma unroll 1
    while (true) {
        remaining -= Config::BLOCK_K;
        const bool more = remaining > 0;
        if (more) {
            copy_a.load(steps());
            copy_b.load(steps());
        }
        const unsigned char* const current = shared + stage * Config::STAGE_BYTES;
        Config::Multiply::run(
            current, current + Config::CopyA::Tile::BYTES, threads.first_row, threads.first_column, threads.lane, tiles);
        if constexpr (Config::PLANES) {
            unpack<true>(tiles, acc);
            Config::Multiply::zero(tiles);
        }
        if (!more) break;
        if constexpr (Config::STAGES == 1) {
            __syncthreads();
        } else {
            stage ^= 1;
        }
        unsigned char* const next = shared + stage * Config::STAGE_BYTES;
        copy_a.store(next);
        copy_b.store(next + Config::CopyA::Tile::BYTES);
        __syncthreads();
    }
    if constexpr (!Config::PLANES) unpack<false>(tiles, acc);
}

// x * 2^exponent, exact unless the result is subnormal or too large; exponents beyond +-252 do not fit two floats, and
// no sum of products that fits float32 needs them.
GEMM_DEVICE float times_power(float x, int exponent) {
    exponent = exponent < -252 ? -252 : exponent > 252 ? 252 : exponent;
    const int half = exponent / 2;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

// Undoes the scaling of planes.
template <class Acc>
GEMM_DEVICE void unscale(
    const MfmaParams& params, const TileCoordinate& where, const Config::Threads& threads,
    Acc (&acc)[Config::THREAD_M][Config::THREAD_N]) {
    const GemmParams& gemm = params.work.gemm;
    const int* const rows = params.exponents[0] + batch_offset(where.batch, gemm.batch_shape, params.exponent_stride[0]);
    const int* const columns = params.exponents[1] + batch_offset(where.batch, gemm.batch_shape, params.exponent_stride[1]);
    const Long first_row = where.tile_m * Config::BLOCK_M, first_column = where.tile_n * Config::BLOCK_N;
    int of_column[Config::THREAD_N];
#pragma unroll
    for (int j = 0; j < Config::THREAD_N; ++j) {
        const Long column = first_column + threads.column(j);
        of_column[j] = columns[column < gemm.n ? column : gemm.n - 1];
    }
#pragma unroll
    for (int i = 0; i < Config::THREAD_M; ++i) {
        const Long row = first_row + threads.row(i);
        const int of_row = rows[row < gemm.m ? row : gemm.m - 1];
#pragma unroll
        for (int j = 0; j < Config::THREAD_N; ++j) {
            const int exponent = of_row + of_column[j];
            if constexpr (is_complex<Acc>) {
                acc[i][j] = Acc{times_power(acc[i][j].re, exponent), times_power(acc[i][j].im, exponent)};
            } else {
                acc[i][j] = times_power(acc[i][j], exponent);
            }
        }
    }
}

// The finished sums of a tile, ready for an epilogue.
GEMM_DEVICE void product_tile(
    const MfmaParams& params, const TileCoordinate& where, const Config::Threads& threads, int thread,
    unsigned char* shared, Config::Acc (&acc)[Config::THREAD_M][Config::THREAD_N]) {
    accumulate(params, where, threads, thread, shared, acc);
#if GEMM_PLANES
    unscale(params, where, threads, acc);
#endif
}
