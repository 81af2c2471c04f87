// Linear layers, what both engines share: tiles of cuda_t16_v1 into fp32 values or fragments of `mma`.
//
// A weight is described by a struct W that kernels/cuda/weights.py generates:
//   W::type                     what values are rounded to: float, qc_bf16, qc_f16
//   W::bits, rows, cols, tiles  of a stored element; of the matrix; tiles per panel
//   W::packed                   codes, to be decoded; else values as they are
//   W::plane(i)                 where the words of codes begin, for each plane of bits, lowest bits first
//   W::codes                    what codes stand for, see decode.cuh; W::lookup: they go through a table of 16
//   W::flips_sign, W::code_value(code)       as decode.cuh says
//   W::covers, W::straddles     columns that share entries; whether they are those of a stream of all rows
//   W::fields, W::entry         the other fields, as stored
//   W::load                     the entry of a row and a column, or of an element of the stream
//   W::load_unit<C>             the entry of row r of a panel and column C * unit + offset (no streams)
//   W::parts, W::make           what is computed once per entry
//   W::mma_parts, W::fold       and once more for each row: what decoding takes
//   W::pairs                    whether two elements are decoded at once, in the weight's type: W::mma_pair; else one
//                               by one in fp32, before rounding: W::mma_value. What these take of a code is below
//
// A lane owns 4 (less than 8 bits), 2 (8 bits) or 1 (16 bits) pieces of a tile, of 16 columns, 8 elements each: element
// 2p + h is row g + 8 (p % 2), column 2t + 8 (p / 2) + h, with g = lane / 4, t = lane % 4. Plain fp32 has tiles of 8
// columns: element p is row g + 8 (p % 2), column t + 4 (p / 2).
#pragma once
#include "decode.cuh"

