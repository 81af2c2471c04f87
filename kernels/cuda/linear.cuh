// Linear layers, what both engines share: tiles of cuda_t16_v1 into fp32 values or fragments of `mma`.
//
// A weight is described by a struct W that kernels/cuda/weights.py generates:
//   W::type                     what values are rounded to: float, qc_bf16, qc_f16
//   W::bits, rows, cols, tiles  of a stored element; of the matrix; tiles per panel
//   W::packed                   codes, to be decoded; else values as they are
//   W::plane(i)                 where the words of codes begin, for each plane of bits, lowest bits first
//   W::codes                    what codes stand for, see decode.cuh; W::lookup: they go through a table of 16
//   W::first, W::flips_sign, W::code_value(code)       as decode.cuh says
//   W::covers, W::straddles     columns that share entries; whether they are those of a stream of all rows
//   W::fields, W::entry, W::load   the other fields, as stored: of a row and a column, or of an element of the stream
//   W::parts, W::make, W::element  what is computed once per entry; code value and parts to element (fp32)
//   W::mma_parts, W::fold, W::mma_value   the same for linear_mma.cuh, where a code may arrive in another form
//
// A lane owns 4 (less than 8 bits), 2 (8 bits) or 1 (16 bits) pieces of a tile, of 16 columns, 8 elements each: element
// 2p + h is row g + 8 (p % 2), column 2t + 8 (p / 2) + h, with g = lane / 4, t = lane % 4. Plain fp32 has tiles of 8
// columns: element p is row g + 8 (p % 2), column t + 4 (p / 2).
#pragma once
#include "decode.cuh"

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

// Code values of a piece of 4-bit codes: its word; nibble p + 4h is element 2p + h.
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

