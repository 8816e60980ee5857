// One block's tile in double precision on tensor cores: mma.sync behind a pipeline of tiles in shared memory.
//
// What a warp reads of shared memory takes less than half the time of what it multiplies, and a block of 128 x 128 takes
// 16 bytes a cycle of L2. Sums over RUN steps of k are added up by the ordinary units, which makes the error that of a
// BLAS that splits k, or smaller. Where a warp's sums leave no room in registers for those of the runs that are over, these
// are kept in shared memory. Every tile, and either way of copying, adds in the same order: none shows in a result's bits.
#pragma once

#include "../common/ptx/again.cuh"
#include "../common/ptx/mma.cuh"
#include "../epilogue/store.cuh"
#include "config.cuh"
#if GEMM_ENGINE
#include "engine.cuh"
#else
#include "copied.cuh"
#endif

struct Sums {
    static constexpr int ROWS = Config::WARP_M / Config::ROWS, COLUMNS = Config::WARP_N / Config::COLUMNS;
    static constexpr int COUNT = ROWS * COLUMNS * 4;
    double at[ROWS][COLUMNS][2][2];  // of an instruction's 16 x 8: half of the rows, element

    template <class F>
    GEMM_DEVICE void each(F change) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) change(at[i / 4 / COLUMNS][i / 4 % COLUMNS][i / 2 % 2][i % 2], i);
    }
    GEMM_DEVICE void clear() {
        each([](double& x, int) { x = 0.0; });
    }
    GEMM_DEVICE void add(const Sums& other) {
        each([&](double& x, int i) { x += other.at[i / 4 / COLUMNS][i / 4 % COLUMNS][i / 2 % 2][i % 2]; });
    }
    GEMM_DEVICE void multiply(int i, const Config::Left& a, const Config::Right (&b)[COLUMNS]) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) multiply(i, j, a, b[j]);
    }
    GEMM_DEVICE void multiply(int i, int j, const Config::Left& a, const Config::Right& b) {
        const double upper[2] = {a.at[0], a.at[2]}, lower[2] = {a.at[1], a.at[3]};
        MultiplyDouble<8>::run(at[i][j][0], at[i][j][1], upper, lower, b.at);
    }
};

// What is kept of the runs that are over: in registers, or in shared memory, a thread's pairs THREADS apart. Nothing where
// all of k is one run: sums in double of numbers in single precision.
template <bool HAS_RUNS, bool SHARED>
class Kept {
  public:
    GEMM_DEVICE explicit Kept(unsigned char*) {}
    GEMM_DEVICE void keep(Sums&) {}
    GEMM_DEVICE void finish(Sums&) {}
};

template <>
class Kept<true, false> {
  public:
    GEMM_DEVICE explicit Kept(unsigned char*) { sums_.clear(); }
    GEMM_DEVICE void keep(Sums& run) {
        sums_.add(run);
        run.clear();
    }
    GEMM_DEVICE void finish(Sums& run) { run.add(sums_); }

  private:
    Sums sums_;
};

template <>
class Kept<true, true> {
  public:
    GEMM_DEVICE explicit Kept(unsigned char* memory) : pairs_(reinterpret_cast<Pair*>(memory) + thread_again()) {}
    GEMM_DEVICE void keep(Sums& run) {
        pass<true>(run);
        empty_ = false;
    }
    GEMM_DEVICE void finish(Sums& run) {
        if (!empty_) pass<false>(run);
    }

  private:
    Pair* pairs_;
    bool empty_ = true;

    template <bool KEEP>
    GEMM_DEVICE void pass(Sums& run) {
        double* const sums = &run.at[0][0][0][0];
#pragma unroll
        for (int i = 0; i < Sums::COUNT / 2; ++i) {
            Pair& kept = pairs_[i * Config::THREADS];
            Pair both = {{sums[2 * i], sums[2 * i + 1]}};
            if (!empty_) {
                const Pair before = kept;
                both.at[0] += before.at[0];
                both.at[1] += before.at[1];
            }
            if (KEEP) kept = both;
            sums[2 * i] = KEEP ? 0.0 : both.at[0];
            sums[2 * i + 1] = KEEP ? 0.0 : both.at[1];
        }
    }
};

// Where what a lane reads of a stage begins: see OctetTile::first.
struct FirstOfLane {
    int a, b;
};
GEMM_DEVICE FirstOfLane first_of_lane() {
    const int warp = thread_again() / 32, lane = thread_again() % 32;
    const int row = warp / Config::WARPS_N * Config::WARP_M, column = warp % Config::WARPS_N * Config::WARP_N;
    return {
        Config::A::Tile::first(lane) + row * Config::A::Tile::SPAN,
        Config::B::Tile::first(lane) + column * Config::B::Tile::SPAN + Config::A::BYTES};
}

