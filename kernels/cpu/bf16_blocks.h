// Products of bf16 rows with codes that share scales (qb_coded<D>::SUMMED) and with plain bf16, in blocks of up to
// eight rows by two panels. A word of x is broadcast once for both, and codes become words of two columns in registers:
//
//     tile = offsets * sums of x's columns
//     for each chunk of columns, for each block of rows, for each group of columns
//         sums of x times the values of codes, in registers        vdpbf16ps
//         tile += scale * sum                                      one FMA for 16 columns or more
//
// 16 sums hide the six cycles of a product on a Zen 5 (eight sums of one panel left a third of its rate unused). The
// first block of a task makes words of codes while it multiplies, since shifts and permutations have other pipes than
// products, and leaves them for the blocks behind it: to make them before takes as long as ten rows of products, most
// of it waiting for codes. Where a scale serves 16 columns from 24 rows on, and where it serves 32 from 48 on, each
// code is multiplied by it once for all rows: then words are elements rounded to bf16, and sums need no scale.
#pragma once
#include "gemm_bf16.h"

enum {
    QB_LEAST = 4,   // rows from which blocks pay for most codes in one plane; fewer are gemm_bf16.h's
    QB_HIGH = 8,    // most rows of a block
    QB_MOST = 128,  // most rows of a task
    QB_PANELS_FROM = 65,  // rows for which panels of decoded elements pay, where blocks do not serve any number
    QB_TASK_BYTES = 3 << 19,  // of its rows in order, 128 of 5632 columns; half of that took 1.04 of the time there
    QB_CHUNK = 512,  // columns for which blocks take turns: words of two panels take 32 KiB, two thirds of a Zen 5's L1
};

// Numbers from a row in order to the next: an odd number of cache lines, since rows a power of two apart would all fall
// into one set of the L1.
constexpr int64_t qb_apart(int64_t k) { return ((k + 31) / 32 * 32) | 32; }
constexpr int64_t qb_rows_of_task(int64_t k) {
    const int64_t fit = QB_TASK_BYTES / (2 * qb_apart(k)) / QB_HIGH * QB_HIGH;
    return fit < QB_HIGH ? (int64_t)QB_HIGH : fit < QB_MOST ? fit : (int64_t)QB_MOST;
}
// Bytes of scratch of qb_block_task for up to `most` rows: words, a tile, scales and offsets of groups of 16 columns or
// more, sums of groups, rows in order, rounded rows. A block may be higher than what is left.
constexpr int64_t qb_block_scratch(int64_t k, int64_t most, bool rounds) {
    const int64_t rows = (most < qb_rows_of_task(k) ? most : qb_rows_of_task(k)) + QB_HIGH;
    return QB_CHUNK * 64 + rows * (64 * QG_NP + 2 * qb_apart(k) * (rounds ? 2 : 1) + (k / 16 + 1) * 4) +
           (k / 16 + 1) * 256;
}

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
enum qb_source {
    QB_ANEW,    // each block makes them
    QB_FIRST,   // the first block of rows makes them, others find them in memory
    QB_BEFORE,  // they are made before, of codes whose decoding takes too many registers beside products
};
// WORDS: how blocks come by their words. LEAST: from so many rows on, D's products are made in blocks (0: never), and
// up to MOST; for more, panels of decoded elements are faster. ELEMENTS: from MANY rows on elements are multiplied.
struct qb_policy_defaults {
    static constexpr qb_source WORDS = QB_ANEW;
    static constexpr int LEAST = 0;
    static constexpr bool ELEMENTS = false;
    static constexpr int64_t MANY = INT64_MAX, MOST = QB_PANELS_FROM - 1;
};
template <class D> struct qb_block_policy : qb_policy_defaults {};

template <class W> struct qb_block_policy<qg_coded<W>> : qb_policy_defaults {
    typedef qb_coded<qg_coded<W>> P;
    static constexpr bool FLOAT = qg_mantissa<qg_coded<W>> != 0;
    static constexpr bool ONE_PLANE = W::BITS == 8 || (P::LOOKED_UP && P::MIDDLE == 0);
    static constexpr qb_source WORDS = qg_codes_of<W>::PLANES ? QB_FIRST : QB_BEFORE;
    static constexpr int LEAST = !P::SUMMED ? 0 : FLOAT ? 2 : ONE_PLANE ? (int)QB_LEAST : QB_HIGH + 1;
    static constexpr bool ELEMENTS = WORDS == QB_FIRST && W::COVERS != 0 && W::COVERS <= 32;
    static constexpr int64_t MANY = W::COVERS * 3 / 2;
    static constexpr int64_t MOST = LEAST == 0 ? (int64_t)QB_PANELS_FROM - 1 : INT64_MAX;
};

