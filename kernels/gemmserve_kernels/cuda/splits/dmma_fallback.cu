// The same as fallback.cu for operands in single precision, multiplied in double on tensor cores and rounded to single
// once. Every block finds out which tiles have flagged elements and takes its share of those: a few bad rows keep all
// multiprocessors busy.
#include "../common/dependent.cuh"
#include "../dmma/some.cuh"
#include "../epilogue/flags.cuh"

struct DmmaFallbackParams {
    TensorMap map_a, map_b;
    GemmParams gemm;
    FlagParams flags;
    Long matrices;
    Long tiles;
    int shift, columns;  // see Table
    Long reserved[1];
};

static_assert(GROUP % Config::BLOCK_M == 0 && GROUP % Config::BLOCK_N == 0, "a tile lies in one group either way");
static_assert(!FAILING || lie_in_tiles<TURNED>(Config::BLOCK_M, Config::BLOCK_N), "all of a tile fails, or nothing");

constexpr int PLACES = GEMM_PLACES;

// What the vectors of tiles of rows, and from place `columns` on of columns, are flagged with (summary_of), in all matrices.
// 2^shift neighbouring tiles share a place: where there are more tiles than places, a block may compute one of which it
// writes nothing.
class Table {
  public:
    GEMM_DEVICE Table(int (&places)[PLACES], const DmmaFallbackParams& params) : places_(places), params_(params) {}

    // By all threads of a block, which meet before anybody looks it up.
    GEMM_DEVICE void fill() const {
        for (int i = static_cast<int>(threadIdx.x); i < PLACES; i += Pipeline::THREADS) places_[i] = 0;
        __syncthreads();
        fill<Config::BLOCK_M>(params_.flags.rows, params_.gemm.m, params_.gemm.tiles_m, 0);
        fill<Config::BLOCK_N>(params_.flags.columns, params_.gemm.n, params_.gemm.tiles_n, params_.columns);
        __syncthreads();
    }

    GEMM_DEVICE bool any_is_unfit(const TileCoordinate& where) const {
        const int row = place(where.batch * params_.gemm.tiles_m + where.tile_m);
        const int column = params_.columns + place(where.batch * params_.gemm.tiles_n + where.tile_n);
        return ::any_is_unfit(places_[row], places_[column]);
    }

  private:
    int (&places_)[PLACES];
    const DmmaFallbackParams& params_;

    GEMM_DEVICE int place(Long tile) const { return static_cast<int>(tile >> params_.shift); }

    // A warp takes GROUP vectors at a time, whose flags it asks for together.
    template <int BLOCK>
    GEMM_DEVICE void fill(const MatrixParams& flags, Long extent, Long tiles, int first) const {
        constexpr int STRIPS = GROUP / 32, OF_TILE = BLOCK / 32;
        static_assert(BLOCK % 32 == 0, "a strip lies in one tile");
        if (flags.re == nullptr) return;
        const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
        const Long groups = groups_of(extent);
        for (Long number = warp; number < params_.matrices * groups; number += Pipeline::THREADS / 32) {
            const Quotient at = divide(number, groups);
            const Long vector = at.remainder * GROUP + lane;
            const Long from = batch_offset(at.quotient, params_.gemm.batch_shape, flags.batch_stride) + vector;
            const Long tile = at.quotient * tiles + at.remainder * (GROUP / BLOCK);
            int found[STRIPS];
#pragma unroll
            for (int i = 0; i < STRIPS; ++i) found[i] = vector + i * 32 < extent ? summary_of(flags_at(flags, from + i * 32)) : 0;
#pragma unroll
            for (int i = 0; i < STRIPS; ++i) {
                int all = 0;
#pragma unroll
                for (int bit = 1; bit <= FLAG_BOTH + 1; bit *= 2) {
                    if (__any_sync(0xffffffffu, found[i] & bit)) all |= bit;
                }
                if (lane == 0 && all != 0) atomicOr(&places_[first + place(tile + i / OF_TILE)], all);
            }
        }
    }
};

GEMM_DEVICE TileCoordinate place(const DmmaFallbackParams& params, int number) {
    return tile_of<Config::GROUP>(number, params.gemm.tiles_m, params.gemm.tiles_n);
}

