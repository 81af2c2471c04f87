// Products of bf16 numbers by AMX (`tdpbf16ps`), where the context allows it: sixteen rows of x times sixteen of w, 32
// columns at a time, with sums in fp32.
//
// Words of two columns, as gemm_bf16.h makes them, are tiles of w as they lie: [pair of columns][16 lanes]. Rows of x
// are rounded once for all tasks and put in tiles, too, in the scratch of the calling thread. A task has some units of
// two panels, and does its work in one of two orders:
//
//     words stay    many rows, not too many columns: it makes the words of all its units, which stay in the L2 cache,
//                   and multiplies each block of rows (bf16_kept.h)
//     sums stay     else: for each block of columns and each unit it makes the words and multiplies all rows by them.
//                   The words of a block stay in the L1 cache, the sums of all units in the L2 cache. For few rows,
//                   some formats take all blocks of a unit before the next unit (`qbt_along`)
//
// and makes the words in one of two ways:
//
//     by elements   a word holds two rounded elements
//     by codes      a word holds the values of two codes, which take a fifth of the time to make (bytes: half), and the
//                   sums of the columns of a scale are multiplied by it. Pays for few rows, and where a row has one
//                   scale
//
// A tile adds the products of even and of odd columns apart, 16 each, and then both to the sum; each addition rounds.
#pragma once
#include "amx.h"
#include "gemm_bf16.h"

// Columns of a tile of x, bytes of a tile, most rows and columns of a block (the words of a unit take 32 KiB).
enum { QBT_COLUMNS = 32, QBT_TILE = 1024, QBT_ROWS = 32, QBT_BLOCK = 512 };
// Few rows have narrower blocks: x and the words share an L1 cache of 48 KiB.
enum { QBT_NARROW = 256 };
// Bytes of rows of x at a time, most units of a task, floats of their sums that stay (a quarter of 2 MiB of L2).
enum { QBT_CHUNK = 1 << 22, QBT_UNITS = 8, QBT_SUMS = 1 << 17 };
// Most rows that are multiplied by codes where a row of w has several scales. With more, words stay if there are at
// most QBT_KEPT columns.
enum { QBT_FEW = 64, QBT_KEPT = 2048 };

constexpr int64_t qbt_padded(int64_t k) { return qg_up(k, QBT_COLUMNS) * QBT_COLUMNS; }
// Whether words stay, for `m` rows (0: for some number of rows).
constexpr bool qbt_keeps(int64_t k, int64_t m) { return k > 0 && k <= QBT_KEPT && (m == 0 || m > QBT_FEW); }
// Most rows at a time, of at most `m` (0: any number), and at most `bound`.
constexpr int64_t qbt_rows_that_fit(int64_t k, int64_t m, int64_t bound) {
    const int64_t fit = k > 0 ? QBT_CHUNK / (2 * qbt_padded(k)) / QBT_ROWS * QBT_ROWS : bound;
    const int64_t most = m > 0 && m < bound ? qg_up(m, QBT_ROWS) * QBT_ROWS : bound;
    return fit < QBT_ROWS ? (int64_t)QBT_ROWS : fit > most ? most : fit;
}
constexpr int64_t qbt_chunk(int64_t k, int64_t m) { return qbt_rows_that_fit(k, m, 1024); }
// Rows of a chunk where `m` rows are cut into nearly equal ones, of whole blocks; `most` rows fit, whole blocks, too.
constexpr int64_t qbt_equal_chunk(int64_t m, int64_t most) {
    return qg_up(qg_up(m, qg_up(m, most)), QBT_ROWS) * QBT_ROWS;
}
// Floats from one row of sums to the next: not a power of two, whose multiples share sets of an L1 cache.
constexpr int64_t qbt_stride(int64_t units) { return (units * QG_NP + 1) * 16; }
// Bytes of words and sums of a task.
constexpr int64_t qbt_work(int64_t k, int64_t m) {
    const int64_t rows = qbt_chunk(k, m), all = rows * qbt_stride(QBT_UNITS), unit = rows * qbt_stride(1);
    const int64_t least = all < QBT_SUMS ? all : (int64_t)QBT_SUMS;
    return QG_NP * QBT_BLOCK * 32 + 4 * (least < unit ? unit : least);
}
// Bytes for two blocks of rows of a unit's sums, and for words of a block: QBT_SPARE.
enum { QBT_SPARE = QG_NP * QBT_BLOCK * 32 + 2 * 4 * QBT_ROWS * 16 * (QG_NP + 1) };
// Bytes of scratch: spare ones, words and sums, rows of x in tiles, the sums of their columns, a row in fp32.
constexpr int64_t qbt_scratch(int64_t k, int64_t m) {
    const int64_t chunk = qbt_chunk(k, m), totals = qg_up(chunk + QBT_FEW * (k / QBT_COLUMNS), 16) * 16;
    return QBT_SPARE + qbt_work(k, m) + chunk * 2 * qbt_padded(k) + 4 * (totals + qbt_padded(k));
}

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
// --- tiles -----------------------------------------------------------------------------------------------------------

