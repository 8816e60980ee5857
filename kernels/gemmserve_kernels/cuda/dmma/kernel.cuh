// One block's tile in double precision on tensor cores: mma.sync behind a pipeline of cp.async.
//
// Four (or two) rows of 16 by four of 8 for a warp: what it reads of shared memory takes less than half the time of what
// it multiplies, and a block of 128 x 128 takes 16 bytes a cycle of L2. Where a product has few tiles, they are smaller,
// and sums over RUN steps of k are added up by the ordinary units: as accurate as a BLAS that splits k.
#pragma once

#include "../epilogue/store.cuh"
#include "operand.cuh"

struct Config {
    using Acc = GEMM_TYPE_ACC;
    static constexpr bool COMPLEX = is_complex<Acc>, PLANAR = GEMM_PLANAR, VECTOR_D = GEMM_VECTOR_D;
    using C = Select<PLANAR, double, Acc>;
    using D = C;
    static constexpr int BLOCK_M = GEMM_BLOCK_M, BLOCK_N = GEMM_BLOCK_N, BLOCK_K = GEMM_BLOCK_K;
    static constexpr int WARP_M = GEMM_WARP_M, WARP_N = GEMM_WARP_N;
    static constexpr int WARPS_M = BLOCK_M / WARP_M, WARPS_N = BLOCK_N / WARP_N, THREADS = 32 * WARPS_M * WARPS_N;
    static constexpr int STAGES = GEMM_STAGES, GROUP = GEMM_GROUP, RUN = GEMM_RUN;
    static constexpr int K = GEMM_INSTRUCTION_K, READ_K = GEMM_READ_K;  // steps of an instruction, and of a fragment
    static constexpr int COMPONENTS = COMPLEX ? 2 : 1;
    template <int EXTENT, bool ALONG_K, int UNIT>
    using Operand = Select<
        COMPLEX && !PLANAR, ComplexOperand<EXTENT, BLOCK_K, ALONG_K, THREADS, READ_K>,
        RealOperand<COMPLEX, EXTENT, BLOCK_K, ALONG_K, UNIT, THREADS, READ_K>>;
    using A = Operand<BLOCK_M, GEMM_A_ALONG_K, GEMM_UNIT_A>;
    using B = Operand<BLOCK_N, GEMM_B_ALONG_K, GEMM_UNIT_B>;
    static constexpr int STAGE_BYTES = A::BYTES + B::BYTES;
    static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0 && WARP_M % 16 == 0 && WARP_N % 16 == 0, "whole warps");
    static_assert(READ_K % K == 0 && BLOCK_K % READ_K == 0 && RUN % BLOCK_K == 0, "whole steps");
    struct Threads {
        static constexpr int PIECE_N = 2;  // for StoreEpilogue
    };
};

// What a warp reads of its 16 rows, and of all its columns, for READ_K steps.
using Left = Config::A::Registers;
struct Right {
    static constexpr int PAIRS = Config::WARP_N / 16, WIDTH = Config::READ_K / 4;
    double at[Config::COMPONENTS][PAIRS][2][WIDTH];

    GEMM_DEVICE void read(const unsigned char* shared, int column, int first, int lane) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            Config::B::Registers found;
            Config::B::read(shared, column + 16 * j, first, lane, found);
#pragma unroll
            for (int c = 0; c < Config::COMPONENTS; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int w = 0; w < WIDTH; ++w)
                        at[c][j][half][w] = c == 1 && GEMM_CONJUGATE_B ? -found.at[c][half][w] : found.at[c][half][w];
        }
    }
};

struct Sums {
    static constexpr int ROWS = Config::WARP_M / 16, PAIRS = Config::WARP_N / 16, WIDTH = Config::READ_K / 4;
    static constexpr int STEPS = Config::K / 4;
    using Multiply = MultiplyDouble<Config::K>;
    double at[Config::COMPONENTS][ROWS][PAIRS][2][2][2];  // 16 rows, 16 columns, half of these, half of those, element

