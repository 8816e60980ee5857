// An operand's tile in shared memory, as it lies in global memory, and the asynchronous copy that brings it there.
#pragma once

#include "../common/ptx/cp_async.cuh"
#include "../common/raster.cuh"
#include "../common/numbers/types.cuh"

// EXTENT rows of the operand by DEPTH steps of k, ELEMENT bytes each. ALONG_K: a line of shared memory is a row and runs
// along k, and a lane of a fragment reads LANE bytes of it: 4 lanes, t = 0 .. 3, take 4 LANE neighbouring bytes of row g.
// Otherwise a line is a step of k and runs along the rows: lane (g, t) takes LANE bytes at g LANE of line 2t or 2t + 1.
//
// The 16-byte chunks of a line are exchanged (XOR with a key of the line), so that the lanes whose reads are served
// together, 8 for 16 bytes, 16 for 8 bytes, fall into different banks.
template <int ELEMENT, int EXTENT, int DEPTH, bool ALONG_K, int LANE>
struct FragmentTile {
    static constexpr int LINE = (ALONG_K ? DEPTH : EXTENT) * ELEMENT;
    static constexpr int LINES = ALONG_K ? EXTENT : DEPTH;
    static constexpr int BYTES = LINE * LINES;
    static constexpr int TAKEN = 4 * LANE;  // bytes of one line that one fragment takes along k
    static constexpr int TOGETHER = LINE >= 128 ? 1 : 128 / LINE;  // lines in all 32 banks
    static constexpr int KEYS = (LINE >= 128 ? 128 : LINE) / TAKEN;
    static_assert(LINE % 16 == 0 && (ALONG_K ? LINE % TAKEN == 0 : LINE % 128 == 0), "a line must hold whole chunks");

    static GEMM_DEVICE int key(int line) {
        if constexpr (ALONG_K) {
            return line / TOGETHER % KEYS * (TAKEN / 16);
        } else {
            return line / 2 % 4 * 2;
        }
    }
    // Where byte `byte` of line `line` lies.
    static GEMM_DEVICE int at(int line, int byte) { return line * LINE + (((byte / 16) ^ key(line)) * 16) + byte % 16; }
};

// Copies tile after tile along k, UNIT bytes at once: 16, or what alignment and strides allow (less than an element, too).
// Beyond k and beyond the last row, zeros are written. PLANES planes of the same shape lie next to each other in both.
template <class Tile, int ELEMENT, int EXTENT, int DEPTH, bool ALONG_K, int UNIT, int PLANES, int THREADS>
class TileCopy {
    static constexpr int UNITS = Tile::LINE / UNIT;  // of one line
    static constexpr int ALL = UNITS * Tile::LINES;
    static constexpr int COUNT = (ALL + THREADS - 1) / THREADS;
    static constexpr bool EVEN = ALL % THREADS == 0;
    static constexpr bool EVEN_LINES = THREADS % UNITS == 0;
    static constexpr int JUMP = EVEN_LINES ? THREADS / UNITS : 1;  // lines from a thread's unit to its next

  public:
    // `row_stride`, `k_stride`: parameters of the kernel, in elements of ELEMENT bytes; `row` and `k` where the first tile
    // begins, `rows` where the operand ends; `base` its planes.
    GEMM_DEVICE TileCopy(
        const void* const (&base)[PLANES], const Long& row_stride, const Long& k_stride, Long row, Long rows, Long k,
        int thread)
        : row_stride_(row_stride), k_stride_(k_stride), thread_(thread) {
        rows_left_ = rows - row < EXTENT ? static_cast<int>(rows - row) : EXTENT;
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
            from_[p] = static_cast<const unsigned char*>(base[p]) + (row * row_stride + k * k_stride) * ELEMENT + own();
        }
    }

    // Starts the copy of the next tile, of which `left` steps of k are inside the operand.
    GEMM_DEVICE void start(unsigned char* shared, int left) {
        if (EVEN_LINES && rows_left_ == EXTENT && left == DEPTH) {
            start_whole(shared);
        } else {
            start_part(shared, left);
        }
#pragma unroll
        for (int p = 0; p < PLANES; ++p) from_[p] += k_stride_ * (DEPTH * ELEMENT);
    }

  private:
    // References to parameters cost no registers.
    const Long& row_stride_;
    const Long& k_stride_;
    const unsigned char* from_[PLANES];  // what this thread copies first
    int rows_left_;
    int thread_;

    // From the tile's beginning to a byte of a line, in memory.
    GEMM_DEVICE Long offset(int line, int byte) const {
        const int element = byte / ELEMENT;
        const Long elements = ALONG_K ? line * row_stride_ + element * k_stride_ : line * k_stride_ + element * row_stride_;
        return elements * ELEMENT + byte % ELEMENT;
    }
    GEMM_DEVICE Long own() const { return offset(thread_ / UNITS, thread_ % UNITS * UNIT); }

    // Every byte lies inside the operand, and a thread's units are the same part of lines that are evenly spaced.
    GEMM_DEVICE void start_whole(unsigned char* shared) const {
        const int line = thread_ / UNITS, byte = thread_ % UNITS * UNIT;
        const Long jump = (ALONG_K ? row_stride_ : k_stride_) * (JUMP * ELEMENT);
        Long from = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i, from += jump) {
            if (!EVEN && i * THREADS + thread_ >= ALL) break;
#pragma unroll
            for (int p = 0; p < PLANES; ++p) {
                copy_async<UNIT>(shared + p * Tile::BYTES + Tile::at(line + i * JUMP, byte), from_[p] + from, UNIT);
            }
        }
    }

    GEMM_DEVICE void start_part(unsigned char* shared, int steps) const {
        const Long begin = -own();
#pragma unroll 1
        for (int unit = thread_; unit < ALL; unit += THREADS) {
            const int line = unit / UNITS, byte = unit % UNITS * UNIT;
            const int row = ALONG_K ? line : byte / ELEMENT, step = ALONG_K ? byte / ELEMENT : line;
            const int inside = ALONG_K ? (steps - step) * ELEMENT : (rows_left_ - row) * ELEMENT;
            int bytes = UNIT;
            if (inside < UNIT) bytes = inside <= 0 ? 0 : UNIT > ELEMENT ? inside : UNIT;
            if (ALONG_K ? row >= rows_left_ : step >= steps) bytes = 0;
            const Long from = bytes == 0 ? 0 : begin + offset(line, byte);
#pragma unroll
            for (int p = 0; p < PLANES; ++p) {
                copy_async<UNIT>(shared + p * Tile::BYTES + Tile::at(line, byte), from_[p] + from, bytes);
            }
        }
    }
};