// 16 bytes of elements, each rounded once.
QC_DEVICE void qc_store_16(float* to, const float (&v)[4]) {
    qc_store_global_16(
        to, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
}
template <class T> QC_DEVICE void qc_store_16(T* to, const float (&v)[8]) {
    qc_store_global_16(to, make_uint4(qc_pack(v[0], v[1], T()), qc_pack(v[2], v[3], T()), qc_pack(v[4], v[5], T()),
                                      qc_pack(v[6], v[7], T())));
}

// sums[i], by constants alone: an index in a register would put the array into local memory.
template <int N> QC_DEVICE float qc_pick(const float (&sums)[N], int i) {
    float picked = 0.0f;
#pragma unroll
    for (int each = 0; each < N; each++)
        if (each == i) picked = sums[each];
    return picked;
}

// The two halves of a pair of 16-bit floats, in fp32.
QC_DEVICE float qc_low(uint32_t pair, qc_bf16) { return __uint_as_float(pair << 16); }
QC_DEVICE float qc_high(uint32_t pair, qc_bf16) { return __uint_as_float(pair & 0xffff0000u); }
QC_DEVICE float qc_low(uint32_t pair, qc_f16) { return qc_f32_of_f16((uint16_t)pair); }
QC_DEVICE float qc_high(uint32_t pair, qc_f16) { return qc_f32_of_f16((uint16_t)(pair >> 16)); }

template <class T> struct qc_is_float { static constexpr bool value = false; };
template <> struct qc_is_float<float> { static constexpr bool value = true; };

// The tiles of a panel, 32 lanes each, are counted in 32 bits where they fit.
template <bool B, class Then, class Else> struct qc_if { typedef Then type; };
template <class Then, class Else> struct qc_if<false, Then, Else> { typedef Else type; };
template <class W> using qc_tile_index = typename qc_if<(W::tiles + 64 < (int64_t)1 << 25), int, int64_t>::type;

// --- tables of code values -------------------------------------------------------------------------------------------

// Codes are random, so that lanes would meet in one bank: every lane reads a replica in banks of its own. `lane` is the
// byte offset of that replica; entries are 128 bytes apart, so that an address is a shift and an and-or away from the
// word.
struct qc_no_table {};
struct qc_table16 {  // one code: 16 entries, 32 replicas (2 KiB)
    float* entries;
    uint32_t lane;
};
// Two codes of a byte at once, (low nibble, high nibble): 256 entries, 16 replicas (32 KiB), since the 8-byte loads of
// a half warp are one access of all 32 banks.
struct qc_table256 {
    float2* entries;
    qc_place place;
    uint32_t lane;
};
// In the lanes of each half warp. A lookup is a shuffle, which reads only the low four bits of the lane's number.
struct qc_lane_table {
    float entry;
};
QC_DEVICE qc_table16 qc_singles(float* entries) { return {entries, threadIdx.x % 32 * 4}; }
QC_DEVICE qc_table256 qc_pairs(float2* entries) { return {entries, qc_fixed(entries), threadIdx.x % 16 * 8}; }

// By a whole block of THREADS threads, 16 bytes at a time; a barrier must follow.
template <class W, int THREADS> QC_DEVICE void qc_fill(qc_no_table) {}
template <class W, int THREADS> QC_DEVICE void qc_fill(qc_lane_table) {}
template <class W, int THREADS> QC_DEVICE void qc_fill(qc_table16 table) {
#pragma unroll
    for (int first = 0; first < 16 * 8; first += THREADS) {
        const int i = first + (int)threadIdx.x;
        if (THREADS <= 128 || i < 16 * 8) {
            const float value = W::code_value(i / 8);
            ((float4*)table.entries)[i] = make_float4(value, value, value, value);
        }
    }
}
template <class W, int THREADS> QC_DEVICE void qc_fill(qc_table256 table) {
    // Kernels that loop over rows of x fill it once, but the compiler would keep the values from pass to pass.
    int thread = threadIdx.x;
    QC_KEEP_32(thread);
    // Eight threads make an entry's replicas: 128 of them meet each low nibble once.
    const float same = W::code_value(thread / 8 % 16);
#pragma unroll(THREADS < 256 ? 8 : 256 * 8 / THREADS)
    for (int first = 0; first < 256 * 8; first += THREADS) {
        const int i = first + thread;
        const float low = THREADS % 128 == 0 ? same : W::code_value(i / 8 % 16), high = W::code_value(i / 128);
        ((float4*)table.entries)[i] = make_float4(low, high, low, high);
    }
}

// The `Bits` bits of a word from bit Bit on, times 128.
template <int Bits, int Bit> QC_DEVICE uint32_t qc_code_offset(uint32_t word) {
    return (Bit > 7 ? word >> (Bit > 7 ? Bit - 7 : 0) : word << (Bit > 7 ? 0 : 7 - Bit)) & ((1u << Bits) - 1) << 7;
}
template <int Nibble> QC_DEVICE float qc_look_up(uint32_t word, qc_table16 table) {
    return *(const float*)((const char*)table.entries + (qc_code_offset<4, 4 * Nibble>(word) | table.lane));
}
template <int Byte> QC_DEVICE float2 qc_look_up(uint32_t word, qc_table256 table) {
    return qc_load_shared_8(table.place + (int)(qc_code_offset<8, 8 * Byte>(word) | table.lane));
}

// The values of a piece of 4-bit codes: nibble p + 4h of its word is element 2p + h.
QC_DEVICE void qc_look_up_piece(uint32_t, qc_no_table, float (&)[8]) {}
QC_DEVICE void qc_look_up_piece(uint32_t word, qc_lane_table table, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = __shfl_sync(QC_ALL_LANES, table.entry, (int)(word >> (i / 2 * 4 + i % 2 * 16)), 16);
}
QC_DEVICE void qc_look_up_piece(uint32_t word, qc_table16 table, float (&v)[8]) {
    v[0] = qc_look_up<0>(word, table), v[2] = qc_look_up<1>(word, table);
    v[4] = qc_look_up<2>(word, table), v[6] = qc_look_up<3>(word, table);
    v[1] = qc_look_up<4>(word, table), v[3] = qc_look_up<5>(word, table);
    v[5] = qc_look_up<6>(word, table), v[7] = qc_look_up<7>(word, table);
}
QC_DEVICE void qc_look_up_piece(uint32_t word, qc_table256 table, float (&v)[8]) {
    const float2 a = qc_look_up<0>(word, table), b = qc_look_up<1>(word, table);
    const float2 c = qc_look_up<2>(word, table), d = qc_look_up<3>(word, table);
    v[0] = a.x, v[2] = a.y, v[4] = b.x, v[6] = b.y;
    v[1] = c.x, v[3] = c.y, v[5] = d.x, v[7] = d.y;
}

// --- codes -----------------------------------------------------------------------------------------------------------

// Words of a piece: for each plane of codes one, of whole bytes bits / 4; of a trellis one for row g and one for g + 8,
// which begin with the codes before the piece's own.
template <class W> struct qc_piece_of {
    static constexpr bool narrow = W::packed && W::bits < 8, sequences = qc_in_sequences<W>::value;
    static constexpr int words =
        sequences ? 2 : narrow ? (W::bits >> 2 & 1) + (W::bits >> 1 & 1) + (W::bits & 1) : W::bits / 4;
};

// A lane's words of codes of a tile, in the order of the planes.
template <class W> struct qc_lane_codes {
    static constexpr bool sequences = qc_piece_of<W>::sequences;
    static constexpr bool narrow = qc_piece_of<W>::narrow;
    static constexpr int two = W::bits & 4, one = W::bits & 6;  // where a plane's words begin
    static constexpr int count = narrow ? W::bits : 4, piece_words = qc_piece_of<W>::words;
    uint32_t words[count];
    typename qc_if<sequences, qc_last_codes<W>, qc_no_codes>::type before;

    QC_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < count; i++) words[i] = 0;
        if constexpr (sequences)
#pragma unroll
            for (int i = 0; i < qc_last_codes<W>::count; i++) before.words[i] = 0;
    }
    // `share`: of this lane and the panel's first tile, 32 for each tile before it.
    QC_DEVICE void load(const uint8_t* w, int64_t share, qc_tile_index<W> tile) {
        if constexpr (!narrow || (W::bits & 4) != 0) {
            const uint4 read = qc_load_stream_16((const uint4*)(w + W::plane(0)) + share + tile * 32);
            words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
        }
        if constexpr (narrow && (W::bits & 2) != 0) {
            const uint2 read = ((const uint2*)(w + W::plane((W::bits & 4) != 0)) + share)[tile * 32];
            words[two] = read.x, words[two + 1] = read.y;
        }
        if constexpr (narrow && (W::bits & 1) != 0)
            words[one] =
                ((const uint32_t*)(w + W::plane(((W::bits & 4) != 0) + ((W::bits & 2) != 0))) + share)[tile * 32];
        if constexpr (sequences) before.load_before(w, share + (int64_t)tile * 32);
    }
    // The words of a piece, planes of 2 and 1 bits moved so that it stands first in them.
    QC_DEVICE void piece(int piece, uint32_t (&of)[piece_words]) const {
        if constexpr (sequences) {
            qc_piece_of_sequences<W>(words, before, piece, of);
        } else if constexpr (narrow) {
            int next = 0;
            if constexpr ((W::bits & 4) != 0) of[next++] = words[piece];
            if constexpr ((W::bits & 2) != 0) of[next++] = words[two + piece / 2] >> piece % 2 * 8;
            if constexpr ((W::bits & 1) != 0) of[next] = words[one] >> piece * 4;
        } else {
#pragma unroll
            for (int i = 0; i < piece_words; i++) of[i] = words[piece * piece_words + i];
        }
    }
};

