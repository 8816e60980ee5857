// Hopper's asynchronous machinery in PTX: barriers in shared memory, the tensor copy engine, clusters.
// PTX ISA: mbarrier 9.7.13, cp.async.bulk 9.7.9.25, setmaxnreg 9.7.19.
#pragma once

#include "../platform.cuh"

typedef unsigned Address;  // in shared memory, of this block unless said otherwise
typedef unsigned long long Barrier;

struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

#if defined(GEMM_CUDA)

GEMM_DEVICE Address shared_address(const void* pointer) {
    return static_cast<Address>(__cvta_generic_to_shared(pointer));
}

// ---- barriers

GEMM_DEVICE void barrier_init(Address barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine and to the other blocks of the cluster.
GEMM_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

GEMM_DEVICE void barrier_arrive(Address barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once the thread's copies (cp.async) so far are there.
GEMM_DEVICE void barrier_arrive_copied(Address barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// At the same barrier of block `rank` of the cluster.
GEMM_DEVICE void barrier_arrive_remote(Address barrier, unsigned rank) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier), "r"(rank) : "memory");
}

GEMM_DEVICE void barrier_arrive_expecting(Address barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

GEMM_DEVICE void barrier_wait(Address barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred done;\n\t"
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra DONE;\n\t"
        "bra WAIT;\n\t"
        "DONE: }" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- clusters

GEMM_DEVICE unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

GEMM_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// By whole warps.
GEMM_DEVICE void cluster_sync_aligned() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A float in the shared memory of block `rank`, at this block's `address`.
GEMM_DEVICE float load_remote(Address address, unsigned rank) {
    float value;
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %1, %2; ld.shared::cluster.f32 %0, [remote]; }"
        : "=f"(value) : "r"(address), "r"(rank) : "memory");
    return value;
}

// ---- the copy engine: a box at (x, row, plane, matrix), elements outside the tensor read as zero

GEMM_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<unsigned long long>(&map)) : "memory");
}

GEMM_DEVICE void copy_box(
    Address target, const TensorMap& map, int x, int row, int plane, int matrix, Address barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];"
        ::"r"(target), "l"(reinterpret_cast<unsigned long long>(&map)), "r"(x), "r"(row), "r"(plane), "r"(matrix),
        "r"(barrier) : "memory");
}

// `bytes` of straight memory.
GEMM_DEVICE void copy_bytes(Address target, const void* from, int bytes, Address barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
}

// `bytes` of this block's shared memory to the same place of block `rank` of the cluster, whose barrier there is told.
GEMM_DEVICE void copy_to_block(Address from, int bytes, Address barrier, unsigned rank) {
    asm volatile(
        "{ .reg .b32 target, told; mapa.shared::cluster.u32 target, %0, %3; mapa.shared::cluster.u32 told, %2, %3;\n\t"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [target], [%0], %1, [told]; }"
        ::"r"(from), "r"(bytes), "r"(barrier), "r"(rank) : "memory");
}

// `bytes` of straight memory to the same place of every block of the cluster in `mask`, whose barriers there are told.
GEMM_DEVICE void copy_bytes_multicast(Address target, const void* from, int bytes, Address barrier, unsigned short mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
        ::"r"(target), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier), "h"(mask) : "memory");
}

// To the same place of every block of the cluster in `mask`, whose barriers there are told.
GEMM_DEVICE void copy_box_multicast(
    Address target, const TensorMap& map, int x, int row, int plane, int matrix, Address barrier, unsigned short mask) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
        ::"r"(target), "l"(reinterpret_cast<unsigned long long>(&map)), "r"(x), "r"(row), "r"(plane), "r"(matrix),
        "r"(barrier), "h"(mask) : "memory");
}

// ---- registers and shared memory

template <int COUNT>
GEMM_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
GEMM_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Before a thread says that what it has written to shared memory may be read: the tensor cores read it another way than
// threads do (PTX ISA 8.6, proxies).
GEMM_DEVICE void written_for_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before an arrival, of all that this thread has read so far (see once_read): it waits for what it reads ahead, too.
GEMM_DEVICE void have_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

GEMM_DEVICE void store_shared(Address address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

#elif defined(GEMM_SHIM)
using namespace simt::hopper;  // the CPU shim plays them
#endif

// `barrier`, once `read` is in a register: for an arrival which says that what was read may be overwritten by the copy engine.
// An arrival does not wait for loads of shared memory that are still on their way, and passes those that queue behind stores
// of another warp; the copy engine, another proxy, then writes what they were to read. `read` is made of what was read last;
// `zero` is 0, but the compiler must not know it.
GEMM_DEVICE Address once_read(Address barrier, unsigned read, unsigned zero) { return barrier + (read & zero); }
