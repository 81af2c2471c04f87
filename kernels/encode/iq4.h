// iq4_nl and iq4_xs: sixteen unevenly spaced values (formats/iq4.py).  out: blocks.
#pragma once
#include "k_quants.h"
#include "table.h"

constexpr int QE_IQ4_TRIALS = 7;

// The codes of the values nearest to x * inverse; halves, and NaN, go to the upper one.
QC_INLINE vi qe_iq4_code(vf x, vf inverse, const qe_table& table) {
    const vf scaled = x * inverse;
    return qe_rank<false>(scaled + scaled, table.threshold);
}

struct qe_iq4_fit { vf scale, explained, sum_qx, sum_q2; };
QC_INLINE qe_iq4_fit qe_iq4_try(const qe_lanes* x, const qe_lanes* w, vf inverse, const qe_table& table) {
    vf sum_qx = qe_no_sum(), sum_q2 = qe_no_sum();
    for (int e = 0; e < 32; e++) {
        const vf v = vload(x[e]), q = qe_entry(qe_iq4_code(v, inverse, table), table.value), weighted = vload(w[e]) * q;
        sum_qx = sum_qx + weighted * v;
        sum_q2 = sum_q2 + weighted * q;
    }
    const vf scale = vsel(vlt(vset(0.0f), sum_q2), qe_ratio(sum_qx, sum_q2), vset(0.0f));
    return {scale, scale * sum_qx, sum_qx, sum_q2};
}

static vf qe_iq4_scale(const qe_lanes* x, const qe_lanes* w, const qe_table& table) {
    vf extreme = qe_signed_extreme(x, 32);
    const vm zero = vlt(vabs(extreme), vset(QE_SMALLEST));
    extreme = vsel(zero, vset(1.0f), extreme);
    const vf lowest = vset(table.value[0]);
    const qe_iq4_fit plain = qe_iq4_try(x, w, vset(1.0f) / (-extreme / lowest), table);
    vf scale = plain.scale, best = plain.explained;
    for (int trial = -QE_IQ4_TRIALS; trial <= QE_IQ4_TRIALS; trial++) {
        const qe_iq4_fit fit = qe_iq4_try(x, w, (lowest + vset((float)trial)) / extreme, table);
        const vm better = vlt(vset(0.0f), fit.sum_q2) & vlt(best * fit.sum_q2, fit.sum_qx * fit.sum_qx);
        scale = vsel(better, fit.scale, scale);
        best = vsel(better, fit.explained, best);
    }
    return vsel(zero, vset(0.0f), scale);
}

template <class F> static int32_t qe_iq4(const qe_tile& t) {
    constexpr int SUBS = F::BLOCK / 32;
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t first, int n, auto& records) QC_BODY {
        alignas(64) qe_lanes importance[F::BLOCK], w[32], scales[SUBS];
        vf sigma2 = qe_no_sum();
        if (t.importance) {
            qe_importance<F::BLOCK>(t, first, n, importance);
            for (int e = 0; e < F::BLOCK; e++) sigma2 = sigma2 + vload(x[e]) * vload(x[e]);
            sigma2 = sigma2 * vset(2.0f / F::BLOCK);
        }
        for (int s = 0; s < SUBS; s++) {
            const qe_lanes* const part = x + s * 32;
            for (int e = 0; e < 32; e++) {
                const vf v = vload(part[e]);
                vstore(w[e], t.importance ? vload(importance[s * 32 + e]) * vsqrt(sigma2 + v * v) : v * v);
            }
            const vf scale = qe_iq4_scale(part, w, F::TABLE);
            if (!qe_finite(scale)) return false;
            vstore(scales[s], scale);
        }
        vf stored;
        if constexpr (SUBS == 1) {
            const vf scale = vload(scales[0]), inverse = qe_reciprocal(scale);
            for (int e = 0; e < 32; e++) records.put(F::codes, e, qe_iq4_code(vload(x[e]), inverse, F::TABLE));
            return records.put_half(F::d, scale, stored);
        } else {
            const vf d = qe_signed_extreme(scales, SUBS) / vset(-32.0f), inverse = qe_reciprocal(d);
            for (int s = 0; s < SUBS; s++) {
                const vf level = qe_clip(qe_nearest(inverse * vload(scales[s])), -32, 31);
                records.put(F::scales, s, qe_truncated(level + vset(32.0f)));
                const vf of_part = qe_reciprocal(d * level);
                for (int e = 0; e < 32; e++)
                    records.put(F::codes, s * 32 + e, qe_iq4_code(vload(x[s * 32 + e]), of_part, F::TABLE));
            }
            return records.put_half(F::d, d, stored);
        }
    });
}
