// Products of rows of int8 (qcompiler/formats/int8_rows.py) with the integer codes of packed weights, to the bit what
// qcompiler/formats/integer_product.py says: sums of integers are exact, their scaling has one order.
//
// A weight's panel holds words of codes of one row, 16 rows side by side (decode.h). Four columns at a time become
// unsigned bytes, which is what `vpdpbusd` multiplies (of signed codes of 8 bits, the sign bit is flipped), so that a
// product is  sum(byte * q) + LOWEST * sum(q)  and the second part, from the sums that a row brings along, is where
// accumulation begins.
//
//     qi_vnni     AVX-512 with VNNI and VBMI: vpdpbusd, 4 columns at a time; asked for at run time, since x86-64-v4
//                 does not promise them
//     qi_vex      AVX2 with AVX-VNNI: the same instruction in its VEX encoding, asked for at run time as well
//     qi_tiles    AMX, for many rows, where the context allows it: int8_tiles.h
//     qi_pairs    pmaddwd on pairs of 16-bit numbers (AVX-512BW, AVX2, SSE2), exact where pmaddubsw would saturate;
//                 elsewhere plain multiplications
//
// Many rows are multiplied in blocks whose sums fill the registers. Where columns share scales in groups, half of the
// registers hold integers, which begin anew with each group, and half the scaled totals: a total that goes through
// memory at the end of each group costs an eighth of the speed or more. Codes in several planes become bytes once for
// several blocks; those in one plane take so few instructions that reading bytes back costs more.
//
// W is the struct of a packed weight with its integer product (kernels/cpu/linear_int8.py): BITS of a code, FLIP of the
// sign bit, LOWEST and HIGHEST integer, SHARED columns of a group (0: all, at most QI_WIDEST), AFFINE, slope(),
// intercept(), NESTED where these are computed from entries of several levels; LISTED codes stand for the bytes of a
// list: bytes().
#pragma once
#include "gemm.h"
#include "int8_rows.h"
#if defined(QC_AVX2)
#include <cpuid.h>
#endif

enum {
    QI_WIDEST = 65536,
    QI_SPARE = 4,      // rows of zeros behind those of a task, for blocks that are not full
};
// QI_CHUNK: bytes of prepared rows of a task, unless one block of rows takes more. QI_BLOCKS: most times ROWS rows of a
// task. QI_NEAR: bytes of prepared rows and of the codes that all of them are multiplied by in turns. Most processors
// with AVX-512 have 1 MiB of L2 or more, of which rows may take half: the more rows a task has, the fewer times panels
// are read from memory.
#if defined(QC_AVX512)
enum { QI_NEAR = 720896, QI_CHUNK = 589824, QI_BLOCKS = 11 };
enum { QI_ROWS = 12 };  // 24 sums, two words of a weight, the sign bits, a word of x: 28 of 32 registers
#else
enum { QI_NEAR = 0, QI_CHUNK = 458752, QI_BLOCKS = 8 };  // an L2 may have 256 KiB
#if defined(QC_AVX2)
enum { QI_ROWS = 4, QI_VEX_ROWS = 6 };  // 12 sums, two words of a weight, a word of x: 15 of 16 registers
#else
enum { QI_ROWS = 2 };
#endif
#endif

typedef int32_t qi_word __attribute__((may_alias));

// --- engines: how four columns are multiplied ------------------------------------------------------------------------

// STEP: bytes of a row prepared for four columns. ROWS: most rows of a block. HELD: most of them whose totals stay in
// registers beside their sums (0: totals go through memory). UNPACKED: a task of so many full blocks of rows makes
// bytes of codes in planes once for all of them. TILES: int8_tiles.h.

// Byte b of the result holds, from bit TO on, the WIDTH bits of column FIRST + b * STEP of a word.
template <int WIDTH, int FIRST, int STEP, int TO> QC_INLINE qu qi_spread_plain(qu word) {
    qu bytes = {};
    QG_UNROLL for (int b = 0; b < 4; b++) {
        const int from = WIDTH * (FIRST + b * STEP), to = 8 * b + TO;
        const qu moved = from >= to ? word >> (from >= to ? from - to : 0) : word << (from >= to ? 0 : to - from);
        bytes = bytes | (moved & (((1u << WIDTH) - 1) << to));
    }
    return bytes;
}

