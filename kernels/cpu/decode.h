// Packed weights in registers: codes of any width from panels of 16 rows, what they stand for, the entries beside them.
//
//     codes   planes of 8, 4, 2 and 1 bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2): [panel][word][16 lanes], words of u32 that
//             hold columns of one row, lowest bits first
//     entries [panel][entry of the row][16 lanes], or as canonical where rows share them
//
// A format is a small struct `W` that its declaration is printed to (kernels/cpu/weights.py): which codes, when a new
// entry begins, the arithmetic of entries and of elements.  gemm.h walks panels with it.
#pragma once
#include <stdint.h>
#include <string.h>

#include "vec.h"

#define QG_METHOD inline __attribute__((always_inline))
#define QG_UNROLL _Pragma("GCC unroll 16")

struct qg_words { qu r[QC_REGS]; };  // 16 words of codes
QC_INLINE qg_words qg_load_words(const uint32_t* p) { qg_words w; memcpy(&w, p, sizeof w); return w; }

constexpr int64_t qg_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where a packed weight (n rows, k columns) lies: a pointer for each section, planes of codes first.
struct qg_packed {
    const char* part[12];
    int64_t n, k;
};

// --- rounding to the weight's type -------------------------------------------------------------------------------------

enum { QG_F32 = 0, QG_BF16 = 1, QG_F16 = 2 };

#if defined(QC_AVX512) || defined(QC_AVX2)
QC_INLINE vf qg_round_f16(vf x) { return vround_f16(x); }
#else
QC_COLD vf qg_round_f16(vf x) { return vround_f16(x); }  // lane by lane: too much code for every unrolled column
#endif

template <int ROUND> QC_INLINE vf qg_round(vf x) {
    if (ROUND == QG_BF16) return vround_bf16(x);
    if (ROUND == QG_F16) return qg_round_f16(x);
    return x;
}

// --- small floats ------------------------------------------------------------------------------------------------------

// fp32 of 8-bit floats that stand in the highest byte of each lane, whatever is below: e4m3 (MANTISSA = 3, no infinity,
// NaN 0x7f) and e5m2 (MANTISSA = 2, IEEE-like).  Subnormals are made by a subtraction of normal numbers, so that none is ever multiplied.
template <int MANTISSA> QC_INLINE qf qg_minifloat(qu top) {
    constexpr uint32_t BIAS = MANTISSA == 3 ? 7 : 15, REBIAS = (127 - BIAS) << 23, LEAST = (128 - BIAS) << 23;
    const qu magnitude = (top & 0x7f000000) >> (1 + MANTISSA);
    const qi normal = (qi)(magnitude + REBIAS);
    const qf small = (qf)(normal + (1 << 23)) - (qf)q_seti((int32_t)LEAST);
    qi bits = q_sel(q_ltu((qi)magnitude, q_seti(1 << 23)), (qi)small, normal);
    if (MANTISSA == 3) bits = q_sel(q_eq((qi)magnitude, q_seti(0x7f << 20)), q_seti(0x7fc00000), bits);
    else bits = q_sel(q_ltu((qi)magnitude, q_seti(0x1f << 23)), bits, bits + (int32_t)REBIAS);
    return (qf)(bits | (qi)(top & 0x80000000));
}

struct qc_e4m3 { uint8_t bits; };
struct qc_e5m2 { uint8_t bits; };
struct qc_e8m0 { uint8_t bits; };

template <int MANTISSA> QC_INLINE float qg_minifloat_of(uint8_t byte) {
    return qg_minifloat<MANTISSA>((qu)q_seti((int32_t)((uint32_t)byte << 24)))[0];
}
QC_INLINE float qg_power_of(uint8_t byte) {  // 2^(byte - 127), NaN for 255
    return qc_from_bits(byte == 255 ? 0x7fc00000 : byte ? (uint32_t)byte << 23 : 0x00400000);
}

// --- entries -----------------------------------------------------------------------------------------------------------

// One entry: a float, or the integer of a small code.
QC_INLINE float qg_entry(const float* p) { float x; memcpy(&x, p, 4); return x; }
QC_INLINE float qg_entry(const qc_f16* p) { qc_f16 x; memcpy(&x, p, 2); return qc_load(&x); }
QC_INLINE float qg_entry(const qc_bf16* p) { qc_bf16 x; memcpy(&x, p, 2); return qc_load(&x); }
QC_INLINE float qg_entry(const qc_e4m3* p) { return qg_minifloat_of<3>(p->bits); }
QC_INLINE float qg_entry(const qc_e5m2* p) { return qg_minifloat_of<2>(p->bits); }
QC_INLINE float qg_entry(const qc_e8m0* p) { return qg_power_of(p->bits); }
QC_INLINE int32_t qg_entry(const uint8_t* p) { return *p; }
QC_INLINE int32_t qg_entry(const int8_t* p) { return *p; }

