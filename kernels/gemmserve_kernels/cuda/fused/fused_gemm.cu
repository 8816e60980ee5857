// D = alpha op(A) op(B) + beta C of complex64 on Hopper's tensor cores, from operands as they lie.
//
// Most of a block's warps are producers, half of them of either operand: they bring chunk after chunk of k into registers,
// split it into float16 planes in a stage of shared memory, and have the next chunk on its way meanwhile. Two warpgroups of
// consumers multiply the planes, for half of a tile's columns each: splitting takes more instructions than that.
// Every chunk of a vector has its own scale, and every chunk of a tile is judged: what planes do not serve is computed by
// multiply-adds, in its turn (gemmserve_kernels.algorithms.fused.gemm has the proof).
#include "../common/memory/lanes.cuh"
#include "../common/numbers/truncation.cuh"
#include "multiply.cuh"

using OperandA = ChunkOperand<GEMM_A_ALONG_K, GEMM_VECTOR_A, GEMM_CONJUGATE_A>;
using OperandB = ChunkOperand<GEMM_B_ALONG_K, GEMM_VECTOR_B, GEMM_CONJUGATE_B, true>;

// Makes the planes of one operand's chunks. `thread`: among those who do.
template <bool OF_A, class Side>
GEMM_DEVICE void produce(const FusedParams& params, const Pipeline& pipeline, int thread) {
    constexpr int PLANES_AT = OF_A ? 0 : Config::SIDE, KNOWN_AT = OF_A ? 0 : Config::VECTORS;
    constexpr int FIRST_WARP = OF_A ? 0 : Config::SIDE_WARPS;
    const MatrixParams& matrix = OF_A ? params.gemm.a : params.gemm.b;
    const Long &vector_stride = OF_A ? matrix.row_stride : matrix.column_stride,
               &k_stride = OF_A ? matrix.column_stride : matrix.row_stride;
    const Side side(thread);
    typename Side::Held held;
    Cursor cursor(params);
    const auto load = [&] { side.load(held, OF_A ? cursor.in_a(params) : cursor.in_b(params), vector_stride, k_stride); };
    Turn turn;
    turn.parity = 1;  // the first time around all stages are empty
    load();
    bool more = true;
#pragma unroll 1
    while (more) {
        const int count = cursor.steps.count;
        more = cursor.next(params);
        barrier_wait(pipeline.emptied(turn), turn.parity);
        unsigned char* const stage = pipeline.stage(turn);
        const bool promised = side.split(
            held, count, stage + PLANES_AT, reinterpret_cast<float*>(stage + Config::SCALES_AT) + KNOWN_AT,
            reinterpret_cast<int*>(stage + Config::COUNTS_AT) + KNOWN_AT);
        if (more) load();
        const int doubt = __any_sync(0xffffffffu, !promised);
        if (thread % 32 == 0) {
            reinterpret_cast<int*>(stage + Config::DOUBTS_AT)[FIRST_WARP + thread / 32] = doubt;
        }
        written_for_tensor_cores();
        arrive(pipeline.filled(turn), thread);
        turn.next();
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
        const int first = item.split * params.chunks_part;
        const int left = params.chunks - first, end = first + (left < params.chunks_part ? left : params.chunks_part);
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
            const int steps = Steps::count_of(params, chunk);
            barrier_wait(pipeline.filled(turn), turn.parity);
            unsigned char* const stage = pipeline.stage(turn);
            const int* const counts = reinterpret_cast<const int*>(stage + Config::COUNTS_AT);
            const auto* const doubts = reinterpret_cast<const Vector<int, 4>*>(stage + Config::DOUBTS_AT);
            int doubt = 0;
#pragma unroll
            for (int i = 0; i < Config::PRODUCER_WARPS / 4; ++i) {
                const Vector<int, 4> four = doubts[i];
                doubt |= four.at[0] | four.at[1] | four.at[2] | four.at[3];
            }
            // The same in all lanes, and by votes, so that the compiler can see it.
            bool planes = __all_sync(0xffffffffu, doubt == 0);
            if (!planes) {
                const bool serves = is_served(
                    deficits_of_chunk(counts), deficits_of_chunk(counts + Config::VECTORS), steps - SPARE);
                planes = __all_sync(0xffffffffu, serves);
            }
            if (planes) {
                multiply.from_planes(sums, stage, shared_address(stage), steps);
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
                    sums.im[j][e] = restored<Config::PROMOTE / 16>(sums.im[j][e]);
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

extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) fused_gemm(FusedParams params) {
    GEMM_DYNAMIC_SHARED(dynamic);
    __shared__ __align__(8) Barrier full[Config::STAGES], empty[Config::STAGES], together;
    __shared__ int last;
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
    const int warp = warp_number(), thread = static_cast<int>(threadIdx.x);
    if (warp < Config::CONSUMER_WARPS) {
        take_registers<Config::CONSUMER_REGISTERS>();
        consume(params, pipeline, &last, warp / 4, thread);
    } else {
        give_registers<Config::PRODUCER_REGISTERS>();
        const int producer = thread - Config::CONSUMERS;
        if (warp < Config::CONSUMER_WARPS + Config::SIDE_WARPS) {
            produce<true, OperandA>(params, pipeline, producer);
        } else {
            produce<false, OperandB>(params, pipeline, producer - Config::SIDE_WARPS * 32);
        }
    }
}
