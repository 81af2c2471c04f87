// Products of bf16 numbers with sums in fp32, on processors with AVX512-BF16 (asked for at run time, since x86-64-v4
// does not promise it). `vdpbf16ps` multiplies two neighbouring columns of 16 rows of w by those of a row of x:
//
//     sum[lane] += x[k] * w[lane][k] + x[k + 1] * w[lane][k + 1]     products exact; numbers below 2^-126 count as zero
//
// Codes whose scales serve 16 columns or more are bf16_blocks.h's, from 2, 4 or 9 rows on. Here is the rest.
//
// Many rows: a panel holds words of two columns, [pair of columns][16 lanes], and rows of bf16 are read where they lie.
// The work is cut as gemm.h cuts it, and so is K. Few rows: codes become words of two columns in registers. The number
// of rows decides which of the two it is (images and row-major weights always take panels), never that of threads.
#pragma once
#include "bf16.h"
#include "few_rows.h"

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
// Columns J and J + 1 of a group, as words.
template <int J, class D> QC_INLINE qu qb_columns(const D& decoder) {
    return qb_pairs(decoder.template value<J>(), decoder.template value<J + 1>());
}
template <int J> QC_INLINE qu qb_columns(const qg_plain<qc_bf16>& decoder) {
    return qb_permute(qb_side_by_side, _mm512_loadu_si512(decoder.now + 16 * J));
}

// Words of the values of their codes, which are rounded only where bf16 does not have them as they are.
template <int J, class D> QC_INLINE qu qb_columns_of_codes(const D& decoder) {
    const vf even = decoder.template code<J>(), odd = decoder.template code<J + 1>();
    if constexpr (decltype(D::entries)::EXACT) return qb_upper_halves(even.r[0], odd.r[0]);
    else return qb_pairs(even, odd);
}

// --- panels ----------------------------------------------------------------------------------------------------------

template <class D> struct qb_store_step {
    const D& decoder;
    uint32_t* dst;
    template <int J> QG_METHOD void step() {
        if (J % 2 == 0) q_store((int32_t*)dst + 8 * J, (qi)qb_columns<J / 2 * 2>(decoder));
    }
};

// Column `column` of a group, which is even, beside zeros.
template <int J, int COUNT, class D> QC_INLINE qu qb_last_of(const D& decoder, int64_t column) {
    if constexpr (J + 2 < COUNT)
        if (column != J) return qb_last_of<J + 2, COUNT>(decoder, column);
    return qb_pairs(decoder.template value<J>(), vzero());
}

// A `qg_decode` for decoder D: words of pairs, rounded to bf16. k0 is a multiple of 16, D::GROUP is even.
template <class D> QC_COLD void qb_decode_panel(const qg_job* job, int64_t panel, int64_t k0, int64_t kc, float* dst) {
    static_assert(D::GROUP % 2 == 0, "pairs of columns");
    D decoder;
    decoder.start(job, panel);
    uint32_t* to = (uint32_t*)dst;
    for (int64_t done = 0; done < kc; done += D::GROUP, to += 8 * D::GROUP) {
        const int64_t left = qc_min(kc - done, D::GROUP);
        decoder.at(k0 + done);
        qb_store_step<D> body{decoder, to};
        qg_steps<0, D::GROUP>(body, left / 2 * 2);
        if (left % 2) q_store((int32_t*)to + 8 * (left - 1), (qi)qb_last_of<0, D::GROUP>(decoder, left - 1));
    }
}

// gemm.h's engine for pairs of columns. Rows that `load_x` makes in fp32 are rounded where they lie.
struct qb_bf16 {
    static constexpr int WIDTH = sizeof(qc_bf16);
    typedef qu word;
    static QG_METHOD word load(const float* p) { return (qu)q_load((const int32_t*)p); }
    template <int N> static QG_METHOD void multiply(qf (&sum)[N], const word (&w)[N], const char* x) {
        QG_UNROLL for (int v = 0; v < N; v++) qb_dot(sum[v], w[v], (const qb_word*)x);
    }
    // Behind the last column lies another row, or nothing.
    template <int N> static QG_METHOD void multiply_last(qf (&sum)[N], const word (&w)[N], const char* x) {
        uint16_t column;
        memcpy(&column, x, 2);
        const qb_word last = column;
        QG_UNROLL for (int v = 0; v < N; v++) qb_dot(sum[v], w[v], &last);
    }
    static QG_METHOD void round_rows(float* rows, int64_t stride, int64_t count, int64_t kc) {
        for (int64_t i = 0; i < count; i++, rows += stride)
            for (int64_t k = 0; k < kc; k += 16) qb_store((char*)rows + 2 * k, vload(rows + k));
    }
};

