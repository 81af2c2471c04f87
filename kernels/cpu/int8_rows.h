// Rows of int8 (qcompiler/formats/int8_rows.py): how they are made, how their codes are put in the order in which words
// of a weight's codes hold columns, and the sums of groups of their codes.
#pragma once
#include "gemm.h"
#include "rows.h"

enum { QI_RUN = 32 };  // columns of a sum that a row brings along

typedef int8_t qi_bytes __attribute__((vector_size(16)));
typedef int16_t qi_shorts __attribute__((vector_size(32)));
typedef int16_t qi_run_sum __attribute__((aligned(1), may_alias));  // of a run, behind the codes and the scale of a row

constexpr int64_t qi_padded(int64_t k) { return (k + 63) / 64 * 64; }
// Bytes behind the codes of a row: its scale, and the sums of its runs.
constexpr int64_t qi_behind(int64_t k) { return 16 + (qi_padded(k) / QI_RUN * 2 + 15) / 16 * 16; }

// --- the order of columns --------------------------------------------------------------------------------------------

// Where byte i of a prepared group of 16 columns comes from. LOW bits: the widest plane's.
template <int LOW, int STEP> constexpr int qi_source(int i) {
    const int step = i / 4, j = STEP == 8 ? (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4) : i % 4;
    const int per = 32 / LOW, steps = per / 4;
    return step / steps * per + j * steps + step % steps;
}

#if defined(QC_AVX512)
template <int LOW, int STEP> struct qi_sources {
    uint8_t byte[16];
    constexpr qi_sources() : byte() {
        for (int i = 0; i < 16; i++) byte[i] = (uint8_t)qi_source<LOW, STEP>(i);
    }
};
#endif

// `columns` codes of a row, a multiple of 16, as engines take them: STEP bytes for four columns. LINE: bytes from 64
// columns to the next 64; other than 64 for multiples of 64 columns alone.
template <int LOW, int STEP, int64_t LINE = 64> static void qi_prepare(const char* row, int64_t columns, char* to) {
    int64_t k = 0;
#if defined(QC_AVX512)
    if constexpr (STEP == 4) {  // 64 columns at a time, 16 in each lane of 128 bits
        alignas(16) static constexpr qi_sources<LOW, STEP> all{};
        const __m512i from = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)all.byte));
        for (; k + 64 <= columns; k += 64)
            _mm512_storeu_si512(to + k / 64 * LINE, _mm512_shuffle_epi8(_mm512_loadu_si512(row + k), from));
        to += k / 64 * LINE;
    }
#endif
    for (; k < columns; k += 16, to += 4 * STEP) {
        qi_bytes x, moved;
        memcpy(&x, row + k, 16);
#if defined(__clang__)
        for (int i = 0; i < 16; i++) moved[i] = x[qi_source<LOW, STEP>(i)];
#else
        const qi_bytes from = {
            qi_source<LOW, STEP>(0), qi_source<LOW, STEP>(1), qi_source<LOW, STEP>(2), qi_source<LOW, STEP>(3),
            qi_source<LOW, STEP>(4), qi_source<LOW, STEP>(5), qi_source<LOW, STEP>(6), qi_source<LOW, STEP>(7),
            qi_source<LOW, STEP>(8), qi_source<LOW, STEP>(9), qi_source<LOW, STEP>(10), qi_source<LOW, STEP>(11),
            qi_source<LOW, STEP>(12), qi_source<LOW, STEP>(13), qi_source<LOW, STEP>(14), qi_source<LOW, STEP>(15)};
        moved = __builtin_shuffle(x, from);
#endif
        if (STEP == 4) {
            memcpy(to, &moved, 16);
        } else {
            const qi_shorts wide = __builtin_convertvector(moved, qi_shorts);
            memcpy(to, &wide, 32);
        }
    }
}

// --- sums of groups --------------------------------------------------------------------------------------------------

// The sum of 16 codes.
QC_INLINE int32_t qi_sum16(const char* codes) {
#if defined(__SSE2__)
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i*)codes), _mm_set1_epi8((char)0x80));  // plus 128
    const __m128i halves = _mm_sad_epu8(bytes, _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 128;
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += (int8_t)codes[i];
    return sum;
#endif
}

// The sums of the runs of `padded` codes, for which there is room in units of 16 bytes.
QC_INLINE void qi_add_runs(const char* codes, int64_t padded, qi_run_sum* to) {
#if defined(QC_AVX512)
    const __m512i bytes = _mm512_set1_epi8(1), pairs = _mm512_set1_epi16(1);
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (int64_t k = 0; k < padded; k += 256) {  // eight runs, whose halves of 16 codes are lanes of 128 bits
        __m512i sum[4];
        QG_UNROLL for (int i = 0; i < 4; i++) {
            const __m512i x = k + 64 * i < padded ? _mm512_loadu_si512(codes + k + 64 * i) : _mm512_setzero_si512();
            sum[i] = _mm512_madd_epi16(_mm512_maddubs_epi16(bytes, x), pairs);
        }
        const __m512i first = _mm512_madd_epi16(_mm512_packs_epi32(sum[0], sum[1]), pairs);
        const __m512i last = _mm512_madd_epi16(_mm512_packs_epi32(sum[2], sum[3]), pairs);
        const __m512i all = _mm512_madd_epi16(_mm512_packs_epi32(first, last), pairs);
        const __m512i halves = _mm512_permutexvar_epi32(order, all);
        const __m256i both =
            _mm256_add_epi32(_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64(halves, 1));
        _mm_storeu_si128((__m128i*)(to + k / QI_RUN), _mm256_cvtepi32_epi16(both));
    }
#else
    for (int64_t k = 0; k < padded; k += QI_RUN)
        to[k / QI_RUN] = (int16_t)(qi_sum16(codes + k) + qi_sum16(codes + k + 16));
#endif
}

