// Scalar operations of MLIR's arith and math dialects where C++ has no operator of the same meaning: the names that
// kernels/scalar.py writes, with the meaning that kernels/cpu/scalar.h gives them.
//
// What MLIR leaves undefined is defined here: division by zero gives 0 (remainder: the dividend), INT_MIN / -1 wraps,
// a shift by the width or more gives 0 (arithmetic: the sign), a conversion from float to integer truncates and
// saturates, NaN converts to 0.
#pragma once
#include "device.cuh"

#ifndef INT32_MIN
#define INT32_MIN (-2147483647 - 1)
#endif
#ifndef INT64_MIN
#define INT64_MIN (-INT64_C(9223372036854775807) - 1)
#endif

template <class T> struct qc_unsigned_of;
template <> struct qc_unsigned_of<int8_t> { typedef uint8_t type; };
template <> struct qc_unsigned_of<uint8_t> { typedef uint8_t type; };
template <> struct qc_unsigned_of<int16_t> { typedef uint16_t type; };
template <> struct qc_unsigned_of<int32_t> { typedef uint32_t type; };
template <> struct qc_unsigned_of<int64_t> { typedef uint64_t type; };
template <class T> using qc_unsigned = typename qc_unsigned_of<T>::type;

template <class To, class From> QC_DEVICE To qc_bitcast(From x) {
    static_assert(sizeof(To) == sizeof(From), "bitcast between types of one size");
    union { From from; To to; } bits;
    bits.from = x;
    return bits.to;
}

// --- integers --------------------------------------------------------------------------------------------------------

template <class T> QC_DEVICE T qc_add(T a, T b) { return (T)((qc_unsigned<T>)a + (qc_unsigned<T>)b); }
template <class T> QC_DEVICE T qc_sub(T a, T b) { return (T)((qc_unsigned<T>)a - (qc_unsigned<T>)b); }
template <class T> QC_DEVICE T qc_mul(T a, T b) { return (T)((uint64_t)a * (uint64_t)b); }
template <class T> QC_DEVICE T qc_divsi(T a, T b) { return b == 0 ? T(0) : b == T(-1) ? qc_sub<T>(T(0), a) : T(a / b); }
template <class T> QC_DEVICE T qc_remsi(T a, T b) { return b == 0 ? a : b == T(-1) ? T(0) : T(a % b); }
// wraps; a negative exponent gives 1, -1 or 0, as integers have no more
template <class T> QC_DEVICE T qc_ipow(T a, T n) {
    if (n < 0) return a == T(1) ? T(1) : a == T(-1) ? T(n & 1 ? -1 : 1) : T(0);
    T power = 1;
    for (; n != 0; n >>= 1, a = qc_mul<T>(a, a))
        if (n & 1) power = qc_mul<T>(power, a);
    return power;
}
template <class T> QC_DEVICE T qc_floordivsi(T a, T b) {
    const T q = qc_divsi(a, b), r = qc_remsi(a, b);
    return b != 0 && r != 0 && (r < 0) != (b < 0) ? T(q - 1) : q;
}
template <class T> QC_DEVICE T qc_ceildivsi(T a, T b) {
    const T q = qc_divsi(a, b), r = qc_remsi(a, b);
    return b != 0 && r != 0 && (r < 0) == (b < 0) ? T(q + 1) : q;
}
template <class T> QC_DEVICE T qc_divui(T a, T b) { return b == 0 ? T(0) : T((qc_unsigned<T>)a / (qc_unsigned<T>)b); }
template <class T> QC_DEVICE T qc_remui(T a, T b) { return b == 0 ? a : T((qc_unsigned<T>)a % (qc_unsigned<T>)b); }
template <class T> QC_DEVICE T qc_shl(T a, T n) { return (uint64_t)n >= 8 * sizeof(T) ? T(0) : T((uint64_t)a << n); }
template <class T> QC_DEVICE T qc_shr(T a, T n) {
    return T(a >> ((uint64_t)n >= 8 * sizeof(T) ? 8 * sizeof(T) - 1 : (uint64_t)n));
}
template <class T> QC_DEVICE T qc_shru(T a, T n) {
    return (uint64_t)n >= 8 * sizeof(T) ? T(0) : T((qc_unsigned<T>)a >> n);
}

template <class T, class F> QC_DEVICE T qc_ftoi(F x) {
    const bool is_signed = T(-1) < T(0);
    const uint64_t top = 1ull << (8 * sizeof(T) - 1);  // 2^(bits - 1)
    const F limit = (F)top * (is_signed ? 1 : 2);
    if (!(x == x)) return 0;
    if (x >= limit) return (T)(is_signed ? top - 1 : top - 1 + top);
    if (x <= (is_signed ? -limit : F(0))) return (T)(is_signed ? top : 0);
    return (T)x;
}

// --- floats ----------------------------------------------------------------------------------------------------------

QC_DEVICE bool qc_negative(float x) { return qc_bitcast<uint32_t>(x) >> 31; }
QC_DEVICE bool qc_negative(double x) { return qc_bitcast<uint64_t>(x) >> 63; }

template <class F> QC_DEVICE F qc_maximum(F a, F b) {  // NaN if either is NaN, -0 < +0
    return a != a ? a : b != b ? b : a == b ? (qc_negative(a) ? b : a) : a > b ? a : b;
}
template <class F> QC_DEVICE F qc_minimum(F a, F b) {
    return a != a ? a : b != b ? b : a == b ? (qc_negative(a) ? a : b) : a < b ? a : b;
}
// maxnum/minnum: the other operand where one is NaN; equal operands give the second.
template <class F> QC_DEVICE F qc_maxnum(F a, F b) { return b != b ? a : a > b ? a : b; }
template <class F> QC_DEVICE F qc_minnum(F a, F b) { return b != b ? a : a < b ? a : b; }

QC_DEVICE float qc_round_bf16(float x) { return qc_f32_of_bf16(qc_bf16_of_f32(x)); }
QC_DEVICE float qc_round_f16(float x) { return qc_f32_of_f16(qc_f16_of_f32(x)); }

// CUDA's functions in single precision are within 2 ulp (powf: 4), see "Mathematical Functions" in the CUDA C++
// Programming Guide; none of the approximate intrinsics is used.
QC_DEVICE float qc_exp(float x) { return expf(x); }
QC_DEVICE float qc_exp2(float x) { return exp2f(x); }
QC_DEVICE float qc_expm1(float x) { return expm1f(x); }
QC_DEVICE float qc_log(float x) { return logf(x); }
QC_DEVICE float qc_log2(float x) { return log2f(x); }
QC_DEVICE float qc_log1p(float x) { return log1pf(x); }
QC_DEVICE float qc_tanh(float x) { return tanhf(x); }
QC_DEVICE float qc_erf(float x) { return erff(x); }
QC_DEVICE float qc_sin(float x) { return sinf(x); }
QC_DEVICE float qc_cos(float x) { return cosf(x); }
QC_DEVICE float qc_pow(float x, float y) { return powf(x, y); }