// --- few rows --------------------------------------------------------------------------------------------------------

// Where an element is code * scale (+ offset), the values of codes are multiplied, each rounded to bf16 (integers of up
// to 8 bits are exact), and the scale multiplies the sum of its columns. Codes of 2 and 4 bits are looked up in words:
// shifted right by J codes, a word of 8 (or 16) columns has column J in the lowest bits of its low half, and column
// J + 4 (J + 8) in those of its high half, and `vpermw` takes 5 bits of both. The table repeats, so the bits above the
// code do not count. Codes of 3, 5 and 6 bits lie in two planes: the bits of the narrower one are put beside those of
// the wider one, and `vpermi2w` takes 6. Rows of x are put in the same order before.
template <class D> struct qb_coded {
    static constexpr bool SUMMED = false, LOOKED_UP = false, ALONE = false;
    static constexpr int FLOATS = 0;
};
template <class W> struct qb_coded<qg_coded<W>> {
    typedef qg_codes<W::BITS, W::GROUP> codes;
    static constexpr int LOW = codes::LOW, MIDDLE = codes::MIDDLE, PER = 32 / LOW, HALF = PER / 2;
    static constexpr bool SUMMED = W::SCALED && (W::COVERS == 0 || W::COVERS >= 16) && W::COVERS % W::GROUP == 0;
    static constexpr bool IN_PLANES =
        MIDDLE != 0 && codes::HIGH == 0 && LOW > 1 && W::COVERS != 0 && W::COVERS % PER == 0;
    static constexpr bool LOOKED_UP =
        SUMMED && qg_codes_of<W>::PLANES &&
        (IN_PLANES || (MIDDLE == 0 && (LOW == 2 || LOW == 4) && W::GROUP * LOW == 32));
    // Up to so many rows take less time in fp32 (bf16_run.h) and give the same products.
    static constexpr int floats() {
        if constexpr (W::BITS == 8) return SUMMED ? 8 : 0;
        else if constexpr (LOOKED_UP && MIDDLE == 0) return W::EXACT ? 2 : 0;
        else return 0;
    }
    static constexpr int FLOATS = floats();
    static constexpr bool ALONE = W::BITS == 8 && SUMMED;  // the same for one row, on any processor
    static QG_METHOD int64_t span(int64_t k) { return W::COVERS ? W::COVERS : k / W::GROUP * W::GROUP; }
};

// The values of W's codes as bf16, by the lowest bits of both halves of words.
template <class W, bool SIX = (W::BITS > 5)> struct qb_table {
    __m512i all;
    QG_METHOD void load() { all = _mm512_loadu_si512(W::HALVES); }
    QG_METHOD qu look(qu codes) const { return (qu)_mm512_permutexvar_epi16((__m512i)codes, all); }
};
template <class W> struct qb_table<W, true> {
    __m512i first, second;
    QG_METHOD void load() { first = _mm512_loadu_si512(W::HALVES), second = _mm512_loadu_si512(W::HALVES + 32); }
    QG_METHOD qu look(qu codes) const {
        return (qu)_mm512_permutex2var_epi16(first, (__m512i)codes, second);
    }
};

