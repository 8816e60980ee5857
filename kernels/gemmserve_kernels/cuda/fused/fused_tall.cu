// The same as fused_gemm.cu by tiles of 128 x 64: op(A) never has planes in shared memory.
//
// Eight of a block's warps are consumers, of sixteen rows each: a warp splits a chunk of its own rows in registers and
// multiplies them from there. The columns' planes are made in shared memory by four producers, once for all rows. So a
// matrix of many rows is read and split once for every 64 columns, and two warpgroups that know nothing of each other keep
// the tensor cores at work: one splits while the other one multiplies. A warp judges its sixteen rows alone.
#include "../common/memory/lanes.cuh"
#include "../common/numbers/truncation.cuh"
#include "../common/ptx/again.cuh"
#include "../common/ptx/wgmma.cuh"
#include "gather.cuh"
#include "rows.cuh"

using Rows = RowOperand<GEMM_A_ALONG_K, GEMM_VECTOR_A, GEMM_CONJUGATE_A>;
using Columns = ChunkOperand<GEMM_B_ALONG_K, GEMM_VECTOR_B, GEMM_CONJUGATE_B>;

GEMM_DEVICE void produce(const FusedParams& params, const Pipeline& pipeline, int thread) {
    const GemmParams& gemm = params.gemm;
    const Columns side(thread);
    Columns::Share held;
    Cursor cursor(params);
    Turn turn;
    turn.parity = 1;  // the first time around all stages are empty
    Steps steps(params, cursor.chunks.next);
    ChunkPlace place = cursor.in_b(params, steps);
    side.load(held, 0, place, gemm.b.column_stride, gemm.b.row_stride);
    bool more = true;
#pragma unroll 1
    while (more) {
        const int count = steps.count;
        barrier_wait(pipeline.emptied(turn), turn.parity);
        unsigned char* const stage = pipeline.stage(turn);
        float* const scales = reinterpret_cast<float*>(stage + Config::SCALES_AT);
        int* const counts = reinterpret_cast<int*>(stage + Config::COUNTS_AT);
        bool promised = true;
#pragma unroll
        for (int round = 0; round < Columns::ROUNDS; ++round) {
            promised &= side.split(held, round, count, stage, scales, counts);
            if (round == Columns::ROUNDS - 1) {
                more = cursor.next(params);
                if (!more) break;
                steps = Steps(params, cursor.chunks.next);
                place = cursor.in_b(params, steps);
            }
            side.load(held, (round + 1) % Columns::ROUNDS, place, gemm.b.column_stride, gemm.b.row_stride);
        }
        const int doubt = __any_sync(0xffffffffu, !promised);
        if (thread % 32 == 0) reinterpret_cast<int*>(stage + Config::DOUBTS_AT)[thread / 32] = doubt;
        written_for_tensor_cores();
        arrive(pipeline.filled(turn), thread);
        turn.next();
    }
}

// What a warp asks for next, in shared memory: consumers have no registers to spare.
struct Ahead {
    const Value* first;  // of the item's first step, and the warp's first row
    unsigned number;
    int vectors, next, end;  // `next` is not before `end`: there is no more
};

// Chunks of the warp's rows, asked for ahead of their use.
struct Requests {
    Ahead& ahead;
    int first_row, lane;

    GEMM_DEVICE void begin(const FusedParams& params, unsigned number) const {
        const Item item(params, number);
        const Chunks chunks(params, item);
        if (lane == 0) {
            ahead = {
                chunks.a + first_row * params.gemm.a.row_stride, number, chunks.rows - first_row, chunks.next,
                chunks.end};
        }
        __syncwarp();
    }

