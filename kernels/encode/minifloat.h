// Formats of small floats: fp8, mxfp4, mxfp8, nvfp4 (formats/minifloat.py, fp8.py, mx.py, nvfp4.py).
#pragma once
#include "tile.h"

// A small float of one sign bit, EXPONENT and MANTISSA bits; `largest` is where it saturates.
template <int EXPONENT, int MANTISSA> struct qe_mini {
    static constexpr int BITS = 1 + EXPONENT + MANTISSA, BIAS = (1 << (EXPONENT - 1)) - 1;

    // The nearest code, halves to even, of finite values.
    QC_INLINE vi code(vf x, float largest) {
        const vi sign = vshl(vshru(vbits(x), 31), BITS - 1);
        const vf size = vmin(vabs(x), vset(largest));
        const vi u = vbits(size), odd = vshru(u, 23 - MANTISSA) & vset(1);
        const vi rounded = vshru(u + odd + vset((1 << (22 - MANTISSA)) - 1), 23 - MANTISSA);
        const vi normal = rounded - vset((127 - BIAS) << MANTISSA);
        // Below the smallest normal value steps are even, and rounding up to it gives its code.
        const vi small = qe_truncated(vrint(size * vset(qc_from_bits((uint32_t)(126 + BIAS + MANTISSA) << 23))));
        return sign | vsel(vlt(u, vset((128 - BIAS) << 23)), small, normal);
    }
    // The value of a code without sign.
    static float value(int code) {
        const int e = code >> MANTISSA, m = code & ((1 << MANTISSA) - 1);
        return e ? qc_from_bits((uint32_t)(e - BIAS + 127) << 23 | (uint32_t)m << (23 - MANTISSA))
                 : (float)m * qc_from_bits((uint32_t)(128 - BIAS - MANTISSA) << 23);
    }
    static int code_of(float x, float largest) {
        int32_t found[QC_LANES];
        vstore(found, code(vset(x), largest));
        return found[0];
    }
};

// Codes of `n` elements, each times or over `scale`. Codes of four bits go two into a byte: `n` is even then.
template <class MINI, bool DIVIDE>
QC_INLINE void qe_cast(const float* x, int64_t n, float scale, float largest, float plus, uint8_t* out) {
    constexpr int PIECE = 512;
    alignas(64) uint8_t codes[PIECE];
    const vf s = vset(scale), p = vset(plus);
    for (int64_t i = 0; i < n; i += PIECE) {
        const int64_t m = n - i < PIECE ? n - i : PIECE;
        for (int64_t j = 0; j < m; j += 16) {
            const vf w = vload_upto(x + i + j, (int)(m - j < 16 ? m - j : 16));
            vstore(codes + j, MINI::code((DIVIDE ? w / s : w * s) + p, largest));
        }
        qe_pack<MINI::BITS>(codes, m, out + i * MINI::BITS / 8);
    }
}
constexpr float QE_MINUS_ZERO = -0.0f;  // adding it changes nothing; adding +0 makes -0 positive

// --- fp8: out: codes, scales -----------------------------------------------------------------------------------------

static float qe_fp8_scale(int32_t absmax, float largest, float largest_scale) {
    const float exact = qc_from_bits((uint32_t)absmax) / largest;
    const float scale = exact < largest_scale ? exact : largest_scale;
    return scale == 0 ? 1 : scale;
}

template <class MINI> static int32_t qe_fp8_tensor(const qe_tile& t, float largest) {
    qe_cast<MINI, true>(t.x, t.count, *(const float*)t.out[1], largest, QE_MINUS_ZERO, t.out[0] + t.start);
    return QE_DONE;
}

template <class MINI> static int32_t qe_fp8_row(const qe_tile& t, float largest, float largest_scale) {
    for (int64_t i = 0; i < t.count; i += t.cols) {
        const int32_t absmax = qe_absmax_bits(t.x + i, t.cols);
        if (absmax >= QE_INFINITY) return QE_LEFT;
        const float scale = qe_fp8_scale(absmax, largest, largest_scale);
        ((float*)t.out[1])[(t.start + i) / t.cols] = scale;
        qe_cast<MINI, true>(t.x + i, t.cols, scale, largest, QE_MINUS_ZERO, t.out[0] + t.start + i);
    }
    return QE_DONE;
}

