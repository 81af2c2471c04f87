// Words of two bf16 numbers, on processors with AVX512-BF16 (asked for at run time: x86-64-v4 does not promise it).
#pragma once
#include "vec.h"

#if defined(QC_AVX512) && !defined(QB_NO_BF16)  // tests leave it out
typedef uint32_t qb_word __attribute__((may_alias));

QC_INLINE void qb_dot(qf& sum, qu w, const qb_word* x) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
}

// The order that puts 16 numbers and the 16 behind them side by side.
alignas(64) static const uint16_t qb_side_by_side[32] = {
    0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31,
};

QC_INLINE qu qb_permute(const uint16_t* order, __m512i numbers) {
    return (qu)_mm512_permutexvar_epi16(_mm512_load_si512(order), numbers);
}

// The sixteen numbers of `first`, rounded to nearest even, and those of `second` behind them.
QC_INLINE __m512i qb_in_order(qf first, qf second) {
    __m512i both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first), "v"(second));
    return both;
}

// A word of a row in all lanes.
QC_INLINE qu qb_broadcast(const char* x) {
    qu words;
    asm("vpbroadcastd %1, %0" : "=v"(words) : "m"(*(const qb_word*)x));
    return words;
}
QC_INLINE void qb_dot(qf& sum, qu w, qu x) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }

// Words of bf16: numbers that bf16 has unrounded, `even` in the low halves.
QC_INLINE qu qb_upper_halves(qf even, qf odd) {
    return ((qu)even >> 16) | ((qu)odd & 0xffff0000u);
}

// Words of bf16: `even` in the low halves, `odd` in the high ones, both rounded to nearest even.
QC_INLINE qu qb_pairs(vf even, vf odd) {
    return qb_permute(qb_side_by_side, qb_in_order(even.r[0], odd.r[0]));
}

template <class T> struct qb_same { static constexpr bool value = false; };
template <> struct qb_same<qc_bf16> { static constexpr bool value = true; };

QC_INLINE void qb_store(void* to, vf x) {
    __m256i rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x.r[0]));
    memcpy(to, &rounded, 32);
}

// Sixteen numbers of a row and those of the next row, side by side.
template <class T> QC_INLINE qu qb_beside(const T* first, const T* second) {
    return qb_pairs(vload(first), vload(second));
}
QC_INLINE qu qb_beside(const qc_bf16* first, const qc_bf16* second) {
    const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)first));
    const __m256i high = _mm256_loadu_si256((const __m256i*)second);
    return qb_permute(qb_side_by_side, _mm512_inserti64x4(low, high, 1));
}
#endif