// The words of one piece of a tile, read alone.
template <class W>
QC_DEVICE void qc_load_piece(const uint8_t* w, int64_t share, int piece, uint32_t (&of)[qc_piece_of<W>::words]) {
    if constexpr (qc_piece_of<W>::sequences) {
        qc_lane_codes<W> tile;
        tile.load(w, share, 0);
        tile.piece(piece, of);
    } else if constexpr (qc_piece_of<W>::narrow) {
        constexpr int two = (W::bits & 4) != 0, one = two + ((W::bits & 2) != 0);
        if constexpr ((W::bits & 4) != 0) of[0] = ((const uint32_t*)(w + W::plane(0)))[share * 4 + piece];
        if constexpr ((W::bits & 2) != 0)
            of[two] = ((const uint32_t*)(w + W::plane(two)))[share * 2 + piece / 2] >> piece % 2 * 8;
        if constexpr ((W::bits & 1) != 0) of[one] = ((const uint32_t*)(w + W::plane(one)))[share] >> piece * 4;
    } else if constexpr (W::bits == 8) {
        const uint2 read = ((const uint2*)(w + W::plane(0)))[share * 2 + piece];
        of[0] = read.x, of[1] = read.y;
    } else {
        const uint4 read = ((const uint4*)(w + W::plane(0)))[share];
        of[0] = read.x, of[1] = read.y, of[2] = read.z, of[3] = read.w;
    }
}