// Asks for lines. (Compilers may keep an address for each in a register.)
template <int LINES> QC_INLINE void qbt_ask(const char* at) {
    if constexpr (LINES > 0) {
        asm volatile("prefetcht0 %c1(%0)" : : "r"(at), "i"(64 * (LINES - 1)));
        qbt_ask<LINES - 1>(at);
    }
}

// What is asked for: rows of x, which come from the L2 cache, a column of tiles ahead; or the next codes, in memory:
// `lines` for a column of tiles of each panel.
enum qbt_asked { QBT_X, QBT_CODES };
struct qbt_soon {
    const char* at;
    int64_t next;  // bytes to those of the second panel
    int64_t lines;
    bool far;  // codes that are needed later go to the L2 cache
};
QC_INLINE void qbt_ask_codes(const char* line, bool far) {
    if (far) __builtin_prefetch(line, 0, 2);
    else __builtin_prefetch(line);
}

// MB tiles of x (4 and 5) times NB of words (6 and 7): the sums in tiles 0 to 3 begin at zero, take a product, and are
// stored in rows that lie `stride` bytes apart, panel beside panel, the second block of rows below the first.
template <int MB, int NB> QC_INLINE void qbt_zero_sums() {
    qa_zero<0>();
    if constexpr (NB > 1) qa_zero<1>();
    if constexpr (MB > 1) qa_zero<2>();
    if constexpr (MB > 1 && NB > 1) qa_zero<3>();
}
template <int MB, int NB> QC_INLINE void qbt_add_product() {
    qa_dot_bf16<0, 4, 6>();
    if constexpr (NB > 1) qa_dot_bf16<1, 4, 7>();
    if constexpr (MB > 1) qa_dot_bf16<2, 5, 6>();
    if constexpr (MB > 1 && NB > 1) qa_dot_bf16<3, 5, 7>();
}
template <int MB, int NB> QC_INLINE void qbt_store_sums(float* sums, int64_t stride) {
    float* const below = (float*)((char*)sums + 16 * stride);
    qa_store<0>(sums, stride);
    if constexpr (NB > 1) qa_store<1>(sums + 16, stride);
    if constexpr (MB > 1) qa_store<2>(below, stride);
    if constexpr (MB > 1 && NB > 1) qa_store<3>(below + 16, stride);
}

// sums[16 b + i][16 p + lane] (+)= tiles of MB blocks of 16 rows times NB panels, whose words lie `next` bytes apart;
// rows of sums lie `stride` bytes apart. The tiles of both blocks lie side by side, from one column of tiles to the
// next `step` bytes.
template <int MB, int NB, qbt_asked ASKED> QC_INLINE void qbt_block(
    const char* x, int64_t step, const char* w, int64_t next, int64_t tiles, float* sums, int64_t stride, bool add,
    qbt_soon soon) {
    if (add) {
        float* const below = (float*)((char*)sums + 16 * stride);
        qa_load<0>(sums, stride);
        if constexpr (NB > 1) qa_load<1>(sums + 16, stride);
        if constexpr (MB > 1) qa_load<2>(below, stride);
        if constexpr (MB > 1 && NB > 1) qa_load<3>(below + 16, stride);
    } else {
        qbt_zero_sums<MB, NB>();
    }
    for (; tiles > 0; tiles--, x += step, w += QBT_TILE) {
        qa_load<4>(x, 64);
        if constexpr (MB > 1) qa_load<5>(x + QBT_TILE, 64);
        qa_load<6>(w, 64);
        if constexpr (NB > 1) qa_load<7>(w + next, 64);
        if constexpr (ASKED == QBT_X) qbt_ask<16 * MB>(x + step);
        if constexpr (ASKED == QBT_CODES)
            for (int64_t i = 0; i < soon.lines; i++, soon.at += 64) {
                qbt_ask_codes(soon.at, soon.far);
                if constexpr (NB > 1) qbt_ask_codes(soon.at + soon.next, soon.far);
            }
        qbt_add_product<MB, NB>();
    }
    qbt_store_sums<MB, NB>(sums, stride);
}

// --- words of w ------------------------------------------------------------------------------------------------------