// Plain bf16 panels, as codes of 16 bits with a scale of 1.
struct qb_plain : qg_plain<qc_bf16> {
    struct unscaled {
        static constexpr int BITS = 16, GROUP = 8, COVERS = 0;
        static constexpr bool OFFSET = false;
        static QG_METHOD void ask(const qg_packed&, int64_t, int64_t) {}
        QG_METHOD void load(const qg_packed&, int64_t, int64_t) {}
        QG_METHOD vf scale() const { return vset(1.0f); }
    } entries;
};
template <> struct qb_coded<qb_plain> {
    static constexpr bool SUMMED = true, LOOKED_UP = false;
    static QG_METHOD int64_t span(int64_t k) { return k / 8 * 8; }
};
template <> struct qb_block_policy<qb_plain> : qb_policy_defaults {
    static constexpr int LEAST = QB_LEAST;
    static constexpr int64_t MOST = INT64_MAX;
};
template <> struct qb_block_policy<qg_plain<qc_bf16>> : qb_block_policy<qb_plain> {};

// The decoder whose products are made in blocks, and whether the processor has its instructions: AVX512-BF16, and for
// 8-bit floats AVX-512 VBMI, which all but the first processors with AVX512-BF16 have (Cooper Lake).
template <class D> struct qb_block_decoder {
    typedef D type;
    static bool runs() { return __builtin_cpu_supports("avx512bf16"); }
};
template <> struct qb_block_decoder<qg_plain<qc_bf16>> : qb_block_decoder<qb_plain> {};
template <class W> struct qb_block_decoder<qg_coded<W>> {
    typedef qg_coded<W> D;
    static constexpr bool BY_BYTES = qb_coded<D>::SUMMED && qb_block_policy<D>::FLOAT;
    typedef std::conditional_t<BY_BYTES, typename qg_faster_of<D>::type, D> type;
    static bool runs() {
        if constexpr (BY_BYTES)
            if (!qg_faster_of<D>::runs()) return false;
        return __builtin_cpu_supports("avx512bf16");
    }
};

// --- codes as words --------------------------------------------------------------------------------------------------

// A walk over a panel: `at` moves to COLUMNS columns, of which word<J>() has two. Rows of x are in the same order.
template <class D, bool = qb_coded<D>::LOOKED_UP, int = qg_mantissa<D>> struct qb_walk {
    typedef decltype(D::entries) W;
    typedef qb_coded<D> P;
    typedef qb_table<W> table;
    static constexpr int COLUMNS = P::PER;
    static constexpr int64_t LINE = 64;  // bytes of codes of one step
    qb_words<W> words;
    QG_METHOD void start(const qg_job* job, int64_t panel, int64_t k) {
        words.start(job->packed, panel);
        words.words += k / COLUMNS * 16;
    }
    QG_METHOD void at(int64_t k, int64_t ahead, const table&) { words.at(k, ahead); }
    template <int J> QG_METHOD qu word(const table& values) const { return values.look(words.pair(J)); }
};
template <class D> struct qb_walk<D, false, 0> {
    typedef decltype(D::entries) W;
    struct table { QG_METHOD void load() {} };
    static constexpr int COLUMNS = W::GROUP;
    static constexpr int64_t LINE = 16 * W::GROUP;
    D decoder;
    QG_METHOD void start(const qg_job* job, int64_t panel, int64_t) { decoder.start(job, panel); }
    QG_METHOD void at(int64_t k, int64_t, const table&) { decoder.codes_at(k); }
    template <int J> QG_METHOD qu word(const table&) const { return qb_columns_of_codes<2 * J>(decoder); }
};

// 8-bit floats: both bytes of the bf16 of four columns are looked up at once.
template <class D, int MANTISSA> struct qb_walk<D, false, MANTISSA> {
    typedef qg_float_table<MANTISSA> bytes;
    struct table : bytes {
        __m512i pair[2];
        QG_METHOD void load() {
            bytes::load();
            QG_UNROLL for (int i = 0; i < 2; i++) pair[i] = _mm512_load_si512(qg_places_of_bytes.pair[i]);
        }
    };
    static constexpr int COLUMNS = 4;
    static constexpr int64_t LINE = 64;
    const char* codes;
    __m512i second, first;
    QG_METHOD void start(const qg_job* job, int64_t panel, int64_t k) {
        codes = job->packed.part[0] + (panel * qg_up(job->k, COLUMNS) + k / COLUMNS) * LINE;
    }
    QG_METHOD void at(int64_t, int64_t ahead, const table& values) {
        __builtin_prefetch(codes + ahead);
        const __m512i code = _mm512_loadu_si512(codes);
        second = values.second(code), first = values.first(code);
        codes += LINE;
    }
    template <int J> QG_METHOD qu word(const table& values) const {
        __m512i both = second;
        asm("vpermt2b %2, %1, %0" : "+v"(both) : "v"(values.pair[J]), "v"(first));
        return (qu)both;
    }
};

