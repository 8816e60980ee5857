// D = alpha op(A) op(B) + beta C of complex64 or float32 on Hopper's tensor cores, from operands as they lie.
//
// A few of a block's warps copy chunk after chunk of k of both operands to shared memory as they are, whole lines at a time.
// Most are producers, half of them of either operand at a time: they take such a chunk into registers, so that the next one
// may be on its way, and split it into float16 planes in a stage of shared memory. Two warpgroups of consumers multiply the
// planes, for half of a tile's columns each: splitting takes more instructions than that.
// A block of real numbers has one warpgroup that multiplies all columns, and half as many warps that split: a
// multiprocessor has two such blocks.
// Every chunk of a vector has its own scale, and every chunk of a tile is judged: what planes do not serve is computed by
// multiply-adds, in its turn (gemmserve_kernels.algorithms.fused.gemm has the proof).
#include "../common/memory/lanes.cuh"
#include "../common/numbers/truncation.cuh"
#include "../common/ptx/again.cuh"
#include "copies.cuh"
#include "multiply.cuh"

using OperandA = ChunkOperand<GEMM_A_ALONG_K, GEMM_VECTOR_A, GEMM_CONJUGATE_A>;
using OperandB = ChunkOperand<GEMM_B_ALONG_K, GEMM_VECTOR_B, GEMM_CONJUGATE_B, Config::PARTS == 2>;

// Both operands as they are: those of A lie first.
template <bool OF_A>
constexpr int NUMBERS_AT = Config::SLOTS_AT + (OF_A ? 0 : Config::NUMBERS_BYTES);

// Where a warp of copiers leaves the numbers of its vectors, from the place of its first one on.
template <bool ALONG_K, bool SHARED = Config::PARTS == 1 && !ALONG_K>
struct CopiedPlaces {
    static constexpr int VECTORS = Config::COPIED, AT_ONCE = Config::PARTS == 2 ? 64 : 8;
    static_assert(VECTORS % 16 == 0, "whole lines, as number_at has them");
    static GEMM_DEVICE int at(int vector, int k) { return number_at<ALONG_K>(vector, k); }
};
// Two warps have the two halves of 128 bytes among which number_at changes places of real numbers.
template <bool ALONG_K>
struct CopiedPlaces<ALONG_K, true> {
    static constexpr int VECTORS = Config::COPIED, AT_ONCE = 8, HALF = 64;
    static_assert(Config::PARTS == 2 || VECTORS * sizeof(Value) == HALF, "one of the halves each");
    int half;  // 0 or HALF
    GEMM_DEVICE int at(int vector, int k) const { return number_at<ALONG_K>(vector, k) ^ half; }
};

// Barriers of what each warp of copiers copies: vectors of both operands.
struct CopiedBarriers {
    static constexpr int TAKERS = 2 * Config::SIDE_WARPS / Config::COPIER_WARPS;  // warps of producers
    Address full, empty;

    GEMM_DEVICE Address filled(int copier) const { return full + copier * static_cast<int>(sizeof(Barrier)); }
    GEMM_DEVICE Address emptied(int copier) const { return empty + copier * static_cast<int>(sizeof(Barrier)); }
};

// Asks for the vectors of warp `copier` of a chunk of an operand.
template <bool OF_A, bool ALONG_K, int VECTOR>
GEMM_DEVICE void copy(
    const Pipeline& pipeline, ChunkPlace place, const Long& vector_stride, const Long& k_stride, int copier) {
    using Places = CopiedPlaces<ALONG_K>;
    const int first = copier * Places::VECTORS;
    place.first += first * vector_stride;
    place.vectors -= first;
    const int from = number_at<ALONG_K>(first, 0);
    if constexpr (Config::PARTS == 1 && !ALONG_K) {
        const VectorCopies<ALONG_K, VECTOR, Places> copies{thread_again() & 31, {from & Places::HALF}};
        copies.request(
            pipeline.stages + NUMBERS_AT<OF_A> + (from & ~Places::HALF), place, vector_stride, k_stride);
    } else {
        const VectorCopies<ALONG_K, VECTOR, Places> copies{thread_again() & 31};
        copies.request(pipeline.stages + NUMBERS_AT<OF_A> + from, place, vector_stride, k_stride);
    }
}