// Sixteen entries side by side.
QC_INLINE vf qg_entries(const float* p) { return vload(p); }
QC_INLINE vf qg_entries(const qc_f16* p) { return vload(p); }
QC_INLINE vf qg_entries(const qc_bf16* p) { return vload(p); }
QC_INLINE vi qg_entries(const uint8_t* p) { return vload(p); }
QC_INLINE vi qg_entries(const int8_t* p) { return vload(p); }
QC_INLINE vf qg_entries(const qc_e4m3* p) {
    const vi b = vload((const uint8_t*)p);
    return QC_EACH(vf, qg_minifloat<3>((qu)b.r[i] << 24));
}
QC_INLINE vf qg_entries(const qc_e5m2* p) {
    const vi b = vload((const uint8_t*)p);
    return QC_EACH(vf, qg_minifloat<2>((qu)b.r[i] << 24));
}
QC_INLINE vf qg_entries(const qc_e8m0* p) {
    const vi b = vload((const uint8_t*)p);
    const vi power = vsel(veq(b, vset(0)), vset(0x00400000), vshl(b, 23));
    return vfrombits(vsel(veq(b, vset(255)), vset(0x7fc00000), power));
}

// Sixteen entries of which lane l is one(l).
template <class F> QG_METHOD vf qg_lanes_of(F one, float) {
    float lane[16];
    for (int l = 0; l < 16; l++) lane[l] = one(l);
    return vload(lane);
}
template <class F> QG_METHOD vi qg_lanes_of(F one, int32_t) {
    int32_t lane[16];
    for (int l = 0; l < 16; l++) lane[l] = one(l);
    return vload(lane);
}
template <class F> QG_METHOD auto qg_lanes(F one) { return qg_lanes_of(one, decltype(one(0))()); }

QC_INLINE vf qg_float(vf x) { return x; }
QC_INLINE vf qg_float(vi x) { return vtofloat(x); }
QC_INLINE vf qg_look_up(const float* table, vi index) {
    int32_t at[16];
    float lane[16];
    vstore(at, index);
    for (int l = 0; l < 16; l++) lane[l] = table[at[l]];
    return vload(lane);
}

// --- codes -------------------------------------------------------------------------------------------------------------

// The words of one panel's codes, GROUP columns at a time.
template <int BITS, int GROUP> struct qg_codes {
    static constexpr int LOW = BITS & 8 ? 8 : BITS & 4 ? 4 : BITS & 2 ? 2 : 1;
    static constexpr int MIDDLE = BITS == LOW ? 0 : (BITS - LOW) & 2 ? 2 : 1, HIGH = BITS - LOW - MIDDLE;
    const uint32_t *low, *middle, *high;
    qg_words w[3];

    QG_METHOD void start(const qg_packed& from, int64_t panel) {
        low = plane<LOW>(from, 0, panel);
        if (MIDDLE) middle = plane<MIDDLE>(from, 1, panel);
        if (HIGH) high = plane<HIGH>(from, 2, panel);
    }
    QG_METHOD void at(int64_t k) {
        w[0] = columns<LOW, 0>(low, k);
        if (MIDDLE) w[1] = columns<MIDDLE, LOW>(middle, k);
        if (HIGH) w[2] = columns<HIGH, LOW + MIDDLE>(high, k);
    }
    // The code of column J of the group in the lowest BITS bits; above them stands anything.
    template <int J> QG_METHOD qu code(int i) const {
        qu c = w[0].r[i] >> (LOW * J);
        if (MIDDLE) c = (c & MASK<LOW>) | (w[1].r[i] >> (MIDDLE * J) & ~MASK<LOW>);
        if (HIGH) c = (c & MASK<LOW + MIDDLE>) | (w[2].r[i] >> (HIGH * J) & ~MASK<LOW + MIDDLE>);
        return c;
    }
    // The same in the highest BITS bits; below them stands anything.
    template <int J> QG_METHOD qu top(int i) const {
        if constexpr (MIDDLE == 0 && LOW * GROUP <= 32) return w[0].r[i] << (32 - BITS - LOW * J);
        else return code<J>(i) << (32 - BITS);
    }

private:
    template <int WIDTH> static constexpr uint32_t MASK = (1u << WIDTH) - 1;

    template <int WIDTH> static QG_METHOD const uint32_t* plane(const qg_packed& from, int number, int64_t panel) {
        return (const uint32_t*)from.part[number] + panel * qg_up(from.k, 32 / (WIDTH ? WIDTH : 1)) * 16;
    }
    // The words that hold columns k … k + GROUP - 1, moved so that the code of column k begins at bit SHIFT.
    template <int WIDTH, int SHIFT> static QG_METHOD qg_words columns(const uint32_t* words, int64_t k) {
        constexpr int PER = 32 / (WIDTH ? WIDTH : 1);
        qg_words w = qg_load_words(words + (uint64_t)k / PER * 16);
        if (PER > GROUP) {
            const int first = (int)((uint64_t)k % PER) * WIDTH;
            QG_UNROLL for (int i = 0; i < QC_REGS; i++) w.r[i] = w.r[i] >> first << SHIFT;
        }
        return w;
    }
};