// What engines with vpdpbusd have in common. A row prepared for them: four bytes.
struct qi_dots {
    static constexpr int STEP = 4;
    static constexpr bool TILES = false;
    static constexpr int64_t LINE = 64;
    typedef qu operand;
    typedef qu factor;
    static QG_METHOD operand make(qu bytes) { return bytes; }
    static QG_METHOD factor take(const char* x) { return (qu)q_seti(*(const qi_word*)x); }
};

#if defined(QC_AVX512)
// HELD: 14 sums, 14 totals, two words of a weight, their mask, a word of x: all 32 registers.
struct qi_vnni : qi_dots {
    static constexpr int ROWS = QI_ROWS, HELD = 7, UNPACKED = 3;
    static QG_METHOD void dot(qu& sum, const operand& w, const factor& x) {  // unsigned bytes of w times signed ones
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    }
    // As `qi_spread_plain`, with anything in the other bits.
    template <int WIDTH, int FIRST, int STEP, int TO> static QG_METHOD qu spread(qu word) {
        return qg_spread<WIDTH * FIRST - TO, WIDTH * STEP>(word);
    }
};
#endif

#if defined(QC_AVX2)
// Tests define QI_EVEX: AVX-512 VL has the same product in the EVEX encoding, and more processors run that.
#if defined(QI_EVEX)
#define QI_VPDPBUSD "%{evex%} vpdpbusd"
QC_INLINE bool qi_has_vex() { return true; }
#else
#define QI_VPDPBUSD "%{vex%} vpdpbusd"
// Whether the processor has AVX-VNNI: leaf 7, subleaf 1, bit 4 of EAX. Asked once: in virtual machines it takes µs.
// Not by __builtin_cpu_supports, since older compilers do not know the name.
QC_COLD bool qi_has_vex() {
    static int known;  // 0: not asked yet
    int has = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (has == 0) {
        unsigned a = 0, b = 0, c = 0, d = 0;
        has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 16)
                  ? 1 : -1;
        __atomic_store_n(&known, has, __ATOMIC_RELAXED);
    }
    return has > 0;
}
#endif

// HELD: 6 sums, 6 totals, two words of a weight, a word of x.
struct qi_vex : qi_dots {
    static constexpr int ROWS = QI_VEX_ROWS, HELD = 3, UNPACKED = 2;
    static QG_METHOD void dot(qu& sum, const operand& w, const factor& x) {  // unsigned bytes of w times signed ones
        asm(QI_VPDPBUSD " %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    }
    template <int WIDTH, int FIRST, int STEP, int TO> static QG_METHOD qu spread(qu word) {
        return qi_spread_plain<WIDTH, FIRST, STEP, TO>(word);
    }
};
#endif

// sum += even 16-bit numbers of w (0 … 255) times those of x, and odd ones, which wraps as all sums here do.
QC_INLINE void qi_multiply_pairs(qu& sum, qu w, int32_t x) {
#if defined(QC_AVX512)
    sum += (qu)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(QC_AVX2)
    sum += (qu)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#elif defined(__SSE2__)
    sum += (qu)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(x));
#else
    sum += (w & 0xffffu) * (uint32_t)(int32_t)(int16_t)x + (w >> 16) * (uint32_t)(x >> 16);
#endif
}

// A row prepared for it: columns c0, c2, c1, c3 of each step as 16-bit numbers.
struct qi_pairs {
    static constexpr int ROWS = QI_ROWS, HELD = 0, STEP = 8, UNPACKED = 3;
    static constexpr bool TILES = false;
    static constexpr int64_t LINE = 64;
    struct operand { qu even, odd; };
    struct factor { int32_t even, odd; };
    static QG_METHOD operand make(qu bytes) { return {bytes & 0x00ff00ffu, (bytes >> 8) & 0x00ff00ffu}; }
    static QG_METHOD factor take(const char* x) { return {((const qi_word*)x)[0], ((const qi_word*)x)[1]}; }
    static QG_METHOD void dot(qu& sum, const operand& w, const factor& x) {
        qi_multiply_pairs(sum, w.even, x.even);
        qi_multiply_pairs(sum, w.odd, x.odd);
    }
    template <int WIDTH, int FIRST, int STEP, int TO> static QG_METHOD qu spread(qu word) {
        return qi_spread_plain<WIDTH, FIRST, STEP, TO>(word);
    }
};

// Bytes of a list of 16 at the places that the bytes of `codes` name, all below 16.
QC_INLINE qu qi_look_up(const uint8_t* list, qu codes) {
#if defined(QC_AVX512)
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)list));
    return (qu)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(QC_AVX2)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)list));
    return (qu)_mm256_shuffle_epi8(table, (__m256i)codes);
