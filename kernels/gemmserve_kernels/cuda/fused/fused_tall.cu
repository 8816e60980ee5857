// The same as fused_gemm.cu by tiles of 128 x 64: op(A) never has planes in shared memory.
//
// Eight of a block's warps are consumers, of sixteen rows each: a warp splits its own rows in registers and multiplies them
// from there. The columns' planes have been made once for all tiles (fused_columns.cu) and are copied as they are, like the
// rows, by four warps of producers. While the tensor cores multiply one half of a chunk, a warp splits the next one: so
// neither waits for the other, and a matrix of many rows is read and split once for every 64 columns. A warp judges its
// sixteen rows alone.
#include "../common/dependent.cuh"
#include "../common/memory/lanes.cuh"
#include "../common/numbers/truncation.cuh"
#include "../common/ptx/again.cuh"
#include "../common/ptx/wgmma.cuh"
#include "gather.cuh"
#include "rows.cuh"

using Rows = RowOperand<GEMM_A_ALONG_K, GEMM_CONJUGATE_A>;
using Slots = RowSlots<GEMM_A_ALONG_K>;
using Copies = VectorCopies<GEMM_A_ALONG_K, GEMM_VECTOR_A, Slots>;

// Barriers of the stages: of the columns' images those of Pipeline; of rows as they are for each warp of producers.
struct RowBarriers {
    Address full, empty;

    GEMM_DEVICE Address filled(const Turn& turn, int producer) const { return at(full, turn, producer); }
    GEMM_DEVICE Address emptied(const Turn& turn, int producer) const { return at(empty, turn, producer); }

  private:
    static GEMM_DEVICE Address at(Address first, const Turn& turn, int producer) {
        return first + (turn.stage * Config::PRODUCER_WARPS + producer) * sizeof(Barrier);
    }
};

GEMM_DEVICE void produce(const FusedParams& params, const Pipeline& pipeline, const RowBarriers& rows, int producer) {
    const GemmParams& gemm = params.gemm;
    const Copies copies{thread_again() % 32};
    const int first_row = producer * Slots::VECTORS;
    unsigned char* const slots = pipeline.stages + Config::SLOTS_AT + producer * Slots::PAIR * Config::SLOT_BYTES;
    Cursor cursor(params);
    Turn turn;
    turn.parity = 1;  // the first time around all stages are empty
    bool waited = false;
    do {
        ChunkPlace place = cursor.in_a(params);
        place.first += first_row * gemm.a.row_stride;
        place.vectors -= first_row;
        barrier_wait(rows.emptied(turn, producer), turn.parity);
        copies.request(slots + turn.stage * Config::SLOT_STAGE, place, gemm.a.row_stride, gemm.a.column_stride);
        barrier_arrive_copied(rows.filled(turn, producer));
        if (!waited) wait_for_previous();
        waited = true;
        if (producer == 0) {
            barrier_wait(pipeline.emptied(turn), turn.parity);
            if (copies.lane == 0) {
                barrier_arrive_expecting(pipeline.filled(turn), Config::IMAGE_BYTES);
                copy_bytes(
                    shared_address(pipeline.stage(turn)),
                    cursor.chunks.images + static_cast<Long>(cursor.chunks.next) * Config::STAGE_BYTES,
                    Config::IMAGE_BYTES, pipeline.filled(turn));
            }
            __syncwarp();
        }
        turn.next();
    } while (cursor.next(params));
}

using Partial = float[4 * Sums::COLUMNS];
static_assert(4 * Sums::COLUMNS == Config::BLOCK_N / 2, "the sums of one instruction");

// Slices of half a chunk whose products meet in one partial sum.
constexpr int TOGETHER = Config::PROMOTE / 16 < RowPlanes::SLICES ? Config::PROMOTE / 16 : RowPlanes::SLICES;

// partial += SIGN A B of two planes over slices FIRST to FIRST + TOGETHER - 1 of half HALF.
template <int SIGN, Plane OF_A, Plane OF_B, int HALF, int FIRST>
GEMM_DEVICE void add_planes(Partial& partial, const RowPlanes& a, Descriptor b, bool fresh = false) {
#pragma unroll
    for (int s = FIRST; s < FIRST + TOGETHER; ++s) {
        multiply_held<SIGN>(
            partial, a.at[OF_A][s], b + (OF_B * Config::PLANE + (HALF * RowPlanes::SLICES + s) * 32) / 16,
            fresh && s == FIRST ? 0 : 1);
    }
}