template <> struct qb_walk<qb_plain, false, 0> {
    struct table { QG_METHOD void load() {} };
    static constexpr int COLUMNS = 8;
    static constexpr int64_t LINE = 256;
    const char* numbers;
    QG_METHOD void start(const qg_job* job, int64_t panel, int64_t k) {
        numbers = job->codes + 32 * (panel * job->k + k) - LINE;
    }
    QG_METHOD void at(int64_t, int64_t ahead, const table&) {
        numbers += LINE;
        QG_UNROLL for (int line = 0; line < LINE; line += 64) __builtin_prefetch(numbers + ahead + line, 0, 2);
    }
    template <int J> QG_METHOD qu word(const table&) const {
        return qb_permute(qb_side_by_side, _mm512_loadu_si512(numbers + 64 * J));
    }
};

// The same over elements, which are rounded to bf16.
template <class D> struct qb_element_walk {
    struct table { QG_METHOD void load() {} };
    static constexpr int COLUMNS = D::GROUP;
    static constexpr int64_t LINE = 64;
    D decoder;
    QG_METHOD void start(const qg_job* job, int64_t panel, int64_t) { decoder.start(job, panel); }
    QG_METHOD void at(int64_t k, int64_t, const table&) {
        decoder.ask(decoder.panel + QG_NP, k);
        decoder.look_ahead(k, QG_NP);
        decoder.at(k);
    }
    template <int J> QG_METHOD qu word(const table&) const {
        // From a column to the other one of its word.
        constexpr int HALF = qb_coded<D>::LOOKED_UP ? qb_coded<D>::HALF : 1;
        constexpr int FIRST = J / HALF * 2 * HALF + J % HALF;
        return qb_pairs(decoder.template value<FIRST>(), decoder.template value<FIRST + HALF>());
    }
};

// What a unit of two panels has for all blocks of rows: its scales, [group][panel][16], and offsets likewise.
struct qb_unit {
    const qg_job* job;
    int64_t panel, next;  // `next` repeats the only panel of a short unit
    float* scale;
    float* offset;
    uint32_t* words;  // of the chunk at hand, that one block leaves for the others: [two columns][panel][16]
};

template <class D> static void qb_prepare(const qb_unit& unit) {
    typedef decltype(D::entries) W;
    const int64_t k = unit.job->k, span = qb_coded<D>::span(k);
    W entries[2];
    float *scale = unit.scale, *offset = unit.offset;
    for (int64_t at = 0; span > 0 && at + span <= k; at += span)
        QG_UNROLL for (int p = 0; p < 2; p++, scale += 16, offset += 16) {
            entries[p].load(unit.job->packed, p ? unit.next : unit.panel, at);
            vstore(scale, entries[p].scale());
            if constexpr (W::OFFSET) vstore(offset, entries[p].offset());
        }
}

// --- a block ---------------------------------------------------------------------------------------------------------

// tile[i][p] = the sums of MR rows' columns times the offsets, or zeros.
template <class D, int MR> static void qb_begin(const qb_unit& unit, const qb_rows& rows, float* tile) {
    qf sum[MR][2] = {};
    if constexpr (decltype(D::entries)::OFFSET)
        for (int64_t g = 0; g < rows.groups; g++) {
            const qf first = q_load(unit.offset + 32 * g), second = q_load(unit.offset + 32 * g + 16);
            QG_UNROLL for (int i = 0; i < MR; i++) {
                const qf total = q_set(rows.total[i * rows.groups + g]);
                sum[i][0] = q_fma(total, first, sum[i][0]), sum[i][1] = q_fma(total, second, sum[i][1]);
            }
        }
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int p = 0; p < 2; p++) q_store(tile + (i * QG_NP + p) * 16, sum[i][p]);
}

