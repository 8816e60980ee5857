// Scaled integers of an operand as residues: for each modulus one byte of a real element x; of a complex one a + ib those of
// a + rb and a - rb, r being the modulus's root of -1 (gemmserve_kernels.algorithms.ozaki.moduli). Lines are padded with
// zeros to 128 steps, planes with lines of zeros: the multiplying kernel fetches 128 of them at a time.
//
// A scaled element is cut into eight bytes with signs. Two dot products of them with powers of 2^8 modulo p are congruent to
// it and at most 2^17; a quotient by p in float32 is then the right one.
#include "layout.cuh"
#include "lines.cuh"

constexpr int MODULI = GEMM_MODULI;
constexpr int THREADS = 256, TILE_K = 128, TILE_LINES = ALONG_K ? 8 : 16;
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: the bits of MAGIC + i are those of MAGIC, whose lowest byte is 0, plus i

struct Digits {
    int low, high;  // four bytes with signs each
};

struct LineScale {
    double first, second;  // their product is the scale
};

GEMM_DEVICE LineScale scale_of(int code) {
    const int n = code & 7, e = code >> 3;
    if (n < 4) return {0.0, 0.0};
    const int half = e < -1000 ? -1000 : e > 1000 ? 1000 : e;
    return {power(half), power(e - half) * (0.25 * n)};
}

// Of a line that is flagged, or of zeros, nothing: it may hold NaN.
GEMM_DEVICE Element scaled(const Element& x, int code, const LineScale& scale) {
    Element found;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) found.part[p] = (code & 7) < 4 ? 0.0 : x.part[p] * scale.first * scale.second;
    return found;
}

// The nearest integer, below 2^62, in digits: adding 128 to all of them leaves bytes without signs.
GEMM_DEVICE Digits digits_of(double scaled) {
    constexpr unsigned long long HALVES = 0x8080808080808080ull;
    const Long whole = __double2ll_rn(scaled);
    const unsigned long long digits = (static_cast<unsigned long long>(whole) + HALVES) ^ HALVES;
    return {static_cast<int>(digits & 0xffffffffu), static_cast<int>(digits >> 32)};
}

GEMM_DEVICE int congruent(const Digits& x, const int (&power)[2], int more) {
    return __dp4a(x.low, power[0], __dp4a(x.high, power[1], more));
}

// t modulo p, nearest to 0, in the lowest byte. `bits`: those of the float that is t more than a multiple of p, from 2^23 on
// (gemmserve_kernels.algorithms.ozaki.params.base_of): the error of the quotient is less than its distance from the middle
// between two integers where p is odd.
GEMM_DEVICE unsigned residue(int bits, unsigned modulus, float inverse) {
    const float quotient = fmaf(__int_as_float(bits), inverse, MAGIC);
    return static_cast<unsigned>(bits) - static_cast<unsigned>(__float_as_int(quotient)) * modulus;
}

// The lowest bytes of four.
GEMM_DEVICE unsigned pack(const unsigned (&x)[4]) {
    return __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
}

// What four neighbours count of their line: each its share of a whole element, rounded down; of imaginary parts above 16
// bits. What is not zero counts one at least, so that 0 says that all are zero.
GEMM_DEVICE unsigned counted(const Element (&x)[4], const Element (&scaled)[4], int code, const TallyParams& tally) {
    if ((code & 7) < 4) return 0;
    unsigned count = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        float sum = -0.0009765625f;  // more than the roundings
        bool zero = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float size = fabsf(static_cast<float>(scaled[i].part[p]));
            sum += fminf(size * tally.step, static_cast<float>(TALLY_WHOLE));
            zero = zero && x[i].part[p] == 0.0;
        }
        const int whole = static_cast<int>(sum);
        if (!zero) count |= static_cast<unsigned>(whole < 1 ? 1 : whole) << 16 * p;
    }
    return count;
}

