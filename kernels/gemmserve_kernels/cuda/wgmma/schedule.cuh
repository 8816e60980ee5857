// Which piece of which product a block computes when.
#pragma once

#include "../common/judging/judged.cuh"
#include "../common/judging/verdict.cuh"
#include "params.cuh"

struct Unit {
    int tile_m, tile_n;  // of blocks
    int part;            // of k
    int batch;           // of this launch
};

// Neighbouring units share operands: RASTER rows of tiles are walked together, column by column.
template <class Config>
GEMM_DEVICE Unit unit_at(const WgmmaParams& params, int index, unsigned rank) {
    Unit unit;
    unit.part = 0;
    if (params.parts > 1) {
        unit.part = index % params.parts;
        index /= params.parts;
    }
    unit.batch = 0;
    if (params.matrices > 1) {
        const int tiles = params.tiles_m * params.tiles_n;
        unit.batch = index / tiles;
        index -= unit.batch * tiles;
    }
    const int band = index / (Config::RASTER * params.tiles_n), first = band * Config::RASTER;
    const int within = index - first * params.tiles_n;
    const int left = params.tiles_m - first, rows = left < Config::RASTER ? left : Config::RASTER;
    unit.tile_n = within / rows;
    unit.tile_m = first + within - unit.tile_n * rows;
    if constexpr (Config::CLUSTER > 1) unit.tile_m = unit.tile_m * Config::CLUSTER + static_cast<int>(rank);
    return unit;
}

// Where a matrix of the launch is: the numbers of its operands, how far C and D are from their first elements.
struct Matrices {
    int left, right;
    Long c, d;
};

// Of matrix `batch`. Divisions of 64 bits would take longer than a small product.
GEMM_DEVICE Matrices matrices_of(const WgmmaParams& params, int batch) {
    Matrices at{static_cast<int>(params.left.first_matrix), static_cast<int>(params.right.first_matrix), 0, 0};
#pragma unroll
    for (int axis = BATCH_DIMS - 1; axis >= 0; --axis) {
        if (batch == 0) break;
        const int outer = axis > 0 ? batch / params.batch_shape[axis] : 0;
        const int index = batch - outer * params.batch_shape[axis];
        at.left += index * static_cast<int>(params.left.batch_stride[axis]);
        at.right += index * static_cast<int>(params.right.batch_stride[axis]);
        at.c += index * params.c.batch_stride[axis];
        at.d += index * params.d.batch_stride[axis];
        batch = outer;
    }
    return at;
}

// What the producer finds out about a unit for the consumers, who would otherwise do so while nothing is multiplied.
struct Work {
    Unit unit;
    Matrices at;
};

struct Slice {
    int first, last;  // blocks of k
};

// The part of k that is multiplied, never nothing: past the end are zeros.
template <class Config>
GEMM_DEVICE Slice slice_of(const WgmmaParams& params, const Unit& unit, unsigned rank) {
    const int slices = params.parts * Config::SPLIT;
    if (slices == 1) return {0, params.k_blocks};
    const int slice = unit.part * Config::SPLIT + (Config::SPLIT > 1 ? static_cast<int>(rank) : 0);
    const int each = params.k_blocks / slices, more = params.k_blocks - each * slices;
    const int first = slice * each + (slice < more ? slice : more);
    const int count = each + (slice < more ? 1 : 0);
    return count > 0 ? Slice{first, first + count} : Slice{params.k_blocks, params.k_blocks + 1};
}

// What the pre-pass has found out of the operands, read after it has ended.
template <class Config>
struct Verdicts {
    const WgmmaParams& params;
    Doubt<Config::TILES> doubt;

    GEMM_DEVICE explicit Verdicts(const WgmmaParams& p) : params(p), doubt(p.left.deficits, p.right.deficits, p.wanted) {}

    // Whether there is nothing to do.
    GEMM_DEVICE bool none() const { return doubt.none(); }

    // Whether the elements from (row, column) on of product `batch` are this kernel's: of one tile, which lies in one group
    // of rows and one of columns.
    GEMM_DEVICE bool wants(const Matrices& at, int batch, Long row, Long column) const {
        if constexpr (Config::TILES == TILES_ALL) return true;
        if (!doubt.any) return Config::TILES == TILES_SERVED;
        if (row >= params.m || column >= params.n) return false;
        if constexpr (Config::TILES == TILES_FAILING) {
            return !element_passes<Config::SWAPPED>(
                params.left.deficits + batch * params.left.deficit_words,
                params.right.deficits + batch * params.right.deficit_words, row, column, params.most_deficit);
        } else {
            return doubt.wants(
                deficits_of(params.left.deficits, at.left, params.m, row),
                deficits_of(params.right.deficits, at.right, params.n, column), params.most_deficit);
        }
    }

    GEMM_DEVICE bool wants(int index) const {
        if (Config::TILES == TILES_ALL || !doubt.any) return !none();
        // All blocks of a cluster have tiles of one group of rows: they agree.
        static_assert(GROUP % (Config::BLOCK_M * Config::CLUSTER) == 0 && GROUP % Config::BLOCK_N == 0, "tiles in groups");
        static_assert(
            Config::TILES != TILES_FAILING || lie_in_tiles<Config::SWAPPED>(Config::BLOCK_M * Config::CLUSTER, Config::BLOCK_N),
            "a block computes all of a tile, or nothing of it");
        const Unit unit = unit_at<Config>(params, index, 0);
        return wants(
            matrices_of(params, unit.batch), unit.batch, static_cast<Long>(unit.tile_m) * Config::BLOCK_M,
            static_cast<Long>(unit.tile_n) * Config::BLOCK_N);
    }
};

// Calls `visit(index)` for every unit of this block. Where k is split over the cluster there is one only.
template <class Config, class Visitor>
GEMM_DEVICE void for_each_unit(const WgmmaParams& params, const Verdicts<Config>& verdicts, Visitor visit) {
    constexpr int BLOCKS = Config::CLUSTER * Config::SPLIT;
    const int first = blockIdx.x / BLOCKS;
    if constexpr (Config::SPLIT > 1) {
        visit(first);
    } else {
        const int step = gridDim.x / BLOCKS;
        for (int index = first; index < params.units; index += step) {
            if (verdicts.wants(index)) visit(index);
        }
    }
}

// Notes what this block computes the wide way: once, not for each part of k. By the producer, when all is fetched: the
// consumers do not wait for it.
template <class Config>
GEMM_DEVICE void count_units(const WgmmaParams& params, const Verdicts<Config>& verdicts, unsigned rank) {
    if (Config::SPLIT > 1 && rank != 0) return;
    Long elements = 0;
    for_each_unit<Config>(params, verdicts, [&](int index) {
        const Unit unit = unit_at<Config>(params, index, rank);
        if (unit.part != 0) return;
        elements += clipped(static_cast<Long>(unit.tile_m) * Config::BLOCK_M, Config::BLOCK_M, params.m) *
                    clipped(static_cast<Long>(unit.tile_n) * Config::BLOCK_N, Config::BLOCK_N, params.n);
    });
    if (elements != 0) add_elements(params.counters->wide, elements);
}
