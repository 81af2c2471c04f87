// Packed weights in registers: codes of any width from panels of 16 rows, what they stand for, the entries beside them.
//
//     codes   planes of 8, 4, 2 and 1 bits (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2): [panel][word][16 lanes], words of u32
//     that
//             hold columns of one row, lowest bits first
//     entries [panel][entry of the row][16 lanes], or as canonical where rows share them
//
// A format is a small struct `W` that its declaration is printed to (kernels/cpu/weights.py): which codes, when a new
// entry begins, the arithmetic of entries and of elements.  gemm.h walks panels with it.
#pragma once
#include <stdint.h>
#include <string.h>

#include "vec.h"
#if defined(QC_AVX512)
#include <cpuid.h>
#endif

#define QG_METHOD inline __attribute__((always_inline))
#define QG_UNROLL _Pragma("GCC unroll 16")

struct qg_words { qu r[QC_REGS]; };  // 16 words of codes
// By registers: GCC 12 copies the struct 16 bytes at a time through memory, from where 32 bytes load slowly.
QC_INLINE qg_words qg_load_words(const uint32_t* p) {
    return QC_EACH(qg_words, (qu)q_load((const int32_t*)p + i * QC_W));
}

// How far ahead of a walk over codes its bytes are asked for: the processor's own prefetching stops at the end of a
// page of 4 KiB, of which a mapped file may consist. Asking for an address behind the last byte is no fault.
enum { QG_AHEAD = 4096 };

// Asks for a line of codes, which a walk reads once. A Zen 4 is asked past the L2, where x has its place (the runtime
// compiles with QG_PAST_L2 on one). Two rows by int8 took twice as long so on a Xeon.
QC_INLINE void qg_ask_once(const void* line) {
#if defined(QG_PAST_L2)
    __builtin_prefetch(line, 0, 0);
#else
    __builtin_prefetch(line);
#endif
}

constexpr int64_t qg_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where a packed weight (n rows, k columns) lies: a pointer for each section, planes of codes first.
struct qg_packed {
    const char* part[12];
    int64_t n, k;
};

#if defined(QC_AVX512)
// Whether this is a Zen 4. Asked once, since in virtual machines that takes microseconds.
QC_COLD bool qg_is_zen4() {
    static int known;  // 0: not asked yet
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found == 0) {
        unsigned a = 0, amd = 0, c = 0, d = 0, family = 0, b = 0;
        __get_cpuid(0, &a, &amd, &c, &d);
        __get_cpuid(1, &family, &b, &c, &d);
        // "Auth" of AuthenticAMD, and the family 0x19: 0xf and 0xa more. A Zen 3, its other member, has no AVX-512.
        found = amd == 0x68747541 && (family >> 8 & 0xf) == 0xf && (family >> 20 & 0xff) == 0xa ? 1 : -1;
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found > 0;
}
#endif

// --- rounding to the weight's type -----------------------------------------------------------------------------------

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

// --- small floats ----------------------------------------------------------------------------------------------------

// fp32 of 8-bit floats that stand in the highest byte of each lane, whatever is below: e4m3 (MANTISSA = 3, no infinity,
// NaN 0x7f) and e5m2 (MANTISSA = 2, IEEE-like).  Subnormals are made by a subtraction of normal numbers, so that none
// is ever multiplied.  `qg_number` takes every code for a number, `qg_minifloat` knows those that are none.
template <int MANTISSA> QC_INLINE qf qg_number(qu top) {
    constexpr int BIAS = MANTISSA == 3 ? 7 : 15, REBIAS = (127 - BIAS) << 23, LEAST = (128 - BIAS) << 23;
    const qi bits = ((qi)top >> (1 + MANTISSA)) & (int32_t)(0x80000000 | 0x7f000000 >> (1 + MANTISSA));
    const qi sign = bits & (int32_t)0x80000000;
    const qm subnormal = q_eq(bits & 0x7f800000, qi{});
    // A difference that is zero has no sign of its own.
    const qf small = q_or((qf)(bits + LEAST) - (qf)(sign | LEAST), (qf)sign);
    return q_sel(subnormal, small, (qf)(bits + REBIAS));
}

template <int MANTISSA> QC_INLINE qf qg_minifloat(qu top) {
    constexpr int BIAS = MANTISSA == 3 ? 7 : 15, REBIAS = (127 - BIAS) << 23;
    const qi magnitude = (qi)((top & 0x7f000000) >> (1 + MANTISSA)), number = (qi)qg_number<MANTISSA>(top);
    if (MANTISSA == 3) return (qf)q_sel(q_eq(magnitude, q_seti(0x7f << 20)), q_seti(0x7fc00000), number);
    return (qf)q_sel(q_lt(magnitude, q_seti(0x1f << 23)), number, number + REBIAS);
}

