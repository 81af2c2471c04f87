// Elements by index: what embedding and gather use.
#pragma once
#include "decode.cuh"

// What stands where an index is out of range: NaN, or the lowest integer (the highest of an unsigned type). A kernel on
// the device has nowhere to report to; a value that cannot be mistaken for data is better than a neighbour's.
QC_DEVICE float qc_poison(const float*) { return NAN; }
QC_DEVICE double qc_poison(const double*) { return (double)NAN; }
QC_DEVICE qc_bf16 qc_poison(const qc_bf16*) { return qc_bf16{0x7fff}; }
QC_DEVICE qc_f16 qc_poison(const qc_f16*) { return qc_f16{0x7fff}; }
QC_DEVICE int64_t qc_poison(const int64_t*) { return (int64_t)1 << 63; }
QC_DEVICE int32_t qc_poison(const int32_t*) { return (int32_t)1 << 31; }
QC_DEVICE int16_t qc_poison(const int16_t*) { return -32768; }
QC_DEVICE int8_t qc_poison(const int8_t*) { return -128; }
QC_DEVICE uint8_t qc_poison(const uint8_t*) { return 255; }
QC_DEVICE bool qc_poison(const bool*) { return false; }

// The bits of element `index` of a stream of BITS-bit entries in bytes: 1, 2, 4 or 8.
template <int BITS, bool HIGH_FIRST> QC_DEVICE uint32_t qc_stream_item(const uint8_t* section, int64_t index) {
    constexpr int PER = 8 / BITS;
    const int place = (int)(index % PER);
    return section[index / PER] >> (HIGH_FIRST ? PER - 1 - place : place) * BITS & ((1 << BITS) - 1);
}

// Entry `index` of a packed table's entries of whole bytes, which begin anywhere.
QC_DEVICE float qc_from_bits(uint32_t bits, const float*) { return __uint_as_float(bits); }
QC_DEVICE qc_f16 qc_from_bits(uint32_t bits, const qc_f16*) { return qc_f16{(uint16_t)bits}; }
QC_DEVICE qc_bf16 qc_from_bits(uint32_t bits, const qc_bf16*) { return qc_bf16{(uint16_t)bits}; }
QC_DEVICE qc_e4m3 qc_from_bits(uint32_t bits, const qc_e4m3*) { return qc_e4m3{(uint8_t)bits}; }
QC_DEVICE qc_e5m2 qc_from_bits(uint32_t bits, const qc_e5m2*) { return qc_e5m2{(uint8_t)bits}; }
QC_DEVICE qc_e8m0 qc_from_bits(uint32_t bits, const qc_e8m0*) { return qc_e8m0{(uint8_t)bits}; }
QC_DEVICE uint8_t qc_from_bits(uint32_t bits, const uint8_t*) { return (uint8_t)bits; }
QC_DEVICE int8_t qc_from_bits(uint32_t bits, const int8_t*) { return (int8_t)bits; }
template <class T> QC_DEVICE T qc_stored_entry(const uint8_t* from, int64_t index, const T* tag) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < (int)sizeof(T); i++) bits |= (uint32_t)from[index * (int)sizeof(T) + i] << 8 * i;
    return qc_from_bits(bits, tag);
}