// Where codes are looked up, a word holds columns J and J + HALF of every PER columns, by elements as well.
template <class D, bool LOOKED_UP = qb_coded<D>::LOOKED_UP> struct qbt_order {
    static constexpr int HALF = 1, BITS = 0;
};
template <class D> struct qbt_order<D, true> {
    static constexpr int HALF = qb_coded<D>::HALF, BITS = qb_coded<D>::LOW;
    static_assert(D::GROUP % qb_coded<D>::PER == 0, "groups are whole words");
};

template <class D> struct qbt_store_step {
    const D& decoder;
    int32_t* dst;
    template <int P> QG_METHOD void step() {
        constexpr int HALF = qbt_order<D>::HALF, J = P / HALF * 2 * HALF + P % HALF;
        q_store(dst + 16 * P, (qi)qb_pairs(decoder.template value<J>(), decoder.template value<J + HALF>()));
    }
};

// Columns [k0, k0 + kc) of a panel, and what is left of whole tiles: zeros, or where codes are looked up the columns
// behind the last one, which are multiplied by zeros.
template <class D> QC_COLD void qbt_elements(const qg_job* job, int64_t panel, int64_t k0, int64_t kc, char* words) {
    int64_t end = (kc + 1) / 2 * 64;
    if constexpr (qbt_order<D>::BITS == 0) {
        qb_decode_panel<D>(job, panel, k0, kc, (float*)words);
    } else {
        D decoder;
        decoder.start(job, panel);
        end = qg_up(kc, D::GROUP) * D::GROUP * 32;
        for (int64_t k = 0; k < kc; k += D::GROUP) {
            decoder.at(k0 + k);
            qbt_store_step<D> body{decoder, (int32_t*)(words + 32 * k)};
            qg_steps<0, D::GROUP / 2>(body, D::GROUP / 2);
        }
    }
    const int64_t whole = qbt_padded(kc) * 32;
    if (end < whole) memset(words + end, 0, (size_t)(whole - end));
}

// Whether words may hold values of codes: those that are looked up are rounded in the table, others are not rounded.
template <class D> constexpr bool qbt_codes_fit() {
    if constexpr (qb_coded<D>::LOOKED_UP) return true;
    else if constexpr (!qb_coded<D>::SUMMED) return false;
    else return decltype(D::entries)::EXACT && decltype(D::entries)::COVERS % QBT_COLUMNS == 0;
}

template <class D> struct qbt_code_step {
    const D& decoder;
    int32_t* to;
    template <int J> QG_METHOD void step() {
        if constexpr (J % 2 == 0) q_store(to + 8 * J, (qi)qb_columns_of_codes<J>(decoder));
    }
};

// Whether codes are bytes that count: 1 without a sign, 2 with one, else 0.
template <class V> struct qbt_bytes { static constexpr int KIND = 0; };
template <bool SIGNED> struct qbt_bytes<qg_counts<8, SIGNED, 0>> { static constexpr int KIND = SIGNED ? 2 : 1; };
template <class D> constexpr int qbt_bytes_of() {
    if constexpr (qbt_codes_fit<D>()) return qbt_bytes<typename decltype(D::entries)::values>::KIND;
    else return 0;
}

// Byte J of each word as a float. The dot product with a one and three zeros is the byte, with its sign, in one
// instruction of AVX-512 VNNI, which all processors with tiles have.
template <int J, bool SIGNED> QC_INLINE qf qbt_byte(qu word) {
    const qi one = q_seti(1 << 8 * J);
    qi byte = qi();
    if constexpr (SIGNED) asm("vpdpbusd %1, %2, %0" : "+v"(byte) : "v"(word), "v"(one));
    else asm("vpdpbusd %1, %2, %0" : "+v"(byte) : "v"(one), "v"(word));
    return __builtin_convertvector(byte, qf);
}

// Where a panel's codes of columns from k0 on lie, if words of them are made without a decoder.
template <class D> QC_INLINE qbt_soon qbt_codes_at(const qg_job* job, int64_t panel, int64_t k0) {
    if constexpr (qb_coded<D>::LOOKED_UP || qbt_bytes_of<D>() != 0) {
        const int64_t words = qg_up(job->k, qb_coded<D>::PER);
        const char* const at = job->packed.part[0] + (panel * words + k0 / qb_coded<D>::PER) * 64;
        return {at, words * 64, QBT_COLUMNS / qb_coded<D>::PER, false};
    }
    return {};
}