#else
    uint8_t bytes[sizeof codes];
    memcpy(bytes, &codes, sizeof codes);
    for (uint8_t& byte : bytes) byte = list[byte];
    memcpy(&codes, bytes, sizeof codes);
    return codes;
#endif
}

// --- words of codes as bytes -----------------------------------------------------------------------------------------

// The planes of W's codes: the widest first. A word of it has PER columns; step S of its PER / 4 takes columns S,
// S + PER / 4, … , which one shift and one mask make bytes of.
template <class W> struct qi_planes {
    typedef qg_codes<W::BITS, W::GROUP> codes;
    static constexpr int LOW = codes::LOW, MIDDLE = codes::MIDDLE, HIGH = codes::HIGH;
    static constexpr int PER = 32 / LOW, STEPS = PER / 4;
    static_assert(STEPS <= 4, "codes of one bit have no integer product");
};

// The words of one panel, PER columns at a time. ASKS for those that lie ahead.
template <class W, bool ASKS = true> struct qi_walk {
    typedef qi_planes<W> P;
    const uint32_t* low;
    const uint32_t* middle;
    const uint32_t* high;
    qu w[1 + (P::MIDDLE != 0) + (P::HIGH != 0)][QC_REGS];

    QG_METHOD void start(const qg_packed& from, int64_t panel) {
        low = (const uint32_t*)from.part[0] + panel * qg_up(from.k, P::PER) * 16;
        if constexpr (P::MIDDLE != 0) middle = (const uint32_t*)from.part[1] + panel * up<P::MIDDLE>(from.k);
        if constexpr (P::HIGH != 0) high = (const uint32_t*)from.part[2] + panel * up<P::HIGH>(from.k);
    }
    // Moves to columns k … k + PER.
    QG_METHOD void at(int64_t k) {
        QG_UNROLL for (int i = 0; i < QC_REGS; i++) w[0][i] = read(low, i);
        if (ASKS) qg_ask_once((const char*)low + QG_AHEAD);
        low += 16;
        if constexpr (P::MIDDLE != 0) part<P::MIDDLE>(middle, k, w[1]);
        if constexpr (P::HIGH != 0) part<P::HIGH>(high, k, w[2]);
    }
    // Bytes of step S, register i of the lanes.
    template <class E, int S> QG_METHOD qu bytes(int i) const {
        constexpr uint32_t ONE = 0x01010101u;
        if constexpr (P::LOW == 8) return W::FLIP ? w[0][i] ^ 0x80808080u : w[0][i];
        qu codes = S ? w[0][i] >> (P::LOW * S) : w[0][i];
        if constexpr (P::MIDDLE != 0)
            codes = qg_select<ONE * ((1 << P::LOW) - 1)>(
                codes, E::template spread<P::MIDDLE, S, P::STEPS, P::LOW>(w[1][i]));
        if constexpr (P::HIGH != 0)
            codes = qg_select<ONE * ((1 << (P::LOW + P::MIDDLE)) - 1)>(
                codes, E::template spread<P::HIGH, S, P::STEPS, P::LOW + P::MIDDLE>(w[2][i]));
        codes = codes & ONE * ((1u << W::BITS) - 1);
        if constexpr (W::FLIP) codes = codes ^ ONE * (1u << (W::BITS - 1));
        if constexpr (W::LISTED) return W::bytes(codes);
        return codes;
    }

private:
    template <int WIDTH> static QG_METHOD int64_t up(int64_t k) { return qg_up(k, 32 / WIDTH) * 16; }
    static QG_METHOD qu read(const uint32_t* from, int i) { return (qu)q_load((const int32_t*)from + QC_W * i); }
    // Columns k … k + PER of a narrower plane, in the lowest bits.
    template <int WIDTH> static QG_METHOD void part(const uint32_t* plane, int64_t k, qu (&to)[QC_REGS]) {
        constexpr int64_t PER = 32 / WIDTH;
        const uint32_t* const word = plane + (uint64_t)k / PER * 16;
        const int skip = (int)((uint64_t)k % PER) * WIDTH;
        QG_UNROLL for (int i = 0; i < QC_REGS; i++) to[i] = read(word, i) >> skip;
    }
};