// --- decoding --------------------------------------------------------------------------------------------------------
//
// What W::mma_value takes of a code c:
//   tables, 8-bit floats        the value that c stands for
//   integers, less than 8 bits  the float 128 + c: the code is the low byte of the upper half of the float 128, whose
//                               last place there counts one
//   integers, 8 bits            the float 2^23 + c (flipped signs: 2^23 + 128 + c): likewise, of 2^23
// W::mma_pair takes two codes in the halves of a word: of bf16 128 + c, of f16 1024 + c.

QC_DEVICE constexpr uint32_t qc_pair_bias(qc_bf16) { return 0x43004300u; }
QC_DEVICE constexpr uint32_t qc_pair_bias(qc_f16) { return 0x64006400u; }
QC_DEVICE constexpr uint32_t qc_pair_bias(float) { return 0; }

// The first 8 binary digits of an f16 (given in fp32), and the rest, in both halves of a word as bf16. Both are exact.
QC_DEVICE uint32_t qc_first_digits(float f16) { return __byte_perm(__float_as_uint(f16), 0, 0x3232); }
QC_DEVICE uint32_t qc_last_digits(float f16) {
    const float first = __uint_as_float(__float_as_uint(f16) & 0xffff0000u);
    return __byte_perm(__float_as_uint(f16 - first), 0, 0x3232);
}

// Pair `p` of a piece, for codes of less than 8 bits.
template <class W>
QC_DEVICE uint32_t qc_piece_pair(const uint32_t (&words)[qc_piece_of<W>::words], int p, uint32_t onto) {
    constexpr int two = (W::bits & 4) != 0, one = two + ((W::bits & 2) != 0);
    const uint32_t two_bits = (W::bits & 2) != 0 ? words[(W::bits & 2) != 0 ? two : 0] : 0;
    const uint32_t one_bit = (W::bits & 1) != 0 ? words[(W::bits & 1) != 0 ? one : 0] : 0;
    return qc_code_pair<W::bits>(words[0], two_bits, one_bit, p, onto);
}

template <class W> QC_DEVICE float qc_byte_value(uint32_t byte) {
    if constexpr (W::codes == QC_E4M3) return qc_minifloat<3>(byte);
    else if constexpr (W::codes == QC_E5M2) return qc_minifloat<2>(byte);
    else return W::code_value(byte);
}