// The values of the codes of columns [k0, k0 + kc), whole tiles. `asks`: of bytes, for those 256 columns on.
template <class D> QC_COLD void qbt_codes(
    const qg_job* job, int64_t panel, int64_t k0, int64_t kc, char* words, [[maybe_unused]] bool asks) {
    typedef decltype(D::entries) W;
    if constexpr (qb_coded<D>::LOOKED_UP) {
        typedef qb_coded<D> P;
        qb_table<W> table;
        qb_words<W> from;
        table.load(), from.start(job->packed, panel);
        from.words += k0 / P::PER * 16;
        for (int64_t k = 0; k < kc; k += P::PER) {
            from.read(k0 + k);
            QG_UNROLL for (int j = 0; j < P::HALF; j++)
                q_store((int32_t*)(words + 32 * k) + 16 * j, (qi)table.look(from.pair(j)));
        }
    } else if constexpr (qbt_bytes_of<D>() != 0) {
        constexpr bool SIGNED = qbt_bytes_of<D>() == 2;
        const char* from = qbt_codes_at<D>(job, panel, k0).at;
        for (int64_t k = 0; k < kc; k += 4, from += 64) {
            const qu word = (qu)q_load((const int32_t*)from);
            if (asks) __builtin_prefetch(from + QBT_NARROW / 4 * 64);
            int32_t* const to = (int32_t*)(words + 32 * k);
            q_store(to, (qi)qb_upper_halves(qbt_byte<0, SIGNED>(word), qbt_byte<1, SIGNED>(word)));
            q_store(to + 16, (qi)qb_upper_halves(qbt_byte<2, SIGNED>(word), qbt_byte<3, SIGNED>(word)));
        }
    } else {
        static_assert(D::UNIT == 1.0f, "values of codes");
        D decoder;
        decoder.start(job, panel);
        for (int64_t k = 0; k < kc; k += D::GROUP) {
            decoder.codes_at(k0 + k);
            qbt_code_step<D> body{decoder, (int32_t*)(words + 32 * k)};
            qg_steps<0, D::GROUP>(body, D::GROUP);
        }
    }
}

// Columns of a scale if `rows` rows are multiplied by codes, else 0. Words of elements take four more cycles for 32
// weights than those of codes, and to scale the sums of a row of x takes some for each scale.
template <class D> QC_INLINE int64_t qbt_span(int64_t k, int64_t rows) {
    if constexpr (!qbt_codes_fit<D>()) return 0;
    else {
        const int64_t span = qb_coded<D>::span(k);
        if (decltype(D::entries)::COVERS == 0) return k > 0 && span == k && k % QBT_COLUMNS == 0 ? k : 0;
        const bool whole = k % span == 0 && span % QBT_COLUMNS == 0 && QBT_NARROW % span == 0;
        constexpr int64_t FEW = qbt_bytes_of<D>() != 0 ? (int64_t)QBT_ROWS : (int64_t)QBT_FEW;
        return whole && rows <= qc_min(span, FEW) ? span : 0;
    }
}

// --- rows of x -------------------------------------------------------------------------------------------------------

// 32 numbers of a row, of which `left` are there, rounded to bf16.
template <class T> QC_INLINE __m512i qbt_numbers(const T* x, int64_t left) {
    const vf first = vload_upto(x, (int)qc_min(left, 16));
    const vf second = left > 16 ? vload_upto(x + 16, (int)qc_min(left - 16, 16)) : vzero();
    return qb_in_order(first.r[0], second.r[0]);
}
QC_INLINE __m512i qbt_numbers(const qc_bf16* x, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(x);
    return _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), x);
}

// How rows of x lie: blocks of `width` columns, in each the blocks of 16 or 32 rows, in each the columns of tiles, in
// each a tile or two.
struct qbt_rows {
    char* tiles;
    int64_t count, padded;
    int64_t width, block, blocks;  // columns and rows of a block, blocks of rows
    qbt_rows(char* at, int64_t rows, int64_t k, bool keeps)
        : tiles(at), count(rows), padded(qbt_padded(k)),
          width(keeps ? padded : rows > QBT_ROWS ? (int64_t)QBT_BLOCK : QBT_NARROW),
          block(rows > 16 ? (int64_t)QBT_ROWS : 16), blocks(qg_up(rows, block)) {}
    int64_t step() const { return block * 64; }
    int64_t columns(int64_t k0) const { return qc_min(padded - k0, width); }  // of the block that begins at k0
    int64_t of(int64_t b) const { return qc_min(count - b * QBT_ROWS, QBT_ROWS); }  // rows of block b
    char* at(int64_t k, int64_t b) const {
        const int64_t k0 = k / width * width;
        return tiles + 2 * block * (k0 * blocks + b * columns(k0) + (k - k0));
    }
};