// --- prepared rows of x ----------------------------------------------------------------------------------------------

// Bytes from one prepared row to the next: an odd number of cache lines. Rows a power of two apart would all fall into
// one set of the L1, and K is a power of two in most models.
constexpr int64_t qi_stride(int64_t k, int64_t step) { return (qi_padded(k) / 4 * step) | 64; }
static_assert(qi_stride(4096, 4) / 64 % 2 == 1 && qi_stride(4096, 8) / 64 % 2 == 1, "rows in one set of the L1");
constexpr int64_t qi_span(int64_t k, int64_t shared) {
    return shared ? shared : k < QI_WIDEST ? k : (int64_t)QI_WIDEST;
}

// A block of prepared rows: `x` rows of `stride` bytes, and for each row and group where its sum begins and the sum of
// its codes. `entries` and `codes`: null, or what `qi_prepare_entries` and `qi_unpack` wrote for the panels at hand.
struct qi_block {
    const char* x;
    int64_t stride, groups;
    const int32_t* start;
    const float* total;
    const float* scale;
    const float* entries;
    const char* codes;
};

// Where a sum over columns whose codes of x have this sum begins. It wraps as all sums here do: rows that a call or a
// file brings may hold any sums.
template <class W> QC_INLINE int32_t qi_start(int32_t sum) { return (int32_t)((uint32_t)W::LOWEST * (uint32_t)sum); }

// `start` holds sums of x's codes: `total` gets them as numbers, and `start` where the product's sums begin.
template <class W> QC_INLINE void qi_begin(int64_t groups, int32_t* start, float* total) {
    for (int64_t g = 0; g < groups; g++) total[g] = (float)start[g], start[g] = qi_start<W>(start[g]);
}

template <class W, class E>
static void qi_prepare_row(const char* row, int64_t columns, char* x, int32_t* start, float* total, float* scale) {
    const int64_t padded = qi_padded(columns), span = qi_span(columns, W::SHARED);
    qi_prepare<qi_planes<W>::LOW, E::STEP, E::LINE>(row, padded, x);
    memcpy(scale, row + padded, 4);
    qi_sums<W::SHARED>(row, padded, columns, span, start);
    qi_begin<W>(qg_up(columns, span), start, total);
}

// Floats that a group of QG_NP panels has: slopes, and intercepts where there are any.
template <class W> constexpr int64_t qi_entries_of() { return 16 * QG_NP * (1 + W::AFFINE); }

// Slopes and intercepts of QG_NP panels, for several blocks of rows: [group][panel][slope, intercept][16].
template <class W> static void qi_prepare_entries(const qg_packed& from, int64_t panel, int64_t next, float* to) {
    W entries[QG_NP];
    for (int64_t k = 0; k < from.k; k += W::SHARED)
        QG_UNROLL for (int p = 0; p < QG_NP; p++, to += 16 * (1 + W::AFFINE)) {
            if (k % (4 * W::SHARED) == 0) W::ask(from, next + 1 + p, k);  // a line has entries of four
            entries[p].load(from, p ? next : panel, k);
            vstore(to, entries[p].slope());
            if (W::AFFINE) vstore(to + 16, entries[p].intercept());
        }
}

