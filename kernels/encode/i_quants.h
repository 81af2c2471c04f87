// i-quants: the point of a codebook for each vector, levels of sub-blocks, a scale (formats/vector_search.py, with the
// same sums in the same order).  out: blocks.
//
// F has SIZE elements of a vector, SUB elements that share one of LEVELS levels (STEPS times the scale; BETWEEN are the
// ratios that divide them), and VARIANTS of POINTS points: point p is row LOW_OF[p] of LOW and row HIGH_OF[p] of HIGH.
#pragma once
#include "ggml_32.h"

enum qe_signs { QE_NONE, QE_FREE, QE_EVEN, QE_SHIFTS };

// A sub-block's choice: what it gains over zeros, the sums of A and B over its vectors, level, variant and points.
template <class F> struct qe_choice {
    static constexpr int VECTORS = F::SUB / F::SIZE;
    vf gain, a, b;
    vi level, variant, point[VECTORS];

    void take(vm better, const qe_choice& other) {
        gain = vsel(better, other.gain, gain);
        a = vsel(better, other.a, a);
        b = vsel(better, other.b, b);
        level = vsel(better, other.level, level);
        variant = vsel(better, other.variant, variant);
        for (int v = 0; v < VECTORS; v++) point[v] = vsel(better, other.point[v], point[v]);
    }
    vf scale() const {
        return vsel(vlt(vset(0.0f), a) & vlt(vset(0.0f), b), b / a, vset(0.0f));
    }
    vf reached() const { return scale() * b; }
};

// For each row of half a codebook: sums over its elements of `w` times squares, and of `wx2` times numbers.
template <int ROWS, int HALF>
static void qe_sums_of_rows(
    const float (&rows)[ROWS][HALF], const qe_lanes* w, const qe_lanes* wx2, qe_lanes* squares, qe_lanes* products) {
    for (int r = 0; r < ROWS; r++) {
        vf square = vload(w[0]) * vset(rows[r][0] * rows[r][0]), product = vload(wx2[0]) * vset(rows[r][0]);
        for (int j = 1; j < HALF; j++) {
            square = square + vload(w[j]) * vset(rows[r][j] * rows[r][j]);
            product = product + vload(wx2[j]) * vset(rows[r][j]);
        }
        vstore(squares[r], square);
        vstore(products[r], product);
    }
}

// A vector's best point at a scale, its A and 2 B.
struct qe_point { vi number; vf a, b2; };
template <class F> static qe_point qe_best_point(int variant, vf scale, const qe_lanes* w, const qe_lanes* wx2) {
    constexpr int HALF = F::SIZE / 2, LOWS = sizeof F::LOW[0] / sizeof F::LOW[0][0];
    constexpr int HIGHS = sizeof F::HIGH[0] / sizeof F::HIGH[0][0];
    alignas(64) qe_lanes low_a[LOWS], low_b[LOWS], high_a[HIGHS], high_b[HIGHS];
    qe_sums_of_rows(F::LOW[variant], w, wx2, low_a, low_b);
    qe_sums_of_rows(F::HIGH[variant], w + HALF, wx2 + HALF, high_a, high_b);
    qe_point best = {vset(0), vset(0.0f), vset(0.0f)};
    vf least = vset(-__builtin_inff());
    for (int p = 0; p < F::POINTS; p++) {
        const vf a = vload(low_a[F::LOW_OF[p]]) + vload(high_a[F::HIGH_OF[p]]);
        const vf b2 = vload(low_b[F::LOW_OF[p]]) + vload(high_b[F::HIGH_OF[p]]), value = b2 - a * scale;
        const vm better = vlt(least, value);
        least = vsel(better, value, least);
        best = {vsel(better, vset(p), best.number), vsel(better, a, best.a), vsel(better, b2, best.b2)};
    }
    return best;
}