// Whether a byte of the words has all bits of `pattern`.
QC_INLINE bool qg_any_byte(const qg_words& w, int pattern) {
#if defined(QC_AVX512)
    const __m512i wanted = _mm512_set1_epi8((char)pattern);
    return _mm512_cmpeq_epi8_mask(_mm512_and_si512((__m512i)w.r[0], wanted), wanted) != 0;
#elif defined(QC_AVX2)
    const __m256i wanted = _mm256_set1_epi8((char)pattern);
    const __m256i a = _mm256_and_si256((__m256i)w.r[0], wanted), b = _mm256_and_si256((__m256i)w.r[1], wanted);
    return _mm256_movemask_epi8(_mm256_or_si256(_mm256_cmpeq_epi8(a, wanted), _mm256_cmpeq_epi8(b, wanted))) != 0;
#else
    uint8_t bytes[64];
    memcpy(bytes, &w, sizeof bytes);
    bool any = false;
    for (int i = 0; i < 64; i++) any |= (bytes[i] & pattern) == pattern;
    return any;
#endif
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

// --- entries ---------------------------------------------------------------------------------------------------------

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

// Entries that share bytes (kernels/layouts/panels.py, `join_entries`), of sixteen rows. Of 4 bits: entry `number` from
// the 16 bytes that hold it and its neighbour.
QC_INLINE vi qg_of_two(const uint8_t* two, int64_t number) {
    const vi both = vload(two);
    const int skip = number % 2 * 4;
    return QC_EACH(vi, (both.r[i] >> skip) & 15);
}

// Of 6 bits, four in 48 bytes: `load` moves to them, `at` gives one.
struct qg_of_four {
#if defined(QC_AVX512)
    __m512i quarters;  // an entry in each

    QG_METHOD void load(const uint8_t* four) {
        const __m512i all = _mm512_maskz_loadu_epi64(0x3f, four);
        const __m512i nibbles = _mm512_shuffle_i64x2(all, all, 0x50), others = _mm512_shuffle_i64x2(all, all, 0xaa);
        const __m512i low = _mm512_srlv_epi64(nibbles, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
        const __m512i high = _mm512_rolv_epi64(others, _mm512_setr_epi64(4, 4, 2, 2, 0, 0, 62, 62));  // to bits 4 and 5
        const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);  // low where 15 has bits
        quarters = _mm512_and_si512(both, _mm512_set1_epi8(63));
    }
    QG_METHOD vi at(int64_t number) const {
        alignas(64) static constexpr int32_t words[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i from = _mm512_castsi128_si512(_mm_load_si128((const __m128i*)words + number % 4));
        return {(qi)_mm512_cvtepu8_epi32(_mm512_castsi512_si128(_mm512_permutexvar_epi32(from, quarters)))};
    }
#else
    const uint8_t* first;

    QG_METHOD void load(const uint8_t* four) { first = four; }
    QG_METHOD vi at(int64_t number) const {
        const vi low = qg_of_two(first + number % 4 / 2 * 16, number), others = vload(first + 32);
        const int skip = number % 4 * 2;
        return QC_EACH(vi, low.r[i] | ((others.r[i] >> skip) & 3) << 4);
    }
#endif
};

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
QC_INLINE qf qg_gather(const float* table, qu index) {
#if defined(QC_AVX512)
    return _mm512_i32gather_ps((__m512i)index, table, 4);
#elif defined(QC_AVX2)
    return _mm256_i32gather_ps(table, (__m256i)index, 4);
#else
    qf r;
    for (int l = 0; l < QC_W; l++) r[l] = table[index[l]];
    return r;
#endif
}
QC_INLINE vf qg_look_up(const float* table, vi index) { return QC_EACH(vf, qg_gather(table, (qu)index.r[i])); }

// Entries of a stream that serve COVERS elements, many rows long: row r, column k reads entry (r * K + k) / COVERS. The
// lanes are kept until one of them meets another entry.
template <class T, int64_t COVERS> struct qg_stream {
    vf lanes;
    int64_t until = 0;
    QG_METHOD vf at(const qg_packed& from, int number, int64_t panel, int64_t k) {
        if (k >= until) move(from, (const T*)from.part[number], panel, k);
        return lanes;
    }

private:
    __attribute__((noinline)) void move(const qg_packed& from, const T* entries, int64_t panel, int64_t k) {
        float lane[16];
        until = INT64_MAX;
        for (int l = 0; l < 16; l++) {
            const int64_t row = panel * 16 + l < from.n ? panel * 16 + l : from.n - 1;  // past the last row: its entry
            const int64_t entry = (row * from.k + k) / COVERS, next = (entry + 1) * COVERS - row * from.k;
            lane[l] = (float)qg_entry(entries + entry);
            until = next < until ? next : until;
        }
        lanes = vload(lane);
    }
};

// --- codes -----------------------------------------------------------------------------------------------------------

// Bits of a where the constant MASK has them, else of b: in b's register, which most callers need no more, so that none
// is copied.
template <uint32_t MASK> QC_INLINE qu qg_select(qu a, qu b) {
#if defined(QC_AVX512)
    return (qu)_mm512_ternarylogic_epi32((__m512i)b, (__m512i)a, _mm512_set1_epi32((int32_t)MASK), 0xd8);
#else
    return (a & MASK) | (b & ~MASK);
#endif
}

// GROUP columns of one plane: codes of WIDTH bits, of which that of column J is wanted at bit SHIFT.
template <int WIDTH, int SHIFT, int GROUP> struct qg_plane {
    static constexpr int PER = 32 / WIDTH, WORDS = GROUP > PER ? GROUP / PER : 1;
    static constexpr int FIRST = PER > GROUP && GROUP * WIDTH + SHIFT <= 32 ? SHIFT : 0;  // bit of column 0's code
    const uint32_t* words;
    int64_t ahead;  // bytes
    qg_words w[WORDS];

    QG_METHOD void start(const qg_packed& from, int number, int64_t panel) {
        ahead = QG_AHEAD;
        words = (const uint32_t*)from.part[number] + panel * qg_up(from.k, PER) * 16;
    }
    // Panels are walked in turns (gemm.h, `look_ahead`).
    QG_METHOD void look_ahead(int64_t k, int64_t columns, int64_t apart) {
        constexpr int64_t LAST = QG_AHEAD / 64 * PER;
        ahead = QG_AHEAD + (k + LAST >= columns ? (apart - 1) * qg_up(columns, PER) * 64 : 0);
    }
    QG_METHOD void at(int64_t k) {
        const uint32_t* const first = words + (uint64_t)k / PER * 16;
        QG_UNROLL for (int line = 0; line < GROUP * WIDTH / 32; line++)
            qg_ask_once((const char*)first + ahead + 64 * line);
        QG_UNROLL for (int j = 0; j < WORDS; j++) w[j] = qg_load_words(first + j * 16);
        if (PER > GROUP) {  // a part of a word
            const int skip = (int)((uint64_t)k % PER) * WIDTH;
            QG_UNROLL for (int i = 0; i < QC_REGS; i++) w[0].r[i] = w[0].r[i] >> skip << FIRST;
        }
    }
    // Column J's code from bit SHIFT on; the other bits hold anything.
    template <int J> QG_METHOD qu code(int i) const {
        constexpr int RIGHT = J % PER * WIDTH, LEFT = SHIFT - FIRST;
        const qu word = w[J / PER].r[i];
        if constexpr (RIGHT >= LEFT) return word >> (RIGHT - LEFT);
        else return word << (LEFT - RIGHT);
    }
};
template <int SHIFT, int GROUP> struct qg_plane<0, SHIFT, GROUP> {};

#if defined(QC_AVX512)
// Byte b of each word of the result holds the eight bits of a word from bit BEGIN + b * BY on; those outside of it are
// anything. By AVX-512 VBMI, which x86-64-v4 does not promise.
template <int BEGIN, int BY> struct qg_bits_of_bytes {  // in words of 64 bits
    uint8_t bit[64];
    constexpr qg_bits_of_bytes() : bit() {
        for (int i = 0; i < 64; i++) bit[i] = (uint8_t)((i % 8 / 4 * 32 + BEGIN + i % 4 * BY) & 63);
    }
};
template <int BEGIN, int BY> QC_INLINE qu qg_spread(qu word) {
    alignas(64) static constexpr qg_bits_of_bytes<BEGIN, BY> all{};
    qu bytes;
    asm("vpmultishiftqb %2, %1, %0" : "=v"(bytes) : "v"(*(const qu*)all.bit), "v"(word));
    return bytes;
}
#endif

// The codes of one panel, GROUP columns at a time.
template <int BITS, int GROUP> struct qg_codes {
    static constexpr int LOW = BITS & 8 ? 8 : BITS & 4 ? 4 : BITS & 2 ? 2 : 1;
    static constexpr int MIDDLE = BITS == LOW ? 0 : (BITS - LOW) & 2 ? 2 : 1, HIGH = BITS - LOW - MIDDLE;
    qg_plane<LOW, 0, GROUP> low;
    qg_plane<MIDDLE, LOW, GROUP> middle;
    qg_plane<HIGH, LOW + MIDDLE, GROUP> high;

    QG_METHOD void start(const qg_packed& from, int64_t panel) {
        low.start(from, 0, panel);
        if constexpr (MIDDLE != 0) middle.start(from, 1, panel);
        if constexpr (HIGH != 0) high.start(from, 2, panel);
    }
    QG_METHOD void look_ahead(int64_t k, int64_t columns, int64_t apart) {
        low.look_ahead(k, columns, apart);
        if constexpr (MIDDLE != 0) middle.look_ahead(k, columns, apart);
        if constexpr (HIGH != 0) high.look_ahead(k, columns, apart);
    }
    QG_METHOD void at(int64_t k) {
        low.at(k);
        if constexpr (MIDDLE != 0) middle.at(k);
        if constexpr (HIGH != 0) high.at(k);
    }
    // The code of column J of the group in the lowest BITS bits; above them stands anything.
    template <int J> QG_METHOD qu code(int i) const {
        qu c = low.template code<J>(i);
        if constexpr (MIDDLE != 0) c = qg_select<(1 << LOW) - 1>(c, middle.template code<J>(i));
        if constexpr (HIGH != 0) c = qg_select<(1 << (LOW + MIDDLE)) - 1>(c, high.template code<J>(i));
        return c;
    }
    // The same in the highest BITS bits; below them stands anything.
    template <int J> QG_METHOD qu top(int i) const {
        if constexpr (MIDDLE == 0 && LOW * GROUP >= 32)
            return low.w[J / low.PER].r[i] << (32 - BITS - J % low.PER * LOW);
        else return code<J>(i) << (32 - BITS);
    }
};

// The codes of one panel of a trellis (formats/trellis.py), in the order that kernels/layouts/cpu.py draws: those of a
// sequence are neighbours, so that the window of a code is a shift of a word that begins with the codes before it. A
// block of 256 columns is a circle: before its first words stand its last ones.
template <int BITS> struct qg_sequence_words {
    static constexpr int GROUP = BITS == 4 ? 16 : 32, CIRCLE = 256 / GROUP;  // columns of two words; of them a block
    static constexpr int RUN = GROUP / 4;                                     // codes of a sequence in a group
    const uint32_t* words;
    const uint32_t* highest;  // 3 bits: the words of the other plane

    QG_METHOD void start(const qg_packed& from, int64_t panel) {
        words = (const uint32_t*)from.part[0] + panel * (from.k / GROUP) * 32;
        highest = (const uint32_t*)from.part[BITS == 3] + panel * (from.k / GROUP) * 16;
    }
    // The group that starts at column k, and the group before it.
    struct groups { int64_t now, last; };
    QG_METHOD groups find(int64_t k) const {
        const int64_t now = (uint64_t)k / GROUP;
        qg_ask_once((const char*)(words + now * 32) + QG_AHEAD);
        qg_ask_once((const char*)(words + now * 32) + QG_AHEAD + 64);
        return {now, (uint64_t)now % CIRCLE ? now - 1 : now + CIRCLE - 1};
    }
    // The words of sequences 2 * pair and 2 * pair + 1, half of a word each; for 3 bits the lower bits of their codes.
    QG_METHOD qg_words pair_of(int64_t group, int pair) const { return qg_load_words(words + group * 32 + pair * 16); }
    static constexpr int sequence(int column) { return column % 8 / 2; }
    static constexpr int place(int column) { return column / 16 * 4 + column % 16 / 8 * 2 + column % 2; }
};

template <int BITS> struct qg_sequences : qg_sequence_words<BITS> {
    typedef qg_sequence_words<BITS> base;
    qg_words before[4];         // of each sequence the codes before, then as many of the group's as there is room for
    qg_words all[BITS == 3 ? 4 : 1];  // 3 bits: all eight codes of the group

    QG_METHOD void at(int64_t k) {
        const auto [group, last] = base::find(k);
        QG_UNROLL for (int pair = 0; pair < 2; pair++) {
            const qg_words old = base::pair_of(last, pair), now = base::pair_of(group, pair);
            if constexpr (BITS == 3) {
                const qg_words old_highest = qg_load_words(base::highest + last * 16);
                const qg_words now_highest = qg_load_words(base::highest + group * 16);
                QG_UNROLL for (int i = 0; i < QC_REGS; i++)
                    QG_UNROLL for (int t = 0; t < 2; t++) {
                        const int s = 2 * pair + t;
                        const qu codes = stream(now.r[i], now_highest.r[i], s);
                        all[s].r[i] = codes;
                        before[s].r[i] = qg_select<0xfff>(stream(old.r[i], old_highest.r[i], s) >> 12, codes << 12);
                    }
            } else {
                QG_UNROLL for (int i = 0; i < QC_REGS; i++) {
                    before[2 * pair].r[i] = qg_select<0xffff>(old.r[i], now.r[i] << 16);
                    before[2 * pair + 1].r[i] = qg_select<0xffff>(old.r[i] >> 16, now.r[i]);
                }
            }
        }
    }
    // The window of column J.
    template <int J> QG_METHOD qu window(int i) const {
        constexpr int SEQUENCE = base::sequence(J), PLACE = base::place(J);
        if constexpr (BITS == 4) return before[SEQUENCE].r[i] >> 4 * (PLACE + 2) & 0xfffu;
        else if constexpr (BITS == 2) return before[SEQUENCE].r[i] >> 2 * (PLACE + 3) & 0xfffu;
        else if constexpr (PLACE < 4) return before[SEQUENCE].r[i] >> 3 * (PLACE + 1) & 0xfffu;
        else return all[SEQUENCE].r[i] >> 3 * (PLACE - 3) & 0xfffu;
    }

private:
    // Eight codes of sequence s: 16 bits of a half word, and above them a byte; above that stands anything.
    static QG_METHOD qu stream(qu word, qu bytes, int s) {
        return qg_select<0xffff>(s % 2 ? word >> 16 : word, s == 3 ? bytes >> 8 : bytes << (16 - 8 * s));
    }
};

#if defined(QC_AVX512)
// The same for 4 and 2 bits, with fewer instructions for a window: 16 bits of the codes of a group and of the group
// before it hold the windows of two places, the lowest 12 bits one and the highest 12 bits the other. Both sequences of
// a pair are cut at once, one in each half of a word.
template <int BITS> struct qg_sequence_spans : qg_sequence_words<BITS> {
    typedef qg_sequence_words<BITS> base;
    static constexpr int NEXT = 4 / BITS, SPANS = base::RUN / 2;  // codes in 4 bits
    __m512i spans[2][SPANS];

    QG_METHOD void at(int64_t k) {
        const auto [group, last] = base::find(k);
        QG_UNROLL for (int pair = 0; pair < 2; pair++)
            cut<0>(spans[pair], (__m512i)base::pair_of(last, pair).r[0], (__m512i)base::pair_of(group, pair).r[0]);
    }
    template <int J> QG_METHOD qu window(int) const {
        constexpr int SEQUENCE = base::sequence(J), PLACE = base::place(J);
        constexpr bool ODD = SEQUENCE % 2, HIGH = PLACE / NEXT % 2;
        const __m512i span = spans[SEQUENCE / 2][PLACE / NEXT / 2 * NEXT + PLACE % NEXT];
        if constexpr (ODD) return HIGH ? (qu)span >> 20 : (qu)span >> 16 & 0xfffu;
        else return HIGH ? (qu)_mm512_maskz_srli_epi16(0x55555555, span, 4) : (qu)span & 0xfffu;
    }

private:
    // Span S begins where its lower window does, at bit BY of the group before, and ends in this one.
    template <int S> static QG_METHOD void cut(__m512i (&to)[SPANS], __m512i old, __m512i now) {
        constexpr int BY = BITS * (S / NEXT * 2 * NEXT + S % NEXT + 1) + 4;
        if constexpr (S < SPANS) {
            to[S] = BY == 16 ? now : _mm512_or_si512(_mm512_srli_epi16(old, BY), _mm512_slli_epi16(now, 16 - BY));
            cut<S + 1>(to, old, now);
        }
    }
};
template <> struct qg_sequences<4> : qg_sequence_spans<4> {};
template <> struct qg_sequences<2> : qg_sequence_spans<2> {};

// The same for 3 bits, where the windows of two places never lie at the two ends of 16 bits: each is moved to the
// highest 12 of them, but for one that lies in the lowest 12 bits of a half word as it is. A sequence has 24 bits of
// codes in a group: bits 0 to 15 in a half word, bits 16 to 23 in a byte of the other plane.
template <> struct qg_sequences<3> : qg_sequence_words<3> {
    __m512i before[2], now[2], newest[2];  // of a pair of sequences bits -16 to -1, 0 to 15 and 8 to 23
    int64_t held;                          // the group that `newest` is of: the next one has these bits before it

    QG_METHOD void start(const qg_packed& from, int64_t panel) {
        qg_sequence_words<3>::start(from, panel);
        held = -1;
    }
    QG_METHOD void at(int64_t k) {
        const auto [group, last] = find(k);
        if (last == held) {
            before[0] = newest[0];
            before[1] = newest[1];
        } else {
            before[0] = highest_bits<0>(words_of<0>(last), last);
            before[1] = highest_bits<1>(words_of<1>(last), last);
        }
        held = group;
        now[0] = words_of<0>(group);
        now[1] = words_of<1>(group);
        newest[0] = highest_bits<0>(now[0], group);
        newest[1] = highest_bits<1>(now[1], group);
    }
    // A window ends at bit 3 * place + 2. The two sequences of a pair share the instructions that move it.
    template <int J> QG_METHOD qu window(int) const {
        constexpr int PAIR = sequence(J) / 2, PLACE = place(J);
        constexpr bool ODD = sequence(J) % 2;
        if constexpr (PLACE == 3) return ODD ? (qu)now[PAIR] >> 16 & 0xfffu : (qu)now[PAIR] & 0xfffu;
        const __m512i top = moved<PLACE>(before[PAIR], now[PAIR], newest[PAIR]);
        return ODD ? (qu)top >> 20 : (qu)_mm512_maskz_srli_epi16(0x55555555, top, 4);
    }

private:
    template <int PAIR> QG_METHOD __m512i words_of(int64_t group) const { return (__m512i)pair_of(group, PAIR).r[0]; }
    // Bits 8 to 23: the higher bytes of the half words, and above them bytes 2 * PAIR and 2 * PAIR + 1 of the other
    // plane's word.
    template <int PAIR> QG_METHOD __m512i highest_bits(__m512i words, int64_t group) const {
        const __m512i bytes = _mm512_loadu_si512(highest + group * 16);
        const __m128i first = _mm_set1_epi32(PAIR ? 0x03000200 : 0x01000000);
        const __m128i from = _mm_add_epi8(first, _mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
        return _mm512_mask_shuffle_epi8(
            _mm512_srli_epi16(words, 8), 0xaaaaaaaaaaaaaaaa, bytes, _mm512_broadcast_i32x4(from));
    }
    template <int PLACE> static QG_METHOD __m512i moved(__m512i before, __m512i now, __m512i newest) {
        constexpr int UP = 13 - 3 * PLACE;  // bits that `now` goes up
        if constexpr (PLACE < 3) return _mm512_or_si512(_mm512_srli_epi16(before, 16 - UP), _mm512_slli_epi16(now, UP));
        if constexpr (PLACE == 4) return _mm512_slli_epi16(now, UP);
        if constexpr (PLACE == 5)
            return _mm512_or_si512(_mm512_srli_epi16(now, -UP), _mm512_slli_epi16(newest, UP + 8));
        return PLACE == 7 ? newest : _mm512_slli_epi16(newest, UP + 8);
    }
};
#endif

// --- what codes stand for: `value<J>(codes)` gives the 16 lanes of column J ------------------------------------------

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
        const __m256 a = _mm256_permutevar8x32_ps(low, (__m256i)index);
        const __m256 b = _mm256_permutevar8x32_ps(high, (__m256i)index);
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

// Tables that codes are looked up in. A printed one:
template <const float* TABLE> struct qg_printed { static QG_METHOD const float* table() { return TABLE; } };

// Integers from OFFSET on, as many as codes of BITS bits, repeated up to 16:
template <int BITS, int OFFSET> struct qg_integers {
    static constexpr int SIZE = BITS < 4 ? 16 : 1 << BITS;
    struct values {
        float value[SIZE];
        constexpr values() : value() {
            for (int i = 0; i < SIZE; i++) value[i] = (float)((i & ((1 << BITS) - 1)) + OFFSET);
        }
    };
    static QG_METHOD const float* table() {
        alignas(64) static constexpr values all{};
        return all.value;
    }
};

// Values are numbers, or numbers times a power of two that a sum of them is multiplied by in the end (UNIT).
struct qg_whole {
    static constexpr bool IN_PLACE = false;
    static constexpr float UNIT = 1.0f;
};

#if defined(QC_AVX512)
// Codes of BITS bits in two planes as bytes, from bit TO of each on; AVX-512 VBMI, which x86-64-v4 does not promise,
// makes those of four columns at once.
template <int BITS, int TO> struct qg_joined {
    typedef qg_codes<BITS, 32> planes;
    static constexpr int LOW = planes::LOW, PER = 32 / LOW, STEPS = PER / 4;
    static_assert(planes::MIDDLE != 0 && planes::HIGH == 0, "two planes");
    static constexpr int WORDS = 8;  // most words of bytes of a group
    // Column J has byte `byte(J)` of word `word(J)`. Of a word of the wider plane, word S has columns S, S + STEPS, …
    static constexpr int byte(int column) { return column % PER / STEPS; }
    static constexpr int word(int column) { return column / PER * STEPS + column % STEPS; }
    // All words of a group. The other bits of the bytes are arbitrary.
    template <int I = 0, class C> static QG_METHOD void make(const C& codes, qu (&bytes)[WORDS]) {
        constexpr int WIDTH = C::MIDDLE, COUNT = sizeof codes.low.w / sizeof codes.low.w[0] * STEPS;
        static_assert(COUNT <= WORDS && C::LOW == LOW, "words of a group");
        if constexpr (I < COUNT) {
            constexpr int S = I % STEPS, COLUMN = I / STEPS * PER + S, OTHER = 32 / WIDTH, RIGHT = LOW * S - TO;
            constexpr int BEGIN = COLUMN % OTHER * WIDTH + decltype(codes.middle)::FIRST - LOW - TO;
            const qu of_low = codes.low.w[I / STEPS].r[0];
            const qu low = RIGHT > 0 ? of_low >> RIGHT : of_low << -RIGHT;
            const qu middle = qg_spread<BEGIN, STEPS * WIDTH>(codes.middle.w[COLUMN / OTHER].r[0]);
            bytes[I] = qg_select<(0x01010101u << TO) * ((1 << LOW) - 1)>(low, middle);
            make<I + 1>(codes, bytes);
        }
    }
};

// Such codes that count, plus OFFSET. A byte becomes the lowest one of a word; with an OFFSET, which turns the highest
// bit into a sign, the highest one, so that no instruction has to extend the sign, and the number is that of the UNIT.
template <int BITS, int OFFSET> struct qg_counts_by_bytes : qg_whole {
    static constexpr bool SIGNED = OFFSET != 0;
    static_assert(OFFSET == 0 || OFFSET == -(1 << (BITS - 1)), "no sign");
    static constexpr float UNIT = SIGNED ? 1.0f / (float)(1u << (32 - BITS)) : 1.0f;
    static constexpr int TO = SIGNED ? 8 - BITS : 0;
    typedef qg_joined<BITS, TO> joined;
    __m512i places[4];
    qu bytes[joined::WORDS];
    QG_METHOD void start() {
        QG_UNROLL for (int b = 0; b < 4; b++) {
            const __m128i from = _mm_setr_epi32(b, b + 4, b + 8, b + 12);
            const __m128i place = SIGNED ? _mm_or_si128(_mm_slli_epi32(from, 24), _mm_set1_epi32(0x808080))
                                         : _mm_or_si128(from, _mm_set1_epi32((int32_t)0x80808000));
            places[b] = _mm512_broadcast_i32x4(place);
        }
    }
    template <class C> QG_METHOD void at(const C& codes) {
        constexpr int COUNT = sizeof codes.low.w / sizeof codes.low.w[0] * joined::STEPS;
        joined::make(codes, bytes);
        const __m512i mask = _mm512_set1_epi32((int32_t)((0x01010101u << TO) * ((1 << BITS) - 1)));
        const __m512i sign = _mm512_set1_epi8((char)0x80);
        QG_UNROLL for (int i = 0; i < COUNT; i++) {
            const __m512i all = (__m512i)bytes[i];
            bytes[i] = (qu)(SIGNED ? _mm512_ternarylogic_epi32(all, mask, sign, 0x6a)  // all & mask ^ sign
                                   : _mm512_and_si512(all, mask));
        }
    }
    // Column J's number over UNIT, and the number.
    template <int J, class C> QG_METHOD vf units(const C&) const {
        return vf{{(qf)_mm512_cvtepi32_ps(word<joined::byte(J)>((__m512i)bytes[joined::word(J)]))}};
    }
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        return SIGNED ? units<J>(codes) * vset(UNIT) : units<J>(codes);
    }

private:
    // Byte B of each word: by a mask where that is enough, which has more pipes than a shuffle.
    template <int B> QG_METHOD __m512i word(__m512i x) const {
        if constexpr (B == 0 && !SIGNED) return _mm512_and_si512(x, _mm512_set1_epi32(255));
        if constexpr (B == 3 && SIGNED) return _mm512_and_si512(x, _mm512_set1_epi32((int32_t)0xff000000));
        return _mm512_shuffle_epi8(x, places[B]);
    }
};

// What codes that count have in two planes. For more rows FMA decides, whose pipes vpmultishiftqb takes on a Zen 4.
template <int BITS, int OFFSET> struct qg_counts_faster {
    typedef qg_counts_by_bytes<BITS, OFFSET> faster;
    static constexpr int FASTER_ROWS = 4, FASTER_GROUP = faster::joined::PER;
    static bool runs() { return __builtin_cpu_supports("avx512vbmi"); }
};
#endif

// Integers: a code of BITS bits, SIGNED or not, plus OFFSET.
template <int BITS, bool SIGNED, int OFFSET> struct qg_counts : qg_whole {
    QG_METHOD void start() {}
    template <class C> QG_METHOD void at(const C&) {}
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        if constexpr (SIGNED) return QC_EACH(vf, count((qi)codes.template top<J>(i) >> (32 - BITS)));
        else return QC_EACH(vf, natural(codes.template code<J>(i)));
    }

private:
    static QG_METHOD qf count(qi code) { return __builtin_convertvector(OFFSET ? code + OFFSET : code, qf); }
    static QG_METHOD qf natural(qu code) {
        constexpr uint32_t MASK = (1u << BITS) - 1;
#if defined(QC_AVX512)
        if (OFFSET != 0) {  // in the lowest bits of 2^23, which is subtracted with the offset: one instruction less
            const __m512i mask = _mm512_set1_epi32(MASK), power = _mm512_set1_epi32(0x4b000000);
            return (qf)_mm512_ternarylogic_epi32((__m512i)code, mask, power, 0xea) - (0x1p23f - OFFSET);
        }
#endif
        return count((qi)(code & MASK));
    }
};

#if defined(QC_AVX512)
// Codes of BITS bits that count from 0, as they stand in their words: one `and` gives a factor. A float of which only
// the lowest 24 bits are set is a whole number of 2^-149, so a code from bit B on, alone in its word, is
// code * 2^(B - 149). Its number of x comes times 2^(126 - B), over a power of two that makes its row's largest one
// less than 2 (few_rows.h, `qg_raise`), and UNIT multiplies the sum. That changes no bit of a mantissa: the sum is the
// one of looked up codes, unless numbers of x lie 2^-100 below the row's largest one (what is lost is 2^-126 of that).
// A Zen 4 multiplies subnormal numbers as fast as others, and cores of Intel's take a routine in microcode for each.
//
// Codes that count from another number keep their lookups. Theirs added up with the sum of x instead would lose what
// large x leave at codes that stand for 0.
template <int BITS> struct qg_counts_in_place {
    static constexpr bool IN_PLACE = true;
    static constexpr float UNIT = 0x1p23f;
    static constexpr int WORDS = 2;                         // most words of a group
    static constexpr int PER = 32 / BITS, LOW = 24 / BITS;  // columns of a word, and of its lowest 24 bits
    static constexpr int bit(int column) { return column % PER % LOW * BITS; }
    struct powers {
        float column[16];
        constexpr powers() : column() {
            for (int k = 0; k < 16; k++) column[k] = 0x1p126f / (float)(1 << bit(k));
        }
    };
    alignas(64) static constexpr powers POWERS{};
    qi mask[LOW];
    qu high[WORDS];
    QG_METHOD void start() {
        QG_UNROLL for (int j = 0; j < LOW; j++) {
            mask[j] = q_seti(((1 << BITS) - 1) << bit(j));
            asm("" : "+v"(mask[j]));  // in registers: loads are as scarce as multiplications
        }
    }
    template <class C> QG_METHOD void at(const C& codes) {
        static_assert(sizeof codes.low.w <= sizeof high && C::MIDDLE == 0 && codes.low.PER == PER, "words of a group");
        QG_UNROLL for (int i = 0; i < (int)(sizeof codes.low.w / sizeof high[0]); i++)
            high[i] = codes.low.w[i].r[0] >> 24;
    }
    template <int J, class C> QG_METHOD vf units(const C& codes) const {
        const qu word = J % PER < LOW ? codes.low.w[J / PER].r[0] : high[J / PER];
        return vf{{(qf)((qi)word & mask[J % PER % LOW])}};
    }
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        return qg_counts<BITS, false, 0>().template value<J>(codes);
    }
};

