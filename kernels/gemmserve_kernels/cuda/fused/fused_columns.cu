// What fused_tall.cu multiplies its rows with: chunk by chunk of a tile's columns an image of what a stage has of them,
// float16 planes with their scales and what is known of them. It also sets to zero the words by which blocks of fused_tall
// tell that they have arrived.
#include "../common/dependent.cuh"
#include "items.cuh"

using Columns = ChunkOperand<GEMM_B_ALONG_K, GEMM_VECTOR_B, GEMM_CONJUGATE_B>;

GEMM_DEVICE void make_image(const FusedParams& params, unsigned number, int thread) {
    const GemmParams& gemm = params.gemm;
    const int chunk = static_cast<int>(number % params.chunks);
    const Quotient place = divide(number / params.chunks, gemm.tiles_n);
    const Steps steps(params, chunk);
    const Long column = place.remainder * Config::BLOCK_N, left = gemm.n - column;
    const Value* const from = static_cast<const Value*>(gemm.b.re) +
                              offset_of(params.first_matrix + place.quotient, gemm, gemm.b) +
                              column * gemm.b.column_stride + steps.first * gemm.b.row_stride;
    const int columns = static_cast<int>(left < Config::BLOCK_N ? left : Config::BLOCK_N);
    unsigned char* const image = image_at(params, place.quotient, place.remainder, chunk);
    unsigned char* const known = image + Config::KNOWN_AT;
    const Columns side(thread);
    Columns::Held held;
    side.load(held, {from, columns, steps.count}, gemm.b.column_stride, gemm.b.row_stride);
    const bool promised = side.split(
        held, steps.count, image, reinterpret_cast<float*>(known + Config::SCALES_AT),
        reinterpret_cast<VectorWord*>(known + Config::COUNTS_AT));
    const int doubt = __any_sync(0xffffffffu, !promised);
    if (thread % 32 == 0) known[Config::DOUBTS_AT + thread / 32] = static_cast<unsigned char>(doubt);
}

extern "C" __global__ void __launch_bounds__(GEMM_THREADS) fused_columns(FusedParams params) {
    static_assert(Config::PRODUCERS == GEMM_THREADS, "the host counts the threads the same way");
    wait_for_previous();
    let_next_start();
    const int thread = static_cast<int>(threadIdx.x);
    for (unsigned i = blockIdx.x * GEMM_THREADS + thread; i < params.arrivals_count; i += gridDim.x * GEMM_THREADS) {
        params.arrivals[i] = 0;
    }
    for (unsigned number = blockIdx.x; number < params.images; number += gridDim.x) make_image(params, number, thread);
}