// Row i, with its columns in the order of words of codes of BITS bits (0: as they are).
template <int BITS, class T> QC_INLINE void qbt_put_row(const T* x, int64_t k, const qbt_rows& rows, int64_t i) {
    for (int64_t k0 = 0; k0 < rows.padded; k0 += rows.width) {
        char* to = rows.at(k0, i / rows.block) + i % rows.block * 64;
        for (int64_t at = k0; at < k0 + rows.columns(k0); at += QBT_COLUMNS, to += rows.step()) {
            __m512i numbers = k > at ? qbt_numbers(x + at, k - at) : __m512i();
            if constexpr (BITS != 0) numbers = (__m512i)qb_permute(qb_order<BITS>.from, numbers);
            _mm512_store_si512(to, numbers);
        }
    }
}

QC_INLINE vf qbt_rounded(vf x, const void*) { return vround_bf16(x); }
QC_INLINE vf qbt_rounded(vf x, const qc_bf16*) { return x; }

// The sums of whole groups of `span` columns, rounded to bf16.
template <class T> QC_INLINE void qbt_add_up(const T* x, int64_t k, int64_t span, float* totals) {
    for (int64_t g = 0; g < k / span; g++) {
        vf total = vzero();
        for (int64_t at = g * span; at < (g + 1) * span; at += 16) total = total + qbt_rounded(vload(x + at), x);
        totals[g] = vsum(total);
    }
}

// Whether elements have an offset.
template <class D> constexpr bool qbt_offset() {
    if constexpr (qbt_codes_fit<D>()) return decltype(D::entries)::OFFSET;
    return false;
}

// Rows m0 + [first, last) of x in tiles (behind the last row zeros), and for `span` > 0 the sums of their columns. A
// window is made in `row`.
template <class D, class T>
static void qbt_load_rows(
    const qg_job* job, int64_t m0, const qbt_rows& rows, int64_t first, int64_t last, int64_t span, float* totals,
    float* row) {
    const auto put = [&](const auto* x, int64_t i) {
        qbt_put_row<qbt_order<D>::BITS>(x, job->k, rows, i);
        if (qbt_offset<D>() && span > 0) qbt_add_up(x, job->k, span, totals + i * (job->k / span));
    };
    for (int64_t i = first; i < last; i++) {
        if (i >= rows.count) qbt_put_row<0>((const T*)nullptr, 0, rows, i);
        else if (job->window) job->load_x(job, m0 + i, 1, 0, job->k, row, rows.padded), put(row, i);
        else put((const T*)job->x + (m0 + i) * job->x_row, i);
    }
}

// --- products --------------------------------------------------------------------------------------------------------

struct qbt_call {
    const qg_job* job;
    qbt_rows rows;
    int64_t m0, span, units;  // the first row; columns of a scale, or 0; units of a task
    float* totals;
    int64_t row_at;  // where in scratch a row of x has room
};

// One panel, or two: their words, `next` bytes apart, and their sums, with rows `stride` floats apart.
struct qbt_unit {
    int64_t panel;
    bool two;
    char* words;
    int64_t next;
    float* sums;
    int64_t stride;
    qbt_soon soon;
};

// What a thread has for blocks of rows of one unit: words, sums before they are scaled, and sums by elements.
struct qbt_spare {
    char* words;
    float* parts;
    float* others;
    qbt_spare(char* scratch)
        : words(scratch), parts((float*)(words + QG_NP * QBT_BLOCK * 32)), others(parts + QBT_ROWS * qbt_stride(1)) {}
};

template <qbt_asked ASKED> static void qbt_product_of(
    const qbt_rows& rows, int64_t b, const char* x, int64_t tiles, const char* words, const qbt_unit& unit, float* sums,
    bool add, const qbt_soon& soon) {
    const int64_t step = rows.step(), next = unit.next, stride = 4 * unit.stride;
    if (rows.of(b) > 16) {
        if (unit.two) qbt_block<2, 2, ASKED>(x, step, words, next, tiles, sums, stride, add, soon);
        else qbt_block<2, 1, ASKED>(x, step, words, next, tiles, sums, stride, add, soon);
    } else {
        if (unit.two) qbt_block<1, 2, ASKED>(x, step, words, next, tiles, sums, stride, add, soon);
        else qbt_block<1, 1, ASKED>(x, step, words, next, tiles, sums, stride, add, soon);
    }
}