// Whether it multiplies subnormal numbers at the rate of others.
QC_INLINE bool qg_multiplies_subnormals() {
#if defined(QG_IN_PLACE)  // tests define it
    return QG_IN_PLACE;
#else
    return qg_is_zen4();
#endif
}

template <int BITS> struct qg_counts_in_place_faster {
    typedef qg_counts_in_place<BITS> faster;
    static constexpr int FASTER_ROWS = 2, FASTER_GROUP = faster::PER;
    static bool runs() { return qg_multiplies_subnormals(); }
};

// Codes in two planes, multiplied where they stand in the bytes that are made of them: of four columns, three lie in
// the lowest 24 bits of a word, and a shift brings the fourth there.
template <int BITS> struct qg_bytes_in_place {
    static constexpr bool IN_PLACE = true;
    static constexpr float UNIT = 0x1p23f;
    static constexpr int TO = 8 - BITS;  // the highest bits of a byte, so that the shift leaves nothing else
    typedef qg_joined<BITS, TO> joined;
    static constexpr int PER = joined::PER;
    static constexpr int bit(int column) { return joined::byte(column) == 3 ? 0 : 8 * joined::byte(column) + TO; }
    struct powers {
        float column[16];
        constexpr powers() : column() {
            for (int k = 0; k < 16; k++) column[k] = 0x1p126f / (float)(1 << bit(k));
        }
    };
    alignas(64) static constexpr powers POWERS{};
    qi mask[3];
    qu bytes[joined::WORDS];
    QG_METHOD void start() {
        QG_UNROLL for (int b = 0; b < 3; b++) {
            mask[b] = q_seti(((1 << BITS) - 1) << (8 * b + TO));
            asm("" : "+v"(mask[b]));
        }
    }
    template <class C> QG_METHOD void at(const C& codes) { joined::make(codes, bytes); }
    template <int J, class C> QG_METHOD vf units(const C&) const {
        const qu word = bytes[joined::word(J)];
        if constexpr (joined::byte(J) == 3) return vf{{(qf)(word >> (24 + TO))}};
        else return vf{{(qf)((qi)word & mask[joined::byte(J)])}};
    }
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        return qg_counts<BITS, false, 0>().template value<J>(codes);
    }
};

