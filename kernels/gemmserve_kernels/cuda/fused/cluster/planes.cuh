// Eight vectors of a chunk by one warp: from where they lie to float16 planes in two stages of shared memory.
//
// A lane splits all that it has of the chunk, since only then the vectors' scales and counts are known, and keeps the parts
// in registers until the stage of either half is free.
#pragma once

#include "../copies.cuh"

// What is known of the vectors of a task: it is copied whole.
struct alignas(16) TaskKnown {
    float scales[Config::TASK];
    VectorWord counts[Config::TASK];
    int doubt;  // whether some vector alone does not promise that planes serve
    int unused[3];
};
static_assert(sizeof(TaskKnown) == Config::RECORD, "copies are of 16 bytes");

// Where a warp of producers keeps the numbers of a task: lanes that write or read together meet in no bank.
template <bool ALONG_K>
struct TaskPlaces {
    static constexpr int VECTORS = Config::TASK, AT_ONCE = 8;
    static GEMM_DEVICE int at(int vector, int k) {
        if constexpr (ALONG_K) return vector * (Config::CHUNK * 8) + ((k / 2) ^ (vector << 1 & 4)) * 16 + k % 2 * 8;
        return (k ^ (k >> 1 & 1)) * (Config::TASK * 8) + vector * 8;
    }
};

// TURNED: planes of columns, those of -im among them.
template <bool ALONG_K_, int VECTOR, bool CONJUGATE, bool TURNED>
struct TaskOperand : ChunkOperand<ALONG_K_, VECTOR, CONJUGATE, TURNED> {
    using Chunk = ChunkOperand<ALONG_K_, VECTOR, CONJUGATE, TURNED>;
    using typename Chunk::Parts;
    using typename Chunk::Share;
    using Chunk::UNITS;
    using Chunk::VECTORS;
    static constexpr bool ALONG_K = ALONG_K_;

    // The lane's parts, and what it knows of the vector that it goes on with.
    struct Planes {
        Parts at[VECTORS][UNITS];
        float scale;
        VectorWord count;
        bool promised;
    };

    GEMM_DEVICE explicit TaskOperand(int lane) : Chunk(lane) {}

    // Asks for the numbers of the task, which come to `slot`.
    static GEMM_DEVICE void request(
        unsigned char* slot, const ChunkPlace& place, const Long& vector_stride, const Long& k_stride, int lane) {
        const VectorCopies<ALONG_K, VECTOR, TaskPlaces<ALONG_K>> copies{lane};
        copies.request(slot, place, vector_stride, k_stride);
        copy_commit();
    }
    // Takes what was asked for, and leaves the slot.
    GEMM_DEVICE void take(Share& held, const unsigned char* slot) const {
        using Places = TaskPlaces<ALONG_K>;
        const int vector = this->first_vector, k = 16 * this->half + 2 * this->t;
        // What lies further on lies so from one of these two.
        const unsigned char* const from[2] = {
            slot + Places::at(vector, k), slot + Places::at(vector, k + (ALONG_K ? 8 : 1))};
        copy_wait<0>();
        __syncwarp();
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (ALONG_K && e % 2 != 0) continue;
                constexpr int STEP = Config::TASK * 8;
                const unsigned char* const here =
                    ALONG_K ? from[e / 2] + 16 * u * 8 : from[e % 2] + (32 * u + e / 2 * 8) * STEP;
                const auto two = *reinterpret_cast<const Vector<Value, 2>*>(here);
                held[0][u][e] = two.at[0];
                held[VECTORS - 1][u][ALONG_K ? e + 1 : e] = two.at[1];
            }
        }
        __syncwarp();
    }
    GEMM_DEVICE void split(Planes& planes, const Share& held, int steps) const {
        unsigned most[VECTORS], small[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) most[v] = Chunk::largest_parts(held[v]);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) most[v] = Chunk::over_lanes(most[v], larger_halves);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const float down = Chunk::scale_of(most[v]).down();
            unsigned small_re = NONE_SMALL, small_im = NONE_SMALL;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) Chunk::split_unit(planes.at[v][u], held[v][u], down, small_re, small_im);
            small[v] = __byte_perm(small_re, small_im, 0x6240);
        }
        const VectorCounts known = this->counts_of(small, steps);
        const VectorScale scale = this->own_scale(most);
        planes.scale = scale.up();
        planes.count = known.word(scale);
        planes.promised = known.promise(scale, steps);
    }

    // Writes half HALF of the chunk; `rows`: of the task in the first pair of a stage's planes.
    template <int HALF, int PAIR>
    GEMM_DEVICE void write(const Planes& planes, unsigned char* rows) const {
        // Where unit_at has the lane's first unit. From there to others, and to the next vector, single bits change.
        const int first = unit_at(this->first_vector, 4 * this->half + this->t);
        constexpr int NEXT_SLICE = 32, NEXT_ROW = 16;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int i = 0; i < UNITS / 2; ++i) {
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    const int change = i * NEXT_SLICE + low * Config::LOW + v * NEXT_ROW;
                    unsigned char* const to = rows + (first ^ change) + v * Config::ROW;
                    const Parts& part = planes.at[v][HALF * (UNITS / 2) + i];
                    const auto &re = part[2 * low], &im = part[2 * low + 1];
                    using Unit = Vector<unsigned, 2>;
                    *reinterpret_cast<Unit*>(to + (TURNED ? PAIR : 0)) = re;
                    *reinterpret_cast<Unit*>(to + (TURNED ? 2 * PAIR : PAIR)) = im;
                    if constexpr (TURNED) {
                        *reinterpret_cast<Unit*>(to) = {im.at[0] ^ 0x80008000u, im.at[1] ^ 0x80008000u};
                    }
                }
            }
        }
    }

    // Writes what is known.
    GEMM_DEVICE void tell(const Planes& planes, TaskKnown& known, int lane) const {
        const int doubt = __any_sync(0xffffffffu, !planes.promised);
        if (this->t == 0) {
            known.scales[this->first_vector + this->own_vector()] = planes.scale;
            known.counts[this->first_vector + this->own_vector()] = planes.count;
        }
        if (lane == 0) known.doubt = doubt;
    }
};
