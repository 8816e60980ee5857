// Which blocks work together, and on what next.
#pragma once

#include "../common/ptx/hopper.cuh"
#include "source.cuh"

constexpr int CLUSTER = GEMM_CLUSTER;

#if GEMM_CLUSTER > 1 && defined(GEMM_SHIM)
// One block of the shim stands for a cluster: all of its barriers are the cluster's.
GEMM_DEVICE int block_thread() { return static_cast<int>(threadIdx.x) % THREADS; }
GEMM_DEVICE int cluster_number() { return static_cast<int>(blockIdx.x); }
GEMM_DEVICE int block_rank() { return static_cast<int>(threadIdx.x) / THREADS; }
GEMM_DEVICE void cluster_barrier() { __syncthreads(); }
GEMM_DEVICE unsigned remote_word(const void* word, int rank) {
    return *reinterpret_cast<const unsigned*>(static_cast<const char*>(word) + (rank - block_rank()) * GEMM_SHARED_BYTES);
}
GEMM_DEVICE unsigned char* block_shared(unsigned char* all) { return all + block_rank() * GEMM_SHARED_BYTES; }
#else
GEMM_DEVICE int block_thread() { return static_cast<int>(threadIdx.x); }
GEMM_DEVICE int cluster_number() { return static_cast<int>(blockIdx.x) / CLUSTER; }
GEMM_DEVICE unsigned char* block_shared(unsigned char* all) { return all; }
#if GEMM_CLUSTER > 1
GEMM_DEVICE int block_rank() { return static_cast<int>(cluster_rank()); }
GEMM_DEVICE void cluster_barrier() { cluster_sync_aligned(); }
// The same word of shared memory in another block of the cluster.
GEMM_DEVICE unsigned remote_word(const void* word, int rank) {
    return bits_of(load_remote(shared_address(word), static_cast<unsigned>(rank)));
}
#else
GEMM_DEVICE int block_rank() { return 0; }
GEMM_DEVICE void cluster_barrier() { __syncthreads(); }
GEMM_DEVICE unsigned remote_word(const void* word, int) { return *static_cast<const unsigned*>(word); }
#endif
#endif

GEMM_DEVICE float remote_float(const float* word, int rank) { return float_of(remote_word(word, rank)); }

// What a group of blocks, a cluster or one block, does next. Units are numbered through all matrices. The groups that
// begin with an operand share out its first units, AHEAD each; the rest is taken as it comes, also by groups that have
// run out of the other operand, so that all of them end together. Numbers are known AHEAD steps before their turn.
// Of a batch units come in chunks (of one, or of AHEAD at least), one after the other: the maxima of a matrix go to memory
// when another one's turn comes.
template <int AHEAD, bool TOGETHER>  // TOGETHER: the group is a cluster
struct Queue {
    const int all;         // units
    const int chunk;
    const int shared_out;  // of the chunks
    int* const counter;
    int* const next;       // two words of shared memory, of the first block where it is a cluster
    int number[AHEAD];     // of this step and those behind it
    int taken;             // what the leading thread has asked for
    const bool leads;

    static GEMM_DEVICE void barrier() {
        if constexpr (TOGETHER) {
            cluster_barrier();
        } else {
            __syncthreads();
        }
    }

    // `first`: whether this is what the group begins with; `group` of `groups` that do.
    GEMM_DEVICE Queue(Long units, int each, bool first, int group, int groups, int* count, int* slots, int thread)
        : all(static_cast<int>(units)), chunk(each), shared_out((each > 1 ? 1 : AHEAD) * groups), counter(count),
          next(slots), taken(0), leads(thread == 0 && (!TOGETHER || block_rank() == 0)) {
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) {
            number[step] = !first ? all : chunk > 1 ? group * chunk + step : group + step * groups;
        }
        if (!first && more()) {
#pragma unroll
            for (int step = 0; step < AHEAD; ++step) {
                if (step > 0 && chunk > 1) {
                    number[step] = number[step - 1] + 1;
                    continue;
                }
                ask();
                publish(step);
                barrier();
                number[step] = read(step);
            }
            barrier();
        }
        ask();
    }

    GEMM_DEVICE int current() const { return number[0]; }
    GEMM_DEVICE int last() const { return number[AHEAD - 1]; }
    GEMM_DEVICE bool done() const { return number[0] >= all; }

    // Before the barrier of a step: what comes AHEAD steps later, for all to see.
    GEMM_DEVICE void publish(int step) const {
        if (leads) next[step & 1] = taken;
    }
    // After it, in all threads.
    GEMM_DEVICE void advance(int step) {
        const int after = number[AHEAD - 1] + 1;
#pragma unroll
        for (int i = 0; i + 1 < AHEAD; ++i) number[i] = number[i + 1];
        if (after < all && after % chunk != 0) {
            number[AHEAD - 1] = after;
            return;
        }
        number[AHEAD - 1] = more() ? read(step) : all;
        ask();
    }

private:
    // Whether there are units beyond those that are shared out.
    GEMM_DEVICE bool more() const { return all > shared_out * chunk; }
    GEMM_DEVICE void ask() {
        if (leads && more()) taken = atomicAdd(counter, 1);
    }
    GEMM_DEVICE int read(int step) const {
        const int* slot = &next[step & 1];
        const int number = static_cast<int>(TOGETHER ? remote_word(slot, 0) : static_cast<unsigned>(*slot));
        return (shared_out + number) * chunk;
    }
};