// What a block's loops have in registers: its sums, and pointers to every third row of x in order.
template <int MR, int SUMS> struct qb_block_sums {
    static constexpr int THIRDS = (MR + 2) / 3;
    const char* row[THIRDS];
    int64_t stride;
    qf part[MR][2][SUMS];

    QG_METHOD void start(const qb_rows& rows, int64_t k0) {
        stride = rows.ordered_stride;
        QG_UNROLL for (int t = 0; t < THIRDS; t++) {
            row[t] = rows.ordered + 3 * t * stride + 2 * k0;
            asm("" : "+r"(row[t]));  // a register of its own
        }
    }
    QG_METHOD void clear() {
        QG_UNROLL for (int i = 0; i < MR; i++)
            QG_UNROLL for (int p = 0; p < 2; p++)
                QG_UNROLL for (int s = 0; s < SUMS; s++) part[i][p][s] = (qf){};
    }
    QG_METHOD void advance(int columns) {
        QG_UNROLL for (int t = 0; t < THIRDS; t++) {
            row[t] += 2 * columns;
            asm("" : "+r"(row[t]));
        }
    }
    // Columns 2 j and 2 j + 1 from here: MR rows of x times a word of each panel. A word of x is broadcast once for
    // both panels, or with FROM_MEMORY read by each product.
    template <bool FROM_MEMORY> QG_METHOD void step(int j, qu first, qu second) {
        QG_UNROLL for (int i = 0; i < MR; i++) {
            const char* const at = row[i / 3] + i % 3 * stride + 4 * j;
            qf &to = part[i][0][j % SUMS], &other = part[i][1][j % SUMS];
            if constexpr (FROM_MEMORY) {
                qb_dot(to, first, (const qb_word*)at), qb_dot(other, second, (const qb_word*)at);
            } else {
                const qu x = qb_broadcast(at);
                qb_dot(to, first, x), qb_dot(other, second, x);
            }
        }
    }
    // tile += scale * sums
    QG_METHOD void add_to(float* tile, const float* scale) const {
        QG_UNROLL for (int p = 0; p < 2; p++) {
            const qf factor = q_load(scale + 16 * p);
            QG_UNROLL for (int i = 0; i < MR; i++) {
                float* const to = tile + (i * QG_NP + p) * 16;
                q_store(to, q_fma(qb_sum<SUMS>(part[i][p]), factor, q_load(to)));
            }
        }
    }
};

// The scales of column k and those behind it, `qb_apart_scales` floats apart. Elements have theirs in them.
alignas(64) static const float qb_ones[32] = {
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
};
template <bool ELEMENTS> QC_INLINE const float* qb_scales(const qb_unit& unit, int64_t span, int64_t k) {
    return ELEMENTS ? qb_ones : unit.scale + k / span * 32;
}
template <bool ELEMENTS> static constexpr int64_t qb_apart_scales = ELEMENTS ? 0 : 32;

// Columns of which sums are added to the tile at once: those of a scale, or a part of them.
template <bool ELEMENTS> QC_INLINE int64_t qb_piece(int64_t span) {
    return ELEMENTS ? (int64_t)QB_CHUNK : qc_min(span, QB_CHUNK);
}

template <class Walk, int MR, int SUMS, bool STORES, bool FROM_MEMORY> struct qb_walk_step {
    const Walk (&walk)[2];
    const typename Walk::table& table;
    qb_block_sums<MR, SUMS>& sums;
    uint32_t* to;
    template <int J> QG_METHOD void step() {
        const qu first = walk[0].template word<J>(table), second = walk[1].template word<J>(table);
        if (STORES) q_store((int32_t*)to + 32 * J, (qi)first), q_store((int32_t*)to + 32 * J + 16, (qi)second);
        sums.template step<FROM_MEMORY>(J, first, second);
    }
};

// Columns [k0, k1), of whole scales but where these cover more than a chunk: MR rows times both panels, whose words
// this block makes, and STORES for others perhaps. `far`: 0 for the first block of rows, which asks for codes shortly
// before it comes to them, and for the next unit's scales. Others have their codes in a cache, and ask for those that
// are so many bytes behind them.
template <class D, int MR, bool STORES, bool ELEMENTS, bool FROM_MEMORY> QC_COLD void qb_block(
    const qb_unit& unit, const qb_rows& rows, int64_t far, int64_t k0, int64_t k1, float* tile) {
    typedef std::conditional_t<ELEMENTS, qb_element_walk<D>, qb_walk<D>> walk_of;
    constexpr int SUMS = MR <= 4 ? 2 : 1;
    const qg_job* const job = unit.job;
    const int64_t span = qb_coded<D>::span(job->k), piece = qb_piece<ELEMENTS>(span);
    // Behind a panel's codes lie those of the other one, and then those of this one's successor, which are next.
    const int64_t bytes = qg_up(job->k, walk_of::COLUMNS) * walk_of::LINE;
    const int64_t last = job->k - QG_AHEAD / walk_of::LINE * walk_of::COLUMNS;
    typename walk_of::table table;
    walk_of walk[2];
    table.load(), walk[0].start(job, unit.panel, k0), walk[1].start(job, unit.next, k0);
    uint32_t* word = unit.words;
    qb_block_sums<MR, SUMS> sums;
    sums.start(rows, k0);
    // One pointer for each thing: registers are scarce here.
    const float* scale = qb_scales<ELEMENTS>(unit, span, k0);
    // A scale each; a longer one has one piece.
    for (int64_t k = k0; k < k1; k += piece, scale += qb_apart_scales<ELEMENTS>) {
        if (far == 0 && !ELEMENTS) {
            decltype(D::entries)::ask(job->packed, unit.next + 1, k);
            decltype(D::entries)::ask(job->packed, unit.next + 2, k);
        }
        sums.clear();
        const int64_t end = qc_min(k + piece, k1);
        for (int64_t at = k; at < end; at += walk_of::COLUMNS, word += 16 * walk_of::COLUMNS) {
            const int64_t ahead = far ? far : QG_AHEAD + (at >= last ? bytes : 0);
            QG_UNROLL for (int p = 0; p < 2; p++) walk[p].at(at, ahead, table);
            qb_walk_step<walk_of, MR, SUMS, STORES, FROM_MEMORY> body{walk, table, sums, word};
            qg_steps<0, walk_of::COLUMNS / 2>(body, walk_of::COLUMNS / 2);
            sums.advance(walk_of::COLUMNS);
        }
        sums.add_to(tile, scale);
    }
}

