// Which piece of which product a block computes when.
#pragma once

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

// The offset of matrix `batch` of the launch: batch indices times strides. Divisions of 64 bits would take longer than
// a small product.
GEMM_DEVICE Long offset_of(int batch, const int (&shape)[BATCH_DIMS], const Long (&strides)[BATCH_DIMS]) {
    Long offset = 0;
    if (batch == 0) return offset;
#pragma unroll
    for (int axis = BATCH_DIMS - 1; axis > 0; --axis) {
        const int outer = batch / shape[axis];
        offset += (batch - outer * shape[axis]) * strides[axis];
        batch = outer;
    }
    return offset + batch * strides[0];
}

struct Slice {
    int first, last;  // blocks of k
};

template <class Config>
GEMM_DEVICE Slice slice_of(const WgmmaParams& params, const Unit& unit, unsigned rank) {
    const int slices = params.parts * Config::SPLIT;
    if (slices == 1) return {0, params.k_blocks};
    const int slice = unit.part * Config::SPLIT + (Config::SPLIT > 1 ? static_cast<int>(rank) : 0);
    const int each = params.k_blocks / slices, more = params.k_blocks - each * slices;
    const int first = slice * each + (slice < more ? slice : more);
    return {first, first + each + (slice < more ? 1 : 0)};
}

// Calls `visit(unit)` for every unit of this block. Where k is split over the cluster there is one only.
template <class Config, class Visitor>
GEMM_DEVICE void for_each_unit(const WgmmaParams& params, unsigned rank, Visitor visit) {
    constexpr int BLOCKS = Config::CLUSTER * Config::SPLIT;
    const int first = blockIdx.x / BLOCKS;
    if constexpr (Config::SPLIT > 1) {
        visit(unit_at<Config>(params, first, rank));
    } else {
        const int step = gridDim.x / BLOCKS;
        for (int index = first; index < params.units; index += step) visit(unit_at<Config>(params, index, rank));
    }
}