// --- what codes stand for: `value<J>(codes)` gives the 16 lanes of column J --------------------------------------------

// 16 floats that are looked up in registers; of an index only the lowest four bits count.
struct qg_table {
#if defined(QC_AVX512)
    __m512 all;
    QG_METHOD void load(const float* t) { all = _mm512_loadu_ps(t); }
    QG_METHOD qf look(qu index) const { return _mm512_permutexvar_ps((__m512i)index, all); }
#elif defined(QC_AVX2)
    __m256 low, high;
    QG_METHOD void load(const float* t) { low = _mm256_loadu_ps(t); high = _mm256_loadu_ps(t + 8); }
    QG_METHOD qf look(qu index) const {  // a permutation reads the low three bits; bit 3 picks the half
        const __m256 a = _mm256_permutevar8x32_ps(low, (__m256i)index), b = _mm256_permutevar8x32_ps(high, (__m256i)index);
        return _mm256_blendv_ps(a, b, (__m256)(index << 28));
    }
#else
    const float* all;
    QG_METHOD void load(const float* t) { all = t; }
    QG_METHOD qf look(qu index) const {
        qf r;
        QG_UNROLL for (int l = 0; l < QC_W; l++) r[l] = all[index[l] & 15];
        return r;
    }
#endif
};

// Integers from OFFSET on, 2^BITS of them, 16 floats by their lowest four bits.
template <int BITS, int OFFSET> struct qg_sixteen {
    float value[16];
    constexpr qg_sixteen() : value() {
        for (int i = 0; i < 16; i++) value[i] = (float)((i & ((1 << BITS) - 1)) + OFFSET);
    }
};
template <int BITS, int OFFSET> alignas(64) static constexpr qg_sixteen<BITS, OFFSET> qg_integers{};

// Integers: a code of BITS bits, SIGNED or not, plus OFFSET.
template <int BITS, bool SIGNED, int OFFSET> struct qg_counts {
#if defined(QC_AVX512)
    static constexpr bool LOOKS_UP = BITS <= 4;  // one permutation instead of a mask, an addition and a conversion
#else
    static constexpr bool LOOKS_UP = false;
#endif
    qg_table table;
    QG_METHOD void start() {
        if constexpr (LOOKS_UP) table.load(qg_integers<BITS, OFFSET>.value);
    }
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        if constexpr (LOOKS_UP) return QC_EACH(vf, table.look(codes.template code<J>(i)));
        else if constexpr (SIGNED) return QC_EACH(vf, count((qi)codes.template top<J>(i) >> (32 - BITS)));
        else return QC_EACH(vf, count((qi)(codes.template code<J>(i) & ((1u << BITS) - 1))));
    }
    static QG_METHOD qf count(qi code) { return __builtin_convertvector(OFFSET ? code + OFFSET : code, qf); }
};

// Values from a table of 2^BITS floats, at least 16 of them (a shorter one is repeated).
template <int BITS, const float* TABLE> struct qg_lookup {
    qg_table first;
#if defined(QC_AVX512)
    __m512 second;  // of 32 values
#endif
    QG_METHOD void start() {
        if constexpr (BITS <= 4) first.load(TABLE);
#if defined(QC_AVX512)
        if constexpr (BITS == 5) first.load(TABLE), second = _mm512_loadu_ps(TABLE + 16);
#endif
    }
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        return QC_EACH(vf, one(codes.template code<J>(i)));
    }
    QG_METHOD qf one(qu code) const {
        if constexpr (BITS <= 4) return first.look(code);
#if defined(QC_AVX512)
        if constexpr (BITS == 5) return _mm512_permutex2var_ps(first.all, (__m512i)code, second);
        return _mm512_i32gather_ps((__m512i)(code & ((1u << BITS) - 1)), TABLE, 4);
#else
        qf r;
        for (int l = 0; l < QC_W; l++) r[l] = TABLE[code[l] & ((1u << BITS) - 1)];
        return r;
#endif
    }
};

// 8-bit floats.
template <int MANTISSA> struct qg_floats {
    QG_METHOD void start() {}
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        return QC_EACH(vf, qg_minifloat<MANTISSA>(codes.template top<J>(i)));
    }
};