// A second form of the decoder that only kernels for one row compile.
template <int BITS> struct qg_bytes_in_place_alone {
    typedef qg_bytes_in_place<BITS> of_one_row;
    static bool runs_alone() { return qg_multiplies_subnormals() && __builtin_cpu_supports("avx512vbmi"); }
};
struct qg_nothing_alone {};
#endif

// Values from a table of 2^BITS floats, at least 16 of them (a shorter one is repeated).
template <int BITS, class TABLE> struct qg_lookup : qg_whole {
    qg_table first;
#if defined(QC_AVX512)
    qg_table second;  // of 32 values
#endif
    QG_METHOD void start() {
        if constexpr (BITS <= 5) first.load(TABLE::table());
#if defined(QC_AVX512)
        if constexpr (BITS == 5) second.load(TABLE::table() + 16);
#endif
    }
    template <class C> QG_METHOD void at(const C&) {}
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        return QC_EACH(vf, one(codes.template code<J>(i)));
    }

private:
    QG_METHOD qf one(qu code) const {
        if constexpr (BITS <= 4) return first.look(code);
#if defined(QC_AVX512)
        if constexpr (BITS == 5) return _mm512_permutex2var_ps(first.all, (__m512i)code, second.all);
#endif
        return qg_gather(TABLE::table(), code & ((1u << BITS) - 1));
    }
};

