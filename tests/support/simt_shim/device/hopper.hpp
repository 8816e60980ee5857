// Hopper's asynchronous machinery: barriers with transaction counts in shared memory, the tensor copy engine, clusters,
// wgmma. runtime/hopper.cpp does the work.
//
// A kernel's header takes these names where it would have PTX: `using namespace simt::hopper`. Addresses of shared memory
// are numbers of 32 bits, as on the device; dynamic shared memory begins at one that is aligned to 16 bytes and no more.
//
// Boxes arrive at once in forward order, in reverse order when no thread can go on without them, the last one first, and
// any time in shuffled order. Products are done as late as the rules allow, when a warpgroup waits for them. So a stage
// that is read before its barrier says so, or given back before its products are done, gives poison or wrong numbers.
#pragma once

#include "language.hpp"

namespace simt::hopper {

unsigned shared_address(const void* pointer);
void* shared_pointer(unsigned address, unsigned bytes);

// ---- barriers

void barrier_init(unsigned barrier, unsigned arrivals);
void barrier_arrive(unsigned barrier);
inline void barrier_arrive_copied(unsigned barrier) { barrier_arrive(barrier); }  // copies are done at once
void barrier_arrive_expecting(unsigned barrier, unsigned bytes);
void barrier_wait(unsigned barrier, unsigned parity, SIMT_HERE);
inline void barrier_init_fence() {}
inline void written_for_tensor_cores() {}
inline void have_read() {}

// ---- the copy engine

// What ShimLauncher.tensor_map writes: an array of float16, and the box of one copy.
struct Map {
    unsigned long long address, rank;
    unsigned extents[6], box[6];
    unsigned long long strides[5];  // in bytes, of all axes but the first
};

// `mask`: blocks of the cluster that get it; 0 for the own one alone.
void copy_box(unsigned target, const Map& map, const int* at, unsigned barrier, unsigned mask);
void copy_straight(unsigned target, const void* from, unsigned bytes, unsigned barrier, unsigned mask);
// From shared memory to the same place of block `rank`.
void copy_to_block(unsigned from, int bytes, unsigned barrier, unsigned rank);

template <class TensorMap>
inline void copy_box(unsigned target, const TensorMap& map, int x, int row, int plane, int matrix, unsigned barrier) {
    static_assert(sizeof(Map) <= sizeof(TensorMap), "the shim's map is smaller");
    const int at[4] = {x, row, plane, matrix};
    copy_box(target, reinterpret_cast<const Map&>(map), at, barrier, 0);
}
template <class TensorMap>
inline void prefetch_map(const TensorMap&) {}
inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    copy_straight(to, from, unsigned(bytes), barrier, 0);
}
inline void copy_bytes_multicast(unsigned to, const void* from, int bytes, unsigned barrier, unsigned short mask) {
    copy_straight(to, from, unsigned(bytes), barrier, mask);
}

template <class TensorMap>
inline void copy_box_multicast(
    unsigned target, const TensorMap& map, int x, int row, int plane, int matrix, unsigned barrier, unsigned short mask) {
    const int at[4] = {x, row, plane, matrix};
    copy_box(target, reinterpret_cast<const Map&>(map), at, barrier, mask);
}

// ---- clusters

unsigned cluster_rank();
void cluster_sync(SIMT_HERE);
void barrier_arrive_remote(unsigned barrier, unsigned rank);
float load_remote(unsigned address, unsigned rank);

// ---- wgmma

// Of one thread's share of a product: 64 x columns by 16 steps of float16 or bfloat16, or 32 of signed bytes.
struct Product {
    void* accumulators;
    unsigned long long left, right;
    int columns, sign;
    bool keep, bytes;
    bool trans_left, trans_right;  // lies along m or n, not along k
    bool bfloat;
    const unsigned* held;  // of the left operand, in registers; none where it is in shared memory
};

void wgmma_issue(const Product& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait_for(int pending, Place place);
template <int PENDING>
inline void wgmma_wait(SIMT_HERE) {
    wgmma_wait_for(PENDING, {file, line});
}

template <int N>
struct Instruction {
    template <int SIGN, int TRANS_A, int TRANS_B, bool BFLOAT>
    static void multiply(float (&d)[N / 2], unsigned long long a, unsigned long long b, int keep) {
        wgmma_issue({d, a, b, N, SIGN, keep != 0, false, TRANS_A != 0, TRANS_B != 0, BFLOAT, nullptr});
    }
};

inline void multiply_bytes(unsigned (&d)[128], unsigned long long a, unsigned long long b) {
    wgmma_issue({d, a, b, 256, 1, true, true, false, false, false, nullptr});
}

// Of 64 x 64 with the left operand from registers, which are read when the product is done.
template <int SIGN>
inline void multiply_held(float (&d)[32], const unsigned (&a)[4], unsigned long long b, int keep) {
    wgmma_issue({d, 0, b, 64, SIGN, keep != 0, false, false, false, false, a});
}

template <int COUNT>
inline void pin(float (&)[COUNT]) {}
template <int COUNT>
inline void take_registers() {}
template <int COUNT>
inline void give_registers() {}

inline void store_shared(unsigned address, float value) { *static_cast<float*>(shared_pointer(address, 4)) = value; }

}  // namespace simt::hopper