// Adds what a warp's lanes have counted to the sums of its line.
GEMM_DEVICE void add_up(unsigned count, unsigned long long* sums) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) count += __shfl_xor_sync(0xffffffffu, count, lane);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(sums, static_cast<unsigned long long>(count & 0xffffu) | static_cast<unsigned long long>(count >> 16) << 32);
        __threadfence();
    }
}

// The block that counted last for a group of lines finds the largest deficits among them.
GEMM_DEVICE void judge(const ConvertParams& params, Long matrix, Long group) {
    __shared__ Deficits worst;
    const TallyParams& tally = params.tally;
    const LineParams& line = params.line;
    if (threadIdx.x == 0) worst = Deficits{0, 0, 0};
    __threadfence();
    __syncthreads();
    const Long l = group * JUDGED_LINES + static_cast<Long>(threadIdx.x);
    if (threadIdx.x < JUDGED_LINES && l < line.lines) {
        const unsigned long long sum = *const_cast<volatile unsigned long long*>(tally.sums + matrix * line.lines + l);
        const unsigned all = static_cast<unsigned>(line.k) * TALLY_WHOLE;
        const unsigned part[2] = {static_cast<unsigned>(sum), static_cast<unsigned>(sum >> 32)};
        Deficits found{0, 0, 0};
        const bool first = part[0] != 0, second = PARTS == 2 && part[1] != 0;
        if (first || second) {
            const unsigned x = all - part[first ? 0 : 1], y = all - part[second ? 1 : 0];
            found.most = x > y ? x : y;
            found.both = first && (second || PARTS == 1) ? found.most : NEVER;
            found.better = x > y ? y : x;
        }
        if (line.codes[matrix * line.lines + l] == FLAGGED_LINE) found = Deficits{NEVER, NEVER, NEVER};
        if (found.both != 0) {
            atomicMax(&worst.most, found.most);
            atomicMax(&worst.both, found.both);
            atomicMax(&worst.better, found.better);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tally.deficits[matrix * tally.groups + group] = worst;
        if (2 * worst.most > tally.limit) atomicOr(tally.doubt, 1u);
    }
}

// Four neighbours along k, scaled.
GEMM_DEVICE void convert(const ConvertParams& params, const Element (&x)[4], unsigned char* to, Long plane) {
    Digits digits[PARTS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const double value = x[i].part[p];
            digits[p][i] = digits_of(p == 1 && params.conjugate ? -value : value);
        }
    }
#pragma unroll
    for (int m = 0; m < MODULI; ++m) {
        const unsigned modulus = params.modulus[m];
        const float inverse = params.inverse[m];
        unsigned sum[4], difference[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = congruent(digits[0][i], params.power[m][0], params.base[m]);
            const int second = COMPLEX ? congruent(digits[PARTS - 1][i], params.power[m][1], 0) : 0;
            sum[i] = residue(first + second, modulus, inverse);
            if constexpr (COMPLEX) difference[i] = residue(first - second, modulus, inverse);
        }
        *reinterpret_cast<unsigned*>(to) = pack(sum);
        to += plane;
        if constexpr (COMPLEX) {
            *reinterpret_cast<unsigned*>(to) = pack(difference);
            to += plane;
        }
    }
}

