// The orthonormal Hadamard transform of BLOCK numbers (plan/kinds/hadamard.py), in steps of width 1, 2, 4, ….
//
// The first pass reads x: 16 lanes take the steps of width 1 to 8 in their registers, and up to 8 such vectors those of
// width 16 to 64. Each pass behind it takes up to three steps more of the numbers in `v`, 8 vectors at a time. The last
// pass scales them and writes y. So a number is read and written once for every three steps.
#pragma once
#include "vec.h"

// One step within a register: lane i and lane i ^ WIDTH. -x + other has the bits of other - x.
template <int WIDTH> QC_INLINE qf qh_lanes(qf x) {
    qi from, sign;
    for (int lane = 0; lane < QC_W; lane++) {
        from[lane] = lane ^ WIDTH;
        sign[lane] = lane & WIDTH ? (int32_t)0x80000000 : 0;
    }
    return __builtin_shuffle(x, from) + (qf)((qi)x ^ sign);
}

// One step of width WIDTH < 16 over 16 lanes.
template <int WIDTH> QC_INLINE vf qh_within(vf x) {
    if constexpr (WIDTH < QC_W) {
        return QC_EACH(vf, qh_lanes<WIDTH>(x.r[i]));
    } else {
        constexpr int STEP = WIDTH / QC_W;
        return QC_EACH(vf, i & STEP ? x.r[i & ~STEP] - x.r[i] : x.r[i] + x.r[i | STEP]);
    }
}

// log2(COUNT) steps over COUNT vectors, the first one between neighbours.
template <int COUNT> QC_INLINE void qh_between(vf* r) {
#pragma GCC unroll 3
    for (int width = 1; width < COUNT; width *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++)
            if (!(i & width)) {
                const vf low = r[i], high = r[i | width];
                r[i] = low + high;
                r[i | width] = low - high;
            }
}

// The steps from FIRST on of the numbers in v, three at a time.
template <int BLOCK, int FIRST, class Y> QC_INLINE void qh_rest(float* v, Y* y, float scale) {
    constexpr int COUNT = BLOCK / FIRST < 8 ? BLOCK / FIRST : 8;
    constexpr bool LAST = FIRST * COUNT == BLOCK;
    for (int base = 0; base < BLOCK; base += FIRST * COUNT)
        for (int at = base; at < base + FIRST; at += 16) {
            vf r[COUNT];
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; i++) r[i] = vload(v + at + i * FIRST);
            qh_between<COUNT>(r);
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; i++) {
                if constexpr (LAST) vstore(y + at + i * FIRST, r[i] * vset(scale));
                else vstore(v + at + i * FIRST, r[i]);
            }
        }
    if constexpr (!LAST) qh_rest<BLOCK, FIRST * COUNT>(v, y, scale);
}

// y = the transform of x, both of BLOCK numbers; v has room for BLOCK floats.
template <int BLOCK, class X, class Y> QC_INLINE void qh_transform(const X* x, Y* y, float* v, float scale) {
    if constexpr (BLOCK < 16) {
        for (int i = 0; i < BLOCK; i++) v[i] = qc_load(x + i);
        for (int width = 1; width < BLOCK; width *= 2)
            for (int i = 0; i < BLOCK; i++)
                if (!(i & width)) {
                    const float low = v[i], high = v[i + width];
                    v[i] = low + high;
                    v[i + width] = low - high;
                }
        for (int i = 0; i < BLOCK; i++) qc_store(y + i, v[i] * scale);
    } else {
        constexpr int COUNT = BLOCK / 16 < 8 ? BLOCK / 16 : 8;
        constexpr bool LAST = 16 * COUNT == BLOCK;
        for (int at = 0; at < BLOCK; at += 16 * COUNT) {
            vf r[COUNT];
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; i++)
                r[i] = qh_within<8>(qh_within<4>(qh_within<2>(qh_within<1>(vload(x + at + 16 * i)))));
            qh_between<COUNT>(r);
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; i++) {
                if constexpr (LAST) vstore(y + at + 16 * i, r[i] * vset(scale));
                else vstore(v + at + 16 * i, r[i]);
            }
        }
        if constexpr (!LAST) qh_rest<BLOCK, 16 * COUNT>(v, y, scale);
    }
}
