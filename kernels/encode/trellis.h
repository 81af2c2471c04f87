// tq: paths through a trellis by Viterbi's algorithm (formats/trellis_search.py).  out: codes, scales.
#pragma once
#include "tile.h"

// F is a format as source.py prints it: BITS of a code, CODES of a window, MULTIPLIER, FACTOR, UNIT.
template <class F> struct qe_trellis {
    static constexpr int BITS = F::BITS, WIDTH = F::BITS * F::CODES, BRANCHES = 1 << BITS;
    static constexpr int STATES = 1 << (WIDTH - BITS), PART = STATES / BRANCHES;  // states that follow one oldest code
    static constexpr int BLOCK = 256, LENGTH = 64;
    static_assert(PART % QC_LANES == 0, "whole vectors");

    alignas(64) float value[1 << WIDTH];              // by window
    alignas(64) float branch[BRANCHES][STATES];       // by the oldest code of a window, and the state behind it
    alignas(64) float cost[STATES], next[STATES];     // of the best path to each state
    alignas(64) float before[BRANCHES][PART];         // the costs by the oldest code of a state, and the others
    alignas(64) uint8_t chosen[LENGTH][STATES];
    alignas(64) float rests[2][STATES][LENGTH];       // what the path to a state wants, before a step and after it
    alignas(64) float target[BRANCHES][PART];

    qe_trellis() {
        for (uint32_t w = 0; w < 1u << WIDTH; w++) {
            const int32_t product = (int32_t)(w * F::MULTIPLIER);
            int sum = 0;
            for (int byte = 0; byte < 4; byte++) sum += (int8_t)(product >> 8 * byte);
            value[w] = branch[w % BRANCHES][w / BRANCHES] = (float)sum;
        }
    }

    // The windows of the best path for 64 elements from number `first` on: from and to the state `end`, or any (-1).
    void pass(const float* y, const float* w, int first, int end, uint16_t* windows) {
        for (int s = 0; s < STATES; s++) cost[s] = end < 0 || s == end ? 0.0f : qc_from_bits(QE_INFINITY);
        for (int step = 0; step < LENGTH; step++) {
            const vf wanted = vset(y[(first + step) % LENGTH]), weight = vset(w[(first + step) % LENGTH]);
            for (int j = 0; j < BRANCHES; j++)
                for (int u = 0; u < PART; u++) before[j][u] = cost[u * BRANCHES + j];
            extend(step, weight, [&](int, int) QC_BODY { return wanted; });
        }
        trace(end, windows);
    }

    // The same from and to the state `end`, where every path makes up for its errors: by share[step][i] times the error
    // at `step` it wants less of element i. share is 0 up to i = step.
    void survive(const float* y, const float* w, const float (*share)[LENGTH], int end, uint16_t* windows) {
        for (int s = 0; s < STATES; s++) {
            cost[s] = s == end ? 0.0f : qc_from_bits(QE_INFINITY);
            memcpy(rests[0][s], y, sizeof rests[0][s]);
        }
        for (int step = 0; step < LENGTH; step++) {
            const float (*const rest)[LENGTH] = rests[step % 2];
            float (*const after)[LENGTH] = rests[1 - step % 2];
            for (int j = 0; j < BRANCHES; j++)
                for (int u = 0; u < PART; u++)
                    before[j][u] = cost[u * BRANCHES + j], target[j][u] = rest[u * BRANCHES + j][step];
            extend(step, vset(w[step]), [&](int j, int u) QC_BODY { return vload(target[j] + u); });
            for (int s = 0; s < STATES; s++) {
                const int window = s << BITS | chosen[step][s];
                const float* const from = rest[window & (STATES - 1)];
                const vf error = vset(from[step] - value[window]);
                for (int i = (step + 1) / QC_LANES * QC_LANES; i < LENGTH; i += QC_LANES)
                    vstore(after[s] + i, vload(from + i) - error * vload(share[step] + i));
            }
        }
        trace(end, windows);
    }

private:
    // One step: the best branch to each state. `wanted(j, u)` is what branches with the oldest code j want of it.
    template <class Wanted> __attribute__((always_inline)) inline void extend(int step, vf weight, Wanted wanted) {
        for (int newest = 0; newest < BRANCHES; newest++)
            for (int u = 0; u < PART; u += QC_LANES) {
                const int s = newest * PART + u;
                vf best = vset(0.0f);
                vi which = vset(0);
                for (int j = 0; j < BRANCHES; j++) {
                    const vf difference = wanted(j, u) - vload(branch[j] + s);
                    const vf total = difference * difference * weight + vload(before[j] + u);
                    const vm better = vlt(total, best);
                    best = j == 0 ? total : vsel(better, total, best);
                    which = j == 0 ? which : vsel(better, vset(j), which);
                }
                vstore(next + s, best);
                vstore(chosen[step] + s, which);
            }
        memcpy(cost, next, sizeof cost);
    }

    void trace(int end, uint16_t* windows) {
        int state = end < 0 ? 0 : end;
        for (int s = 0; end < 0 && s < STATES; s++) state = cost[s] < cost[state] ? s : state;
        for (int step = LENGTH - 1; step >= 0; step--) {
            windows[step] = (uint16_t)(state << BITS | chosen[step][state]);
            state = windows[step] & (STATES - 1);
        }
    }

public:
    static int column(int sequence, int place) { return place / 4 * 16 + place % 4 / 2 * 8 + 2 * sequence + place % 2; }

    // The codes of a block whose elements, over the scale, are y, and what they decode to.
    void choose(const float* y, const float* w, uint8_t* codes, float* values) {
        float of[LENGTH], weight[LENGTH];
        uint16_t windows[LENGTH];
        for (int t = 0; t < 4; t++) {
            for (int p = 0; p < LENGTH; p++) of[p] = y[column(t, p)], weight[p] = w[column(t, p)];
            pass(of, weight, LENGTH / 2, -1, windows);
            pass(of, weight, 0, windows[LENGTH / 2 - 1] >> BITS, windows);
            for (int p = 0; p < LENGTH; p++) {
                codes[column(t, p)] = (uint8_t)(windows[p] >> (WIDTH - BITS));
                values[column(t, p)] = value[windows[p]];
            }
        }
    }
};

