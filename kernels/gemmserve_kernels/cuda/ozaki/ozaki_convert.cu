// Scaled integers of an operand as residues: for each modulus one byte of a real element x; of a complex one a + ib those of
// a + rb and a - rb, r being the modulus's root of -1 (gemmserve_kernels.algorithms.ozaki.moduli). Lines are padded with
// zeros to 128 steps, planes with lines of zeros: the multiplying kernel fetches 128 of them at a time. Outliers are zeros.
//
// Elements are scaled without a rounding and rounded once, to integers, which are cut into eight bytes with signs, or four
// (SHORT). Dot products of four of them with powers of 2^8 modulo p are congruent to an integer and together at most 2^17; a
// quotient by p in float32 is then the right one.
#include "layout.cuh"
#include "outliers.cuh"

constexpr bool OUTLIERS = GEMM_OUTLIERS;
constexpr bool SHORT = GEMM_SHORT;  // integers have four bytes
constexpr int MODULI = GEMM_MODULI;
constexpr int THREADS = 256, TILE_K = 128, TILE_LINES = ALONG_K ? 8 : 16;
// Blocks of a multiprocessor at once: they wait for memory, and for what others have counted. On sm_120 six would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = 5;
#else
constexpr int BLOCKS = ALONG_K ? 6 : 5;
#endif
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers

struct Digits {
    int low, high;  // four bytes with signs each; `high` of no use where they are SHORT
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

// An element times the first factor of its line's scale, a power of two: exactly, but for what is far below a unit. Zero in a
// line that is flagged, which may hold NaN, or of zeros.
GEMM_DEVICE double lifted(double x, int code, const LineScale& scale) { return (code & 7) < 4 ? 0.0 : x * scale.first; }

// The integer nearest to x times `factor`, below 2^63, in digits: adding 128 to all of them leaves bytes without signs. The
// product has up to 56 bits, which a double has not: what is above 2^11 is split off, of the rest the product is made once
// more. Off by 1/2 + 2^-43 at most. Of single precision the product is exact.
GEMM_DEVICE Digits digits_of(double x, double factor) {
    constexpr unsigned long long HALVES = 0x8080808080808080ull;
    if constexpr (SHORT) {
        constexpr unsigned LOW = static_cast<unsigned>(HALVES);
        return {static_cast<int>((static_cast<unsigned>(__double2int_rn(x * factor)) + LOW) ^ LOW), 0};
    } else {
        unsigned long long digits;
        if constexpr (sizeof(Real<Stored>) == sizeof(double)) {
            // Doubles from 2^64 to 2^65 are multiples of 2^12, those from 2^52 to 2^53 of 1: their bits are integers, but for
            // constants, which are 2^63 of what `top` is shifted to and 0x4338 at the top of `bottom`.
            constexpr double TOP = 27670116110564327424.0, BOTTOM = 6755399441055744.0;  // 1.5 * 2^64, 1.5 * 2^52
            const double top = fma(x, factor, TOP);
            const double bottom = fma(x, factor, TOP - top) + BOTTOM;
            digits = (static_cast<unsigned long long>(bits_of(top)) << 12) +
                     static_cast<unsigned long long>(bits_of(bottom)) +
                     (HALVES - 0x8000000000000000ull - 0x4338000000000000ull);
        } else {
            digits = static_cast<unsigned long long>(__double2ll_rn(x * factor)) + HALVES;
        }
        digits ^= HALVES;
        return {static_cast<int>(digits & 0xffffffffu), static_cast<int>(digits >> 32)};
    }
}

GEMM_DEVICE int congruent(const Digits& x, const int (&power)[2], int more) {
    return __dp4a(x.low, power[0], SHORT ? more : __dp4a(x.high, power[1], more));
}

// The constants of a modulus p. `base`: a multiple of 256 from 2^23 on, and (p - 1) / 2 less than one of p, so that quotients
// rounded to nearest are those rounded down; `zero`: that one over p, and MAGIC.
struct Modulus {
    float modulus, inverse, zero;
};

// t modulo p, from 0 on, in the lowest byte. `bits`: those of the float `base` + t, no less than 2^23. The error of the
// quotient is less than its distance from the middle between two integers where p is odd
// (gemmserve_kernels.algorithms.ozaki.params.base_of). All in single precision, of which there is twice as much as of
// integer arithmetic.
GEMM_DEVICE unsigned residue(int bits, const Modulus& p) {
    const float biased = __int_as_float(bits), quotient = fmaf(biased, p.inverse, MAGIC) - p.zero;
    return static_cast<unsigned>(__float_as_int(fmaf(-quotient, p.modulus, biased)));
}

// The lowest bytes of four.
GEMM_DEVICE unsigned pack(const unsigned (&x)[4]) {
    return __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
}

// What neighbours of a line count, of either real part.
struct Count {
    float sum[PARTS];
    unsigned there;  // a bit of each that is not zero