// The mixed products of the real or the imaginary parts, which come first, and then the large ones: the order of
// multiply.cuh.
template <bool IMAGINARY, int HALF, int FIRST>
GEMM_DEVICE void add_mixed(Partial& partial, const RowPlanes& a, Descriptor b, bool fresh) {
    constexpr int MINUS = IMAGINARY ? 1 : -1;
    constexpr Plane BY_RE = IMAGINARY ? IM_HIGH : RE_HIGH, BY_IM = IMAGINARY ? RE_HIGH : IM_HIGH;
    constexpr Plane BY_RE_LOW = IMAGINARY ? IM_LOW : RE_LOW, BY_IM_LOW = IMAGINARY ? RE_LOW : IM_LOW;
    add_planes<1, RE_LOW, BY_RE, HALF, FIRST>(partial, a, b, fresh);
    add_planes<MINUS, IM_LOW, BY_IM, HALF, FIRST>(partial, a, b);
    add_planes<1, RE_HIGH, BY_RE_LOW, HALF, FIRST>(partial, a, b);
    add_planes<MINUS, IM_HIGH, BY_IM_LOW, HALF, FIRST>(partial, a, b);
}
template <bool IMAGINARY, int HALF, int FIRST, bool ODD>
GEMM_DEVICE void add_large(Partial& partial, const RowPlanes& a, Descriptor b) {
    constexpr int MINUS = IMAGINARY ? 1 : -1;
    constexpr Plane BY_RE = IMAGINARY ? IM_HIGH : RE_HIGH, BY_IM = IMAGINARY ? RE_HIGH : IM_HIGH;
    if constexpr (ODD) {
        add_planes<MINUS, IM_HIGH, BY_IM, HALF, FIRST>(partial, a, b);
        add_planes<1, RE_HIGH, BY_RE, HALF, FIRST>(partial, a, b);
    } else {
        add_planes<1, RE_HIGH, BY_RE, HALF, FIRST>(partial, a, b);
        add_planes<MINUS, IM_HIGH, BY_IM, HALF, FIRST>(partial, a, b);
    }
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

// sums += the real or the imaginary parts of A B over half a chunk. Where planes do not serve the warp's rows, it multiplies
// for its warpgroup's sake alone. By a warpgroup; `columns`: where their planes lie; `right`: the scales from the lane's
// first column on; `meanwhile`: is done while the tensor cores multiply, before `serves` is looked at.
template <bool IMAGINARY, int HALF, int FIRST = 0, class Work>
GEMM_DEVICE void add_half(
    Sums& sums, const RowPlanes& a, Address columns, const float (&left)[2], const float* right, const bool& serves,
    const Work& meanwhile) {
    if constexpr (FIRST < RowPlanes::SLICES) {
        constexpr bool ODD = (HALF * RowPlanes::SLICES + FIRST) * 16 / Config::PROMOTE % 2 != 0;
        const Descriptor b = describe<Config::ROW>(columns);
        Partial partial;
        pin(partial);
        wgmma_fence();
        add_mixed<IMAGINARY, HALF, FIRST>(partial, a, b, true);
        add_large<IMAGINARY, HALF, FIRST, ODD>(partial, a, b);
        wgmma_commit();
        __syncwarp();  // nothing of what follows is done sooner
        meanwhile();
        wgmma_wait<0>();
        pin(partial);
        if (serves) promote(IMAGINARY ? sums.im : sums.re, partial, left, right);
        add_half<IMAGINARY, HALF, FIRST + Config::PROMOTE / 16>(sums, a, columns, left, right, serves, [] {});
    }
}

// The same of a whole chunk that is promoted at once. `split_late` makes the planes of its second half, in the first one of
// two calls; `meanwhile` may overwrite those of the first half, in the last one.
template <bool IMAGINARY, class Late, class Work>
GEMM_DEVICE void add_whole(
    Sums& sums, const RowPlanes& early, const RowPlanes& late, Address columns, const float (&left)[2],
    const float* right, const bool& serves, const Late& split_late, const Work& meanwhile) {
    const Descriptor b = describe<Config::ROW>(columns);
    Partial partial;
    pin(partial);
    wgmma_fence();
    add_mixed<IMAGINARY, 0, 0>(partial, early, b, true);
    if constexpr (!IMAGINARY) {
        wgmma_commit();
        __syncwarp();
        split_late();
        wgmma_fence();
    }
    add_mixed<IMAGINARY, 1, 0>(partial, late, b, false);
    add_large<IMAGINARY, 0, 0, false>(partial, early, b);
    wgmma_commit();
    add_large<IMAGINARY, 1, 0, true>(partial, late, b);
    wgmma_commit();
    __syncwarp();
    if constexpr (IMAGINARY) wgmma_wait<1>();
    meanwhile();
    wgmma_wait<0>();
    pin(partial);
    if (serves) promote(IMAGINARY ? sums.im : sums.re, partial, left, right);
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
            const int vector = GEMM_B_ALONG_K ? i / Config::FEW_STEPS : i % Config::VECTORS;
            const int k = GEMM_B_ALONG_K ? i % Config::FEW_STEPS : i / Config::VECTORS;
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
    const FusedParams& params, const Item& item, unsigned number, Sums& sums, bool& served, Told& told, Meeting& meeting,
    int thread) {
    if (thread % 32 == 0) told.unserved[thread / 32] = !served;
    meeting.meet(thread);
    int unserved = 0;
#pragma unroll
    for (int warp = 0; warp < Config::CONSUMER_WARPS; ++warp) unserved |= told.unserved[warp];
    served = unserved == 0;
    return gather_splits(params, item, number, sums, served, &told.last, meeting, thread);
}

// Whether planes serve the warp's rows of a chunk, all of which have been split. By a warp.
GEMM_DEVICE bool are_served(const RowsKnown& known, const unsigned char* columns_known, int steps) {
    const VectorCounts counts[2] = {Rows::counts(known, 0, steps), Rows::counts(known, 1, steps)};
    bool promised = counts[0].promise(known.scale(0), steps) && counts[1].promise(known.scale(1), steps);
    promised &= *reinterpret_cast<const unsigned*>(columns_known + Config::DOUBTS_AT) == 0;
    if (__all_sync(0xffffffffu, promised) != 0) return true;
    Worst worst;
    for (int h = 0; h < 2; ++h) worst.add(counts[h].word(known.scale(h)));
    const auto* const columns = reinterpret_cast<const VectorWord*>(columns_known + Config::COUNTS_AT);
    return is_served(worst.over_warp(), deficits_of_chunk(columns), steps - SPARE);
}

// What a warp of consumers finds in the stages.
struct WarpStages {
    const Pipeline& pipeline;
    const RowBarriers& rows;
    int warp;

    GEMM_DEVICE int producer() const { return warp / Slots::PAIR; }
    GEMM_DEVICE const unsigned char* slot(const Turn& turn) const {
        return pipeline.stages + Config::SLOTS_AT + once_more(turn.stage) * Config::SLOT_STAGE + warp * Config::SLOT_BYTES;
    }
    GEMM_DEVICE void wait_for_rows(const Turn& turn) const { barrier_wait(rows.filled(turn, producer()), turn.parity); }
    GEMM_DEVICE void leave_rows(const Turn& turn, int lane) const { arrive(rows.emptied(turn, producer()), lane); }
};

GEMM_DEVICE void consume(
    const FusedParams& params, const Pipeline& pipeline, const RowBarriers& row_barriers, Told& told) {
    const GemmParams& gemm = params.gemm;
    const Rows rows(thread_again());
    const WarpStages stages{pipeline, row_barriers, warp_number()};
    const int first_row = stages.warp * Config::ROWS;
    const unsigned zero = static_cast<unsigned>(gemm.conjugate_a);  // 0: conjugation is in this kernel's source
    Meeting meeting{pipeline.together};
    unsigned turns = 0;
    for (unsigned number = blockIdx.x;; number += gridDim.x) {
        Sums sums = {};
        bool served = true;
        const int first = static_cast<int>(params.splits > 1 ? number % params.splits : 0) * params.chunks_part;
        const int left = params.chunks - first, end = first + (left < params.chunks_part ? left : params.chunks_part);
        RowPlanes early, late;  // of the halves of a chunk
        stages.wait_for_rows(Turn::after(turns));
        RowsKnown known = rows.measure(stages.slot(Turn::after(turns)));
        rows.split(early, known, stages.slot(Turn::after(turns)), 0);
        wait_for_previous();
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk, ++turns) {
            const Turn turn = Turn::after(turns);
            const unsigned char* const stage = pipeline.stage(turn);
            const Address columns = of_all_lanes(shared_address(stage));
            const float scales[2] = {known.scale(0).up(), known.scale(1).up()};
            const float* const right =
                reinterpret_cast<const float*>(stage + Config::KNOWN_AT + Config::SCALES_AT) + once_more(rows.lane) % 4 * 2;
            const auto following = [&] { return Turn::after(turns + 1); };
            const bool more = chunk + 1 < end;
            bool serves = true;
            barrier_wait(pipeline.filled(turn), turn.parity);
            const auto split_late = [&] {
                rows.split(late, known, stages.slot(turn), 1);
                serves = are_served(known, stage + Config::KNOWN_AT, Steps::count_of(params, chunk));
                if (serves) stages.leave_rows(turn, rows.lane);
            };
            const auto measure_next = [&] {
                if (!more) return;
                const Turn ahead = following();
                stages.wait_for_rows(ahead);
                known = rows.measure(stages.slot(ahead));
            };
            const auto split_next = [&] {
                if (more) rows.split(early, known, stages.slot(following()), 0);
            };
            if constexpr (Config::PROMOTE == Config::CHUNK) {
                add_whole<false>(sums, early, late, columns, scales, right, serves, split_late, measure_next);
                add_whole<true>(sums, early, late, columns, scales, right, serves, [] {}, split_next);
            } else {
                add_half<false, 0>(sums, early, columns, scales, right, serves, split_late);
                add_half<true, 0>(sums, early, columns, scales, right, serves, measure_next);
                add_half<false, 1>(sums, late, columns, scales, right, serves, split_next);
                add_half<true, 1>(sums, late, columns, scales, right, serves, [] {});
            }
            // The scales lie in the stage, which the copy engine fills: see once_read.
            arrive(once_read(pipeline.emptied(turn), sums.made_of(), zero), rows.lane);
            if (!serves) {
                served = false;
                const Cursor cursor(params, Item(params, number), chunk);
                Value* const few =
                    reinterpret_cast<Value*>(pipeline.stages + Config::FEW_AT + stages.warp * Config::FEW_BYTES);
                add_numbers(
                    sums, rows, stages.slot(turn), few, cursor.in_b(params), gemm.b.column_stride,
                    gemm.b.row_stride);
                stages.leave_rows(turn, rows.lane);
            }
        }
        if (served) {
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sums.re[j][e] = restored<2 * Config::PROMOTE / 16>(sums.re[j][e]);
                    sums.im[j][e] = restored<2 * Config::PROMOTE / 16>(sums.im[j][e]);
                }
        }
        const Item item(params, number);
        const bool split = params.splits > 1;
        if (!split || gather_all(params, item, number, sums, served, told, meeting, thread_again())) {
            // Alone, a warp counts its own rows; of several blocks the last one counts the tile.
            const int counted = split ? item.rows(gemm) : clipped(first_row, Config::ROWS, item.rows(gemm));
            if (!served && (split ? thread_again() : rows.lane) == 0) {
                add_elements(params.counters->plain, static_cast<Long>(counted) * item.columns(gemm));
            }
            const Rows again(once_more(rows.lane));
            store(gemm, item, sums, first_row + again.row, again.lane % 4 * 2, again.apart);
        }
        if (gridDim.x >= params.items - number) break;
    }
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) fused_tall(FusedParams params) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(8) Barrier full[Config::STAGES], empty[Config::STAGES], together;
    __shared__ __align__(8) Barrier rows_full[Config::STAGES][Config::PRODUCER_WARPS];
    __shared__ __align__(8) Barrier rows_empty[Config::STAGES][Config::PRODUCER_WARPS];
    __shared__ Told told;
    static_assert(Config::PRODUCER_WARPS == 4, "doubts are one word");
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::SHARED_BYTES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const Pipeline pipeline{
        dynamic + (0u - shared_address(dynamic)) % Config::ALIGNMENT, shared_address(full), shared_address(empty),
        shared_address(&together)};
    const RowBarriers rows{shared_address(rows_full), shared_address(rows_empty)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; ++i) {
            barrier_init(shared_address(&full[i]), 1);
            barrier_init(shared_address(&empty[i]), Config::CONSUMER_WARPS);
            for (int producer = 0; producer < Config::PRODUCER_WARPS; ++producer) {
                barrier_init(shared_address(&rows_full[i][producer]), 32);
                barrier_init(shared_address(&rows_empty[i][producer]), Slots::PAIR);
            }
        }
        barrier_init(shared_address(&together), Config::CONSUMER_WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    // Rows are asked for and split while the columns' images are being made: no kernel of a program writes operands. All
    // else in global memory comes after wait_for_previous.
    let_next_start();
    const int warp = warp_number();
    if (warp < Config::CONSUMER_WARPS) {
        take_registers<Config::CONSUMER_REGISTERS>();
        consume(params, pipeline, rows, told);
    } else {
        give_registers<Config::PRODUCER_REGISTERS>();
        produce(params, pipeline, rows, warp - Config::CONSUMER_WARPS);
    }
}
