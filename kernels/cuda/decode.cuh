// Packed weights, what every kernel that reads them shares: entries as stored, 8-bit floats, codes from planes of bits.
#pragma once
#include "device.cuh"

// --- 8-bit floats ----------------------------------------------------------------------------------------------------

// fp32 of the lowest byte, exactly. e5m2 is the upper byte of an f16; e4m3 becomes an f16 of the same digits whose
// exponent counts from 15 where e4m3's counts from 7: 2^8 less, subnormals included. e4m3 has no infinity, and one NaN
// of each sign.
template <int MANTISSA> QC_DEVICE float qc_minifloat(uint32_t byte) {
    if constexpr (MANTISSA == 2) {
        return qc_f32_of_f16((uint16_t)(byte << 8));
    } else {
        const float value = qc_f32_of_f16((uint16_t)((byte & 0x80u) << 8 | (byte & 0x7fu) << 7)) * 256.0f;
        return (byte & 0x7fu) == 0x7fu ? NAN : value;
    }
}

struct qc_e4m3 { uint8_t bits; };
struct qc_e5m2 { uint8_t bits; };
struct qc_e8m0 { uint8_t bits; };  // 2^(bits - 127), NaN for 255

// An entry as a float: exact for every stored type.
QC_DEVICE float qc_float(float v) { return v; }
QC_DEVICE float qc_float(qc_bf16 v) { return qc_f32_of_bf16(v.bits); }
QC_DEVICE float qc_float(qc_f16 v) { return qc_f32_of_f16(v.bits); }
QC_DEVICE float qc_float(uint8_t v) { return (float)v; }
QC_DEVICE float qc_float(int8_t v) { return (float)v; }
QC_DEVICE float qc_float(qc_e4m3 v) { return qc_minifloat<3>(v.bits); }
QC_DEVICE float qc_float(qc_e5m2 v) { return qc_minifloat<2>(v.bits); }
QC_DEVICE float qc_float(qc_e8m0 v) {
    return __uint_as_float(v.bits == 255 ? 0x7fc00000u : v.bits == 0 ? 0x00400000u : (uint32_t)v.bits << 23);
}

// --- codes of less than 8 bits ---------------------------------------------------------------------------------------

QC_DEVICE uint32_t qc_moved(uint32_t word, int from, int to) {
    return from >= to ? word >> (from - to) : word << (to - from);
}

// Both codes of pair `p` of a piece in the halves of a word, or-ed into `onto`, from the words of the planes of 4, 2
// and 1 bits (what is not declared goes unread), moved so that the piece stands first in them. kernels/layouts/cuda.py
// draws their bits.
template <int BITS> QC_DEVICE uint32_t qc_code_pair(uint32_t four, uint32_t two, uint32_t one, int p, uint32_t onto) {
    uint32_t pair = onto;
    if constexpr ((BITS & 4) != 0) pair = qc_and_or(four >> 4 * p, 0x000f000fu, pair);
    if constexpr ((BITS & 2) != 0) pair = qc_and_or(qc_moved(two, 2 * p, BITS & 4), 0x00030003u << (BITS & 4), pair);
    if constexpr ((BITS & 1) != 0) pair = qc_and_or(qc_moved(one, p, BITS & 6), 0x00010001u << (BITS & 6), pair);
    return pair;
}

// What codes stand for before scales and zero points.
enum qc_codes {
    QC_COUNTS,   // consecutive integers: code + W::first (W::flips_sign: from the code with its sign bit flipped)
    QC_SIXTEEN,  // one of 16 values, by a 4-bit code: W::code_value(code)
    QC_E4M3,     // the float that an 8-bit code is
    QC_E5M2,
    QC_VALUES,   // one of any number of values: W::code_value(code), which reads global memory
    QC_WINDOWS,  // with the W::window - 1 codes before it in its sequence one of 4096 values: W::code_value(window)
};

// --- a trellis -------------------------------------------------------------------------------------------------------

// The value of a window of a trellis (formats/trellis.py): the sum of the four signed bytes of a product,
// which counts in the last place of the float 1.5 * 2^23: conversions of integers are slow.
template <uint32_t MULTIPLIER> QC_DEVICE float qc_hashed(uint32_t window) {
    return __uint_as_float((uint32_t)__dp4a((int)(window * MULTIPLIER), 0x01010101, 0x4b400000)) - 12582912.0f;
}

// Whether codes are those of a trellis: what they stand for depends on the codes before them.
template <class W, bool PACKED = W::packed> struct qc_in_sequences { static constexpr bool value = false; };
template <class W> struct qc_in_sequences<W, true> { static constexpr bool value = W::codes == QC_WINDOWS; };

// The words of a trellis that hold the last codes of a lane's share of a tile, and of those the tile before it.
template <class W> struct qc_last_codes {
    static constexpr int count = W::bits == 2 ? 2 : 1;
    uint32_t words[count];

    // `share`: of this lane and the tile. A block has four tiles; before its first one stands its last one.
    QC_DEVICE void load_before(const uint8_t* w, int64_t share) {
        const int64_t last = share / 32 % 4 ? share - 32 : share + 96;
        if constexpr (W::bits == 4) words[0] = ((const uint32_t*)(w + W::plane(0)))[last * 4 + 3];
        else if constexpr (W::bits == 3) words[0] = ((const uint32_t*)(w + W::plane(1)))[last];
        else {
            const uint2 read = ((const uint2*)(w + W::plane(0)))[last];
            words[0] = read.x, words[1] = read.y;
        }
    }
};
struct qc_no_codes {};

// A piece of a trellis from the words of its tile: bits W::bits * (4 piece - (W::window - 1)) and those that follow of
// the streams of rows g and g + 8 (kernels/layouts/cuda.py).
template <class W, class Words>
QC_DEVICE void qc_piece_of_sequences(
    const Words& words, const qc_last_codes<W>& before, int piece, uint32_t (&of)[2]) {
    if constexpr (W::bits == 4) {  // two codes of the piece before it
        const uint32_t last = piece == 0 ? before.words[0] : words[piece == 0 ? 0 : piece - 1];
        of[0] = __byte_perm(last, words[piece], 0x0541), of[1] = __byte_perm(last, words[piece], 0x0763);
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t low = words[half];
            if constexpr (W::bits == 2) {  // five codes
                of[half] = piece < 2 ? __funnelshift_r(before.words[W::bits == 2 ? half : 0], low, 22 + 8 * piece)
                                     : low >> (8 * piece - 10);
            } else {  // three codes
                const uint32_t high = words[2] >> 16 * half, last = before.words[0] << 16 * (1 - half);
                of[half] = piece == 0   ? __funnelshift_r(last, low, 23)
                           : piece == 1 ? low >> 3
                                        : __funnelshift_r(low, high, 12 * piece - 9);
            }
        }
    }
}
