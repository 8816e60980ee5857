// What a kernel in double precision is compiled for.
#pragma once

#include "../common/ptx/hopper.cuh"
#include "operand.cuh"

struct Config {
    using Acc = GEMM_TYPE_ACC;
    using Stored = GEMM_TYPE_STORED;  // what memory holds: double, or float
    static constexpr bool COMPLEX = is_complex<Acc>, PLANAR = GEMM_PLANAR, VECTOR_D = GEMM_VECTOR_D;
    using C = Select<COMPLEX && !PLANAR, Complex<Stored>, Stored>;
    using D = C;
    static constexpr int COMPONENTS = COMPLEX ? 2 : 1, PLANES = PLANAR ? 2 : 1;
    static constexpr int ELEMENT = static_cast<int>(sizeof(Stored)) * COMPONENTS / PLANES;
    static constexpr int BLOCK_M = GEMM_BLOCK_M, BLOCK_N = GEMM_BLOCK_N, WARP_M = GEMM_WARP_M, WARP_N = GEMM_WARP_N;
    static constexpr int WARPS_N = BLOCK_N / WARP_N, WARPS = BLOCK_M / WARP_M * WARPS_N, THREADS = 32 * WARPS;
    static constexpr int STAGES = GEMM_STAGES, GROUP = GEMM_GROUP;
    static constexpr bool HAS_RUNS = GEMM_RUN != 0, KEEP_SHARED = GEMM_KEEP_SHARED;

    template <int EXTENT, bool ALONG, int UNIT>
    struct Operand {
        static constexpr bool ALONG_K = ALONG;
        using Tile = OctetTile<ELEMENT, EXTENT, ALONG>;
        using Copy = TileCopy<Tile, ELEMENT, EXTENT, Tile::DEPTH, ALONG, UNIT, PLANES, THREADS>;
        static constexpr int BYTES = PLANES * Tile::BYTES;

        static GEMM_DEVICE void bases(const MatrixParams& matrix, Long offset, const void* (&base)[PLANES]) {
            base[0] = static_cast<const unsigned char*>(matrix.re) + offset * ELEMENT;
            if constexpr (PLANES == 2) base[1] = static_cast<const unsigned char*>(matrix.im) + offset * ELEMENT;
        }
    };
    using A = Operand<BLOCK_M, GEMM_A_ALONG_K, GEMM_UNIT_A>;
    using B = Operand<BLOCK_N, GEMM_B_ALONG_K, GEMM_UNIT_B>;
    using Left = LeftFragment<Stored, COMPONENTS, PLANES, A::Tile, GEMM_CONJUGATE_A, GEMM_CONJUGATE_B>;
    using Right = RightFragment<Stored, COMPONENTS, PLANES, B::Tile>;

    // Rows, columns and steps of k of a step of the pipeline, and of an instruction on what fragments hold.
    static constexpr int BLOCK_K = A::Tile::DEPTH, ROWS = 16 / COMPONENTS, COLUMNS = 8, STEPS_K = 8 / COMPONENTS;
    static constexpr int RUN = GEMM_RUN / BLOCK_K;  // steps of the pipeline
    static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "whole warps");
    static_assert(WARP_M % A::Tile::ROWS_TOGETHER == 0 && WARP_N % B::Tile::ROWS_TOGETHER == 0, "whole groups of octets");
    static_assert(GEMM_RUN % BLOCK_K == 0 && BLOCK_K == GEMM_BLOCK_K, "whole steps, and as the host counts them");

    static constexpr int STAGE_BYTES = A::BYTES + B::BYTES;
    static constexpr int KEPT_BYTES = KEEP_SHARED ? BLOCK_M * BLOCK_N * 8 * COMPONENTS : 0;
    static constexpr int ALIGNMENT = 1024;  // of what the copy engine exchanges chunks in
    static constexpr int SHARED_BYTES = ALIGNMENT + STAGES * STAGE_BYTES + KEPT_BYTES + STAGES * 2 * 8;  // two barriers a stage
    static_assert(SHARED_BYTES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");

    // Two elements are written at once: see store.
    struct Threads {
        static constexpr int PIECE_N = ELEMENT == 16 ? 1 : 2;
    };
};