// The same with words that another block has left, whatever they are of: for each `piece` of columns there is a scale,
// `apart` floats from the next one. Each result has one sum, as the first block's, so that equal rows give equal bits.
template <int MR, bool FROM_MEMORY> QC_COLD void qb_block_of_words(
    const uint32_t* words, const qb_rows& rows, const float* scale, int64_t apart, int64_t piece, int64_t k0,
    int64_t k1, float* tile) {
    const int32_t* word = (const int32_t*)words;
    qb_block_sums<MR, 1> sums;
    sums.start(rows, k0);
    for (int64_t k = k0; k < k1; k += piece, scale += apart) {
        sums.clear();
        for (const int32_t* const stop = word + 16 * (qc_min(k + piece, k1) - k); word != stop; word += 64) {
            sums.template step<FROM_MEMORY>(0, (qu)q_load(word), (qu)q_load(word + 16));
            sums.template step<FROM_MEMORY>(1, (qu)q_load(word + 32), (qu)q_load(word + 48));
            sums.advance(4);
        }
        sums.add_to(tile, scale);
    }
}

// `count` rows, at most QB_HIGH, by the smallest block that takes them; rows behind them hold anything, and their sums
// are not read.
template <class D, bool STORES, bool ELEMENTS, bool FROM_MEMORY> QC_INLINE void qb_block_rows(
    int64_t count, const qb_unit& unit, const qb_rows& rows, int64_t far, int64_t k0, int64_t k1, float* tile) {
    if constexpr (!STORES) {  // else other blocks follow
        if (count <= 4) return qb_block<D, 4, STORES, ELEMENTS, FROM_MEMORY>(unit, rows, far, k0, k1, tile);
        if (count <= 6) return qb_block<D, 6, STORES, ELEMENTS, FROM_MEMORY>(unit, rows, far, k0, k1, tile);
    }
    qb_block<D, 8, STORES, ELEMENTS, FROM_MEMORY>(unit, rows, far, k0, k1, tile);
}
template <bool FROM_MEMORY> static void qb_rows_of_words(
    int64_t count, const uint32_t* words, const qb_rows& rows, const float* scale, int64_t apart, int64_t piece,
    int64_t k0, int64_t k1, float* tile) {
    const auto block = count <= 2   ? qb_block_of_words<2, FROM_MEMORY>
                       : count <= 4 ? qb_block_of_words<4, FROM_MEMORY>
                       : count <= 6 ? qb_block_of_words<6, FROM_MEMORY>
                                    : qb_block_of_words<8, FROM_MEMORY>;
    block(words, rows, scale, apart, piece, k0, k1, tile);
}

template <class Walk> struct qb_make_step {
    const Walk (&walk)[2];
    const typename Walk::table& table;
    uint32_t* to;
    template <int J> QG_METHOD void step() {
        q_store((int32_t*)to + 32 * J, (qi)walk[0].template word<J>(table));
        q_store((int32_t*)to + 32 * J + 16, (qi)walk[1].template word<J>(table));
    }
};
// The words of columns [k, end) of both panels, which `walk` has come to.
template <class Walk> static void qb_make(
    Walk (&walk)[2], const typename Walk::table& table, int64_t k, int64_t end, uint32_t* to) {
    for (; k < end; k += Walk::COLUMNS, to += 16 * Walk::COLUMNS) {
        walk[0].at(k, QG_AHEAD, table), walk[1].at(k, QG_AHEAD, table);
        qb_make_step<Walk> body{walk, table, to};
        qg_steps<0, Walk::COLUMNS / 2>(body, Walk::COLUMNS / 2);
    }
}

