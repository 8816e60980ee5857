// The same as fused_gemm.cu by tiles of 128 x 64, for batches: both blocks of a cluster, neighbours along n, share rows of op(A).
//
// Each block splits half of the rows of every chunk, and sends the planes to the other one; the planes of its columns it
// makes alone. A stage has half a chunk, of all rows and of the block's columns. Eight warps are producers, of eight vectors
// at a time: while a warp splits these, it has asked for its next ones. Two warpgroups of consumers multiply, for
// 64 rows each, which are judged like a tile of fused_gemm: results have the very bits that it gives.
//
// What crosses blocks: planes, and what is known of them, by the copy engine, told to the barrier of the stage that they come
// to; and that a stage is free, by an arrival of every warp of consumers at that stage's barrier of either block.
#include "../common/memory/lanes.cuh"
#include "../common/numbers/truncation.cuh"
#include "../common/ptx/again.cuh"
#include "cluster/multiply.cuh"

using OperandA = TaskOperand<GEMM_A_ALONG_K, GEMM_VECTOR_A, GEMM_CONJUGATE_A, false>;
using OperandB = TaskOperand<GEMM_B_ALONG_K, GEMM_VECTOR_B, GEMM_CONJUGATE_B, true>;
template <bool OF_A>
using OperandOf = Select<OF_A, OperandA, OperandB>;

// What is known of the chunk that comes after so many ones: records of A's vectors, then of B's.
GEMM_DEVICE TaskKnown* known_of(const Pipeline& pipeline, unsigned chunks) {
    return reinterpret_cast<TaskKnown*>(pipeline.stages + Config::KNOWN_AT + chunks % 2 * Config::KNOWN_STEP);
}

// A warp of producers, which has eight vectors of some rows of A's chunk, and then of B's.
class Producer {
  public:
    GEMM_DEVICE Producer(const FusedParams& params, const Pipeline& pipeline, int warp)
        : params(params), pipeline(pipeline), warp(warp), slot(pipeline.stages + Config::SLOTS_AT + warp * Config::SLOT_BYTES) {}

    GEMM_DEVICE void run() {
        Cursor cursor(params);
        Turn turn;
        turn.parity = 1;  // the first time around all stages are empty
        unsigned chunks = 0;
        request<true>(cursor);
        for (;;) {
            const int steps = cursor.steps.count;
            OperandA::Share rows;
            take<true>(rows);
            request<false>(cursor);
            make<true>(rows, steps, turn, chunks);
            OperandB::Share columns;
            take<false>(columns);
            const bool more = cursor.next(params);
            if (more) request<true>(cursor);
            make<false>(columns, steps, turn, chunks);
            if (!more) break;
            turn.next();
            turn.next();
            ++chunks;
        }
    }

  private:
    const FusedParams& params;
    const Pipeline& pipeline;
    int warp;  // and its task: of the block's rows, of its columns
    unsigned char* slot;

    // Number of the warp's task among all of a side.
    template <bool OF_A>
    GEMM_DEVICE int task() const {
        return OF_A ? static_cast<int>(cluster_rank()) * Config::OWN_A + warp : warp;
    }
    template <bool OF_A>
    GEMM_DEVICE ChunkPlace place_of(const Cursor& cursor) const {
        ChunkPlace place = OF_A ? cursor.in_a(params) : cursor.in_b(params);
        const int first = task<OF_A>() * Config::TASK;
        place.first += first * vector_stride<OF_A>();
        place.vectors -= first;
        return place;
    }
    template <bool OF_A>
    GEMM_DEVICE const Long& k_stride() const {
        return OF_A ? params.gemm.a.column_stride : params.gemm.b.row_stride;
    }
    template <bool OF_A>
    GEMM_DEVICE const Long& vector_stride() const {
        return OF_A ? params.gemm.a.row_stride : params.gemm.b.column_stride;
    }

    template <bool OF_A>
    GEMM_DEVICE void request(const Cursor& cursor) const {
        OperandOf<OF_A>::request(slot, place_of<OF_A>(cursor), vector_stride<OF_A>(), k_stride<OF_A>(), thread_again() & 31);
    }
    template <bool OF_A>
    GEMM_DEVICE void take(typename OperandOf<OF_A>::Share& held) const {
        const OperandOf<OF_A> operand(thread_again() & 31);
        operand.take(held, slot);
    }

    // Makes the planes of a task in the stages of a chunk's halves, the first of which is `turn`'s.
    template <bool OF_A>
    GEMM_DEVICE void make(
        const typename OperandOf<OF_A>::Share& held, int steps, const Turn& turn, unsigned chunks) const {
        const OperandOf<OF_A> operand(thread_again() & 31);
        typename OperandOf<OF_A>::Planes planes;
        operand.split(planes, held, steps);
        Turn second = turn;
        second.next();
        make_half<OF_A, 0>(operand, planes, turn, chunks);
        make_half<OF_A, 1>(operand, planes, second, chunks);
    }

