// The layouts cpu_p16_v1 and cpu_p16_v2 in C++: the same bytes as kernels/layouts/cpu.py, section by section.
//
// Rows are taken in panels of 16 (one row per lane); lanes past the last row and codes past the last column are zero
// bytes. Every function works on panels [begin, end), so that threads can share a tensor; no two panels touch the same
// byte on either side. `src` and `dst` are the starts of whole sections.
#pragma once
#include <stdint.h>

namespace qc_layout {

constexpr int64_t LANES = 16;

inline int64_t panels(int64_t rows) { return (rows + LANES - 1) / LANES; }

// Values, scales and zero points: [rows][cols] <-> [panel][cols][16].
template <class T>
inline void p16_pack_items(const T* src, int64_t rows, int64_t cols, T* dst, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
        for (int64_t c = 0; c < cols; ++c)
            for (int64_t r = 0; r < LANES; ++r) {
                const int64_t row = p * LANES + r;
                dst[(p * cols + c) * LANES + r] = row < rows ? src[row * cols + c] : T(0);
            }
}

template <class T>
inline void p16_unpack_items(const T* src, int64_t rows, int64_t cols, T* dst, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
        for (int64_t r = 0; r < LANES && p * LANES + r < rows; ++r)
            for (int64_t c = 0; c < cols; ++c) dst[(p * LANES + r) * cols + c] = src[(p * cols + c) * LANES + r];
}

// Codes of BITS bits in 32-bit words, LSB first: [panel][ceil(cols / (32 / BITS))][16].
constexpr int64_t words(int64_t cols, int bits) { return (cols * bits + 31) / 32; }

// Canonical 4-bit codes are one stream of nibbles over all rows; `high_first` says that the even index is the high one.
inline uint32_t nibble(const uint8_t* src, int64_t index, bool high_first) {
    return (src[index >> 1] >> (((index & 1) != 0) != high_first ? 4 : 0)) & 15u;
}

inline void p16_pack_codes4(const uint8_t* src, bool high_first, int64_t rows, int64_t cols, uint32_t* dst,
                            int64_t begin, int64_t end) {
    const int64_t count = words(cols, 4);
    for (int64_t p = begin; p < end; ++p)
        for (int64_t g = 0; g < count; ++g)
            for (int64_t r = 0; r < LANES; ++r) {
                const int64_t row = p * LANES + r;
                uint32_t word = 0;
                for (int64_t j = 0; j < 8 && row < rows && 8 * g + j < cols; ++j)
                    word |= nibble(src, row * cols + 8 * g + j, high_first) << (4 * j);
                dst[(p * count + g) * LANES + r] = word;
            }
}

// `pad_code` fills the unused half of the last byte when rows * cols is odd. Sixteen rows are a whole number of bytes
// for any `cols`, so that panels do not share one.
inline void p16_unpack_codes4(const uint32_t* src, bool high_first, uint8_t pad_code, int64_t rows, int64_t cols,
                              uint8_t* dst, int64_t begin, int64_t end) {
    const int64_t count = words(cols, 4);
    const int64_t last = end * LANES < rows ? end * LANES : rows;
    const int64_t stop = last * cols;
    auto code = [&](int64_t index) -> uint32_t {
        if (index >= stop) return pad_code;
        const int64_t row = index / cols, k = index % cols;
        return (src[((row / LANES) * count + k / 8) * LANES + row % LANES] >> (4 * (k % 8))) & 15u;
    };
    for (int64_t i = begin * LANES * cols; i < stop; i += 2) {
        const uint32_t even = code(i), odd = code(i + 1);
        dst[i >> 1] = (uint8_t)(high_first ? (even << 4 | odd) : (odd << 4 | even));
    }
}

inline void p16_pack_codes8(const uint8_t* src, int64_t rows, int64_t cols, uint32_t* dst, int64_t begin, int64_t end) {
    const int64_t count = words(cols, 8);
    for (int64_t p = begin; p < end; ++p)
        for (int64_t g = 0; g < count; ++g)
            for (int64_t r = 0; r < LANES; ++r) {
                const int64_t row = p * LANES + r;
                uint32_t word = 0;
                for (int64_t j = 0; j < 4 && row < rows && 4 * g + j < cols; ++j)
                    word |= (uint32_t)src[row * cols + 4 * g + j] << (8 * j);
                dst[(p * count + g) * LANES + r] = word;
            }
}

inline void p16_unpack_codes8(const uint32_t* src, int64_t rows, int64_t cols, uint8_t* dst, int64_t begin,
                              int64_t end) {
    const int64_t count = words(cols, 8);
    for (int64_t p = begin; p < end; ++p)
        for (int64_t r = 0; r < LANES && p * LANES + r < rows; ++r)
            for (int64_t k = 0; k < cols; ++k)
                dst[(p * LANES + r) * cols + k] = (uint8_t)(src[(p * count + k / 4) * LANES + r] >> (8 * (k % 4)));
}

// One plane of codes of any width, which stand in a byte each, [rows][cols]: their bits shift … shift + bits - 1.
inline void p16_pack_plane(const uint8_t* codes, int shift, int bits, int64_t rows, int64_t cols, uint32_t* dst,
                           int64_t begin, int64_t end) {
    const int64_t count = words(cols, bits), per = 32 / bits;
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t p = begin; p < end; ++p)
        for (int64_t g = 0; g < count; ++g)
            for (int64_t r = 0; r < LANES; ++r) {
                const int64_t row = p * LANES + r;
                uint32_t word = 0;
                for (int64_t j = 0; j < per && row < rows && per * g + j < cols; ++j)
                    word |= ((uint32_t)codes[row * cols + per * g + j] >> shift & mask) << (bits * j);
                dst[(p * count + g) * LANES + r] = word;
            }
}