// sums (+)= columns [k, k + tiles * 32) of block b of rows, times words.
QC_COLD void qbt_product(
    const qbt_rows& rows, int64_t b, int64_t k, int64_t tiles, const char* words, const qbt_unit& unit, float* sums,
    bool add, const qbt_soon& soon = {}) {
    const char* const x = rows.at(k, b);
    if (rows.blocks > 1) qbt_product_of<QBT_X>(rows, b, x, tiles, words, unit, sums, add, soon);
    else qbt_product_of<QBT_CODES>(rows, b, x, tiles, words, unit, sums, add, soon);
}

template <class D> static void qbt_make(
    const qg_job* job, const qbt_unit& unit, int64_t k0, int64_t kc, bool codes, bool asks = false) {
    for (int p = 0; p < 1 + unit.two; p++) {
        char* const words = unit.words + p * unit.next;
        if constexpr (qbt_codes_fit<D>())
            if (codes) {
                qbt_codes<D>(job, unit.panel + p, k0, kc, words, asks);
                continue;
            }
        qbt_elements<D>(job, unit.panel + p, k0, kc, words);
    }
}

// Sums of rows that have one scale: sums[i] = sums[i] * scale + totals[i] * offset for a panel.
template <class W> QC_INLINE void qbt_scale(
    const qg_packed& from, int64_t panel, int64_t count, const float* totals, float* sums, int64_t stride) {
    W entries;
    entries.load(from, panel, 0);
    const qf scale = entries.scale().r[0];
    for (int64_t i = 0; i < count; i++, sums += stride) {
        qf sum = q_load(sums) * scale;
        if constexpr (W::OFFSET) sum = q_fma(q_set(totals[i]), entries.offset().r[0], sum);
        q_store(sums, sum);
    }
}

// Columns [k0, k0 + kc) of a unit's panels p … p + P - 1 times R rows from row `first` on, a multiple of 16. Each
// scale's columns are multiplied apart; the scaled sums stay in registers. Rows that are not there may hold anything.
template <class D, int R, int P> QC_INLINE void qbt_scaled_rows(
    const qbt_call& call, const qbt_unit& unit, int64_t first, int p, int64_t k0, int64_t kc, float* sums,
    float* parts) {
    typedef decltype(D::entries) W;
    enum { STRIDE = qbt_stride(1) };
    const int64_t groups = call.job->k / call.span, tiles = call.span / QBT_COLUMNS;
    qf sum[R][P];
    QG_UNROLL for (int i = 0; i < R; i++)
        QG_UNROLL for (int v = 0; v < P; v++) sum[i][v] = k0 ? q_load(sums + i * unit.stride + 16 * v) : qf();
    qbt_soon soon = unit.soon;
    soon.at += p * soon.next;
    if (first) soon.lines = 0;
    for (int64_t k = k0; k < k0 + kc; k += call.span, soon.at += tiles * soon.lines * 64) {
        qbt_block<1, P, QBT_CODES>(
            call.rows.at(k, first / QBT_ROWS) + first % QBT_ROWS / 16 * QBT_TILE, call.rows.step(),
            unit.words + p * unit.next + 32 * (k - k0), unit.next, tiles, parts, 4 * STRIDE, false, soon);
        W entries[P];
        QG_UNROLL for (int v = 0; v < P; v++) {
            entries[v].load(call.job->packed, unit.panel + p + v, k);
            const qf scale = entries[v].scale().r[0];
            QG_UNROLL for (int i = 0; i < R; i++)
                sum[i][v] = q_fma(q_load(parts + i * STRIDE + 16 * v), scale, sum[i][v]);
        }
        if constexpr (W::OFFSET) {
            const float* const totals = call.totals + first * groups + k / call.span;
            const int64_t last = call.rows.count - first - 1;
            QG_UNROLL for (int i = 0; i < R; i++) {
                const qf total = q_set(totals[qc_min(i, last) * groups]);
                QG_UNROLL for (int v = 0; v < P; v++) sum[i][v] = q_fma(total, entries[v].offset().r[0], sum[i][v]);
            }
        }
    }
    QG_UNROLL for (int i = 0; i < R; i++)
        QG_UNROLL for (int v = 0; v < P; v++) q_store(sums + i * unit.stride + 16 * v, sum[i][v]);
}

