// Rows of a cache in 8 or 4 bits (qcompiler/formats/cache_rows.py): codes, then their scales.
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

// Where a row of `cols` codes of a byte has its scale, and how many bytes it has.
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

// One row of `cols` elements, with one scale.
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

// Rows of 4 bits as floats: rows of `columns` floats (a multiple of 16), unspecified from column `cols` on.
static inline void qc_unpack_int4(const int8_t* rows, int64_t stride, int64_t count, int64_t cols, int64_t columns,
                                  float* out) {
    for (int64_t j = 0; j < count; j++) {
        const int8_t* const row = rows + j * stride;
        for (int64_t c = 0; c < columns; c += QC_LANES) {
            uint32_t scales;  // of 32 columns: a step in the low half, the least number in the high one, in bf16
            memcpy(&scales, row + qc_group_scales_at(cols) + c / 32 * 4, sizeof scales);
            const vf step = vset(qc_from_bits(scales << 16)), least = vset(qc_from_bits(scales & 0xffff0000u));
            vstore(out + j * columns + c, vfma(vtofloat(vnibbles(row + c / 2)), step, least));
        }
    }
}

// The next bf16 below x, and the next above a number that is not negative; x itself if it is one.
QC_INLINE float qc_bf16_down(float x) {
    return qc_from_bits((qc_bits(x) + (x < 0.0f ? 0xffffu : 0u)) & 0xffff0000u);
}
QC_INLINE float qc_bf16_up(float x) { return qc_from_bits((qc_bits(x) + 0xffffu) & 0xffff0000u); }

// One row of `cols` elements in 4 bits.
template <class T> static void qc_quantise_int4_row(const T* x, int64_t cols, int8_t* row) {
    const vf largest = vset(1e38f);
    for (int64_t group = 0; group < (cols + 31) / 32; group++) {
        const T* const part = x + group * 32;
        const int live = (int)qc_min(32, cols - group * 32), n[2] = {live < 16 ? live : 16, live < 16 ? 0 : live - 16};
        vf value[2] = {vzero(), vzero()}, low = vset(INFINITY), high = vset(-INFINITY);
        vi top = vset((int32_t)0);  // magnitudes as integers: a NaN is above infinity, which is above all others
        for (int h = 0; h < 2; h++) {
            if (n[h] == 0) continue;
            const vf number = vload_upto(part + 16 * h, n[h]);
            const vi bits = vbits(vabs(number));
            top = vsel(vlt(top, bits), bits, top);
            value[h] = vmax(vmin(number, largest), -largest);
            low = vsel(vfirst(n[h]), vmin(value[h], low), low);
            high = vsel(vfirst(n[h]), vmax(value[h], high), high);
        }
        int32_t lanes[QC_LANES], most = 0;
        vstore(lanes, top);
        for (int l = 0; l < QC_LANES; l++) most = lanes[l] > most ? lanes[l] : most;
        float step = 0.0f, least = qc_from_bits(0x7fc00000u);
        if (most < 0x7f800000) {
            least = qc_bf16_down(-vmaxlane(-low) + 0.0f);  // -0 becomes 0
            const float exact = (vmaxlane(high) - least) / 15.0f;
            step = qc_bf16_up(exact > 0.0f ? exact : 0.0f);
        }
        uint8_t codes[32] = {};
        for (int h = 0; h < 2 && step > 0.0f; h++) {
            if (n[h] == 0) continue;
            const vf part_of = vmin((value[h] - vset(least)) / vset(step), vset(15.0f));
            int8_t found[QC_LANES];
            vstore(found, vtoint(vrint(part_of)));
            memcpy(codes + 16 * h, found, (size_t)n[h]);
        }
        for (int i = 0; i < 16; i++) row[group * 16 + i] = (int8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
        const uint32_t scales = qc_bits(step) >> 16 | (qc_bits(least) & 0xffff0000u);
        memcpy(row + qc_group_scales_at(cols) + group * 4, &scales, sizeof scales);
    }
    const int64_t used = qc_group_scales_at(cols) / 16 * 20;
    memset(row + used, 0, (size_t)((used + 15) / 16 * 16 - used));
}
