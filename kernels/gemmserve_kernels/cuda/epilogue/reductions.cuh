// The reductions as monoids: what a thread keeps, what a tile hands on, how two of them merge.
//
// A thread folds its own rows in the accumulate type; from the tile's partial on, sums run in double. Maxima and minima
// propagate NaN as numpy.max does, arguments return the first NaN as numpy.argmax does, and the first of equal values.
#pragma once

#include "../common/params.cuh"
#include "../common/numbers/types.cuh"

// The order of PartialParams::values and CombineParams::result, and the bits of GEMM_REDUCTIONS.
enum Kind { SUM, SUMSQ, MAX, MIN, ABSMAX, ABSMIN, ARGMAX, ARGMIN, MEAN };

constexpr Long NO_INDEX = 0x7fffffffffffffffLL;

template <class R>
GEMM_DEVICE R infinity() {
    return static_cast<R>(__builtin_bit_cast(double, 0x7ff0000000000000ULL));
}

template <bool LARGEST, class R>
GEMM_DEVICE bool beats(R x, R y) {
    return LARGEST ? x > y : x < y;
}

// The better of two, NaN where one is.
template <bool LARGEST, class R>
GEMM_DEVICE R extreme(R best, R x) {
    return beats<LARGEST>(x, best) || is_nan(x) ? x : best;
}
#if defined(GEMM_LARGER)
template <bool LARGEST>
GEMM_DEVICE float extreme(float best, float x) {
    return LARGEST ? larger(best, x) : smaller(best, x);
}
#endif

// Magnitudes of complex values are compared by their squares: one root for all of a thread's values takes the place of a
// hypot for each. Not where the best square has overflown, or underflown so far that it has lost bits, nor with NaN, which
// may be the square of an infinite value: then once more by magnitudes.
template <class R>
GEMM_DEVICE R square_of(Complex<R> x) {
    return sum_of_squares(x.re, x.im);
}
GEMM_DEVICE bool root_of(float& square) {
    const bool exact = square >= 7.8886090522101181e-31f && square < infinity<float>();  // 2^-100
    square = sqrtf(square);
    return exact;
}
GEMM_DEVICE bool root_of(double& square) {
    const bool exact = square >= 1.1830521861667747e-271 && square < infinity<double>();  // 2^-900
    square = sqrt(square);
    return exact;
}

// Sum of the values (SUM) or of their squared magnitudes (SUMSQ).
template <Kind KIND, class Value>
struct SumReduction {
    static constexpr Kind WHICH = KIND;
    static constexpr bool ADDS = true, BY_SQUARES = false;
    using Local = Select<KIND == SUM, Value, Real<Value>>;
    using Partial = Select<is_complex<Local>, Complex<double>, double>;

    static GEMM_DEVICE Local start() { return Local{}; }
    static GEMM_DEVICE void fold(Local& sum, Value x, int) {
        if constexpr (KIND == SUM) {
            sum = add(sum, x);
        } else if constexpr (is_complex<Value>) {
            sum = multiply_add(x.re, x.re, multiply_add(x.im, x.im, sum));
        } else {
            sum = multiply_add(x, x, sum);
        }
    }
    static GEMM_DEVICE Partial lift(Local sum, Long) { return widen<Partial>(sum); }
    static GEMM_DEVICE Partial identity() { return Partial{}; }
    static GEMM_DEVICE void merge(Partial& sum, Partial x) { sum = add(sum, x); }
    static GEMM_DEVICE Partial load(const PartialParams& from, Long slot) {
        return static_cast<const Partial*>(from.values[KIND])[slot];
    }
    static GEMM_DEVICE void store(const PartialParams& to, Long slot, Partial x) {
        static_cast<Partial*>(to.values[KIND])[slot] = x;
    }
    // Any order: used only where the caller asked for speed over reproducibility.
    static GEMM_DEVICE void store_atomically(const PartialParams& to, Long slot, Partial x) {
        double* const target = reinterpret_cast<double*>(static_cast<Partial*>(to.values[KIND]) + slot);
        if constexpr (is_complex<Partial>) {
            atomicAdd(target, x.re);
            atomicAdd(target + 1, x.im);
        } else {
            atomicAdd(target, x);
        }
    }
};

// Largest or smallest value (MAX, MIN) or magnitude (ABSMAX, ABSMIN).
template <Kind KIND, class Value>
struct ExtremeReduction {
    static constexpr Kind WHICH = KIND;
    static constexpr bool ADDS = false;
    static constexpr bool LARGEST = KIND == MAX || KIND == ABSMAX;
    static constexpr bool BY_MAGNITUDE = KIND == ABSMAX || KIND == ABSMIN;
    static constexpr bool BY_SQUARES = BY_MAGNITUDE && is_complex<Value>;
    using Local = Real<Value>;
    using Partial = Real<Value>;