// Codes that count: on AVX-512 up to 32 of them are looked up, instead of a mask, an addition and a conversion.
#if defined(QC_AVX512)
template <int BITS, bool SIGNED, int OFFSET, bool FEW = BITS <= 5 && !SIGNED> struct qg_counting_alone {
    typedef qg_lookup<BITS, qg_integers<BITS, OFFSET>> values;
};
template <int BITS, bool SIGNED, int OFFSET> struct qg_counting_alone<BITS, SIGNED, OFFSET, false> {
    typedef qg_counts<BITS, SIGNED, OFFSET> values;
};
enum qg_faster_counts { QG_NO_FASTER, QG_BY_BYTES, QG_WHERE_THEY_STAND };
constexpr qg_faster_counts qg_counts_faster_with(int bits, bool is_signed, int offset) {
    if (is_signed) return QG_NO_FASTER;
    if (bits == 2 || bits == 4) return offset == 0 ? QG_WHERE_THEY_STAND : QG_NO_FASTER;
    const bool planes = bits == 3 || bits == 5 || bits == 6;
    return planes && (offset == 0 || offset == -(1 << (bits - 1))) ? QG_BY_BYTES : QG_NO_FASTER;
}
template <int BITS, bool SIGNED, int OFFSET, qg_faster_counts FASTER = qg_counts_faster_with(BITS, SIGNED, OFFSET)>
struct qg_counting : qg_counting_alone<BITS, SIGNED, OFFSET> {};
template <int BITS, bool SIGNED, int OFFSET> struct qg_counting<BITS, SIGNED, OFFSET, QG_BY_BYTES> {
    typedef std::conditional_t<OFFSET == 0, qg_bytes_in_place_alone<BITS>, qg_nothing_alone> one_row;
    struct values : qg_counting_alone<BITS, SIGNED, OFFSET>::values, qg_counts_faster<BITS, OFFSET>, one_row {};
};
template <int BITS, bool SIGNED, int OFFSET> struct qg_counting<BITS, SIGNED, OFFSET, QG_WHERE_THEY_STAND> {
    struct values : qg_counting_alone<BITS, SIGNED, OFFSET>::values, qg_counts_in_place_faster<BITS> {};
};
#else
template <int BITS, bool SIGNED, int OFFSET> struct qg_counting { typedef qg_counts<BITS, SIGNED, OFFSET> values; };
#endif

