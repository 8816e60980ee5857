// Tiles in shared memory by cp.async: every thread copies its share and waits for all others. Any strides.
#pragma once

#include "config.cuh"

struct Pipeline {
    static constexpr int THREADS = Config::THREADS;
    static constexpr int IDLE_WARP = 0;  // none is: the first does what is left to do
    unsigned char* stages;

    GEMM_DEVICE explicit Pipeline(unsigned char* memory) : stages(memory) {}
};

// The tiles of one product, one after the other. When there is one of these, the first is there.
class Arriving {
  public:
    GEMM_DEVICE Arriving(Pipeline& pipeline, const GemmParams& gemm, const TileCoordinate& where, int steps)
        : Arriving(pipeline, gemm, where, steps, Bases(gemm, where)) {}

    GEMM_DEVICE const unsigned char* now() const { return stages_ + stage_; }
    // The next tile is there for all, and all have read this one.
    GEMM_DEVICE void next() {
        copy_wait<Config::STAGES - 2>();
        __syncthreads();
        stage_ = stage_ == LAST ? 0 : stage_ + Config::STAGE_BYTES;
    }
    // The tile before this one is not read again. What was read is in registers: all threads have met since.
    GEMM_DEVICE void release(unsigned = 0, unsigned = 0) { load(stage_ == 0 ? LAST : stage_ - Config::STAGE_BYTES); }
    GEMM_DEVICE void end(unsigned = 0, unsigned = 0) {
        copy_wait<0>();
        __syncthreads();  // before the next product's copies
    }

  private:
    static constexpr int LAST = (Config::STAGES - 1) * Config::STAGE_BYTES;
    struct Bases {
        const void* a[Config::PLANES];
        const void* b[Config::PLANES];

        GEMM_DEVICE Bases(const GemmParams& gemm, const TileCoordinate& where) {
            Config::A::bases(gemm.a, batch_offset(where.batch, gemm.batch_shape, gemm.a.batch_stride), a);
            Config::B::bases(gemm.b, batch_offset(where.batch, gemm.batch_shape, gemm.b.batch_stride), b);
        }
    };

    unsigned char* stages_;
    int stage_ = 0, left_, last_;  // tiles that are not asked for yet, and steps of k of the last one
    Config::A::Copy a_;
    Config::B::Copy b_;

    GEMM_DEVICE Arriving(
        Pipeline& pipeline, const GemmParams& gemm, const TileCoordinate& where, int steps, const Bases& bases)
        : stages_(pipeline.stages),
          left_(steps),
          last_(static_cast<int>(gemm.k - static_cast<Long>(steps - 1) * Config::BLOCK_K)),
          a_(bases.a, gemm.a.row_stride, gemm.a.column_stride, where.tile_m * Config::BLOCK_M, gemm.m, 0, thread_again()),
          b_(bases.b, gemm.b.column_stride, gemm.b.row_stride, where.tile_n * Config::BLOCK_N, gemm.n, 0, thread_again()) {
#pragma unroll 1
        for (int stage = 0; stage <= LAST; stage += Config::STAGE_BYTES) load(stage);
        copy_wait<Config::STAGES - 1>();
        __syncthreads();
    }

    GEMM_DEVICE void load(int stage) {
        if (left_ > 0) {
            const int inside = --left_ == 0 ? last_ : Config::BLOCK_K;
            a_.start(stages_ + stage, inside);
            b_.start(stages_ + stage + Config::A::BYTES, inside);
        }
        copy_commit();  // an empty group keeps the count of groups in step
    }
};

// Calls `multiply` with the pipeline.
template <class Produce, class Multiply>
GEMM_DEVICE void share_work(unsigned char* memory, Produce, Multiply multiply) {
    Pipeline pipeline(memory);
    multiply(pipeline);
}