// What multiplies the sums of group `g`, whose columns begin at k, and the sums of x's codes. `place`: the panel's in
// its unit. `step`: how many panels further the next one is.
struct qi_scale { vf slope, intercept; };
template <class W> QC_INLINE qi_scale qi_scale_of(
    W& entry, const qg_packed& from, const qi_block& rows, int64_t panel, int64_t g, int64_t k, int place, int step) {
    if (W::NESTED && rows.entries) {
        const float* const at = rows.entries + g * qi_entries_of<W>() + place * 16 * (1 + W::AFFINE);
        return {vload(at), W::AFFINE ? vload(at + 16) : vzero()};
    }
    if constexpr (W::SCATTERED) W::ask(from, panel + step, k);
    entry.load(from, panel, k);
    return {entry.slope(), entry.intercept()};
}

template <int S> struct qi_number { static constexpr int value = S; };

// f(step) for the steps of a word of W's codes.
template <class W, class F> QC_INLINE void qi_steps(F f) {
    f(qi_number<0>());
    if constexpr (qi_planes<W>::STEPS > 1) f(qi_number<1>());
    if constexpr (qi_planes<W>::STEPS > 2) f(qi_number<2>()), f(qi_number<3>());
}

// Bytes of one panel's codes and entries, which are floats here.
template <class W> constexpr int64_t qi_panel_bytes(int64_t k) {
    return k * 2 * W::BITS + 64 * (1 + W::AFFINE) * qg_up(k, qi_span(k, W::SHARED));
}

// Bytes of scratch for the codes of QG_NP panels, four columns a step, as the widest operand holds them.
template <class W> constexpr bool qi_unpacks() { return qi_planes<W>::MIDDLE != 0; }
template <class W> constexpr int64_t qi_unpacked_of(int64_t k) {
    return qi_unpacks<W>() ? (k + 15) / 16 * 4 * QG_NP * 128 : 0;
}

// The codes of QG_NP panels as `qi_micro` multiplies them: [step][panel][register].
template <class W, class E> static void qi_unpack(const qg_packed& from, int64_t panel, int64_t next, char* codes) {
    qi_walk<W> walk[QG_NP];
    typename E::operand* to = (typename E::operand*)codes;
    QG_UNROLL for (int p = 0; p < QG_NP; p++) walk[p].start(from, p ? next : panel);
    for (int64_t k = 0; k < from.k; k += qi_planes<W>::PER) {
        QG_UNROLL for (int p = 0; p < QG_NP; p++) walk[p].at(k);
        qi_steps<W>([&](auto number) __attribute__((always_inline)) {
            QG_UNROLL for (int v = 0; v < QG_NP * QC_REGS; v++)
                *to++ = E::make(walk[v / QC_REGS].template bytes<E, decltype(number)::value>(v % QC_REGS));
        });
    }
}

// --- the microkernel -------------------------------------------------------------------------------------------------

