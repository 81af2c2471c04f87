// What a compiled encoder is called with, and what all of them share.
//
// An encoder writes the bytes that `Format._encode_tile` (NumPy) writes: every operation is the same fp32 operation,
// and sums run in the same order.  Compile with -ffp-contract=off.  It returns QE_LEFT, whatever it has written by
// then, for a tile with an element that it has no answer for (NaN, infinity, a scale that overflows): NumPy takes that
// tile, and raises the error that names the element.
#pragma once
#include "vec.h"

enum { QE_DONE = 0, QE_LEFT = 1 };

struct qe_tile {
    const float* x;           // `count` elements of the flattened matrix
    int64_t start;            // the position of the first
    int64_t count;
    int64_t cols;
    uint8_t* out[4];          // where the matrix's sections begin, in the order that the encoder names
    const float* importance;  // (cols,), or null
    const float* statistics;  // what is known of the whole matrix, or null
};

constexpr int32_t QE_INFINITY = 0x7f800000;
constexpr float QE_FLT_MAX = 0x1.fffffep127f;

// --- extremes of a run -----------------------------------------------------------------------------------------------

// Integers in the order of floats: what reduces them is a vector instruction on every ISA, and NaN stands outside.
QC_INLINE int32_t qe_key(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The bits of the largest magnitude; QE_INFINITY or more where an element is not finite.
QC_INLINE int32_t qe_absmax_bits(const float* x, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t b;
        memcpy(&b, x + i, 4);
        b &= 0x7fffffff;
        largest = largest > b ? largest : b;
    }
    return largest;
}

struct qe_range { float low, high; bool finite; };
QC_INLINE qe_range qe_extremes(const float* x, int64_t n) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        int32_t b;
        memcpy(&b, x + i, 4);
        b = qe_key(b);
        low = low < b ? low : b;
        high = high > b ? high : b;
    }
    const bool finite = low > qe_key((int32_t)0xff800000) && high < QE_INFINITY;
    return {qc_from_bits((uint32_t)qe_key(low)), qc_from_bits((uint32_t)qe_key(high)), finite};
}

// --- scales in fewer bits --------------------------------------------------------------------------------------------

// A double rounded once to the type of a stored scale; what was stored, as fp32.
struct qe_f32 {
    typedef float type;
    static type round(double x) { return (float)x; }
    static float widen(type x) { return x; }
};
struct qe_f16 {
    typedef uint16_t type;
    static type round(double x) {
        float f = (float)x;
        const double back = f;
        if (back != x && f - f == 0) {  // rounded to odd first, so that the second rounding decides alone
            uint32_t u = qc_bits(f);
            if ((back > x) == (x > 0)) u--;
            f = qc_from_bits(u | 1);
        }
        return qc_to_f16_bits(f);
    }
    static float widen(type x) { const qc_f16 h = {x}; return qc_load(&h); }
};
struct qe_bf16 {  // ml_dtypes goes through fp32
    typedef uint16_t type;
    static type round(double x) { return qc_to_bf16_bits((float)x); }
    static float widen(type x) { return qc_from_bits((uint32_t)x << 16); }
};

// --- codes of less than a byte, one after another --------------------------------------------------------------------

// `n` codes (a multiple of 8), one in each byte of `from`, into n * BITS / 8 bytes, the first in the lowest bits.
template <int BITS> QC_INLINE void qe_pack(const uint8_t* from, int64_t n, uint8_t* to) {
    if (BITS == 8) {
        memcpy(to, from, n);
    } else if (BITS == 4) {
        for (int64_t i = 0; i < n / 2; i++) {
            uint16_t pair;
            memcpy(&pair, from + 2 * i, 2);
            to[i] = (uint8_t)(pair | pair >> 4);
        }
    } else if (BITS == 2) {
        for (int64_t i = 0; i < n / 4; i++) {
            uint32_t four;
            memcpy(&four, from + 4 * i, 4);
            four |= four >> 6;
            to[i] = (uint8_t)((four & 15) | (four >> 12 & 0xf0));
        }
    } else {
        static_assert(BITS == 3 || BITS == 8 || BITS == 4 || BITS == 2, "a width that some format has");
        for (int64_t i = 0; i < n / 8; i++) {
            uint32_t word = 0;
            for (int j = 0; j < 8; j++) word |= (uint32_t)from[8 * i + j] << 3 * j;
            memcpy(to + 3 * i, &word, 3);
        }
    }
}

// Two codes per byte, the first in the high bits.
QC_INLINE void qe_pack4_high(const uint8_t* from, int64_t n, uint8_t* to) {
    for (int64_t i = 0; i < n / 2; i++) {
        uint16_t pair;
        memcpy(&pair, from + 2 * i, 2);
        to[i] = (uint8_t)(pair << 4 | pair >> 8);
    }
}

// --- lanes -----------------------------------------------------------------------------------------------------------

// Floats within int32's range as integers, truncated.
QC_INLINE vi qe_truncated(vf x) { return QC_EACH(vi, q_toint(x.r[i])); }
