// Tiles in shared memory by Hopper's copy engine. One thread of a warpgroup of its own asks for them, of one product after
// the other without a pause; barriers say what is there and what is free, and no warp waits for the others. (float64, 4096^3
// on an H200: 58.9 TFLOP/s, 52.0 where threads copy, 59.8 by cuBLAS.)
#pragma once

#include "config.cuh"

class Pipeline {
  public:
    static constexpr int GROUP = 128, GROUPS = Config::THREADS / GROUP, THREADS = Config::THREADS + GROUP;
    static constexpr int IDLE_WARP = Config::WARPS + 1;  // of those that do not multiply, one that does not ask either
    // Registers of a thread: what all begin with, and what those of the last group leave to the others.
    static constexpr int EVEN = (1 << 16) / THREADS / GEMM_MIN_BLOCKS / 8 * 8, FEW = GEMM_FEW;
    static constexpr int MANY = ((GROUPS + 1) * (EVEN < 240 ? EVEN : 240) - FEW) / GROUPS / 8 * 8;
    static_assert(Config::THREADS % GROUP == 0 && MANY > EVEN, "registers are given away by whole warpgroups");

    GEMM_DEVICE explicit Pipeline(unsigned char* memory)
        : stages_(memory),
          barriers_(shared_address(memory + Config::STAGES * Config::STAGE_BYTES + Config::KEPT_BYTES)) {}

    // By all threads.
    GEMM_DEVICE void begin() const {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < Config::STAGES; ++stage) {
                barrier_init(full(stage), 1);
                barrier_init(empty(stage), Config::WARPS);
            }
            barrier_init_fence();
        }
        __syncthreads();
    }

    // Asks for the tiles at `where`, all along k. By a whole group, of which one thread does it.
    GEMM_DEVICE void produce(
        const TensorMap& map_a, const TensorMap& map_b, const GemmParams& gemm, const TileCoordinate& where) {
        if (thread_again() % GROUP != 0) return;
        const int matrix_a = static_cast<int>(batch_offset(where.batch, gemm.batch_shape, gemm.a.batch_stride));
        const int matrix_b = static_cast<int>(batch_offset(where.batch, gemm.batch_shape, gemm.b.batch_stride));
        const int row = static_cast<int>(where.tile_m) * Config::BLOCK_M;
        const int column = static_cast<int>(where.tile_n) * Config::BLOCK_N;
        for (int k = 0; k < static_cast<int>(gemm.k); k += Config::BLOCK_K, next()) {
            barrier_wait(empty(stage_), parity_ ^ 1u);
            barrier_arrive_expecting(full(stage_), Config::STAGE_BYTES);
            const Address to = shared_address(now());
            fetch<Config::A, Config::BLOCK_M>(to, map_a, row, k, matrix_a);
            fetch<Config::B, Config::BLOCK_N>(to + Config::A::BYTES, map_b, column, k, matrix_b);
        }
    }

    GEMM_DEVICE const unsigned char* now() const { return stages_ + stage_ * Config::STAGE_BYTES; }
    GEMM_DEVICE void wait() const { barrier_wait(full(stage_), parity_); }
    GEMM_DEVICE void next() {
        if (++stage_ == Config::STAGES) {
            stage_ = 0;
            parity_ ^= 1u;
        }
    }
    // The stage before this one is not read again, nor overwritten before `read` is in a register: see once_read. By a whole
    // warp.
    GEMM_DEVICE void release(unsigned read, unsigned zero) const {
        __syncwarp();
        if (thread_again() % 32 == 0)
            barrier_arrive(once_read(empty(stage_ == 0 ? Config::STAGES - 1 : stage_ - 1), read, zero));
    }

  private:
    unsigned char* stages_;
    Address barriers_;
    int stage_ = 0;
    unsigned parity_ = 0;

    GEMM_DEVICE Address full(int stage) const { return barriers_ + stage * static_cast<int>(sizeof(Barrier)); }
    GEMM_DEVICE Address empty(int stage) const { return full(Config::STAGES + stage); }

    // The engine counts in words of two bytes. Across k it brings 128 bytes of every step at once.
    template <class Operand, int EXTENT>
    GEMM_DEVICE void fetch(Address to, const TensorMap& map, int row, int k, int matrix) const {
        using Tile = typename Operand::Tile;
        constexpr int WORDS = Config::ELEMENT / 2;
#pragma unroll
        for (int plane = 0; plane < Config::PLANES; ++plane, to += Tile::BYTES) {
            if constexpr (Operand::ALONG_K) {
                copy_box(to, map, k * WORDS, row, plane, matrix, full(stage_));
            } else {
#pragma unroll
                for (int first = 0; first < EXTENT; first += Tile::SPAN / Config::ELEMENT)
                    copy_box(to + first * Tile::SPAN, map, (row + first) * WORDS, k, plane, matrix, full(stage_));
            }
        }
    }
};

// The tiles of one product, one after the other. When there is one of these, the first is there.
class Arriving {
  public:
    GEMM_DEVICE Arriving(Pipeline& pipeline, const GemmParams&, const TileCoordinate&, int) : pipeline_(pipeline) {
        pipeline_.wait();
    }
    GEMM_DEVICE const unsigned char* now() const { return pipeline_.now(); }
    // The next tile is there.
    GEMM_DEVICE void next() {
        pipeline_.next();
        pipeline_.wait();
    }
    // The tile before this one is not read again; `read` and `zero`: see once_read.
    GEMM_DEVICE void release(unsigned read, unsigned zero) const { pipeline_.release(read, zero); }
    GEMM_DEVICE void end(unsigned read, unsigned zero) {
        pipeline_.next();
        pipeline_.release(read, zero);
    }
    // The same where nobody knows what was read last.
    GEMM_DEVICE void release() const {
        have_read();
        pipeline_.release(0, 0);
    }
    GEMM_DEVICE void end() {
        pipeline_.next();
        release();
    }

  private:
    Pipeline& pipeline_;
};

// Calls `produce` with the pipeline in the last warpgroup, and `multiply` in all others.
template <class Produce, class Multiply>
GEMM_DEVICE void share_work(unsigned char* memory, Produce produce, Multiply multiply) {
    Pipeline pipeline(memory);
    pipeline.begin();
    if (threadIdx.x >= Config::THREADS) {
        give_registers<Pipeline::FEW>();
        produce(pipeline);
    } else {
        take_registers<Pipeline::MANY>();
        multiply(pipeline);
    }
}