    GEMM_DEVICE void clear() {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) sum[p] = -0.0009765625f;  // more than the roundings
        there = 0;
    }
    GEMM_DEVICE void add(int p, double x, double scaled, float step) {
        sum[p] += fminf(fabsf(static_cast<float>(scaled)) * step, static_cast<float>(TALLY_WHOLE));
        if (x != 0.0) there |= 1u << p;
    }
    // Each its share of a whole element, rounded down; of imaginary parts above 16 bits. What is not zero counts one at
    // least, so that 0 says that all are zero.
    GEMM_DEVICE unsigned all(int code) const {
        if ((code & 7) < 4) return 0;
        unsigned count = 0;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const int whole = static_cast<int>(sum[p]);
            if (there >> p & 1u) count |= static_cast<unsigned>(whole < 1 ? 1 : whole) << 16 * p;
        }
        return count;
    }
};

// Adds what a warp's lanes have counted to the sums of its line.
GEMM_DEVICE void add_up(unsigned count, unsigned long long* sums) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) count += __shfl_xor_sync(0xffffffffu, count, lane);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(sums, static_cast<unsigned long long>(count & 0xffffu) | static_cast<unsigned long long>(count >> 16) << 32);
        __threadfence();
    }
}

// The upper half of a number's size.
GEMM_DEVICE unsigned upper_half(double x) { return static_cast<unsigned>(bits_of(x) >> 32) & 0x7fffffffu; }

// The upper half of what elements of a line are multiplied apart above: its lower half has all bits.
GEMM_DEVICE unsigned limit_of(const ConvertParams& params, Long matrix, Long l) {
    return upper_half(OUTLIERS ? params.tally.outliers[matrix * params.line.lines + params.first_line + l].above : NO_LIMIT);
}

// Elements that are multiplied apart are zeros here.
GEMM_DEVICE void leave_out(unsigned above, Element& x) {
    if constexpr (OUTLIERS) {
        bool apart = false;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) apart |= upper_half(x.part[p]) > above;
        if (apart) x = Element{};
    }
}