// What mma_value takes of the codes of a piece, element by element.
template <class W, class Table>
QC_DEVICE void qc_piece_codes(const uint32_t (&words)[qc_piece_of<W>::words], Table table, float (&v)[8]) {
    if constexpr (W::codes == QC_WINDOWS) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = W::code_value(words[i / 2 % 2] >> W::bits * (i / 4 * 2 + i % 2) & ((1u << W::bits * W::window) - 1));
    } else if constexpr (W::codes == QC_SIXTEEN) {
        qc_look_up_piece(words[0], table, v);
    } else if constexpr (W::codes == QC_COUNTS && W::bits == 4) {
        // Nibble p + 4h is in byte p / 2 + 2h: two masks make bytes of all eight, one permutation a float of each.
        const uint32_t even = words[0] & 0x0f0f0f0fu, odd = words[0] >> 4 & 0x0f0f0f0fu;
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = __uint_as_float(
                __byte_perm(i / 2 % 2 ? odd : even, 0x43000000u, 0x7044 + 256 * (i / 4 + i % 2 * 2)));
    } else if constexpr (W::bits < 8) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const uint32_t pair = qc_piece_pair<W>(words, p, W::codes == QC_COUNTS ? 0x43004300u : 0);
            if constexpr (W::codes == QC_COUNTS)
                v[2 * p] = __uint_as_float(pair << 16), v[2 * p + 1] = __uint_as_float(pair & 0xffff0000u);
            else v[2 * p] = W::code_value(pair & 0xffffu), v[2 * p + 1] = W::code_value(pair >> 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {  // element i is byte i
            if constexpr (W::codes == QC_COUNTS) {
                const uint32_t word = words[i / 4] ^ (W::flips_sign ? 0x80808080u : 0u);
                v[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + i % 4));
            } else {
                v[i] = qc_byte_value<W>(words[i / 4] >> i % 4 * 8 & 255u);
            }
        }
    }
}

// The piece as `mma` operand A, its rows g and g + 8 by the given parts. 16-bit element types only.
template <class W, class Table>
QC_DEVICE void qc_piece_fragment(const uint32_t (&words)[qc_piece_of<W>::words], Table table,
                                 const typename W::mma_parts (&rows)[2], uint32_t (&a)[4]) {
    if constexpr (W::pairs) {
#pragma unroll
        for (int p = 0; p < 4; p++)
            a[p] = W::mma_pair(qc_piece_pair<W>(words, p, qc_pair_bias(typename W::type())), rows[p % 2]);
    } else {
        float v[8];
        qc_piece_codes<W>(words, table, v);
#pragma unroll
        for (int p = 0; p < 4; p++)
            a[p] = qc_pack(W::mma_value(v[2 * p], rows[p % 2]), W::mma_value(v[2 * p + 1], rows[p % 2]),
                           typename W::type());
    }
}

// Words of 16-bit elements in fp32.
QC_DEVICE void qc_unpack_words(const uint32_t*, float (&)[8], float) {}
template <class T> QC_DEVICE void qc_unpack_words(const uint32_t* words, float (&v)[8], T tag) {
#pragma unroll
    for (int p = 0; p < 4; p++) v[2 * p] = qc_low(words[p], tag), v[2 * p + 1] = qc_high(words[p], tag);
}