// Columns behind the last whole scale; and all columns where a sum of codes is no number, as in qg_few_panels.
template <class D> static void qb_rest(const qb_unit& unit, int64_t count, const qb_rows& rows, float* tile) {
    const int64_t whole = qb_coded<D>::span(unit.job->k) * rows.groups;
    qf nothing = {};  // zeros, unless a sum is no number
    for (int64_t i = 0; i < count * QG_NP * 16; i += 16) nothing = nothing + (q_load(tile + i) - q_load(tile + i));
    if (whole == unit.job->k && vsum(vf{{nothing}}) == 0.0f) return;
    for (int64_t i = 0; i < count; i++) {
        const qb_rows row = {rows.x + i * rows.stride, rows.stride, nullptr, 0, nullptr, 0};
        for (int64_t p = unit.panel; p <= unit.next; p++) {
            float* const to = tile + (i * QG_NP + p - unit.panel) * 16;
            qf sum[1][1] = {{q_load(to)}};
            if (whole < unit.job->k) qb_by_elements<D, 1, 1>(unit.job, row, p, whole, sum);
            if (vsum(vf{{sum[0][0] - sum[0][0]}}) != 0.0f) {
                sum[0][0] = (qf){};
                qb_by_elements<D, 1, 1>(unit.job, row, p, 0, sum);
            }
            q_store(to, sum[0][0]);
        }
    }
}

// --- the work --------------------------------------------------------------------------------------------------------

// Rows from number `i` on.
QC_INLINE qb_rows qb_rows_from(const qb_rows& rows, int64_t i) {
    qb_rows own = rows;
    own.x += i * rows.stride, own.ordered += i * rows.ordered_stride, own.total += i * rows.groups;
    return own;
}

// Bytes from the codes of columns [k, end) of a panel to those of the next chunk: of this panel, or of the next unit.
template <class D> QC_INLINE int64_t qb_to_next_chunk(int64_t columns, int64_t k, int64_t end, int64_t whole) {
    typedef qb_walk<D> walk;
    const int64_t to = end < whole ? end : QG_NP * qg_up(columns, walk::COLUMNS) * walk::COLUMNS;
    return (to - k) / walk::COLUMNS * walk::LINE;
}

// Rows [m0, m0 + count) of the result times one unit, in blocks of QB_HIGH rows and a last one of those that are left.
// BOTH_READS: blocks that make words are compiled in both forms, which takes long, and is worth it where there is only
// one block.
template <class D, qb_source WORDS, bool ELEMENTS, bool BOTH_READS> static void qb_multiply(
    const qb_unit& unit, const qb_rows& rows, int64_t m0, int64_t count, float* tile) {
    typedef decltype(D::entries) W;
    static_assert(W::COVERS % 16 == 0, "whole steps");
    static_assert(W::COVERS <= QB_CHUNK || W::COVERS % QB_CHUNK == 0, "a piece has one scale");
    const qg_job* const job = unit.job;
    const int64_t span = qb_coded<D>::span(job->k), whole = span * rows.groups;
    const auto each = [&](auto f) __attribute__((always_inline)) {
        for (int64_t i = 0; i < count; i += QB_HIGH)
            f(i, qc_min(count - i, QB_HIGH), qb_rows_from(rows, i), tile + i * QG_NP * 16);
    };
    if constexpr (ELEMENTS) {
        memset(tile, 0, sizeof(float) * (size_t)(qg_up(count, QB_HIGH) * QB_HIGH * QG_NP * 16));
    } else {
        qb_prepare<D>(unit);
        each([&](int64_t, int64_t, const qb_rows& own, float* to) { qb_begin<D, QB_HIGH>(unit, own, to); });
    }
    [[maybe_unused]] qb_walk<D> walk[2];
    [[maybe_unused]] typename qb_walk<D>::table table;
    if constexpr (WORDS == QB_BEFORE) table.load(), walk[0].start(job, unit.panel, 0), walk[1].start(job, unit.next, 0);
    [[maybe_unused]] const bool from_memory = !qg_broadcasts();
    const int64_t chunk = span > 0 && span < QB_CHUNK ? QB_CHUNK / span * span : (int64_t)QB_CHUNK;
    for (int64_t k = 0; k < whole; k += chunk) {
        const int64_t end = qc_min(k + chunk, whole);
        if constexpr (WORDS == QB_BEFORE) qb_make(walk, table, k, end, unit.words);
        each([&](int64_t i, int64_t high, const qb_rows& own, float* to) {
            if (end == whole) qg_ask_for_targets(job, unit.panel, unit.next + 1 - unit.panel, m0 + i, high);
            if constexpr (WORDS != QB_BEFORE)
                if (WORDS == QB_ANEW || i == 0) {
                    const int64_t far = i == QB_HIGH ? qb_to_next_chunk<D>(job->k, k, end, whole) : i;
                    if (BOTH_READS && from_memory)
                        return qb_block_rows<D, WORDS == QB_FIRST, ELEMENTS, BOTH_READS>(
                            high, unit, own, far, k, end, to);
                    return qb_block_rows<D, WORDS == QB_FIRST, ELEMENTS, false>(high, unit, own, far, k, end, to);
                }
            if constexpr (WORDS != QB_ANEW) {
                const auto multiply = from_memory ? qb_rows_of_words<true> : qb_rows_of_words<false>;
                multiply(
                    high, unit.words, own, qb_scales<ELEMENTS>(unit, span, k), qb_apart_scales<ELEMENTS>,
                    qb_piece<ELEMENTS>(span), k, end, to);
            }
        });
    }
    each([&](int64_t i, int64_t high, const qb_rows& own, float* to) {
        const int64_t n0 = unit.panel * 16, columns = qc_min(job->n - n0, (unit.next + 1 - unit.panel) * 16);
        qb_rest<D>(unit, high, own, to);
        job->finish(job, to, QG_NP * 16, m0 + i, high, n0, columns);
    });
}

