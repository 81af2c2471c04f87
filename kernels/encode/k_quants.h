// ggml's k-quants: superblocks of 256 (formats/k_quants.py).  out: blocks.  Lanes are superblocks.
#pragma once
#include "ggml_32.h"

QC_INLINE vf qe_times_mean_square(const qe_lanes* x, float times) {
    vf sum = qe_no_sum();
    for (int e = 0; e < 256; e++) sum = sum + vload(x[e]) * vload(x[e]);
    return vset(times) * sum / vset(256.0f);
}

QC_INLINE bool qe_finite(vf x) { return !vany(~vle(vabs(x), vset(QE_FLT_MAX))); }

// Codes LOW … HIGH of a sub-block under its stored scale `step` (and shift), from 0 on; where it is 0, the search's.
template <int SIZE, class FIELD, class SEARCHED, class RECORDS>
QC_INLINE void qe_put_codes(const FIELD& field, int from, const qe_lanes* x, vf step, vf shift, float low, float high,
                            RECORDS& records, SEARCHED searched) {
    const vm live = ~veq(step, vset(0.0f));
    const vf divisor = vsel(live, step, vset(1.0f));
    const bool all = !vany(~live);
    for (int e = 0; e < SIZE; e++) {
        vf c = qe_clip(qe_nearest((vload(x[e]) + shift) / divisor), low, high) - vset(low);
        if (!all) c = vsel(live, c, searched(e));
        records.put(field, from + e, qe_truncated(c));
    }
}

// --- q2_K, q4_K, q5_K: codes above a minimum -------------------------------------------------------------------------

// Multiples of the largest of N values over LEVEL; gives back that quotient.
template <int N> QC_INLINE vf qe_plain_levels(const qe_lanes* values, float level, qe_lanes* levels) {
    vf top = vload(values[0]);
    for (int s = 1; s < N; s++) top = vmax(top, vload(values[s]));
    top = vmax(top, vset(0.0f));
    const vf inverse = qe_quotient(vset(level), top, vlt(vset(0.0f), top));
    for (int s = 0; s < N; s++) {
        const vi wrapped = qe_truncated(qe_nearest(inverse * vload(values[s]))) & vset(255);
        vstore(levels[s], vmin(vtofloat(wrapped), vset(level)));
    }
    return top / vset(level);
}

template <class F> static int32_t qe_affine256(const qe_tile& t) {
    constexpr int SIZE = F::SIZE, SUBS = 256 / SIZE, LARGEST = (1 << F::BITS) - 1;
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t first, int n, auto& records) QC_BODY {
        alignas(64) qe_lanes importance[256], w[SIZE], scales[SUBS], mins[SUBS], total[SUBS], levels[SUBS], lows[SUBS];
        qe_line lines[SUBS];
        vf sigma2 = vset(0.0f);
        if (t.importance) {
            qe_importance<256>(t, first, n, importance);
            sigma2 = qe_times_mean_square(x, F::BITS == 2 ? 1 : 2);
        }
        for (int s = 0; s < SUBS; s++) {
            const qe_lanes* const part = x + s * SIZE;
            vf sum = qe_no_sum();
            for (int e = 0; e < SIZE; e++) sum = sum + vload(part[e]) * vload(part[e]);
            const vf rms = vsqrt(sum / vset((float)SIZE));
            vf all = qe_no_sum();
            for (int e = 0; e < SIZE; e++) {
                const vf v = vload(part[e]);
                const vf of = t.importance   ? vload(importance[s * SIZE + e]) * vsqrt(sigma2 + v * v)
                              : F::BITS == 2 ? vabs(v)
                                             : rms + vabs(v);
                vstore(w[e], of);
                all = all + of;
            }
            vstore(total[s], all);
            qe_line line = t.importance ? qe_search_affine<SIZE, false>(part, w, LARGEST, F::WEIGHTED_TRIALS)
                                              : qe_search_affine<SIZE, F::TRIALS.absolute>(part, w, LARGEST, F::TRIALS);
            line.level();
            if (!qe_finite(line.scale) || !qe_finite(line.minimum)) return false;
            lines[s] = line;
            vstore(scales[s], line.scale);
            vstore(mins[s], -line.minimum);
        }
        const vf d = t.importance ? qe_search_levels<SUBS>(scales, total, F::LEVEL, levels)
                                  : qe_plain_levels<SUBS>(scales, F::LEVEL, levels);
        const vf dmin = t.importance ? qe_search_levels<SUBS>(mins, total, F::LEVEL, lows)
                                     : qe_plain_levels<SUBS>(mins, F::LEVEL, lows);
        vf half_d, half_min;
        if (!records.put_half(F::d, d, half_d) || !records.put_half(F::dmin, dmin, half_min)) return false;
        for (int s = 0; s < SUBS; s++) {
            const vf level = vload(levels[s]), low = vload(lows[s]);
            records.put(F::scales, s, qe_truncated(level));
            records.put(F::mins, s, qe_truncated(low));
            const qe_lanes* const part = x + s * SIZE;
            qe_put_codes<SIZE>(F::codes, s * SIZE, part, half_d * level, half_min * low, 0, LARGEST, records,
                               [&](int e) { return lines[s].code(vload(part[e]), LARGEST); });
        }
        return true;
    });
}

