// Attention whose factors are bf16 and whose sums are fp32 (`vdpbf16ps`): rows are rounded, keys become words of two
// columns, values words of two keys. The weights' exponential need not be more exact than their rounding to 8 bits.
#pragma once
#include "bf16.h"
#include "cache.h"

#if defined(QC_AVX512) && !defined(QB_NO_BF16)

// Thirty-two codes of e4m3 (cache.h) as bf16, which has all of their numbers.
QC_INLINE __m512i qa_of_fp8(__m256i codes) {
    alignas(64) static const uint16_t small[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i wide = _mm512_cvtepu8_epi16(codes), magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    v = _mm512_mask_permutexvar_epi16(v, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude,
                                      _mm512_load_si512(small));
    v = _mm512_mask_mov_epi16(v, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                              _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(v, _mm512_slli_epi16(_mm512_sub_epi16(wide, magnitude), 8));
}
// Thirty-two numbers of a row, rounded.
template <class T> QC_INLINE __m512i qa_numbers(const T* row) {
    return qb_in_order(vload(row).r[0], vload(row + 16).r[0]);
}
QC_INLINE __m512i qa_numbers(const qc_code_fp8* row) { return qa_of_fp8(_mm256_loadu_si256((const __m256i*)row)); }
QC_INLINE qu qb_beside(const qc_code_fp8* first, const qc_code_fp8* second) {
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first));
    const __m256i both = _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i*)second), 1);
    return qb_permute(qb_side_by_side, qa_of_fp8(both));
}

// Rows of `columns` bf16 (a multiple of 32), zeros from column `depth` on; rows from `live` to `count` are zeros.
template <class T>
static void qa_round_rows(const T* rows, int64_t stride, int64_t live, int64_t count, int64_t depth, int64_t columns,
                          uint16_t* out) {
    for (int64_t r = 0; r < count; r++, rows += stride, out += columns) {
        if (r >= live) {
            memset(out, 0, (size_t)columns * 2);
            continue;
        }
        if (depth == columns) {
            for (int64_t d = 0; d < columns; d += 32) q_store((int32_t*)(out + d), (qi)qa_numbers(rows + d));
            continue;
        }
        for (int64_t d = 0; d < columns; d += QC_LANES)
            qb_store(out + d, vload_upto(rows + d, (int)qc_max(0, qc_min(QC_LANES, depth - d))));
    }
}

// panels[j / width][w][j % width] = word w of row j, for `count` rows (a multiple of `width`) of `words` words (a
// multiple of 16).
static void qa_pack_keys(const uint16_t* rows, int64_t count, int64_t words, int64_t width, float* panels) {
    for (int64_t j = 0; j < count; j += QC_LANES)
        for (int64_t w = 0; w < words; w += QC_LANES)
            vtranspose((const float*)rows + j * words + w, words,
                       panels + j / width * width * words + w * width + j % width, width);
}

// packed[j / 2][c] = columns c of rows j and j + 1 in one word; zeros where there is no such column, or no row j + 1.
template <class T>
static void qa_pack_values(const T* values, int64_t stride, int64_t count, int64_t live_columns, int64_t columns,
                           float* packed) {
    for (int64_t j = 0; j < count; j += 2, packed += columns)
        for (int64_t c = 0; c < columns; c += QC_LANES) {
            const T* const row = values + j * stride + c;
            const int n = (int)qc_max(0, qc_min(QC_LANES, live_columns - c));
            const qu words = n == QC_LANES && j + 1 < count
                ? qb_beside(row, row + stride)
                : qb_pairs(vload_upto(row, n), vload_upto(row + (j + 1 < count ? stride : 0), j + 1 < count ? n : 0));
            q_store((int32_t*)packed + c, (qi)words);
        }
}

// Tiles [c / 16][j / 32] of words of two keys, `next` bytes from one block of columns to the next; zeros where there is
// no such key or column.
template <class T> static void qa_put_values(
    const T* values, int64_t stride, int64_t count, int64_t live, int64_t columns, int64_t next, char* tiles) {
    for (int64_t j = 0; j < (count + 31) / 32 * 32; j += 2)
        for (int64_t c = 0; c < columns; c += 16) {
            const T* const row = values + j * stride + c;
            const int n = j < count ? (int)qc_max(0, qc_min(16, live - c)) : 0, m = j + 1 < count ? n : 0;
            const qu words = m == 16 ? qb_beside(row, row + stride)
                                     : qb_pairs(vload_upto(row, n), vload_upto(row + (m ? stride : 0), m));
            q_store((int32_t*)(tiles + c / 16 * next + j * 32), (qi)words);
        }
}

// e^x for x <= 0 to 3e-6 of it, far below a rounding to bf16; 1 for 0, zero below -110. A NaN stays one.
QC_INLINE vf qa_exp(vf x) {
    const qf t = q_max(q_set(-160.0f), x.r[0] * 0x1.715476p+0f), n = q_rint(t), f = t - n;
    qf p = q_set(0x1.3a02cap-7f);
    p = q_fma(p, f, q_set(0x1.c9fc46p-5f));
    p = q_fma(p, f, q_set(0x1.ec0378p-3f));
    p = q_fma(p, f, q_set(0x1.62e12cp-1f));
    vf y;
    y.r[0] = q_scale2(q_fma(p, f, q_set(1.0f)), n);
    return y;
}
#endif
