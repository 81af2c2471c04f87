// The searches of formats/ggml_search.py, for sixteen blocks side by side: what they try, in which order, and why is
// said there.  Codes are whole numbers in fp32.  A search gives back with what the codes were found, not the codes:
// making them again costs less than keeping those of every trial that was the best so far.
#pragma once
#include "blocks.h"

constexpr float QE_SMALLEST = 1e-15f, QE_ROUNDED = 4194303.0f;

// The nearest integers, halves to even; beyond 2^22 and for NaN what adding 1.5 * 2^23 leaves in the low bits.
QC_INLINE vf qe_nearest_bits(vf x) {
    return vtofloat((vbits(x + vset(12582912.0f)) & vset(0x7fffff)) - vset(0x400000));
}
QC_INLINE bool qe_rounds(vf x) { return !vany(~vle(vabs(x), vset(QE_ROUNDED))); }
QC_INLINE vf qe_nearest(vf x) { return qe_rounds(x) ? vrint(x) : qe_nearest_bits(x); }
template <bool ROUNDS> QC_INLINE vf qe_nearest(vf x) { return ROUNDS ? vrint(x) : qe_nearest_bits(x); }

QC_INLINE vf qe_ratio(vf a, vf b) { return vsel(veq(b, vset(0.0f)), vset(0.0f), a / b); }
QC_INLINE vf qe_quotient(vf a, vf b, vm where) { return vsel(where, a / b, vset(0.0f)); }

// --- a scale ---------------------------------------------------------------------------------------------------------

struct qe_scale {
    vf scale, inverse;
    vm zero;
    int half;
    inline QC_BODY vf code(vf x) const {  // 0 … 2 * half - 1
        const vf c = qe_clip(vrint(x * inverse), (float)-half, (float)(half - 1)) + vset((float)half);
        return vsel(zero, vset(0.0f), c);
    }
};

// `wx` are weights times x.
template <int N> static qe_scale qe_search_scale(const qe_lanes* x, const qe_lanes* w, const qe_lanes* wx, int half) {
    vf extreme = qe_signed_extreme(x, N);
    const vm zero = vlt(vabs(extreme), vset(QE_SMALLEST));
    extreme = vsel(zero, vset(1.0f), extreme);
    const vf low = vset((float)-half), high = vset((float)(half - 1));
    vf scale = vset(0.0f), best = vset(0.0f), kept = vset(0.0f);
    for (int i = 0; i < 19; i++) {
        const int trial = i == 0 ? 0 : i < 10 ? i - 10 : i - 9;  // 0, -9 … -1, 1 … 9
        const vf inverse = vset(-((float)half + 0.1f * (float)trial)) / extreme;
        vf sum_lx = qe_no_sum(), sum_l2 = qe_no_sum();
#pragma GCC unroll 8
        for (int e = 0; e < N; e++) {
            const vf c = vmin(vmax(vrint(vload(x[e]) * inverse), low), high);
            sum_lx = sum_lx + vload(wx[e]) * c;
            sum_l2 = sum_l2 + vload(w[e]) * c * c;
        }
        const vm better = i == 0 ? vset(true) : vlt(vset(0.0f), sum_l2) & vlt(best * sum_l2, sum_lx * sum_lx);
        const vf found = qe_ratio(sum_lx, sum_l2);
        kept = vsel(better, inverse, kept);
        scale = vsel(better, found, scale);
        best = vsel(better, found * sum_lx, best);
    }
    return {vsel(zero, vset(0.0f), scale), kept, zero, half};
}

// The sums of a least-squares fit of a scale to codes, while single codes move.
struct qe_fit {
    vf sum_lx, sum_l2;

    template <int N> static qe_fit of(const qe_lanes* wx, const qe_lanes* w, const qe_lanes* codes) {
        qe_fit f = {qe_no_sum(), qe_no_sum()};
        for (int i = 0; i < N; i++) {
            const vf c = vload(codes[i]);
            f.sum_lx = f.sum_lx + vload(wx[i]) * c;
            f.sum_l2 = f.sum_l2 + vload(w[i]) * c * c;
        }
        return f;
    }
    // Gives an element the code that fits best within low … high, where that explains more; true where any did.
    bool move(vf x, vf w, vf wx, float* code, float low, float high, bool both) {
        const vf c = vload(code), rest_lx = sum_lx - wx * c, rest_l2 = sum_l2 - w * c * c;
        vm allowed = vlt(vset(0.0f), rest_lx);
        if (both) allowed = allowed & vlt(vset(0.0f), rest_l2);
        const vf moved = qe_clip(qe_nearest(qe_quotient(x * rest_l2, rest_lx, allowed)), low, high);
        const vf lx = rest_lx + wx * moved, l2 = rest_l2 + w * moved * moved;
        const vm better = allowed & ~veq(moved, c) & vlt(vset(0.0f), l2) & vlt(sum_lx * sum_lx * l2, lx * lx * sum_l2);
        vstore(code, vsel(better, moved, c));
        sum_lx = vsel(better, lx, sum_lx);
        sum_l2 = vsel(better, l2, sum_l2);
        return vany(better);
    }
    vf scale() const { return vsel(vlt(vset(0.0f), sum_l2), qe_ratio(sum_lx, sum_l2), vset(0.0f)); }
};