// The block that counted last for a group of lines finds the largest deficits among them.
GEMM_DEVICE void judge(const ConvertParams& params, Long matrix, Long group) {
    __shared__ LineDeficits worst;
    const TallyParams& tally = params.tally;
    const LineParams& line = params.line;
    if (threadIdx.x == 0) worst = LineDeficits{0, 0, 0};
    __threadfence();
    __syncthreads();
    const Long l = group * JUDGED_LINES + static_cast<Long>(threadIdx.x);
    if (threadIdx.x < JUDGED_LINES && l < line.lines) {
        const unsigned long long sum = *const_cast<volatile unsigned long long*>(tally.sums + matrix * line.lines + l);
        const unsigned all = static_cast<unsigned>(line.k) * TALLY_WHOLE;
        const unsigned part[2] = {static_cast<unsigned>(sum), static_cast<unsigned>(sum >> 32)};
        LineDeficits found{0, 0, 0};
        const bool first = part[0] != 0, second = PARTS == 2 && part[1] != 0;
        if (first || second) {
            const unsigned x = all - part[first ? 0 : 1], y = all - part[second ? 1 : 0];
            found.most = x > y ? x : y;
            found.both = first && (second || PARTS == 1) ? found.most : NEVER_PASSES;
            found.better = x > y ? y : x;
        }
        if (line.codes[matrix * line.lines + l] == FLAGGED_LINE) found = LineDeficits{NEVER_PASSES, NEVER_PASSES, NEVER_PASSES};
        if (OUTLIERS && tally.outliers[matrix * line.lines + l].count > 0) atomicOr(tally.doubt, APART);
        if (found.both != 0) {
            atomicMax(&worst.most, found.most);
            atomicMax(&worst.both, found.both);
            atomicMax(&worst.better, found.better);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tally.deficits[matrix * tally.groups + group] = worst;
        if (2 * worst.most > tally.limit) atomicOr(tally.doubt, DOUBTED);
    }
}

// The residues of four neighbours along k.
GEMM_DEVICE void convert(const ConvertParams& params, const Digits (&digits)[PARTS][4], unsigned char* to, Long plane) {
#pragma unroll
    for (int m = 0; m < MODULI; ++m) {
        const Modulus p{params.modulus[m], params.inverse[m], params.zero[m]};
        unsigned sum[4], difference[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = congruent(digits[0][i], params.power[m][0], params.base[m]);
            const int second = COMPLEX ? congruent(digits[PARTS - 1][i], params.power[m][1], 0) : 0;
            sum[i] = residue(first + second, p);
            if constexpr (COMPLEX) difference[i] = residue(first - second, p);
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) ozaki_convert(ConvertParams params) {
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
    const bool counts = params.tally.counts;
    const Long group = (params.first_line + first) / JUDGED_LINES;
    if (is_lost(params, matrix, group)) {
        if (counts && thread == 0 && first_k == 0 && (params.first_line + first) % JUDGED_LINES == 0) {
            params.tally.deficits[matrix * params.tally.groups + group] = LineDeficits{NEVER_PASSES, NEVER_PASSES, NEVER_PASSES};
            atomicOr(params.tally.doubt, DOUBTED);
        }
        return;
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
        if (OUTLIERS && exists) {
            const unsigned above = limit_of(params, matrix, l);
#pragma unroll
            for (int i = 0; i < 4; ++i) leave_out(above, x[i]);
        }
        const int code = exists ? codes[l] : ZERO_LINE;
        const LineScale scale = scale_of(code);
        Digits digits[PARTS][4];
        Count count;
        count.clear();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const double value = lifted(x[i].part[p], code, scale);
                count.add(p, x[i].part[p], value * scale.second, params.tally.step);
                digits[p][i] = digits_of(p == 1 && params.conjugate ? -value : value, scale.second);
            }
        }
        if (counts) {
            if (exists) add_up(count.all(code), sums + l);
            arrive();
        }
        convert(params, digits, residues + residue_offset(l, first_k + 4 * lane, params.pitch), plane);
    } else {
        __shared__ Element tile[TILE_LINES][TILE_K + 1];
        const int in_tile = thread % TILE_LINES;
        const Long at = offset + (params.first_line + first + in_tile) * line.x.row_stride;
        const bool exists = first + in_tile < params.panel;
        const unsigned above = exists ? limit_of(params, matrix, first + in_tile) : 0;
#pragma unroll
        for (int j = thread / TILE_LINES; j < TILE_K; j += THREADS / TILE_LINES) {
            const Long k = first_k + j;
            Element x = exists && k < line.k ? read(line, at + k * line.x.column_stride) : Element{};
            leave_out(above, x);
            tile[in_tile][j] = x;
        }
        __syncthreads();
        const auto code_of = [&](int t) { return first + t < params.panel ? codes[first + t] : ZERO_LINE; };
        if (counts) {
#pragma unroll 1
            for (int t = warp; t < TILE_LINES; t += THREADS / 32) {
                if (first + t >= params.panel) continue;
                const int code = code_of(t);
                const LineScale scale = scale_of(code);
                Count count;
                count.clear();
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) {
                        const double x = tile[t][4 * lane + i].part[p];
                        count.add(p, x, lifted(x, code, scale) * scale.second, params.tally.step);
                    }
                }
                add_up(count.all(code), sums + first + t);
            }
            arrive();
        }
#pragma unroll 1
        for (int t = warp; t < TILE_LINES; t += THREADS / 32) {
            const int code = code_of(t);
            const LineScale scale = scale_of(code);
            Digits digits[PARTS][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    const double value = lifted(tile[t][4 * lane + i].part[p], code, scale);
                    digits[p][i] = digits_of(p == 1 && params.conjugate ? -value : value, scale.second);
                }
            }
            convert(params, digits, residues + residue_offset(first + t, first_k + 4 * lane, params.pitch), plane);
        }
    }
    if (!counts) return;
    __syncthreads();
    if (last) judge(params, matrix, group);
}
