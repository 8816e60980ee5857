// What a block computes, part by part, and how its producers and consumers wait for each other.
#pragma once

#include "../common/ptx/hopper.cuh"
#include "operand.cuh"

// The n-th stage of all that a block fills.
struct Turn {
    int stage = 0;
    unsigned parity = 0;

    // After so many ones.
    static GEMM_DEVICE Turn after(unsigned count) {
        Turn turn;
        turn.stage = static_cast<int>(count % Config::STAGES);
        turn.parity = count / Config::STAGES % 2;
        return turn;
    }
    GEMM_DEVICE void next() {
        if (++stage == Config::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// What producers and consumers share.
struct Pipeline {
    unsigned char* stages;
    Address full, empty, together;  // barriers: of each stage, and of the consumers

    GEMM_DEVICE unsigned char* stage(const Turn& turn) const { return stages + turn.stage * Config::STAGE_BYTES; }
    GEMM_DEVICE unsigned char* known(const Turn& turn) const {
        return stages + Config::KNOWN_AT + turn.stage * Config::KNOWN_STEP;
    }
    GEMM_DEVICE Address filled(const Turn& turn) const { return full + turn.stage * sizeof(Barrier); }
    GEMM_DEVICE Address emptied(const Turn& turn) const { return empty + turn.stage * sizeof(Barrier); }
};

// Says for the warp that all its lanes have come so far.
GEMM_DEVICE void arrive(Address barrier, int thread) {
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(barrier);
}

// Blocks take items in turns, those of a cluster neighbours along n: the first one, and from one to the next.
GEMM_DEVICE unsigned first_item() { return blockIdx.x / Config::CLUSTER; }
GEMM_DEVICE unsigned next_item() { return gridDim.x / Config::CLUSTER; }

// A tile of a matrix by its number there, in the order of `tile_of`: its row of tiles is the remainder.
GEMM_DEVICE Quotient tile_of_matrix(Long number, Long tiles_m, Long tiles_n) {
    if (tiles_m <= GEMM_RASTER) return divide(number, tiles_m);
    const TileCoordinate where = tile_of<GEMM_RASTER>(number, tiles_m, tiles_n);
    return {where.tile_n, where.tile_m};
}

// A part of k of a tile.
struct Item {
    int split;
    Long batch;

    GEMM_DEVICE Item(const FusedParams& params, unsigned number) {
        const GemmParams& gemm = params.gemm;
        unsigned tile = number;
        split = 0;
        if (params.splits > 1) {
            tile = number / params.splits;
            split = static_cast<int>(number % params.splits);
        }
        const Quotient place = divide(gemm.first_tile + tile, gemm.tiles_m * gemm.tiles_n);
        batch = place.quotient;
        in_matrix = static_cast<unsigned>(place.remainder);
        find(gemm);
    }
    // Goes on to item `number`, the block's next one. Tiles of a batch are many and short: none is found by division by the
    // tiles of a matrix but the first.
    GEMM_DEVICE void next(const FusedParams& params, unsigned number) {
        if (params.splits > 1) {
            *this = Item(params, number);
            return;
        }
        const unsigned tiles = static_cast<unsigned>(params.gemm.tiles_m * params.gemm.tiles_n);
        batch += params.step_matrices;
        in_matrix += params.step_tiles;
        if (in_matrix >= tiles) {
            in_matrix -= tiles;
            ++batch;
        }
        find(params.gemm);
    }

    GEMM_DEVICE Long row() const { return static_cast<Long>(tile_m) * Config::BLOCK_M; }
    GEMM_DEVICE Long column() const {
        Long tile = tile_n;
        if constexpr (Config::CLUSTER > 1) tile = tile * Config::CLUSTER + cluster_rank();
        return tile * Config::BLOCK_N;
    }
    // Rows and columns that lie inside the matrix: of a cluster's last blocks maybe none, or fewer.
    GEMM_DEVICE int rows(const GemmParams& gemm) const {
        return static_cast<int>(gemm.m - row() < Config::BLOCK_M ? gemm.m - row() : Config::BLOCK_M);
    }
    GEMM_DEVICE int columns(const GemmParams& gemm) const {
        return static_cast<int>(gemm.n - column() < Config::BLOCK_N ? gemm.n - column() : Config::BLOCK_N);
    }

  private:
    unsigned in_matrix;  // which of its tiles
    unsigned tile_m, tile_n;

    GEMM_DEVICE void find(const GemmParams& gemm) {
        tile_m = tile_n = 0;
        if (gemm.tiles_m * gemm.tiles_n == 1) return;
        const Quotient where = tile_of_matrix(in_matrix, gemm.tiles_m, gemm.tiles_n);
        tile_m = static_cast<unsigned>(where.remainder);
        tile_n = static_cast<unsigned>(where.quotient);
    }
};

// The chunks of an item.
struct Part {
    int first, end;

    GEMM_DEVICE Part(const FusedParams& params, unsigned number)
        : first(static_cast<int>(params.splits > 1 ? number % params.splits : 0) * params.chunks_part) {
        const int left = params.chunks - first;
        end = first + (left < params.chunks_part ? left : params.chunks_part);
    }
};

// Element offset of a matrix of the batch. Mostly one axis is left, and nothing to divide.
GEMM_DEVICE Long offset_of(Long batch, const GemmParams& gemm, const MatrixParams& matrix) {
    if (batch < gemm.batch_shape[BATCH_DIMS - 1]) return batch * matrix.batch_stride[BATCH_DIMS - 1];
    return batch_offset(batch, gemm.batch_shape, matrix.batch_stride);
}

// Where the image of a chunk of a tile's columns lies (fused_columns.cu); `matrix`: among those that have images.
GEMM_DEVICE unsigned char* image_at(const FusedParams& params, Long matrix, Long tile_n, int chunk) {
    return params.columns + ((matrix * params.gemm.tiles_n + tile_n) * params.chunks + chunk) * Config::STAGE_BYTES;
}

// What producers keep of an item.
struct Chunks {
    const Value* a;
    const Value* b;
    const unsigned char* images;  // of the tile's columns, from the first chunk of all on
    int rows, columns;
    int next, end;

    GEMM_DEVICE Chunks(const FusedParams& params, const Item& item)
        : rows(item.rows(params.gemm)), columns(item.columns(params.gemm)) {
        const GemmParams& gemm = params.gemm;
        const Long batch = item.batch;
        a = static_cast<const Value*>(gemm.a.re) + offset_of(batch, gemm, gemm.a) +
            item.row() * gemm.a.row_stride;
        b = static_cast<const Value*>(gemm.b.re) + offset_of(batch, gemm, gemm.b) +
            item.column() * gemm.b.column_stride;
        images = image_at(params, params.own_columns ? batch - params.first_matrix : 0, item.column() / Config::BLOCK_N, 0);
        next = item.split * params.chunks_part;
        end = next + params.chunks_part < params.chunks ? next + params.chunks_part : params.chunks;
    }
};

// Where a chunk lies in k: the first chunks have one piece of steps more.
struct Steps {
    static constexpr int PIECE = Config::PARTS == 2 ? 2 : 4;  // 16 bytes of numbers, which are copied at once
    Long first;
    int count;

    GEMM_DEVICE Steps(const FusedParams& params, int chunk) : count(count_of(params, chunk)) {
        const bool longer = chunk < params.longer;
        first = PIECE * (static_cast<Long>(chunk) * params.pieces + (longer ? chunk : params.longer));
    }
    // Goes on to `chunk`, the next one.
    GEMM_DEVICE void next(const FusedParams& params, int chunk) {
        first += count;
        count = count_of(params, chunk);
    }
    // The number of steps of a chunk; the last piece of the last chunk may lie half outside.
    static GEMM_DEVICE int count_of(const FusedParams& params, int chunk) {
        const bool cut = chunk + 1 == params.chunks && params.gemm.k % PIECE != 0;
        const int outside = PIECE == 2 ? cut : cut ? PIECE - static_cast<int>(params.gemm.k % PIECE) : 0;
        return PIECE * (static_cast<int>(params.pieces) + (chunk < params.longer)) - outside;
    }
};

// The chunks of all items of a block, one after the other.
struct Cursor {
    unsigned number;
    Item item;
    Chunks chunks;
    Steps steps;

    GEMM_DEVICE explicit Cursor(const FusedParams& params)
        : number(first_item()), item(params, number), chunks(params, item), steps(params, chunks.next) {}
    GEMM_DEVICE Cursor(const FusedParams& params, const Item& item, int chunk)
        : item(item), chunks(params, item), steps(params, chunk) {
        chunks.next = chunk;
    }
    // Goes on to the next one. False: there is none.
    GEMM_DEVICE bool next(const FusedParams& params) {
        if (++chunks.next < chunks.end) {
            steps.next(params, chunks.next);
            return true;
        }
        if (next_item() >= params.items - number) return false;
        number += next_item();
        item.next(params, number);
        chunks = Chunks(params, item);
        steps = Steps(params, chunks.next);
        return true;
    }
    GEMM_DEVICE ChunkPlace in_a(const FusedParams& params) const {
        return {chunks.a + steps.first * params.gemm.a.column_stride, chunks.rows, steps.count};
    }
    GEMM_DEVICE ChunkPlace in_b(const FusedParams& params) const {
        return {chunks.b + steps.first * params.gemm.b.row_stride, chunks.columns, steps.count};
    }
};
// The consumers wait for each other.
struct Meeting {
    Address barrier;
    unsigned parity = 0;

    GEMM_DEVICE void meet(int thread) {
        arrive(barrier, thread);
        barrier_wait(barrier, parity);
        parity ^= 1;
    }
};
