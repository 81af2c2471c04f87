// Scalar operations of MLIR's arith and math dialects where C++ has no operator of the same meaning.
//
// What MLIR leaves undefined is defined here: division by zero gives 0 (remainder: the dividend), INT_MIN / -1 wraps,
// a conversion from float to integer truncates and saturates, NaN converts to 0.
#pragma once
#include "vmath.h"
#include <limits>
#include <type_traits>

template <class T> using qc_unsigned = std::make_unsigned_t<T>;

template <class T> QC_INLINE T qc_add(T a, T b) { return (T)((qc_unsigned<T>)a + (qc_unsigned<T>)b); }
template <class T> QC_INLINE T qc_sub(T a, T b) { return (T)((qc_unsigned<T>)a - (qc_unsigned<T>)b); }
template <class T> QC_INLINE T qc_mul(T a, T b) { return (T)((uint64_t)a * (uint64_t)b); }
template <class T> QC_INLINE T qc_divsi(T a, T b) { return b == 0 ? T(0) : b == T(-1) ? qc_sub<T>(T(0), a) : T(a / b); }
template <class T> QC_INLINE T qc_remsi(T a, T b) { return b == 0 ? a : b == T(-1) ? T(0) : T(a % b); }
// wraps; a negative exponent gives 1, -1 or 0, as integers have no more
template <class T> QC_INLINE T qc_ipow(T a, T n) {
    if (n < 0) return a == T(1) ? T(1) : a == T(-1) ? T(n & 1 ? -1 : 1) : T(0);
    T power = 1;
    for (; n != 0; n >>= 1, a = qc_mul<T>(a, a))
        if (n & 1) power = qc_mul<T>(power, a);
    return power;
}
template <class T> QC_INLINE T qc_floordivsi(T a, T b) {
    const T q = qc_divsi(a, b), r = qc_remsi(a, b);
    return b != 0 && r != 0 && (r < 0) != (b < 0) ? T(q - 1) : q;
}
template <class T> QC_INLINE T qc_ceildivsi(T a, T b) {
    const T q = qc_divsi(a, b), r = qc_remsi(a, b);
    return b != 0 && r != 0 && (r < 0) == (b < 0) ? T(q + 1) : q;
}
template <class T> QC_INLINE T qc_divui(T a, T b) { return b == 0 ? T(0) : T((qc_unsigned<T>)a / (qc_unsigned<T>)b); }
template <class T> QC_INLINE T qc_remui(T a, T b) { return b == 0 ? a : T((qc_unsigned<T>)a % (qc_unsigned<T>)b); }
template <class T> QC_INLINE T qc_shl(T a, T n) { return (uint64_t)n >= 8 * sizeof(T) ? T(0) : T((uint64_t)a << n); }
template <class T> QC_INLINE T qc_shr(T a, T n) {
    return T(a >> ((uint64_t)n >= 8 * sizeof(T) ? 8 * sizeof(T) - 1 : (uint64_t)n));
}
template <class T> QC_INLINE T qc_shru(T a, T n) {
    return (uint64_t)n >= 8 * sizeof(T) ? T(0) : T((qc_unsigned<T>)a >> n);
}

template <class T, class F> QC_INLINE T qc_ftoi(F x) {
    const F limit = (F)(1ull << (8 * sizeof(T) - 1)) * (std::is_signed<T>::value ? 1 : 2);
    if (!(x == x)) return 0;
    if (x >= limit) return std::numeric_limits<T>::max();
    if (x <= (std::is_signed<T>::value ? -limit : F(0))) return std::numeric_limits<T>::min();
    return (T)x;
}

// The float that a code of 8 bits is, e4m3: exponents count from 7, the smallest number is 2^-9, and 0x7f is the NaN.
QC_INLINE float qc_of_e4m3(int8_t code) {
    const uint32_t magnitude = code & 0x7f, sign = (uint32_t)(code & 0x80) << 24;
    const float v = magnitude < 8 ? (float)magnitude * 0x1p-9f : qc_from_bits((magnitude << 20) + (120u << 23));
    return magnitude == 0x7f ? qc_from_bits(0x7fc00000u) : qc_from_bits(qc_bits(v) | sign);
}

// Rows of a cache in 4 bits (qcompiler/formats/cache_rows.py): where a row of `cols` columns has its scales, and what
// column c of it means.
constexpr int64_t qc_group_scales_at(int64_t cols) { return (cols + 31) / 32 * 16; }
QC_INLINE float qc_of_int4(const int8_t* row, int64_t cols, int64_t c) {
    uint16_t scales[2];  // the step and the least number, in bf16
    memcpy(scales, row + qc_group_scales_at(cols) + c / 32 * 4, sizeof scales);
    const int code = (uint8_t)row[c / 2] >> c % 2 * 4 & 15;
    return (float)code * qc_from_bits((uint32_t)scales[0] << 16) + qc_from_bits((uint32_t)scales[1] << 16);
}

template <class F> QC_INLINE F qc_maximum(F a, F b) {  // NaN if either is NaN, -0 < +0
    return a != a ? a : b != b ? b : a == b ? (signbit(a) ? b : a) : a > b ? a : b;
}
template <class F> QC_INLINE F qc_minimum(F a, F b) {
    return a != a ? a : b != b ? b : a == b ? (signbit(a) ? a : b) : a < b ? a : b;
}
// maxnum/minnum: the other operand where one is NaN; equal operands give the second, as the vector form does.
template <class F> QC_INLINE F qc_maxnum(F a, F b) { return b != b ? a : a > b ? a : b; }
template <class F> QC_INLINE F qc_minnum(F a, F b) { return b != b ? a : a < b ? a : b; }

template <class To, class From> QC_INLINE To qc_bitcast(From x) {
    static_assert(sizeof(To) == sizeof(From), "bitcast between types of one size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
