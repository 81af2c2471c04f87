// Rows of a cache in 8 bits (qcompiler/formats/cache_rows.py): codes, then their scale.
#pragma once
#include "rows.h"

// A code of each kind, read as the float that it is.
struct qc_code_int8 {
    int8_t bits;
    static constexpr float most = 127.0f;
    QC_INLINE vf value(vi code) { return vtofloat(code); }
    QC_INLINE vi nearest(vf x) { return vtoint(vrint(x)); }
};
// e4m3: exponents count from 7, the smallest number is 2^-9, and 0x7f is the NaN.
struct qc_code_fp8 {
    int8_t bits;
    static constexpr float most = 448.0f;
    QC_INLINE vf value(vi code) {
        const vi magnitude = code & vset(0x7f);
        vf v = vfrombits(vshl(magnitude, 20) + vset(120 << 23));
        v = vsel(vlt(magnitude, vset(8)), vtofloat(magnitude) * vset(0x1p-9f), v);
        v = vsel(veq(magnitude, vset(0x7f)), vfrombits(vset(0x7fc00000)), v);
        return vfrombits(vbits(v) | (code & vset((int32_t)0x80000000)));
    }
    // Of a number between -448 and 448.
    QC_INLINE vi nearest(vf x) {
        const vf size = vabs(x);
        const vi bits = vbits(size), even = vshr(bits, 20) & vset(1);
        const vi code = vshr(bits + vset(0x7ffff) + even, 20) - vset(120 << 3);
        const vi sign = vshr(vbits(x), 31) & vset(~0x7f);
        return vsel(vlt(size, vset(0x1p-6f)), vtoint(vrint(size * vset(0x1p9f))), code) | sign;
    }
};
template <class C> QC_INLINE vf qc_codes_of(const int8_t* p) { return C::value(vload(p)); }
QC_INLINE vf vload(const qc_code_int8* p) { return qc_codes_of<qc_code_int8>((const int8_t*)p); }
QC_INLINE vf vload(const qc_code_fp8* p) { return qc_codes_of<qc_code_fp8>((const int8_t*)p); }
template <class C> QC_INLINE vf qc_codes_of(const C* p, int n) {
    int8_t part[QC_LANES] = {};
    memcpy(part, p, (size_t)n);
    return qc_codes_of<C>(part);
}
QC_INLINE vf vload_n(const qc_code_int8* p, int n) { return qc_codes_of(p, n); }
QC_INLINE vf vload_n(const qc_code_fp8* p, int n) { return qc_codes_of(p, n); }
QC_INLINE float qc_load(const qc_code_int8* p) { return (float)p->bits; }
QC_INLINE float qc_load(const qc_code_fp8* p) { return qc_of_e4m3(p->bits); }

// Where a row of `cols` columns has its scale, and how many bytes it has.
constexpr int64_t qc_scale_at(int64_t cols) { return (cols + 3) / 4 * 4; }
constexpr int64_t qc_row_bytes(int64_t cols) { return (qc_scale_at(cols) + 4 + 15) / 16 * 16; }

// The scales of `count` rows of `cols` columns, zeros up to the next multiple of 16.
template <class C>
static inline void qc_pack_scales(const C* rows, int64_t stride, int64_t count, int64_t cols, float* scales) {
    int64_t j = 0;
    for (; j < count; j++) memcpy(scales + j, rows + j * stride + qc_scale_at(cols), sizeof(float));
    for (; j % QC_LANES; j++) scales[j] = 0.0f;
}

// Panels of keys (qc_pack_keys) times the scales of the keys.
static inline void qc_scale_keys(float* panels, const float* scales, int64_t count, int64_t depth, int64_t width) {
    for (int64_t j = 0; j < count; j += QC_LANES) {
        float* const panel = panels + j / width * width * depth + j % width;
        const vf scale = vload(scales + j);
        for (int64_t d = 0; d < depth; d++) vstore(panel + d * width, vload(panel + d * width) * scale);
    }
}

// Rows of values (qc_pack_values) times their scales.
static inline void qc_scale_values(float* values, const float* scales, int64_t count, int64_t columns) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t c = j * columns; c < (j + 1) * columns; c += QC_LANES)
            vstore(values + c, vload(values + c) * vset(scales[j]));
}

// One row of `cols` elements.
template <class C, class T> static void qc_quantise_cache_row(const T* x, int64_t cols, int8_t* row) {
    vi top = vset((int32_t)0);  // magnitudes as integers: a NaN is above infinity, which is above all others
    qc_columns(cols, [&](int64_t k, int n) QC_BODY {
        const vi bits = vbits(vabs(vload_upto(x + k, n)));
        top = vsel(vlt(top, bits), bits, top);
    });
    int32_t lanes[QC_LANES], most = 0;
    vstore(lanes, top);
    for (int l = 0; l < QC_LANES; l++) most = lanes[l] > most ? lanes[l] : most;
    float scale = qc_from_bits((uint32_t)most) / C::most;
    if (!(scale > 0.0f)) scale = 1.0f;
    memset(row + cols, 0, (size_t)(qc_row_bytes(cols) - cols));
    if (most < 0x7f800000) {
        qc_columns(cols, [&](int64_t k, int n) QC_BODY {
            const vf part = vload_upto(x + k, n) / vset(scale);
            int8_t codes[QC_LANES];
            vstore(codes, C::nearest(vmax(vmin(part, vset(C::most)), vset(-C::most))));
            memcpy(row + k, codes, (size_t)n);
        });
    } else {
        memset(row, 0, (size_t)cols);
        scale = qc_from_bits(0x7fc00000u);
    }
    memcpy(row + qc_scale_at(cols), &scale, sizeof(float));
}