// The sum of the four signed bytes of each lane.
QC_INLINE qi qg_sum_of_bytes(qu x) {
#if defined(QC_AVX512)
    const __m512i ones = _mm512_set1_epi8(1), pairs = _mm512_maddubs_epi16(ones, (__m512i)x);
    return (qi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(QC_AVX2)
    const __m256i ones = _mm256_set1_epi8(1), pairs = _mm256_maddubs_epi16(ones, (__m256i)x);
    return (qi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    const qi signed_x = (qi)x;
    return (signed_x >> 24) + ((qi)(x << 8) >> 24) + ((qi)(x << 16) >> 24) + ((qi)(x << 24) >> 24);
#endif
}

#if defined(QC_AVX512)
// The same in one instruction, where the processor has AVX-512 VNNI, which x86-64-v4 does not promise.
QC_INLINE qi qg_sum_of_bytes_vnni(qu x) {
    qi sum = {};
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(q_seti(0x01010101)), "v"(x));
    return sum;
}
#endif

// Windows of a trellis: the sum of the bytes of a product.
template <uint32_t MULTIPLIER, bool VNNI = false> struct qg_hashed : qg_whole {
    typedef qg_hashed<MULTIPLIER, true> faster;
#if defined(QC_AVX512)
    static constexpr int FASTER_ROWS = 1;  // for one row decoding is most of the time
    static constexpr int FASTER_GROUP = 1;
    static bool runs() { return __builtin_cpu_supports("avx512vnni"); }
#endif
    QG_METHOD void start() {}
    template <class C> QG_METHOD void at(const C&) {}
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        return QC_EACH(vf, one(codes.template window<J>(i)));
    }
    static QG_METHOD qf one(qu window) {
#if defined(QC_AVX512)
        if constexpr (VNNI) return __builtin_convertvector(qg_sum_of_bytes_vnni(window * MULTIPLIER), qf);
#endif
        return __builtin_convertvector(qg_sum_of_bytes(window * MULTIPLIER), qf);
    }
};
template <uint32_t MULTIPLIER> QC_INLINE float qg_hash_of(uint32_t window) {
    return qg_hashed<MULTIPLIER>::one((qu)q_seti((int32_t)window))[0];
}