// Where the bits of an entry stand in its block, lowest first; a base-3 digit of a byte that is a fraction of 256.
struct qc_piece { uint16_t byte; uint8_t shift, mask, place; };
template <int N> struct qc_pieces { qc_piece of[N]; };
struct qc_trit { uint16_t byte; uint8_t power; };
template <int N> QC_DEVICE uint32_t qc_packed_entry(const qc_pieces<N>& at, const uint8_t* block) {
    uint32_t entry = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        entry |= ((uint32_t)block[at.of[i].byte] >> at.of[i].shift & at.of[i].mask) << at.of[i].place;
    return entry;
}
// The code of element `i` of a block: its digit of a codebook's vector, WIDTH of the bits of a word, and above it its
// flag, the parity of its bits (none where `flags` is null).
template <int SIZE, int WIDTH, int A, int B>
QC_DEVICE uint32_t qc_vector_code(
    const uint16_t* words, const qc_pieces<A>* index, const qc_pieces<B>* flags, int64_t i, const uint8_t* block) {
    const uint32_t digits = words[qc_packed_entry(index[i / SIZE], block)];
    const uint32_t digit = digits >> (int)(i % SIZE) * WIDTH & ((1u << WIDTH) - 1);
    return flags ? digit | (uint32_t)(__popc(qc_packed_entry(flags[i], block)) & 1) << WIDTH : digit;
}
// Where a column of a block of a trellis stands: at which of the 64 places of its sequence; and back.
QC_DEVICE int qc_place_of(int64_t k) { return (int)(k % 256) / 16 * 4 + (int)(k % 16) / 8 * 2 + (int)(k % 2); }
QC_DEVICE int64_t qc_column_of(int64_t k, int place) {
    return k - k % 256 + place / 4 * 16 + place % 4 / 2 * 8 + k % 8 / 2 * 2 + place % 2;
}
// The window of column k: `code` gives the code of a column.
template <int BITS, int CODES, class F> QC_DEVICE uint32_t qc_trellis_window(int64_t k, F code) {
    uint32_t window = 0;
#pragma unroll
    for (int back = 0; back < CODES; back++)
        window |= code(qc_column_of(k, (qc_place_of(k) + 64 - back) % 64)) << BITS * (CODES - 1 - back);
    return window;
}
// The code of a trellis in cuda_t16_v1: of (row, k), panels of `tiles` tiles.
template <int BITS>
QC_DEVICE uint32_t qc_sequence_code(
    const uint8_t* section, const uint8_t* other, int64_t tiles, int64_t row, int64_t k) {
    const int half = (int)(row % 16) / 8, place = qc_place_of(k) % 16;
    const int64_t lane = (row / 16 * tiles + k / 64) * 32 + row % 8 * 4 + k % 8 / 2;
    const uint32_t* const words = (const uint32_t*)section + lane * (BITS == 4 ? 4 : 2);
    if constexpr (BITS == 4) return words[place / 4] >> (16 * half + place % 4 * 4) & 15;
    uint64_t stream = words[half];
    if constexpr (BITS == 3) stream |= (uint64_t)(((const uint32_t*)other)[lane] >> 16 * half & 0xffff) << 32;
    return (uint32_t)(stream >> BITS * place) & ((1u << BITS) - 1);
}
QC_DEVICE uint32_t qc_packed_entry(const qc_trit& at, const uint8_t* block) {
    return (block[at.byte] * (uint32_t)at.power & 255u) * 3 >> 8;
}

// The bits of element (row, column) of a section in cuda_t16_v1 (kernels/layouts/cuda.py), panels of `tiles` tiles.
template <int BITS>
QC_DEVICE uint32_t qc_tile_item(const uint8_t* section, int64_t tiles, int64_t row, int64_t column) {
    constexpr int COLUMNS = BITS < 8 ? 64 : 256 / BITS, WORDS = BITS < 4 ? BITS : 4;  // of a tile; of a lane in it
    const int r = (int)(row % 16), c = (int)(column % COLUMNS);
    const uint32_t* const tile = (const uint32_t*)section + (row / 16 * tiles + column / COLUMNS) * 32 * WORDS;
    if (BITS == 32) return tile[(r % 8 * 4 + c % 4) * 4 + r / 8 + c / 4 * 2];
    const int pair = r / 8 + c % 16 / 8 * 2, high = c % 2;
    const uint32_t* const lane = tile + (r % 8 * 4 + c % 8 / 2) * WORDS;
    if (BITS == 16) return lane[pair] >> 16 * high & 0xffff;
    if (BITS == 8) return lane[c / 16 * 2 + pair / 2] >> (16 * (pair % 2) + 8 * high) & 255;
    const int place = BITS * (c / 16 * 4 + pair);  // in words of 16 bits, one for each of two neighbours
    return lane[place / 16] >> (place % 16 + 16 * high) & ((1u << BITS % 32) - 1);
}
