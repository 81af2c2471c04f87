// Rows of tables, plain or packed: what the `embedding` template reads. 16 columns at a time, decoded with the same
// operations in the same order as the format's decoder.
#pragma once
#include "gemm.h"

// Notes an id outside [0, limit); the first one stays.
QC_COLD void ql_report(qc_ctx* ctx, int64_t id, int64_t limit) {
    int32_t none = QC_OK;
    if (!__atomic_compare_exchange_n(
            &ctx->error_code, &none, QC_INDEX_OUT_OF_RANGE, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    ctx->error_value = id;
    ctx->error_limit = limit;
}

struct ql_table {
    const char* codes;   // or plain values
    const char* scales;
    const uint8_t* zeros;
    const float* values;  // of 4-bit codes
    int64_t cols, kb;     // kb: columns per scale, or elements of a flat block (a power of two)
};

// --- codes: 16 from column k of a row; lanes past the last column hold anything --------------------------------------

// cpu_p16_v1: words of 8 or 4 codes, row r in lane r % 16 of panel r / 16.
template <int BITS> struct ql_panel_codes {
    const uint32_t* words;
    QG_METHOD void start(const ql_table& t, int64_t row) {
        words = (const uint32_t*)t.codes + row / 16 * ((t.cols + 32 / BITS - 1) / (32 / BITS)) * 16 + row % 16;
    }
    QG_METHOD vi at(const ql_table& t, int64_t k) const {
        constexpr int EACH = 32 / BITS;
        int32_t codes[16];
        const int64_t left = (t.cols - k + EACH - 1) / EACH;
        for (int w = 0; w < 16 / EACH; w++) {
            const uint32_t word = w < left ? words[(k / EACH + w) * 16] : 0;
            for (int j = 0; j < EACH; j++)
                codes[w * EACH + j] = BITS == 4 ? (int32_t)(word >> (4 * j) & 15) : (int32_t)(int8_t)(word >> (8 * j));
        }
        return vload(codes);
    }
};

// Canonical 4-bit codes: one stream of nibbles over all rows.
template <bool HIGH_FIRST> struct ql_nibbles {
    int64_t first;
    QG_METHOD void start(const ql_table& t, int64_t row) { first = row * t.cols; }
    QG_METHOD vi at(const ql_table& t, int64_t k) const {
        int32_t codes[16];
        const uint8_t* bytes = (const uint8_t*)t.codes;
        const int n = (int)qc_min(t.cols - k, 16);
        for (int j = 0; j < 16; j++) {
            const int64_t element = first + k + (j < n ? j : 0);
            codes[j] = bytes[element / 2] >> (((element & 1) != 0) != HIGH_FIRST ? 4 : 0) & 15;
        }
        return vload(codes);
    }
};

// Canonical signed 8-bit codes.
struct ql_bytes {
    const int8_t* codes;
    QG_METHOD void start(const ql_table& t, int64_t row) { codes = (const int8_t*)t.codes + row * t.cols; }
    QG_METHOD vi at(const ql_table& t, int64_t k) const {
        return t.cols - k >= 16 ? vload(codes + k) : vload_n(codes + k, (int)(t.cols - k));
    }
};

// --- scales ----------------------------------------------------------------------------------------------------------

// Which scale serves column k: entry * step + start, one for each kb columns (kb is a multiple of 16, or all columns).
struct ql_blocks {
    int64_t start_, step;
    QG_METHOD int64_t at(const ql_table& t, int64_t k) const { return start_ + k / t.kb * step; }
    QG_METHOD static ql_blocks panels(const ql_table& t, int64_t row) {
        return {row / 16 * ((t.cols + t.kb - 1) / t.kb) * 16 + row % 16, 16};
    }
    QG_METHOD static ql_blocks rows(const ql_table& t, int64_t row) { return {row * ((t.cols + t.kb - 1) / t.kb), 1}; }
};

// --- one row ---------------------------------------------------------------------------------------------------------

QC_INLINE vf ql_look(const qg_table& values, vi codes) {
    qg_words w;
    memcpy(&w, &codes, sizeof w);
    return values.template look<0>(w);
}

// A row of codes with scales (S: float or qc_f16) by blocks of its columns, (value(code) - zero) * scale.
template <int BITS, class CODES, class S, bool ZEROS, int ROUND, class OUT>
static void ql_row(const ql_table& t, int64_t row, const ql_blocks& blocks, OUT* out) {
    CODES codes;
    codes.start(t, row);
    qg_table values;
    if (BITS == 4) values.load(t.values);
    for (int64_t k = 0; k < t.cols; k += 16) {
        const vi code = codes.at(t, k);
        const int64_t entry = blocks.at(t, k);
        vf x = BITS == 4 ? ql_look(values, code) : vtofloat(code);
        if (ZEROS) x = x - vset((float)t.zeros[entry]);
        x = x * vset(qc_load((const S*)t.scales + entry));
        qg_store_lanes(out + k, qg_round<ROUND>(x), (int)qc_min(t.cols - k, 16));
    }
}

// A row of 4-bit codes whose flat blocks of kb >= 64 elements run across rows: 16 columns meet at most two blocks.
template <class CODES, int ROUND, class OUT> static void ql_flat_row(const ql_table& t, int64_t row, OUT* out) {
    CODES codes;
    codes.start(t, row);
    qg_table values;
    values.load(t.values);
    const float* absmax = (const float*)t.scales;
    for (int64_t k = 0; k < t.cols; k += 16) {
        const int lanes = (int)qc_min(t.cols - k, 16);
        const int64_t element = row * t.cols + k, block = element / t.kb, left = (block + 1) * t.kb - element;
        const vf here = vset(absmax[block]), next = vset(left < lanes ? absmax[block + 1] : 0.0f);
        const vf scale = vsel(vfirst((int)qc_min(left, 16)), here, next);
        qg_store_lanes(out + k, qg_round<ROUND>(ql_look(values, codes.at(t, k)) * scale), lanes);
    }
}

// A row of plain values `stride` apart.
template <class T, class OUT> static void ql_plain_row(const T* from, int64_t stride, int64_t cols, OUT* out) {
    for (int64_t k = 0; k < cols; k += 16) {
        const int lanes = (int)qc_min(cols - k, 16);
        const vf x = stride == 1 ? qg_load_lanes(from + k, lanes) : vload_s(from + k * stride, stride, lanes);
        qg_store_lanes(out + k, x, lanes);
    }
}

template <class OUT> static void ql_zero_row(int64_t cols, OUT* out) { memset(out, 0, cols * sizeof *out); }