    template <class F>
    GEMM_DEVICE void each(F change) {
#pragma unroll
        for (int c = 0; c < Config::COMPONENTS; ++c)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                    for (int e = 0; e < 8; ++e) change(at[c][i][j][e / 4][e / 2 % 2][e % 2], c, i, j, e);
    }
    GEMM_DEVICE void clear() {
        each([](double& x, int, int, int, int) { x = 0.0; });
    }
    GEMM_DEVICE void add(const Sums& other) {
        each([&](double& x, int c, int i, int j, int e) { x += other.at[c][i][j][e / 4][e / 2 % 2][e % 2]; });
    }

    // Onto component `to`.
    GEMM_DEVICE void product(int to, int i, const double (&a)[2][WIDTH], const double (&b)[PAIRS][2][WIDTH]) {
#pragma unroll
        for (int w = 0; w < WIDTH; w += STEPS) {
            using Steps = const double(&)[STEPS];
#pragma unroll
            for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    Multiply::run(
                        at[to][i][j][half][0], at[to][i][j][half][1], reinterpret_cast<Steps>(a[0][w]),
                        reinterpret_cast<Steps>(a[1][w]), reinterpret_cast<Steps>(b[j][half][w]));
        }
    }

    // += the product of 16 rows by all columns of a warp. `a` is lost.
    GEMM_DEVICE void multiply(int i, Left& a, const Right& b) {
        product(0, i, a.at[0], b.at[0]);
        if constexpr (Config::COMPLEX) {
            constexpr int LAST = Config::COMPONENTS - 1;
            product(LAST, i, a.at[0], b.at[LAST]);
            if constexpr (GEMM_CONJUGATE_A) negate(a.at[LAST]);
            product(LAST, i, a.at[LAST], b.at[0]);
            negate(a.at[LAST]);
            product(0, i, a.at[LAST], b.at[LAST]);
        }
    }

  private:
    static GEMM_DEVICE void negate(double (&x)[2][WIDTH]) {
#pragma unroll
        for (int i = 0; i < 2 * WIDTH; ++i) x[i / WIDTH][i % WIDTH] = -x[i / WIDTH][i % WIDTH];
    }
};

