// Sixteen blocks of a matrix side by side: lane l of element e is element e of block l.
//
// Every block keeps the order of its sums, and the searches of ggml's formats run for sixteen blocks at once.  F is a
// format as source.py prints it: BLOCK elements, BYTES of a record, FAR (the largest magnitude it takes), and for each
// field where the bits of its entries stand.
#pragma once
#include "tile.h"

typedef float qe_lanes[QC_LANES];

// Sums start at -0, to which adding changes nothing: 0 would lose the sign of a first -0.
QC_INLINE vf qe_no_sum() { return vset(-0.0f); }

// Elements [0, BLOCK) of `n` consecutive blocks, zero in the lanes beyond. False where one is not within ±far.
template <int BLOCK> static bool qe_side_by_side(const float* from, int n, float far, qe_lanes* x) {
    alignas(64) float padded[QC_LANES * BLOCK];
    if (n < QC_LANES) {
        memcpy(padded, from, (size_t)n * BLOCK * 4);
        memset(padded + n * BLOCK, 0, (size_t)(QC_LANES - n) * BLOCK * 4);
        from = padded;
    }
    for (int e = 0; e < BLOCK; e += 16) vtranspose(from + e, BLOCK, x[e], QC_LANES);
    vm within = vset(true);
    for (int e = 0; e < BLOCK; e++) within = within & vle(vabs(vload(x[e])), vset(far));
    return !vany(~within);
}

// The importance of each element of `n` blocks, from the `first` one of the matrix on.
template <int BLOCK> static void qe_importance(const qe_tile& t, int64_t first, int n, qe_lanes* importance) {
    alignas(64) float of_blocks[QC_LANES * BLOCK] = {};
    for (int l = 0; l < n; l++)
        memcpy(of_blocks + l * BLOCK, t.importance + (first + l) % (t.cols / BLOCK) * BLOCK, BLOCK * 4);
    for (int e = 0; e < BLOCK; e += 16) vtranspose(of_blocks + e, BLOCK, importance[e], QC_LANES);
}

// The element of largest magnitude, of several the first; +0 where all are 0.
QC_INLINE vf qe_signed_extreme(const qe_lanes* x, int n) {
    vf extreme = vset(0.0f), size = vset(0.0f);
    for (int i = 0; i < n; i++) {
        const vf v = vload(x[i]), magnitude = vabs(v);
        const vm larger = vlt(size, magnitude);
        extreme = vsel(larger, v, extreme);
        size = vsel(larger, magnitude, size);
    }
    return extreme;
}

// 1 / d, and 0 where d is 0.
QC_INLINE vf qe_reciprocal(vf d) { return vsel(veq(d, vset(0.0f)), vset(0.0f), vset(1.0f) / d); }

QC_INLINE vf qe_clip(vf x, float low, float high) { return vmin(vmax(x, vset(low)), vset(high)); }

// --- records ---------------------------------------------------------------------------------------------------------

// Some bits of an entry: from bit `place` of it on those under `mask` go to bit `bit` of a record's 32-bit word.
struct qe_piece { uint16_t word, mask; uint8_t bit, place; };

template <int BYTES> struct qe_records {
    static constexpr int WORDS = (BYTES + 3) / 4, PADDED = (WORDS + 15) / 16 * 16;
    alignas(64) int32_t word[PADDED][QC_LANES];

    qe_records() { memset(word, 0, sizeof word); }

    template <int ENTRIES, int PIECES> void put(const qe_piece (&field)[ENTRIES][PIECES], int entry, vi value) {
        for (int i = 0; i < PIECES; i++) {
            const qe_piece p = field[entry][i];
            const vi bits = vshl(vshru(value, p.place) & vset((int32_t)p.mask), p.bit);
            vstore(word[p.word], vload(word[p.word]) | bits);
        }
    }

    // Numbers of 16 bits; false where one is infinite.
    template <int PIECES> bool put_half(const qe_piece (&field)[1][PIECES], vf value, vf& stored) {
        uint16_t bits[QC_LANES];
        vstore((qc_f16*)bits, value);
        put(field, 0, vload((const int16_t*)bits));
        stored = vround_f16(value);
        return !vany(~vle(vabs(stored), vset(65504.0f)));
    }

    // The records of the first n lanes, one after another.
    void write(uint8_t* out, int n) {
        alignas(64) float of_lane[QC_LANES][PADDED];
        for (int i = 0; i < PADDED; i += 16) vtranspose((const float*)word[i], QC_LANES, &of_lane[0][i], PADDED);
        for (int l = 0; l < n; l++) memcpy(out + (int64_t)l * BYTES, of_lane[l], BYTES);
    }
};