// Copies chunk after chunk, each once producers have taken the one before.
GEMM_DEVICE void copy_operands(
    const FusedParams& params, const Pipeline& pipeline, const CopiedBarriers& copied, int copier) {
    const MatrixParams &a = params.gemm.a, &b = params.gemm.b;
    Cursor cursor(params);
    unsigned parity = 1;  // the first time nothing is to be taken
    do {
        barrier_wait(copied.emptied(copier), parity);
        copy<true, GEMM_A_ALONG_K, GEMM_VECTOR_A>(
            pipeline, cursor.in_a(params), a.row_stride, a.column_stride, copier);
        copy<false, GEMM_B_ALONG_K, GEMM_VECTOR_B>(
            pipeline, cursor.in_b(params), b.column_stride, b.row_stride, copier);
        barrier_arrive_copied(copied.filled(copier));
        parity ^= 1;
    } while (cursor.next(params));
}

// Makes the planes of an operand's chunk. `warp`: among those who do; `turns`: chunks that the block had before.
template <bool OF_A, class Side>
GEMM_DEVICE void make_planes(
    const Pipeline& pipeline, const CopiedBarriers& copied, unsigned turns, int steps, int warp) {
    constexpr int PLANES_AT = OF_A ? 0 : Config::SIDE, KNOWN_AT = OF_A ? 0 : Config::VECTORS;
    constexpr int FIRST_WARP = OF_A ? 0 : Config::SIDE_WARPS;
    const int copier = warp / (Config::SIDE_WARPS / Config::COPIER_WARPS);
    const int lane = thread_again() & 31;
    const Side side(warp * 32 + lane);
    typename Side::Held held;
    Turn turn = Turn::after(turns);
    turn.parity ^= 1;  // the first time around all stages are empty
    barrier_wait(copied.filled(copier), turns % 2);
    side.take(held, pipeline.stages + NUMBERS_AT<OF_A>);
    arrive(copied.emptied(copier), lane);
    barrier_wait(pipeline.emptied(turn), turn.parity);
    unsigned char* const known = pipeline.known(turn);
    const bool promised = side.split(
        held, steps, pipeline.stage(turn) + PLANES_AT, reinterpret_cast<float*>(known + Config::SCALES_AT) + KNOWN_AT,
        reinterpret_cast<VectorWord*>(known + Config::COUNTS_AT) + KNOWN_AT);
    const int doubt = __any_sync(0xffffffffu, !promised);
    if (lane == 0) known[Config::DOUBTS_AT + FIRST_WARP + warp] = static_cast<unsigned char>(doubt);
    written_for_tensor_cores();
    arrive(pipeline.filled(turn), lane);
}

// Makes the planes of chunk after chunk, of either operand in its turn: B's take longer.
GEMM_DEVICE void produce(
    const FusedParams& params, const Pipeline& pipeline, const CopiedBarriers& copied, int producer) {
    const int warp = producer % Config::SIDE_WARPS;
    unsigned turns = 0;
    for (unsigned number = blockIdx.x;; number += gridDim.x) {
        const Part part(params, number);
#pragma unroll 1
        for (int chunk = part.first; chunk < part.end; ++chunk) {
            const int steps = Steps::count_of(params, chunk);
            if ((producer / Config::SIDE_WARPS + turns) % 2 == 0) {
                make_planes<true, OperandA>(pipeline, copied, turns, steps, warp);
            } else {
                make_planes<false, OperandB>(pipeline, copied, turns, steps, warp);
            }
            ++turns;
        }
        if (gridDim.x >= params.items - number) break;
    }
}