// False where the scale exceeds fp16.
template <class F> static bool qe_trellis_block(
    qe_trellis<F>& search, const float* x, const float* w, uint8_t* codes, uint16_t* scale) {
    constexpr int BLOCK = qe_trellis<F>::BLOCK;
    float y[BLOCK], values[BLOCK], squares = -0.0f, weight = -0.0f, products = -0.0f;
    for (int e = 0; e < BLOCK; e++) squares += x[e] * x[e] * w[e], weight += w[e];
    const float mean = weight != 0.0f ? squares / weight : 0.0f;
    *scale = qc_to_f16_bits(sqrtf(mean) * F::FACTOR);
    const float first = qe_f16::widen(*scale);
    if (!(first <= 65504.0f)) return false;
    memset(codes, 0, BLOCK);
    if (first == 0.0f) return true;
    const float divisor = first * F::UNIT;
    for (int e = 0; e < BLOCK; e++) y[e] = x[e] / divisor;
    search.choose(y, w, codes, values);
    squares = -0.0f;
    for (int e = 0; e < BLOCK; e++) {
        const float weighted = values[e] * w[e];
        products += weighted * x[e], squares += weighted * values[e];
    }
    const float fitted = products / squares / F::UNIT;
    if (fitted > 0.0f && fitted <= 65504.0f) *scale = qc_to_f16_bits(fitted);
    return true;
}

// The windows (rows, 64) of sequences that want y (rows, 64), each with the weights w of its squared errors.
template <class F>
static void qe_paths(int64_t rows, const float* y, const float* w, const float (*share)[64], uint16_t* windows) {
    static thread_local qe_trellis<F> search;
    for (int64_t r = 0; r < rows; r++, y += 64, windows += 64) {
        search.pass(y, w, 32, -1, windows);
        search.survive(y, w, share, windows[31] >> F::BITS, windows);
    }
}

template <class F> static int32_t qe_tq(const qe_tile& t) {
    constexpr int BLOCK = qe_trellis<F>::BLOCK;
    if (qe_absmax_bits(t.x, t.count) >= QE_INFINITY) return QE_LEFT;
    static thread_local qe_trellis<F> search;
    float ones[BLOCK];
    uint8_t codes[BLOCK];
    for (int e = 0; e < BLOCK; e++) ones[e] = 1.0f;
    for (int64_t b = 0; b < t.count / BLOCK; b++) {
        const int64_t block = t.start / BLOCK + b;
        const float* const w = t.importance ? t.importance + block % (t.cols / BLOCK) * BLOCK : ones;
        if (!qe_trellis_block(search, t.x + b * BLOCK, w, codes, (uint16_t*)t.out[1] + block)) return QE_LEFT;
        qe_pack<F::BITS>(codes, BLOCK, t.out[0] + block * (BLOCK / 8 * F::BITS));
    }
    return QE_DONE;
}