// sums = op(A) op(B) for the tile at `where`.
GEMM_DEVICE void accumulate(
    Pipeline& pipeline, const GemmParams& gemm, const TileCoordinate& where, unsigned char* memory, Sums& sums) {
    const int steps = static_cast<int>((gemm.k + Config::BLOCK_K - 1) / Config::BLOCK_K);
    sums.clear();
    if (steps == 0) return;
    Arriving tiles(pipeline, gemm, where, steps);
    const FirstOfLane first = first_of_lane();
    const unsigned zero = static_cast<unsigned>(gemm.conjugate_a);  // 0: conjugation is in this kernel's source
    // Fragments are read one ahead of the instructions, across steps too.
    constexpr int STEPS = Config::BLOCK_K / Config::STEPS_K, ALL = STEPS * Sums::ROWS;
    static_assert(STEPS % 2 == 0, "of two fragments one is read");
    Config::Left a[2];
    Config::Right b[2][Sums::COLUMNS];
    const auto read = [&](int number) {
        const int i = number % Sums::ROWS, step = number / Sums::ROWS;
        if (i == 0) {
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j) b[step % 2][j].read(tiles.now(), first.b, j, step);
        }
        a[number % 2].read(tiles.now(), first.a, i, step, zero);
    };
    const auto multiply = [&](int number) {
        sums.multiply(number % Sums::ROWS, a[number % 2], b[number / Sums::ROWS % 2]);
    };
    const auto all_but_one = [&] {
#pragma unroll
        for (int number = 0; number < ALL - 1; ++number) {
            read(number + 1);
            multiply(number);
        }
    };
    // Bits of the last fragments of a stage, for `once_read`; at the end of all steps those of the two before join them.
    // Kernels of single precision have no registers left for it.
    const auto last_read = [&] {
        unsigned bits = a[(ALL - 1) % 2].read_bits();
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) bits ^= b[(STEPS - 1) % 2][j].read_bits();
        return bits;
    };
    Kept<Config::HAS_RUNS, Config::KEEP_SHARED> kept(memory);
    int left = (Config::RUN + 1) / 2;  // so that blocks of k that begin at a multiple of a run have two of them
    read(0);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
        all_but_one();
        tiles.next();
        read(0);
        multiply(ALL - 1);
        if constexpr (Config::HAS_RUNS) tiles.release(last_read(), zero);
        else tiles.release();
        if (Config::HAS_RUNS && --left == 0) {
            left = Config::RUN;
            kept.keep(sums);
        }
    }
    all_but_one();
    multiply(ALL - 1);
    if constexpr (Config::HAS_RUNS) {
        unsigned bits = last_read() ^ a[ALL % 2].read_bits();
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) bits ^= b[STEPS % 2][j].read_bits();
        tiles.end(bits, zero);
    } else {
        tiles.end();
    }
    kept.finish(sums);
}

// Where in its warp's tile a lane's pieces of the result lie: N neighbours, which are the elements of an octet, or one of
// either octet of a pair.
struct Pieces {
    using Left = Config::A::Tile;
    using Right = Config::B::Tile;
    static constexpr int N = Config::Threads::PIECE_N;
    static constexpr bool PARTS = Config::COMPLEX;  // what the halves of an instruction's rows are: parts, or octets
    static constexpr bool INSIDE = Right::position(0, 1) == 1;
    static constexpr int ROWS = Sums::ROWS * (PARTS ? 1 : 2), COUNT = Sums::COLUMNS * 2 / N;  // in a row

    static GEMM_DEVICE constexpr int row(int r, int g) { return Left::position(r, g); }
    static GEMM_DEVICE constexpr int octet(int piece, int p) { return N == 1 || INSIDE ? piece * N / 2 : piece / 2 * 2 + p; }
    static GEMM_DEVICE constexpr int element(int piece, int p) { return N == 1 || !INSIDE ? piece % 2 : p; }
    static GEMM_DEVICE constexpr int column(int piece, int t) { return Right::position(octet(piece, 0), 2 * t + element(piece, 0)); }