// A lane's words of codes of a tile, in the order of the planes; of one piece alone, moved to the first place.
template <class W> struct qc_lane_codes {
    static constexpr bool narrow = W::packed && W::bits < 8;
    static constexpr int four = 0, two = W::bits & 4, one = W::bits & 6;  // where a plane's words begin
    static constexpr int count = narrow ? W::bits : 4;
    uint32_t words[count];

    QC_DEVICE void load(const uint8_t* w, int64_t tile, int lane) {
        const int64_t share = tile * 32 + lane;
        if constexpr (!narrow || (W::bits & 4) != 0) {
            const uint4 read = qc_load_stream_16(w + W::plane(0) + share * 16);
            words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
        }
        if constexpr (narrow && (W::bits & 2) != 0) {
            const uint2 read = ((const uint2*)(w + W::plane((W::bits & 4) != 0)))[share];
            words[two] = read.x, words[two + 1] = read.y;
        }
        if constexpr (narrow && (W::bits & 1) != 0)
            words[one] = ((const uint32_t*)(w + W::plane(((W::bits & 4) != 0) + ((W::bits & 2) != 0))))[share];
    }
    QC_DEVICE void load_piece(const uint8_t* w, int64_t tile, int piece, int lane) {
        const int64_t share = tile * 32 + lane;
        if constexpr (narrow) {
            if constexpr ((W::bits & 4) != 0) words[0] = ((const uint32_t*)(w + W::plane(0)))[share * 4 + piece];
            if constexpr ((W::bits & 2) != 0)
                words[two] =
                    ((const uint32_t*)(w + W::plane((W::bits & 4) != 0)))[share * 2 + piece / 2] >> piece % 2 * 8;
            if constexpr ((W::bits & 1) != 0)
                words[one] =
                    ((const uint32_t*)(w + W::plane(((W::bits & 4) != 0) + ((W::bits & 2) != 0))))[share] >> piece * 4;
        } else if constexpr (W::bits == 8) {
            const uint2 read = ((const uint2*)(w + W::plane(0)))[share * 2 + piece];
            words[0] = read.x, words[1] = read.y;
        } else {
            const uint4 read = ((const uint4*)(w + W::plane(0)))[share];
            words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
        }
    }

    // Code values of a piece, element by element. Packed weights only.
    template <class Table> QC_DEVICE void values(int piece, Table table, float (&v)[8]) const {
        if constexpr (W::bits == 4 && (W::codes == QC_COUNTS || W::codes == QC_SIXTEEN)) {
            qc_code_values<W>(words[piece], table, v);
        } else if constexpr (W::bits == 8) {
            bytes(words[2 * piece], words[2 * piece + 1], v);
        } else {
#pragma unroll
            for (int p = 0; p < 4; p++) {
                uint32_t two_bits = 0, one_bit = 0;
                if constexpr ((W::bits & 2) != 0) two_bits = words[two + piece / 2] >> piece % 2 * 8;
                if constexpr ((W::bits & 1) != 0) one_bit = words[one] >> piece * 4;
                const uint32_t four_bits = words[(W::bits & 4) != 0 ? piece : 0];
                const uint32_t pair = qc_code_pair<W::bits>(four_bits, two_bits, one_bit, p);
                v[2 * p] = pair_value(pair << 16, pair & 0xffffu);
                v[2 * p + 1] = pair_value(pair & 0xffff0000u, pair >> 16);
            }
        }
    }
    // Or-ed into the mantissa of 128, whose last place in the upper half of a word counts one, a code of up to 7 bits
    // is 128 more than itself.
    static QC_DEVICE float pair_value(uint32_t upper, uint32_t code) {
        if constexpr (W::codes == QC_COUNTS) return __uint_as_float(upper | 0x43000000u) + (float)(W::first - 128);
        else return W::code_value(code);
    }
    // 8 bits: two words; element i is byte i.
    static QC_DEVICE void bytes(uint32_t low, uint32_t high, float (&v)[8]) {
        const uint32_t flip = W::flips_sign ? 0x80808080u : 0, words[2] = {low, high};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (W::codes == QC_COUNTS) {
                const uint32_t word = words[i] ^ flip;
                v[4 * i] = qc_code_number<W, 0>(word), v[4 * i + 1] = qc_code_number<W, 8>(word);
                v[4 * i + 2] = qc_code_number<W, 0>(word >> 16), v[4 * i + 3] = qc_code_number<W, 8>(word >> 16);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) v[4 * i + j] = byte_value(words[i] >> 8 * j & 255u);
            }
        }
    }
    static QC_DEVICE float byte_value(uint32_t byte) {
        if constexpr (W::codes == QC_E4M3) return qc_minifloat<3>(byte);
        else if constexpr (W::codes == QC_E5M2) return qc_minifloat<2>(byte);
        else return W::code_value(byte);
    }
};

// --- entries: scales and zero points of the groups of columns that a tile touches ------------------------------------

template <class W> struct qc_tile_of {
    static constexpr int columns = W::packed && W::bits < 8 ? 64 : 256 / W::bits;
    static constexpr int pieces = columns >= 16 ? columns / 16 : 1;
    // Groups of columns that share entries: one where tiles do not cross groups, else as many as fit, else one per
    // piece; none where a piece meets more than one, and where rows do not hold whole groups.
    static constexpr int groups = !W::packed || W::straddles                               ? 0
                                  : W::covers >= W::cols || W::covers % columns == 0 ? 1
                                  : W::covers % 16 != 0                              ? 0
                                  : columns % W::covers == 0 ? (int)(columns / W::covers)
                                                             : pieces;
};

// Entries of one lane's rows (g, g + 8) for a tile, kept as stored so that a prefetch waits for nothing. Where they are
// many, the four lanes of a quad, which have the same rows, hold a share each and pass on what they make of it.
template <class W> struct qc_entries {
    static constexpr int columns = qc_tile_of<W>::columns, groups = qc_tile_of<W>::groups;
    static constexpr bool own = groups <= 1 || 2 * groups * W::fields <= 4;
    static constexpr int count = groups == 0 ? 1 : own ? 2 * groups : groups / 2;
    typename W::entry of[count];

    // Of the tile that begins at column k0. Groups behind the last column get the last one's: zero times it is zero.
    QC_DEVICE void load(const uint8_t* w, int64_t panel, int64_t k0, int lane) {
        if constexpr (groups > 0) {
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int i = 0; i < count; i++) {
                const int group = own ? i / 2 : groups == 4 ? t : t / 2, half = own || groups == 4 ? i % 2 : t % 2;
                const int64_t k = qc_min(k0 + group * (columns / groups), W::cols - 1);
                of[i] = W::load(w, panel * 16 + g + 8 * half, (uint32_t)k);
            }
        }
    }
};