// tile[i][16 p + lane]: MR rows of x times NP panels of w (`next` is the last of them), scaled. `begin`: their place
// among the QG_NP panels of a unit. UNPACKED: their codes are at rows.codes. A function of its own: as a part of the
// loop over experts, g++ kept its sums on the stack (tests/kernels/test_grouped_int8.py counts them).
template <class W, class E, int MR, int NP, bool UNPACKED = false> QC_COLD void qi_micro(
    const qg_packed& from, const qi_block& rows, int64_t panel, int64_t next, int begin, float* tile) {
    typedef qi_planes<W> P;
    constexpr int REGS = NP * QC_REGS;
    constexpr bool HELD = MR * NP <= E::HELD * QG_NP && W::SHARED != 0;
    const int64_t span = qi_span(from.k, W::SHARED);
    qi_walk<W> walk[NP];
    W entries[NP];
    vf totals[HELD ? MR : 1][NP];
    QG_UNROLL for (int p = 0; p < NP; p++) walk[p].start(from, p ? next : panel);
    if constexpr (HELD)
        QG_UNROLL for (int i = 0; i < MR; i++)
            QG_UNROLL for (int p = 0; p < NP; p++) totals[i][p] = vzero();
    const char* x = rows.x;
    const typename E::operand* codes = (const typename E::operand*)rows.codes;
    if constexpr (UNPACKED) codes += begin * QC_REGS;
    for (int64_t g = 0, k = 0; k < from.k; g++, k += span) {
        qu sum[MR][REGS];
        QG_UNROLL for (int i = 0; i < MR; i++)
            QG_UNROLL for (int v = 0; v < REGS; v++) sum[i][v] = (qu)q_seti(rows.start[i * rows.groups + g]);
        auto step = [&](auto number) __attribute__((always_inline)) {
            constexpr int S = decltype(number)::value;
            typename E::operand u[REGS];
            QG_UNROLL for (int v = 0; v < REGS; v++) {
                if constexpr (UNPACKED) u[v] = codes[v];
                else u[v] = E::make(walk[v / QC_REGS].template bytes<E, S>(v % QC_REGS));
            }
            QG_UNROLL for (int i = 0; i < MR; i++) {
                const auto factor = E::take(x + i * rows.stride);
                QG_UNROLL for (int v = 0; v < REGS; v++) E::dot(sum[i][v], u[v], factor);
            }
            x += E::STEP;
            if constexpr (UNPACKED) codes += QG_NP * QC_REGS;
        };
        for (int64_t j = k, end = qc_min(k + span, from.k); j < end; j += P::PER) {
            if constexpr (!UNPACKED)
                QG_UNROLL for (int p = 0; p < NP; p++) walk[p].at(j);
            qi_steps<W>(step);
        }
        QG_UNROLL for (int p = 0; p < NP; p++) {
            const qi_scale scale = qi_scale_of(entries[p], from, rows, p ? next : panel, g, k, begin + p, NP);
            QG_UNROLL for (int i = 0; i < MR; i++) {
                vf term;
                QG_UNROLL for (int r = 0; r < QC_REGS; r++) term.r[r] = q_tofloat((qi)sum[i][p * QC_REGS + r]);
                term = term * scale.slope;
                if (W::AFFINE) term = term + vset(rows.total[i * rows.groups + g]) * scale.intercept;
                if constexpr (HELD) {
                    totals[i][p] = totals[i][p] + term;
                } else {
                    float* const to = tile + (i * QG_NP + begin + p) * 16;
                    vstore(to, (g ? vload(to) : vzero()) + term);
                }
            }
        }
    }
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int p = 0; p < NP; p++) {
            float* const to = tile + (i * QG_NP + begin + p) * 16;
            vstore(to, (HELD ? totals[HELD ? i : 0][p] : vload(to)) * vset(rows.scale[i]));
        }
}

// Rows of a block that fills the registers.
template <class W, class E> constexpr int qi_full_rows() {
    return W::SHARED != 0 && E::HELD != 0 && !E::TILES ? E::HELD : E::ROWS;
}

// Whether eight rows are multiplied by one panel after the other, with totals in registers. They read a panel and its
// entries once, where two blocks of four rows do so twice.
template <class W, class E> constexpr bool qi_takes_eight() { return W::SHARED != 0 && E::HELD == 7 && QG_NP > 1; }

// Rows of the next block of `left` rows: as many as fill the registers, or blocks of eight and four for a remainder.
template <class W, class E> constexpr int64_t qi_next_rows(int64_t left) {
    constexpr int FULL = qi_full_rows<W, E>();
    if (!qi_takes_eight<W, E>()) return left < FULL ? left : (int64_t)FULL;
    const int64_t over = left % 7, eights = over == 1 || over == 5 ? 1 : over == 2 ? 2 : over == 3 ? 3 : 0;
    if (eights > 0 && left >= 8 * eights + (over == 5 ? 4 : 0)) return 8;
    return left >= 6 ? qc_min(left, 7) : left > 4 ? 4 : left;
}