// The piece, rounded to the weight's type, in fp32.
template <class W, class Table>
QC_DEVICE void qc_piece_values(const uint32_t (&words)[qc_piece_of<W>::words], Table table,
                               const typename W::mma_parts (&rows)[2], float (&v)[8]) {
    if constexpr (qc_is_float<typename W::type>::value) {
        qc_piece_codes<W>(words, table, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = W::mma_value(v[i], rows[i / 2 % 2]);
    } else {
        uint32_t a[4];
        qc_piece_fragment<W>(words, table, rows, a);
        qc_unpack_words(a, v, typename W::type());
    }
}

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

// Which of a row's entries of a field that covers FIELD columns serves column `unit * UNIT + offset`; 0 where the row
// has one. The last of COUNT serves what lies behind the last column: zero times it is zero.
template <int64_t FIELD, int UNIT, int64_t COUNT> QC_DEVICE int qc_entry_column(int unit, int offset) {
    if constexpr (COUNT == 1) return 0;
    int column = 0;
    if constexpr (FIELD % UNIT == 0) column = (int)((uint32_t)unit / (uint32_t)(FIELD / UNIT));
    else if constexpr (UNIT % FIELD == 0)
        column = unit * (int)(UNIT / FIELD) + (int)((uint32_t)offset / (uint32_t)FIELD);
    else column = (int)(((uint32_t)unit * UNIT + (uint32_t)offset) / (uint32_t)FIELD);
    if constexpr (FIELD % UNIT != 0 && COUNT * FIELD % UNIT != 0)  // the last unit ends behind the last entry
        column = column < COUNT ? column : (int)COUNT - 1;
    return column;
}

// Where the entries of row r of a panel begin.
template <class W> struct qc_row_place {
    const uint8_t* w;
    int64_t panel;
    int row;

    QC_DEVICE qc_row_place(const uint8_t* w, int64_t panel, int r) : w(w), panel(panel), row(r) {
        if constexpr (W::movable) {
            this->w = qc_fixed_global(W::moved(w, panel, r)), this->panel = 0, row = 0;
        }
    }
    // `down` rows below, column UNIT * unit + offset; or in the panel `more` panels below.
    template <int UNIT> QC_DEVICE typename W::entry load(int down, int unit, int offset) const {
        return W::template load_unit<UNIT>(w, panel, row + down, unit, offset);
    }
    template <int UNIT> QC_DEVICE typename W::entry load_panel(int more, int down, int unit, int offset) const {
        return W::template load_unit<UNIT>(w, panel + more, row + down, unit, offset);
    }
};

// Where a lane's share of a panel's first tile begins: in the one plane that most weights have, or how many shares
// stand before it in each plane.
template <class W> struct qc_share_place {
    static constexpr bool one_plane = !qc_piece_of<W>::narrow || W::bits == 4;
    const uint8_t* w;
    int64_t share;

    QC_DEVICE qc_share_place(const uint8_t* w, int64_t panel, int lane) : w(w), share(panel * W::tiles * 32 + lane) {
        if constexpr (one_plane) {
            this->w = qc_fixed_global(w + share * 16), share = 0;
        }
    }
};

// Entries of one lane's rows (g, g + 8) for a tile, kept as stored so that a prefetch waits for nothing. Where they are
// many, the four lanes of a quad, which have the same rows, hold a share each and pass on what they make of it.
template <class W> struct qc_entries {
    static constexpr int columns = qc_tile_of<W>::columns, groups = qc_tile_of<W>::groups;
    static constexpr bool own = groups <= 1;
    static constexpr bool whole_rows = groups > 0 && W::covers >= W::cols;  // a row's are the same for all its tiles
    static constexpr int count = groups == 0 ? 1 : own ? 2 * groups : groups / 2;
    typename W::entry of[count];

    // Of a tile; `from` is where the lane's rows of the panel begin.
    QC_DEVICE void load(const qc_row_place<W>& from, int tile, int lane) {
        if constexpr (groups > 0) {
            const int t = lane % 4;
#pragma unroll
            for (int i = 0; i < count; i++) {
                const int group = own ? i / 2 : groups == 4 ? t : t / 2, half = own || groups == 4 ? i % 2 : t % 2;
                of[i] = from.template load<columns>(8 * half, tile, group * (columns / groups));
            }
        }
    }
};

// The words that lane `from` has. All lanes of the warp take part.
template <class Words> QC_DEVICE Words qc_from_lane(const Words& mine, int from) {
    Words its;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(Words) / 4); i++) its.of[i] = __shfl_sync(QC_ALL_LANES, mine.of[i], from);
    return its;
}

// What lanes pass to each other: what has the fewest words. `its` is what is made of it in the end.
template <class W> struct qc_passed {
    typedef typename W::mma_parts its;
    static constexpr bool folded = sizeof(typename W::mma_parts) <= sizeof(typename W::parts) || W::pairs;
    typedef typename qc_if<folded, typename W::mma_parts, typename W::parts>::type made;

    static QC_DEVICE made make(const typename W::entry& entry) {
        if constexpr (folded) return W::fold(W::make(entry));
        else return W::make(entry);
    }
    static QC_DEVICE its own(const typename W::entry& entry) { return W::fold(W::make(entry)); }
    // The parts that lane `from` made. All lanes of the warp take part.
    static QC_DEVICE its from_lane(const made& mine, int from) {
        const made passed = qc_from_lane(mine, from);
        if constexpr (folded) return passed;
        else return W::fold(passed);
    }
};

// The same for products that are scaled late: what scales sums.
template <class W> struct qc_passed_late {
    typedef typename W::late_parts made, its;

    static QC_DEVICE made make(const typename W::entry& entry) { return W::late_of(W::make(entry)); }
    static QC_DEVICE its own(const typename W::entry& entry) { return make(entry); }
    static QC_DEVICE its from_lane(const made& mine, int from) { return qc_from_lane(mine, from); }
};