// Codes 0 … 2 * half - 1 and their scale, by coordinate descent under weights x * x.
template <int N> static vf qe_descend_scale(const qe_lanes* x, int half, qe_lanes* codes) {
    alignas(64) qe_lanes w[N], wx[N];
    const vf extreme = qe_signed_extreme(x, N);
    const vm zero = vlt(vabs(extreme), vset(QE_SMALLEST));
    const vf inverse = vset((float)-half) / vsel(zero, vset(1.0f), extreme);
    for (int i = 0; i < N; i++) {
        const vf v = vload(x[i]);
        vstore(w[i], v * v);
        vstore(wx[i], v * v * v);
        vstore(codes[i], qe_clip(vrint(inverse * v), (float)-half, (float)(half - 1)));
    }
    qe_fit fit = qe_fit::of<N>(wx, w, codes);
    const float low = (float)-half, high = (float)(half - 1);
    for (int round = 0; round < 5; round++) {
        bool changed = false;
        for (int i = 0; i < N; i++)
            changed |= fit.move(vload(x[i]), vload(w[i]), vload(wx[i]), codes[i], low, high, false);
        if (!changed) break;
    }
    for (int i = 0; i < N; i++) vstore(codes[i], vsel(zero, vset(0.0f), vload(codes[i]) + vset((float)half)));
    return vsel(zero, vset(0.0f), fit.scale());
}

template <int N> QC_INLINE vf qe_level_error(const qe_lanes* x, const qe_lanes* w, vf inverse, float largest) {
    const vf back = vset(1.0f) / inverse;
    vf error = qe_no_sum();
    for (int i = 0; i < N; i++) {
        const vf off = vload(x[i]) - back * vmin(qe_nearest(inverse * vload(x[i])), vset(largest));
        error = error + vload(w[i]) * off * off;
    }
    return error;
}

// Codes 0 … largest of numbers >= 0 and their scale.
template <int N> static vf qe_search_levels(const qe_lanes* x, const qe_lanes* w, float largest, qe_lanes* codes) {
    alignas(64) qe_lanes wx[N];
    vf maximum = vload(x[0]);
    for (int i = 1; i < N; i++) maximum = vmax(maximum, vload(x[i]));
    maximum = vmax(maximum, vset(0.0f));
    const vm zero = vlt(maximum, vset(QE_SMALLEST));
    maximum = vsel(zero, vset(1.0f), maximum);
    vf inverse = vset(largest) / maximum, best = qe_level_error<N>(x, w, inverse, largest);
    for (int trial = -4; trial <= 4; trial++) {
        if (trial == 0) continue;
        const vf tried = vset(0.1f * (float)trial + largest) / maximum;
        const vf error = qe_level_error<N>(x, w, tried, largest);
        const vm better = vlt(error, best);
        best = vsel(better, error, best);
        inverse = vsel(better, tried, inverse);
    }
    for (int i = 0; i < N; i++) {
        vstore(codes[i], vmin(qe_nearest(inverse * vload(x[i])), vset(largest)));
        vstore(wx[i], vload(w[i]) * vload(x[i]));
    }
    qe_fit fit = qe_fit::of<N>(wx, w, codes);
    for (int round = 0; round < 5; round++) {
        bool changed = false;
        for (int i = 0; i < N; i++)
            changed |= fit.move(vload(x[i]), vload(w[i]), vload(wx[i]), codes[i], -4194304.0f, largest, true);
        if (!changed) break;
    }
    for (int i = 0; i < N; i++) vstore(codes[i], vsel(zero, vset(0.0f), vload(codes[i])));
    return vsel(zero, vset(0.0f), fit.scale());
}

// --- a scale and a minimum -------------------------------------------------------------------------------------------

struct qe_trials { float first, step; int count; bool absolute; };

struct qe_line {
    vf scale, minimum;        // minimum <= 0
    vf inverse, from;         // with which the codes were found
    vm flat;
    vf plain, constant;       // inverse and minimum of the plain range