    static GEMM_DEVICE void of(const Sums& sums, int r, int piece, Config::Acc (&values)[N]) {
#pragma unroll
        for (int p = 0; p < N; ++p) {
            const auto& at = sums.at[PARTS ? r : r / 2][octet(piece, p)];
            values[p] = make<Config::Acc>(at[PARTS ? 0 : r % 2][element(piece, p)], at[1][element(piece, p)]);
        }
    }
};

// The same where all of a warp's tile is inside D, 16 bytes of it lie together and C is not read: with one address for each
// row. What it takes is not hidden behind instructions of the tensor cores.
GEMM_DEVICE void store_whole(const GemmParams& gemm, Long batch, Long row, Long column, const Sums& sums) {
    const int g = thread_again() % 32 / 4, t = thread_again() % 4;
    const Long offset = batch_offset(batch, gemm.batch_shape, gemm.d.batch_stride) + row * gemm.d.row_stride + column;
    constexpr bool PLANAR = Config::PLANAR;
#pragma unroll
    for (int r = 0; r < Pieces::ROWS; ++r) {
        const Long in_row = offset + Pieces::row(r, g) * gemm.d.row_stride + Pieces::column(0, t);
#pragma unroll
        for (int piece = 0; piece < Pieces::COUNT; ++piece) {
            Config::Acc values[Pieces::N];
            Pieces::of(sums, r, piece, values);
#pragma unroll
            for (int p = 0; p < Pieces::N; ++p) values[p] = scale(values[p], gemm.alpha[0], 0.0);
            const Long at = in_row + (Pieces::column(piece, 0) - Pieces::column(0, 0));
            write_piece<Config::D, PLANAR, true>(gemm.d, at, 1, values, Pieces::N);
        }
    }
}

// D = alpha sums + beta C.
GEMM_DEVICE void store(const GemmParams& gemm, const TileCoordinate& where, const Sums& sums) {
    const StoreEpilogue<Config> epilogue(gemm, where.batch);
    const int warp = thread_again() / 32, g = thread_again() % 32 / 4, t = thread_again() % 4;
    const Long first_row = where.tile_m * Config::BLOCK_M + warp / Config::WARPS_N * Config::WARP_M;
    const Long first_column = where.tile_n * Config::BLOCK_N + warp % Config::WARPS_N * Config::WARP_N;
    if (Config::VECTOR_D && !epilogue.reads_c && gemm.alpha[1] == 0.0 && first_row + Config::WARP_M <= gemm.m &&
        first_column + Config::WARP_N <= gemm.n) {
        store_whole(gemm, where.batch, first_row, first_column, sums);
        return;
    }
#pragma unroll
    for (int r = 0; r < Pieces::ROWS; ++r) {
        const Long row = first_row + Pieces::row(r, g);
        if (row >= gemm.m) continue;
#pragma unroll
        for (int piece = 0; piece < Pieces::COUNT; ++piece) {
            const Long column = first_column + Pieces::column(piece, t);
            const Long left = gemm.n - column;
            if (left <= 0) continue;
            Config::Acc values[Pieces::N];
            Pieces::of(sums, r, piece, values);
            epilogue.visit(row, column, left < Pieces::N ? static_cast<int>(left) : Pieces::N, values);
        }
    }
}

GEMM_DEVICE unsigned char* aligned(unsigned char* shared) {
#if GEMM_ENGINE
    return shared + (0u - shared_address(shared)) % Config::ALIGNMENT;
#else
    return shared;
#endif
}

// Walks over tiles: `each(visit)` calls visit(tile) with a function that says where the tile is, the same in every thread.
// `make(pipeline, place, memory)` multiplies and stores one, in the warps that do; `memory` is what Kept has.
template <class Params, class Each, class Make>
GEMM_DEVICE void multiply_tiles(const Params& params, unsigned char* shared, Each each, Make make) {
    unsigned char* const memory = aligned(shared);
    share_work(
        memory,
        [&](auto& pipeline) {
#if GEMM_ENGINE
            each([&](auto place) { pipeline.produce(params.map_a, params.map_b, params.gemm, place()); });
#endif
        },
        [&](Pipeline& pipeline) {
            each([&](auto place) { make(pipeline, place, memory + Config::STAGES * Config::STAGE_BYTES); });
        });
}

template <class Params, class Each>
GEMM_DEVICE void multiply_tiles(const Params& params, unsigned char* shared, Each each) {
    multiply_tiles(params, shared, each, [&](Pipeline& pipeline, auto place, unsigned char* memory) {
        Sums sums;
        accumulate(pipeline, params.gemm, place(), memory, sums);
        store(params.gemm, place(), sums);  // registers are short in the loop over k
    });
}