// --- q3_K, q6_K: codes around zero -----------------------------------------------------------------------------------

// d with which the signed extreme becomes -half, and the nearest multiples of it.
QC_INLINE vf qe_signed_levels(const qe_lanes* scales, float half, qe_lanes* levels) {
    const vf inverse = vset(-half) / qe_signed_extreme(scales, 16);
    const vf d = vsel(qe_infinite(inverse), vset(0.0f), vset(1.0f) / inverse);
    for (int s = 0; s < 16; s++) vstore(levels[s], qe_nearest(inverse * vload(scales[s])));
    return d;
}

template <class F> static int32_t qe_q3_k(const qe_tile& t) {
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t first, int n, auto& records) QC_BODY {
        alignas(64) qe_lanes importance[256], codes[256], w[16], wx[16], scales[16], total[16], levels[16];
        vf sigma2 = vset(0.0f), d, half_d;
        if (t.importance) {
            qe_importance<256>(t, first, n, importance);
            sigma2 = qe_times_mean_square(x, 2);
        }
        for (int s = 0; s < 16; s++) {
            const qe_lanes* const part = x + s * 16;
            vf scale;
            if (t.importance) {
                vf all = qe_no_sum();
                for (int e = 0; e < 16; e++) {
                    const vf v = vload(part[e]), of = vload(importance[s * 16 + e]) * vsqrt(sigma2 + v * v);
                    vstore(w[e], of);
                    vstore(wx[e], of * v);
                    all = all + of;
                }
                vstore(total[s], all);
                const qe_scale found = qe_search_scale<16>(part, w, wx, 4);
                for (int e = 0; e < 16; e++) vstore(codes[s * 16 + e], found.code(vload(part[e])));
                scale = found.scale;
            } else {
                scale = qe_descend_scale<16>(part, 4, codes + s * 16);
            }
            if (!qe_finite(scale)) return false;
            vstore(scales[s], scale);
        }
        if (t.importance) {
            for (int s = 0; s < 16; s++) vstore(wx[s], vload(total[s]) * vload(scales[s]));
            const qe_scale found = qe_search_scale<16>(scales, total, wx, 32);
            for (int s = 0; s < 16; s++) vstore(levels[s], found.code(vload(scales[s])));
            d = found.scale;
        } else {
            d = qe_signed_levels(scales, 32, levels);
            for (int s = 0; s < 16; s++) {
                const vf level = qe_clip(vload(levels[s]), -32, 31) + vset(32.0f);
                vstore(levels[s], vsel(veq(d, vset(0.0f)), vset(0.0f), level));
            }
        }
        if (!records.put_half(F::d, d, half_d)) return false;
        for (int s = 0; s < 16; s++) {
            const vf level = vload(levels[s]), step = half_d * (level - vset(32.0f));
            records.put(F::scales, s, qe_truncated(level));
            qe_put_codes<16>(F::codes, s * 16, x + s * 16, step, vset(-0.0f), -4, 3, records,
                             [&](int e) { return vload(codes[s * 16 + e]); });
        }
        return true;
    });
}

template <class F> static int32_t qe_q6_k(const qe_tile& t) {
    return qe_each_group<F>(t, [&](const qe_lanes* x, int64_t first, int n, auto& records) QC_BODY {
        alignas(64) qe_lanes importance[256], w[16], wx[16], scales[16], levels[16];
        qe_scale found[16];
        if (t.importance) qe_importance<256>(t, first, n, importance);
        vm zero = vset(true);
        for (int s = 0; s < 16; s++) {
            for (int e = 0; e < 16; e++) {
                const vf v = vload(x[s * 16 + e]), of = t.importance ? vload(importance[s * 16 + e]) : v * v;
                vstore(w[e], of);
                vstore(wx[e], of * v);
            }
            found[s] = qe_search_scale<16>(x + s * 16, w, wx, 32);
            if (!qe_finite(found[s].scale)) return false;
            zero = zero & vlt(vabs(found[s].scale), vset(QE_SMALLEST));
            vstore(scales[s], found[s].scale);
        }
        for (int s = 0; s < 16; s++) vstore(scales[s], vsel(zero, vset(1.0f), vload(scales[s])));
        vf half_d;
        const vf d = vsel(zero, vset(0.0f), qe_signed_levels(scales, 128, levels));
        if (!records.put_half(F::d, d, half_d)) return false;
        for (int s = 0; s < 16; s++) {
            const vf level = vsel(zero, vset(0.0f), vmin(vload(levels[s]), vset(127.0f)));
            records.put(F::scales, s, qe_truncated(level));
            qe_put_codes<16>(F::codes, s * 16, x + s * 16, half_d * level, vset(-0.0f), -32, 31, records,
                             [&](int e) { return vsel(zero, vset(0.0f), found[s].code(vload(x[s * 16 + e]))); });
        }
        return true;
    });
}