    // A falling line gives way to the plain range: stored scales have no sign.
    inline QC_BODY void level() {
        const vm falling = vlt(scale, vset(0.0f));
        inverse = vsel(falling, plain, inverse);
        scale = vsel(falling, vset(1.0f) / plain, scale);
        from = vsel(falling, constant, from);
        minimum = vsel(falling, constant, minimum);
    }
    inline QC_BODY vf code(vf x, float largest) const {
        return vsel(flat, vset(0.0f), qe_clip(qe_nearest((x - from) * inverse), 0.0f, largest));
    }
};

template <int N, bool ABSOLUTE>
QC_INLINE vf qe_line_error(const qe_lanes* x, const qe_lanes* w, const qe_lanes* codes, vf scale, vf minimum) {
    vf error = qe_no_sum();
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        const vf off = vload(codes[i]) * scale + minimum - vload(x[i]);
        error = error + vload(w[i]) * (ABSOLUTE ? vabs(off) : off * off);
    }
    return error;
}

struct qe_sums { vf l, l2, xl; };
template <int N, bool ROUNDS>
QC_INLINE qe_sums qe_line_codes(
    const qe_lanes* x, const qe_lanes* w, vf minimum, vf inverse, float largest, qe_lanes* codes) {
    const vf low = vset(0.0f), high = vset(largest);
    qe_sums s = {qe_no_sum(), qe_no_sum(), qe_no_sum()};
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        const vf v = vload(x[i]), c = vmin(vmax(qe_nearest<ROUNDS>((v - minimum) * inverse), low), high);
        const vf weighted = vload(w[i]) * c;
        vstore(codes[i], c);
        s.l = s.l + weighted;
        s.l2 = s.l2 + weighted * c;
        s.xl = s.xl + weighted * v;
    }
    return s;
}

template <int N, bool ABSOLUTE>
static qe_line qe_search_affine(const qe_lanes* x, const qe_lanes* w, float largest, qe_trials trials) {
    alignas(64) qe_lanes codes[N];
    const vf nothing = vset(0.0f), one = vset(1.0f);
    vf highest = vload(x[0]), lowest = vload(x[0]), sum_w = qe_no_sum(), sum_x = qe_no_sum();
    for (int i = 0; i < N; i++) {
        const vf v = vload(x[i]);
        highest = vmax(v, highest);
        lowest = vsel(vlt(v, lowest), v, lowest);
        sum_w = sum_w + vload(w[i]);
        sum_x = sum_x + vload(w[i]) * v;
    }
    vf minimum = vsel(vlt(nothing, lowest), nothing, lowest);
    const vm flat = veq(highest, minimum);
    const vf plain = vset(largest) / vsel(flat, one, highest - minimum);
    qe_line best = {one / plain, minimum, plain, minimum, flat, plain, minimum};
    vf least = nothing;
    for (int trial = -1; trial <= trials.count; trial++) {  // -1: the plain range
        const vf inverse = trial < 0 ? best.inverse
                                     : vset(trials.first + trials.step * (float)trial + largest) /
                                           vsel(flat, one, highest - minimum);
        const bool rounds = qe_rounds((highest - minimum) * inverse) && qe_rounds((lowest - minimum) * inverse);
        const qe_sums s = rounds ? qe_line_codes<N, true>(x, w, minimum, inverse, largest, codes)
                                 : qe_line_codes<N, false>(x, w, minimum, inverse, largest, codes);
        if (trial < 0) {
            least = qe_line_error<N, ABSOLUTE>(x, w, codes, best.scale, minimum);
            continue;
        }
        const vf determinant = sum_w * s.l2 - s.l * s.l;
        const vm solved = vlt(nothing, determinant);
        vf scale = qe_quotient(sum_w * s.xl - sum_x * s.l, determinant, solved);
        vf found = qe_quotient(s.l2 * sum_x - s.l * s.xl, determinant, solved);
        const vm above = vlt(nothing, found);
        scale = vsel(above, qe_ratio(s.xl, s.l2), scale);
        found = vsel(above, nothing, found);
        const vf error = qe_line_error<N, ABSOLUTE>(x, w, codes, scale, found);
        const vm better = solved & vlt(error, least);
        least = vsel(better, error, least);
        best.inverse = vsel(better, inverse, best.inverse);
        best.from = vsel(better, minimum, best.from);
        best.scale = vsel(better, scale, best.scale);
        minimum = vsel(better, found, minimum);
    }
    best.scale = vsel(flat, nothing, best.scale);
    best.minimum = vsel(flat, best.constant, minimum);
    return best;
}