// Whether norms alone say that no tile of this group of lines passes: all that it may meet lacks too much. By a whole warp.
GEMM_DEVICE bool is_lost(const ConvertParams& params, Long matrix, Long group) {
    if (group * JUDGED_LINES >= params.line.lines) return false;
    const TallyParams& tally = params.tally;
    const unsigned own = tally.least[matrix * tally.groups + group].all();
    if (params.partner == nullptr) return own > tally.limit;
    const Least* partner = params.partner + matrix * params.partner_step;
    for (Long first = 0; first < params.partner_groups; first += 32) {
        const Long other = first + threadIdx.x % 32;
        const bool lost = other >= params.partner_groups || own + partner[other].all() > tally.limit;
        if (!__all_sync(0xffffffffu, lost)) return false;
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS) ozaki_convert(ConvertParams params) {
    const LineParams& line = params.line;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const Long blocks_k = params.pitch / TILE_K, blocks = params.plane / params.pitch / TILE_LINES;
    const Quotient by_k = divide(static_cast<Long>(blockIdx.x), blocks_k);
    const Quotient where = divide(by_k.quotient, blocks);
    const Long matrix = where.quotient, first = where.remainder * TILE_LINES, first_k = by_k.remainder * TILE_K;
    const Long offset = batch_offset(line.first + matrix, line.batch_shape, line.x.batch_stride);
    const Long plane = params.plane;
    unsigned char* residues = params.residues + matrix * (MODULI * PARTS) * plane;
    const int* codes = line.codes + matrix * line.lines + params.first_line;
    unsigned long long* sums = params.tally.sums + matrix * line.lines + params.first_line;
    const bool counts = GEMM_TALLY && params.tally.counts;
    const Long group = (params.first_line + first) / JUDGED_LINES;
    if constexpr (GEMM_TALLY) {
        if (is_lost(params, matrix, group)) {
            if (counts && thread == 0 && first_k == 0 && (params.first_line + first) % JUDGED_LINES == 0) {
                params.tally.deficits[matrix * params.tally.groups + group] = Deficits{NEVER, NEVER, NEVER};
                atomicOr(params.tally.doubt, 1u);
            }
            return;
        }
    }
    __shared__ bool last;
    // Lines are counted before anything is written, or the fence would wait for that.
    const auto arrive = [&] {
        __syncthreads();
        if (thread == 0) {
            const unsigned before = atomicAdd(params.tally.arrivals + matrix * params.tally.groups + group, 1u);
            last = before + 1 == static_cast<unsigned>(blocks_k) * (JUDGED_LINES / TILE_LINES);
        }
    };
    if constexpr (ALONG_K) {
        const Long l = first + warp;
        const bool exists = l < params.panel;
        const Long at = offset + (params.first_line + l) * line.x.row_stride;
        Element x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Long k = first_k + 4 * lane + i;
            x[i] = exists && k < line.k ? read(line, at + k * line.x.column_stride) : Element{};
        }
        const int code = exists ? codes[l] : ZERO_LINE;
        const LineScale scale = scale_of(code);
        Element scaled_x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) scaled_x[i] = scaled(x[i], code, scale);
        if (counts) {
            if (exists) add_up(counted(x, scaled_x, code, params.tally), sums + l);
            arrive();
        }
        convert(params, scaled_x, residues + residue_offset(l, first_k + 4 * lane, params.pitch), plane);
    } else {
        __shared__ Element tile[TILE_LINES][TILE_K + 1];
        const int in_tile = thread % TILE_LINES;
        const Long at = offset + (params.first_line + first + in_tile) * line.x.row_stride;
#pragma unroll
        for (int j = thread / TILE_LINES; j < TILE_K; j += THREADS / TILE_LINES) {
            const Long k = first_k + j;
            tile[in_tile][j] =
                k < line.k && first + in_tile < params.panel ? read(line, at + k * line.x.column_stride) : Element{};
        }
        __syncthreads();
        const auto each_line = [&](auto visit) {
#pragma unroll 1
            for (int t = warp; t < TILE_LINES; t += THREADS / 32) {
                const int code = first + t < params.panel ? codes[first + t] : ZERO_LINE;
                const LineScale scale = scale_of(code);
                Element x[4], scaled_x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) scaled_x[i] = scaled(x[i] = tile[t][4 * lane + i], code, scale);
                visit(x, scaled_x, first + t, code);
            }
        };
        if (counts) {
            each_line([&](const Element(&x)[4], const Element(&scaled_x)[4], Long l, int code) {
                if (l < params.panel) add_up(counted(x, scaled_x, code, params.tally), sums + l);
            });
            arrive();
        }
        each_line([&](const Element(&)[4], const Element(&scaled_x)[4], Long l, int) {
            convert(params, scaled_x, residues + residue_offset(l, first_k + 4 * lane, params.pitch), plane);
        });
    }
    if constexpr (GEMM_TALLY) {
        if (!counts) return;
        __syncthreads();
        if (last) judge(params, matrix, group);
    }
}