// What is made of them: `rows` are the parts of rows g and g + 8 for the group that was turned to.
template <class W, class passed = qc_passed<W>> struct qc_row_parts {
    typedef qc_entries<W> entries;
    static constexpr int groups = entries::groups, pieces = qc_tile_of<W>::pieces;
    typename passed::made mine[entries::own ? 1 : entries::count];
    typename passed::its rows[2];

    QC_DEVICE void begin(const entries& e) {
        if constexpr (!entries::own) {
#pragma unroll
            for (int i = 0; i < entries::count; i++) mine[i] = passed::make(e.of[i]);
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
                    rows[half] = passed::own(e.of[2 * group + half]);
                } else {
                    const int from = lane / 4 * 4 + (groups == 4 ? group : 2 * group + half);
                    rows[half] = passed::from_lane(mine[groups == 4 ? half : 0], from);
                }
            }
        }
    }
};

// --- elements --------------------------------------------------------------------------------------------------------

template <class W> QC_DEVICE typename W::mma_parts qc_parts_of(const typename W::entry& entry) {
    return W::fold(W::make(entry));
}

// Elements of the piece at column `first`, before rounding, from its codes, where a stream's groups end inside: in row
// g + 8 h columns before border[h] meet here[h], the others next[h].
template <class W>
QC_DEVICE void qc_apply_bordered(const typename W::mma_parts (&here)[2], const typename W::mma_parts (&next)[2],
                                 const int (&border)[2], int first, int lane, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int half = i / 2 % 2, column = first + 2 * (lane % 4) + i / 4 * 8 + i % 2;
        typename W::mma_parts its = here[half];
        if (column >= border[half]) its = next[half];
        v[i] = W::mma_value(v[i], its);
    }
}

// Eight elements as `mma` operand A, rounded to the weight's type.
template <class T> QC_DEVICE void qc_pack_piece(const float (&v)[8], uint32_t (&a)[4], T tag) {
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = qc_pack(v[2 * p], v[2 * p + 1], tag);
}