// sums = op(A) op(B) for the tile at `where`, from a pipeline of STAGES tiles in shared memory.
GEMM_DEVICE void accumulate(const GemmParams& gemm, const TileCoordinate& where, unsigned char* shared, Sums& sums) {
    const int thread = thread_again();
    const void* base_a[Config::A::PLANES];
    const void* base_b[Config::B::PLANES];
    Config::A::bases(gemm.a, batch_offset(where.batch, gemm.batch_shape, gemm.a.batch_stride), base_a);
    Config::B::bases(gemm.b, batch_offset(where.batch, gemm.batch_shape, gemm.b.batch_stride), base_b);
    Config::A::Copy copy_a(
        base_a, gemm.a.row_stride, gemm.a.column_stride, where.tile_m * Config::BLOCK_M, gemm.m, 0, thread);
    Config::B::Copy copy_b(
        base_b, gemm.b.column_stride, gemm.b.row_stride, where.tile_n * Config::BLOCK_N, gemm.n, 0, thread);
    const int steps = static_cast<int>((gemm.k + Config::BLOCK_K - 1) / Config::BLOCK_K);
    const int last = static_cast<int>(gemm.k - static_cast<Long>(steps - 1) * Config::BLOCK_K);
    const auto load = [&](int step, int stage) {
        if (step < steps) {
            const int inside = step == steps - 1 ? last : Config::BLOCK_K;
            copy_a.start(shared + stage, inside);
            copy_b.start(shared + stage + Config::A::BYTES, inside);
        }
        copy_commit();  // an empty group keeps the count of groups in step
    };
    constexpr int LAST_STAGE = (Config::STAGES - 1) * Config::STAGE_BYTES;
#pragma unroll
    for (int step = 0; step < Config::STAGES; ++step) load(step, step * Config::STAGE_BYTES);
    copy_wait<Config::STAGES - 1>();
    __syncthreads();

    const int row = thread / 32 / Config::WARPS_N * Config::WARP_M, column = thread / 32 % Config::WARPS_N * Config::WARP_N;
    const int lane = thread % 32;
    // Fragments are read one ahead of the instructions, across barriers too. The loop has two steps of READ_K, of whose
    // fragments there are two each; a tile takes PASSES of it.
    constexpr int PASS_K = 2 * Config::READ_K, PASSES = Config::BLOCK_K / PASS_K, ALL = 2 * Sums::ROWS;
    static_assert(Config::BLOCK_K % PASS_K == 0, "whole passes");
    Left a[2];
    Right b[2];
    int stage = 0, pass = 0;
    const auto read = [&](int number) {
        const unsigned char* at = shared + stage;
        const int i = number % Sums::ROWS, first = number / Sums::ROWS * Config::READ_K;
        if (i == 0) b[number / Sums::ROWS].read(at + Config::A::BYTES + pass * Config::B::Tile::skipped(PASS_K), column, first, lane);
        Config::A::read(at + pass * Config::A::Tile::skipped(PASS_K), row + 16 * i, first, lane, a[number % 2]);
    };
    sums.clear();
    Sums run;
    if constexpr (Config::RUN > 0) run.clear();
    Sums& target = Config::RUN > 0 ? run : sums;
    read(0);
#pragma unroll 1
    for (int step = 0; step < steps;) {
#pragma unroll
        for (int number = 0; number < ALL - 1; ++number) {
            read(number + 1);
            target.multiply(number % Sums::ROWS, a[number % 2], b[number / Sums::ROWS]);
        }
        const bool ended = ++pass == PASSES;
        const int done = stage;
        if (ended) {
            pass = 0;
            if (step < steps - 1) {
                copy_wait<Config::STAGES - 2>();
                __syncthreads();  // the next tile is there for all, and all have read this one
                stage = stage == LAST_STAGE ? 0 : stage + Config::STAGE_BYTES;
            }
        }
        read(0);  // after the last step once more what is there, for nothing
        target.multiply(Sums::ROWS - 1, a[1], b[1]);
        if (!ended) continue;
        load(step + Config::STAGES, done);
        ++step;
        if constexpr (Config::RUN > 0) {
            if (step % (Config::RUN / Config::BLOCK_K) == 0 || step == steps) {
                sums.add(run);
                run.clear();
            }
        }
    }
    copy_wait<0>();
    __syncthreads();  // before the next tile's copies
}

// D = alpha sums + beta C.
GEMM_DEVICE void store(const GemmParams& gemm, const TileCoordinate& where, const Sums& sums) {
    const int thread = thread_again();
    const StoreEpilogue<Config> epilogue(gemm, where.batch);
    const int lane = thread % 32, g = lane / 4, t = lane % 4;
    const Long row = where.tile_m * Config::BLOCK_M + thread / 32 / Config::WARPS_N * Config::WARP_M;
    const Long column = where.tile_n * Config::BLOCK_N + thread / 32 % Config::WARPS_N * Config::WARP_N;
#pragma unroll
    for (int i = 0; i < Sums::ROWS; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Long here = row + 16 * i + Config::A::position(r, g);
            if (here >= gemm.m) continue;
#pragma unroll
            for (int j = 0; j < Sums::PAIRS; ++j) {
#pragma unroll
                for (int outer = 0; outer < 2; ++outer) {
                    // Neighbours: the two elements of a half, or one of each.
                    constexpr bool HALVES = Config::B::position(0, 1) == 1;
                    const Long there = column + 16 * j + (HALVES ? Config::B::position(outer, 2 * t) : Config::B::position(0, 2 * t + outer));
                    const Long left = gemm.n - there;
                    if (left <= 0) continue;
                    Config::Acc values[2];
#pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        const int half = HALVES ? outer : p, e = HALVES ? p : outer;
                        values[p] = make<Config::Acc>(
                            sums.at[0][i][j][half][r][e], sums.at[Config::COMPONENTS - 1][i][j][half][r][e]);
                    }
                    epilogue.visit(here, there, left < 2 ? 1 : 2, values);
                }
            }
        }
    }
}
