// Attention of one query by tiles of AMX: sixteen keys times the query heads that share them, and their weights times
// sixteen columns of values. Keys are the rows of a product, so that nothing of them is transposed.
#pragma once
#include "amx.h"
#include "attention_bf16.h"

#if defined(QC_AVX512) && !defined(QB_NO_BF16)

// Bytes of a tile; keys of a tile of keys, and of a tile of values.
enum { QAD_TILE = 1024, QAD_KEYS = 16, QAD_PAIR = 32 };

// Tile 0 has scores of 16 keys, 1 keys, 2 queries; 3 has weights of the heads, 4 and 7 values, 5 and 6 sums. Fewer than
// 16 heads take less time.
QC_INLINE qa_shape qad_shape(int64_t heads) {
    qa_shape shape;
    for (int t = 0; t < 8; t++) {
        shape.row_bytes[t] = 64;
        shape.rows[t] = (uint8_t)(t == 3 || t == 5 || t == 6 ? heads : 16);
    }
    return shape;
}

// Tiles [d / 32] of words of two columns of the queries in `rounded`, `heads` rows of `columns` bf16; zeros for other
// heads.
static void qad_put_queries(const uint16_t* rounded, int64_t heads, int64_t columns, char* tiles) {
    for (int64_t d = 0; d < columns; d += 32)
        vtranspose((const float*)(rounded + d), columns / 2, (float*)(tiles + d * 32), 16, (int)heads);
}

// --- numbers of a cache ----------------------------------------------------------------------------------------------

// The element type of rows in 4 bits: pointers to it count bytes.
struct qc_code_int4 {
    int8_t bits;
};
template <class T> struct qad_in_groups { static constexpr bool value = false; };
template <> struct qad_in_groups<qc_code_int4> { static constexpr bool value = true; };

// Thirty-two numbers of a row of `cols`, from column d on, rounded to bf16.
template <class T> QC_INLINE __m512i qad_numbers(const T* row, int64_t, int64_t d) { return qa_numbers(row + d); }
// Words of sixteen numbers of a row and of the next one, from column c on.
template <class T> QC_INLINE qu qad_words(const T* row, const T* next, int64_t, int64_t c) {
    return qb_beside(row + c, next + c);
}

// The sixteen values of codes of 4 bits in the group of 32 columns that column d belongs to.
QC_INLINE qf qad_levels(const qc_code_int4* row, int64_t cols, int64_t d) {
    const qf codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint32_t scales;  // cache.h
    memcpy(&scales, row + qc_group_scales_at(cols) + d / 32 * 4, sizeof scales);
    return q_fma(codes, q_set(qc_from_bits(scales << 16)), q_set(qc_from_bits(scales & 0xffff0000u)));
}
QC_INLINE __m512i qad_numbers(const qc_code_int4* row, int64_t cols, int64_t d) {
    const qu bytes = (qu)vload((const uint8_t*)row + d / 2).r[0], codes = (bytes | bytes << 12) & 0x000f000f;
    const qf levels = qad_levels(row, cols, d);
    return _mm512_permutexvar_epi16((__m512i)codes, qb_in_order(levels, levels));
}
QC_INLINE qu qad_words(const qc_code_int4* row, const qc_code_int4* next, int64_t cols, int64_t c) {
    const qu low = (qu)vnibbles((const int8_t*)row + c / 2).r[0], high = (qu)vnibbles((const int8_t*)next + c / 2).r[0];
    const __m512i levels = qb_in_order(qad_levels(row, cols, c), qad_levels(next, cols, c));
    return (qu)_mm512_permutexvar_epi16((__m512i)(low | high << 16 | 0x00100000), levels);
}

// The same for 32 columns: words of the first sixteen, and of the others.
struct qad_both {
    qu low, high;
};
template <class T> QC_INLINE qad_both qad_words_of_32(const T* row, const T* next, int64_t, int64_t c) {
    return {qb_beside(row + c, next + c), qb_beside(row + c + 16, next + c + 16)};
}
QC_INLINE qad_both qad_woven(__m512i row, __m512i next) {
    alignas(64) static const uint16_t low[32] = {
        0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
    };
    const __m512i from = _mm512_load_si512(low), behind = _mm512_add_epi16(from, _mm512_set1_epi16(16));
    return {(qu)_mm512_permutex2var_epi16(row, from, next), (qu)_mm512_permutex2var_epi16(row, behind, next)};
}
QC_INLINE qad_both qad_words_of_32(const qc_code_int4* row, const qc_code_int4* next, int64_t cols, int64_t c) {
    return qad_woven(qad_numbers(row, cols, c), qad_numbers(next, cols, c));
}
QC_INLINE qad_both qad_words_of_32(const qc_code_fp8* row, const qc_code_fp8* next, int64_t cols, int64_t c) {
    return qad_woven(qad_numbers(row, cols, c), qad_numbers(next, cols, c));
}

// --- products --------------------------------------------------------------------------------------------------------

// Asks for one line of the row that lies `ahead` bytes further on, in the second cache, while this one is computed.
// Where many are asked for at once, memory has nothing to do in between.
template <class T> QC_INLINE void qad_ahead(const T* row, int64_t stride, int64_t at, int64_t ahead) {
    if (qad_in_groups<T>::value ? at == 0 : at * sizeof(T) % 64 == 0)
        __builtin_prefetch((const char*)(row + (qad_in_groups<T>::value ? 0 : at)) + ahead, 0, 2);
    if (qad_in_groups<T>::value && at == 0 && stride > 64) __builtin_prefetch((const char*)row + ahead + 64, 0, 2);
}

