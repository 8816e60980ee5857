// D = alpha op(A) op(B) + beta C of complex64 on Hopper's tensor cores, from operands as they lie.
//
// Half of a block's warps are producers: they bring chunk after chunk of k of both operands into registers, split them
// into float16 planes in a stage of shared memory, and have the next chunk on its way meanwhile. The others are
// consumers: one warpgroup multiplies the planes to the real parts of the sums, another one to the imaginary ones. Every
// chunk of a vector has its own scale, and every chunk of a tile is judged: what planes do not serve is computed by
// multiply-adds, in its turn (gemmserve_kernels.algorithms.fused.gemm has the proof).
#include "../common/numbers/truncation.cuh"
#include "gather.cuh"
#include "multiply.cuh"

using OperandA = ChunkOperand<GEMM_A_ALONG_K, GEMM_VECTOR_A, GEMM_CONJUGATE_A>;
using OperandB = ChunkOperand<GEMM_B_ALONG_K, GEMM_VECTOR_B, GEMM_CONJUGATE_B>;

GEMM_DEVICE void produce(const FusedParams& params, const Pipeline& pipeline, int thread) {
    const GemmParams& gemm = params.gemm;
    const OperandA side_a(thread);
    const OperandB side_b(thread);
    OperandA::Held held_a;
    OperandB::Held held_b;
    Cursor cursor(params);
    Turn turn;
    turn.parity = 1;  // the first time around all stages are empty
    Steps steps(params, cursor.chunks.next);
    side_a.load(held_a, cursor.in_a(params, steps), gemm.a.row_stride, gemm.a.column_stride);
    side_b.load(held_b, cursor.in_b(params, steps), gemm.b.column_stride, gemm.b.row_stride);
    bool more = true;
#pragma unroll 1
    while (more) {
        const int count = steps.count;
        more = cursor.next(params);
        if (more) steps = Steps(params, cursor.chunks.next);
        barrier_wait(pipeline.emptied(turn), turn.parity);
        unsigned char* const stage = pipeline.stage(turn);
        float* const scales = reinterpret_cast<float*>(stage + Config::SCALES_AT);
        int* const counts = reinterpret_cast<int*>(stage + Config::COUNTS_AT);
        bool promised = side_a.split(held_a, count, stage, scales, counts);
        if (more) side_a.load(held_a, cursor.in_a(params, steps), gemm.a.row_stride, gemm.a.column_stride);
        promised &= side_b.split(
            held_b, count, stage + Config::SIDE, scales + Config::VECTORS, counts + Config::VECTORS);
        if (more) side_b.load(held_b, cursor.in_b(params, steps), gemm.b.column_stride, gemm.b.row_stride);
        const int doubt = __any_sync(0xffffffffu, !promised);
        if (thread % 32 == 0) reinterpret_cast<int*>(stage + Config::DOUBTS_AT)[thread / 32] = doubt;
        written_for_tensor_cores();
        arrive(pipeline.filled(turn), thread);
        turn.next();
    }
}
// From the real and the imaginary parts of two warpgroups' sums to whole numbers: of the first columns for the one, of
// the last for the other. `exchange`: shared memory.
GEMM_DEVICE Sums whole_numbers(const PartSums& parts, float* exchange, Meeting& meeting, int thread) {
    constexpr int HALF = Sums::COLUMNS;
    const bool imaginary = thread >= 128;
    float* const out = exchange + thread;
    const float* const in = exchange + (thread ^ 128);
#pragma unroll
    for (int j = 0; j < HALF; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            out[(4 * j + e) * Config::CONSUMERS] = imaginary ? parts.at[j][e] : parts.at[HALF + j][e];
        }
    meeting.meet(thread);
    Sums sums;
#pragma unroll
    for (int j = 0; j < HALF; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float other = in[(4 * j + e) * Config::CONSUMERS];
            sums.re[j][e] = imaginary ? other : parts.at[j][e];
            sums.im[j][e] = imaginary ? parts.at[HALF + j][e] : other;
        }
    return sums;
}

GEMM_DEVICE void consume(const FusedParams& params, const Pipeline& pipeline, int* last, int thread) {
    const GemmParams& gemm = params.gemm;
    const PartMultiply part(thread);
    Meeting meeting{pipeline.together};
    Turn turn;
    for (unsigned number = blockIdx.x;; number += gridDim.x) {
        PartSums parts = {};
        bool served = true;
        const int first = static_cast<int>(params.splits > 1 ? number % params.splits : 0) * params.chunks_part;
        const int left = params.chunks - first, end = first + (left < params.chunks_part ? left : params.chunks_part);
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
            const Steps steps(params, chunk);
            barrier_wait(pipeline.filled(turn), turn.parity);
            unsigned char* const stage = pipeline.stage(turn);
            const int* const counts = reinterpret_cast<const int*>(stage + Config::COUNTS_AT);
            const int* const doubts = reinterpret_cast<const int*>(stage + Config::DOUBTS_AT);
            int doubt = 0;
#pragma unroll
            for (int warp = 0; warp < Config::PRODUCER_WARPS; ++warp) doubt |= doubts[warp];
            if (doubt == 0 || is_served(
                                  deficits_of_chunk(counts), deficits_of_chunk(counts + Config::VECTORS),
                                  steps.count - SPARE)) {
                part.from_planes(parts, stage, shared_address(stage), steps.count);
            } else {
                served = false;
                meeting.meet(thread);  // all have read what is known
                Cursor cursor(params, number, chunk);
                Value* const plain = reinterpret_cast<Value*>(stage);
                OperandA::copy_plain(
                    plain, cursor.in_a(params, steps), gemm.a.row_stride, gemm.a.column_stride, thread);
                OperandB::copy_plain(
                    plain + Config::SIDE / sizeof(Value), cursor.in_b(params, steps), gemm.b.column_stride,
                    gemm.b.row_stride, thread);
                meeting.meet(thread);
                part.from_numbers(parts, stage, steps.count);
            }
            arrive(pipeline.emptied(turn), thread);
            turn.next();
        }
        if (served) {
#pragma unroll
            for (int j = 0; j < PartSums::COLUMNS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) parts.at[j][e] = restored<Config::PROMOTE / 16>(parts.at[j][e]);
        }
        meeting.meet(thread);  // all have read what was exchanged before
        Sums sums = whole_numbers(
            parts, reinterpret_cast<float*>(pipeline.stages + Config::EXCHANGE_AT), meeting, thread);
        const Item item(params, number);
        if (params.splits == 1 || gather_splits(params, item, sums, served, last, meeting, thread)) {
            if (!served && thread == 0) {
                add_elements(params.counters->plain, static_cast<Long>(item.rows) * item.columns);
            }
            store(gemm, item, sums, part.row, part.column + thread / 128 * (Config::BLOCK_N / 2));
        }
        if (gridDim.x >= params.items - number) break;
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
    // The same in all lanes, which the compiler cannot see: descriptors then live in uniform registers.
    const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    const int thread = static_cast<int>(threadIdx.x) % 128 + group * 128;
    if (group < Config::CONSUMERS / 128) {
        consume(params, pipeline, &last, thread);
    } else {
        produce(params, pipeline, thread - Config::CONSUMERS);
    }
}
