// The matrix instructions of AMD's compute units, for one wave of WAVE lanes (64 of CDNA, 32 of RDNA 3): D += A B, where A
// is TILE x K, B is K x TILE and D is TILE x TILE.
//
// A lane holds PER neighbours in k of row (A) or column (B) lane % TILE, from step PER (lane / TILE % GROUPS) on; of D it
// holds COUNT elements of column lane % TILE, in the rows that `row` gives (AMD Instinct MI200, MI300 and CDNA 4
// instruction set architecture reference guides, "Matrix arithmetic instructions"; RDNA 3's, section 7.9; the same by
// AMD's matrix instruction calculator). On the CPU shim the same names come from the shim.
#pragma once

#include "../common/numbers/types.cuh"

#if defined(GEMM_HIP)

template <class T, int N>
struct Lanes {
    typedef T Words __attribute__((ext_vector_type(N)));
};

#if defined(__GFX11__)

// v_wmma_f32_16x16x16_f16: every lane holds all 16 steps, lanes 16 to 31 the same as lanes 0 to 15.
struct WmmaF16 {
    using Element = Half;
    static constexpr int WAVE = 32, TILE = 16, GROUPS = 1, PER = 16, COUNT = 8;
    using Sums = Lanes<float, COUNT>::Words;
    using Words = Lanes<_Float16, PER>::Words;

    static GEMM_DEVICE int row(int i, int lane) { return 2 * i + lane / 16; }
    static GEMM_DEVICE void run(Sums& d, const Vector<Half, 16>& a, const Vector<Half, 16>& b) {
        d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(Words, a), __builtin_bit_cast(Words, b), d);
    }
};

#else

// v_mfma_f32_32x32x2_f32.
struct MfmaF32 {
    using Element = float;
    static constexpr int WAVE = 64, TILE = 32, GROUPS = 2, PER = 1, COUNT = 16;
    using Sums = Lanes<float, COUNT>::Words;

    static GEMM_DEVICE int row(int i, int lane) { return 8 * (i / 4) + 4 * (lane / 32) + i % 4; }
    static GEMM_DEVICE void run(Sums& d, const Vector<float, 1>& a, const Vector<float, 1>& b) {
        d = __builtin_amdgcn_mfma_f32_32x32x2f32(a.at[0], b.at[0], d, 0, 0, 0);
    }
};

// v_mfma_f32_32x32x8_f16.
struct MfmaF16 {
    using Element = Half;
    static constexpr int WAVE = 64, TILE = 32, GROUPS = 2, PER = 4, COUNT = 16;
    using Sums = Lanes<float, COUNT>::Words;
    using Words = Lanes<_Float16, PER>::Words;

    static GEMM_DEVICE int row(int i, int lane) { return 8 * (i / 4) + 4 * (lane / 32) + i % 4; }
    static GEMM_DEVICE void run(Sums& d, const Vector<Half, 4>& a, const Vector<Half, 4>& b) {
        d = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(Words, a), __builtin_bit_cast(Words, b), d, 0, 0, 0);
    }
};

#if defined(__gfx950__)
// v_mfma_f32_32x32x16_f16: twice the steps.
struct MfmaLongF16 {
    using Element = Half;
    static constexpr int WAVE = 64, TILE = 32, GROUPS = 2, PER = 8, COUNT = 16;
    using Sums = Lanes<float, COUNT>::Words;
    using Words = Lanes<_Float16, PER>::Words;

    static GEMM_DEVICE int row(int i, int lane) { return 8 * (i / 4) + 4 * (lane / 32) + i % 4; }
    static GEMM_DEVICE void run(Sums& d, const Vector<Half, 8>& a, const Vector<Half, 8>& b) {
        d = __builtin_amdgcn_mfma_f32_32x32x16_f16(__builtin_bit_cast(Words, a), __builtin_bit_cast(Words, b), d, 0, 0, 0);
    }
};
#endif

#if defined(__gfx942__)
// v_mfma_f32_32x32x4_xf32: looks at the upper 19 bits of a float.
struct MfmaXf32 {
    using Element = float;
    static constexpr int WAVE = 64, TILE = 32, GROUPS = 2, PER = 2, COUNT = 16;
    using Sums = Lanes<float, COUNT>::Words;
    using Words = Lanes<float, PER>::Words;

    static GEMM_DEVICE int row(int i, int lane) { return 8 * (i / 4) + 4 * (lane / 32) + i % 4; }
    static GEMM_DEVICE void run(Sums& d, const Vector<float, 2>& a, const Vector<float, 2>& b) {
        d = __builtin_amdgcn_mfma_f32_32x32x4_xf32(
            __builtin_bit_cast(Words, a), __builtin_bit_cast(Words, b), d, 0, 0, 0);
    }
};
#endif

// v_mfma_f64_16x16x4_f64.
struct MfmaF64 {
    using Element = double;
    static constexpr int WAVE = 64, TILE = 16, GROUPS = 4, PER = 1, COUNT = 4;
    using Sums = Lanes<double, COUNT>::Words;

    static GEMM_DEVICE int row(int i, int lane) { return 4 * i + lane / 16; }
    static GEMM_DEVICE void run(Sums& d, const Vector<double, 1>& a, const Vector<double, 1>& b) {
        d = __builtin_amdgcn_mfma_f64_16x16x4f64(a.at[0], b.at[0], d, 0, 0, 0);
    }
};

#endif

#else
using namespace simt::amd;
using MfmaF16 = MfmaF16Of<Half>;
using MfmaLongF16 = MfmaLongF16Of<Half>;
using WmmaF16 = WmmaF16Of<Half>;
#endif