struct qb_call {
    const qg_job* job;
    int64_t chunks, groups;  // of rows, and of units of two panels: task = chunk * groups + group
};

// totals[g] = the sum of columns [g * span, (g + 1) * span) of x; `span` is a multiple of 16.
static void qb_add_groups(const uint16_t* x, int64_t span, int64_t groups, float* totals) {
    const qu ones = (qu)q_seti(0x3f803f80);
    const auto sum = [&](const uint16_t* from) QC_BODY {
        qf total = {};
        int64_t k = 0;
        for (; k + 32 <= span; k += 32) qb_dot(total, (qu)_mm512_loadu_si512(from + k), ones);
        if (k < span) qb_dot(total, (qu)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(from + k))), ones);
        return total;
    };
    int64_t g = 0;
    for (; g + 16 <= groups; g += 16) {
        alignas(64) float sums[16][16], turned[16][16];
        for (int i = 0; i < 16; i++) q_store(sums[i], sum(x + (g + i) * span));
        vtranspose(sums[0], 16, turned[0], 16);
        qf total[4] = {};
        QG_UNROLL for (int i = 0; i < 16; i++) total[i % 4] = total[i % 4] + q_load(turned[i]);
        q_store(totals + g, qb_sum<4>(total));
    }
    for (; g < groups; g++) totals[g] = vsum(vf{{sum(x + g * span)}});
}

// Whether elements are multiplied. ROWS: most rows of a task, where they are known to be few.
template <class D, int64_t ROWS> QC_INLINE bool qb_takes_elements(const qg_job* job) {
    return qb_block_policy<D>::ELEMENTS && ROWS > QB_HIGH && job->m >= qb_block_policy<D>::MANY;
}

// What a task of `count` rows has in scratch (qb_block_scratch).
struct qb_block_room {
    uint32_t* words;
    float *tile, *scale, *offset, *total;
    uint16_t *ordered, *rounded;  // `rounded`: behind rows in order of codes that are looked up

    qb_block_room(char* scratch, int64_t k, int64_t count) {
        const int64_t room = count + QB_HIGH, of_groups = k / 16 + 1;
        words = (uint32_t*)scratch;
        tile = (float*)(words + QB_CHUNK * 16);
        scale = tile + room * QG_NP * 16;
        offset = scale + of_groups * 32;
        total = offset + of_groups * 32;
        ordered = (uint16_t*)(total + room * of_groups);
        rounded = ordered + room * qb_apart(k);
    }
};

// `rows.x` in order, and if `summed` the sums of its columns. Elements have no use for these: their offsets are in
// them. COPIES: where codes are not looked up, rows in order are copies; else `rows.x` is in order already.
template <class D, bool COPIES> static void qb_order_rows(
    const qb_rows& rows, int64_t k, int64_t count, bool summed, const qb_block_room& room) {
    typedef decltype(D::entries) W;
    [[maybe_unused]] const int64_t span = qb_coded<D>::span(k), stride = qb_apart(k);
    for (int64_t i = 0; i < count; i++) {
        const uint16_t* const x = (const uint16_t*)(rows.x + i * rows.stride);
        if constexpr (qb_coded<D>::LOOKED_UP)
            qb_reorder<qb_coded<D>::LOW>(x, room.ordered + i * stride, k / qb_coded<D>::PER * qb_coded<D>::PER);
        else if constexpr (COPIES) memcpy(room.ordered + i * stride, x, 2 * k);
        if constexpr (W::OFFSET && W::COVERS != 0) {
            if (summed) qb_add_groups(x, span, rows.groups, room.total + i * rows.groups);
        } else if constexpr (W::OFFSET) {
            qg_add_groups((const qc_bf16*)x, span, rows.groups, room.total + i * rows.groups);
        }
    }
}