// Whether all of a tile is to be replaced, whatever its rows and columns are flagged with.
GEMM_DEVICE bool is_whole(const DmmaFallbackParams& params, const MatrixFlags& flags, const TileCoordinate& where) {
    return !params.flags.widened && flags.rest(where.tile_m * Config::BLOCK_M, where.tile_n * Config::BLOCK_N);
}

GEMM_DEVICE bool wants(const DmmaFallbackParams& params, const Table& table, int number) {
    if (number >= params.tiles) return false;
    const TileCoordinate where = place(params, number);
    const MatrixFlags flags(params.flags, params.gemm, where.batch);
    if constexpr (FAILING) {
        return table.any_is_unfit(where) && flags.rest(where.tile_m * Config::BLOCK_M, where.tile_n * Config::BLOCK_N);
    }
    return table.any_is_unfit(where) || is_whole(params, flags, where);
}

// Counts the flagged elements of a tile. By a whole warp.
GEMM_DEVICE void count(const DmmaFallbackParams& params, const TileCoordinate& where) {
    if (params.flags.counters == nullptr) return;
    const MatrixFlags flags(params.flags, params.gemm, where.batch);
    const Long first_row = where.tile_m * Config::BLOCK_M, first_column = where.tile_n * Config::BLOCK_N;
    const int lane = thread_again() % 32;
    int of_rows[FLAG_BOTH + 1] = {}, of_columns[FLAG_BOTH + 1] = {};
    const auto add = [](int (&to)[FLAG_BOTH + 1], int flag) {
#pragma unroll
        for (int i = 1; i <= FLAG_BOTH; ++i) to[i] += __popc(__ballot_sync(0xffffffffu, flag == i));
    };
    for (int i = lane; i < Config::BLOCK_M; i += 32) add(of_rows, flags.row(first_row + i));
    for (int j = lane; j < Config::BLOCK_N; j += 32) add(of_columns, flags.column(first_column + j));
    const Long rows = clipped(first_row, Config::BLOCK_M, params.gemm.m);
    const Long columns = clipped(first_column, Config::BLOCK_N, params.gemm.n);
    const bool whole = is_whole(params, flags, where);
    const Long unfit = whole ? rows * columns : unfit_pairs(of_rows, of_columns, rows, columns);
    if (lane == 0 && unfit != 0) count(params.flags, unfit, whole || flags.rest(first_row, first_column));
}

// What vectors are flagged with (summary_of), EACH together, `flag_of(number)` of VECTORS. By a whole warp.
template <int VECTORS, int EACH, class FlagOf>
GEMM_DEVICE void summarise(int (&found)[VECTORS / EACH], FlagOf flag_of) {
    static_assert(32 % EACH == 0, "whole ones of a ballot");
    const int lane = thread_again() % 32;
#pragma unroll
    for (int i = 0; i < VECTORS / EACH; ++i) found[i] = 0;
#pragma unroll
    for (int first = 0; first < VECTORS; first += 32) {
        const int mine = first + lane < VECTORS ? summary_of(flag_of(first + lane)) : 0;
#pragma unroll
        for (int bit = 1; bit <= FLAG_BOTH + 1; bit *= 2) {
            const unsigned lanes = __ballot_sync(0xffffffffu, mine & bit);
#pragma unroll
            for (int from = 0; from < 32 && first + from < VECTORS; from += EACH) {
                if (lanes >> from & ((1u << EACH) - 1)) found[(first + from) / EACH] |= bit;
            }
        }
    }
}

// The pieces of a warp's part of a tile that have flagged elements, the same in all lanes.
GEMM_DEVICE unsigned wanted_pieces(const DmmaFallbackParams& params, const TileCoordinate& where) {
    const MatrixFlags flags(params.flags, params.gemm, where.batch);
    if (is_whole(params, flags, where)) return Piece::ALL;
    const int warp = thread_again() / 32;
    const Long row = where.tile_m * Config::BLOCK_M + warp / Config::WARPS_N * Config::WARP_M;
    const Long column = where.tile_n * Config::BLOCK_N + warp % Config::WARPS_N * Config::WARP_N;
    int rows[Sums::ROWS], columns[Sums::COLUMNS];
    summarise<Config::WARP_M, Config::ROWS>(
        rows, [&](int i) { return flags.row(row + Config::A::Tile::position(i / 8, i % 8)); });
    summarise<Config::WARP_N, Config::COLUMNS>(
        columns, [&](int j) { return flags.column(column + Config::B::Tile::position(j / 8, j % 8)); });
    unsigned wanted = 0;
#pragma unroll
    for (int i = 0; i < Sums::ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < Sums::COLUMNS; ++j) {
            if (any_is_unfit(rows[i], columns[j])) wanted |= Piece::bit(i, j);
        }
    }
    return wanted;
}

