// Rows of tables, plain or packed: what the `embedding` template reads. A packed row's function is printed from the
// format's declaration (kernels/cpu/row_reader.py); here is what it calls.
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

// --- entries that do not simply stand side by side (canonical bytes) -------------------------------------------------

// Entry `index` of a stream of BITS bits each, in whole bytes; the first of a byte is its highest or its lowest.
template <int BITS, bool HIGH_FIRST> QC_INLINE uint32_t qg_bits(const uint8_t* from, int64_t index) {
    constexpr int PER = 8 / BITS;
    const int place = (int)((uint64_t)index % PER);
    return from[(uint64_t)index / PER] >> (HIGH_FIRST ? PER - 1 - place : place) * BITS & ((1 << BITS) - 1);
}

// An entry in COUNT pieces of bits: of a byte, from bit `shift` on, to bit `place` of the entry.
struct qg_piece { uint16_t byte; uint8_t shift, mask, place; };
template <int COUNT> struct qg_pieces { qg_piece piece[COUNT]; };
template <int COUNT> QC_INLINE uint32_t qg_packed_entry(const qg_pieces<COUNT>& at, const uint8_t* from) {
    uint32_t entry = 0;
    for (int i = 0; i < COUNT; i++) {
        const qg_piece p = at.piece[i];
        entry |= (uint32_t)(from[p.byte] >> p.shift & p.mask) << p.place;
    }
    return entry;
}

// The code of element `i` of a block: its digit of a codebook's vector, WIDTH of the bits of a word, and above it its
// flag, the parity of its bits (none where `flags` is null).
template <int SIZE, int WIDTH, int A, int B>
QC_INLINE uint32_t qg_vector_code(
    const uint16_t* words, const qg_pieces<A>* index, const qg_pieces<B>* flags, int64_t i, const uint8_t* from) {
    const uint32_t digits = words[qg_packed_entry(index[(uint64_t)i / SIZE], from)];
    const uint32_t digit = digits >> ((uint64_t)i % SIZE * WIDTH) & ((1u << WIDTH) - 1);
    return flags ? digit | (uint32_t)__builtin_parity(qg_packed_entry(flags[i], from)) << WIDTH : digit;
}
// Where a column of a block of a trellis stands: at which of the 64 places of its sequence; and back.
QC_INLINE int qg_place_of(int64_t k) {
    const int column = (int)((uint64_t)k % 256);
    return column / 16 * 4 + column % 16 / 8 * 2 + column % 2;
}
QC_INLINE int64_t qg_column_of(int64_t k, int place) {
    const int column = (int)((uint64_t)k % 256);
    return k - column + place / 4 * 16 + place % 4 / 2 * 8 + column % 8 / 2 * 2 + place % 2;
}
// The window of column k: `code` gives the code of a column.
template <int BITS, int CODES, class F> QC_INLINE uint32_t qg_trellis_window(int64_t k, F code) {
    uint32_t window = 0;
    for (int back = 0; back < CODES; back++)
        window |= code(qg_column_of(k, (qg_place_of(k) + 64 - back) % 64)) << BITS * (CODES - 1 - back);
    return window;
}
// The code of a trellis in panels (decode.h, `qg_sequences`).
template <int BITS>
QC_INLINE uint32_t qg_sequence_code(
    const uint32_t* words, const uint32_t* highest, int64_t cols, int64_t row, int64_t k) {
    constexpr int GROUP = BITS == 4 ? 16 : 32;
    const int sequence = (int)((uint64_t)k % 8 / 2), place = qg_place_of(k) % (GROUP / 4);
    const int64_t group = row / 16 * (cols / GROUP) + k / GROUP;
    uint32_t stream = words[(group * 2 + sequence / 2) * 16 + row % 16] >> sequence % 2 * 16 & 0xffff;
    if constexpr (BITS == 3) stream |= (highest[group * 16 + row % 16] >> 8 * sequence & 255) << 16;
    return stream >> BITS * place & ((1u << BITS) - 1);
}
QC_INLINE float qg_half(uint32_t bits) { const uint16_t half = (uint16_t)bits; return qg_entry((const qc_f16*)&half); }

// A base-3 digit of a byte that is a fraction of 256 (tq1_0); `power` is 3 to the number of digits before it.
struct qg_trit { uint16_t byte; uint8_t power; };
QC_INLINE uint32_t qg_packed_entry(const qg_trit& at, const uint8_t* from) {
    return (from[at.byte] * at.power & 255) * 3 >> 8;
}

// Entry number `entry` of a row whose entries of 4 or 6 bits share bytes, 16 of them apart (decode.h, `qg_of_two`).
template <int BITS> QC_INLINE int32_t qg_joined_of(const uint8_t* row, int64_t entry) {
    if constexpr (BITS == 4) return row[entry / 2 * 16] >> (entry % 2 * 4) & 15;
    const uint8_t* const four = row + entry / 4 * 48;
    const int low = four[entry % 4 / 2 * 16] >> (entry % 2 * 4) & 15;
    return low | (four[32] >> (entry % 4 * 2) & 3) << 4;
}

// --- rows ------------------------------------------------------------------------------------------------------------

// A row of plain values `stride` apart.
template <class T, class OUT> static void ql_plain_row(const T* from, int64_t stride, int64_t cols, OUT* out) {
    for (int64_t k = 0; k < cols; k += 16) {
        const int lanes = (int)qc_min(cols - k, 16);
        const vf x = stride == 1 ? qg_load_lanes(from + k, lanes) : vload_s(from + k * stride, stride, lanes);
        qg_store_lanes(out + k, x, lanes);
    }
}

template <class OUT> static void ql_zero_row(int64_t cols, OUT* out) { memset(out, 0, cols * sizeof *out); }