template <class MINI> static int32_t qe_fp8_block(const qe_tile& t, float largest, float largest_scale) {
    constexpr int64_t SQUARE = 128;
    const int64_t rows = t.count / t.cols, across = (t.cols + SQUARE - 1) / SQUARE;
    for (int64_t r = 0; r < rows; r += SQUARE)
        for (int64_t c = 0; c < t.cols; c += SQUARE) {
            const int64_t n = t.cols - c < SQUARE ? t.cols - c : SQUARE, end = rows < r + SQUARE ? rows : r + SQUARE;
            int32_t absmax = 0;
            for (int64_t i = r; i < end; i++) {
                const int32_t of_row = qe_absmax_bits(t.x + i * t.cols + c, n);
                absmax = absmax > of_row ? absmax : of_row;
            }
            if (absmax >= QE_INFINITY) return QE_LEFT;
            const float scale = qe_fp8_scale(absmax, largest, largest_scale);
            ((float*)t.out[1])[(t.start / t.cols + r) / SQUARE * across + c / SQUARE] = scale;
            for (int64_t i = r; i < end; i++) {
                const int64_t at = i * t.cols + c;
                qe_cast<MINI, true>(t.x + at, n, scale, largest, QE_MINUS_ZERO, t.out[0] + t.start + at);
            }
        }
    return QE_DONE;
}

// --- MX: out: codes, scales (E8M0) -----------------------------------------------------------------------------------

enum { QE_FLOOR, QE_CEIL, QE_EVEN, QE_RCEIL };

// floor or ceil of log2 of a positive number, exactly; -127 or less is -127 (0 too).
QC_INLINE int qe_log2(int32_t bits, bool up) {
    const int power = (bits >> 23) - 127;
    return power + (up && (power == -127 ? bits > 1 << 22 : (bits & 0x7fffff) != 0));
}

// `exponent` is that of `largest`.
template <class MINI, int MANTISSA, int RULE> static int32_t qe_mx(const qe_tile& t, float largest, int exponent) {
    constexpr int BLOCK = 32;
    for (int64_t i = 0; i < t.count; i += BLOCK) {
        const int32_t absmax = qe_absmax_bits(t.x + i, BLOCK);
        if (absmax >= QE_INFINITY) return QE_LEFT;
        int power = RULE == QE_RCEIL  ? qe_log2((int32_t)qc_bits(qc_from_bits((uint32_t)absmax) / largest), true)
                    : RULE == QE_EVEN ? ((absmax + (1 << (22 - MANTISSA))) >> 23) - 127 - exponent
                                      : qe_log2(absmax, RULE == QE_CEIL) - exponent;
        power = power < -127 ? -127 : power > 127 - exponent ? 127 - exponent : power;
        const int64_t at = t.start + i;
        t.out[1][at / BLOCK] = (uint8_t)(power + 127);
        const float inverse = qc_from_bits((uint32_t)(127 - power) << 23);  // dividing by a power of two is as exact
        qe_cast<MINI, false>(t.x + i, BLOCK, inverse, largest, QE_MINUS_ZERO, t.out[0] + at * MINI::BITS / 8);
    }
    return QE_DONE;
}

// --- nvfp4: out: codes, scales (E4M3), global_scale ------------------------------------------------------------------

template <bool DIVISOR> static int32_t qe_nvfp4(const qe_tile& t, float smallest_scale, int zero_scale) {
    typedef qe_mini<4, 3> e4m3;
    constexpr int BLOCK = 16;
    const float of_all = *(const float*)t.out[2];
    for (int64_t i = 0; i < t.count; i += BLOCK) {
        const float local = qc_from_bits((uint32_t)qe_absmax_bits(t.x + i, BLOCK)) / 6.0f;
        const int64_t at = t.start + i;
        if (DIVISOR) {
            int code = e4m3::code_of(local * of_all, 448);
            if (code == 0) code = zero_scale;
            t.out[1][at / BLOCK] = (uint8_t)code;
            qe_cast<qe_mini<2, 1>, true>(t.x + i, BLOCK, e4m3::value(code) / of_all, 6, 0.0f, t.out[0] + at / 2);
        } else {
            const float exact = local / of_all;
            const int code = e4m3::code_of(exact > smallest_scale ? exact : smallest_scale, 448);
            t.out[1][at / BLOCK] = (uint8_t)code;
            const float times = 1.0f / of_all / e4m3::value(code);
            qe_cast<qe_mini<2, 1>, false>(t.x + i, BLOCK, times, 6, QE_MINUS_ZERO, t.out[0] + at / 2);
        }
    }
    return QE_DONE;
}
