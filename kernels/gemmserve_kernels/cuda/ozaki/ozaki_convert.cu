// Scaled integers of an operand as residues: for each modulus one byte of the real part, of the imaginary part and of their
// sum (Karatsuba's third factor), or one of a real operand. Lines are padded with zeros to 128 steps, planes with lines of
// zeros: the multiplying kernel fetches 128 of them at a time.
//
// A scaled element is cut into four signed digits of 15 bits (at most 2^14 each, 2^13.5 the highest), and the residue is
// a short sum of digits times powers of 2^15 modulo p: below 2^23, exact in float32, as are quotient and remainder.
#include "layout.cuh"
#include "lines.cuh"

constexpr int MODULI = GEMM_MODULI;
constexpr int PLANES = COMPLEX ? 3 : 1;
constexpr int THREADS = 256, TILE_K = 128, TILE_LINES = ALONG_K ? 8 : 16;
constexpr double ROUND = 6755399441055744.0;   // 1.5 * 2^52: adding and taking it away rounds to integers
constexpr float ROUND_SINGLE = 12582912.0f;    // 1.5 * 2^23

struct Digits {
    float at[4];
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

// The integer nearest to x * scale, in digits.
GEMM_DEVICE Digits digits_of(double x, const LineScale& scale) {
    double rest = x * scale.first * scale.second;
    Digits digits;
    constexpr double UNIT[3] = {32768.0, 1073741824.0, 35184372088832.0};  // 2^15, 2^30, 2^45
    constexpr double INVERSE[3] = {1.0 / 32768.0, 1.0 / 1073741824.0, 1.0 / 35184372088832.0};
#pragma unroll
    for (int i = 3; i > 0; --i) {
        const double digit = fma(rest, INVERSE[i - 1], ROUND) - ROUND;
        rest = fma(-digit, UNIT[i - 1], rest);
        digits.at[i] = static_cast<float>(digit);
    }
    digits.at[0] = static_cast<float>((rest + ROUND) - ROUND);
    return digits;
}

// t modulo p, nearest to 0. |t| < 2^23, so the error of t / p is below 2^-9, less than the distance of a quotient from
// the middle between two integers where p is odd.
GEMM_DEVICE float remainder_of(float t, float modulus, float inverse) {
    const float quotient = fmaf(t, inverse, ROUND_SINGLE) - ROUND_SINGLE;
    return fmaf(-quotient, modulus, t);
}

GEMM_DEVICE float residue(const Digits& x, const ConvertParams& params, int i) {
    float t = fmaf(x.at[1], params.digit[i][0], x.at[0]);
    t = fmaf(x.at[2], params.digit[i][1], t);
    t = fmaf(x.at[3], params.digit[i][2], t);
    return remainder_of(t, params.modulus[i], params.inverse[i]);
}

GEMM_DEVICE unsigned byte_of(float x) { return static_cast<unsigned>(__float_as_int(x + ROUND_SINGLE)) & 255u; }

GEMM_DEVICE unsigned pack(const float (&x)[4]) {
    return byte_of(x[0]) | byte_of(x[1]) << 8 | byte_of(x[2]) << 16 | byte_of(x[3]) << 24;
}

// What four neighbours count of their line: each its share of a whole element, rounded down; of imaginary parts above 16
// bits. What is not zero counts one at least, so that 0 says that all are zero.
GEMM_DEVICE unsigned counted(const Element (&x)[4], int code, const TallyParams& tally) {
    if ((code & 7) < 4) return 0;
    const LineScale scale = scale_of(code);
    unsigned count = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        float sum = -0.0009765625f;  // more than the roundings
        bool zero = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float size = fabsf(static_cast<float>(x[i].part[p] * scale.first * scale.second));
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

// Four neighbours along k.
GEMM_DEVICE void convert(const ConvertParams& params, const Element (&x)[4], int code, unsigned char* to, Long plane) {
    const LineScale scale = scale_of(code);
    Digits digits[PARTS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            // A line that is flagged may hold NaN.
            const double value = (code & 7) < 4 ? 0.0 : x[i].part[p];
            digits[p][i] = digits_of(p == 1 && params.conjugate ? -value : value, scale);
        }
    }
#pragma unroll
    for (int m = 0; m < MODULI; ++m) {
        float part[PARTS][4];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
#pragma unroll
            for (int i = 0; i < 4; ++i) part[p][i] = residue(digits[p][i], params, m);
            *reinterpret_cast<unsigned*>(to) = pack(part[p]);
            to += plane;
        }
        if constexpr (COMPLEX) {
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[i] = remainder_of(part[0][i] + part[PARTS - 1][i], params.modulus[m], params.inverse[m]);
            }
            *reinterpret_cast<unsigned*>(to) = pack(sum);
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
    unsigned char* residues = params.residues + matrix * (MODULI * PLANES) * plane;
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
        if (counts) {
            if (exists) add_up(counted(x, code, params.tally), sums + l);
            arrive();
        }
        convert(params, x, code, residues + residue_offset(l, first_k + 4 * lane, params.pitch), plane);
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
                Element x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = tile[t][4 * lane + i];
                visit(x, first + t, first + t < params.panel ? codes[first + t] : ZERO_LINE);
            }
        };
        if (counts) {
            each_line([&](const Element(&x)[4], Long l, int code) {
                if (l < params.panel) add_up(counted(x, code, params.tally), sums + l);
            });
            arrive();
        }
        each_line([&](const Element(&x)[4], Long l, int code) {
            convert(params, x, code, residues + residue_offset(l, first_k + 4 * lane, params.pitch), plane);
        });
    }
    if constexpr (GEMM_TALLY) {
        if (!counts) return;
        __syncthreads();
        if (last) judge(params, matrix, group);
    }
}
