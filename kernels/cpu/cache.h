// Rows of a cache in 8 bits (qcompiler/formats/cache_rows.py): codes, then their scale.
#pragma once
#include "rows.h"

// A code, read as the float that it is.
struct qc_code { int8_t bits; };
QC_INLINE float qc_load(const qc_code* p) { return (float)p->bits; }
QC_INLINE vf vload(const qc_code* p) { return vtofloat(vload((const int8_t*)p)); }
QC_INLINE vf vload_n(const qc_code* p, int n) {
    int8_t part[QC_LANES] = {};
    memcpy(part, p, (size_t)n);
    return vtofloat(vload((const int8_t*)part));
}

// Where a row of `cols` columns has its scale, and how many bytes it has.
constexpr int64_t qc_scale_at(int64_t cols) { return (cols + 3) / 4 * 4; }
constexpr int64_t qc_row_bytes(int64_t cols) { return (qc_scale_at(cols) + 4 + 15) / 16 * 16; }

// The scales of `count` rows of `cols` columns, zeros up to the next multiple of 16.
static inline void qc_pack_scales(const qc_code* rows, int64_t stride, int64_t count, int64_t cols, float* scales) {
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
template <class T> static void qc_quantise_cache_row(const T* x, int64_t cols, int8_t* row) {
    vi top = vset((int32_t)0);  // magnitudes as integers: a NaN is above infinity, which is above all others
    qc_columns(cols, [&](int64_t k, int n) QC_BODY {
        const vi bits = vbits(vabs(vload_upto(x + k, n)));
        top = vsel(vlt(top, bits), bits, top);
    });
    int32_t lanes[QC_LANES], most = 0;
    vstore(lanes, top);
    for (int l = 0; l < QC_LANES; l++) most = lanes[l] > most ? lanes[l] : most;
    float scale = qc_from_bits((uint32_t)most) / 127.0f;
    if (!(scale > 0.0f)) scale = 1.0f;
    memset(row + cols, 0, (size_t)(qc_row_bytes(cols) - cols));
    if (most < 0x7f800000) {
        qc_columns(cols, [&](int64_t k, int n) QC_BODY {
            const vf code = vrint(vload_upto(x + k, n) / vset(scale));
            int8_t codes[QC_LANES];
            vstore(codes, vtoint(vmax(vmin(code, vset(127.0f)), vset(-127.0f))));
            memcpy(row + k, codes, (size_t)n);
        });
    } else {
        memset(row, 0, (size_t)cols);
        scale = qc_from_bits(0x7fc00000u);
    }
    memcpy(row + qc_scale_at(cols), &scale, sizeof(float));
}
