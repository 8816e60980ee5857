// Element types: what is stored, what is accumulated, and the way between them.
#pragma once

#include "../platform.cuh"

template <class R>
struct alignas(2 * sizeof(R)) Complex {
    R re, im;
};

// N neighbouring elements, moved by one instruction (16 bytes at most).
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
    T at[N];
};

template <class T>
struct RealOf {
    using type = T;
    static constexpr bool is_complex = false;
};
template <class R>
struct RealOf<Complex<R>> {
    using type = R;
    static constexpr bool is_complex = true;
};
template <class T>
using Real = typename RealOf<T>::type;
template <class T>
constexpr bool is_complex = RealOf<T>::is_complex;

// A number that the compiler knows, as an argument.
template <int N>
struct Number {
    static constexpr int VALUE = N;
};

template <bool Condition, class Then, class Else>
struct SelectType {
    using type = Then;
};
template <class Then, class Else>
struct SelectType<false, Then, Else> {
    using type = Else;
};
template <bool Condition, class Then, class Else>
using Select = typename SelectType<Condition, Then, Else>::type;

// How many accumulator elements share one 16-byte access, given that they must divide `count`.
template <class T>
GEMM_DEVICE constexpr int piece_of(int count) {
    int piece = sizeof(T) >= 16 ? 1 : static_cast<int>(16 / sizeof(T));
    while (count % piece != 0) piece /= 2;
    return piece;
}

GEMM_DEVICE constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---- stored element -> accumulator element

GEMM_DEVICE float real_part(Half x) { return half_to_float(x); }
GEMM_DEVICE float real_part(float x) { return x; }
GEMM_DEVICE double real_part(double x) { return x; }
template <class R>
GEMM_DEVICE R real_part(Complex<R> x) {
    return x.re;
}
GEMM_DEVICE float imaginary_part(Half) { return 0.0f; }
GEMM_DEVICE float imaginary_part(float) { return 0.0f; }
GEMM_DEVICE double imaginary_part(double) { return 0.0; }
template <class R>
GEMM_DEVICE R imaginary_part(Complex<R> x) {
    return x.im;
}

template <class Acc>
GEMM_DEVICE Acc make(Real<Acc> re, Real<Acc> im) {
    if constexpr (is_complex<Acc>) {
        return Acc{re, im};
    } else {
        return re;
    }
}

template <class Acc, class Stored>
GEMM_DEVICE Acc widen(Stored x) {
    return make<Acc>(static_cast<Real<Acc>>(real_part(x)), static_cast<Real<Acc>>(imaginary_part(x)));
}

// Planar: the two parts come from two arrays.
template <class Acc, class Stored>
GEMM_DEVICE Acc widen(Stored re, Stored im) {
    return make<Acc>(static_cast<Real<Acc>>(real_part(re)), static_cast<Real<Acc>>(real_part(im)));
}

// ---- accumulator element -> stored element

template <class Stored>
struct Narrow {
    template <class Acc>
    static GEMM_DEVICE Stored from(Acc x) {
        return static_cast<Stored>(real_part(x));
    }
};
template <>
struct Narrow<Half> {
    template <class Acc>
    static GEMM_DEVICE Half from(Acc x) {
        return float_to_half(static_cast<float>(real_part(x)));
    }
};
template <class R>
struct Narrow<Complex<R>> {
    template <class Acc>
    static GEMM_DEVICE Complex<R> from(Acc x) {
        return Complex<R>{static_cast<R>(real_part(x)), static_cast<R>(imaginary_part(x))};
    }
};

// ---- arithmetic

// c += a * b. A complex product is four fused multiply-adds; the minus sign is an operand modifier and costs nothing.
template <class T>
GEMM_DEVICE void multiply_accumulate(T& c, T a, T b) {
    if constexpr (is_complex<T>) {
        c.re = multiply_add(a.re, b.re, c.re);
        c.im = multiply_add(a.re, b.im, c.im);
        c.re = multiply_add(-a.im, b.im, c.re);
        c.im = multiply_add(a.im, b.re, c.im);
    } else {
        c = multiply_add(a, b, c);
    }
}

// x * (re + i im). A real factor scales each part alone, so that an infinity does not turn into NaN by 0 * inf.
template <class T>
GEMM_DEVICE T scale(T x, Real<T> re, Real<T> im) {
    if constexpr (is_complex<T>) {
        if (im == Real<T>(0)) return T{x.re * re, x.im * re};
        return T{multiply_add(-x.im, im, x.re * re), multiply_add(x.re, im, x.im * re)};
    } else {
        return x * re;
    }
}

template <class T>
GEMM_DEVICE T add(T x, T y) {
    if constexpr (is_complex<T>) {
        return T{x.re + y.re, x.im + y.im};
    } else {
        return x + y;
    }
}

template <class T>
GEMM_DEVICE T over(T x, Real<T> divisor) {
    if constexpr (is_complex<T>) {
        return T{x.re / divisor, x.im / divisor};
    } else {
        return x / divisor;
    }
}

template <class T>
GEMM_DEVICE Real<T> magnitude(T x) {
    if constexpr (is_complex<T>) {
        return magnitude_of(x.re, x.im);
    } else {
        return magnitude_of(x);
    }
}

template <class T>
GEMM_DEVICE bool is_nan(T x) {
    return x != x;
}