// Columns [k0, k0 + kc) of block b of rows, by codes, whose words are there.
template <class D> static void qbt_scaled(
    const qbt_call& call, const qbt_unit& unit, int64_t b, int64_t k0, int64_t kc, float* sums, float* parts) {
    typedef decltype(D::entries) W;
    if (call.span < call.job->k) {
        if (unit.two && call.rows.count <= 8)
            return qbt_scaled_rows<D, 8, 2>(call, unit, 0, 0, k0, kc, sums, parts);
        for (int64_t i = 0; i < call.rows.of(b); i += 16)
            for (int p = 0; p < 1 + unit.two; p++)
                qbt_scaled_rows<D, 16, 1>(
                    call, unit, b * QBT_ROWS + i, p, k0, kc, sums + i * unit.stride + 16 * p, parts);
        return;
    }
    qbt_product(call.rows, b, k0, kc / QBT_COLUMNS, unit.words, unit, sums, k0 > 0, unit.soon);
    for (int p = 0; p < 1 + unit.two && k0 + kc == call.job->k; p++)
        qbt_scale<W>(call.job->packed, unit.panel + p, call.rows.of(b), call.totals + b * QBT_ROWS, sums + 16 * p,
                    unit.stride);
}

// A sum of codes may be no number where that of elements is one (0 * infinity): such rows take the other way, too.
template <class D, class CALL> QC_COLD void qbt_mend(
    const CALL& call, const qbt_unit& unit, int64_t b, float* sums, const qbt_spare& spare) {
    bool made = false;
    for (int64_t i = 0; i < call.rows.of(b); i++) {
        float* const row = sums + i * unit.stride;
        const vf first = vload(row), second = unit.two ? vload(row + 16) : vzero();
        if (vsum((first - first) + (second - second)) == 0.0f) continue;
        const qbt_unit other = {unit.panel, unit.two, spare.words, QBT_BLOCK * 32, spare.others, qbt_stride(1)};
        for (int64_t k0 = 0, width = qc_min(call.rows.width, QBT_BLOCK); !made && k0 < call.job->k; k0 += width) {
            const int64_t kc = qc_min(call.job->k - k0, width);
            qbt_make<D>(call.job, other, k0, kc, false);
            qbt_product(call.rows, b, k0, qg_up(kc, QBT_COLUMNS), other.words, other, spare.others, k0 > 0);
        }
        made = true;
        memcpy(row, spare.others + i * qbt_stride(1), 4 * 16 * QG_NP);
    }
}

// The columns of a block times block b of rows: sums, in the end.
template <class D> QC_INLINE void qbt_multiply(
    const qbt_call& call, const qbt_unit& unit, int64_t b, int64_t k0, int64_t kc, float* sums,
    const qbt_spare& spare) {
    if constexpr (qbt_codes_fit<D>())
        if (call.span > 0) {
            qbt_scaled<D>(call, unit, b, k0, kc, sums, spare.parts);
            if (k0 + kc == call.job->k) qbt_mend<D>(call, unit, b, sums, spare);
            return;
        }
    qbt_product(call.rows, b, k0, qg_up(kc, QBT_COLUMNS), unit.words, unit, sums, k0 > 0);
}

// Whether few rows walk along a unit: codes that take much of the memory's rate, or entries that do not lie in order.
template <class D> constexpr bool qbt_along() {
    if constexpr (qbt_codes_fit<D>()) return qbt_bytes_of<D>() != 0 || decltype(D::entries)::SCATTERED;
    else return false;
}

template <class D> static void qbt_task(void* arg, int64_t task, char* scratch) {
    const qbt_call& call = *(const qbt_call*)arg;
    const qg_job* const job = call.job;
    const int64_t panels = (job->n + 15) / 16, p0 = task * call.units * QG_NP, n0 = p0 * 16;
    const int64_t units = qc_min(qg_up(panels, QG_NP) - task * call.units, call.units);
    const int64_t stride = qbt_stride(call.units), columns = qc_min(job->n - n0, units * QG_NP * 16);
    const qbt_spare spare(scratch);
    char* const words = scratch + QBT_SPARE;
    float* const sums = (float*)(words + QG_NP * QBT_BLOCK * 32);
    const auto unit_of = [&](int64_t u) -> qbt_unit {
        const int64_t panel = p0 + u * QG_NP;
        return {panel, panel + 1 < panels, words, QBT_BLOCK * 32, sums + u * QG_NP * 16, stride, {}};
    };
    qa_configure(qa_shape_for(call.rows.count));
    // Few rows walk along a unit's codes, which come from memory in order; more rows along a block of columns of x.
    const int64_t width = call.rows.width, blocks = job->k > 0 ? qg_up(job->k, width) : 1;  // for k = 0: sums are zero
    const bool along = qbt_along<D>() && call.rows.count <= 16;
    const auto multiply = [&](int64_t u, int64_t i, int64_t panel, int64_t block) {  // `panel`, `block`: asked for
        const int64_t k0 = i * width, kc = qc_min(job->k - k0, width);
        qbt_unit unit = unit_of(u);
        unit.soon = qbt_codes_at<D>(job, panel, block * width);
        unit.soon.far = along && qbt_bytes_of<D>() != 0;
        qbt_make<D>(job, unit, k0, kc, call.span > 0, along || call.rows.blocks > 1);
        for (int64_t b = 0; b < call.rows.blocks; b++)
            qbt_multiply<D>(call, unit, b, k0, kc, unit.sums + b * QBT_ROWS * stride, spare);
    };
    if (along) {
        constexpr int64_t AHEAD = qbt_bytes_of<D>() != 0 ? 2 : 1;
        for (int64_t u = 0; u < units; u++)
            for (int64_t i = 0; i < blocks; i++) {
                const int64_t next = i + AHEAD, panel = p0 + (u + next / blocks) * QG_NP;
                multiply(u, i, panel, next % blocks);
            }
    } else {
        for (int64_t i = 0; i < blocks; i++)
            for (int64_t u = 0; u < units; u++) {
                const bool more = u + 1 < units;
                multiply(u, i, more ? p0 + (u + 1) * QG_NP : p0, more ? i : i + 1);
            }
    }
    qa_release();
    for (int64_t b = 0; b < call.rows.blocks; b++)
        job->finish(job, sums + b * QBT_ROWS * stride, stride, call.m0 + b * QBT_ROWS, call.rows.of(b), n0, columns);
}

