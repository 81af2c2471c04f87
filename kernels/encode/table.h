// 16-entry tables: the rank of a value among 15 ascending thresholds, and the entry of a rank.
#pragma once
#include "vec.h"

struct qe_table { float threshold[16], value[16]; };  // threshold[15] is not used

#if defined(QC_AVX512)
// The number of thresholds t with t < x (or, for STRICT false, not x < t), by halving: four permutations look up.
template <bool STRICT> QC_INLINE vi qe_rank(vf x, const float* threshold) {
    const __m512 t = _mm512_loadu_ps(threshold);
    __m512i rank = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int step = 8; step > 0; step /= 2) {
        const __m512 middle = _mm512_permutexvar_ps(_mm512_add_epi32(rank, _mm512_set1_epi32(step - 1)), t);
        const __mmask16 above = STRICT ? _mm512_cmp_ps_mask(x.r[0], middle, _CMP_GT_OQ)
                                       : _mm512_cmp_ps_mask(x.r[0], middle, _CMP_NLT_UQ);
        rank = _mm512_mask_add_epi32(rank, above, rank, _mm512_set1_epi32(step));
    }
    return {(qi)rank};
}
QC_INLINE vf qe_entry(vi rank, const float* value) {
    return {_mm512_permutexvar_ps((__m512i)rank.r[0], _mm512_loadu_ps(value))};
}
#else
template <bool STRICT> QC_INLINE vi qe_rank(vf x, const float* threshold) {
    vi rank = vset(0);
    for (int i = 0; i < 15; i++) {
        const vf t = vset(threshold[i]);
        rank = rank - vmaskbits(STRICT ? vlt(t, x) : ~vlt(x, t));
    }
    return rank;
}
QC_INLINE vf qe_entry(vi rank, const float* value) {
    int32_t at[QC_LANES];
    float found[QC_LANES];
    vstore(at, rank);
    for (int j = 0; j < QC_LANES; j++) found[j] = value[at[j]];
    return vload(found);
}
#endif
