// One block's product: the configuration of the prelude as one type, its share of the work, the pipeline over k.
#pragma once

#include "../common/ptx/again.cuh"
#include "../common/ptx/mma.cuh"
#include "../common/judging/verdict.cuh"
#include "store.cuh"

struct Config {
    static constexpr bool COMPLEX = GEMM_COMPLEX, PLANES = GEMM_PLANES, PLANAR = GEMM_PLANAR, VECTOR_D = GEMM_VECTOR_D;
    static constexpr int BLOCK_M = GEMM_BLOCK_M, BLOCK_N = GEMM_BLOCK_N, BLOCK_K = GEMM_BLOCK_K;
    static constexpr int WARP_M = GEMM_WARP_M, WARP_N = GEMM_WARP_N;
    static constexpr int WARPS_M = BLOCK_M / WARP_M, WARPS_N = BLOCK_N / WARP_N, THREADS = 32 * WARPS_M * WARPS_N;
    static constexpr int STAGES = GEMM_STAGES, GROUP = GEMM_GROUP, PARTS = GEMM_PARTS;
    static constexpr bool BFLOAT = GEMM_BFLOAT;  // of planes
    static constexpr Tiles TILES = static_cast<Tiles>(GEMM_TILES);
    static constexpr int COMPONENTS = COMPLEX ? 2 : 1;
    using Acc = Select<COMPLEX, Complex<float>, float>;
    using Stored = Select<COMPLEX && !PLANAR, Complex<float>, float>;
    using C = GEMM_TYPE_C;
    using D = GEMM_TYPE_D;
#if GEMM_PLANES
    using A = PlaneOperand<true, COMPLEX, BLOCK_M, BLOCK_K, THREADS, PARTS, GEMM_PROMOTE>;
    using B = PlaneOperand<false, COMPLEX, BLOCK_N, BLOCK_K, THREADS, PARTS, GEMM_PROMOTE>;
    using Instruction = Select<BFLOAT, MultiplyBf16, MultiplyFp16>;
#else
    using A = Tf32Operand<
        COMPLEX, PLANAR, GEMM_CONJUGATE_A, BLOCK_M, BLOCK_K, GEMM_A_ALONG_K, GEMM_UNIT_A, THREADS, PARTS, GEMM_ROUNDING_BIG,
        GEMM_ROUNDING_SMALL, GEMM_PROMOTE>;
    using B = Tf32Operand<
        COMPLEX, PLANAR, GEMM_CONJUGATE_B, BLOCK_N, BLOCK_K, GEMM_B_ALONG_K, GEMM_UNIT_B, THREADS, PARTS, GEMM_ROUNDING_BIG,
        GEMM_ROUNDING_SMALL, GEMM_PROMOTE>;
    using Instruction = MultiplyTf32<GEMM_INSTRUCTION_K>;
#endif
    using Multiply = WarpMultiply<Instruction, A, B, GEMM_PRODUCTS, COMPONENTS, WARP_M, WARP_N, BLOCK_K>;
    static constexpr int STAGE_BYTES = A::BYTES + B::BYTES;
    static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "whole warps");
    static_assert(
        TILES == TILES_ALL || (::GROUP % BLOCK_M == 0 && ::GROUP % BLOCK_N == 0), "a tile lies in one group either way");
};

// Accumulators of one thread go to the block's place in the workspace; the block that arrives last adds all parts in
// their order, so that the sum does not depend on which one it is. `last` is shared memory. False: another block will finish the tile.
GEMM_DEVICE bool gather_splits(const MmaParams& params, Long tile, int split, int thread, int& last, Config::Multiply::Sums& sums) {
    constexpr int COUNT = sizeof(Config::Multiply::Sums) / sizeof(float), PIECES = COUNT / 4;
    using Piece = Vector<float, 4>;
    float* own = &sums[0][0][0][0][0];
    Piece* const place = reinterpret_cast<Piece*>(params.partial) + tile * params.splits * (PIECES * Config::THREADS) + thread;
    Piece* const mine = place + static_cast<Long>(split) * (PIECES * Config::THREADS);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        mine[i * Config::THREADS] = Piece{{own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]}};
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) last = atomicAdd(params.arrivals + tile, 1u) + 1 == static_cast<unsigned>(params.splits);
    __syncthreads();
    if (!last) return false;
    __threadfence();
    Config::Multiply::zero(sums);
    for (int part = 0; part < params.splits; ++part) {
        const Piece* const from = place + static_cast<Long>(part) * (PIECES * Config::THREADS);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const Piece piece = from[i * Config::THREADS];
#pragma unroll
            for (int e = 0; e < 4; ++e) own[4 * i + e] += piece.at[e];
        }
    }
    return true;
}

// What a block computes: found before the loop over k and again after it, where nothing of it was kept in registers.
struct Share {
    Long tile;
    int split;
    TileCoordinate where;
    Long row, column;

    GEMM_DEVICE Share(const MmaParams& params, unsigned block) {
        const Quotient number = divide(params.gemm.first_tile + static_cast<Long>(block), params.splits);
        tile = number.quotient - divide(params.gemm.first_tile, params.splits).quotient;
        split = static_cast<int>(number.remainder);
        where = tile_of<Config::GROUP>(number.quotient, params.gemm.tiles_m, params.gemm.tiles_n);
        row = where.tile_m * Config::BLOCK_M;
        column = where.tile_n * Config::BLOCK_N;
    }
};

using TileDoubt = Doubt<Config::TILES>;

GEMM_DEVICE TileDoubt doubt_of(const MmaParams& params) { return TileDoubt(params.doubt[0], params.doubt[1], params.wanted); }