// A walk over the codes of a panel, a word of the widest plane at a time.
template <class W> struct qb_words {
    typedef qb_coded<qg_coded<W>> P;
    static constexpr int OTHER = P::MIDDLE ? 32 / P::MIDDLE : 1;  // columns of a word of the narrower plane
    const uint32_t* words;
    const uint32_t* narrow;
    qu low, middle;

    QG_METHOD void start(const qg_packed& from, int64_t panel) {
        words = (const uint32_t*)from.part[0] + panel * qg_up(from.k, P::PER) * 16;
        if constexpr (P::MIDDLE != 0) narrow = (const uint32_t*)from.part[1] + panel * qg_up(from.k, OTHER) * 16;
    }
    // Moves to column k, and asks for the lines `ahead` bytes on.
    QG_METHOD void at(int64_t k, int64_t ahead) {
        qg_ask_once((const char*)words + ahead);
        if constexpr (P::MIDDLE != 0) {
            const int64_t of_narrow = QG_AHEAD + (ahead - QG_AHEAD) * P::MIDDLE / P::LOW;
            qg_ask_once((const char*)(narrow + (uint64_t)k / OTHER * 16) + of_narrow);
        }
        read(k);
    }
    QG_METHOD void read(int64_t k) {  // what was asked for before
        low = (qu)q_load((const int32_t*)words);
        words += 16;
        if constexpr (P::MIDDLE != 0) {  // the columns of the second half go to the high halves
            constexpr int BITS = P::HALF * P::MIDDLE;
            const int skip = (int)(k % OTHER) * P::MIDDLE;
            const qu all = (qu)q_load((const int32_t*)narrow + (uint64_t)k / OTHER * 16) >> skip;
            middle = qg_select<(1u << BITS) - 1>(all, all << (16 - BITS));
        }
    }
    // Columns J and J + HALF, in the lowest bits of both halves; above them stands anything.
    QG_METHOD qu pair(int j) const {
        const qu wide = low >> (P::LOW * j);
        if constexpr (P::MIDDLE == 0) return wide;
        const int to = P::LOW - P::MIDDLE * j;
        return qg_select<0x00010001u * ((1u << P::LOW) - 1)>(wide, to >= 0 ? middle << to : middle >> -to);
    }
};

template <class W, bool USED> struct qb_if_used { typedef qb_table<W> table; typedef qb_words<W> words; };
template <class W> struct qb_if_used<W, false> { struct table {}; struct words {}; };
template <class W, bool USED> using qb_table_of = typename qb_if_used<W, USED>::table;
template <class W, bool USED> using qb_words_of = typename qb_if_used<W, USED>::words;

// Where the columns of x go that words of codes of BITS bits have: eight of them side by side (4 bits), or sixteen (2).
template <int BITS> struct qb_order_of {
    uint16_t from[32];
    constexpr qb_order_of() : from() {
        constexpr int GROUP = 32 / BITS, HALF = GROUP / 2;
        for (int i = 0; i < 32; i++) from[i] = (uint16_t)(i / GROUP * GROUP + i % GROUP / 2 + i % 2 * HALF);
    }
};
template <int BITS> alignas(64) static constexpr qb_order_of<BITS> qb_order{};

template <int BITS> QC_INLINE void qb_reorder(const uint16_t* x, uint16_t* to, int64_t columns) {
    const uint16_t* const order = qb_order<BITS>.from;
    int64_t k = 0;
    for (; k + 32 <= columns; k += 32) {
        const qu moved = qb_permute(order, _mm512_loadu_si512(x + k));
        memcpy(to + k, &moved, 64);
    }
    for (; k < columns; k++) to[k] = x[k / 32 * 32 + order[k % 32]];
}

// What rows of x bring along: for codes that are looked up, their words in order, and for offsets the sums of groups.
struct qb_rows {
    const char* x;  // bf16, rows `stride` bytes apart
    int64_t stride;
    const char* ordered;
    int64_t ordered_stride;
    const float* total;
    int64_t groups;
};

template <int MR> struct qb_few_shape { static constexpr int SUMS = MR == 1 ? 8 : MR <= 3 ? 4 : MR < 8 ? 2 : 1; };

// Columns J and J + 1 of a group: MR rows of x times the elements, or with CODES times the values of the codes.
template <class D, int MR, int SUMS, bool CODES = false> struct qb_dot_step {
    const D& decoder;
    const char* x;
    int64_t stride;
    qf (&sum)[MR][SUMS];
    template <int J> QG_METHOD void step() {
        if constexpr (J % 2 == 0) {
            qu w;
            if constexpr (CODES) w = qb_pairs(decoder.template code<J>(), decoder.template code<J + 1>());
            else w = qb_columns<J>(decoder);
            QG_UNROLL for (int i = 0; i < MR; i++)
                qb_dot(sum[i][J / 2 % SUMS], w, (const qb_word*)(x + i * stride + 2 * J));
        }
    }
};

template <int COUNT> QC_INLINE qf qb_sum(const qf* sum) {
    if constexpr (COUNT == 1) return sum[0];
    else return qb_sum<COUNT / 2>(sum) + qb_sum<COUNT / 2>(sum + COUNT / 2);
}