    static GEMM_DEVICE Local identity() { return LARGEST ? -infinity<Local>() : infinity<Local>(); }
    static GEMM_DEVICE Local start() { return identity(); }
    static GEMM_DEVICE void fold(Local& best, Value x, int) {
        if constexpr (BY_MAGNITUDE) {
            merge(best, magnitude(x));
        } else {
            merge(best, real_part(x));
        }
    }
    static GEMM_DEVICE void fold_square(Local& best, Value x, int) { merge(best, square_of(x)); }
    static GEMM_DEVICE bool root(Local& best) { return root_of(best); }
    static GEMM_DEVICE Partial lift(Local best, Long) { return best; }
    static GEMM_DEVICE void merge(Partial& best, Partial x) {
        best = extreme<LARGEST>(best, x);
    }
    static GEMM_DEVICE Partial load(const PartialParams& from, Long slot) {
        return static_cast<const Partial*>(from.values[KIND])[slot];
    }
    static GEMM_DEVICE void store(const PartialParams& to, Long slot, Partial x) {
        static_cast<Partial*>(to.values[KIND])[slot] = x;
    }
};

template <class R, class Index>
struct Candidate {
    R value;
    Index index;
};

// Index of the first largest or smallest value, by magnitude where the values are complex.
template <Kind KIND, class Value>
struct ArgumentReduction {
    static constexpr Kind WHICH = KIND;
    static constexpr bool ADDS = false;
    static constexpr bool LARGEST = KIND == ARGMAX, BY_SQUARES = is_complex<Value>;
    using R = Real<Value>;
    using Local = Candidate<R, int>;
    using Partial = Candidate<R, Long>;

    static GEMM_DEVICE R worst() { return LARGEST ? -infinity<R>() : infinity<R>(); }
    static GEMM_DEVICE Local start() { return {worst(), 0x7fffffff}; }
    static GEMM_DEVICE Partial identity() { return {worst(), NO_INDEX}; }
    template <class Index>
    static GEMM_DEVICE void choose(Candidate<R, Index>& best, Candidate<R, Index> x) {
        const bool equal = x.value == best.value || (is_nan(x.value) && is_nan(best.value));
        const bool better = is_nan(x.value) ? !is_nan(best.value) : beats<LARGEST>(x.value, best.value);
        if (better || (equal && x.index < best.index)) best = x;
    }
    static GEMM_DEVICE void fold(Local& best, Value x, int row) {
        if constexpr (is_complex<Value>) {
            choose(best, Local{magnitude(x), row});
        } else {
            choose(best, Local{x, row});
        }
    }
    static GEMM_DEVICE void fold_square(Local& best, Value x, int row) { choose(best, Local{square_of(x), row}); }
    static GEMM_DEVICE bool root(Local& best) { return root_of(best.value); }
    static GEMM_DEVICE Partial lift(Local best, Long first) {
        return {best.value, best.index == 0x7fffffff ? NO_INDEX : first + best.index};
    }
    static GEMM_DEVICE void merge(Partial& best, Partial x) { choose(best, x); }
    static GEMM_DEVICE Partial load(const PartialParams& from, Long slot) {
        return {static_cast<const R*>(from.values[KIND])[slot], from.indices[KIND - ARGMAX][slot]};
    }
    static GEMM_DEVICE void store(const PartialParams& to, Long slot, Partial x) {
        static_cast<R*>(to.values[KIND])[slot] = x.value;
        to.indices[KIND - ARGMAX][slot] = x.index;
    }
};

template <Kind KIND, class Value>
using Reduction = Select<
    KIND == SUM || KIND == SUMSQ, SumReduction<KIND, Value>,
    Select<KIND == ARGMAX || KIND == ARGMIN, ArgumentReduction<KIND, Value>, ExtremeReduction<KIND, Value>>>;

// What a thread keeps of its elements: `each(fold)` calls fold(value, index) for every one, and may have to do so twice.
template <class Each, class Elements>
GEMM_DEVICE typename Each::Local fold_elements(const Elements& each) {
    typename Each::Local local = Each::start();
    if constexpr (Each::BY_SQUARES) {
        each([&](auto x, int index) { Each::fold_square(local, x, index); });
        if (Each::root(local)) return local;
        local = Each::start();
    }
    each([&](auto x, int index) { Each::fold(local, x, index); });
    return local;
}

// Calls `body` with each reduction in the set MASK as a type.
template <unsigned MASK, class Value, class Body>
GEMM_DEVICE void for_each_reduction(const Body& body) {
    if constexpr (MASK >> SUM & 1u) body(Reduction<SUM, Value>{});
    if constexpr (MASK >> SUMSQ & 1u) body(Reduction<SUMSQ, Value>{});
    if constexpr (MASK >> MAX & 1u) body(Reduction<MAX, Value>{});
    if constexpr (MASK >> MIN & 1u) body(Reduction<MIN, Value>{});
    if constexpr (MASK >> ABSMAX & 1u) body(Reduction<ABSMAX, Value>{});
    if constexpr (MASK >> ABSMIN & 1u) body(Reduction<ABSMIN, Value>{});
    if constexpr (MASK >> ARGMAX & 1u) body(Reduction<ARGMAX, Value>{});
    if constexpr (MASK >> ARGMIN & 1u) body(Reduction<ARGMIN, Value>{});
}