    // Asks for the next chunk, if there is one. By the whole warp, which has read what is in the slot.
    GEMM_DEVICE void next(const FusedParams& params, const Rows& rows, unsigned char* slot) const {
        const MatrixParams& a = params.gemm.a;
        const Ahead now = ahead;
        __syncwarp();
        if (now.next < now.end) {
            const Steps steps(params, now.next);
            Rows(once_more(rows.lane)).request(
                slot, {now.first + steps.first * a.column_stride, now.vectors, steps.count}, a.row_stride,
                a.column_stride);
            if (now.next + 1 < now.end || gridDim.x >= params.items - now.number) {
                if (lane == 0) ahead.next = now.next + 1;
                __syncwarp();
            } else {
                begin(params, now.number + gridDim.x);
            }
        }
        copy_commit();
    }
};

using Partial = float[4 * Sums::COLUMNS];
static_assert(4 * Sums::COLUMNS == Config::BLOCK_N / 2, "the sums of one instruction");

// partial += SIGN A B of two planes over PROMOTE steps, from slice FIRST on.
template <int SIGN, Plane OF_A, Plane OF_B, int FIRST>
GEMM_DEVICE void add_planes(Partial& partial, const RowPlanes& a, Descriptor b, bool fresh = false) {
#pragma unroll
    for (int s = 0; s < Config::PROMOTE / 16; ++s) {
        multiply_held<SIGN>(
            partial, a.at[OF_A][FIRST + s], b + (OF_B * Config::PLANE + (FIRST + s) * 32) / 16, fresh && s == 0 ? 0 : 1);
    }
}