// The columns that whole scales cover: adds to `sum`, and returns where they end.
template <class D, int MR> QC_INLINE int64_t qb_by_codes(
    const qg_job* job, const qb_rows& rows, int64_t panel, qf (&sum)[MR]) {
    typedef decltype(D::entries) W;
    constexpr int SUMS = qb_few_shape<MR>::SUMS < 4 ? qb_few_shape<MR>::SUMS : 4;
    constexpr bool LOOKED_UP = qb_coded<D>::LOOKED_UP;
    const int64_t span = qb_coded<D>::span(job->k);
    D decoder;
    decoder.start(job, panel);
    int64_t k = 0;
    [[maybe_unused]] qb_table_of<W, LOOKED_UP> table;
    [[maybe_unused]] qb_words_of<W, LOOKED_UP> words;
    if constexpr (LOOKED_UP) table.load(), words.start(job->packed, panel);
    for (int64_t group = 0; span > 0 && k + span <= job->k; k += span, group++) {
        qf part[MR][SUMS] = {};
        if constexpr (LOOKED_UP) {
            for (int64_t at = k; at < k + span; at += qb_coded<D>::PER) {
                words.at(at, QG_AHEAD);
                const char* const x = rows.ordered + 2 * at;
                QG_UNROLL for (int j = 0; j < qb_coded<D>::HALF; j++) {
                    const qu w = table.look(words.pair(j));
                    QG_UNROLL for (int i = 0; i < MR; i++)
                        qb_dot(part[i][j % SUMS], w, (const qb_word*)(x + i * rows.ordered_stride + 4 * j));
                }
            }
        } else {
            for (int64_t at = k; at < k + span; at += W::GROUP) {
                decoder.at(at);
                qb_dot_step<D, MR, SUMS, true> body{decoder, rows.x + 2 * at, rows.stride, part};
                qg_steps<0, W::GROUP>(body, W::GROUP);
            }
        }
        if constexpr (W::SCATTERED) W::ask(job->packed, panel + 1, k);
        if (LOOKED_UP && W::COVERS != 0) decoder.entries.load(job->packed, panel, k);
        const qf scale = decoder.entries.scale().r[0];
        QG_UNROLL for (int i = 0; i < MR; i++) {
            sum[i] = q_fma(qb_sum<SUMS>(part[i]), scale, sum[i]);
            if constexpr (W::OFFSET)
                sum[i] = q_fma(q_set(rows.total[i * rows.groups + group]), decoder.entries.offset().r[0], sum[i]);
        }
    }
    return k;
}

// Columns [k, K) by elements: adds to `sum`.
template <class D, int MR, int SUMS>
QC_INLINE void qb_by_elements(const qg_job* job, const qb_rows& rows, int64_t panel, int64_t k, qf (&sum)[MR][SUMS]) {
    D decoder;
    decoder.start(job, panel);
    for (; k < job->k; k += D::GROUP) {
        const int64_t left = qc_min(job->k - k, D::GROUP);
        decoder.at(k);
        qb_dot_step<D, MR, SUMS> body{decoder, rows.x + 2 * k, rows.stride, sum};
        qg_steps<0, D::GROUP>(body, left / 2 * 2);
        if (left % 2) {
            const qu w[1] = {qb_last_of<0, D::GROUP>(decoder, left - 1)};
            for (int i = 0; i < MR; i++) {
                qf last[1] = {sum[i][0]};
                qb_bf16::multiply_last(last, w, rows.x + i * rows.stride + 2 * (k + left - 1));
                sum[i][0] = last[0];
            }
        }
    }
}