template <class F> static qe_choice<F> qe_choose(const qe_lanes* w, const qe_lanes* wx2, vf scale, vi level) {
    qe_choice<F> best;
    for (int variant = 0; variant < F::VARIANTS; variant++) {
        qe_choice<F> found;
        for (int v = 0; v < qe_choice<F>::VECTORS; v++) {
            const qe_point at = qe_best_point<F>(variant, scale, w + v * F::SIZE, wx2 + v * F::SIZE);
            found.point[v] = at.number;
            found.a = v ? found.a + at.a : at.a;
            found.b = v ? found.b + at.b2 : at.b2;
        }
        found.b = found.b * vset(0.5f);
        found.gain = scale * (vset(2.0f) * found.b - scale * found.a);
        found.level = level;
        found.variant = vset(variant);
        if (variant == 0) best = found;
        else best.take(vlt(best.gain, found.gain), found);
    }
    return best;
}

// The best choice of a sub-block, were its scale stored exactly.
template <class F> static qe_choice<F> qe_choose_alone(const qe_lanes* x, const qe_lanes* w, const qe_lanes* wx2) {
    vf peak = vset(0.0f);
    for (int e = 0; e < F::SUB; e++) peak = vmax(peak, vabs(vload(x[e])));
    peak = peak / vset(F::LARGEST);
    qe_choice<F> best = qe_choose<F>(w, wx2, peak * vset(F::TRIALS[0]), vset(0));
    const auto try_at = [&](vf scale) QC_BODY {
        const qe_choice<F> tried = qe_choose<F>(w, wx2, scale, vset(0));
        best.take(vlt(best.reached(), tried.reached()), tried);
    };
    for (size_t t = 1; t < sizeof F::TRIALS / sizeof *F::TRIALS; t++) try_at(peak * vset(F::TRIALS[t]));
    for (int round = 0; round < F::ROUNDS; round++) try_at(best.scale());
    return best;
}

template <class F> static vf qe_step(vi level) {
    vf step = vset(F::STEPS[0]);
    for (int l = 1; l < F::LEVELS; l++) step = vsel(veq(level, vset(l)), vset(F::STEPS[l]), step);
    return step;
}
template <class F> static vi qe_level(vf wanted, vf scale) {
    const vf ratio = vsel(vlt(vset(0.0f), scale), wanted / scale, vset(0.0f));
    vi level = vset(0);
    for (int l = 0; l + 1 < F::LEVELS; l++) level = vsel(vlt(vset(F::BETWEEN[l]), ratio), vset(l + 1), level);
    return level;
}

// Sign bits of the elements, and x times the signs. With EVEN, one of eight changes where their number is odd.
template <class F> static void qe_take_signs(qe_lanes* x, const qe_lanes* w, vi* minus) {
    for (int first = 0; first < F::BLOCK; first += 8) {
        vf least = vset(__builtin_inff());
        vi odd = vset(0), where = vset(-1);
        for (int e = 0; e < 8; e++) {
            const vf v = vload(x[first + e]), size = vabs(v), cost = vload(w[first + e]) * size;
            minus[first + e] = vshru(vbits(v), 31);
            odd = odd ^ minus[first + e];
            where = vsel(vlt(cost, least), vset(e), where);
            least = vmin(cost, least);
            vstore(x[first + e], size);
        }
        if (F::SIGNS != QE_EVEN) continue;
        for (int e = 0; e < 8; e++) {
            const vm change = veq(odd, vset(1)) & veq(where, vset(e));
            minus[first + e] = vsel(change, minus[first + e] ^ vset(1), minus[first + e]);
            vstore(x[first + e], vsel(change, -vload(x[first + e]), vload(x[first + e])));
        }
    }
}

