// Packing for attention: keys transposed into panels, values and queries widened to float.
#pragma once
#include "rows.h"

// A position from the caller, so far within 64 bits that sizes can be added to it: 2^53 is past any sequence's end.
static inline int64_t qc_position(int64_t n) { return qc_max(-((int64_t)1 << 53), qc_min((int64_t)1 << 53, n)); }

// panels[j / width][d][j % width] = keys[j][d] for `count` keys, zeros up to the next multiple of `width` (16 or 32).
template <class T>
static void qc_pack_keys(const T* keys, int64_t stride, int64_t count, int64_t depth, int64_t width, float* panels) {
    for (int64_t j = 0; j < count; j += QC_LANES) {
        float* const panel = panels + j / width * width * depth + j % width;
        const int64_t live = qc_min(QC_LANES, count - j);
        int64_t d = 0;
        if (live == QC_LANES)
            for (; d + QC_LANES <= depth; d += QC_LANES)
                vtranspose(keys + j * stride + d, stride, panel + d * width, width);
        for (; d < depth; d++)
            for (int64_t lane = 0; lane < QC_LANES; lane++)
                panel[d * width + lane] = lane < live ? qc_load(keys + (j + lane) * stride + d) : 0.0f;
    }
    for (int64_t j = (count + QC_LANES - 1) / QC_LANES * QC_LANES; j % width; j += QC_LANES)
        for (int64_t d = 0; d < depth; d++) vstore(panels + j / width * width * depth + j % width + d * width, vzero());
}

// Rows of `columns` floats (a multiple of 16), zeros from `live_columns` on.
template <class T>
static void qc_pack_values(const T* values, int64_t stride, int64_t count, int64_t live_columns, int64_t columns,
                           float* packed) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t c = 0; c < columns; c += QC_LANES)
            vstore(packed + j * columns + c,
                   vload_upto(values + j * stride + c, (int)qc_max(0, qc_min(QC_LANES, live_columns - c))));
}

// `rows` rows of `depth` floats, zeros from row `live` on.
template <class T>
static void qc_pack_queries(const T* queries, int64_t stride, int64_t live, int64_t rows, int64_t depth,
                            float* packed) {
    for (int64_t r = 0; r < rows; r++)
        qc_columns(depth, [&](int64_t d, int n) QC_BODY {
            vstore_upto(packed + r * depth + d, r < live ? vload_upto(queries + r * stride + d, n) : vzero(), n);
        });
}

// The total of the weights of a query that has seen no key, if its largest score is `top`: the sink's own weight, which
// is 1, or 0 without a sink.
static inline float qc_first_total(float top) { return top == -INFINITY ? 0.0f : 1.0f; }

// How `keys` keys are cut into pieces: a piece has `length` keys, whole blocks of `block`; the last one may have fewer.
// There are at most `most` pieces, of at least `least` keys each if there are several; at least one piece.
struct qc_pieces {
    int64_t length, count;
};
static inline qc_pieces qc_cut_keys(int64_t keys, int64_t least, int64_t most, int64_t block) {
    const int64_t wanted = qc_max(1, qc_min(most, keys / least));
    const int64_t length = qc_max(1, ((keys + wanted - 1) / wanted + block - 1) / block) * block;
    return {length, qc_max(1, (keys + length - 1) / length)};
}

// Adds the piece `part` to `whole`. Both hold `rows` rows of `columns` sums (a multiple of 16), then for each row the
// largest score, then for each row the total of the weights; weights and sums are relative to the largest score.
QC_COLD void qc_join_pieces(int64_t rows, int64_t columns, float* whole, const float* part) {
    float* const top = whole + rows * columns;
    float* const total = top + rows;
    for (int64_t r = 0; r < rows; r++) {
        const float before = top[r], other = part[rows * columns + r], now = fmaxf(before, other);
        const float shift = now == -INFINITY ? 0.0f : now;
        const float fade = qc_exp(before - shift), scale = qc_exp(other - shift);
        for (int64_t c = r * columns; c < (r + 1) * columns; c += QC_LANES)
            vstore(whole + c, vload(whole + c) * vset(fade) + vload(part + c) * vset(scale));
        top[r] = now;
        total[r] = total[r] * fade + part[rows * columns + rows + r] * scale;
    }
}