// Whether a tile is this kernel's where there is a doubt: all parts of k agree.
GEMM_DEVICE bool wants(const MmaParams& params, const Share& share) {
    const Long batch = share.where.batch;
    const int* const rows = params.deficits[0] + batch_offset(batch, params.gemm.batch_shape, params.deficit_stride[0]);
    const int* const columns = params.deficits[1] + batch_offset(batch, params.gemm.batch_shape, params.deficit_stride[1]);
    return doubt_of(params).wants(
        Deficits(rows + share.row / GROUP * GROUP_WORDS), Deficits(columns + share.column / GROUP * GROUP_WORDS),
        params.most_deficit);
}

// Notes what this block has computed the wide way: once, not for each part of k. At the end, where no sums are in registers.
GEMM_DEVICE void count(const MmaParams& params) {
    Long elements = 0;
    for (unsigned block = block_again(); block < params.blocks; block += gridDim.x) {
        const Share share(params, block);
        if (share.split != 0 || !wants(params, share)) continue;
        elements += clipped(share.row, Config::BLOCK_M, params.gemm.m) * clipped(share.column, Config::BLOCK_N, params.gemm.n);
    }
    if (elements != 0) add_elements(params.counters->wide, elements);
}

GEMM_DEVICE int warp_row(int thread) { return thread / 32 / Config::WARPS_N * Config::WARP_M; }
GEMM_DEVICE int warp_column(int thread) { return thread / 32 % Config::WARPS_N * Config::WARP_N; }

// sums = the part of op(A) op(B) of block number `block`, from a pipeline of STAGES tiles in shared memory. False: float16
// planes do not serve the tile.
GEMM_DEVICE bool accumulate(const MmaParams& params, unsigned block, unsigned char* shared, Config::Multiply::Sums& sums) {
    const GemmParams& gemm = params.gemm;
    const int thread = static_cast<int>(threadIdx.x);
    const Share share(params, block);
    bool doubt = false;  // asked for before the first copies, and looked at behind them: nobody waits for it alone
    if constexpr (Config::TILES == TILES_SERVED) doubt = doubt_of(params).any;
    const Long first_k = share.split * params.k_part, left_k = gemm.k - first_k;
    const Long depth = left_k < params.k_part ? left_k : params.k_part;
    const void* base_a[Config::A::PLANES];
    const void* base_b[Config::B::PLANES];
    Config::A::bases(
        gemm.a, params.plane_stride[0], batch_offset(share.where.batch, gemm.batch_shape, gemm.a.batch_stride), base_a);
    Config::B::bases(
        gemm.b, params.plane_stride[1], batch_offset(share.where.batch, gemm.batch_shape, gemm.b.batch_stride), base_b);
    Config::A::Copy copy_a(base_a, gemm.a.row_stride, gemm.a.column_stride, share.row, gemm.m, first_k, thread);
    Config::B::Copy copy_b(base_b, gemm.b.column_stride, gemm.b.row_stride, share.column, gemm.n, first_k, thread);

    const int steps = static_cast<int>((depth + Config::BLOCK_K - 1) / Config::BLOCK_K);
    const int last = static_cast<int>(depth - static_cast<Long>(steps - 1) * Config::BLOCK_K);
    const auto load = [&](int step, int stage) {
        if (step < steps) {
            const int inside = step == steps - 1 ? last : Config::BLOCK_K;
            copy_a.start(shared + stage, inside);
            copy_b.start(shared + stage + Config::A::BYTES, inside);
        }
        copy_commit();  // an empty group keeps the count of groups in step
    };
    constexpr int ALL = Config::STAGES * Config::STAGE_BYTES;
#pragma unroll
    for (int step = 0; step < Config::STAGES - 1; ++step) load(step, step * Config::STAGE_BYTES);
    if (doubt && !wants(params, share)) {
        copy_wait<0>();
        return false;
    }

    Config::Multiply::zero(sums);
    int read = 0, write = ALL - Config::STAGE_BYTES;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        copy_wait<Config::STAGES - 2>();
        __syncthreads();  // the tile is there for all, and all are done with the one that the next copy overwrites
        load(step + Config::STAGES - 1, write);
        Config::Multiply::run(
            shared + read, shared + read + Config::A::BYTES, warp_row(thread), warp_column(thread), thread % 32,
            params.mask, sums);
        read = read + Config::STAGE_BYTES == ALL ? 0 : read + Config::STAGE_BYTES;
        write = write + Config::STAGE_BYTES == ALL ? 0 : write + Config::STAGE_BYTES;
    }
    copy_wait<0>();
    return true;
}

// Multiplies the tile of this block, of which `finish(share, sums)` gets the sums, unless it is another kernel's. Where the
// rest of the tiles is computed, which mostly are none, blocks look for them in turns.
template <class Finish>
GEMM_DEVICE void multiply_block(const MmaParams& params, unsigned char* shared, Finish finish) {
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::STAGE_BYTES * Config::STAGES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    Config::Multiply::Sums sums;
    if constexpr (Config::TILES == TILES_REST) {
        if (doubt_of(params).none()) return;
        for (unsigned block = blockIdx.x; block < params.blocks; block += gridDim.x) {
            if (!wants(params, Share(params, block))) continue;
            accumulate(params, block, shared, sums);
            finish(Share(params, block), sums);
            __syncthreads();  // before the next copies, all are done with shared memory
        }
        if (thread_again() == 0) count(params);
    } else {
        if (!accumulate(params, blockIdx.x, shared, sums)) return;
        finish(Share(params, block_again()), sums);
    }
}