template <class F> struct qe_superblocks {
    static constexpr int SUBS = F::BLOCK / F::SUB;
    qe_choice<F> state[SUBS];
    vf scale;

    void search(const qe_lanes* x, const qe_lanes* w, const qe_lanes* wx2) {
        vf largest = vset(0.0f);
        for (int s = 0; s < SUBS; s++) {
            state[s] = qe_choose_alone<F>(x + s * F::SUB, w + s * F::SUB, wx2 + s * F::SUB);
            largest = vmax(largest, state[s].scale());
        }
        vf trial = vround_f16(largest / vset(F::STEPS[F::LEVELS - 1]));
        for (int round = 0; round < F::ROUNDS; round++) {
            qe_choice<F> tried[SUBS];
            vf numerator, denominator, now, before;
            for (int s = 0; s < SUBS; s++) {
                const vi level = qe_level<F>(state[s].scale(), trial);
                const vf step = qe_step<F>(level);
                tried[s] = qe_choose<F>(w + s * F::SUB, wx2 + s * F::SUB, trial * step, level);
                const vf n = step * tried[s].b, d = step * step * tried[s].a;
                numerator = s ? numerator + n : n;
                denominator = s ? denominator + d : d;
                now = s ? now + tried[s].gain : tried[s].gain;
                before = s ? before + state[s].gain : state[s].gain;
            }
            const vm better = round ? vlt(before, now) : vset(true);
            for (int s = 0; s < SUBS; s++) state[s].take(better, tried[s]);
            scale = round ? vsel(better, trial, scale) : trial;
            const vm fitting = vlt(vset(0.0f), numerator) & vlt(vset(0.0f), denominator);
            trial = vround_f16(vsel(fitting, numerator / denominator, scale));
        }
        for (int move = -1; move <= 1; move += 2)
            for (int s = 0; s < SUBS; s++) {
                vi level = state[s].level + vset(move);
                level = vsel(vlt(level, vset(0)), vset(0), level);
                level = vsel(vlt(vset(F::LEVELS - 1), level), vset(F::LEVELS - 1), level);
                const vf at = scale * qe_step<F>(level);
                const qe_choice<F> tried = qe_choose<F>(w + s * F::SUB, wx2 + s * F::SUB, at, level);
                state[s].take(vlt(state[s].gain, tried.gain), tried);
            }
    }
};

template <class F> static int32_t qe_i_quant(const qe_tile& t) {
    constexpr int VECTORS = F::SUB / F::SIZE;
    return qe_each_group<F>(t, [&](const qe_lanes* given, int64_t first, int n, auto& records) QC_BODY {
        alignas(64) qe_lanes x[F::BLOCK], w[F::BLOCK], wx2[F::BLOCK];
        vi minus[F::BLOCK];
        memcpy(x, given, sizeof x);
        if (t.importance) qe_importance<F::BLOCK>(t, first, n, w);
        else for (int e = 0; e < F::BLOCK; e++) vstore(w[e], vset(1.0f));
        if constexpr (F::SIGNS == QE_FREE || F::SIGNS == QE_EVEN) qe_take_signs<F>(x, w, minus);
        for (int e = 0; e < F::BLOCK; e++) vstore(wx2[e], vload(w[e]) * vload(x[e]) * vset(2.0f));
        qe_superblocks<F> found;
        found.search(x, w, wx2);
        const vm zero = veq(found.scale, vset(0.0f));
        for (int s = 0; s < found.SUBS; s++) {
            const qe_choice<F>& of = found.state[s];
            records.put(F::scales, s, of.level);
            for (int v = 0; v < VECTORS; v++) {
                const vi point = vsel(zero, vset(0), of.point[v]);
                const vi shifted = vsel(vlt(point, vset(F::IN_BOOK)), vset(0), vset(1));
                records.put(F::index, s * VECTORS + v, vsel(veq(shifted, vset(1)), point - vset(F::IN_BOOK), point));
                if constexpr (F::SIGNS == QE_SHIFTS)
                    for (int e = 0; e < F::SIZE; e++) records.put(F::flags, (s * VECTORS + v) * F::SIZE + e, shifted);
            }
            if constexpr (F::SIGNS == QE_NONE) records.put(F::shifts, s, vsel(zero, vset(0), of.variant));
        }
        if constexpr (F::SIGNS == QE_FREE || F::SIGNS == QE_EVEN) {
            constexpr int STORED = F::SIGNS == QE_EVEN ? 7 : 8;
            for (int e = 0; e < F::BLOCK; e++)
                if (e % 8 < STORED) records.put(F::flags, e / 8 * STORED + e % 8, vsel(zero, vset(0), minus[e]));
        }
        vf stored;
        return records.put_half(F::d, found.scale, stored);
    });
}
