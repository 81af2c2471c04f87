// Linear layers, what both engines share: tiles of cuda_t16_v1 into fp32 values or fragments of `mma`.
//
// A weight is described by a struct W that kernels/cuda/linear.py generates:
//   W::type                     what values are rounded to: float, qc_bf16, qc_f16
//   W::bits, rows, cols, tiles  of a stored element; of the matrix; tiles per panel
//   W::packed                   codes, to be decoded; else values as they are
//   W::lookup                   codes go through a table that W::code_value(code) fills; else code + W::first is exact
//   W::flips_sign               codes are signed: `first` counts from the code with its sign bit flipped
//   W::block, W::straddles      columns per entry; whether blocks run across rows
//   W::entry, W::load, W::value the other fields of a block as stored; how to read them; code value to element (fp32)
//
// A lane owns 16 bytes of a tile. They are 4 (4 bits), 2 (8 bits) or 1 (16 bits) pieces of 16 columns, 8 elements each:
// element 2p + h is row g + 8 (p % 2), column 2t + 8 (p / 2) + h, with g = lane / 4, t = lane % 4. Plain fp32 has tiles
// of 8 columns: element p is row g + 8 (p % 2), column t + 4 (p / 2).
#pragma once
#include "device.cuh"

QC_DEVICE float qc_float(float v) { return v; }
QC_DEVICE float qc_float(qc_bf16 v) { return qc_f32_of_bf16(v.bits); }
QC_DEVICE float qc_float(qc_f16 v) { return qc_f32_of_f16(v.bits); }
QC_DEVICE float qc_float(uint8_t v) { return (float)v; }
QC_DEVICE float qc_float(int8_t v) { return (float)v; }

// The two halves of a pair of 16-bit floats, in fp32.
QC_DEVICE float qc_low(uint32_t pair, qc_bf16) { return __uint_as_float(pair << 16); }
QC_DEVICE float qc_high(uint32_t pair, qc_bf16) { return __uint_as_float(pair & 0xffff0000u); }
QC_DEVICE float qc_low(uint32_t pair, qc_f16) { return qc_f32_of_f16((uint16_t)pair); }
QC_DEVICE float qc_high(uint32_t pair, qc_f16) { return qc_f32_of_f16((uint16_t)(pair >> 16)); }

template <class T> struct qc_is_float { static constexpr bool value = false; };
template <> struct qc_is_float<float> { static constexpr bool value = true; };

// --- codes -----------------------------------------------------------------------------------------------------------

// The value of the code in bits [Bit, Bit + W::bits) of a word, exactly, in two instructions: the bits are the mantissa
// of a float whose last places count one, so that one subtraction leaves the integer. Bit + W::bits <= 23.
template <class W, int Bit> QC_DEVICE float qc_code_number(uint32_t word) {
    const uint32_t mask = ((1u << W::bits) - 1) << Bit;
    return __uint_as_float((word & mask) | (uint32_t)(150 - Bit) << 23) + (float)(W::first - (1 << (23 - Bit)));
}

// Tables of code values in shared memory. Codes are random, so that lanes would meet in one bank: every lane reads a
// replica in banks of its own. `lane` is the byte offset of that replica; entries are 128 bytes apart, so that an
// address is one shift and one and-or away from the word.
struct qc_no_table {};
struct qc_table16 {  // one code: 16 entries, 32 replicas (2 KiB)
    float* entries;
    uint32_t lane;
};
// Two codes of a byte at once, (low nibble, high nibble): 256 entries, 16 replicas (32 KiB), since the 8-byte loads of
// a half warp are one access of all 32 banks.
struct qc_table256 {
    float2* entries;
    uint32_t lane;
};
QC_DEVICE qc_table16 qc_singles(float* entries) { return {entries, threadIdx.x % 32 * 4}; }
QC_DEVICE qc_table256 qc_pairs(float2* entries) { return {entries, threadIdx.x % 16 * 8}; }

// By the whole block; a barrier must follow.
template <class W> QC_DEVICE void qc_fill(qc_no_table) {}
template <class W> QC_DEVICE void qc_fill(qc_table16 table) {
    for (int i = threadIdx.x; i < 16 * 32; i += blockDim.x) table.entries[i] = W::code_value(i / 32);
}
template <class W> QC_DEVICE void qc_fill(qc_table256 table) {
    for (int i = threadIdx.x; i < 256 * 16; i += blockDim.x)
        table.entries[i] = make_float2(W::code_value(i / 16 % 16), W::code_value(i / 256));
}