// Rows from which tiles take less time than dot products do (measured at 4096 x 4096, docs/performance.md): making
// words of elements takes as long as some rows of dot products.
template <class D> QC_INLINE int64_t qbt_least(int64_t k, int64_t rows) {
    if (qbt_span<D>(k, rows) == 0) return 6;
    return qbt_offset<D>() ? 3 : 2;
}

// Of `count` units or panels, how many a task has, at most `most`: so that each thread has as many tasks (five take two
// threads as long as six).
QC_INLINE int64_t qbt_even(int64_t count, int64_t most, int64_t threads) {
    return qg_up(count, qg_up(qg_up(count, most), threads) * threads);
}

// Rows of a task that puts them in tiles.
enum { QBT_LOADED = 32 };
template <class D, class T, class CALL> static void qbt_load_task(void* arg, int64_t task, char* scratch) {
    const CALL& call = *(const CALL*)arg;
    const int64_t end = call.rows.blocks * call.rows.block;
    qbt_load_rows<D, T>(call.job, call.m0, call.rows, task * QBT_LOADED, qc_min((task + 1) * QBT_LOADED, end),
                        call.span, call.totals, (float*)(scratch + call.row_at));
}

// Rows of T times a weight. `m`: what `qbt_scratch` was told.
template <class D, class T> static void qbt_run(qc_ctx* ctx, qg_job* job, int64_t m) {
    if (job->m <= 0 || job->n <= 0) return;
    const int64_t units = qg_up((job->n + 15) / 16, QG_NP), threads = ctx->num_threads;
    const int64_t most = qbt_chunk(job->k, m), chunk = qbt_equal_chunk(job->m, most), padded = qbt_padded(job->k);
    char* const tiles = ctx->scratch + QBT_SPARE + qbt_work(job->k, m);
    float* const totals = (float*)(tiles + most * 2 * padded);
    for (int64_t m0 = 0; m0 < job->m; m0 += chunk) {
        const qbt_rows rows(tiles, qc_min(job->m - m0, chunk), job->k, false);
        const int64_t fit = (QBT_SUMS / (rows.blocks * rows.block * 16) - 1) / QG_NP;
        const int64_t worth = units * QG_NP * job->k * (3 + qg_up(rows.count, 16)) / 2 / QG_TASK;
        const int64_t tasks = threads > 1 ? qc_max(qc_min(worth, 2 * threads), 1) : 1;
        const int64_t most_units = qc_max(qc_min(qc_min(fit, QBT_UNITS), units / tasks), 1);
        const int64_t wide = tasks > 1 ? qbt_even(units, most_units, threads) : most_units;
        qbt_call call = {job, rows, m0, qbt_span<D>(job->k, job->m), wide, totals,
                        qbt_scratch(job->k, m) - 4 * padded};
        const int64_t loads = qg_up(rows.blocks * rows.block, QBT_LOADED), all = qg_up(units, call.units);
        const bool shared = threads > 1 && all > 1 && tasks > 1;
        qc_run_tasks(
            ctx, shared && rows.count * job->k >= 8 * QG_TASK, loads, qbt_load_task<D, T, qbt_call>, &call);
        qc_run_tasks(ctx, shared, all, qbt_task<D>, &call);
    }
}
#endif