// `count` rows by the smallest microkernel that takes them; the rows behind are zeros.
template <class W, class E, int MR> QC_INLINE void qi_micro_rows(
    int64_t count, const qg_packed& from, const qi_block& rows, int64_t panel, int64_t next, float* tile) {
    constexpr int SMALLER = MR > 8 ? 8 : MR > 4 ? 4 : MR > 1;
    if constexpr (SMALLER > 0)
        if (count <= SMALLER) return qi_micro_rows<W, E, SMALLER>(count, from, rows, panel, next, tile);
    if constexpr (MR == 1) {  // bound by memory: one panel after the other, in the order in which they lie there
        for (int p = 0; p < QG_NP; p++) qi_micro<W, E, MR, 1>(from, rows, p ? next : panel, p ? next : panel, p, tile);
    } else {
        qi_micro<W, E, MR, QG_NP>(from, rows, panel, next, 0, tile);
    }
}

// `count` rows, as many as `qi_next_rows` said. UNPACKED: the codes of the panels are in `rows`.
template <class W, class E, bool UNPACKED> QC_INLINE void qi_micro_any(
    int64_t count, const qg_packed& from, const qi_block& rows, int64_t panel, int64_t next, float* tile) {
    constexpr int FULL = qi_full_rows<W, E>();
    if constexpr (qi_takes_eight<W, E>())
        if (count == 8) {
            for (int p = 0; p < QG_NP; p++)
                qi_micro<W, E, 8, 1, UNPACKED>(from, rows, p ? next : panel, p ? next : panel, p, tile);
            return;
        }
    if (UNPACKED && count == FULL) qi_micro<W, E, FULL, QG_NP, UNPACKED>(from, rows, panel, next, 0, tile);
    else qi_micro_rows<W, E, FULL>(count, from, rows, panel, next, tile);
}

// --- the work --------------------------------------------------------------------------------------------------------

// Where the rows of x are. `prepare` does for row m what `qi_prepare_row` does, with `room` for a row. `chunk` is the
// number of rows of a task, at most `most`: a multiple of `block`.
struct qi_rows_in_memory {
    template <class W, class E>
    static void prepare(const qg_job* job, int64_t m, char*, char* x, int32_t* start, float* total, float* scale) {
        qi_prepare_row<W, E>(job->x + m * job->x_row, job->k, x, start, total, scale);
    }
    static int64_t chunk(const qg_job*, int64_t most, int64_t, int64_t) { return most; }
};

// Most rows of x in a task: `rows` times some, prepared with `step` bytes for four columns.
constexpr int64_t qi_chunk_of(int64_t k, int64_t rows, int64_t step) {
    const int64_t fit = QI_CHUNK / (rows * qi_stride(k, step));
    return rows * (fit < 1 ? 1 : fit < QI_BLOCKS ? fit : (int64_t)QI_BLOCKS);
}

constexpr int64_t qi_most(int64_t a, int64_t b) { return a > b ? a : b; }

// Bytes of prepared rows, of which there are at most `most`: their codes, two numbers per row and group, and a scale.
constexpr int64_t qi_prepared_bytes(int64_t k, int64_t groups, int64_t most, int64_t step) {
    return (most + QI_SPARE) * (qi_stride(k, step) + 8 * groups + 4);
}

// Bytes of scratch: a tile of sums, prepared entries (`of_group` floats for each group), codes, prepared rows.
template <class W> constexpr int64_t qi_scratch_for(int64_t k, int64_t groups, int64_t rows, int64_t of_group) {
    const auto of_rows = [&](int64_t step) {
        return qi_prepared_bytes(k, groups, qi_chunk_of(k, rows, step), step);
    };
    return 64 * rows * QG_NP + 4 * of_group * groups + qi_unpacked_of<W>(k) + qi_most(of_rows(4), of_rows(8));
}

