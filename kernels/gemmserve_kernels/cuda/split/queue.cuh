// Which blocks work together, and on what next.
#pragma once

#include "source.cuh"

constexpr int CLUSTER = GEMM_CLUSTER;

#if GEMM_CLUSTER > 1
GEMM_DEVICE int cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}
GEMM_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same word of shared memory in another block of the cluster.
GEMM_DEVICE unsigned remote_word(const void* word, int rank) {
    unsigned address, value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(word))), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
#else
GEMM_DEVICE int cluster_rank() { return 0; }
GEMM_DEVICE void cluster_barrier() { __syncthreads(); }
GEMM_DEVICE unsigned remote_word(const void* word, int) { return *static_cast<const unsigned*>(word); }
#endif

GEMM_DEVICE float remote_float(const float* word, int rank) { return float_of(remote_word(word, rank)); }

// What a group of blocks, a cluster or one block, does next. Units are numbered through all matrices. The groups that
// begin with an operand share out its first units, AHEAD each; the rest is taken as it comes, also by groups that have
// run out of the other operand, so that all of them end together. Numbers are known AHEAD steps before their turn.
template <int AHEAD, bool TOGETHER>  // TOGETHER: the group is a cluster
struct Queue {
    Long number[AHEAD];  // of this step and those behind it
    Long all;            // units
    Long shared_out;
    int* counter;
    int (*next)[2];      // in shared memory, of the first block where it is a cluster
    int taken;           // of the leading thread: what it has asked for
    bool leads, dynamic;

    static GEMM_DEVICE void barrier() {
        if constexpr (TOGETHER) {
            cluster_barrier();
        } else {
            __syncthreads();
        }
    }

    // `first`: whether this is what the group begins with; `group` of `groups` that do.
    GEMM_DEVICE Queue(Long units, bool first, Long group, Long groups, int* count, int (*slots)[2], int thread)
        : all(units), shared_out(AHEAD * groups), counter(count), next(slots), taken(0) {
        leads = thread == 0 && (!TOGETHER || cluster_rank() == 0);
        dynamic = all > shared_out;
        for (int step = 0; step < AHEAD; ++step) number[step] = first ? group + step * groups : all;
        if (dynamic && !first) {
            for (int step = 0; step < AHEAD; ++step) {
                ask();
                publish(step);
                barrier();
                number[step] = read(step);
            }
            barrier();
        }
        ask();
    }

    GEMM_DEVICE Long current() const { return number[0]; }
    GEMM_DEVICE bool done() const { return number[0] >= all; }

    // Before the barrier of a step: what comes AHEAD steps later, for all to see.
    GEMM_DEVICE void publish(Long step) const {
        if (leads && dynamic) (*next)[step & 1] = taken;
    }
    // After it, in all threads.
    GEMM_DEVICE void advance(Long step) {
        for (int i = 0; i + 1 < AHEAD; ++i) number[i] = number[i + 1];
        number[AHEAD - 1] = dynamic ? read(step) : all;
        ask();
    }

private:
    GEMM_DEVICE void ask() {
        if (leads && dynamic) taken = atomicAdd(counter, 1);
    }
    GEMM_DEVICE Long read(Long step) const {
        const int* slot = &(*next)[step & 1];
        return shared_out + static_cast<int>(TOGETHER ? remote_word(slot, 0) : static_cast<unsigned>(*slot));
    }
};