// Writes a warp's part of a tile, or its flagged elements alone. What lies outside of D counts as flagged.
GEMM_DEVICE void put(const DmmaFallbackParams& params, const TileCoordinate& where, const Sums& sums) {
    constexpr int N = Pieces::N, ROWS = Pieces::ROWS, COLUMNS = Pieces::COUNT * N;
    static_assert(2 * ROWS <= 32 && 2 * COLUMNS <= 32, "two bits for each in a word");
    const GemmParams& gemm = params.gemm;
    const MatrixFlags flags(params.flags, gemm, where.batch);
    const int warp = thread_again() / 32, g = thread_again() % 32 / 4, t = thread_again() % 4;
    const Long first_row = where.tile_m * Config::BLOCK_M + warp / Config::WARPS_N * Config::WARP_M;
    const Long first_column = where.tile_n * Config::BLOCK_N + warp % Config::WARPS_N * Config::WARP_N;
    unsigned of_rows = 0, of_columns = 0;
    bool all = true;
    if (!is_whole(params, flags, where)) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Long row = first_row + Pieces::row(r, g);
            of_rows |= static_cast<unsigned>(row < gemm.m ? flags.row(row) & FLAG_BOTH : FLAG_BOTH) << 2 * r;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const Long column = first_column + Pieces::column(c / N, t) + c % N;
            of_columns |= static_cast<unsigned>(column < gemm.n ? flags.column(column) & FLAG_BOTH : FLAG_BOTH) << 2 * c;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const unsigned repeated = (of_rows >> 2 * r & FLAG_BOTH) * (0x55555555u >> (32 - 2 * COLUMNS));
            all = all && (of_columns | repeated) == 0xffffffffu >> (32 - 2 * COLUMNS);
        }
    }
    if (__all_sync(0xffffffffu, all)) {
        store(gemm, where, sums);
        return;
    }
    const StoreEpilogue<Config> epilogue(gemm, where.batch);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const Long row = first_row + Pieces::row(r, g);
#pragma unroll
        for (int piece = 0; piece < Pieces::COUNT; ++piece) {
            Config::Acc values[N];
            Pieces::of(sums, r, piece, values);
#pragma unroll
            for (int p = 0; p < N; ++p) {
                const Long column = first_column + Pieces::column(piece, t) + p;
                const unsigned both = of_rows >> 2 * r | of_columns >> 2 * (piece * N + p);
                if (is_unfit(static_cast<int>(both)) && row < gemm.m && column < gemm.n) epilogue.put(row, column, values[p]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(Pipeline::THREADS, GEMM_MIN_BLOCKS)
    dmma_fallback(const __grid_constant__ DmmaFallbackParams params) {
    GEMM_DYNAMIC_SHARED(shared);
    __shared__ int places[PLACES];
    let_next_start();
    wait_for_previous();
    if (params.flags.none()) return;
    const Table table(places, params);
    table.fill();
    const int tiles = static_cast<int>(params.tiles);
    multiply_tiles(
        params, shared,
        [&](auto visit) {
            unsigned turn = blockIdx.x;  // flagged tiles before the next one of this block
            for (int first = 0; first < tiles; first += 32) {
                unsigned wanted = __ballot_sync(0xffffffffu, wants(params, table, first + thread_again() % 32));
                while (wanted != 0) {
                    const int bit = __ffs(static_cast<int>(wanted)) - 1;
                    wanted &= wanted - 1;
                    if (turn-- != 0) continue;
                    turn = gridDim.x - 1;
                    if (thread_again() / 32 == Pipeline::IDLE_WARP) count(params, place(params, first + bit));
                    visit([&] { return place(params, once_more(first + bit)); });
                }
            }
        },
        [&](Pipeline& pipeline, auto place, unsigned char* memory) {
            const unsigned wanted = GEMM_SOME ? wanted_pieces(params, place()) : Piece::ALL;
            Sums sums;
            if (wanted == Piece::ALL) {
                accumulate(pipeline, params.gemm, place(), memory, sums);
            } else {
                accumulate_some(pipeline, params.gemm, place(), wanted, sums);
            }
            put(params, place(), sums);
        });
}