#if defined(QC_AVX512)
// The upper two bytes of fp32 of the codes 0 … 127; the lower two are zeros.
template <int MANTISSA> struct qg_float_bytes {
    uint8_t second[128], first[128];
    constexpr qg_float_bytes() : second(), first() {
        for (int code = 0; code < 128; code++) second[code] = (uint8_t)upper(code), first[code] = upper(code) >> 8;
    }
    static constexpr int upper(int code) {
        constexpr int ONE = 1 << MANTISSA, BIAS = MANTISSA == 3 ? 7 : 15;
        int exponent = code / ONE, mantissa = code % ONE;
        if (MANTISSA == 3 ? code == 0x7f : exponent == 31) return 0x7f80 | (MANTISSA == 3 ? 0x40 : mantissa << 5);
        if (code < ONE) {
            if (code == 0) return 0;
            for (exponent = 1; mantissa < ONE; exponent--) mantissa *= 2;
        }
        return (exponent + 127 - BIAS) << 7 | mantissa % ONE << (7 - MANTISSA);
    }
};
template <int MANTISSA> alignas(64) static constexpr qg_float_bytes<MANTISSA> qg_bytes_of_floats{};

// The indices that make fp32 of column J of a word's four: its second byte stands at 4 lane + J of the second bytes,
// and its first one at the same place of the first bytes, which a permutation of two vectors counts from 64. And those
// that make a word of bf16 of columns J and J + 1, for an even J.
struct qg_byte_places {
    uint8_t place[4][64], pair[2][64];
    constexpr qg_byte_places() : place(), pair() {
        for (int j = 0; j < 4; j++)
            for (int lane = 0; lane < 16; lane++) {
                const int at = 4 * lane + j, half = 4 * lane + j % 2 * 2;
                place[j][4 * lane + 2] = pair[j / 2][half] = (uint8_t)at;
                place[j][4 * lane + 3] = pair[j / 2][half + 1] = (uint8_t)(64 + at);
            }
    }
};
alignas(64) static constexpr qg_byte_places qg_places_of_bytes;