// The real or the imaginary parts of PROMOTE steps of k: the order of multiply.cuh.
template <bool IMAGINARY, int FIRST>
GEMM_DEVICE void multiply_planes(Partial& partial, const RowPlanes& a, Address columns) {
    constexpr int MINUS = IMAGINARY ? 1 : -1;
    constexpr bool ODD = FIRST * 16 / Config::PROMOTE % 2 != 0;
    constexpr Plane BY_RE = IMAGINARY ? IM_HIGH : RE_HIGH, BY_IM = IMAGINARY ? RE_HIGH : IM_HIGH;
    constexpr Plane BY_RE_LOW = IMAGINARY ? IM_LOW : RE_LOW, BY_IM_LOW = IMAGINARY ? RE_LOW : IM_LOW;
    const Descriptor b = describe<Config::ROW>(static_cast<Address>(once_more(static_cast<int>(columns))));
    pin(partial);
    wgmma_fence();
    add_planes<1, RE_LOW, BY_RE, FIRST>(partial, a, b, true);
    add_planes<MINUS, IM_LOW, BY_IM, FIRST>(partial, a, b);
    add_planes<1, RE_HIGH, BY_RE_LOW, FIRST>(partial, a, b);
    add_planes<MINUS, IM_HIGH, BY_IM_LOW, FIRST>(partial, a, b);
    if constexpr (ODD) {
        add_planes<MINUS, IM_HIGH, BY_IM, FIRST>(partial, a, b);
        add_planes<1, RE_HIGH, BY_RE, FIRST>(partial, a, b);
    } else {
        add_planes<1, RE_HIGH, BY_RE, FIRST>(partial, a, b);
        add_planes<MINUS, IM_HIGH, BY_IM, FIRST>(partial, a, b);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(partial);
}

GEMM_DEVICE void promote(
    float (&sums)[Sums::COLUMNS][4], const Partial& partial, const float (&left)[2], const float* right) {
#pragma unroll
    for (int j = 0; j < Sums::COLUMNS; ++j) {
        const auto of_b = *reinterpret_cast<const Vector<float, 2>*>(right + 8 * j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[j][e] = multiply_add(partial[4 * j + e], left[e / 2] * of_b.at[e % 2], sums[j][e]);
        }
    }
}

// sums += A B over `steps` steps of k. Where planes do not serve the warp's rows, it multiplies for its warpgroup's sake
// alone. By a warpgroup; `columns`: where their planes lie; `right`: the scales from the lane's first column on.
template <int FIRST = 0>
GEMM_DEVICE void add_chunk(
    Sums& sums, const RowPlanes& a, Address columns, const float* right, int steps, bool serves) {
    if constexpr (FIRST < RowPlanes::SLICES) {
        if (16 * FIRST >= steps) return;
        Partial partial;
        multiply_planes<false, FIRST>(partial, a, columns);
        if (serves) promote(sums.re, partial, a.scale, right);
        multiply_planes<true, FIRST>(partial, a, columns);
        if (serves) promote(sums.im, partial, a.scale, right);
        add_chunk<FIRST + Config::PROMOTE / 16>(sums, a, columns, right, steps, serves);
    }
}

// The same from numbers as they are, those of the columns brought to `few` by some steps. By a warp.
GEMM_DEVICE void add_numbers(
    Sums& sums, const Rows& rows, const unsigned char* slot, Value* few, const ChunkPlace& columns, const Long& stride,
    const Long& k_stride) {
    constexpr int NUMBERS = Config::FEW_STEPS * Config::VECTORS;
    const int lane = once_more(rows.lane), column = lane % 4 * 2;
    Sums of_chunk = {};
#pragma unroll 1
    for (int first = 0; first < columns.steps; first += Config::FEW_STEPS) {
        __syncwarp();
#pragma unroll 4
        for (int i = lane; i < NUMBERS; i += 32) {
            const int vector = Columns::ALONG_K ? i / Config::FEW_STEPS : i % Config::VECTORS;
            const int k = Columns::ALONG_K ? i % Config::FEW_STEPS : i / Config::VECTORS;
            Value x = {0.0f, 0.0f};
            if (vector < columns.vectors && first + k < columns.steps) {
                x = columns.first[vector * stride + (first + k) * k_stride];
            }
            if (GEMM_CONJUGATE_B) x.im = -x.im;
            few[k * Config::VECTORS + vector] = x;
        }
        __syncwarp();
#pragma unroll 1
        for (int k = 0; k < Config::FEW_STEPS && first + k < columns.steps; ++k) {
            const Value x[2] = {rows.number(slot, 0, first + k), rows.number(slot, 1, first + k)};
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j) {
                const auto y = *reinterpret_cast<const Vector<Value, 2>*>(few + k * Config::VECTORS + column + 8 * j);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Value &left = x[e / 2], &right = y.at[e % 2];
                    float &re = of_chunk.re[j][e], &im = of_chunk.im[j][e];
                    re = multiply_add(left.im, -right.im, multiply_add(left.re, right.re, re));
                    im = multiply_add(left.im, right.re, multiply_add(left.re, right.im, im));
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < Sums::COLUMNS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums.re[j][e] += of_chunk.re[j][e];
            sums.im[j][e] += of_chunk.im[j][e];
        }
}

// What consumers tell each other at the end of a part of k.
struct Told {
    int last, unserved[Config::CONSUMER_WARPS];
};

// The sums of all parts of k of a tile. False: another block has them.
GEMM_DEVICE bool gather_all(
    const FusedParams& params, const Item& item, Sums& sums, bool& served, Told& told, Meeting& meeting, int thread) {
    if (thread % 32 == 0) told.unserved[thread / 32] = !served;
    meeting.meet(thread);
    int unserved = 0;
#pragma unroll
    for (int warp = 0; warp < Config::CONSUMER_WARPS; ++warp) unserved |= told.unserved[warp];
    served = unserved == 0;
    return gather_splits(params, item, sums, served, &told.last, meeting, thread);
}

GEMM_DEVICE void consume(
    const FusedParams& params, const Pipeline& pipeline, Told& told, Ahead* ahead) {
    const GemmParams& gemm = params.gemm;
    const Rows rows(thread_again());
    const int warp = warp_number(), first_row = warp * Config::ROWS;
    unsigned char* const slots = pipeline.stages + Config::SLOTS_AT + warp * Config::SLOTS * Config::SLOT_BYTES;
    const Requests requests{ahead[warp], first_row, rows.lane};
    requests.begin(params, blockIdx.x);
    for (int slot = 0; slot < Config::SLOTS; ++slot) requests.next(params, rows, slots + slot * Config::SLOT_BYTES);
    Meeting meeting{pipeline.together};
    Turn turn;
    for (unsigned number = blockIdx.x;; number += gridDim.x) {
        Sums sums = {};
        bool served = true;
        const int first = static_cast<int>(params.splits > 1 ? number % params.splits : 0) * params.chunks_part;
        const int left = params.chunks - first, end = first + (left < params.chunks_part ? left : params.chunks_part);
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
            const Steps steps(params, chunk);
            unsigned char* const slot = slots + turn.stage * Config::SLOT_BYTES;
            copy_wait<Config::SLOTS - 1>();
            __syncwarp();
            RowPlanes planes;
            bool serves = __all_sync(0xffffffffu, rows.split(planes, slot, steps.count)) != 0;
            barrier_wait(pipeline.filled(turn), turn.parity);
            unsigned char* const stage = pipeline.stage(turn);
            const int* const doubts = reinterpret_cast<const int*>(stage + Config::DOUBTS_AT);
#pragma unroll
            for (int producer = 0; producer < Config::PRODUCER_WARPS; ++producer) serves &= doubts[producer] == 0;
            if (!serves) {
                Worst worst;
                worst.add(planes.word[0]);
                worst.add(planes.word[1]);
                const int* const counts = reinterpret_cast<const int*>(stage + Config::COUNTS_AT);
                serves = is_served(worst.over_warp(), deficits_of_chunk(counts), steps.count - SPARE);
            }
            const float* const scales = reinterpret_cast<const float*>(stage + Config::SCALES_AT);
            add_chunk(
                sums, planes, shared_address(stage), scales + rows.lane % 4 * 2, steps.count,
                serves);
            arrive(pipeline.emptied(turn), rows.lane);
            turn.next();
            if (!serves) {
                served = false;
                const Cursor cursor(params, number, chunk);
                Value* const few = reinterpret_cast<Value*>(pipeline.stages + Config::FEW_AT + warp * Config::FEW_BYTES);
                add_numbers(
                    sums, rows, slot, few, cursor.in_b(params, steps), gemm.b.column_stride, gemm.b.row_stride);
            }
            requests.next(params, rows, slot);
        }
        if (served) {
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sums.re[j][e] = restored<Config::PROMOTE / 16>(sums.re[j][e]);
                    sums.im[j][e] = restored<Config::PROMOTE / 16>(sums.im[j][e]);
                }
        }
        const Item item(params, number);
        const bool split = params.splits > 1;
        if (!split || gather_all(params, item, sums, served, told, meeting, thread_again())) {
            // Alone, a warp counts its own rows; of several blocks the last one counts the tile.
            const int counted = split ? item.rows : clipped(first_row, Config::ROWS, item.rows);
            if (!served && (split ? thread_again() : rows.lane) == 0) {
                add_elements(params.counters->plain, static_cast<Long>(counted) * item.columns);
            }
            const Rows again(once_more(rows.lane));
            store(gemm, item, sums, first_row + again.row, again.lane % 4 * 2, again.apart);
        }
        if (gridDim.x >= params.items - number) break;
    }
    copy_wait<0>();
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) fused_tall(FusedParams params) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(8) Barrier full[Config::STAGES], empty[Config::STAGES], together;
    __shared__ Told told;
    __shared__ Ahead ahead[Config::CONSUMER_WARPS];
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::SHARED_BYTES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const Pipeline pipeline{
        dynamic + (0u - shared_address(dynamic)) % Config::ALIGNMENT, shared_address(full), shared_address(empty),
        shared_address(&together)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; ++i) {
            barrier_init(shared_address(&full[i]), Config::PRODUCER_WARPS);
            barrier_init(shared_address(&empty[i]), Config::CONSUMER_WARPS);
        }
        barrier_init(shared_address(&together), Config::CONSUMER_WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    const int group = warp_number() / 4;
    if (group < Config::CONSUMERS / 128) {
        take_registers<Config::CONSUMER_REGISTERS>();
        consume(params, pipeline, told, ahead);
    } else {
        give_registers<Config::PRODUCER_REGISTERS>();
        produce(params, pipeline, thread_again() - Config::CONSUMERS);
    }
}