// Elements of the piece at column `k`, before rounding, from its codes, whatever entries they meet. Where a stream's
// groups have 16 elements or more, a piece meets two of them at most; else each element asks for its own.
template <class W>
QC_DEVICE void qc_apply_entries(const uint8_t* w, int64_t panel, int64_t k, int lane, float (&v)[8]) {
    int64_t row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) row[half] = qc_min(panel * 16 + lane / 4 + 8 * half, W::rows - 1);
    if constexpr (W::straddles && W::covers >= 16) {
        typename W::mma_parts here[2], next[2];
        int left[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int64_t begin = row[half] * W::cols, first = begin + qc_min(k, W::cols - 1);
            const int64_t border = (first / W::covers + 1) * W::covers;
            here[half] = qc_parts_of<W>(W::load(w, first));
            next[half] = qc_parts_of<W>(W::load(w, qc_min(border, begin + W::cols - 1)));
            left[half] = (int)(border - first);
        }
        qc_apply_bordered<W>(here, next, left, 0, lane, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int64_t column = qc_min(k + 2 * (lane % 4) + i / 4 * 8 + i % 2, W::cols - 1);
            const int64_t its = row[i / 2 % 2];
            if constexpr (W::straddles) v[i] = W::mma_value(v[i], qc_parts_of<W>(W::load(w, its * W::cols + column)));
            else v[i] = W::mma_value(v[i], qc_parts_of<W>(W::load(w, its, (uint32_t)column)));
        }
    }
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
template <class W> QC_DEVICE void qc_clear_outside(int64_t k, int lane, uint32_t (&a)[4]) {
    if constexpr (W::cols % qc_tile_of<W>::columns != 0) {
        if (k + 16 > W::cols) {
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const int64_t column = k + 2 * (lane % 4) + p / 2 * 8;
                if (column >= W::cols) a[p] = 0;
                else if (column + 1 >= W::cols) a[p] &= 0xffffu;
            }
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

// A lane's share of a tile and the entries it needs.
template <class W> struct qc_lane_tile {
    static constexpr int columns = qc_tile_of<W>::columns, pieces = qc_tile_of<W>::pieces;
    static constexpr int words = qc_piece_of<W>::words;
    qc_lane_codes<W> codes;
    qc_entries<W> entries;

    QC_DEVICE void load(const qc_share_place<W>& mine, const qc_row_place<W>& rows, int tile, int lane) {
        codes.load(mine.w, mine.share, tile);
        if constexpr (!qc_entries<W>::whole_rows) entries.load(rows, tile, lane);
    }

    // The piece as `mma` operand A, by the entries `all`; pieces in order. 16-bit element types only.
    template <class Table>
    QC_DEVICE void fragment(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                            const qc_entries<W>& all, qc_row_parts<W>& parts, uint32_t (&a)[4]) const {
        uint32_t of[words];
        codes.piece(piece, of);
        if constexpr (!W::packed) {
#pragma unroll
            for (int p = 0; p < 4; p++) a[p] = of[p];
        } else if constexpr (qc_tile_of<W>::groups > 0) {
            parts.turn_to(all, piece, lane);
            qc_piece_fragment<W>(of, table, parts.rows, a);
            qc_clear_outside<W>(k0 + 16 * piece, lane, a);
        } else {
            float v[8];
            qc_piece_codes<W>(of, table, v);
            qc_apply_entries<W>(w, panel, k0 + 16 * piece, lane, v);
            qc_clear_outside<W>(k0 + 16 * piece, lane, v);
            qc_pack_piece(v, a, typename W::type());
        }
    }

    // The 8 elements of a piece, rounded to the weight's type, in fp32.
    template <class Table>
    QC_DEVICE void values(const uint8_t* w, int64_t panel, int64_t k0, int lane, int piece, Table table,
                          const qc_entries<W>& all, qc_row_parts<W>& parts, float (&v)[8]) const {
        uint32_t of[words];
        codes.piece(piece, of);
        if constexpr (!W::packed) {
            qc_unpack_words(of, v, typename W::type());
        } else if constexpr (qc_tile_of<W>::groups > 0) {
            parts.turn_to(all, piece, lane);
            qc_piece_values<W>(of, table, parts.rows, v);
            qc_clear_outside<W>(k0 + 16 * piece, lane, v);
        } else {
            qc_piece_codes<W>(of, table, v);
            qc_apply_entries<W>(w, panel, k0 + 16 * piece, lane, v);
            qc_clear_outside<W>(k0 + 16 * piece, lane, v);
            qc_round_values(v, typename W::type());
        }
    }
};

// The 8 elements of the piece at column `k`, read and decoded on the spot, rounded to the weight's type, in fp32.
template <class W, class Table>
QC_DEVICE void qc_read_piece(const uint8_t* w, int64_t panel, int64_t k, int lane, Table table, float (&v)[8]) {
    constexpr int columns = qc_tile_of<W>::columns;
    uint32_t of[qc_piece_of<W>::words];
    qc_load_piece<W>(w, (panel * W::tiles + k / columns) * 32 + lane, (int)(k % columns) / 16, of);
    if constexpr (!W::packed) {
        qc_unpack_words(of, v, typename W::type());
    } else if constexpr (qc_tile_of<W>::groups > 0) {
        const uint32_t column = (uint32_t)qc_min(k, W::cols - 1);
        const int64_t row = panel * 16 + lane / 4;
        const typename W::mma_parts rows[2] = {
            qc_parts_of<W>(W::load(w, row, column)), qc_parts_of<W>(W::load(w, row + 8, column))};
        qc_piece_values<W>(of, table, rows, v);
        qc_clear_outside<W>(k, lane, v);
    } else {
        qc_piece_codes<W>(of, table, v);
        qc_apply_entries<W>(w, panel, k, lane, v);
        qc_clear_outside<W>(k, lane, v);
        qc_round_values(v, typename W::type());
    }
}