// What is made of them: `rows` are the parts of rows g and g + 8 for the group that was turned to.
template <class W> struct qc_row_parts {
    typedef qc_entries<W> entries;
    static constexpr int groups = entries::groups, pieces = qc_tile_of<W>::pieces;
    typename W::parts mine[entries::own ? 1 : entries::count], rows[2];

    QC_DEVICE void begin(const entries& e) {
        if constexpr (!entries::own) {
#pragma unroll
            for (int i = 0; i < entries::count; i++) mine[i] = W::make(e.of[i]);
        }
    }
    // All lanes of the warp take part.
    QC_DEVICE void turn_to(const entries& e, int piece, int lane) {
        if constexpr (groups > 0) {
            if (piece % (pieces / groups) != 0) return;
            const int group = piece / (pieces / groups);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if constexpr (entries::own) {
                    rows[half] = W::make(e.of[2 * group + half]);
                } else {
                    const int from = lane / 4 * 4 + (groups == 4 ? group : 2 * group + half);
                    constexpr int parts = sizeof(typename W::parts) / sizeof(float);
#pragma unroll
                    for (int i = 0; i < parts; i++)
                        rows[half].of[i] = __shfl_sync(QC_ALL_LANES, mine[groups == 4 ? half : 0].of[i], from);
                }
            }
        }
    }
};

// --- elements --------------------------------------------------------------------------------------------------------

// Elements of the piece at column `k`, before rounding, from its code values, whatever entries they meet. Where a
// stream's groups have 16 elements or more, a piece meets two of them at most; else each element asks for its own.
template <class W>
QC_DEVICE void qc_apply_entries(const uint8_t* w, int64_t panel, int64_t k, int lane, float (&v)[8]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t row = qc_min(panel * 16 + lane / 4 + 8 * half, W::rows - 1);
        if constexpr (W::straddles && W::covers >= 16) {
            const int64_t begin = row * W::cols, first = begin + qc_min(k, W::cols - 1);
            const int64_t border = (first / W::covers + 1) * W::covers;
            const typename W::parts here = W::make(W::load(w, first));
            const typename W::parts next = W::make(W::load(w, qc_min(border, begin + W::cols - 1)));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& mine = v[i / 2 * 4 + 2 * half + i % 2];
                const bool before = first + 2 * (lane % 4) + i / 2 * 8 + i % 2 < border;
                mine = W::element(mine, before ? here : next);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& mine = v[i / 2 * 4 + 2 * half + i % 2];
                const int64_t column = qc_min(k + 2 * (lane % 4) + i / 2 * 8 + i % 2, W::cols - 1);
                if constexpr (W::straddles) mine = W::element(mine, W::make(W::load(w, row * W::cols + column)));
                else mine = W::element(mine, W::make(W::load(w, row, (uint32_t)column)));
            }
        }
    }
}

// The same from the parts of rows g and g + 8.
template <class W> QC_DEVICE void qc_apply_parts(const typename W::parts (&rows)[2], float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = W::element(v[i], rows[i / 2 % 2]);
}

// Zeros behind the last column: what codes of zero stand for may be infinite, and infinity times a zero of x is no
// number.
template <class W> QC_DEVICE void qc_clear_outside(int64_t k, int lane, float (&v)[8]) {
    if constexpr (W::cols % qc_tile_of<W>::columns != 0) {
        if (k + 16 > W::cols) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (k + 2 * (lane % 4) + i / 4 * 8 + i % 2 >= W::cols) v[i] = 0.0f;
        }
    }
}

