// The same products without tensor cores, one word of four elements a thread: for tests and for comparison, not for speed.
#include "../common/raster.cuh"
#include "layout.cuh"
#include "params.cuh"

constexpr int PARTS = GEMM_PARTS, PLANES = GEMM_MODULI * PARTS, THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) ozaki_multiply_plain(const MultiplyParams params) {
    const Quotient in_tile = divide(static_cast<Long>(blockIdx.x), TILE_WORDS / THREADS);
    const int index = static_cast<int>(in_tile.remainder) * THREADS + static_cast<int>(threadIdx.x);
    const Quotient by_n = divide(in_tile.quotient, params.tiles_n), by_m = divide(by_n.quotient, params.tiles_m);
    const Quotient by_plane = divide(by_m.quotient, PLANES);
    const Long matrix = by_plane.quotient, plane = by_plane.remainder;
    clear_failing(params.judged);
    if (!all_pass(params.judged) && !passes(params.judged, matrix, by_m.remainder, by_n.remainder)) return;
    const int m = static_cast<int>(plane) / PARTS;
    const unsigned divisor = params.divisor[m], reciprocal = params.reciprocal[m];
    const Long row = by_m.remainder * TILE_M + word_row(index), column = by_n.remainder * TILE_N + word_column(index);
    const unsigned char* a = params.a + (matrix * params.a_planes + plane) * params.a_plane;
    const unsigned char* b = params.b + (matrix * params.b_planes + plane) * params.b_plane;
    unsigned bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const Long j = column + byte_column(i);
        unsigned acc = 0;
        if (row < params.rows && j < params.columns) {
            for (Long k = 0; k < params.pitch; ++k) {
                const unsigned x = a[residue_offset(params.a_first + row, k, params.pitch)];
                const unsigned y = b[residue_offset(params.b_first + j, k, params.pitch)];
                acc += x * y;
                if ((k + 1) % MOST_STEPS == 0) acc = reduce(acc, divisor, reciprocal);
            }
        }
        bytes |= (reduce(acc, divisor, reciprocal) & 255u) << 8 * i;
    }
    reinterpret_cast<unsigned*>(params.products + in_tile.quotient * TILE_BYTES)[index] = bytes;
}