// The upper two bytes of fp32, which are bf16, of 64 codes of 8-bit floats at once, by AVX-512 VBMI, which x86-64-v4
// does not promise.
template <int MANTISSA> struct qg_float_table {
    __m512i tables[4];
    QG_METHOD void load() {
        QG_UNROLL for (int i = 0; i < 4; i++)
            tables[i] = _mm512_load_si512((const char*)&qg_bytes_of_floats<MANTISSA> + 64 * i);
    }
    QG_METHOD __m512i second(__m512i code) const { return look_up(tables[0], tables[1], code); }
    QG_METHOD __m512i first(__m512i code) const {  // with the code's sign
        const __m512i sign = _mm512_set1_epi8((char)0x80);
        return _mm512_ternarylogic_epi32(look_up(tables[2], tables[3], code), code, sign, 0xf8);
    }

private:
    static QG_METHOD __m512i look_up(__m512i low, __m512i high, __m512i code) {
        asm("vpermi2b %2, %1, %0" : "+v"(code) : "v"(low), "v"(high));
        return code;
    }
};

// 8-bit floats as fp32: one permutation makes a column of these bytes.
template <int MANTISSA> struct qg_floats_by_bytes : qg_whole {
    static constexpr int WORDS = 2;  // most words of a group, of four columns each
    qg_float_table<MANTISSA> table;
    __m512i places[4], second[WORDS], first[WORDS];
    QG_METHOD void start() {
        table.load();
        QG_UNROLL for (int i = 0; i < 4; i++) places[i] = _mm512_load_si512(qg_places_of_bytes.place[i]);
    }
    template <class C> QG_METHOD void at(const C& codes) {
        constexpr int COUNT = sizeof codes.low.w / sizeof codes.low.w[0];
        static_assert(COUNT <= WORDS, "words of a group");
        QG_UNROLL for (int i = 0; i < COUNT; i++) {
            const __m512i code = (__m512i)codes.low.w[i].r[0];
            second[i] = table.second(code), first[i] = table.first(code);
        }
    }
    template <int J, class C> QG_METHOD vf value(const C&) const {
        __m512i x = second[J / 4];
        asm("vpermt2b %2, %1, %0 %{%3%}%{z%}"
            : "+v"(x) : "v"(places[J % 4]), "v"(first[J / 4]), "Yk"((__mmask64)0xcccccccccccccccc));
        return vf{{(qf)x}};
    }
};
#endif

// 8-bit floats. Codes without a number (NaN, infinity) are looked for in a whole group at once.
template <int MANTISSA> struct qg_floats : qg_whole {
#if defined(QC_AVX512)
    typedef qg_floats_by_bytes<MANTISSA> faster;
    static constexpr int FASTER_ROWS = 8, FASTER_GROUP = 1;  // of few_rows.h; passes and blocks take it for any number
    static bool runs() { return __builtin_cpu_supports("avx512vbmi"); }
#endif
    bool special;
    QG_METHOD void start() {}
    template <class C> QG_METHOD void at(const C& codes) {
        special = false;
        for (const qg_words& w : codes.low.w) special |= qg_any_byte(w, MANTISSA == 3 ? 0x7f : 0x7c);
    }
    template <int J, class C> QG_METHOD vf value(const C& codes) const {
        const vf x = QC_EACH(vf, qg_number<MANTISSA>(codes.template top<J>(i)));
        if (__builtin_expect(special, 0)) return QC_EACH(vf, qg_minifloat<MANTISSA>(codes.template top<J>(i)));
        return x;
    }
};
