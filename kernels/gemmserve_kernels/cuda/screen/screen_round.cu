// Lines of an operand in double precision as float16, scaled by powers of two, and bounds of what that takes from them.
//
// Complex numbers lie along k as real ones, (re, im). Of the left operand (LEFT) every line is two, (re, -im) and (im, re):
// by a column they give the real and the imaginary part. Lines are padded with zeros. Where neighbours in memory are along k
// (ALONG_K) a warp has a line; else a block has 32 lines, a lane each, and turns them in shared memory.
#include "lines.cuh"

constexpr bool ALONG_K = GEMM_ALONG_K, LEFT = GEMM_LEFT;
constexpr int THREADS = 256, WARPS = THREADS / 32, LINES = ALONG_K ? WARPS : 32, CHUNK = 64;
constexpr int ROWS = LEFT ? PARTS : 1;  // for each line
constexpr int LARGEST = 450;            // binary orders of magnitude: no product of two lines overflows

GEMM_DEVICE Long size_of(double x) { return bits_of(x) & 0x7fffffffffffffffLL; }

GEMM_DEVICE Long size_of_element(Acc x) {
    const Long first = size_of(real_part(x));
    if constexpr (!COMPLEX) return first;
    const Long second = size_of(imaginary_part(x));
    return first > second ? first : second;
}

// How a line is scaled, by the largest of its numbers, as bits.
struct Scaling {
    double factor, back;
    bool known, zero;

    GEMM_DEVICE Scaling(Long largest, int wanted) {
        const int exponent = static_cast<int>(largest >> 52) - 1023;
        zero = largest == 0;
        known = zero || (exponent >= -LARGEST && exponent <= LARGEST);
        const int by = known && !zero ? wanted - exponent : 0;
        factor = double_of(static_cast<Long>(by + 1023) << 52);
        back = double_of(static_cast<Long>(1023 - by) << 52);
    }
};

struct Norms {
    float all, lost;  // sums of squares

    GEMM_DEVICE unsigned short round(double x) {
        const Half half = float_to_half(static_cast<float>(x));
        const float lost_here = static_cast<float>(x - static_cast<double>(half_to_float(half))), value = static_cast<float>(x);
        all = fmaf(value, value, all);
        lost = fmaf(lost_here, lost_here, lost);
        return half.bits;
    }
};

// An element that is rounded: a number, or two.
struct Rounded {
    unsigned short part[PARTS];

    GEMM_DEVICE void set(Acc x, const Scaling& scaling, int conjugate, Norms& norms) {
        if (!scaling.known) {
            part[0] = part[PARTS - 1] = 0;
            return;
        }
        const Acc value = conjugated(x, conjugate);
        part[0] = norms.round(real_part(value) * scaling.factor);
        if constexpr (COMPLEX) part[PARTS - 1] = norms.round(imaginary_part(value) * scaling.factor);
    }
};

// Element i of a line, or of both.
GEMM_DEVICE void put(Half* to, Long pitch, Long i, const Rounded& x) {
    if constexpr (COMPLEX) {
        unsigned* const words = reinterpret_cast<unsigned*>(to);
        const unsigned re = x.part[0], im = x.part[PARTS - 1];
        if constexpr (LEFT) {
            words[i] = re | (im ^ 0x8000u) << 16;
            words[pitch / 2 + i] = im | re << 16;
        } else {
            words[i] = re | im << 16;
        }
    } else {
        to[i].bits = x.part[0];
    }
}

GEMM_DEVICE void put_info(LineInfo& info, const Scaling& scaling, const Norms& norms) {
    // Sums of squares in single precision, and squares that vanish there.
    constexpr float MORE = 1.001f, LEAST = 9.3132257e-10f;
    info.scale = scaling.back;
    const float lost = sqrtf(norms.lost) * MORE + LEAST;
    info.residual = scaling.zero ? 0.0f : lost;
    info.norm = !scaling.known ? UNKNOWN : scaling.zero ? 0.0f : sqrtf(norms.all) * MORE + lost;
}

template <class T>
GEMM_DEVICE T largest_of_warp(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const T other = of_neighbour(x, step);
        x = other > x ? other : x;
    }
    return x;
}

GEMM_DEVICE void sum_of_warp(Norms& norms) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const Norms other = of_neighbour(norms, step);
        norms.all += other.all;
        norms.lost += other.lost;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) screen_round(RoundParams params) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const Quotient where = divide(static_cast<Long>(blockIdx.x), (params.lines + LINES - 1) / LINES);
    const Long matrix = where.quotient, first = where.remainder * LINES, k = params.k, elements = params.pitch / PARTS;
    const Long base = batch_offset(params.first + matrix, params.batch_shape, params.x.batch_stride);
    const Long step = params.x.column_stride;
    Half* const rounded = params.rounded + matrix * params.stored * ROWS * params.pitch;
    if constexpr (ALONG_K) {
        const Long line = first + warp;
        if (line >= params.lines) return;
        const Long from = base + (params.first_line + line) * params.x.row_stride;
        Long largest = 0;
#pragma unroll 8
        for (Long i = lane; i < k; i += 32) {
            const Long size = size_of_element(read(params.x, from + i * step));
            largest = size > largest ? size : largest;
        }
        const Scaling scaling(largest_of_warp(largest), params.exponent);
        Norms norms{};
        Half* const to = rounded + line * ROWS * params.pitch;
#pragma unroll 4
        for (Long i = lane; i < elements; i += 32) {
            Rounded x;
            x.set(i < k ? read(params.x, from + i * step) : Acc{}, scaling, params.conjugate, norms);
            put(to, params.pitch, i, x);
        }
        sum_of_warp(norms);
        if (lane == 0) put_info(params.info[matrix * params.lines + line], scaling, norms);
    } else {
        __shared__ Long sizes[WARPS][32];
        __shared__ Norms sums[WARPS][32];
        __shared__ Rounded turned[32][CHUNK + 2 / PARTS];
        const bool exists = first + lane < params.lines;
        const Long from = base + (params.first_line + first + lane) * params.x.row_stride;
        Long largest = 0;
        if (exists) {
#pragma unroll 8
            for (Long i = warp; i < k; i += WARPS) {
                const Long size = size_of_element(read(params.x, from + i * step));
                largest = size > largest ? size : largest;
            }
        }
        sizes[warp][lane] = largest;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; ++w) largest = sizes[w][lane] > largest ? sizes[w][lane] : largest;
        const Scaling scaling(largest, params.exponent);
        Norms norms{};
        for (Long chunk = 0; chunk < elements; chunk += CHUNK) {
#pragma unroll
            for (int i = 0; i < CHUNK; i += WARPS) {
                const Long at = chunk + i + warp;
                const Acc x = exists && at < k ? read(params.x, from + at * step) : Acc{};
                turned[lane][i + warp].set(x, scaling, params.conjugate, norms);
            }
            __syncthreads();
#pragma unroll
            for (int l = warp; l < 32; l += WARPS) {
#pragma unroll
                for (int i = lane; i < CHUNK; i += 32) {
                    if (first + l < params.lines && chunk + i < elements) {
                        put(rounded + (first + l) * ROWS * params.pitch, params.pitch, chunk + i, turned[l][i]);
                    }
                }
            }
            __syncthreads();
        }
        sums[warp][lane] = norms;
        __syncthreads();
        if (warp > 0 || !exists) return;
#pragma unroll
        for (int w = 1; w < WARPS; ++w) {
            norms.all += sums[w][lane].all;
            norms.lost += sums[w][lane].lost;
        }
        put_info(params.info[matrix * params.lines + first + lane], scaling, norms);
    }
}