// Where rows of bf16 numbers for codes of D are made in `room`.
template <class D> QC_INLINE qb_rows qb_rows_in(const qb_block_room& room, int64_t k) {
    const int64_t span = qb_coded<D>::span(k), stride = 2 * qb_apart(k);
    const uint16_t* const x = qb_coded<D>::LOOKED_UP ? room.rounded : room.ordered;
    return {(const char*)x, stride, (const char*)room.ordered, stride, room.total, span > 0 ? k / span : 0};
}

// Rows [m0, m0 + count) of T, in order.
template <class D, class T> static qb_rows qb_load_rows(
    const qg_job* job, int64_t m0, int64_t count, bool summed, const qb_block_room& room) {
    qb_rows rows = qb_rows_in<D>(room, job->k);
    if constexpr (qb_same<T>::value) rows.x = job->x + 2 * m0 * job->x_row, rows.stride = 2 * job->x_row;
    else qb_round_rows((const T*)job->x + m0 * job->x_row, job->x_row, count, job->k, (char*)rows.x, rows.stride);
    qb_order_rows<D, qb_same<T>::value>(rows, job->k, count, summed, room);
    return rows;
}

// Rows [m0, m0 + count) of the result times panels [p0, p1).
template <class D, int64_t ROWS> static void qb_block_panels(
    const qg_job* job, const qb_block_room& room, const qb_rows& rows, bool elements, int64_t m0, int64_t count,
    int64_t p0, int64_t p1) {
    typedef qb_block_policy<D> policy;
    for (int64_t panel = p0; panel < p1; panel += QG_NP) {
        const qb_unit unit = {job, panel, qc_min(panel + QG_NP, p1) - 1, room.scale, room.offset, room.words};
        if constexpr (policy::ELEMENTS && ROWS > QB_HIGH)
            if (elements) {
                qb_multiply<D, policy::WORDS, true, false>(unit, rows, m0, count, room.tile);
                continue;
            }
        if constexpr (policy::WORDS == QB_FIRST && policy::LEAST <= QB_HIGH)
            if (ROWS <= QB_HIGH || count <= QB_HIGH) {  // one block
                qb_multiply<D, QB_ANEW, false, ROWS <= QB_HIGH>(unit, rows, m0, count, room.tile);
                continue;
            }
        if constexpr (policy::WORDS != QB_FIRST || ROWS > QB_HIGH)
            qb_multiply<D, policy::WORDS, false, false>(unit, rows, m0, count, room.tile);
    }
}

template <class D, class T, int64_t ROWS> static void qb_block_task(void* arg, int64_t task, char* scratch) {
    const qb_call* const call = (const qb_call*)arg;
    const qg_job* const job = call->job;
    const int64_t chunk = task / call->groups, group = task % call->groups;
    const int64_t m0 = qc_share(job->m, chunk, call->chunks), count = qc_share(job->m, chunk + 1, call->chunks) - m0;
    const qb_block_room room(scratch, job->k, count);
    const bool elements = qb_takes_elements<D, ROWS>(job);
    const qb_rows rows = qb_load_rows<D, T>(job, m0, count, !elements, room);
    const int64_t panels = (job->n + 15) / 16, units = qg_up(panels, QG_NP);
    const int64_t p0 = qc_share(units, group, call->groups) * QG_NP;
    const int64_t p1 = qc_min(qc_share(units, group + 1, call->groups) * QG_NP, panels);
    qb_block_panels<D, ROWS>(job, room, rows, elements, m0, count, p0, p1);
}

// As many rows of T as the policy takes, or more. There is scratch for ROWS of them at a time.
template <class D, class T, int64_t ROWS> static void qb_run_blocks(qc_ctx* ctx, qg_job* job) {
    const int64_t panels = (job->n + 15) / 16, units = qg_up(panels, QG_NP), threads = ctx->num_threads;
    const int64_t worth = panels * job->k * (job->m + 3) / 3 / QG_TASK;
    qb_call call = {job, qg_up(job->m, qc_min(ROWS, qb_rows_of_task(job->k))), 1};
    // Each task puts its rows of x in order itself, so there are about two for a thread, or three that are shorter
    // where there are several chunks of rows; and as many for each of them where one chunk allows it.
    const int64_t useful = threads > 1 ? qc_min(worth, (call.chunks > 1 ? 3 : 2) * threads) : 1;
    const int64_t wanted = useful > threads ? useful / threads * threads : useful;
    call.groups = qc_max(1, qc_min(units, qg_up(wanted, call.chunks)));
    const int64_t tasks = call.chunks * call.groups;
    if (tasks > 1 && threads > 1) return ctx->parallel(ctx, tasks, qb_block_task<D, T, ROWS>, &call);
    for (int64_t task = 0; task < tasks; task++) qb_block_task<D, T, ROWS>(&call, task, ctx->scratch);
}
#endif
