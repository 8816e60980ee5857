// Layouts, tiles and partitions: where an element of a tile lies, and which thread it belongs to.
//
// The vocabulary follows the tutorial of Composable Kernel's wrapper (layout, local tile, local partition, pad); the
// code is our own. A shape or a stride that is known when compiling is an Int<N>, any other a plain integer.
#pragma once

#include "../numbers/types.cuh"

template <int N>
struct Int {
    static constexpr int value = N;
    GEMM_DEVICE constexpr operator int() const { return N; }
};

// (i, j) -> i * row_stride + j * column_stride
template <class RowStride, class ColumnStride>
struct Layout {
    RowStride row_stride;
    ColumnStride column_stride;

    template <class Index>
    GEMM_DEVICE Index offset(Index i, Index j) const {
        return i * static_cast<Index>(row_stride) + j * static_cast<Index>(column_stride);
    }
};

// A view of memory through a layout.
template <class T, class TileLayout>
struct Tile {
    T* data;
    TileLayout layout;

    GEMM_DEVICE T& operator()(int i, int j) const { return data[layout.offset(i, j)]; }
    template <int N>
    GEMM_DEVICE Vector<T, N>& vector(int i, int j) const {
        return *reinterpret_cast<Vector<T, N>*>(data + layout.offset(i, j));
    }
};

// The operand's tile in shared memory: DEPTH steps of k, each a row of EXTENT elements plus padding.
//
// Rows of the tile are stored along k when the operand is read along k, so neighbouring threads write to neighbouring
// k: with the row's length a multiple of 16 bytes and 16 bytes of padding, a warp's transposed writes of any element
// size fall into different banks.
template <class Acc, int EXTENT, int DEPTH, bool PADDED>
struct SharedTile {
    static constexpr int WIDTH = piece_of<Acc>(1 << 10);
    static constexpr int LEADING = round_up(EXTENT, WIDTH) + (PADDED ? WIDTH : 0);
    static constexpr int BYTES = LEADING * DEPTH * static_cast<int>(sizeof(Acc));
    using View = Tile<Acc, Layout<Int<LEADING>, Int<1>>>;

    static GEMM_DEVICE View at(unsigned char* shared) { return View{reinterpret_cast<Acc*>(shared), {}}; }
};

// Which elements of a BLOCK_M x BLOCK_N tile one thread owns: THREAD_M x THREAD_N of them, as pieces of up to 16 bytes
// that alternate between the threads, so that neighbouring threads read neighbouring 16 bytes of shared memory and
// write neighbouring 16 bytes of the result.
template <class Acc, int BLOCK_M, int BLOCK_N, int THREAD_M, int THREAD_N>
struct Partition {
    static constexpr int THREADS_M = BLOCK_M / THREAD_M;
    static constexpr int THREADS_N = BLOCK_N / THREAD_N;
    static constexpr int THREADS = THREADS_M * THREADS_N;
    static constexpr int PIECE_M = piece_of<Acc>(THREAD_M);
    static constexpr int PIECE_N = piece_of<Acc>(THREAD_N);

    // 32 consecutive threads form a 4 x 8 patch where the tile allows: fewer distinct addresses a read than 1 x 32.
    static constexpr int PATCH_N = THREADS_N % 8 == 0 ? 8 : THREADS_N;
    static constexpr int PATCH_M = THREADS_M % 4 == 0 ? 4 : 1;

    int thread_m, thread_n;

    GEMM_DEVICE explicit Partition(int thread) {
        const int lane = thread % (PATCH_M * PATCH_N), patch = thread / (PATCH_M * PATCH_N);
        thread_n = patch % (THREADS_N / PATCH_N) * PATCH_N + lane % PATCH_N;
        thread_m = patch / (THREADS_N / PATCH_N) * PATCH_M + lane / PATCH_N;
    }

    // The tile's row of the thread's i-th element, increasing in i; likewise columns.
    GEMM_DEVICE int row(int i) const { return (i / PIECE_M * THREADS_M + thread_m) * PIECE_M + i % PIECE_M; }
    GEMM_DEVICE int column(int j) const { return (j / PIECE_N * THREADS_N + thread_n) * PIECE_N + j % PIECE_N; }
};
