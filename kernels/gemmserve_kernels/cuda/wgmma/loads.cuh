// What the producer fetches into a stage: STAGES of BLOCK_K columns of k for each block of k, `load` for one of them.
#pragma once

#include "pipeline.cuh"

// Where a unit's operands are, and a stage is.
struct Source {
    int row_left, row_right, matrix_left, matrix_right;
};
struct Target {
    Address stage, full;
};

// The planes of both operands: all of them, or (3xfp16-3m) those of one of three products.
template <class Config>
struct PlaneLoad {
    static constexpr int STAGES = Config::PHASES;

    // The first plane of product `phase` on either side.
    static GEMM_DEVICE int first_plane(int phase, bool of_a) {
        if constexpr (Config::PHASES == 1) return 0;
        return of_a ? (phase == 0 ? 4 : 2 * phase - 2) : 2 * phase;
    }

    static GEMM_DEVICE void load(
        const WgmmaParams& params, const Source& from, const Target& to, int block, int phase, unsigned rank) {
        const int x = block * Config::BLOCK_K;
        const int left_plane = first_plane(phase, !Config::SWAPPED), plane = first_plane(phase, Config::SWAPPED);
        copy_box(to.stage, params.map_left, x, from.row_left, left_plane, from.matrix_left, to.full);
        const Address to_right = to.stage + Config::LEFT_BYTES;
        if constexpr (Config::CLUSTER == 1) {
            copy_box(to_right, params.map_right, x, from.row_right, plane, from.matrix_right, to.full);
        } else {  // every block of the cluster fetches its share for all of them
            constexpr bool BY_PLANES = Config::STAGE_PLANES % Config::CLUSTER == 0;
            const int share = static_cast<int>(rank);
            copy_box_multicast(
                to_right + share * (Config::RIGHT_BYTES / Config::CLUSTER), params.map_right, x,
                from.row_right + (BY_PLANES ? 0 : share * (Config::BLOCK_N / Config::CLUSTER)),
                plane + (BY_PLANES ? share * (Config::STAGE_PLANES / Config::CLUSTER) : 0), from.matrix_right, to.full,
                Config::ALL_BLOCKS);
        }
    }
};

// float16 operands as they are: rows along k in one box, or columns of 64 rows.
template <class Config>
struct DirectLoad {
    static constexpr int STAGES = 1;

    // ROWS rows of one operand, from `row` and `k` on.
    template <bool ACROSS, int ROWS, class Copy>
    static GEMM_DEVICE void load_rows(Address target, int row, int k, const Copy& copy) {
        if constexpr (ACROSS) {
#pragma unroll
            for (int first = 0; first < ROWS; first += 64) copy(target + first * Config::BLOCK_K * 2, row + first, k);
        } else {
            copy(target, k, row);
        }
    }

    static GEMM_DEVICE void load(
        const WgmmaParams& params, const Source& from, const Target& to, int block, int, unsigned rank) {
        const int k = block * Config::BLOCK_K;
        constexpr int ROWS = Config::BLOCK_N / Config::CLUSTER;  // of the right operand, for all of the cluster
        load_rows<Config::LEFT_ACROSS, Config::BLOCK_M>(to.stage, from.row_left, k, [&](Address at, int x, int y) {
            copy_box(at, params.map_left, x, y, 0, from.matrix_left, to.full);
        });
        const int share = Config::CLUSTER > 1 ? static_cast<int>(rank) * ROWS : 0;  // else a rank is a part of k
        load_rows<Config::RIGHT_ACROSS, ROWS>(
            to.stage + Config::LEFT_BYTES + share * Config::BLOCK_K * 2, from.row_right + share, k,
            [&](Address at, int x, int y) {
                if constexpr (Config::CLUSTER == 1) {
                    copy_box(at, params.map_right, x, y, 0, from.matrix_right, to.full);
                } else {
                    copy_box_multicast(at, params.map_right, x, y, 0, from.matrix_right, to.full, Config::ALL_BLOCKS);
                }
            });
    }
};

// The planes of the real or of the imaginary part of one operand: 0 re of the left one, 1 re of the right one, 2 im of
// the left one, 3 of the right one; im first in every other block of k.
template <class Config>
struct QuarterLoad {
    static constexpr int STAGES = 4;

    static GEMM_DEVICE void load(
        const WgmmaParams& params, const Source& from, const Target& to, int block, int quarter, unsigned) {
        const int x = block * Config::BLOCK_K, part = (quarter / 2) ^ (block & 1);
#pragma unroll
        for (int plane = 0; plane < Config::DEPTH; ++plane) {
            if (quarter % 2 == 0) {
                copy_box(
                    to.stage + plane * Config::LEFT_PLANE, params.map_left, x, from.row_left, part + 2 * plane,
                    from.matrix_left, to.full);
            } else {
                copy_box(
                    to.stage + plane * Config::RIGHT_PLANE, params.map_right, x, from.row_right, part + 2 * plane,
                    from.matrix_right, to.full);
            }
        }
    }
};

template <class Config>
using LoadOf = Select<
    Config::QUARTERED, QuarterLoad<Config>, Select<Config::DIRECT, DirectLoad<Config>, PlaneLoad<Config>>>;