GEMM_DEVICE void consume(const FusedParams& params, const Pipeline& pipeline, int* last, int half, int thread) {
    const GemmParams& gemm = params.gemm;
    const HalfMultiply multiply(thread, half);
    Meeting meeting{pipeline.together};
    Turn turn;
    Item item(params, blockIdx.x);
    for (unsigned number = blockIdx.x;; item.next(params, number)) {
        Sums sums = {};
        bool served = true;
        const Part part(params, number);
#pragma unroll 1
        for (int chunk = part.first; chunk < part.end; ++chunk) {
            const int steps = Steps::count_of(params, chunk);
            barrier_wait(pipeline.filled(turn), turn.parity);
            unsigned char* const stage = pipeline.stage(turn);
            const unsigned char* const known = pipeline.known(turn);
            const auto* const counts = reinterpret_cast<const VectorWord*>(known + Config::COUNTS_AT);
            const auto doubts = *reinterpret_cast<const Vector<int, 4>*>(known + Config::DOUBTS_AT);
            constexpr bool ALL = Config::PRODUCER_WARPS == 16;  // else nobody writes the last ones
            // The same in all lanes, and by votes, so that the compiler can see it.
            bool planes = __all_sync(
                0xffffffffu, (doubts.at[0] | doubts.at[1] | (ALL ? doubts.at[2] : 0) | (ALL ? doubts.at[3] : 0)) == 0);
            if (!planes) {
                const bool serves = is_served(
                    deficits_of_chunk(counts), deficits_of_chunk(counts + Config::VECTORS), steps - SPARE);
                planes = __all_sync(0xffffffffu, serves);
            }
            if (planes) {
                multiply.from_planes(
                    sums, shared_address(stage), reinterpret_cast<const float*>(known + Config::SCALES_AT), steps);
            } else {
                served = false;
                meeting.meet(thread);  // all have read what is known
                const Cursor cursor(params, item, chunk);
                Value* const plain = reinterpret_cast<Value*>(stage);
                OperandA::copy_plain(
                    plain, cursor.in_a(params), gemm.a.row_stride, gemm.a.column_stride, thread);
                OperandB::copy_plain(
                    plain + Config::SIDE / sizeof(Value), cursor.in_b(params), gemm.b.column_stride,
                    gemm.b.row_stride, thread);
                meeting.meet(thread);
                multiply.from_numbers(sums, stage, steps);
            }
            arrive(pipeline.emptied(turn), thread);
            turn.next();
        }
        if (served) {
#pragma unroll
            for (int j = 0; j < Sums::COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sums.re[j][e] = restored<Config::PROMOTE / 16>(sums.re[j][e]);
                    if constexpr (Config::PARTS == 2) sums.im[j][e] = restored<Config::PROMOTE / 16>(sums.im[j][e]);
                }
        }
        if (params.splits == 1 || gather_splits(params, item, number, sums, served, last, meeting, thread)) {
            if (!served && thread == 0) {
                add_elements(params.counters->plain, static_cast<Long>(item.rows(gemm)) * item.columns(gemm));
            }
            store(gemm, item, sums, multiply.row, multiply.column);
        }
        if (gridDim.x >= params.items - number) break;
        number += gridDim.x;
    }
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, Config::BLOCKS) fused_gemm(FusedParams params) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(8) Barrier full[Config::STAGES], empty[Config::STAGES], together;
    __shared__ __align__(8) Barrier copied_full[Config::COPIER_WARPS], copied_empty[Config::COPIER_WARPS];
    __shared__ int last;
    static_assert(Config::THREADS == GEMM_THREADS, "the host counts the threads the same way");
    static_assert(Config::SHARED_BYTES == GEMM_SHARED_BYTES, "the host counts the bytes the same way");
    const Pipeline pipeline{
        dynamic + (0u - shared_address(dynamic)) % Config::ALIGNMENT, shared_address(full), shared_address(empty),
        shared_address(&together)};
    const CopiedBarriers copied{shared_address(copied_full), shared_address(copied_empty)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; ++i) {
            barrier_init(shared_address(&full[i]), Config::PRODUCER_WARPS);
            barrier_init(shared_address(&empty[i]), Config::CONSUMER_WARPS);
        }
        for (int i = 0; i < Config::COPIER_WARPS; ++i) {
            barrier_init(shared_address(&copied_full[i]), 32);
            barrier_init(shared_address(&copied_empty[i]), CopiedBarriers::TAKERS);
        }
        barrier_init(shared_address(&together), Config::CONSUMER_WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    const int warp = warp_number(), thread = static_cast<int>(threadIdx.x);
    if (warp < Config::CONSUMER_WARPS) {
        take_registers<Config::CONSUMER_REGISTERS>();
        consume(params, pipeline, &last, warp / 4, thread);
    } else if (warp < Config::CONSUMER_WARPS + Config::PRODUCER_WARPS) {
        give_registers<Config::PRODUCER_REGISTERS>();
        produce(params, pipeline, copied, warp - Config::CONSUMER_WARPS);
    } else {
        give_registers<Config::COPIER_REGISTERS>();
        copy_operands(params, pipeline, copied, warp - Config::CONSUMER_WARPS - Config::PRODUCER_WARPS);
    }
}