// The inverse: adds the plane's bits to codes whose bits there are zero.
inline void p16_unpack_plane(const uint32_t* src, int shift, int bits, int64_t rows, int64_t cols, uint8_t* codes,
                             int64_t begin, int64_t end) {
    const int64_t count = words(cols, bits), per = 32 / bits;
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t p = begin; p < end; ++p)
        for (int64_t r = 0; r < LANES && p * LANES + r < rows; ++r)
            for (int64_t k = 0; k < cols; ++k) {
                const uint32_t code = src[(p * count + k / per) * LANES + r] >> (bits * (k % per)) & mask;
                codes[(p * LANES + r) * cols + k] |= (uint8_t)(code << shift);
            }
}

// Entries of BITS = 4 or 6 bits, which stand in a byte each, [rows][count], where they share bytes (cpu_p16_v2): two a
// byte with the first one in the low nibble; or of four, two such bytes with their low nibbles, then one with the rest.
constexpr int64_t joined_bytes(int64_t count, int bits) { return bits == 4 ? (count + 1) / 2 : (count + 3) / 4 * 3; }

inline void p16_pack_joined(const uint8_t* src, int bits, int64_t rows, int64_t count, uint8_t* dst, int64_t begin,
                            int64_t end) {
    const int64_t nbytes = joined_bytes(count, bits);
    for (int64_t p = begin; p < end; ++p)
        for (int64_t b = 0; b < nbytes; ++b)
            for (int64_t r = 0; r < LANES; ++r) {
                const int64_t row = p * LANES + r;
                auto entry = [&](int64_t e) { return row < rows && e < count ? (int)src[row * count + e] : 0; };
                int byte = 0;
                if (bits == 6 && b % 3 == 2)
                    for (int64_t j = 0; j < 4; ++j) byte |= entry(b / 3 * 4 + j) >> 4 << (2 * j);
                else {
                    const int64_t e = bits == 4 ? 2 * b : b / 3 * 4 + b % 3 * 2;
                    byte = (entry(e) & 15) | (entry(e + 1) & 15) << 4;
                }
                dst[(p * nbytes + b) * LANES + r] = (uint8_t)byte;
            }
}

inline void p16_unpack_joined(const uint8_t* src, int bits, int64_t rows, int64_t count, uint8_t* dst, int64_t begin,
                              int64_t end) {
    const int64_t nbytes = joined_bytes(count, bits);
    for (int64_t p = begin; p < end; ++p)
        for (int64_t r = 0; r < LANES && p * LANES + r < rows; ++r)
            for (int64_t e = 0; e < count; ++e) {
                const uint8_t* const row = src + p * nbytes * LANES + r;
                const int64_t low = bits == 4 ? e / 2 : e / 4 * 3 + e % 4 / 2;
                int entry = row[low * LANES] >> (e % 2 * 4) & 15;
                if (bits == 6) entry |= (row[(e / 4 * 3 + 2) * LANES] >> (e % 4 * 2) & 3) << 4;
                dst[(p * LANES + r) * count + e] = (uint8_t)entry;
            }
}

}  // namespace qc_layout