// Columns d to d + 31 of sixteen keys of `cols` columns, rounded to bf16: a tile in `tile`. `live` keys are there, with
// zeros behind them. Columns behind the last one are zeros, or in 4 bits the least number of their group: there the
// queries are zeros.
template <class T> QC_INLINE void qad_round(
    const T* keys, int64_t stride, int64_t live, int64_t cols, int64_t d, char* tile, int64_t ahead) {
    if constexpr (!qad_in_groups<T>::value) {
        if (live < QAD_KEYS || cols - d < 32) {
            qa_round_rows(keys + d, stride, live, QAD_KEYS, qc_min(32, cols - d), 32, (uint16_t*)tile);
            return;
        }
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < QAD_KEYS; r++) {
        const T* const row = keys + r * stride;
        if (r < live) {
            qad_ahead(row, stride, d, ahead);
            q_store((int32_t*)(tile + r * 64), (qi)qad_numbers(row, cols, d));
        } else {
            memset(tile + r * 64, 0, 64);
        }
    }
}

// scores[key][head] of sixteen keys. Keys become tiles one after the other in `tiles`: then no pause between products
// is long (attention_amx.h).
template <class T> static void qad_scores(const T* keys, int64_t stride, int64_t live, int64_t cols,
                                          const char* queries, char* tiles, float* scores, int64_t ahead) {
    qa_zero<0>();
    for (int64_t d = 0; d < cols; d += 32) {
        char* const tile = tiles + d * 32;
        const void* at = tile;
        int64_t pitch = 64;
        if (qb_same<T>::value && live == QAD_KEYS && cols - d >= 32) {
            at = keys + d, pitch = stride * 2;
            for (int64_t r = 0; r < QAD_KEYS; r++) qad_ahead(keys + r * stride, stride, d, ahead);
        } else {
            qad_round(keys, stride, live, cols, d, tile, ahead);
        }
        qa_load<1>(at, pitch);
        qa_load<2>(queries + d * 32, 64);
        qa_dot_bf16<0, 1, 2>();
    }
    qa_store<0>(scores, 64);
}

// Words of columns c to c + 15 of up to 32 rows of values of `cols` columns: a tile, with zeros where there is no
// such row or column.
template <class T> QC_INLINE void qad_put_values(
    const T* values, int64_t stride, int64_t count, int64_t cols, int64_t c, char* tile, int64_t ahead) {
    if (count >= QAD_PAIR && (qad_in_groups<T>::value || cols - c >= 16)) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < QAD_PAIR; i += 2) {
            const T *const row = values + i * stride, *const next = row + stride;
            qad_ahead(row, stride, c, ahead), qad_ahead(next, stride, c, ahead);
            q_store((int32_t*)(tile + i * 32), (qi)qad_words(row, next, cols, c));
        }
        return;
    }
    if constexpr (qad_in_groups<T>::value) {
        for (int64_t i = 0; i < QAD_PAIR; i += 2) {
            const T* const row = values + i * stride;
            qu words = {};
            if (i < count) words = qad_words(row, i + 1 < count ? row + stride : row, cols, c);
            if (i + 1 == count) words = words & 0xffff;
            q_store((int32_t*)(tile + i * 32), (qi)words);
        }
    } else {
        qa_put_values(values + c, stride, qc_min(QAD_PAIR, count), cols - c, 16, QAD_TILE, tile);
    }
}

// The same for columns c to c + 31, as two tiles.
template <class T> QC_INLINE void qad_put_pair(
    const T* values, int64_t stride, int64_t count, int64_t cols, int64_t c, char* tile, char* other, int64_t ahead) {
    if (count < QAD_PAIR || cols - c < 32) {
        qad_put_values(values, stride, count, cols, c, tile, ahead);
        return qad_put_values(values, stride, count, cols, c + 16, other, 0);
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < QAD_PAIR; i += 2) {
        const T *const row = values + i * stride, *const next = row + stride;
        qad_ahead(row, stride, c, ahead), qad_ahead(next, stride, c, ahead);
        if (sizeof(T) > 2) qad_ahead(row, stride, c + 16, ahead), qad_ahead(next, stride, c + 16, ahead);
        const qad_both words = qad_words_of_32(row, next, cols, c);
        q_store((int32_t*)(tile + i * 32), (qi)words.low);
        q_store((int32_t*)(other + i * 32), (qi)words.high);
    }
}

// sums[head][c] += weights[head][key] values[key][c] for `count` keys and all `cols` columns. Rows of weights lie
// `pitch` bytes apart, those of sums `columns` floats. `tiles` has room for two of 32 keys each.
template <class T> static void qad_values(const char* weights, int64_t pitch, const T* values, int64_t stride,
                                          int64_t count, int64_t cols, char* tiles, float* sums, int64_t columns,
                                          int64_t ahead) {
    for (int64_t c = 0; c < columns; c += 32) {
        const bool two = c + 16 < columns;
        char* tile = tiles;
        qa_load<5>(sums + c, 4 * columns);
        if (two) qa_load<6>(sums + c + 16, 4 * columns);
        for (int64_t j = 0; j < count; j += QAD_PAIR, tile += 2 * QAD_TILE) {
            const T* const rows = values + j * stride;
            if (two) qad_put_pair(rows, stride, count - j, cols, c, tile, tile + QAD_TILE, ahead);
            else qad_put_values(rows, stride, count - j, cols, c, tile, ahead);
            qa_load<3>(weights + 2 * j, pitch);
            qa_load<4>(tile, 64);
            qa_dot_bf16<5, 3, 4>();
            if (two) qa_load<7>(tile + QAD_TILE, 64), qa_dot_bf16<6, 3, 7>();
        }
        qa_store<5>(sums + c, 4 * columns);
        if (two) qa_store<6>(sums + c + 16, 4 * columns);
    }
}
#endif