// The `Bits` bits of a word from bit Bit on, times 128.
template <int Bits, int Bit> QC_DEVICE uint32_t qc_code_offset(uint32_t word) {
    return (Bit > 7 ? word >> (Bit > 7 ? Bit - 7 : 0) : word << (Bit > 7 ? 0 : 7 - Bit)) & ((1u << Bits) - 1) << 7;
}
template <int Nibble> QC_DEVICE float qc_look_up(uint32_t word, qc_table16 table) {
    return *(const float*)((const char*)table.entries + (qc_code_offset<4, 4 * Nibble>(word) | table.lane));
}
template <int Byte> QC_DEVICE float2 qc_look_up(uint32_t word, qc_table256 table) {
    return *(const float2*)((const char*)table.entries + (qc_code_offset<8, 8 * Byte>(word) | table.lane));
}

// Code values of a piece. 4 bits: its word; nibble p + 4h is element 2p + h.
template <class W> QC_DEVICE void qc_code_values(uint32_t word, qc_no_table, float (&v)[8]) {
    const uint32_t upper = word >> 12;  // nibbles 5, 6, 7 where 2, 3, 4 were: a mantissa has room for five
    v[0] = qc_code_number<W, 0>(word), v[2] = qc_code_number<W, 4>(word);
    v[4] = qc_code_number<W, 8>(word), v[6] = qc_code_number<W, 12>(word);
    v[1] = qc_code_number<W, 16>(word), v[3] = qc_code_number<W, 8>(upper);
    v[5] = qc_code_number<W, 12>(upper), v[7] = qc_code_number<W, 16>(upper);
}
template <class W> QC_DEVICE void qc_code_values(uint32_t word, qc_table16 table, float (&v)[8]) {
    v[0] = qc_look_up<0>(word, table), v[2] = qc_look_up<1>(word, table);
    v[4] = qc_look_up<2>(word, table), v[6] = qc_look_up<3>(word, table);
    v[1] = qc_look_up<4>(word, table), v[3] = qc_look_up<5>(word, table);
    v[5] = qc_look_up<6>(word, table), v[7] = qc_look_up<7>(word, table);
}
template <class W> QC_DEVICE void qc_code_values(uint32_t word, qc_table256 table, float (&v)[8]) {
    const float2 a = qc_look_up<0>(word, table), b = qc_look_up<1>(word, table);
    const float2 c = qc_look_up<2>(word, table), d = qc_look_up<3>(word, table);
    v[0] = a.x, v[2] = a.y, v[4] = b.x, v[6] = b.y;
    v[1] = c.x, v[3] = c.y, v[5] = d.x, v[7] = d.y;
}
// 8 bits: its two words; element i is byte i.
template <class W> QC_DEVICE void qc_code_values(uint32_t low, uint32_t high, float (&v)[8]) {
    const uint32_t flip = W::flips_sign ? 0x80808080u : 0;
    const uint32_t words[2] = {low ^ flip, high ^ flip};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v[4 * i] = qc_code_number<W, 0>(words[i]), v[4 * i + 1] = qc_code_number<W, 8>(words[i]);
        v[4 * i + 2] = qc_code_number<W, 0>(words[i] >> 16), v[4 * i + 3] = qc_code_number<W, 8>(words[i] >> 16);
    }
}

// --- entries: scales and zero points of the blocks that a tile touches -----------------------------------------------

template <class W> struct qc_tile_of {
    static constexpr int columns = 256 / W::bits;
    static constexpr int pieces = columns >= 16 ? columns / 16 : 1;
};

// Entries of one lane's rows (g, g + 8) for a tile, kept as stored so that a prefetch waits for nothing.
template <class W, bool Packed = W::packed> struct qc_entries {
    QC_DEVICE void load(const uint8_t*, int64_t, int64_t, int) {}
    QC_DEVICE void load_piece(const uint8_t*, int64_t, int64_t, int) {}
};
template <class W> struct qc_entries<W, true> {
    static constexpr int columns = qc_tile_of<W>::columns, pieces = qc_tile_of<W>::pieces;
    // Blocks per tile: one where tiles do not cross blocks, else as many as fit, else one per piece.
    static constexpr int blocks = W::straddles ? 1 : W::block >= W::cols || W::block % columns == 0 ? 1
                                  : columns % W::block == 0 ? (int)(columns / W::block) : pieces;
    typename W::entry of[blocks][2];

    // Of the tile that begins at column k0. Pieces behind the last column get the last block's: zero times it is zero.
    QC_DEVICE void load(const uint8_t* w, int64_t panel, int64_t k0, int g) {
        if constexpr (!W::straddles) {
#pragma unroll
            for (int b = 0; b < blocks; b++) load_block(w, panel, k0 + b * (columns / blocks), g, b);
        }
    }
    // Of the piece that begins at column k.
    QC_DEVICE void load_piece(const uint8_t* w, int64_t panel, int64_t k, int g) {
        if constexpr (!W::straddles) load_block(w, panel, k, g, 0);
    }
    QC_DEVICE void load_block(const uint8_t* w, int64_t panel, int64_t k, int g, int b) {
        const int64_t block = (uint32_t)qc_min(k, W::cols - 1) / (uint32_t)W::block;
        of[b][0] = W::load(w, panel * 16 + g, block);
        of[b][1] = W::load(w, panel * 16 + g + 8, block);
    }
};