// Rows of x that are prepared in scratch (`qi_prepared_bytes`), and QI_SPARE rows of zeros behind them.
template <class W, class E> struct qi_prepared {
    int64_t stride, groups;
    char* x;
    float* scale;
    float* total;
    int32_t* start;

    qi_prepared(char* room, int64_t k, int64_t most)
        : stride(qi_stride(k, E::STEP)), groups(qg_up(k, qi_span(k, W::SHARED))), x(room) {
        scale = (float*)(x + (most + QI_SPARE) * stride);
        total = scale + most + QI_SPARE;
        start = (int32_t*)(total + (most + QI_SPARE) * groups);
    }
    // prepare(i, …) does for row i what `qi_prepare_row` does.
    template <class Prepare> void fill(int64_t rows, Prepare prepare) const {
        for (int64_t i = 0; i < rows; i++)
            prepare(i, x + i * stride, start + i * groups, total + i * groups, scale + i);
        memset(x + rows * stride, 0, (size_t)(QI_SPARE * stride));
        for (int64_t i = rows; i < rows + QI_SPARE; i++) scale[i] = 0.0f;
        memset(start + rows * groups, 0, (size_t)(QI_SPARE * groups * 4));
        memset(total + rows * groups, 0, (size_t)(QI_SPARE * groups * 4));
    }
    // Those from row i on.
    qi_block from(int64_t i, const float* entries = nullptr, const char* codes = nullptr) const {
        return {x + i * stride, stride, groups, start + i * groups, total + i * groups, scale + i, entries, codes};
    }
};

// `rows` rows of int8 times panels [p0, p1): rows m0 … of the result. prepare(i, …) does for row i what
// `qi_prepare_row` does. `chunk`: the most rows, for which there is room in scratch.
template <class W, class E, class Prepare> static void qi_multiply(
    const qg_job* job, int64_t m0, int64_t rows, int64_t chunk, int64_t p0, int64_t p1, char* scratch,
    Prepare prepare) {
    float* const tile = (float*)scratch;
    float* const entries = tile + E::ROWS * QG_NP * 16;
    const int64_t nested = W::NESTED ? qg_up(job->k, qi_span(job->k, W::SHARED)) * qi_entries_of<W>() : 0;
    char* const codes = (char*)(entries + nested);
    const qi_prepared<W, E> x(codes + qi_unpacked_of<W>(job->k), job->k, chunk);
    constexpr int FULL = qi_full_rows<W, E>();
    const bool unpacked = qi_unpacks<W>() && rows >= E::UNPACKED * FULL;
    x.fill(rows, prepare);
    // Codes of `near` panels stay in the L2 cache while all rows pass by, so that lines of the result are neighbours.
    const int64_t bytes = qc_max(1, QG_NP * qi_panel_bytes<W>(job->k)), left = QI_NEAR - rows * x.stride;
    const int64_t most = qi_unpacks<W>() || W::NESTED ? (int64_t)1 : qc_max(1, left / bytes);  // of units of panels
    const int64_t units = qc_max(1, qg_up(p1 - p0, QG_NP));
    const int64_t near = qg_up(units, qg_up(units, most)) * QG_NP;  // equal numbers, nearly
    for (int64_t first = p0; first < p1; first += near) {
        // One block of eight rows reads entries once; slopes with intercepts still take less time computed apart.
        const bool apart = W::NESTED && ((W::AFFINE && rows == 8) || qi_next_rows<W, E>(rows) < rows);
        const int64_t second = qc_min(first + QG_NP, p1) - 1;  // the last of one unit, if that is what is near
        if constexpr (W::NESTED)
            if (apart) qi_prepare_entries<W>(job->packed, first, second, entries);
        if constexpr (qi_unpacks<W>())
            if (unpacked) qi_unpack<W, E>(job->packed, first, second, codes);
        for (int64_t i = 0, count; i < rows; i += count) {
            count = qi_next_rows<W, E>(rows - i);
            const qi_block block = x.from(i, apart ? entries : nullptr, unpacked ? codes : nullptr);
            for (int64_t panel = first; panel < qc_min(first + near, p1); panel += QG_NP) {
                const int64_t next = qc_min(panel + QG_NP, p1) - 1, n0 = panel * 16;
                qg_ask_for_targets(job, panel, next + 1 - panel, m0 + i, count);
                if (unpacked) qi_micro_any<W, E, qi_unpacks<W>()>(count, job->packed, block, panel, next, tile);
                else qi_micro_any<W, E, false>(count, job->packed, block, panel, next, tile);
                job->finish(job, tile, QG_NP * 16, m0 + i, count, n0, qc_min(job->n - n0, (next + 1 - panel) * 16));
            }
        }
    }
}