    template <bool OF_A, int HALF>
    GEMM_DEVICE void make_half(
        const OperandOf<OF_A>& operand, const typename OperandOf<OF_A>::Planes& planes, const Turn& turn,
        unsigned chunks) const {
        constexpr int PAIR = OF_A ? Config::PAIR_A : Config::PAIR_B;
        const int of_all = task<OF_A>();
        const int lane = thread_again() & 31;
        unsigned char* const rows =
            pipeline.stage(turn) + (OF_A ? of_all * Config::TASK_A : Config::SIDE_A + of_all * Config::TASK_B);
        TaskKnown& known = known_of(pipeline, chunks)[(OF_A ? 0 : Config::TASKS_A) + of_all];
        barrier_wait(pipeline.emptied(turn), turn.parity);
        operand.template write<HALF, PAIR>(planes, rows);
        if constexpr (HALF == 0) operand.tell(planes, known, lane);
        written_for_tensor_cores();  // and for the copy engine
        __syncwarp();
        if constexpr (OF_A) {
            if (lane == 0) {
                const unsigned to = 1 - cluster_rank();
                const Address told = pipeline.filled(turn);
                copy_to_block(shared_address(rows), Config::TASK_A, told, to);
                if constexpr (HALF == 0) copy_to_block(shared_address(&known), Config::RECORD, told, to);
            }
        }
        if (lane == 0) {
            constexpr int COMING =
                (Config::TASKS_A - Config::OWN_A) * (Config::TASK_A + (HALF == 0 ? Config::RECORD : 0));
            if (!OF_A && warp == 0) {
                barrier_arrive_expecting(pipeline.filled(turn), COMING);
            } else {
                barrier_arrive(pipeline.filled(turn));
            }
        }
    }
};

// Whether planes serve a chunk of `steps` steps of a warpgroup's rows and the block's columns. By a warp.
GEMM_DEVICE bool are_served(const TaskKnown* rows, const TaskKnown* columns, int steps, int lane) {
    const TaskKnown& one = lane % 16 < 8 ? rows[lane % 8] : columns[lane % 8];
    // The same in all lanes, and by votes, so that the compiler can see it.
    if (__any_sync(0xffffffffu, one.doubt != 0) == 0) return true;
    const auto deficits = [&](const TaskKnown* of_side) {
        Worst worst;
        for (int vector = lane; vector < Config::VECTORS; vector += 32) {
            worst.add(of_side[vector / Config::TASK].counts[vector % Config::TASK]);
        }
        return worst.over_warp();
    };
    return __all_sync(0xffffffffu, is_served(deficits(rows), deficits(columns), steps - SPARE)) != 0;
}

// Copies FEW steps of a side as they are, from step `first` of the chunk on. By a warpgroup.
template <class Operand, bool CONJUGATE>
GEMM_DEVICE void copy_few(
    unsigned char* to, const ChunkPlace& place, int first, const Long& vector_stride, const Long& k_stride, int thread) {
#pragma unroll 1
    for (int i = thread; i < Config::VECTORS * Config::FEW; i += Config::GROUP_THREADS) {
        const int vector = Operand::ALONG_K ? i / Config::FEW : i % Config::VECTORS;
        const int k = Operand::ALONG_K ? i % Config::FEW : i / Config::VECTORS;
        Value x = {0.0f, 0.0f};
        if (vector < place.vectors && first + k < place.steps) {
            x = place.first[vector * vector_stride + (first + k) * k_stride];
        }
        if constexpr (CONJUGATE) x.im = -x.im;
        reinterpret_cast<Value*>(to)[plain_at(vector, k)] = x;
    }
}

// sums += A B over a chunk that planes do not serve. By a warpgroup.
GEMM_DEVICE void add_numbers(
    const FusedParams& params, const Pipeline& pipeline, Sums& sums, const GroupMultiply& multiply, const Item& item, int chunk,
    Meeting& meeting, int group, int thread) {
    const GemmParams& gemm = params.gemm;
    const Cursor cursor(params, item, chunk);
    ChunkPlace rows = cursor.in_a(params);
    const ChunkPlace columns = cursor.in_b(params);
    rows.first += group * Config::VECTORS * gemm.a.row_stride;
    rows.vectors -= group * Config::VECTORS;
    unsigned char* const few = pipeline.stages + Config::FEW_AT + group * Config::FEW_BYTES;
    const int in_group = thread % Config::GROUP_THREADS;
    Sums of_chunk = {};
#pragma unroll 1
    for (int first = 0; first < rows.steps; first += Config::FEW) {
        const int left = rows.steps - first;
        meeting.meet(thread);  // those of the steps before have been read
        copy_few<OperandA, GEMM_CONJUGATE_A>(few, rows, first, gemm.a.row_stride, gemm.a.column_stride, in_group);
        copy_few<OperandB, GEMM_CONJUGATE_B>(
            few + Config::FEW_SIDE, columns, first, gemm.b.column_stride, gemm.b.row_stride, in_group);
        meeting.meet(thread);
        multiply.from_numbers(of_chunk, few, left < Config::FEW ? left : Config::FEW);
    }
#pragma unroll
    for (int j = 0; j < Sums::COLUMNS; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums.re[j][e] += of_chunk.re[j][e];
            sums.im[j][e] += of_chunk.im[j][e];
        }
}