// --- elements --------------------------------------------------------------------------------------------------------

// Elements of piece `piece` of a tile that begins at column `k0`, before rounding, from its code values. Where blocks
// straddle rows, a piece meets two of them at most (blocks have 16 elements or more).
template <class W>
QC_DEVICE void qc_apply_entries(const uint8_t* w, int64_t panel, int64_t k0, int lane, const qc_entries<W>& entries,
                                int piece, float (&v)[8]) {
    if constexpr (W::straddles) {
        const int64_t k = qc_min(k0 + 16 * piece, W::cols - 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t begin = qc_min(panel * 16 + lane / 4 + 8 * half, W::rows - 1) * W::cols;
            const int64_t block = (begin + k) / W::block, last = (begin + W::cols - 1) / W::block;
            const int edge = (int)((block + 1) * W::block - (begin + k));  // columns of the piece in the first block
            const typename W::entry first = W::load(w, 0, block), second = W::load(w, 0, qc_min(block + 1, last));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& mine = v[i / 2 * 4 + 2 * half + i % 2];
                mine = W::value(mine, 2 * (lane % 4) + i / 2 * 8 + i % 2 < edge ? first : second);
            }
        }
    } else {
        const int b = piece * entries.blocks / entries.pieces;
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = W::value(v[i], entries.of[b][i / 2 % 2]);
    }
}

// A lane's 16 bytes of a tile and the entries they need.
template <class W> struct qc_lane_tile {
    static constexpr int columns = qc_tile_of<W>::columns, pieces = qc_tile_of<W>::pieces;
    uint32_t words[4];
    qc_entries<W> entries;

    QC_DEVICE void load(const uint8_t* w, int64_t panel, int64_t tile, int lane) {
        const uint4 four = qc_load_stream_16(w + ((panel * W::tiles + tile) * 32 + lane) * 16);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
        entries.load(w, panel, tile * columns, lane / 4);
    }

    // One piece alone, which then is piece 0 of a tile that begins at column tile * columns + 16 * piece.
    QC_DEVICE void load_piece(const uint8_t* w, int64_t panel, int64_t tile, int piece, int lane) {
        const uint8_t* const at = w + ((panel * W::tiles + tile) * 32 + lane) * 16;
        if constexpr (W::bits == 4) {
            words[0] = ((const uint32_t*)at)[piece];
        } else if constexpr (W::bits == 8) {
            const uint2 two = ((const uint2*)at)[piece];
            words[0] = two.x, words[1] = two.y;
        } else {
            const uint4 four = *(const uint4*)at;
            words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
        }
        entries.load_piece(w, panel, tile * columns + 16 * piece, lane / 4);
    }

    // The 8 elements of a piece of the tile that begins at column k0, before rounding. Packed weights only.
    template <class Table>
    QC_DEVICE void decode(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                          float (&v)[8]) const {
        if constexpr (W::bits == 4) qc_code_values<W>(words[piece], table, v);
        else qc_code_values<W>(words[2 * piece], words[2 * piece + 1], v);
        qc_apply_entries<W>(w, panel, k0, lane, entries, piece, v);
    }

    // The piece as `mma` operand A. 16-bit element types only.
    template <class Table>
    QC_DEVICE void fragment(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                            uint32_t (&a)[4]) const {
        if constexpr (W::packed) {
            float v[8];
            decode(w, panel, k0, lane, piece, table, v);
#pragma unroll
            for (int p = 0; p < 4; p++) a[p] = qc_pack(v[2 * p], v[2 * p + 1], typename W::type());
        } else {
#pragma unroll
            for (int p = 0; p < 4; p++) a[p] = words[p];
        }
    }

    // The 8 elements of a piece, rounded to the weight's type, in fp32.
    template <class Table>
    QC_DEVICE void values(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                          float (&v)[8]) const {
        if constexpr (qc_is_float<typename W::type>::value) {
            decode(w, panel, k0, lane, piece, table, v);
        } else {
            uint32_t a[4];
            fragment(w, panel, k0, lane, piece, table, a);
#pragma unroll
            for (int p = 0; p < 4; p++)
                v[2 * p] = qc_low(a[p], typename W::type()), v[2 * p + 1] = qc_high(a[p], typename W::type());
        }
    }
};