template <class D, int MR>
static void qb_few_panel(const qg_job* job, const qb_rows& rows, int64_t panel, float* tile) {
    constexpr int SUMS = qb_few_shape<MR>::SUMS;
    qf sum[MR][SUMS] = {};
    int64_t k = 0;
    if constexpr (qb_coded<D>::SUMMED) {
        qf whole[MR] = {};
        k = qb_by_codes<D, MR>(job, rows, panel, whole);
        QG_UNROLL for (int i = 0; i < MR; i++) sum[i][0] = whole[i];
    }
    if (k < job->k) qb_by_elements<D, MR, SUMS>(job, rows, panel, k, sum);
    QG_UNROLL for (int i = 0; i < MR; i++) q_store(tile + i * QG_NP * 16, qb_sum<SUMS>(sum[i]));
    if constexpr (qb_coded<D>::SUMMED)
        for (int i = 0; i < MR; i++) {  // as in qg_few_panels
            const vf x = vload(tile + i * QG_NP * 16);
            if (vsum(x - x) == 0.0f) continue;
            const qb_rows row = {rows.x + i * rows.stride, rows.stride, nullptr, 0, nullptr, 0};
            qf one[1][1] = {};
            qb_by_elements<D, 1, 1>(job, row, panel, 0, one);
            q_store(tile + i * QG_NP * 16, one[0][0]);
        }
}

template <class D, int MR> QC_INLINE void qb_few_rows(
    const qg_job* job, int64_t count, const qb_rows& rows, int64_t panel, float* tile) {
    if constexpr (MR > 0) {
        if (count != MR) return qb_few_rows<D, MR - 1>(job, count, rows, panel, tile);
        qb_few_panel<D, MR>(job, rows, panel, tile);
    }
}

// Rows of T, rounded to bf16 behind each other.
template <class T>
static void qb_round_rows(const T* x, int64_t x_row, int64_t rows, int64_t k, char* to, int64_t stride) {
    for (int64_t i = 0; i < rows; i++, x += x_row, to += stride)
        for (int64_t at = 0; at < k; at += 16) qb_store(to + 2 * at, vload_upto(x + at, (int)qc_min(k - at, 16)));
}

// A `qg_load_x` that rounds.
template <class T> static void qb_load_x(
    const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst, int64_t stride) {
    const T* const x = (const T*)job->x + m0 * job->x_row + k0;
    qb_round_rows(x, job->x_row, rows, kc, (char*)dst, 4 * stride);
}

// As qg_few_task; rows of T other than bf16 are rounded first.
template <class D, class T, int MAX> static void qb_few_task(void* arg, int64_t task, char* scratch) {
    const qg_job* const job = (const qg_job*)arg;
    float* const tile = (float*)scratch;
    uint16_t* const ordered = (uint16_t*)(tile + MAX * QG_NP * 16);
    const int64_t width = (job->k + 31) / 32 * 32;
    char* const rounded = (char*)(ordered + MAX * width);
    float* const total = (float*)(rounded + (qb_same<T>::value ? 0 : 2 * MAX * width));
    for (int64_t m0 = 0; m0 < job->m; m0 += MAX) {
        const int64_t count = qc_min(job->m - m0, MAX);
        qb_rows rows = {job->x + 2 * m0 * job->x_row, 2 * job->x_row, (const char*)ordered, 2 * width, total, 0};
        if constexpr (!qb_same<T>::value) {
            qb_round_rows((const T*)job->x + m0 * job->x_row, job->x_row, count, job->k, rounded, 2 * width);
            rows.x = rounded, rows.stride = 2 * width;
        }
        if constexpr (qb_coded<D>::SUMMED) {
            typedef decltype(D::entries) W;
            const int64_t span = qb_coded<D>::span(job->k);
            rows.groups = span ? job->k / span : 0;
            for (int64_t i = 0; i < count; i++) {
                const uint16_t* const x = (const uint16_t*)(rows.x + i * rows.stride);
                if constexpr (qb_coded<D>::LOOKED_UP)
                    qb_reorder<qb_coded<D>::LOW>(x, ordered + i * width, job->k / qb_coded<D>::PER * qb_coded<D>::PER);
                if constexpr (W::OFFSET)
                    qg_add_groups((const qc_bf16*)x, span, rows.groups, total + i * rows.groups);
            }
        }
        qg_each_unit(job, task, m0, count, tile, [&](int64_t panel, int64_t end) {
            for (int64_t p = panel; p < end; p++) qb_few_rows<D, MAX>(job, count, rows, p, tile + (p - panel) * 16);
        });
    }
}
#endif

// Bytes of scratch of qb_few_task: a tile, rows in order, rounded rows, sums of groups: of 16 columns or more, or one.
constexpr int64_t qb_few_scratch(int64_t k, int64_t rows, bool rounds) {
    return rows * (64 * QG_NP + 2 * ((k + 31) / 32 * 32) * (rounds ? 2 : 1) + (k / 16 + 1) * 4);
}
