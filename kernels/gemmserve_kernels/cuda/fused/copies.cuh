// Chunks of vectors, copied from where they lie to shared memory as they are.
#pragma once

#include "../common/ptx/again.cuh"
#include "../common/ptx/cp_async.cuh"
#include "operand.cuh"

// What one warp copies: Places::VECTORS vectors, number k of vector v to places.at(v, k). Lanes read neighbours in memory, so
// that lines are read whole.
template <bool ALONG_K, int VECTOR, class Places>
struct VectorCopies {
    int lane;
    Places places = {};

    // Asks for a chunk; what lies outside is zero.
    GEMM_DEVICE void request(
        unsigned char* numbers, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride) const {
        if (place.vectors >= Places::VECTORS && place.steps == Config::CHUNK) {
            copy<true>(numbers, place, vector_stride, k_stride);
        } else {
            copy<false>(numbers, place, vector_stride, k_stride);
        }
    }

  private:
    template <bool WHOLE>
    GEMM_DEVICE void copy(
        unsigned char* numbers, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride) const {
        constexpr int BYTES = VECTOR * static_cast<int>(sizeof(Value));
        constexpr int FAST = (ALONG_K ? Config::CHUNK : Places::VECTORS) / VECTOR;  // copies of one vector, or step
        constexpr int LANES = FAST < 32 ? FAST : 32, ROUNDS = FAST / LANES;
        constexpr int SLOW = 32 / LANES, COUNT = (ALONG_K ? Places::VECTORS : Config::CHUNK) / SLOW;
        const Long& fast_stride = ALONG_K ? k_stride : vector_stride;
        const Long& slow_stride = ALONG_K ? vector_stride : k_stride;
        const int fast = lane % LANES * VECTOR, slow = lane / LANES;
        const Value* from = place.first + fast * fast_stride + slow * slow_stride;
#pragma unroll(Places::AT_ONCE)
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int on = fast + round * LANES * VECTOR, down = slow + i * SLOW;
                const int vector = ALONG_K ? down : on, k = ALONG_K ? on : down;
                const Value* const here = from + round * LANES * VECTOR * fast_stride;
                unsigned char* const to = numbers + places.at(vector, k);
                if constexpr (WHOLE) {
                    copy_async<BYTES>(to, here);
                } else {
                    const bool inside = vector < place.vectors && k < place.steps;
                    copy_async<BYTES>(to, here, inside ? BYTES : 0);
                }
            }
            from = once_more(from + SLOW * slow_stride);  // registers would not hold all of them at once
        }
    }
};