// The sums of the codes of each `span` columns of a row, which is SHARED of a weight unless that is 0 (all columns).
// The row's codes are `padded` bytes with zeros at their end, and the sums of its runs lie behind them.
template <int64_t SHARED>
static void qi_sums(const char* row, int64_t padded, int64_t columns, int64_t span, int32_t* to) {
    const qi_run_sum* const runs = (const qi_run_sum*)(row + padded + 16);
    if constexpr (SHARED % QI_RUN != 0) {
        static_assert(SHARED == QI_RUN / 2, "groups are half a run or whole runs");
        for (int64_t k = 0; k < columns; k += SHARED) *to++ = qi_sum16(row + k);
    } else if constexpr (SHARED == QI_RUN) {
        for (int64_t run = 0, end = (columns + QI_RUN - 1) / QI_RUN; run < end; run++) to[run] = runs[run];
    } else {
        int64_t run = 0;
        for (int64_t k = 0; k < columns; k += span) {
            int32_t sum = 0;
            for (const int64_t end = (qc_min(k + span, columns) + QI_RUN - 1) / QI_RUN; run < end; run++)
                sum += runs[run];
            *to++ = sum;
        }
    }
}

// --- making rows -----------------------------------------------------------------------------------------------------

enum { QI_TOKEN = 0, QI_TENSOR = 1, QI_OUTLIERS = 2, QI_IMAGE = 3 };

// Codes of sixteen quotients, rounded to nearest even.
QC_INLINE void qi_store_codes(int8_t* p, vf x) {
#if defined(QC_AVX512)
    const __m512i codes = _mm512_cvt_roundps_epi32(x.r[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(codes));
#else
    vstore(p, vtoint(vrint(x)));
#endif
}

// One row of `cols` elements: formats/int8_rows.py. `factor` and `fixed` are those of QI_TENSOR, `threshold` that of
// QI_OUTLIERS, whose `columns` have codes 0. For QI_IMAGE, `fixed` is the largest magnitude of the image.
template <int KIND, class T> static void qi_quantise_row(
    const T* x, int64_t cols, float factor, float fixed, float threshold, const bool* columns, int8_t* row) {
    const int64_t padded = qi_padded(cols);
    const auto read = [&](int64_t k, int n) QC_BODY {
        const vf v = vload_upto(x + k, n);
        return KIND == QI_OUTLIERS ? vsel(vle(vset(threshold), vabs(v)), vzero(), v) : v;
    };
    int32_t most = 0;
    if constexpr (KIND == QI_IMAGE) {
        most = (int32_t)(qc_bits(fixed) & 0x7fffffffu);
    } else {
        vi top = vset((int32_t)0);  // magnitudes as integers: a NaN is above infinity, which is above all others
        qc_columns(cols, [&](int64_t k, int n) QC_BODY {
            top = vmax(top, vbits(vabs(read(k, n))));
        });
        int32_t lanes[16];
        vstore(lanes, top);
        for (int l = 0; l < 16; l++) most = lanes[l] > most ? lanes[l] : most;
    }
    constexpr bool DIVIDES = KIND == QI_TOKEN || KIND == QI_IMAGE;
    const bool finite = most < 0x7f800000;
    const float largest = qc_from_bits((uint32_t)most);
    float scale = KIND == QI_TENSOR ? fixed : largest / 127.0f;
    if (DIVIDES && !(scale > 0.0f)) scale = 1.0f;
    const float inverse = largest < 3.8e-37f ? 0.0f : 127.0f / largest;
    const float by = DIVIDES ? scale : KIND == QI_TENSOR ? factor : inverse;
    memset(row + cols, 0, (size_t)(padded - cols));
    if (finite) {
        qc_columns(cols, [&](int64_t k, int n) QC_BODY {
            const vf v = read(k, n);
            vf code = DIVIDES ? v / vset(by) : v * vset(by);
            if (KIND == QI_OUTLIERS) code = vsel(vload_upto(columns + k, n), vzero(), code);
            code = vmax(vmin(code, vset(127.0f)), vset(-127.0f));
            if (n == 16) return qi_store_codes(row + k, code);
            int8_t last[16];
            qi_store_codes(last, code);
            memcpy(row + k, last, (size_t)n);
        });
    } else {
        memset(row, 0, (size_t)cols);
        scale = qc_from_bits(0x7fc00000u);
    }
    int8_t* const behind = row + padded;
    memset(behind, 0, (size_t)qi_behind(cols));
    memcpy(behind, &scale, 4);
    qi_add_runs((const char*)row, padded, (qi_run_sum*)(behind + 16));
}