// Eight elements, rounded to the weight's type, in fp32 again.
QC_DEVICE void qc_round_values(float (&)[8], float) {}
template <class T> QC_DEVICE void qc_round_values(float (&v)[8], T tag) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const uint32_t pair = qc_pack(v[2 * p], v[2 * p + 1], tag);
        v[2 * p] = qc_low(pair, tag), v[2 * p + 1] = qc_high(pair, tag);
    }
}
QC_DEVICE void qc_unpack_words(const uint32_t*, float (&)[8], float) {}
template <class T> QC_DEVICE void qc_unpack_words(const uint32_t* words, float (&v)[8], T tag) {
#pragma unroll
    for (int p = 0; p < 4; p++) v[2 * p] = qc_low(words[p], tag), v[2 * p + 1] = qc_high(words[p], tag);
}

// A lane's share of a tile and the entries it needs.
template <class W> struct qc_lane_tile {
    static constexpr int columns = qc_tile_of<W>::columns, pieces = qc_tile_of<W>::pieces;
    qc_lane_codes<W> codes;
    qc_entries<W> entries;

    QC_DEVICE void load(const uint8_t* w, int64_t panel, int64_t tile, int lane) {
        codes.load(w, panel * W::tiles + tile, lane);
        entries.load(w, panel, tile * columns, lane);
    }

    // The 8 elements of a piece of the tile that begins at column k0, before rounding. Packed weights only; pieces in
    // order.
    template <class Table>
    QC_DEVICE void decode(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                          qc_row_parts<W>& parts, float (&v)[8]) const {
        codes.values(piece, table, v);
        if constexpr (qc_tile_of<W>::groups > 0) {
            parts.turn_to(entries, piece, lane);
            qc_apply_parts<W>(parts.rows, v);
        } else {
            qc_apply_entries<W>(w, panel, k0 + 16 * piece, lane, v);
        }
        qc_clear_outside<W>(k0 + 16 * piece, lane, v);
    }

    // The piece as `mma` operand A. 16-bit element types only.
    template <class Table>
    QC_DEVICE void fragment(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                            qc_row_parts<W>& parts, uint32_t (&a)[4]) const {
        if constexpr (W::packed) {
            float v[8];
            decode(w, panel, k0, lane, piece, table, parts, v);
#pragma unroll
            for (int p = 0; p < 4; p++) a[p] = qc_pack(v[2 * p], v[2 * p + 1], typename W::type());
        } else {
#pragma unroll
            for (int p = 0; p < 4; p++) a[p] = codes.words[p];
        }
    }

    // The 8 elements of a piece, rounded to the weight's type, in fp32.
    template <class Table>
    QC_DEVICE void values(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                          qc_row_parts<W>& parts, float (&v)[8]) const {
        if constexpr (W::packed) {
            decode(w, panel, k0, lane, piece, table, parts, v);
            qc_round_values(v, typename W::type());
        } else {
            qc_unpack_words(codes.words, v, typename W::type());
        }
    }
};

// The 8 elements of the piece at column `k`, read and decoded on the spot, rounded to the weight's type, in fp32.
template <class W, class Table>
QC_DEVICE void qc_read_piece(const uint8_t* w, int64_t panel, int64_t k, int lane, Table table, float (&v)[8]) {
    constexpr int columns = qc_tile_of<W>::columns;
    qc_lane_codes<W> codes;
    codes.load_piece(w, panel * W::tiles + k / columns, (int)(k % columns) / 16, lane);
    if constexpr (W::packed) {
        codes.values(0, table, v);
        if constexpr (qc_tile_of<W>::groups > 0) {
            const uint32_t column = (uint32_t)qc_min(k, W::cols - 1);
            const int64_t row = panel * 16 + lane / 4;
            const typename W::parts rows[2] = {W::make(W::load(w, row, column)), W::make(W::load(w, row + 8, column))};
            qc_apply_parts<W>(rows, v);
        } else {
            qc_apply_entries<W>(w, panel, k, lane, v);
        }
        qc_clear_outside<W>(k, lane, v);
        qc_round_values(v, typename W::type());
    } else {
        qc_unpack_words(codes.words, v, typename W::type());
    }
}
