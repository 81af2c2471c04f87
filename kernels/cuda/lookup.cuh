// Elements by index: what embedding and gather use.
#pragma once
#include "device.cuh"

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

// The bits of element `index` of a stream of BITS-bit entries in bytes.
template <int BITS, bool HIGH_FIRST> QC_DEVICE uint32_t qc_stream_item(const uint8_t* section, int64_t index) {
    if (BITS == 8) return section[index];
    return section[index / 2] >> (((index & 1) != 0) != HIGH_FIRST ? 4 : 0) & 15;
}

// The bits of element (row, column) of a section in cuda_t16_v1 (kernels/layouts/cuda.py), panels of `tiles` tiles.
template <int BITS>
QC_DEVICE uint32_t qc_tile_item(const uint8_t* section, int64_t tiles, int64_t row, int64_t column) {
    constexpr int COLUMNS = 256 / BITS;  // of a tile: 512 bytes, 16 rows
    const int r = (int)(row % 16), c = (int)(column % COLUMNS);
    const uint32_t* const tile = (const uint32_t*)section + (row / 16 * tiles + column / COLUMNS) * 128;
    if (BITS == 32) return tile[(r % 8 * 4 + c % 4) * 4 + r / 8 + c / 4 * 2];
    const int pair = r / 8 + c % 16 / 8 * 2, lane = r % 8 * 4 + c % 8 / 2, high = c % 2;
    if (BITS == 16) return tile[lane * 4 + pair] >> 16 * high & 0xffff;
    if (BITS == 8) return tile[lane * 4 + c / 16 * 2 + pair / 2] >> (16 * (pair % 2) + 8 * high) & 255;
    return tile[lane * 4 + c / 16] >> (4 * pair + 16 * high) & 15;
}
