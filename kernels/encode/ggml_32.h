// ggml's formats with blocks of 32, and tq2_0 (formats/ggml_32.py, ternary.py).  out: blocks.
#pragma once
#include "search.h"

// Calls `body(x, first block, blocks, records)` for sixteen blocks at a time, and writes their records.
template <class F, class BODY> QC_INLINE int32_t qe_each_group(const qe_tile& t, BODY body) {
    const int64_t first = t.start / F::BLOCK, count = t.count / F::BLOCK;
    for (int64_t b = 0; b < count; b += QC_LANES) {
        const int n = (int)(count - b < QC_LANES ? count - b : QC_LANES);
        alignas(64) qe_lanes x[F::BLOCK];
        if (!qe_side_by_side<F::BLOCK>(t.x + b * F::BLOCK, n, F::FAR, x)) return QE_LEFT;
        qe_records<F::BYTES> records;
        if (!body(x, first + b, n, records)) return QE_LEFT;
        records.write(t.out[0] + (first + b) * F::BYTES, n);
    }
    return QE_DONE;
}

// importance * sqrt(mean square of the row + w * w), and that times w.
template <class F>
QC_INLINE void qe_row_weights(const qe_tile& t, const qe_lanes* x, int64_t first, int n, qe_lanes* w, qe_lanes* wx) {
    alignas(64) float sigma2[QC_LANES] = {};
    for (int l = 0; l < n; l++) sigma2[l] = t.statistics[(first + l) / (t.cols / F::BLOCK)];
    qe_importance<F::BLOCK>(t, first, n, w);
    for (int e = 0; e < F::BLOCK; e++) {
        const vf v = vload(x[e]), of = vload(w[e]) * vsqrt(vload(sigma2) + v * v);
        vstore(w[e], of);
        vstore(wx[e], of * v);
    }
}

QC_INLINE vm qe_infinite(vf x) { return veq(vabs(x), vset(__builtin_inff())); }

// trunc(min(x * inverse + shift, largest)), 0 where the inverse is infinite.
QC_INLINE vi qe_truncated_code(vf x, vf inverse, vm dead, vf shift, vf largest) {
    return qe_truncated(vsel(dead, vset(0.0f), vmin(x * inverse + shift, largest)));
}

// q4_0, q5_0
template <class F, int BITS> static int32_t qe_symmetric32(const qe_tile& t) {
    constexpr int HALF = 1 << (BITS - 1);
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t first, int n, auto& records) QC_BODY {
        vf stored;
        if (t.importance) {
            alignas(64) qe_lanes w[32], wx[32];
            qe_row_weights<F>(t, x, first, n, w, wx);
            const qe_scale s = qe_search_scale<32>(x, w, wx, HALF);
            for (int e = 0; e < 32; e++) records.put(F::codes, e, qe_truncated(s.code(vload(x[e]))));
            return records.put_half(F::d, s.scale, stored);
        }
        const vf d = qe_signed_extreme(x, 32) / vset((float)-HALF), exact = qe_reciprocal(d);
        const vm dead = qe_infinite(exact);
        const vf inverse = vsel(dead, vset(0.0f), exact), shift = vset(HALF + 0.5f), largest = vset(2.0f * HALF - 1);
        for (int e = 0; e < 32; e++)
            records.put(F::codes, e, qe_truncated_code(vload(x[e]), inverse, dead, shift, largest));
        return records.put_half(F::d, d, stored);
    });
}

// q4_1, q5_1
template <class F, int BITS> static int32_t qe_affine32(const qe_tile& t) {
    constexpr float LARGEST = (1 << BITS) - 1;
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t first, int n, auto& records) QC_BODY {
        vf stored;
        if (t.importance) {
            alignas(64) qe_lanes w[32], wx[32];
            qe_row_weights<F>(t, x, first, n, w, wx);
            const qe_line line = qe_search_affine<32, false>(x, w, LARGEST, F::WEIGHTED_TRIALS);
            for (int e = 0; e < 32; e++) records.put(F::codes, e, qe_truncated(line.code(vload(x[e]), LARGEST)));
            return records.put_half(F::d, line.scale, stored) && records.put_half(F::m, line.minimum, stored);
        }
        vf low = vload(x[0]), high = low;
        for (int e = 1; e < 32; e++) {
            const vf v = vload(x[e]);
            low = vsel(vlt(v, low), v, low);
            high = vmax(high, v);
        }
        const vf d = (high - low + vset(0.0f)) / vset(LARGEST), exact = qe_reciprocal(d);
        const vm dead = qe_infinite(exact);
        const vf inverse = vsel(dead, vset(0.0f), exact), shift = vset(0.5f), largest = vset(LARGEST);
        for (int e = 0; e < 32; e++)
            records.put(F::codes, e, qe_truncated_code(vload(x[e]) - low, inverse, dead, shift, largest));
        return records.put_half(F::d, d, stored) && records.put_half(F::m, low, stored);
    });
}

// q8_0 (d = absmax / 127) and tq2_0 (d = absmax, codes from 0 on): halves are rounded away from zero.
template <class F, int LARGEST, int SHIFT> static int32_t qe_rounded_away(const qe_tile& t) {
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t, int, auto& records) QC_BODY {
        vf absmax = vset(0.0f), stored;
        for (int e = 0; e < F::BLOCK; e++) absmax = vmax(absmax, vabs(vload(x[e])));
        const vf d = absmax / vset((float)LARGEST), exact = qe_reciprocal(d);
        const vf inverse = vsel(qe_infinite(exact), vset(0.0f), exact);
        for (int e = 0; e < F::BLOCK; e++)
            records.put(F::codes, e, qe_truncated(vround(vload(x[e]) * inverse)) + vset(SHIFT));
        return records.put_half(F::d, d, stored);
    });
}

// mxfp4 in ggml's blocks
template <class F> static int32_t qe_mxfp4_ggml(const qe_tile& t) {
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t, int, auto& records) QC_BODY {
        constexpr float VALUES[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        alignas(64) float largest[QC_LANES], scales[QC_LANES];
        alignas(64) int32_t exponents[QC_LANES];
        vf absmax = vset(0.0f);
        for (int e = 0; e < 32; e++) absmax = vmax(absmax, vabs(vload(x[e])));
        vstore(largest, absmax);
        for (int l = 0; l < QC_LANES; l++) {
            const float power = floorf((float)log2((double)largest[l])) + 125;  // of 0 it is -inf
            const int exponent = power > 0 ? (int)power : 0;
            exponents[l] = exponent;
            scales[l] = exponent ? qc_from_bits((uint32_t)exponent << 23) : 0x1p-127f;
        }
        records.put(F::scale, 0, vload(exponents));
        const vf scale = vload(scales);
        vf middle[7];
        for (int i = 0; i < 7; i++)
            middle[i] = vsel(qe_infinite(vset(VALUES[i + 1]) * scale), vset(__builtin_inff()),
                             vset((VALUES[i] + VALUES[i + 1]) / 2) * scale);
        for (int e = 0; e < 32; e++) {
            const vf v = vload(x[e]), size = vabs(v);
            vi code = vset(0);
            for (int i = 0; i < 7; i++) code = code - vmaskbits(vlt(middle[i], size));
            const vm negative = vlt(v, vset(0.0f)) & ~veq(code, vset(0));
            records.put(F::codes, e, code + (vmaskbits(negative) & vset(8)));
        }
        return true;
    });
}