// Says to both blocks that the warp no longer reads a stage, nor what is known of it: see once_read.
GEMM_DEVICE void leave(const Pipeline& pipeline, const Turn& turn, int thread, unsigned read, unsigned zero) {
    __syncwarp();
    const unsigned lane = static_cast<unsigned>(thread) % 32;
    if (lane < Config::CLUSTER) barrier_arrive_remote(once_read(pipeline.emptied(turn), read, zero), lane);
}

GEMM_DEVICE void consume(const FusedParams& params, const Pipeline& pipeline, int group, int thread) {
    const GemmParams& gemm = params.gemm;
    const GroupMultiply multiply(thread, group);
    const unsigned zero = static_cast<unsigned>(gemm.conjugate_a);  // 0: conjugation is in this kernel's source
    Meeting meeting{pipeline.together + group * static_cast<int>(sizeof(Barrier))};
    Turn turn;
    unsigned chunks = 0;
    unsigned number = first_item();
    for (Item item(params, number);; item.next(params, number)) {
        Sums sums = {};
        bool served = true;
#pragma unroll 1
        for (int chunk = 0; chunk < params.chunks; ++chunk, ++chunks) {
            const int steps = Steps::count_of(params, chunk);
            const TaskKnown* const known = known_of(pipeline, chunks);
            barrier_wait(pipeline.filled(turn), turn.parity);
            const bool planes = are_served(
                known + group * (Config::TASKS_A / 2), known + Config::TASKS_A, steps, thread % 32);
            if (planes) {
                multiply.from_planes<0>(sums, of_all_lanes(shared_address(pipeline.stage(turn))), known, steps);
            }
            leave(pipeline, turn, thread, sums.made_of(), zero);
            turn.next();
            barrier_wait(pipeline.filled(turn), turn.parity);
            if (planes) {
                multiply.from_planes<1>(sums, of_all_lanes(shared_address(pipeline.stage(turn))), known, steps);
            } else {
                served = false;
                add_numbers(params, pipeline, sums, multiply, item, chunk, meeting, group, thread);
            }
            leave(pipeline, turn, thread, sums.made_of(), zero);
            turn.next();
        }
        if (served) {
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sums.re[j][e] = restored<Config::PROMOTE / 16>(sums.re[j][e]);
                    sums.im[j][e] = restored<Config::PROMOTE / 16>(sums.im[j][e]);
                }
        } else if (thread % Config::GROUP_THREADS == 0) {
            const int rows = item.rows(gemm) - group * Config::VECTORS, columns = item.columns(gemm);
            if (rows > 0 && columns > 0) {
                add_elements(
                    params.counters->plain, static_cast<Long>(rows < Config::VECTORS ? rows : Config::VECTORS) * columns);
            }
        }
        store(gemm, item, sums, multiply.row, multiply.column);
        if (next_item() >= params.items - number) break;
        number += next_item();
    }
}

#define GEMM_CLUSTER_ATTRIBUTE __cluster_dims__(GEMM_CLUSTER, 1, 1)

extern "C" __global__ void GEMM_CLUSTER_ATTRIBUTE __launch_bounds__(GEMM_THREADS, 1) fused_cluster(FusedParams params) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(8) Barrier full[Config::STAGES], empty[Config::STAGES], together[2];
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::SHARED_BYTES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const Pipeline pipeline{
        dynamic + (0u - shared_address(dynamic)) % Config::ALIGNMENT, shared_address(full), shared_address(empty),
        shared_address(together)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; ++i) {
            barrier_init(shared_address(&full[i]), Config::OWN_A + Config::TASKS_B);
            barrier_init(shared_address(&empty[i]), Config::CONSUMER_WARPS * Config::CLUSTER);
        }
        for (int i = 0; i < 2; ++i) barrier_init(shared_address(&together[i]), Config::CONSUMER_WARPS / 2);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_sync();
    const int warp = warp_number();
    if (warp < Config::CONSUMER_WARPS) {
        take_registers<Config::CONSUMER_REGISTERS>();
        consume(params, pipeline, warp / 4, static_cast<int>(threadIdx.x));
    } else {
        give_registers<Config::PRODUCER_REGISTERS>();
        Producer(params, pipeline, warp - Config::CONSUMER_WARPS).run();
    }
    cluster_sync();  // the other block may still write to this one's memory, or read it
}
